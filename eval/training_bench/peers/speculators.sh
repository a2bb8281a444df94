# The `speculators` trainer in a virtual environment (1.5 GB):  sh eval/training_bench/peers/speculators.sh .engines/speculators
# Two packages without what they demand (vLLM's clients, CUDA), and then what their training code imports.
set -e
echo "installing speculators into $1: 1.5 GB, about two minutes"
"${PYTHON:-python3}" -m venv "$1"
"$1/bin/pip" install --quiet torch==2.13.0 transformers==5.19.0 safetensors datasets openai httpx loguru psutil \
    pydantic pydantic-settings rich typer numpy tqdm
"$1/bin/pip" install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0
"$1/bin/python" -c 'from speculators.models.eagle3.core import Eagle3DraftModel; from speculators.train.data import CollateFn'

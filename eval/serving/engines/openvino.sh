# OpenVINO GenAI and its converter in a virtual environment (1.6 GB):  sh eval/serving/engines/openvino.sh .engines/openvino
set -e
echo "installing openvino into $1: 1.6 GB, about three minutes"
"${PYTHON:-python3}" -m venv "$1"
"$1/bin/pip" install --quiet openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 optimum-intel==2.2.0 \
    torch==2.13.0 'diffusers<0.38' einops
# A build for another torch, that crashes when transformers imports it; no text model needs it.
"$1/bin/pip" uninstall --quiet --yes torchvision

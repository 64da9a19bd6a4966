#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test that needs no GPU.
#
#   tests/run.sh                 everything (preset cpu; with nvcc the CUDA code is compiled too)
#   tests/run.sh -R tokenizer    arguments go to ctest
#   PRESET=asan tests/run.sh     another preset
#
# The default model (98 MB) is fetched once into .cache/models, unless STILLHOUSE_MODEL names it.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${PRESET:-cpu}
jobs=${JOBS:-$(nproc)}

tests/install_packages.sh
if [ -z "${STILLHOUSE_MODEL:-}" ]; then
  deploy/get_model.sh
  export STILLHOUSE_MODEL=$PWD/.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
fi
# Objects are found again from any checkout folder.
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_MAXSIZE=${CCACHE_MAXSIZE:-4G}

if [ ! -d .venv ]; then python3 -m venv .venv; fi
.venv/bin/python -c 'import grpc, google.protobuf, safetensors' 2>/dev/null ||
  .venv/bin/pip install -q -r tests/requirements.txt

# A test that no target lists would never run.
for file in $(find tests -name '*_test.cc' -o -name '*_fuzz.cc' -o -name '*_bench.cc'); do
  folder=$(dirname "$file")
  grep -qs "$(basename "$file" .cc)" "$folder/CMakeLists.txt" "$folder/../CMakeLists.txt" || {
    echo "$file is in no CMakeLists.txt: list it in $folder" >&2
    exit 1
  }
done

cmake --preset "$preset" >/dev/null
cmake --build --preset "$preset" -j "$jobs"

nvcc=$(command -v nvcc || true)
[ -n "$nvcc" ] || { [ -x /usr/local/cuda/bin/nvcc ] && nvcc=/usr/local/cuda/bin/nvcc; }
if [ "$preset" = cpu ] && [ -n "$nvcc" ]; then
  # Compiled and linked on every run; it runs where there is a GPU.
  CUDACXX=$nvcc cmake --preset cuda -DSTILLHOUSE_TESTS=OFF >/dev/null
  cmake --build --preset cuda -j "$jobs"
fi

# Two model-sized tests at once would share two cores: each is threaded already.
STILLHOUSE_BUILD=$PWD/build/$preset ctest --preset "$preset" -j 1 "$@"

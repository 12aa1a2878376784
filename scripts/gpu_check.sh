#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows on one machine with an NVIDIA GPU that the plugin computes the right numbers there and how fast, in under
# 6 minutes: builds the kernels for that GPU alone, then runs gpu_check.py. Downloads nothing where the TensorRT headers
# are in TENSORRT_ROOT or in build/native/tensorrt_headers (a build on another machine leaves them there).
#
#   scripts/gpu_check.sh [--without-gpu] [--build FOLDER] [--json FILE] [--fixture FILE]
#
# Needs nvcc, cmake, ninja, a C++ compiler and a python3 ($PYTHON) with torch, numpy and ml_dtypes.
# --without-gpu tries all of it that needs no GPU, with emulated kernels on host memory; its times mean nothing.
# --fixture keeps what this GPU's primitives gave: in tests/plugin/kernels/primitives/fixtures it is compared for ever.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/gpu_check
without_gpu=
files=()
while [ $# -gt 0 ]; do
  case "$1" in
    --without-gpu) without_gpu=--without-gpu ;;
    --build) build=${2:?--build needs a folder}; shift ;;
    --json | --fixture) files+=("$1" "${2:?$1 needs a file}"); shift ;;
    -h | --help) sed -n '3,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "gpu_check.sh: unknown argument $1; --help lists them" >&2; exit 2 ;;
  esac
  shift
done

targets=(plugin_driver kernel_primitives_emulated)
if [ -n "$without_gpu" ]; then
  targets+=(flash_attention_plugin_emulated flash_attention_emulated)
  architecture=80-real
else
  targets+=(flash_attention_plugin flash_attention_door flash_attention_decode flash_attention_paged kernel_primitives)
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ') || {
    echo "gpu_check.sh: no NVIDIA GPU here (nvidia-smi failed); --without-gpu tries what needs none" >&2
    exit 5
  }
  architecture=$capability-real
fi

if [ ! -f "$build/CMakeCache.txt" ]; then
  headers=${TENSORRT_ROOT:-}
  if [ -z "$headers" ] && [ -d build/native/tensorrt_headers ]; then
    headers=$PWD/build/native/tensorrt_headers
  fi
  cmake -S . -B "$build" -G Ninja -DFLASH_EXPORT_TESTS=ON -DFLASH_EXPORT_WERROR=OFF -DTENSORRT_ROOT="$headers" \
    -DFLASH_EXPORT_CUDA_ARCHITECTURES="$architecture"
fi
cmake --build "$build" --target "${targets[@]}"
sanitized=0
if [ -z "$without_gpu" ]; then
  scripts/sanitize_examples.sh "$build/plugin/kernels" || sanitized=$?
fi
"${PYTHON:-python3}" scripts/gpu_check.py --build "$build" $without_gpu "${files[@]}"
exit $sanitized

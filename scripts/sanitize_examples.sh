#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the kernels' two examples (a step of decoding; a paged cache that grows) under compute-sanitizer's memcheck and
# racecheck. Ends with 0: nothing found, or no compute-sanitizer here, which it says; 1: something was found.
#
#   scripts/sanitize_examples.sh FOLDER        the folder with flash_attention_decode and flash_attention_paged
set -euo pipefail
folder=${1:?a folder with the built examples}
sanitizer=$(PATH="$PATH:/usr/local/cuda/bin" command -v compute-sanitizer) || {
  echo "compute-sanitizer is not here: memcheck and racecheck are not run"
  exit 0
}
found=0
for tool in memcheck racecheck; do
  for example in decode paged; do
    if output=$("$sanitizer" --tool "$tool" --error-exitcode 9 "$folder/flash_attention_$example" 2>&1); then
      echo "$tool finds nothing in flash_attention_$example"
    else
      echo "WRONG: $tool on flash_attention_$example"
      tail -n 20 <<<"$output"
      found=1
    fi
  done
done
exit $found

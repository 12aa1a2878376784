#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What one thread of this processor does at the most, by cpu_peaks.cpp compiled for an instruction set of the kernels.

python benchmarks/cpu_peaks.py        # prints both instruction sets' peaks
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = {
    "avx512": ["-mavx2", "-mfma", "-mavx512f", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma"],
    "plain": [],
}
"""Target of the operator's kernels -> compiler flags, as plugin/cpu/CMakeLists.txt has them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peaks:
    """Of one thread, the best of nine measurements."""

    products: float  # floating-point operations a second, from registers
    memory: float  # bytes a second read from memory
    cache: float  # bytes a second read from 8 MiB that lie in a cache


def measure(target: str) -> Peaks:
    """Compiles for ``target`` and measures for a second or two."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peaks"
        command = [os.environ.get("CXX", "g++"), "-O3", "-std=c++17", "-ffp-contract=fast", *FLAGS[target]]
        subprocess.run([*command, str(SOURCE), "-o", str(program)], check=True)
        done = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    return Peaks(**json.loads(done.stdout))


def best_target() -> str:
    """The best instruction set that this processor has."""
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        return "avx512"
    return "avx2" if {"avx2", "fma"} <= flags else "plain"


def main() -> None:
    """Prints the peaks."""
    for target in FLAGS if best_target() == "avx512" else [best_target(), "plain"]:
        peaks = measure(target)
        speeds = f"memory {peaks.memory / 1e9:.0f} GB/s, cache {peaks.cache / 1e9:.0f} GB/s"
        print(f"{target}: {peaks.products / 1e9:.0f} GFLOP/s, {speeds}")


if __name__ == "__main__":
    main()

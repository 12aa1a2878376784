# SPDX-License-Identifier: Apache-2.0
"""The CPU's kernels through their C interface, with or without a sanitizer. No pytest here: sanitized runs are
processes of their own, and this file is what they run.

    python cpu_library.py LIBRARY table|threads
"""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path

from numpy.typing import NDArray

TESTS = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))

from contract import cache_cases, emulated_library, tensors  # noqa: E402
from contract.cache_cases import CACHE_CASES, CacheTensors  # noqa: E402
from contract.cache_launch import Launch  # noqa: E402
from contract.cases import CASES, Case  # noqa: E402
from contract.tensors import Tensors, heads_first  # noqa: E402
from contract.tolerance import why_lse_rejected, why_rejected  # noqa: E402

KERNELS = ("plain", "avx2", "avx512")
WAYS = {"chosen": 0, "tiles": 1, "slices": 2}


class CpuLibrary:
    """One build of the kernels."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.cpuHasKernels.argtypes = [ctypes.c_char_p]
        problem = ctypes.POINTER(emulated_library.FlashAttentionArgs)
        self._library.cpuAttention.argtypes = [problem, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        self._library.cpuMostSliceRows.argtypes = [problem, ctypes.c_char_p, ctypes.c_int64]
        self._library.cpuMostSliceRows.restype = ctypes.c_int64
        self._library.cpuAppend.argtypes = [ctypes.POINTER(emulated_library.FlashAppendArgs)]

    def why_not(self, kernels: str) -> str:
        """Why this processor does not run these kernels; empty: it does."""
        return "" if self._library.cpuHasKernels(kernels.encode()) else f"this processor does not run {kernels}"

    def run(self, case: Case, given: Tensors, kernels: str, way: str, threads: int) -> tuple[NDArray, NDArray | None]:
        """Heads-first output, and lse where the operator has one."""
        problem = emulated_library.Problem(case, given)
        self.attend(problem, kernels, way, threads)
        return heads_first(problem.output, case.layout, case.heads_q), problem.lse

    def attend(self, problem: emulated_library.Problem, kernels: str, way: str, threads: int) -> None:
        """Writes the problem's output and lse."""
        if self._library.cpuAttention(ctypes.byref(problem.arguments), kernels.encode(), WAYS[way], threads):
            raise MemoryError

    def most_slice_rows(self, problem: emulated_library.Problem, kernels: str, processors: int) -> int:
        """Up to so many rows of a key head go to slices on a machine with so many processors."""
        return int(self._library.cpuMostSliceRows(ctypes.byref(problem.arguments), kernels.encode(), processors))

    def run_cache(self, given: CacheTensors, kernels: str, way: str, threads: int) -> dict[str, NDArray]:
        """A cache form's outputs by name; the caches of ``given`` are written in place."""
        launch = Launch(given)
        if self._library.cpuAppend(ctypes.byref(launch.append)):
            raise MemoryError
        if self._library.cpuAttention(ctypes.byref(launch.attention), kernels.encode(), WAYS[way], threads):
            raise MemoryError
        return launch.outputs


def why_wrong(case: Case, output: NDArray, lse: NDArray | None) -> list[str]:
    """What the contract's rule has against these results."""
    reference, reference_lse, base = tensors.expected(case)
    reasons = why_rejected(output, reference, base, softcap=case.softcap)
    return reasons if lse is None else reasons + why_lse_rejected(lse, reference_lse)


def run_table(library: CpuLibrary) -> int:
    """Every row on every instruction set, in tiles and in slices; returns how many were wrong."""
    wrong = 0
    here = [kernels for kernels in KERNELS if not library.why_not(kernels)]
    for kernels in here:
        for way in WAYS:
            for case in CASES:
                if reasons := why_wrong(case, *library.run(case, tensors.make(case), kernels, way, threads=2)):
                    print(f"{case.name} with {kernels} in {way}: {reasons}")
                    wrong += 1
            for cache_case in CACHE_CASES:
                got = library.run_cache(cache_cases.make(cache_case), kernels, way, threads=2)
                if reasons := cache_cases.make(cache_case).why_wrong(got):
                    print(f"{cache_case.name} with {kernels} in {way}: {reasons}")
                    wrong += 1
    print(f"{len(CASES) + len(CACHE_CASES)} cases on {', '.join(here)}, each in {len(WAYS)} ways: {wrong} wrong")
    return wrong


def run_threads(library: CpuLibrary, callers: int = 8) -> int:
    """The same rows from eight threads at once, each with two threads more; returns how many results were wrong."""
    cases = [case for case in CASES if case.name in ("gqa_fp32", "everything_at_once", "decode_bottom_right")]
    best = [kernels for kernels in KERNELS if not library.why_not(kernels)][-1]
    wrong: list[str] = []

    def call() -> None:
        for case in cases:
            for way in WAYS:
                if why_wrong(case, *library.run(case, tensors.make(case), best, way, threads=3)):
                    wrong.append(case.name)

    threads = [threading.Thread(target=call) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(wrong)


if __name__ == "__main__":
    run = {"table": run_table, "threads": run_threads}[sys.argv[2]]
    sys.exit(min(run(CpuLibrary(Path(sys.argv[1]))), 100))

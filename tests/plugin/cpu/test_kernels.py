# SPDX-License-Identifier: Apache-2.0
"""The CPU's kernels compute every row of the contract, on every instruction set, and leave no fault to a sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from contract import cache_cases, tensors
from contract.cache_cases import CACHE_CASES
from contract.cases import CASES, Case

from plugin.cpu import cpu_library
from plugin.cpu.cpu_library import KERNELS, WAYS, CpuLibrary


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_kernels_compute_the_contract(native_build: Path, kernels: str, way: str) -> None:
    library = CpuLibrary(native_build / "lib" / "libcpu_door.so")
    if reason := library.why_not(kernels):
        pytest.skip(reason)
    wrong = {}
    for case in CASES:
        for threads in (1, 3):
            output, lse = library.run(case, tensors.make(case), kernels, way, threads)
            if reasons := cpu_library.why_wrong(case, output, lse):
                wrong[case.name] = reasons
    assert wrong == {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_kernels_compute_the_cache_forms(native_build: Path, kernels: str, way: str) -> None:
    library = CpuLibrary(native_build / "lib" / "libcpu_door.so")
    if reason := library.why_not(kernels):
        pytest.skip(reason)
    wrong, differ = {}, []
    for case in CACHE_CASES:
        got = library.run_cache(cache_cases.make(case), kernels, way, threads=3)
        if reasons := cache_cases.make(case).why_wrong(got):
            wrong[case.name] = reasons
        if case.page:
            in_one_piece = library.run_cache(cache_cases.without_pages(cache_cases.make(case)), kernels, way, threads=1)
            differ += [f"{case.name}: {n}" for n in ("output", "lse") if got[n].tobytes() != in_one_piece[n].tobytes()]
    assert wrong == {}
    assert differ == [], "a paged cache must give a contiguous one's bits"


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_number_of_threads_changes_no_bit(native_build: Path, kernels: str) -> None:
    library = CpuLibrary(native_build / "lib" / "libcpu_door.so")
    if reason := library.why_not(kernels):
        pytest.skip(reason)
    for case in CASES:
        once, again = (library.run(case, tensors.make(case), kernels, "chosen", n)[0] for n in (1, 4))
        assert once.tobytes() == again.tobytes(), case.name


def sanitized(native_build: Path, sanitizer: str, what: str) -> subprocess.CompletedProcess[str]:
    """Runs the kernels' sanitized build in a process that has the sanitizer's library from the start."""
    runtime = {"address": "libasan.so", "thread": "libtsan.so"}[sanitizer]
    preload = subprocess.run(
        [os.environ.get("CXX", "g++"), f"-print-file-name={runtime}"], capture_output=True, text=True, check=True
    )
    environment = {
        **os.environ,
        "LD_PRELOAD": preload.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself frees nothing at its end
        "TSAN_OPTIONS": "exitcode=66 ignore_noninstrumented_modules=1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    library = native_build / "lib" / f"libcpu_door_{sanitizer}.so"
    command = [sys.executable, str(Path(cpu_library.__file__)), str(library), what]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=500)


def test_the_address_and_undefined_behaviour_sanitizers_find_nothing(native_build: Path) -> None:
    done = sanitized(native_build, "address", "table")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_thread_sanitizer_finds_nothing_in_eight_threads_at_once(native_build: Path) -> None:
    done = sanitized(native_build, "thread", "threads")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("way", ["tiles", "slices"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_some_keys_are_summed_on_their_own(native_build: Path, kernels: str, way: str) -> None:
    """One sum over all keys, as the rule's base has it, errs several times as much over thousands of them."""
    library = CpuLibrary(native_build / "lib" / "libcpu_door.so")
    if reason := library.why_not(kernels):
        pytest.skip(reason)
    (case,) = (case for case in CASES if case.name == "thousands_of_keys")
    output, _ = library.run(case, tensors.make(case), kernels, way, 1)
    reference, _, base = tensors.expected(case)
    error, base_error = (float(np.abs(x.astype(np.float64) - reference).mean()) for x in (output, base))
    assert error < base_error / 3


@pytest.mark.parametrize("way", ["tiles", "slices"])
@pytest.mark.parametrize("head_dim", [257, 512, 1024])
def test_many_dimensions_are_summed_as_well_as_pytorch_sums_them(
    kernels: tuple[CpuLibrary, str], head_dim: int, way: str
) -> None:
    """One sum over a key's 512 dimensions erred 2.2 times as much on average, over 1,024 3.3 times."""
    library, target = kernels
    case = Case(
        name="many_dimensions", heads_q=3, heads_kv=3, seqlen_q=40, seqlen_kv=83, head_dim=head_dim, v_head_dim=64,
        layout=1, scale=head_dim**-0.5, score_std=2.5,
    )  # fmt: skip
    given = tensors.make(case)
    output, _ = library.run(case, given, target, way, threads=1)
    exact, _, _ = tensors.expected(case)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(x.copy()) for x in (given.query, given.key, given.value)), scale=case.scale
    )
    error, their_error = (float(np.abs(x.astype(np.float64) - exact).mean()) for x in (output, theirs.numpy()))
    assert error < 1.5 * their_error < 1.5e-6

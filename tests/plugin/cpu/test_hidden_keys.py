# SPDX-License-Identifier: Apache-2.0
"""Keys that no row sees are not read: they lie on pages that nobody may touch, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plugin.cpu.cpu_library import KERNELS, CpuLibrary

TILE = 128
"""Keys; a tile that some row sees may be read whole."""

ATTEND = """
import sys
sys.path[:0] = sys.argv[3].split(":")
import ctypes, mmap
import numpy as np
from pathlib import Path
from contract import emulated_library
from contract.cases import Case
from contract.tensors import Tensors
from plugin.cpu.cpu_library import CpuLibrary

SEQLEN_KV, HEAD_DIM = 4096, 64

def fenced(array, first, last):
    # A copy of which only the keys first <= j < last may be touched.
    room = mmap.mmap(-1, array.nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    ctypes.memmove(address, array.ctypes.data, array.nbytes)
    protect, row = ctypes.CDLL(None, use_errno=True).mprotect, HEAD_DIM * array.itemsize
    for start, end in ((0, first * row), (last * row, array.nbytes)):
        if end > start:
            assert start % mmap.PAGESIZE == 0
            assert protect(ctypes.c_void_p(address + start), ctypes.c_size_t(end - start), 0) == 0
    return address, room

def attend(kernels, way, queries, first, last, lengths=None, **case):
    random = np.random.default_rng(0)
    query, key, value = (
        random.standard_normal((1, 1, n, HEAD_DIM)).astype(np.float32) for n in (queries, SEQLEN_KV, SEQLEN_KV)
    )
    sizes = dict(batch=1, heads_q=1, heads_kv=1, seqlen_q=queries, seqlen_kv=SEQLEN_KV, head_dim=HEAD_DIM)
    case = Case(name="fenced", dtype="fp32", layout=1, kv_lengths=lengths, **sizes, **case)
    counts = None if lengths is None else np.array(lengths, np.int32)
    problem = emulated_library.Problem(case, Tensors(query, key, value, None, counts, None))
    library = CpuLibrary(Path(sys.argv[1]))
    library.attend(problem, kernels, way, 2)
    expected = problem.output.copy()
    problem.output[...] = np.nan
    for tensor, array in ((problem.arguments.key, key), (problem.arguments.value, value)):
        tensor.data, room = fenced(array, first, last)
        ROOMS.append(room)
    library.attend(problem, kernels, way, 2)
    assert np.array_equal(problem.output, expected) and np.isfinite(expected).all()

ROOMS = []
exec(sys.argv[2])
"""

CASES = {
    "causal": (200, 0, 256, "causal=1"),
    "window": (200, 3712, 4096, "causal=1, diagonal=1, window_left=100"),
    "window without causal": (200, 0, 384, "window_left=0, window_right=100"),
    "lengths": (200, 0, 384, "lengths=(300,), operator='FlashAttentionEx'"),
    "one query": (1, 3712, 4096, "causal=1, diagonal=1, window_left=300"),
    "one query, lengths": (1, 0, 384, "lengths=(300,), operator='FlashAttentionEx'"),
}
"""Queries, the keys that may be touched (tiles that some row sees), and what hides the others."""


def attend(native_build: Path, call: str) -> subprocess.CompletedProcess[str]:
    library = native_build / "lib" / "libcpu_door.so"
    command = [sys.executable, "-c", ATTEND, str(library), call, ":".join(filter(None, sys.path))]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("way", ["tiles", "slices"])
@pytest.mark.parametrize("name", CASES)
def test_tiles_of_hidden_keys_are_skipped(native_build: Path, name: str, way: str) -> None:
    queries, first, last, hides = CASES[name]
    library = CpuLibrary(native_build / "lib" / "libcpu_door.so")
    for kernels in KERNELS:
        if library.why_not(kernels):
            continue  # test_kernels says so
        done = attend(native_build, f"attend({kernels!r}, {way!r}, {queries}, {first}, {last}, {hides})")
        assert done.returncode == 0, (kernels, done.returncode, done.stderr)


def test_a_tile_that_is_read_on_such_a_page_ends_the_process(native_build: Path) -> None:
    """Without this the others could not fail."""
    done = attend(native_build, f"attend('plain', 'tiles', 200, {TILE}, 4096)")
    assert done.returncode == -11, done.stderr

# SPDX-License-Identifier: Apache-2.0
"""What the kernels keep beside their inputs and outputs, as the process's peak shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import sys
sys.path[:0] = sys.argv[2].split(":")
import numpy as np
from pathlib import Path
from contract import emulated_library
from contract.cases import Case
from contract.tensors import Tensors
from plugin.cpu.cpu_library import KERNELS, CpuLibrary

def kilobytes(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what))

def growth(given, way, **case):
    problem = emulated_library.Problem(Case(name="memory", **case), given)
    problem.output[...] = 0
    library = CpuLibrary(Path(sys.argv[1]))
    kernels = next(name for name in reversed(KERNELS) if not library.why_not(name))
    library.attend(problem, kernels, way, 2)
    assert (problem.output > 0.99).all()
    open("/proc/self/clear_refs", "w").write("5")
    before = kilobytes("VmRSS")
    library.attend(problem, kernels, way, 2)
    return kilobytes("VmHWM") - before
"""


def growth(native_build: Path, call: str) -> int:
    """What ``call`` of MEASURE's growth() gives in a process of its own, in kB."""
    library = native_build / "lib" / "libcpu_door.so"
    command = [sys.executable, "-c", f"{MEASURE}\nprint({call})", str(library), ":".join(filter(None, sys.path))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


def ones(*shape: int) -> str:
    return f"np.ones({shape}, np.float16)"


def tensors_of(query: str, keys: str) -> str:
    return f"Tensors({query}, {keys}, {keys}, None, None, None)"


def test_heads_of_one_slice_keep_nothing_beyond_their_task(native_build: Path) -> None:
    """40,000 heads of four rows: the partial results of all at once were 51 MB."""
    x = ones(5000, 8, 4, 64)
    sizes = "batch=5000, heads_q=8, heads_kv=8, seqlen_q=4, seqlen_kv=4, head_dim=64, dtype='fp16', layout=1"
    assert growth(native_build, f"growth({tensors_of(x, x)}, 'slices', {sizes})") < 8_000


@pytest.mark.parametrize(("queries", "way"), [(1, "slices"), (40, "tiles")])
def test_keys_and_values_are_not_copied_together(native_build: Path, queries: int, way: str) -> None:
    """They are 67 MB in fp16; a tile's are widened at a time, and none for a single query."""
    given = tensors_of(ones(1, 2, queries, 64), ones(1, 2, 131072, 64))
    sizes = f"batch=1, heads_q=2, heads_kv=2, seqlen_q={queries}, seqlen_kv=131072, head_dim=64, dtype='fp16', layout=1"
    assert growth(native_build, f"growth({given}, {way!r}, {sizes})") < 4_000


KINDS = {
    "full": "",
    "causal": "causal=1",
    "window": "window_left=900, window_right=100",
    "lengths": "kv_lengths=(8001,), causal=1",
    "sinks": "sinks=1",
    "soft_cap": "softcap=3.0",
    "bias_of_a_key": "bias_shape=(1, 1, 1, 8192)",
}
SIDE_INPUTS = {"lengths", "sinks", "bias_of_a_key"}


@pytest.mark.parametrize("kind", KINDS)
def test_no_matrix_of_scores_is_kept_at_8192(native_build: Path, kind: str) -> None:
    """One of fp16 would be 134 MB for each of the two heads."""
    x = ones(1, 2, 8192, 4)
    given = {
        "lengths": f"Tensors({x}, {x}, {x}, None, np.array([8001], np.int32), None)",
        "sinks": f"Tensors({x}, {x}, {x}, None, None, np.zeros(1, np.float32))",
        "bias_of_a_key": f"Tensors({x}, {x}, {x}, {ones(1, 1, 1, 8192)}, None, None)",
    }.get(kind, tensors_of(x, x))
    operator = "FlashAttentionEx" if kind in SIDE_INPUTS else "FlashAttention"
    sizes = f"operator={operator!r}, batch=1, heads_q=2, heads_kv=2, seqlen_q=8192, seqlen_kv=8192, head_dim=4"
    assert growth(native_build, f"growth({given}, 'tiles', {sizes}, dtype='fp16', layout=1, {KINDS[kind]})") < 4_000

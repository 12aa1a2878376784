# SPDX-License-Identifier: Apache-2.0
"""The built files: what the library exports and needs, and that no code of one instruction set reaches another's."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from flash_trt import cpu_operator_path
from plugin.cpu.test_operator import model
from plugin.test_library import C_LIBRARY, dynamic_entries, tool

LIBRARY = "libflash_attention_cpu.so"
OBJECTS = "plugin/cpu/CMakeFiles/flash_attention_cpu_kernels.dir"


def symbols(file: Path, *flags: str) -> list[list[str]]:
    return [line.split() for line in tool("nm", *flags, str(file)).splitlines() if line and not line.endswith(":")]


def test_the_library_exports_its_entry_point_alone(native_build: Path) -> None:
    assert [s[-1] for s in symbols(native_build / "lib" / LIBRARY, "-D", "--defined-only")] == ["RegisterCustomOps"]


def test_the_library_needs_the_c_library_alone(native_build: Path) -> None:
    needed = dynamic_entries(native_build / "lib" / LIBRARY, "NEEDED")
    assert needed, "readelf printed no NEEDED entry"
    assert [name for name in needed if not C_LIBRARY.match(name)] == []


@pytest.mark.parametrize("kernels", ["plain", "avx2", "avx512"])
def test_kernels_share_no_function_with_other_instruction_sets(native_build: Path, kernels: str) -> None:
    if kernels != "plain" and platform.machine() != "x86_64":
        pytest.skip("an instruction set of x86-64")
    defined = symbols(native_build / OBJECTS / f"kernels_{kernels}.cpp.o", "--defined-only", "--extern-only", "-C")
    names = [" ".join(s[2:]) for s in defined]
    assert names == [f"flash_export::cpu::{kernels}Kernels()"]


OPEN_AND_CLOSE = """
import ctypes, sys
import numpy, onnxruntime

class Heap(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in "arena blocks small mapped bytes usm fsm used free top".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
library, model = sys.argv[1:]

def once():
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(library)
    onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

def used():
    heap = libc.mallinfo2()
    return heap.used + heap.bytes

for _ in range(10):
    once()
before = used()
for _ in range(20):
    once()
print((used() - before) // 20, library in open("/proc/self/maps").read())
"""


def test_a_process_that_opens_and_closes_its_only_session_holds_no_more_each_time(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(model())
    command = [sys.executable, "-c", OPEN_AND_CLOSE, cpu_operator_path(), str(tmp_path / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    growth, mapped = done.stdout.split()
    assert mapped == "True", "the library is unloaded with the session, and what it made for good is made again"
    assert int(growth) < 20_000, "bytes a session"

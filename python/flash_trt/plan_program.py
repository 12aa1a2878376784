# SPDX-License-Identifier: Apache-2.0
"""Reads what TensorRT made of the model's own nodes from the program that a plan carries as text.

Seen in plans of TensorRT for RTX 1.7: one line a tensor (``tensor={ dims={ 8 512 512 } name="probs" type=half }``) and
one line a kernel launch, which names the ONNX nodes it stands for. A plan without such lines gives an empty program.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections.abc import Iterator

FUSED_ATTENTION = "_gemm_mha"
"""Names of TensorRT's own fused attention kernels begin so."""

_ELEMENT_BYTES = {"float": 4, "half": 2, "bf16": 2, "int32": 4, "int64": 8, "int8": 1, "uint8": 1, "bool": 1}
_TENSOR = re.compile(
    rb'^  tensor=\{ .*?dims=\{ ([\w ]*?) ?\} .*?name="([^"]*)" .*?region="([^"]*)" .*?type=(\w+) \}', re.M
)
_VIEW = re.compile(rb'^  sub_tensor=\{ base="([^"]*)" .*?name="([^"]*)"', re.M)
_LAUNCH = re.compile(rb'^  \w+=\{ name="?([^" ]*)"? .*? layers="([^"]*)"', re.M)
_PLUGIN = re.compile(rb'^  custom_layer=\{ name="([^"]*)" output=\{([^}]*)\}', re.M)
_WORKSPACE = re.compile(rb'^  tensor=\{ .*?dims=\{ (\d+) \} .*?name="([^"]*_wksp\.\d+)" .*?type=uint8 \}', re.M)
_OF_PROFILE = re.compile(r" \[profile \d+\]$")
"""What follows a layer's name in the programs of all profiles but the first."""
_ONNX_NODE = re.compile(rb"\[ONNX Layer: ([^\]]*)\]")


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One kernel: its name, the ONNX nodes it computes, and the bytes of scratch memory that it reads and writes.

    ``scratch_bytes`` is None where a dimension is dynamic. ``program`` says which of the plan's it is in: each profile,
    and each generation, may have one of its own.
    """

    kernel: str
    nodes: frozenset[str]
    scratch_bytes: int | None
    program: int = 0


def launches(plan: bytes) -> list[Launch]:
    """Every kernel launch that names ONNX nodes, in the order of the plan; [] when it holds none in the known form."""
    return [launch for number, program in enumerate(_programs(plan)) for launch in _launches(program, number)]


def _programs(plan: bytes) -> Iterator[bytes]:
    """The plan in pieces with one program each, which names its tensors before its launches.

    Two programs may have tensors of the same name and of other sizes.
    """
    tensors = [match.start() for match in _TENSOR.finditer(plan)]
    start, last = 0, 0
    for match in _LAUNCH.finditer(plan):
        following = bisect.bisect(tensors, last)
        if last and following < len(tensors) and tensors[following] < match.start():
            yield plan[start : tensors[following]]
            start = tensors[following]
        last = match.start()
    yield plan[start:]


def _launches(program: bytes, number: int) -> Iterator[Launch]:
    sizes = _scratch_sizes(program)
    views = {view: base for base, view in _VIEW.findall(program)}
    for match in _LAUNCH.finditer(program):
        nodes = frozenset(name.decode("utf-8", "replace") for name in _ONNX_NODE.findall(match[2]))
        touched = {views.get(name, name) for name in re.findall(rb'"([^"]*)"', match[0])} & sizes.keys()
        of_each = [sizes[name] for name in touched]
        total = None if None in of_each else sum(size for size in of_each if size is not None)
        yield Launch(match[1].decode("utf-8", "replace"), nodes, total, number)


def workspaces(plan: bytes) -> dict[str, int | None]:
    """Plugin layer -> bytes of the workspace that it has at the largest shapes; 0 where it asked for none.

    A plan for several generations, or with several profiles, has a program for each: the largest counts. None where the
    size of one is not told.
    """
    sizes: dict[bytes, int] = {}
    for size, tensor in _WORKSPACE.findall(plan):
        sizes[tensor] = max(int(size), sizes.get(tensor, 0))
    found: dict[str, int | None] = {}
    for name, outputs in _PLUGIN.findall(plan):
        mine = re.findall(rb'"([^"]*_wksp\.\d+)"', outputs)
        size = sum(sizes[tensor] for tensor in mine) if sizes.keys() >= set(mine) else None
        layer = _OF_PROFILE.sub("", name.decode("utf-8", "replace"))
        known = found.get(layer, 0)
        found[layer] = None if size is None or known is None else max(size, known)
    return found


def _scratch_sizes(plan: bytes) -> dict[bytes, int | None]:
    """Tensor -> bytes, of those in scratch memory; the others are inputs, outputs and weights."""
    sizes: dict[bytes, int | None] = {}
    for dims, name, region, kind in _TENSOR.findall(plan):
        if region.startswith(b"devmem"):
            width = _ELEMENT_BYTES.get(kind.decode())
            static = all(dim.isdigit() for dim in dims.split())
            sizes[name] = width * math.prod(map(int, dims.split())) if static and width else None
    return sizes

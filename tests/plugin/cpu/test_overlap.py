# SPDX-License-Identifier: Apache-2.0
"""Arrays of the caller that overlap: refused in every form of the operator before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from contract import cache_cases, tensors
from contract.cache_cases import CacheCase
from contract.cache_model import feeds as cache_feeds
from contract.cache_model import node_of
from contract.cases import Case
from contract.node_model import feeds, model_of, model_of_case
from numpy.typing import NDArray

from flash_export.op import OPERATORS
from plugin.cpu.test_operator import options, refused

SHAPE: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "seqlen_q": 16, "head_dim": 16, "v_head_dim": 16}
CASES: list[Case | CacheCase] = [
    Case(name="overlap", seqlen_kv=16, batch=2, layout=1, **SHAPE),
    Case(name="overlap_packed", operator="FlashAttentionPacked", seqlen_kv=16, batch=2, **SHAPE),
    Case(name="overlap_ex", operator="FlashAttentionEx", seqlen_kv=16, batch=2, sinks=2, layout=1, **SHAPE),
    CacheCase("overlap_cache", (3, 9), new=16, capacity=32, **SHAPE),
    CacheCase("overlap_pages", (3, 9), new=16, capacity=32, page=16, **SHAPE),
]
BY_OPERATOR = {case.operator: case for case in CASES}
OWN = {"kv_lengths_out": "kv_lengths", "key_cache_out": "key_cache", "value_cache_out": "value_cache"}
PAIRS = [
    (operator, output, other)
    for operator in BY_OPERATOR
    for output in OPERATORS[operator].outputs
    for other in (*OPERATORS[operator].inputs, *OPERATORS[operator].outputs)
    if output != other
]


class Arrays:
    """A case's inputs, and arrays of the caller for its outputs, which hold sevens."""

    def __init__(self, case: Case | CacheCase) -> None:
        if isinstance(case, Case):
            arrays = tensors.node_inputs(case, tensors.make(case))
            model, self.inputs = model_of_case(case, arrays, 18), feeds(case, arrays)
        else:
            made = cache_cases.make(case)
            model, self.inputs = model_of([node_of(made)], 18), cache_feeds(made)
        del model.functions[:]
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options(), providers=["CPUExecutionProvider"]
        )
        self.inputs = {name: np.array(array) for name, array in self.inputs.items()}
        names = [output.name for output in self.session.get_outputs()]
        self.right = dict(zip(names, self.session.run(None, self.inputs), strict=True))
        self.outputs = {name: np.full_like(array, 7) for name, array in self.right.items()}

    def put_on(self, output: str, other: str, offset: int) -> None:
        """Lays two of the tensors into one buffer, ``output`` so many bytes behind the beginning of ``other``."""
        home = self.inputs if other in self.inputs else self.outputs
        buffer = np.zeros(home[other].nbytes + self.outputs[output].nbytes + offset, np.uint8)
        self.outputs[output] = _at(buffer, self.outputs[output], offset)
        self.outputs[output][...] = 7
        home[other] = _at(buffer, home[other], 0, fill=True)

    def run(self) -> dict[str, NDArray]:
        """The outputs, in the arrays."""
        binding = self.session.io_binding()
        for name, x in self.inputs.items():
            binding.bind_input(name, "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
        for name, x in self.outputs.items():
            binding.bind_output(name, "cpu", 0, x.dtype.type, x.shape, x.ctypes.data)
        self.session.run_with_iobinding(binding)
        return self.outputs

    def bytes(self) -> list[bytes]:
        """Of every array."""
        return [x.tobytes() for x in (*self.inputs.values(), *self.outputs.values())]


def _at(buffer: NDArray[np.uint8], like: NDArray, offset: int, *, fill: bool = False) -> NDArray:
    array: NDArray = np.ndarray(like.shape, like.dtype, buffer=buffer.data, offset=offset)
    if fill:
        array[...] = like
    return array


@pytest.mark.parametrize(("operator", "output", "other"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_an_output_on_another_tensor_is_refused_and_nothing_is_written(operator: str, output: str, other: str) -> None:
    arrays = Arrays(BY_OPERATOR[operator])
    # Anywhere but where an output may be: the whole of its own input.
    last = (arrays.inputs | arrays.outputs)[other].nbytes - 4
    for offset in {4 if OWN.get(output) == other and last else 0, last}:
        arrays.put_on(output, other, offset)
        before = arrays.bytes()
        with pytest.raises(Exception, match=f"cannot run {operator}") as error:
            arrays.run()
        refused(error, 'node "attention"', "tensor ", "memory that ", " has too", output, other)
        assert arrays.bytes() == before


@pytest.mark.parametrize("operator", BY_OPERATOR)
def test_neighbours_in_one_buffer_are_no_overlap(operator: str) -> None:
    arrays = Arrays(BY_OPERATOR[operator])
    everything = arrays.inputs | arrays.outputs
    buffer, offset = np.zeros(sum(x.nbytes for x in everything.values()), np.uint8), 0
    for name, x in everything.items():
        home = arrays.inputs if name in arrays.inputs else arrays.outputs
        home[name] = _at(buffer, x, offset, fill=True)
        offset += x.nbytes
    got = arrays.run()
    assert [name for name, x in got.items() if x.tobytes() != arrays.right[name].tobytes()] == []


@pytest.mark.parametrize("operator", ["FlashAttentionCache", "FlashAttentionPagedCache"])
def test_one_length_is_no_memory_for_a_length_a_batch(operator: str) -> None:
    """``kv_lengths`` of [1] under ``kv_lengths_out`` of [B]: the same address, but not the same array."""
    case = BY_OPERATOR[operator]
    assert isinstance(case, CacheCase)
    arrays = Arrays(case)
    arrays.inputs["kv_lengths"] = arrays.inputs["kv_lengths"][:1].copy()
    arrays.put_on("kv_lengths_out", "kv_lengths", 0)
    with pytest.raises(Exception, match=f"cannot run {operator}") as error:
        arrays.run()
    refused(error, "tensor kv_lengths_out", "memory that kv_lengths has too")

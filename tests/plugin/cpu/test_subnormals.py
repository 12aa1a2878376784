# SPDX-License-Identifier: Apache-2.0
"""Numbers below fp16's smallest normal one, in sessions that take fp32's subnormal numbers for 0: they are normal in
fp32, in which ONNX Runtime's own kernels compute, and must not vanish."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import cast

import numpy as np
import onnxruntime
import pytest
from contract import reference, tensors, tolerance
from contract.cases import Case
from contract.node_model import feeds, model_of_case, results
from contract.tensors import Tensors
from numpy.typing import NDArray

from flash_trt import cpu_operator_path
from plugin.cpu.cpu_library import CpuLibrary

OPTION = "session.set_denormal_as_zero"

SCALES = {"queries": 1.0e4, "keys": 3.0e4, "values": 1.0}
"""What is small -> a scale that makes scores of a usual size."""


def small(x: NDArray, size: float) -> NDArray:
    """The same numbers, the largest of this size; most are subnormal in fp16 below 6e-5."""
    return (x.astype(np.float64) * (size / np.abs(x.astype(np.float64)).max())).astype(x.dtype)


def given_of(which: str, made: Tensors) -> Tensors:
    """Tensors of which ``which`` are small."""
    if which == "keys":
        return dataclasses.replace(made, key=small(made.key, 6e-5))
    if which == "queries":
        return dataclasses.replace(made, query=small(made.query, 6e-5))
    return dataclasses.replace(made, value=small(made.value, 2e-5))


@pytest.fixture(scope="module")
def another_process() -> Iterator[ProcessPoolExecutor]:
    """A process: the first session with the option leaves the thread that opens it in that mode, to its end."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


def run_without_subnormals(model: bytes, inputs: dict[str, NDArray], target: str) -> list[NDArray]:
    """The model's outputs under the option."""
    os.environ["FLASH_TRT_CPU_TARGET"] = target
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.add_session_config_entry(OPTION, "1")
    options.register_custom_ops_library(cpu_operator_path())
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return cast("list[NDArray]", session.run(None, inputs))


@pytest.mark.parametrize("queries", [1, 37], ids=["slices", "tiles"])
@pytest.mark.parametrize("which", ["queries", "keys", "values"])
def test_subnormal_halves_count(
    kernels: tuple[CpuLibrary, str], another_process: ProcessPoolExecutor, which: str, queries: int
) -> None:
    _, target = kernels
    case = Case(
        name="subnormal", dtype="fp16", batch=1, heads_q=4, heads_kv=4, seqlen_q=queries, seqlen_kv=90, head_dim=33,
        layout=1, scale=1.0,
    )  # fmt: skip
    given = given_of(which, tensors.make(case))
    case = dataclasses.replace(case, scale=SCALES[which])
    arguments = tensors.formula_arguments(case, given)
    wanted, _ = reference.attention(given.query, given.key, given.value, **arguments)  # type: ignore[arg-type]
    base = tolerance.unfused(given.query, given.key, given.value, **arguments)  # type: ignore[arg-type]
    arrays = tensors.node_inputs(case, given)
    model = model_of_case(case, arrays, 18).SerializeToString()
    outputs = another_process.submit(run_without_subnormals, model, feeds(case, arrays), target).result()
    output, _ = results(case, outputs)
    assert np.abs(wanted).max() > (1e-6 if which == "values" else 0.1)
    assert tolerance.why_rejected(output, wanted, base) == []

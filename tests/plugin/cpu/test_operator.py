# SPDX-License-Identifier: Apache-2.0
"""The operator's library in ONNX Runtime: it is what runs the nodes, and bad models and inputs get a clear error."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from contract import tensors
from contract.cases import CASES, Case
from contract.node_model import feeds, model_of_case, results
from contract.tolerance import why_rejected
from numpy.typing import NDArray

from flash_trt import cpu_operator_path

BY_NAME = {case.name: case for case in CASES}
CASE = BY_NAME["fp32_top_left"]
Edit = Callable[[onnx.ModelProto], None]


def options(library: str | None = None) -> onnxruntime.SessionOptions:
    made = onnxruntime.SessionOptions()
    made.log_severity_level = 4
    made.intra_op_num_threads = 2
    made.register_custom_ops_library(library or cpu_operator_path())
    return made


def model(case: Case = CASE, edit: Edit | None = None) -> bytes:
    proto = model_of_case(case, tensors.node_inputs(case, tensors.make(case)), 18)
    if edit is not None:
        edit(proto)
    return proto.SerializeToString()


def inputs(case: Case = CASE) -> dict[str, NDArray]:
    return feeds(case, tensors.node_inputs(case, tensors.make(case)))


def open_session(edit: Edit | None = None, case: Case = CASE) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model(case, edit), options(), providers=["CPUExecutionProvider"])


def attribute(proto: onnx.ModelProto, name: str) -> onnx.AttributeProto:
    return next(a for node in proto.graph.node for a in node.attribute if a.name == name)


def set_attribute(name: str, value: int | str) -> Edit:
    def edit(proto: onnx.ModelProto) -> None:
        if isinstance(value, str):
            attribute(proto, name).s = value.encode()
        else:
            attribute(proto, name).i = value

    return edit


def remove_attribute(name: str) -> Edit:
    def edit(proto: onnx.ModelProto) -> None:
        proto.graph.node[0].attribute.remove(attribute(proto, name))

    return edit


def refused(error: pytest.ExceptionInfo[Exception], *parts: str) -> None:
    """The error has five parts, and these words."""
    text = str(error.value)
    for part in ("\n  where ", "\n  got   ", "\n  need  ", "\n  do    ", *parts):
        assert part in text, text


def test_a_registered_library_runs_the_node_instead_of_its_body(tmp_path: Path) -> None:
    settings = options()
    settings.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(model(), settings, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    assert [(node.domain, node.op_type) for node in nodes] == [("flash_export", "FlashAttention")]


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (set_attribute("plugin_version", "2"), ("version 2", "version 1, which this library has")),
        (remove_attribute("plugin_version"), ("attribute plugin_version", "none")),
        (remove_attribute("causal"), ("attribute causal", "nothing", "0 to 1")),
        (set_attribute("causal", 2), ("attribute causal", "got   2", "0 to 1")),
        (set_attribute("window_left", -2), ("attribute window_left", "got   -2")),
        (set_attribute("q_num_heads", 2**32 + 2), ("attribute q_num_heads", "4294967298")),
        (set_attribute("q_num_heads", 3), ("3 query heads, 2 key and value heads",)),
        (set_attribute("has_bias", 1), ("has_bias", "FlashAttentionEx")),
    ],
    ids=["newer", "no_version", "missing", "out_of_range", "negative", "past_int32", "heads", "side_input"],
)
def test_a_wrong_attribute_is_named_when_the_session_opens(edit: Edit, parts: tuple[str, ...]) -> None:
    with pytest.raises(Exception, match="cannot create FlashAttention") as error:
        open_session(edit)
    refused(error, 'node "attention"', *parts)


def change(**changes: Callable[[NDArray], NDArray]) -> dict[str, NDArray]:
    given = inputs()
    return {name: changes.get(name, lambda x: x)(array) for name, array in given.items()}


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (change(query=lambda x: x[..., :-1]), ("tensor query", "[2, 97, 127]", "2*D")),
        (change(key=lambda x: x[:1]), ("tensor key", "batch 1", "batch 2")),
        (change(key=lambda x: x[..., :64]), ("tensor key", "head dim 32", "head dim 64")),
        (change(value=lambda x: x[:, 1:]), ("tensor value", "sequence 130", "sequence 131")),
        (change(query=lambda x: x[..., :0], key=lambda x: x[..., :0]), ("head_dim is 0",)),
    ],
    ids=["no_multiple", "batch", "head_dim", "sequence", "no_head_dim"],
)
def test_a_wrong_shape_is_named_when_the_node_runs(given: dict[str, NDArray], parts: tuple[str, ...]) -> None:
    session = open_session()
    with pytest.raises(Exception, match="cannot run FlashAttention") as error:
        session.run(None, given)
    refused(error, 'node "attention"', *parts)
    session.run(None, inputs())  # and the session goes on


def any_rank(proto: onnx.ModelProto) -> None:
    for value in proto.graph.input:
        value.type.tensor_type.ClearField("shape")


@pytest.mark.parametrize("rank", [2, 4, 9])
def test_a_wrong_rank_is_named(rank: int) -> None:
    given = inputs()
    given["query"] = given["query"].reshape([*[1] * (rank - 2), 2, 97 * 128] if rank > 2 else [2, 97 * 128])
    with pytest.raises(Exception, match="cannot run FlashAttention") as error:
        open_session(any_rank).run(None, given)
    refused(error, "tensor query", "rank 9" if rank == 9 else "[B, S, 2*D]")


def test_a_head_dim_past_int32_is_refused() -> None:
    given = inputs()
    given["query"] = given["key"] = np.zeros((0, 5, 128), np.float32)
    given["value"] = np.zeros((0, 5, 2**33), np.float32)
    with pytest.raises(Exception, match="head dim 4294967296") as error:
        open_session(any_rank).run(None, given)
    refused(error, "tensor value", "at most 2147483647")


def test_a_sequence_that_the_kernels_cannot_count_is_refused() -> None:
    given = inputs()
    given["query"] = np.zeros((0, 2**29, 128), np.float32)
    given["key"] = given["value"] = np.zeros((0, 5, 128), np.float32)
    with pytest.raises(Exception, match="seqlen_q is 536870912") as error:
        open_session(any_rank).run(None, given)
    refused(error)


def test_a_dtype_that_the_library_lacks_is_refused() -> None:
    def double(proto: onnx.ModelProto) -> None:
        for value in [*proto.graph.input, *proto.graph.output]:
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE

    with pytest.raises(Exception, match=r"tensor\(double\).*FlashAttention"):
        open_session(double)


def test_a_bias_of_another_16_bit_type_is_refused() -> None:
    def mixed(proto: onnx.ModelProto) -> None:
        next(v for v in proto.graph.input if v.name == "bias").type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16

    with pytest.raises(Exception, match="FlashAttentionEx"):
        open_session(mixed, BY_NAME["bias_full"])


def test_the_instruction_set_can_be_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session for each target in one process. They sum in another order each, so the last bits tell which one ran."""
    case = BY_NAME["nan_value_padded_decode"]
    outputs = {}
    for target in (*here(), ""):
        monkeypatch.setenv("FLASH_TRT_CPU_TARGET", target)
        session = open_session(case=case)
        monkeypatch.setenv("FLASH_TRT_CPU_TARGET", "plain")  # it counts when a session is opened
        outputs[target] = results(case, session.run(None, inputs(case)))[0]
    reference, _, base = tensors.expected(case)
    assert [why_rejected(output, reference, base) for output in outputs.values()] == [[]] * len(outputs)
    assert outputs[""].tobytes() == outputs[here()[0]].tobytes(), "unset is the best"
    assert len({output.tobytes() for output in outputs.values()}) == len(here())


def here() -> list[str]:
    """The targets of this processor, best first, as the message that refuses another name has them."""
    previous = os.environ.get("FLASH_TRT_CPU_TARGET")
    os.environ["FLASH_TRT_CPU_TARGET"] = "avx3"
    try:
        with pytest.raises(Exception, match="cannot choose the kernels") as error:
            open_session()
    finally:
        del os.environ["FLASH_TRT_CPU_TARGET"]
        if previous is not None:
            os.environ["FLASH_TRT_CPU_TARGET"] = previous
    refused(error, "FLASH_TRT_CPU_TARGET", 'got   "avx3"', "unset")
    found = re.search(r"this processor runs: (.*)", str(error.value))
    assert found
    return found[1].split(", ")


def test_a_wrong_instruction_set_is_named_with_those_that_run_here() -> None:
    assert here()[-1] == "plain"


def test_a_second_registration_is_an_error_and_nothing_worse(tmp_path: Path) -> None:
    copy = tmp_path / "copy.so"
    shutil.copy(cpu_operator_path(), copy)
    for second in (cpu_operator_path(), str(copy)):
        settings = options()
        settings.register_custom_ops_library(second)  # found out when the session opens
        with pytest.raises(Exception, match="Domain already set"):
            onnxruntime.InferenceSession(model(), settings, providers=["CPUExecutionProvider"])
    open_session().run(None, inputs())


def test_two_copies_of_the_library_serve_two_sessions(tmp_path: Path) -> None:
    copy = tmp_path / "copy.so"
    shutil.copy(cpu_operator_path(), copy)
    sessions = [
        onnxruntime.InferenceSession(model(), options(path), providers=["CPUExecutionProvider"])
        for path in (cpu_operator_path(), str(copy))
    ]
    first, second = (session.run(None, inputs())[0] for session in sessions)
    np.testing.assert_array_equal(first, second)


def test_eight_threads_with_sessions_of_their_own_and_a_shared_one() -> None:
    cases = [BY_NAME[name] for name in ("fp32_top_left", "everything_at_once", "packed_gqa")]
    models = [model(case) for case in cases]
    shared = [open_session(case=case) for case in cases]
    wrong: list[str] = []

    def work() -> None:
        for case, made, session in zip(cases, models, shared, strict=True):
            own = onnxruntime.InferenceSession(made, options(), providers=["CPUExecutionProvider"])
            for runner in (session, own):
                output, _ = results(case, runner.run(None, inputs(case)))
                reference, _, base = tensors.expected(case)
                wrong.extend(why_rejected(output, reference, base, softcap=case.softcap))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- an older runtime, as far as the library sees one ----------------------------------------------------------------

GET_API = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_uint32)
GET_VERSION = ctypes.CFUNCTYPE(ctypes.c_size_t)
CREATE_STATUS = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p)


def test_an_older_runtime_is_refused_with_both_versions() -> None:
    seen: list[str] = []

    def create_status(code: int, text: bytes) -> int:
        seen.append(text.decode())
        return 0xBAD

    functions = CREATE_STATUS(create_status)
    table = (ctypes.c_void_p * 1)(ctypes.cast(functions, ctypes.c_void_p))
    get_api = GET_API(lambda version: ctypes.addressof(table) if version == 1 else 0)
    version_text = ctypes.create_string_buffer(b"1.16.3")
    get_version = GET_VERSION(lambda: ctypes.addressof(version_text))
    base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p), ctypes.cast(get_version, ctypes.c_void_p))
    register = ctypes.CDLL(cpu_operator_path()).RegisterCustomOps
    register.restype = ctypes.c_size_t
    assert register(None, base) == 0xBAD
    assert "version 1.16.3" in seen[0]
    assert "version 1.17 or newer" in seen[0]

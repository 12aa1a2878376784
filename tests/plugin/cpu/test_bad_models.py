# SPDX-License-Identifier: Apache-2.0
"""Models and shapes that the library must refuse in words: foreign dtypes, wrong numbers, sizes past 32 and 64 bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from contract import cache_cases
from contract.cache_cases import CACHE_CASES
from contract.cache_model import feeds as cache_feeds
from contract.cache_model import node_of
from contract.node_model import model_of
from onnxruntime import OrtValue

from plugin.cpu.test_operator import BY_NAME, Edit, attribute, inputs, open_session, options, refused

DECODE = next(case for case in CACHE_CASES if case.name == "decode_paged")


def declare(name: str, dtype: int) -> Edit:
    """Gives one of the graph's inputs another dtype."""

    def edit(proto: onnx.ModelProto) -> None:
        next(v for v in proto.graph.input if v.name == name).type.tensor_type.elem_type = dtype

    return edit


@pytest.mark.parametrize(
    ("case", "name", "dtype", "said"),
    [
        ("fp32_top_left", "key", onnx.TensorProto.FLOAT16, "FlashAttention"),
        ("bias_full_fp32", "bias", onnx.TensorProto.FLOAT16, "FlashAttentionEx"),
        ("lengths_bottom_right_fp32", "kv_lengths", onnx.TensorProto.INT64, r"tensor\(int64\).*FlashAttentionEx"),
        ("sinks_fp32", "sinks", onnx.TensorProto.DOUBLE, r"tensor\(double\).*FlashAttentionEx"),
        ("packed_gqa", "qkv", onnx.TensorProto.INT32, r"tensor\(int32\).*FlashAttentionPacked"),
    ],
)
def test_a_dtype_that_a_tensor_cannot_have_is_refused_when_the_session_opens(
    case: str, name: str, dtype: int, said: str
) -> None:
    with pytest.raises(Exception, match=said):
        open_session(declare(name, dtype), BY_NAME[case])


def open_cache(edit: Edit) -> onnxruntime.InferenceSession:
    proto = model_of([node_of(cache_cases.make(DECODE))], 18)
    del proto.functions[:]
    edit(proto)
    return onnxruntime.InferenceSession(proto.SerializeToString(), options(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("kv_lengths", onnx.TensorProto.INT64),
        ("page_table", onnx.TensorProto.INT64),
        ("value_cache", onnx.TensorProto.FLOAT16),
        ("key_cache", onnx.TensorProto.DOUBLE),
    ],
)
def test_a_dtype_that_a_cache_form_cannot_have_is_refused_when_the_session_opens(name: str, dtype: int) -> None:
    with pytest.raises(Exception, match="FlashAttentionPagedCache"):
        open_cache(declare(name, dtype))


def set_float(name: str, value: float) -> Edit:
    def edit(proto: onnx.ModelProto) -> None:
        attribute(proto, name).f = value

    return edit


def make(name: str, value: float | str | bytes | list[int]) -> Edit:
    """Writes the attribute as whatever type ``value`` is of."""

    def edit(proto: onnx.ModelProto) -> None:
        attribute(proto, name).CopyFrom(onnx.helper.make_attribute(name, value))

    return edit


@pytest.mark.parametrize(
    ("edit", "name", "got"),
    [
        (set_float("scale", np.nan), "scale", "nan"),
        (set_float("scale", np.inf), "scale", "inf"),
        (set_float("scale", -1e38), "scale", "-1e+38"),
        (set_float("softcap", -1.0), "softcap", "-1"),
        (make("scale", 1), "scale", "an INT, 1"),
        (make("scale", "0.5\n"), "scale", 'a STRING, "0.5 "'),
        (make("causal", 1.0), "causal", "a FLOAT, 1"),
        (make("causal", "x" * 100), "causal", f'a STRING, "{"x" * 64}..."'),
        (make("causal", [1, 1]), "causal", "nothing"),
        (make("plugin_version", 1), "plugin_version", "an INT, 1"),
        (make("plugin_version", 1.0), "plugin_version", "a FLOAT, 1"),
        (make("plugin_version", b"1\0x"), "plugin_version", "version 1\\0x"),
        (make("plugin_version", "1" * 100), "plugin_version", f"version {'1' * 64}..."),
        (make("plugin_version", "1" + "é" * 40), "plugin_version", f"version 1{'?' * 63}..."),
        (make("causal", b"\xff"), "causal", 'a STRING, "?"'),
    ],
    ids=[
        *("nan", "infinite", "huge", "negative_cap", "scale_as_int", "scale_as_text", "causal_as_float"),
        *("causal_as_text", "list", "version_as_int", "version_as_float", "version_with_a_nul", "long_version"),
        *("version_cut_in_a_character", "no_text"),
    ],
)
def test_a_wrong_number_is_named_when_the_session_opens(edit: Edit, name: str, got: str) -> None:
    with pytest.raises(Exception, match="cannot create FlashAttention") as error:
        open_session(edit)
    refused(error, f"attribute {name}", f"got   {got}")


def no_shapes(proto: onnx.ModelProto) -> None:
    for value in [*proto.graph.input, *proto.graph.output]:
        value.type.tensor_type.ClearField("shape")


def shaped(*dims: int) -> OrtValue:
    """An empty tensor, however large its other sizes are."""
    return OrtValue.ortvalue_from_shape_and_type(list(dims), np.float32)


# All without an element, so that a machine has them; the sizes must be refused all the same, in the runtime's words
# where it adds them up before the library is asked.
OVERFLOWS: dict[str, tuple[Callable[[], dict[str, OrtValue]], str]] = {
    "batch_past_int32": (
        lambda: {n: shaped(2**31, 0, 128) for n in ("query", "key", "value")},
        "tensor query.*batch 2147483648.*at most 2147483647",
    ),
    "head_dim_past_int32": (
        lambda: {"query": shaped(0, 3, 2**33), "key": shaped(0, 5, 2**33), "value": shaped(0, 5, 128)},
        "tensor query.*head dim 4294967296.*at most 2147483647",
    ),
    "keys_past_the_kernels": (
        lambda: {"query": shaped(0, 3, 128), "key": shaped(0, 2**31 + 7, 128), "value": shaped(0, 2**31 + 7, 128)},
        "seqlen_kv is 2147483655",
    ),
    "keys_past_what_a_sum_counts": (
        lambda: {"query": shaped(0, 3, 128), "key": shaped(0, 2**24 + 1, 128), "value": shaped(0, 2**24 + 1, 128)},
        "seqlen_kv is 16777217",
    ),
    "product_past_64_bits": (
        lambda: {"query": shaped(0, 2**40, 2**30), "key": shaped(0, 5, 2**30), "value": shaped(0, 5, 2**30)},
        r"tensor query.*shape \[0, 1099511627776, 1073741824\].*fits 63 bits",
    ),
    "output_past_64_bits": (
        lambda: {"query": shaped(0, 2**40, 128), "key": shaped(0, 0, 128), "value": shaped(0, 0, 2**30)},
        "tensor output.*fits 63 bits",
    ),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_sizes_that_overflow_are_refused(name: str) -> None:
    given, said = OVERFLOWS[name]
    session = open_session(no_shapes)
    with pytest.raises(Exception, match=f"(?s)cannot run FlashAttention.*{said}") as error:
        session.run_with_ort_values(None, given())
    refused(error)
    session.run(None, inputs())  # and the session goes on


def test_a_page_table_past_the_kernels_is_refused() -> None:
    given = {n: OrtValue.ortvalue_from_numpy(a) for n, a in cache_feeds(cache_cases.make(DECODE)).items()}
    for name in ("query", "key", "value"):
        shape = given[name].shape()
        given[name] = shaped(0, *shape[1:])
    given["kv_lengths"] = OrtValue.ortvalue_from_numpy(np.zeros(0, np.int32))
    given["page_table"] = OrtValue.ortvalue_from_shape_and_type([0, 2**31 - 1], np.int32)
    with pytest.raises(Exception, match=r"seqlen_kv is 34359738352") as error:
        open_cache(no_shapes).run_with_ort_values(None, given)
    refused(error)

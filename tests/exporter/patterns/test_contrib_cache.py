# SPDX-License-Identifier: Apache-2.0
"""GroupQueryAttention with a cache, rotation and sinks, Attention with a cache: as ONNX Runtime computes them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter.patterns.test_contrib import fuse, model
from exporter.torch_exports import run

from flash_export import input_roles
from flash_export.op import DOMAIN

HEADS, KV_HEADS, DEPTH = 4, 2, 16  # ONNX Runtime rotates head dims of 16 n alone
QKV = f"float[B, S, {HEADS * DEPTH}] q, float[B, S, {KV_HEADS * DEPTH}] k, float[B, S, {KV_HEADS * DEPTH}] v"
PACKED = f"float[B, S, {(HEADS + 2 * KV_HEADS) * DEPTH}] q"
PAST = f"float[B, {KV_HEADS}, P, {DEPTH}] old_k, float[B, {KV_HEADS}, P, {DEPTH}] old_v, int32[B] last, int32 total"
PRESENT = f"float[B, S, N] out, float[B, {KV_HEADS}, A, {DEPTH}] pk, float[B, {KV_HEADS}, A, {DEPTH}] pv"


@dataclasses.dataclass(frozen=True)
class Step:
    """Sizes of one call: keys of each batch entry after it, and the length of the buffer before it."""

    seqlen_q: int
    buffer: int
    totals: tuple[int, ...]
    limit: int = 0

    @property
    def total(self) -> int:
        return self.limit or max(self.totals)


DECODE, UNEVEN, LONG_BUFFER = Step(1, 5, (6, 6)), Step(1, 5, (6, 4)), Step(1, 9, (6, 4))
PROMPT, PROMPT_INTO_BUFFER = Step(5, 0, (5, 5)), Step(5, 9, (5,))
CHUNK, CHUNK_INTO_BUFFER = Step(3, 5, (8,)), Step(3, 12, (8,))
STEPS = {
    "decode": DECODE,
    "uneven": UNEVEN,
    "long_buffer": LONG_BUFFER,
    "prompt": PROMPT,
    "prompt_into_buffer": PROMPT_INTO_BUFFER,
    "chunk": CHUNK,
    "chunk_into_buffer": CHUNK_INTO_BUFFER,
}


def grouped(attributes: str = "", more: str = "", inputs: str = "", *, packed: bool = False) -> onnx.ModelProto:
    """A node with a cache; ``more`` are its inputs behind ``total_sequence_length``, declared by ``inputs``."""
    written = ", ".join([f"num_heads = {HEADS}, kv_num_heads = {KV_HEADS}", *([attributes] if attributes else [])])
    operands = "q, , " if packed else "q, k, v"
    return model(
        f"GroupQueryAttention <{written}> ({operands}, old_k, old_v, last, total{more})",
        f"{PACKED if packed else QKV}, {PAST}{inputs}",
        PRESENT,
        "out, pk, pv",
    )


def feeds(proto: onnx.ModelProto, step: Step, special: dict[str, np.ndarray] | None = None) -> list[np.ndarray]:
    """Random floats of the declared shapes, the step's lengths, and ``special`` arrays as they are."""
    random = np.random.default_rng(7)
    sizes = {"B": len(step.totals), "S": step.seqlen_q, "P": step.buffer, "T": step.total}
    known = {"last": np.array(step.totals, np.int32) - 1, "total": np.array(step.total, np.int32)} | (special or {})
    arrays = []
    for value in proto.graph.input:
        shape = [sizes[d.dim_param] if d.dim_param else d.dim_value for d in value.type.tensor_type.shape.dim]
        arrays.append(known.get(value.name, random.standard_normal(shape).astype(np.float32)))
    return arrays


def assert_same(proto: onnx.ModelProto, step: Step, special: dict[str, np.ndarray] | None = None) -> None:
    fused, site = fuse(proto)
    assert site.status == "fused", site.reason
    assert [n.op_type for n in fused.graph.node if n.domain == DOMAIN] == ["FlashAttentionEx"]
    assert not [n for n in fused.graph.node if n.domain == "com.microsoft"]
    arrays = feeds(proto, step, special)
    right, got = run(proto.SerializeToString(), arrays), run(fused.SerializeToString(), arrays)
    assert len(right) == len(got) == 3
    for ours, theirs in zip(got, right, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, atol=5e-6, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_new_keys_stand_where_the_lengths_say(name: str, packed: bool) -> None:
    assert_same(grouped(packed=packed), STEPS[name])


@pytest.mark.parametrize("attributes", ["local_window_size = 3", "local_window_size = 1", "softcap = 1.5, scale = 0.6"])
@pytest.mark.parametrize("name", ["uneven", "chunk", "prompt"])
def test_windows_and_caps_reach_into_the_cache(name: str, attributes: str) -> None:
    assert_same(grouped(attributes), STEPS[name])


@pytest.mark.parametrize("name", ["uneven", "chunk", "prompt", "long_buffer"])
def test_without_a_causal_mask_the_length_alone_hides(name: str) -> None:
    assert_same(grouped("causal = 0"), STEPS[name])


def test_a_padded_prompt_is_right_at_its_tokens() -> None:
    """The operator leaves the output behind the tokens unspecified; its cache there holds what was handed in."""
    proto, lengths = grouped(), (5, 3)
    arrays = feeds(proto, Step(5, 0, lengths))
    right, got = run(proto.SerializeToString(), arrays), run(fuse(proto)[0].SerializeToString(), arrays)
    for entry, count in enumerate(lengths):
        np.testing.assert_allclose(got[0][entry, :count], right[0][entry, :count], atol=5e-6, rtol=0)
    np.testing.assert_array_equal(got[1], right[1])
    assert np.isfinite(got[0]).all()


@pytest.mark.parametrize(("buffer", "limit"), [(7, 8), (12, 12)])
def test_a_chunk_that_says_how_many_of_its_tokens_count(buffer: int, limit: int) -> None:
    proto = grouped(more=", , , , , , , , , , valid", inputs=", int32[B] valid")
    counts = np.array([3, 1], np.int32)
    arrays = feeds(proto, Step(3, buffer, (8, 4), limit), {"valid": counts})
    right, got = run(proto.SerializeToString(), arrays), run(fuse(proto)[0].SerializeToString(), arrays)
    for entry, count in enumerate(counts):
        np.testing.assert_allclose(got[0][entry, :count], right[0][entry, :count], atol=5e-6, rtol=0)
    np.testing.assert_array_equal(got[1], right[1])


def tables(half: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    angles = random.uniform(0, 6, (20, half))
    return {"c": np.cos(angles).astype(np.float32), "s": np.sin(angles).astype(np.float32)}


@pytest.mark.parametrize(("interleaved", "half", "packed"), list(itertools.product((0, 1), (8,), (False, True))))
@pytest.mark.parametrize("name", ["uneven", "chunk", "prompt"])
def test_queries_and_keys_are_rotated_by_their_positions(name: str, interleaved: int, half: int, packed: bool) -> None:
    declared = f", float[20, {half}] c, float[20, {half}] s"
    attributes = f"do_rotary = 1, rotary_interleaved = {interleaved}"
    assert_same(grouped(attributes, ", c, s", declared, packed=packed), STEPS[name], tables(half))


@pytest.mark.parametrize(
    ("name", "given"),
    [("uneven", [[2], [9]]), ("chunk", [[2, 7, 1]]), ("prompt", [[2, 3, 4, 5, 6], [1, 1, 9, 3, 4]])],
)
def test_given_positions_are_taken_as_the_operator_takes_them(name: str, given: list[list[int]]) -> None:
    declared = ", float[20, 8] c, float[20, 8] s, int64[B, S] at"
    special = tables(8) | {"at": np.array(given, np.int64)}
    assert_same(grouped("do_rotary = 1", ", c, s, at", declared), STEPS[name], special)


def test_sinks_and_the_smooth_softmax_are_sinks() -> None:
    sinks = {"sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32)}
    assert_same(grouped(more=", , , , , sinks", inputs=f", float[{HEADS}] sinks"), UNEVEN, sinks)
    assert_same(grouped("smooth_softmax = 1"), UNEVEN)


def test_a_bias_is_added_to_the_cached_keys_too() -> None:
    assert_same(grouped(more=", , , , bias", inputs=f", float[1, {HEADS}, S, T] bias"), UNEVEN)


REFUSED = {
    "quantized": (grouped(more=", , , , , , one", inputs=", float[1] one"), "quantized"),
    "normalised": (grouped(more=", , , , , , , , qn, kn", inputs=f", float[{DEPTH}] qn, float[{DEPTH}] kn"), "norms"),
    "evicts": (grouped("local_window_size = 4, sliding_window_cache = 1"), "cache_in_place"),
    "no_tables": (grouped("do_rotary = 1"), "rotary_tables"),
    "no_lengths": (
        model(f"GroupQueryAttention <num_heads = {HEADS}, kv_num_heads = {KV_HEADS}> (q, k, v)", QKV),
        "lengths",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_with_its_own_reason(name: str) -> None:
    proto, why = REFUSED[name]
    fused, site = fuse(proto)
    assert site.reason is not None
    assert why in (site.reason.code, *site.reason.action.split())
    assert fused.graph.node == proto.graph.node


WIDE = 32
PACKED_WEIGHTS = f"float[B, S, 9] x, float[9, {3 * WIDE}] w, float[{3 * WIDE}] b"
ONE_CACHE = f"float[2, B, 4, P, {WIDE // 4}] past"


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_keys_and_values_of_one_cache_are_joined_and_handed_on(seqlen_q: int, past: int, causal: int) -> None:
    proto = model(
        f"Attention <num_heads = 4, unidirectional = {causal}> (x, w, b, m, past)",
        f"{PACKED_WEIGHTS}, int32[B, A] m, {ONE_CACHE}",
        f"float[B, S, {WIDE}] out, float[2, B, 4, A, {WIDE // 4}] present",
        "out, present",
    )
    fused, site = fuse(proto)
    assert site.status == "fused", site.reason
    random = np.random.default_rng(5)
    sizes = {"B": 2, "S": seqlen_q, "P": past, "A": past + seqlen_q}
    arrays = []
    for value in proto.graph.input:
        shape = [sizes[d.dim_param] if d.dim_param else d.dim_value for d in value.type.tensor_type.shape.dim]
        arrays.append(random.standard_normal(shape).astype(np.float32))
    mask = np.ones((2, past + seqlen_q), np.int32)
    mask[1, 1:3] = 0
    arrays[3] = mask
    right, got = run(proto.SerializeToString(), arrays), run(fused.SerializeToString(), arrays)
    for ours, theirs in zip(got, right, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-6, rtol=0)


def test_a_mask_that_counts_cached_keys_is_drawn_full() -> None:
    """Rows behind the tokens of a padded prompt are unspecified: no check can compare them."""
    text = (
        '<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>\n'
        f"main ({QKV}, float[B, {KV_HEADS}, P, {DEPTH}] old_k, float[B, {KV_HEADS}, P, {DEPTH}] old_v,"
        " int64[B, T] mask, int32 total) => (float[B, S, N] out)\n"
        "<int64[1] ax1 = {1}, int32 one = {1}>\n{\n"
        "sum = ReduceSum <keepdims = 0> (mask, ax1)\n narrow = Cast <to = 6> (sum)\n last = Sub (narrow, one)\n"
        f"out = com.microsoft.GroupQueryAttention <num_heads = {HEADS}, kv_num_heads = {KV_HEADS}>"
        " (q, k, v, old_k, old_v, last, total)\n}\n"
    )
    roles = input_roles.read_roles(ir.from_proto(onnx.parser.parse_model(text)))
    assert roles["mask"].kind == "size"

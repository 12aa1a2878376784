# SPDX-License-Identifier: Apache-2.0
"""The operator in standard ONNX ops: model-local functions that let a fused file run without any library of ours.

ONNX Runtime, onnx's reference evaluator, shape inference and TensorRT without the plugin all read the body instead
of the node. It computes in fp32 between two casts and takes the node's attributes by reference.

A body holds only what the nodes of its file use: softcap, windows, lengths and the like are left out where every
node has them off, so a plain file gets a plain body (``Softmax`` between two ``MatMul``) that other tools recognise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

import onnx_ir as ir

from flash_export.errors import UnsupportedModel
from flash_export.function_builder import CONSTANT_TAKES_NUMBERS, FunctionBuilder
from flash_export.function_cache import CacheWriter
from flash_export.function_layout import LayoutWriter
from flash_export.op import (
    CACHE_OPERATORS,
    DOMAIN,
    FLASH_ATTENTION_PACKED,
    FLOAT_ATTRIBUTES,
    INT_ATTRIBUTES,
    OPERATORS,
    STRING_ATTRIBUTES,
    VERSION,
    Operator,
)

OLDEST_OPSET = 11
CAST_LIKE_SINCE = 15
BEYOND_ANY_KEY = 1 << 40
"""Stands for "no limit" in key positions; int32 windows and lengths cannot reach it and sums cannot overflow."""

Used = Literal["never", "sometimes", "always"]


@dataclasses.dataclass(frozen=True, slots=True)
class Features:
    """What the nodes of one operator name use, all of them together."""

    layouts: frozenset[int]
    grouped: bool
    softcap: bool
    causal: bool
    bottom_right: bool
    windows: bool
    bias: Used
    kv_lengths: Used
    sinks: Used
    dtypes: frozenset[ir.DataType]
    fixed: dict[str, int | float]


def functions_for(nodes: Iterable[ir.Node], opset: int) -> list[ir.Function]:
    """One function for each operator name among ``nodes``; nodes of other domains are passed over.

    Args:
        nodes: the nodes of the file, functions and subgraphs included; every attribute written out. Below opset 15
            the query's dtype must be known.
        opset: the file's opset of the default domain; ONNX Runtime refuses a body of another one.

    Raises:
        UnsupportedModel: the opset is below 11, or too old for what the nodes differ in (their dtype below 15, an
            attribute below 12); the nodes of a cache form differ in their layout.
    """
    if opset < OLDEST_OPSET:
        raise UnsupportedModel(
            "cannot write the fallback body of FlashAttention",
            where=f"opset {opset} of the model",
            got=f"opset {opset}",
            need=f"opset {OLDEST_OPSET} or newer",
            do="export the model at a newer opset, or leave the body out with --no-fallback",
        )
    by_name: dict[str, list[ir.Node]] = {}
    for node in nodes:
        if node.domain == DOMAIN and node.op_type in OPERATORS:
            by_name.setdefault(node.op_type, []).append(node)
    return [_function(operator, by_name[name], opset) for name, operator in OPERATORS.items() if name in by_name]


def _features(nodes: list[ir.Node]) -> Features:
    def values(name: str) -> list[int | float]:
        return [node.attributes[name].value for node in nodes]

    def used(name: str) -> Used:
        on = values(name)
        return "always" if all(on) else "sometimes" if any(on) else "never"

    windows = any(w >= 0 for name in ("window_left", "window_right") for w in values(name))
    names = [*INT_ATTRIBUTES, *FLOAT_ATTRIBUTES]
    return Features(
        layouts=frozenset(int(v) for v in values("layout")),
        grouped=values("q_num_heads") != values("kv_num_heads"),
        softcap=any(values("softcap")),
        causal=any(values("causal")),
        bottom_right=any(values("diagonal")) and (any(values("causal")) or windows),
        windows=windows,
        bias=used("has_bias"),
        kv_lengths=used("has_kv_lengths"),
        sinks=used("has_sinks"),
        dtypes=frozenset(node.inputs[0].dtype or ir.DataType.UNDEFINED for node in nodes if node.inputs[0]),
        fixed={name: values(name)[0] for name in names if len(set(values(name))) == 1},
    )


def _function(operator: Operator, nodes: list[ir.Node], opset: int) -> ir.Function:
    features = _features(nodes)
    _refuse_what_the_opset_cannot_say(operator, features, opset)
    build = FunctionBuilder(opset, features.fixed)
    inputs = {name: ir.Value(name=name) for name in operator.inputs}
    outputs = _Body(operator, features, build, inputs).outputs()
    for value, name in zip(outputs, operator.outputs, strict=True):
        value.name = name
    graph = ir.Graph(list(inputs.values()), outputs, nodes=build.nodes, opset_imports={"": opset}, name=operator.name)
    kinds = (
        (INT_ATTRIBUTES, ir.AttributeType.INT),
        (FLOAT_ATTRIBUTES, ir.AttributeType.FLOAT),
        (STRING_ATTRIBUTES, ir.AttributeType.STRING),
    )
    attributes = [ir.Attr(name, kind, None) for names, kind in kinds for name in names]
    function = ir.Function(DOMAIN, operator.name, graph=graph, attributes=attributes)
    function.doc_string = (
        f"{operator.name} of {DOMAIN}, version {VERSION}, in standard ops, for what the nodes of this file use. "
        "Change their attributes with flash-export, which writes the body anew."
    )
    return function


def _refuse_what_the_opset_cannot_say(operator: Operator, features: Features, opset: int) -> None:
    """Old opsets cannot cast back to "the query's dtype" (before 15) or read an INT attribute (before 12)."""
    if opset < CAST_LIKE_SINCE and (len(features.dtypes) != 1 or ir.DataType.UNDEFINED in features.dtypes):
        raise UnsupportedModel(
            f"cannot write the fallback body of {operator.name}",
            where=f"the {operator.name} nodes of an opset-{opset} model",
            got="queries of dtype " + ", ".join(sorted(d.name for d in features.dtypes)),
            need=f"one known dtype, or opset {CAST_LIKE_SINCE} or newer",
            do="export the model at a newer opset, or leave the body out with --no-fallback",
        )
    if operator.name in CACHE_OPERATORS and len(features.layouts) > 1:
        raise UnsupportedModel(
            f"cannot write the fallback body of {operator.name}",
            where=f"the {operator.name} nodes of the model",
            got="nodes of both layouts",
            need="one layout for all caches of a file",
            do="give every cache the same layout, or leave the body out with --no-fallback",
        )
    varying = [name for name in [*INT_ATTRIBUTES, *FLOAT_ATTRIBUTES] if name not in features.fixed]
    if opset < CONSTANT_TAKES_NUMBERS and varying:
        raise UnsupportedModel(
            f"cannot write the fallback body of {operator.name}",
            where=f"the {operator.name} nodes of an opset-{opset} model",
            got="nodes that differ in " + ", ".join(varying),
            need=f"the same attributes on all of them, or opset {CONSTANT_TAKES_NUMBERS} or newer",
            do="export the model at a newer opset, or leave the body out with --no-fallback",
        )


class _Body:
    """Writes one body. Values inside are heads-first, ``[B, H, S, D]``, fp32; positions are int64."""

    def __init__(
        self, operator: Operator, features: Features, build: FunctionBuilder, inputs: dict[str, ir.Value]
    ) -> None:
        self.operator = operator
        self.features = features
        self.build = build
        self.inputs = inputs
        self.first = inputs[operator.inputs[0]]
        self.layout = LayoutWriter(build, features.layouts, self.first)
        self.cache = None
        if operator.name in CACHE_OPERATORS:
            self.cache = CacheWriter(build, next(iter(features.layouts)), inputs)

    def outputs(self) -> list[ir.Value]:
        """The function's outputs, in the operator's order."""
        build = self.build
        query, key, value = self._heads_first()
        lengths, bias = self._lengths(key), self._bias()
        if lengths is not None:
            value = self._without_keys_past(lengths, value)
        if self.features.grouped:
            key, value = self.layout.repeated_heads(key), self.layout.repeated_heads(value)
        scores = self._scores(query, key)
        if bias is not None:
            scores = build.op("Add", "biased", scores, bias)
        visible = self._visible(query, key, lengths, bias)
        if visible is not None:
            scores = build.op("Where", "masked", visible, scores, build.number("minus_infinity", float("-inf")))
        if "lse" in self.operator.outputs:
            output, lse = self._softmax_with_lse(query, scores, value)
            written = [] if self.cache is None else self.cache.outputs
            return [self._as_given(output, query), lse, *written]
        return [self._as_given(self._softmax(scores, visible, value), query)]

    def _heads_first(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        if self.operator == FLASH_ATTENTION_PACKED:
            return self.layout.packed(self.first)
        q_heads = kv_heads = self.build.int_attribute("q_num_heads")
        if self.features.grouped:
            kv_heads = self.build.int_attribute("kv_num_heads")
        key, value = self.inputs["key"], self.inputs["value"]
        if self.cache is not None:
            key, value = self.cache.keys, self.cache.values
        return (
            self.layout.heads_first(self.inputs["query"], q_heads),
            self.layout.heads_first(key, kv_heads),
            self.layout.heads_first(value, kv_heads),
        )

    def _as_given(self, output: ir.Value, query: ir.Value) -> ir.Value:
        """``[B, Hq, Sq, Dv]`` in the nodes' layout and the query's dtype."""
        output = self.layout.in_layout(output, query)
        if self.build.opset >= CAST_LIKE_SINCE:
            return self.build.op("CastLike", "output", output, self.first)
        return self.build.op("Cast", "output", output, to=int(next(iter(self.features.dtypes))))

    def _scores(self, query: ir.Value, key: ir.Value) -> ir.Value:
        """softcap(scale * Q.K^T), ``[B, Hq, Sq, Skv]``."""
        build, features = self.build, self.features
        scaled = build.op("Mul", "scaled_query", query, build.float_attribute("scale"))
        scores = build.op("MatMul", "scores", scaled, build.op("Transpose", "key_transposed", key, perm=[0, 1, 3, 2]))
        if features.softcap:
            cap = build.float_attribute("softcap")
            on = build.op("Greater", "softcap_on", cap, build.number("no_cap", 0.0))
            divisor = build.op("Where", "softcap_or_one", on, cap, build.number("one_cap", 1.0))
            tanh = build.op("Tanh", "tanh", build.op("Div", "scores_over_cap", scores, divisor))
            scores = build.op("Where", "capped", on, build.op("Mul", "scores_capped", tanh, divisor), scores)
        return scores

    def _bias(self) -> ir.Value | None:
        """The bias in fp32, 0 where a node has none; None when no node has one."""
        if self.features.bias == "never":
            return None
        bias = self.build.op("Cast", "bias_fp32", self.inputs["bias"], to=int(ir.DataType.FLOAT))
        return self._where_used("has_bias", self.features.bias, bias, self.build.number("no_bias", 0.0))

    def _where_used(self, flag: str, used: Used, value: ir.Value, neutral: ir.Value) -> ir.Value:
        """A side input that some nodes do not have is never read there, whatever stands in its place."""
        if used == "always":
            return value
        return self.build.op("Where", f"{value.name}_or_neutral", self.build.flag(flag), value, neutral)

    def _lengths(self, key: ir.Value) -> ir.Value | None:
        """kv_lengths clamped to Skv, ``[B or 1, 1, 1, 1]``; None when no node has them.

        A negative one needs no clamp: it shows no key, as 0 does.
        """
        build, features = self.build, self.features
        if self.cache is not None:
            return build.reshape("lengths_of_batch", self.cache.lengths, [-1, 1, 1, 1])
        if features.kv_lengths == "never":
            return None
        seqlen_kv = build.dim("seqlen_kv", key, 2)
        given = build.op("Cast", "kv_lengths_int64", self.inputs["kv_lengths"], to=int(ir.DataType.INT64))
        given = self._where_used("has_kv_lengths", features.kv_lengths, given, seqlen_kv)
        given = build.op("Where", "lengths", build.op("Less", "short", given, seqlen_kv), given, seqlen_kv)
        return build.reshape("lengths_of_batch", given, [-1, 1, 1, 1])

    def _without_keys_past(self, lengths: ir.Value, value: ir.Value) -> ir.Value:
        """Zero from the length on: a masked probability of 0 times what stands there could still be NaN."""
        build = self.build
        rows = build.reshape("value_rows", build.count("value_row", build.dim("values", value, 2)), [-1, 1])
        kept = build.op("Less", "value_kept", rows, lengths)
        return build.op("Where", "value_within_length", kept, value, build.number("no_value", 0.0))

    def _visible(
        self, query: ir.Value, key: ir.Value, lengths: ir.Value | None, bias: ir.Value | None
    ) -> ir.Value | None:
        """Which keys count, broadcastable to the scores; None: all of them."""
        build, features = self.build, self.features
        terms = []
        if features.causal or features.windows or lengths is not None:
            seqlen_kv = build.dim("seqlen_kv", key, 2)
            keys = build.count("key_position", seqlen_kv)
            if features.causal or features.windows:
                terms += self._geometry(keys, query, seqlen_kv if lengths is None else lengths)
            if lengths is not None:
                terms.append(build.op("Less", "within_length", keys, lengths))
        if bias is not None:
            hidden = build.op("Equal", "hidden_by_bias", bias, build.number("minus_infinity", float("-inf")))
            terms.append(build.op("Not", "shown_by_bias", hidden))
        if not terms:
            return None
        visible = terms[0]
        for term in terms[1:]:
            visible = build.op("And", "visible", visible, term)
        return visible

    def _geometry(self, keys: ir.Value, query: ir.Value, length: ir.Value) -> list[ir.Value]:
        """What causal and windows show: the key's distance from the query's diagonal within [-left, right]."""
        build, features = self.build, self.features
        seqlen_q = build.dim("seqlen_q", query, 2)
        rows = build.reshape("query_rows", build.count("query_row", seqlen_q), [-1, 1])
        if features.bottom_right:
            shift = build.op("Sub", "length_minus_seqlen_q", length, seqlen_q)
            rows = build.op(
                "Add", "diagonal_at", rows, build.op("Mul", "shift", shift, build.int_attribute("diagonal"))
            )
        distance = build.op("Sub", "distance", keys, rows)
        zero, everything = build.ints("zero", 0), build.ints("everything", BEYOND_ANY_KEY)
        right = everything
        terms = []
        if features.windows:
            left, right = (self._window(name, everything) for name in ("window_left", "window_right"))
            too_early = build.op("Less", "before_window", distance, build.op("Neg", "first_distance", left))
            terms.append(build.op("Not", "after_window_start", too_early))
        if features.causal:
            right = build.op("Where", "last_distance", build.flag("causal"), zero, right)
        terms.append(build.op("Not", "before_window_end", build.op("Greater", "after_window", distance, right)))
        return terms

    def _window(self, name: str, everything: ir.Value) -> ir.Value:
        given = self.build.int_attribute(name)
        off = self.build.op("Less", f"{name}_off", given, self.build.ints("zero", 0))
        return self.build.op("Where", f"{name}_limit", off, everything, given)

    def _softmax(self, scores: ir.Value, visible: ir.Value | None, value: ir.Value) -> ir.Value:
        build, features = self.build, self.features
        probs = build.op("Softmax", "probs", scores, axis=-1)
        # A query that sees no key has NaN here. With a top-left causal mask alone every query sees key 0.
        if visible is not None and (features.bottom_right or features.windows):
            probs = build.op("Where", "probs_or_zero", visible, probs, build.number("no_prob", 0.0))
        return build.op("MatMul", "attended", probs, value)

    def _softmax_with_lse(self, query: ir.Value, scores: ir.Value, value: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Output and lse from the same row maximum and row sum, the sink included."""
        build, features = self.build, self.features
        infinity = build.number("minus_infinity", float("-inf"))
        column = build.shape_of(build.first_of_last("query_column", query))  # [B, Hq, Sq, 1]
        row_max = self._reduced("ReduceMax", "largest_score", scores, build.op("Expand", "no_score", infinity, column))
        sinks = None
        if features.sinks != "never":
            sinks = self._where_used("has_sinks", features.sinks, self.inputs["sinks"], infinity)
            sinks = build.reshape("sink_of_head", sinks, [1, -1, 1, 1])
            row_max = build.op("Max", "largest", row_max, sinks)
        # A row that sums nothing has a maximum of -inf, and (-inf) - (-inf) is NaN: 0 gives it a sum of 0 instead.
        zero, nothing = build.number("zero_fp32", 0.0), build.op("Equal", "sums_nothing", row_max, infinity)
        row_max = build.op("Where", "row_max", nothing, zero, row_max)
        probs = build.op("Exp", "unnormalised", build.op("Sub", "below_max", scores, row_max))
        row_sum = self._reduced("ReduceSum", "sum_of_keys", probs, build.op("Expand", "no_sum", zero, column))
        if sinks is not None:
            sink_term = build.op("Exp", "sink_term", build.op("Sub", "sink_below_max", sinks, row_max))
            row_sum = build.op("Add", "row_sum", row_sum, sink_term)
        divisor = build.op("Where", "row_sum_or_one", nothing, build.number("one_fp32", 1.0), row_sum)
        output = build.op("Div", "attended", build.op("MatMul", "weighted", probs, value), divisor)
        lse = build.op("Add", "lse_column", build.op("Log", "log_sum", row_sum), row_max)
        return output, build.reshape("lse", lse, [0, 0, 0])

    def _reduced(self, op_type: str, name: str, x: ir.Value, of_nothing: ir.Value) -> ir.Value:
        """``[B, Hq, Sq, Skv]`` to ``[B, Hq, Sq, 1]``.

        ONNX Runtime 1.30 and older give the reduction of an empty tensor the tensor's own shape, so what it should be
        then is put behind it and the first column taken.
        """
        build = self.build
        both = build.op("Concat", f"{name}_or_nothing", build.reduce_last(op_type, name, x), of_nothing, axis=-1)
        return build.first_of_last(f"{name}_column", both)

# SPDX-License-Identifier: Apache-2.0
"""The layout part of the function bodies: the operator's tensors as fp32 ``[B, H, S, D]``, and the way back.

A shape holds no -1, which has no answer for an empty tensor, and is no Concat with one unknown in it: ONNX Runtime
rewrites that to -1. So sizes are multiplied or divided after the Concat.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from flash_export.function_builder import FunctionBuilder
from flash_export.op import LAYOUT_BHSD, LAYOUT_BSHD

ALLOW_ZERO_SINCE = 14
"""Since which opset Reshape can take a 0 as an empty axis."""


class LayoutWriter:
    """Moves tensors between the nodes' layout and heads-first.

    Args:
        build: where the nodes go.
        layouts: the ``layout`` values among the nodes that call the body. When both are, one Transpose serves them:
            a layout-1 tensor goes through it as ``[B, 1, H*S, D]``. Below opset 14 such a body cannot take empty
            sequences.
        first: the function's first input, query or qkv.
    """

    def __init__(self, build: FunctionBuilder, layouts: frozenset[int], first: ir.Value) -> None:
        self.build = build
        self.layouts = layouts
        self.first = first

    def heads_first(self, given: ir.Value, heads: ir.Value) -> ir.Value:
        """``[B, S, H*D]`` or ``[B, H, S, D]`` as fp32 ``[B, H, S, D]``."""
        build, name = self.build, given.name
        x = build.op("Cast", f"{name}_fp32", given, to=int(ir.DataType.FLOAT))
        if self.layouts == {LAYOUT_BHSD}:
            return x
        if self.layouts == {LAYOUT_BSHD}:
            last, same = build.dim("last_dim", x, [-1]), build.ints("same", [0, 0])
            joined = build.concat("joined_dims", same, build.one(heads), last)
            by = build.concat("divisors", build.ints("ones", [1, 1, 1]), build.one(heads))
            split = build.op("Reshape", f"{name}_split", x, build.op("Div", "split_dims", joined, by))
            return build.op("Transpose", f"{name}_heads", split, perm=[0, 2, 1, 3])
        batch, seqlen = build.dim("batch", x, 0), self._seqlen(x)
        rows, columns = self._around_transpose(seqlen, heads)
        last = build.dim("last_dim", x, -1)
        head_dim = build.op("Div", "head_dim", last, self._if_bhsd("in_last", build.ints("one", 1), heads))
        split = self._reshaped(f"{name}_split", x, [batch, rows, columns, head_dim])
        swapped = build.op("Transpose", f"{name}_swapped", split, perm=[0, 2, 1, 3])
        return self._reshaped(f"{name}_heads", swapped, [batch, heads, seqlen, head_dim])

    def packed(self, qkv: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Query, key and value from ``[B, S, (Hq + 2*Hkv)*D]``."""
        build = self.build
        q_heads, kv_heads = build.int_attribute("q_num_heads"), build.int_attribute("kv_num_heads")
        key_end = build.op("Add", "key_end", q_heads, kv_heads)
        heads = build.op("Add", "all_heads", key_end, kv_heads)
        x = self.heads_first(qkv, heads)
        begin, axis = build.ints("first_head", [0]), build.ints("head_axis", [1])
        q_end, k_end, end = build.one(q_heads), build.one(key_end), build.one(heads)
        return (
            build.op("Slice", "query_heads", x, begin, q_end, axis),
            build.op("Slice", "key_heads", x, q_end, k_end, axis),
            build.op("Slice", "value_heads", x, k_end, end, axis),
        )

    def repeated_heads(self, x: ir.Value) -> ir.Value:
        """``[B, Hkv, S, D]`` to ``[B, Hq, S, D]``, each head Hq/Hkv times in a row."""
        build = self.build
        q_heads, kv_heads = build.int_attribute("q_num_heads"), build.int_attribute("kv_num_heads")
        group = build.op("Div", "group", q_heads, kv_heads)
        head_of = build.op("Div", "kv_head_of", build.count("q_head", q_heads), group)
        return build.op("Gather", f"{x.name}_repeated", x, head_of, axis=1)

    def in_layout(self, output: ir.Value, query: ir.Value) -> ir.Value:
        """``[B, Hq, Sq, Dv]`` back in the nodes' layout, still fp32; ``query`` is heads-first."""
        build = self.build
        if self.layouts == {LAYOUT_BHSD}:
            return output
        heads = build.int_attribute("q_num_heads")
        if self.layouts == {LAYOUT_BSHD}:
            head_dim, same = build.dim("v_head_dim", output, [-1]), build.ints("same", [0, 0])
            split = build.concat("split_dims", same, head_dim)
            by = build.concat("factors", build.ints("ones", [1, 1]), build.one(heads))
            rows_first = build.op("Transpose", "rows_first", output, perm=[0, 2, 1, 3])
            return build.op("Reshape", "joined", rows_first, build.op("Mul", "joined_dims", split, by))
        head_dim = build.dim("v_head_dim", output, -1)
        rows, columns = self._around_transpose(build.dim("seqlen_q", query, 2), heads)
        split = self._reshaped("output_split", output, [build.dim("batch", output, 0), columns, rows, head_dim])
        swapped = build.op("Transpose", "output_swapped", split, perm=[0, 2, 1, 3])
        last = build.op("Mul", "joined_dim", self._if_bhsd("in_last", build.ints("one", 1), heads), head_dim)
        # The rank is the query's: all its axes but the last, then the new last one.
        begin, end = build.ints("begin", [0]), build.ints("before_last", [-1])
        leading = build.op("Slice", "leading", build.shape_of(self.first), begin, end)
        return self._reshape("joined", swapped, build.concat("shape", leading, build.one(last)))

    def _seqlen(self, x: ir.Value) -> ir.Value:
        axis = self.build.op("Add", "seqlen_axis", self.build.ints("one", 1), self.build.int_attribute("layout"))
        return self.build.op("Gather", "seqlen", self.build.shape_of(x), axis, axis=0)

    def _around_transpose(self, seqlen: ir.Value, heads: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The two middle axes before the shared Transpose: (S, H) in layout 0, (1, H*S) in layout 1."""
        both = self.build.op("Mul", "heads_times_seqlen", heads, seqlen)
        rows = self._if_bhsd("rows", self.build.ints("one", 1), seqlen)
        return rows, self._if_bhsd("columns", both, heads)

    def _if_bhsd(self, name: str, then: ir.Value, otherwise: ir.Value) -> ir.Value:
        return self.build.op("Where", name, self.build.flag("layout"), then, otherwise)

    def _reshaped(self, name: str, x: ir.Value, dims: Sequence[ir.Value]) -> ir.Value:
        return self._reshape(name, x, self.build.concat("shape", *(self.build.one(d) for d in dims)))

    def _reshape(self, name: str, x: ir.Value, shape: ir.Value) -> ir.Value:
        exact = {"allowzero": 1} if self.build.opset >= ALLOW_ZERO_SINCE else {}
        return self.build.op("Reshape", name, x, shape, **exact)

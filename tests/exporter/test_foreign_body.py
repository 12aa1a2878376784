# SPDX-License-Identifier: Apache-2.0
"""A FlashAttention node is attention only where its body in the file says so: runtimes without the plugin run that."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from exporter.graphs import PLAIN, attention, fuse, model, only

from flash_export.find import find
from flash_export.rewrite import rewrite

MASKED = "keep = LessOrEqual (j, i)\n bias = Where (keep, zero, lowest)\n masked = Add (scaled, bias)"


@pytest.mark.parametrize("opset", [13, 18, 21])
def test_our_own_body_is_known_again(opset: int) -> None:
    for proto in (model(PLAIN, opset=opset), attention(MASKED, opset=opset)):
        fused = fuse(proto)[0]
        again = onnx.load_model_from_string(fused.SerializeToString())
        assert only(find(ir.from_proto(again))).status == "fused"


def test_a_body_that_computes_something_else_is_refused() -> None:
    fused = fuse(model(PLAIN))[0]
    fused.functions[0].node[-1].input.reverse()
    site = only(find(ir.from_proto(fused)))
    assert site.status == "refused"
    assert site.reason is not None
    assert site.reason.code == "foreign_body"


def test_a_body_for_an_overload_is_refused_whichever_comes_last() -> None:
    for turn in (1, -1):
        fused = fuse(model(PLAIN))[0]
        evil = onnx.FunctionProto()
        evil.CopyFrom(fused.functions[0])
        evil.overload = fused.graph.node[-1].overload = "evil"
        evil.node[-1].input.reverse()
        both = [fused.functions[0], evil][::turn]
        bodies = [onnx.FunctionProto.FromString(body.SerializeToString()) for body in both]
        del fused.functions[:]
        fused.functions.extend(bodies)
        site = only(find(ir.from_proto(fused)))
        assert site.reason is not None
        assert site.reason.code == "foreign_body"


def test_a_new_node_does_not_give_an_existing_one_another_body() -> None:
    both = PLAIN + PLAIN.replace("q,", "out,").replace("kt", "kt2").replace("scores", "scores2").replace(
        "scaled", "scaled2"
    ).replace("probs", "probs2").replace("out = MatMul", "last = MatMul")
    proto = model(both, outputs="float[B, 4, S, 8] last")
    converted = ir.from_proto(proto)
    first, second = find(converted)
    second.status = "not_attention"
    assert first.status == "fused"
    assert rewrite(converted, [first, second]) == 1
    half = ir.to_proto(converted)
    half.functions[0].node[-1].input.reverse()
    sites = find(ir.from_proto(half))
    assert [s.status for s in sites] == ["refused", "refused"]

# SPDX-License-Identifier: Apache-2.0
"""What integer tensors of any rank hold is what ONNX Runtime computes, and so is a length behind a computed Pad."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from exporter.graphs import both, fuse, length_at, model, only
from exporter.torch_exports import Wrapped, export, run

from flash_export.shapes import Shapes

CONSTANTS = (
    "int64[2] table = {3, 2}, int64[1] minus = {-1}, int64 first = {0}, int64 last = {-1}, "
    "int64[2] picked = {2, -2}, int64[2,1] column = {1, 0}, int64[1] zero = {0}, int64[1] one = {1}, "
    "int64[1] least = {-9223372036854775807}, int64[1] most = {9223372036854775807}, int64 five = {5}, "
    "int64[1] far = {7}, int64[1] long_before = {-100}"
)
SIX = "s = Shape (x)\n n = Neg (s)\n six = Concat <axis = 0> (s, n)\n m = Reshape (six, table)\n "
"""``m`` holds [[A, B], [C, -A], [-B, -C]]."""

TAKEN = {
    "a_row": "y = Gather <axis = 0> (m, first)",
    "the_last_column": "y = Gather <axis = 1> (m, last)",
    "rows": "y = Gather <axis = 0> (m, picked)",
    "rows_of_rows": "y = Gather <axis = -2> (m, column)",
    "the_first_rows": "y = Slice (m, zero, minus)",
    "a_column": "y = Slice (m, minus, most, one)",
    "rows_from_the_end": "y = Slice (m, minus, least, zero, minus)",
    "columns_from_the_end": "y = Slice (m, minus, least, one, minus)",
    "backward_from_before_the_first": "y = Slice (m, long_before, long_before, one, minus)",
    "forward_from_before_the_first": "y = Slice (m, long_before, minus, zero, one)",
    "a_truth": "seven = Reshape (far, minus)\n t = Cast <to = 9> (seven)\n y = Cast <to = 7> (t)",
    "turned": "y = Transpose (m)",
    "beside_itself": "y = Concat <axis = 1> (m, m)",
    "below_itself": "y = Concat <axis = -2> (m, m)",
    "plus_a_row": "r = Gather <axis = 0> (m, first)\n y = Add (m, r)",
    "chosen": "r = Gather <axis = 0> (m, first)\n c = Equal (zero, zero)\n y = Where (c, m, r)",
    "at_least_one": "y = Max (s, one)",
    "a_rest": "y = Mod (six, five)",
    "a_large_quotient": "y = Div (most, one)",
    "a_quotient_below_zero": "y = Div (long_before, far)",
}


SIZES = [{"A": 2, "B": 3, "C": 4}, {"A": 5, "B": 1, "C": 10}, {"A": 7, "B": 11, "C": 3}]


def learned(body: str) -> tuple[onnx.ModelProto, Shapes, ir.Value]:
    """The model with ``y`` in a row as its output, what is known of it, and ``y``."""
    text = SIX + body + "\n out = Reshape (y, minus)\n"
    proto = model(text, inputs="float[A, B, C] x", outputs="int64[M] out", constants=CONSTANTS)
    graph = ir.from_proto(proto).graph
    y = graph.outputs[0].producer().inputs[0]  # type: ignore[union-attr]
    assert y is not None
    return proto, Shapes(graph), y


@pytest.mark.parametrize("body", TAKEN.values(), ids=TAKEN)
def test_contents_are_what_onnx_runtime_computes(body: str) -> None:
    proto, known, y = learned(body)
    contents = known.contents(y)
    assert contents is not None
    for sizes in SIZES:
        right = run(proto.SerializeToString(), [np.zeros(tuple(sizes.values()), np.float32)])[0]
        assert [length_at(known, dim, sizes) for dim in contents] == right.tolist()


@pytest.mark.parametrize(
    "body",
    [
        "y = Slice (m, zero, most, far)",
        "y = Concat <axis = 0> (m, six)",
        "y = Concat <axis = 4> (m, m)",
        "y = Add (m, square_long)",
        "y = Mod <fmod = 1> (m, five)",
        "y = Max (s, one, far)",
        "y = Max (n, one)",
        "y = Slice (m, minus, most, one, minus)",
        "eight = Neg (far)\n y = Equal (n, eight)",
        "y = Cast <to = 9> (s)",
        "y = ConstantOfShape <value = int64[0] {}> (one)",
        "y = Mul (most, five)",
        "y = Neg (lowest)",
        "w = Cast <to = 6> (most)\n y = Cast <to = 7> (w)",
    ],
)
def test_what_onnx_runtime_would_refuse_or_is_not_known_has_no_contents(body: str) -> None:
    text = '<ir_version: 9, opset_import: ["" : 18]>\nmain (float[A, B, C] x) => (int64 y)\n'
    constants = f"{CONSTANTS}, int64[3] square_long = {{1, 2, 3}}, int64[1] lowest = {{-9223372036854775808}}"
    text += f"<{constants}>\n{{\n{SIX}{body}\n}}\n"
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    assert Shapes(graph).contents(graph.outputs[0]) is None


# --- a Pad whose pads are computed ----------------------------------------------------------------------------------


def padded_length(n: int) -> int:
    return -(-n // 5) * 5


def to_whole_blocks(x: torch.Tensor) -> torch.Tensor:
    """As LongT5 and Swin pad to whole blocks or windows, in a list of pads that PyTorch turns round."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 5))


@pytest.mark.parametrize("exporter", ["legacy17", "dynamo18"])
def test_a_length_behind_a_computed_pad_is_known(tmp_path: Path, exporter: str) -> None:
    path = tmp_path / "m.onnx"
    export(Wrapped(to_whole_blocks).eval(), [torch.ones(2, 7, 3)], path, exporter, [{0: "B", 1: "N"}])
    graph = ir.load(path).graph
    known = Shapes(graph)
    shape = known.shape(graph.outputs[0])
    assert shape is not None
    assert [dim.static for dim in shape][2] == 3
    names = {str(d) for d in graph.inputs[0].shape[:2]}  # type: ignore[index]
    assert shape[1].symbols - names, "a quotient"
    for n in range(1, 23):
        sizes = dict.fromkeys(names, n)
        assert length_at(known, shape[1], sizes) == padded_length(n)


@pytest.mark.parametrize(("opset", "call"), [(10, "y = Pad <pads = [0, 1, 0, 2, -1, 3]> (x)"), (18, "y = Pad (x, p)")])
def test_constant_pads_are_added(opset: int, call: str) -> None:
    constants = "int64[6] p = {0, 1, 0, 2, -1, 3}"
    proto = model(call, inputs="float[A, B, C] x", outputs="float[K, L, M] y", constants=constants, opset=opset)
    graph = ir.from_proto(proto).graph
    known = Shapes(graph)
    shape = known.shape(graph.outputs[0])
    assert shape is not None
    assert [length_at(known, dim, {"A": 4, "B": 5, "C": 6}) for dim in shape] == [6, 5, 9]


def test_pads_of_chosen_axes_leave_the_others() -> None:
    constants = "int64[2] p = {1, 2}, int64[1] axes = {-2}"
    body = "y = Pad (x, p, , axes)\n"
    proto = model(body, inputs="float[A, B, C] x", outputs="float[K, L, M] y", constants=constants)
    graph = ir.from_proto(proto).graph
    assert str(Shapes(graph).shape(graph.outputs[0])) == "(A, 3 + B, C)"


class Blocks(torch.nn.Module):
    """Attention within blocks of five, of a sequence that is padded to whole blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[0], x.shape[1]
        x = to_whole_blocks(x)
        blocks = x.reshape(batch, x.shape[1] // 5, 5, 2, 8)
        scores = torch.einsum("...qhd,...khd->...hqk", blocks, blocks * 0.5)
        mixed = torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), blocks + 1)
        return mixed.reshape(batch, -1, 16)[:, :length]


def test_attention_in_blocks_of_a_padded_sequence_is_fused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    export(Blocks().eval(), [torch.randn(2, 7, 16)], path, "legacy17", [{0: "B", 1: "N"}])
    proto = onnx.load(path)
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    for n in (1, 5, 11):
        x = np.random.default_rng(n).standard_normal((3, n, 16), np.float32)
        right, got = both(proto, fused, [x])
        np.testing.assert_allclose(got, right, atol=2e-6, rtol=0)

# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention in ONNX gives what eager PyTorch gives, for every way of calling it.

The reference is PyTorch in float64; the exported float32 graph may err twice as much as PyTorch's own float32 does,
plus two units in the last place.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from exporter.torch_models import Attention, standard_normal

import flash_export
from flash_export.errors import UnsupportedModel
from flash_export.export import quiet, translate


@dataclasses.dataclass(frozen=True)
class Case:
    """``query [B, Hq, Sq, D]``, ``key [B, Hkv, Skv, D]``, ``value [B, Hkv, Skv, Dv]`` and the call's arguments."""

    name: str
    query: tuple[int, ...] = (2, 3, 5, 8)
    key: tuple[int, ...] = (2, 3, 7, 8)
    value: tuple[int, ...] = (2, 3, 7, 8)
    mask: tuple[int, ...] | None = None
    mask_kind: str = "bool"
    arguments: dict[str, object] = dataclasses.field(default_factory=dict)

    def inputs(self) -> list[np.ndarray]:
        arrays = [standard_normal(*shape, seed=i) for i, shape in enumerate((self.query, self.key, self.value))]
        if self.mask is not None:
            visible = np.random.default_rng(3).random(self.mask) < 0.6
            if self.mask[-2] > 1:
                visible[..., 0, :] = False  # a row that sees nothing
            float_mask = np.where(visible, standard_normal(*self.mask, seed=4), -np.inf).astype(np.float32)
            arrays.append(visible if self.mask_kind == "bool" else float_mask)
        return arrays


CASES = [
    Case("plain"),
    Case("value of another head dim", value=(2, 3, 7, 11)),
    Case("scale", arguments={"scale": 0.1}),
    Case("scale of one", arguments={"scale": 1.0}),
    Case("scale below zero", arguments={"scale": -0.5}),
    Case("causal, more keys", arguments={"is_causal": True}),
    Case("causal, more queries", query=(2, 3, 9, 8), arguments={"is_causal": True}),
    Case("causal, one query", query=(2, 3, 1, 8), arguments={"is_causal": True}),
    Case("boolean mask", mask=(5, 7)),
    Case("boolean mask of every key", mask=(1, 7)),
    Case("boolean mask of a batch", mask=(2, 1, 1, 7)),
    Case("boolean mask of a head", mask=(3, 5, 7)),
    Case("float mask", mask=(2, 3, 5, 7), mask_kind="float"),
    Case("grouped", query=(2, 6, 5, 8), key=(2, 2, 7, 8), value=(2, 2, 7, 11), arguments={"enable_gqa": True}),
    Case("grouped with equal heads", arguments={"enable_gqa": True}),
    Case(
        "grouped, causal, scaled",
        query=(1, 4, 5, 8),
        key=(1, 2, 5, 8),
        value=(1, 2, 5, 8),
        arguments={"enable_gqa": True, "is_causal": True, "scale": 0.2},
    ),
    Case("multi-query by broadcasting", key=(2, 1, 7, 8), value=(2, 1, 7, 8)),
    Case("three dimensions", query=(6, 5, 8), key=(6, 7, 8), value=(6, 7, 8)),
    Case("head dim of one", query=(2, 3, 5, 1), key=(2, 3, 7, 1)),
]


def exported(case: Case, opset: int, *, dynamic: bool, arrays: list[np.ndarray] | None = None) -> bytes:
    tensors = [torch.from_numpy(a) for a in (arrays or case.inputs())]
    shapes = None
    if dynamic:
        axes = {0: torch.export.Dim.AUTO, len(case.query) - 2: torch.export.Dim.AUTO}
        shapes = (axes, axes, axes, *([None] if len(tensors) == 4 else []))
    program = torch.export.export(Attention(**case.arguments), tuple(tensors), dynamic_shapes=shapes, strict=False)
    with quiet():
        return ir.to_proto(translate(program, opset)).SerializeToString()


def run(model: bytes, arrays: list[np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: a for i, a in zip(session.get_inputs(), arrays, strict=True)})[0]


def eager(case: Case, arrays: list[np.ndarray], dtype: torch.dtype) -> np.ndarray:
    tensors = [torch.from_numpy(a) for a in arrays]
    cast = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    return Attention(**case.arguments)(*cast).numpy()


def assert_as_good_as_eager(case: Case, arrays: list[np.ndarray], output: np.ndarray) -> None:
    reference, base = eager(case, arrays, torch.float64), eager(case, arrays, torch.float32)
    rounded = reference.astype(np.float32)
    ulp = np.abs(((rounded + np.float32(0.3)) - np.float32(0.3)) - rounded).max(initial=0)
    assert output.shape == reference.shape
    assert np.abs(output - reference).max() <= 2 * np.abs(base - reference).max() + 2 * ulp


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_gives_what_eager_pytorch_gives(case: Case) -> None:
    arrays = case.inputs()
    assert_as_good_as_eager(case, arrays, run(exported(case, 18, dynamic=True), arrays))


@pytest.mark.parametrize("case", [c for c in CASES if "grouped" in c.name or "causal" in c.name], ids=lambda c: c.name)
def test_a_static_call_gives_the_same(case: Case) -> None:
    arrays = case.inputs()
    assert_as_good_as_eager(case, arrays, run(exported(case, 18, dynamic=False), arrays))


@pytest.mark.parametrize("opset", [20, 21, 23, 24])
def test_a_call_is_the_same_plain_graph_at_every_opset(opset: int) -> None:
    case = next(c for c in CASES if c.name == "boolean mask")
    arrays = case.inputs()
    model = exported(case, opset, dynamic=True)
    assert_as_good_as_eager(case, arrays, run(model, arrays))
    operators = {node.op_type for node in ir.from_proto(ir.serde.onnx.ModelProto.FromString(model)).graph}
    assert "Attention" not in operators
    assert "Softmax" in operators


def test_a_row_that_sees_nothing_gives_zero() -> None:
    case = next(c for c in CASES if c.name == "boolean mask")
    output = run(exported(case, 18, dynamic=False), case.inputs())
    assert np.array_equal(output[:, :, 0], np.zeros_like(output[:, :, 0]))
    assert not np.isnan(output).any()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("length", [1, 13])
def test_a_dynamic_graph_serves_sizes_it_was_not_traced_with(batch: int, length: int) -> None:
    case = next(c for c in CASES if c.name == "causal, more keys")
    model = exported(case, 18, dynamic=True)
    other = dataclasses.replace(case, query=(batch, 3, length, 8), key=(batch, 3, 9, 8), value=(batch, 3, 9, 8))
    assert_as_good_as_eager(other, other.inputs(), run(model, other.inputs()))


def test_half_precision_keeps_its_type() -> None:
    arrays = [a.astype(np.float16) for a in CASES[0].inputs()]
    output = run(exported(CASES[0], 18, dynamic=False, arrays=arrays), arrays)
    assert output.dtype == np.float16
    assert np.abs(output - eager(CASES[0], arrays, torch.float64)).max() < 4e-3


def test_dropout_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="dropout"):
        exported(Case("dropout", arguments={"dropout_p": 0.1}), 18, dynamic=False)


class LearnedBias(torch.nn.Module):
    """With a bias that has a gradient PyTorch decomposes the call into other operators, of other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(24, 24)
        self.slopes = torch.nn.Parameter(torch.tensor([0.5, 0.25, 0.125]).reshape(3, 1, 1))

    def forward(self, x: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.project(x).view(batch, length, 3, 8).transpose(1, 2)
        bias = distances.unsqueeze(1) * self.slopes
        output = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, bias)
        return output.transpose(1, 2).reshape(batch, length, -1)


def test_an_attention_whose_strides_change_is_still_reshaped() -> None:
    inputs = {"x": torch.randn(2, 5, 24), "distances": torch.randn(2, 5, 5)}
    dynamic = {"x": {0: "batch", 1: "seq=1..64"}, "distances": {0: "batch", 1: "seq=1..64", 2: "seq=1..64"}}
    result = flash_export.export(LearnedBias().eval(), inputs, dynamic_shapes=dynamic)
    assert [site.status for site in result.sites] == ["fused"]
    assert "Identity" not in {node.op_type for node in result.model.graph}

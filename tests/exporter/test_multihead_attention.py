# SPDX-License-Identifier: Apache-2.0
"""nn.MultiheadAttention, in every variant and through every exporter.

Dynamic batch and lengths by the dynamo exporters alone: the legacy one traces self-attention with its lengths as
numbers, and such a file ends with exit 2 and the way out.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from exporter.graphs import only
from exporter.torch_exports import EXPORTERS, Wrapped, export, run

from flash_export import pipeline
from flash_export.errors import UsageError
from flash_export.find import find
from flash_export.op import DOMAIN
from flash_export.options import Options
from flash_export.rewrite import rewrite
from flash_export.talk import Talk


class SelfAttention(torch.nn.Module):
    """nn.MultiheadAttention on one or three inputs, as models use it."""

    def __init__(self, *, batch_first: bool, mask: str, weights: bool = False, bias: bool = True, cross: bool = False):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"kdim": 24, "vdim": 20} if cross else {}
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=batch_first, bias=bias, **sizes)
        self.mask, self.weights, self.cross = mask, weights, cross

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> object:
        key, value, *masks = rest if self.cross else (x, x, *rest)
        name = {"padding": "key_padding_mask", "bool": "attn_mask", "float": "attn_mask"}.get(self.mask)
        arguments = {} if name is None else {name: masks[0]}
        output, weights = self.attention(x, key, value, need_weights=self.weights, **arguments)
        return (output, weights) if self.weights else output


VARIANTS = [
    {"batch_first": True, "mask": "none"},
    {"batch_first": False, "mask": "none"},
    {"batch_first": True, "mask": "padding"},
    {"batch_first": False, "mask": "padding", "bias": False},
    {"batch_first": True, "mask": "bool"},
    {"batch_first": True, "mask": "float"},
    {"batch_first": True, "mask": "none", "cross": True},
    {"batch_first": True, "mask": "none", "weights": True},
]


def inputs_of(variant: dict, batch: int, length: int, keys: int) -> list[torch.Tensor]:
    """The module's inputs: x, key and value for cross attention (``keys`` long), the mask; the last entry is padded."""
    draw = torch.Generator().manual_seed(1)
    lead = (batch, length) if variant["batch_first"] else (length, batch)
    inputs = [torch.randn(*lead, 32, generator=draw)]
    if variant.get("cross"):
        inputs += [torch.randn(batch, keys, size, generator=draw) for size in (24, 20)]
    if variant["mask"] == "padding":
        padding = torch.zeros(batch, length, dtype=torch.bool)
        padding[-1, length // 2 + 1 :] = True
        inputs.append(padding)
    if variant["mask"] == "bool":
        inputs.append(torch.ones(length, length, dtype=torch.bool).triu(2))
    if variant["mask"] == "float":
        inputs.append(torch.randn(length, length, generator=draw))
    return inputs


def axes_of(variant: dict) -> list[dict[int, str]]:
    """The dynamic axes of ``inputs_of``."""
    axes = [{0: "batch", 1: "length"} if variant["batch_first"] else {0: "length", 1: "batch"}]
    if variant.get("cross"):
        axes += [{0: "batch", 1: "keys"}] * 2
    if variant["mask"] != "none":
        axes.append({0: "batch", 1: "length"} if variant["mask"] == "padding" else {0: "length", 1: "length"})
    return axes


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """PyTorch's own fast path is one operator that no exporter knows."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize(
    ("exporter", "dims"), [(e, "static") for e in EXPORTERS] + [(e, "dynamic") for e in EXPORTERS if e != "legacy17"]
)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(f"{k}={x}" for k, x in v.items()))
def test_multihead_attention_is_fused_in_every_variant(variant: dict, exporter: str, dims: str, tmp_path: Path) -> None:
    module = SelfAttention(**variant).eval()
    sizes = [(2, 7, 5)] if dims == "static" else [(2, 7, 5), (3, 1, 9), (1, 13, 4)]
    with written_out():
        axes = axes_of(variant) if dims == "dynamic" else None
        export(Wrapped(module).eval(), inputs_of(variant, *sizes[0]), tmp_path / "mha.onnx", exporter, axes)
    converted = ir.load(tmp_path / "mha.onnx")
    site = only(find(converted))
    rewrite(converted, [site])
    if variant.get("weights"):
        assert site.status == "refused"
        assert site.reason is not None
        assert site.reason.code == "probabilities_used"
    else:
        assert site.status == "fused", site.reason
        assert sum(n.domain == DOMAIN for n in converted.graph) == 1
        assert "Softmax" not in [n.op_type for n in converted.graph]
    file = ir.to_proto(converted).SerializeToString()
    double = copy.deepcopy(module).double()
    for size in sizes:
        inputs = inputs_of(variant, *size)
        with written_out(), torch.no_grad():
            right = double(*(x.double() if x.is_floating_point() else x for x in inputs))
        assert isinstance(right, (tuple, torch.Tensor))
        right = right if isinstance(right, torch.Tensor) else right[0]
        got = run(file, [i.numpy() for i in inputs])[0]
        np.testing.assert_allclose(got, right.numpy(), atol=2e-6, rtol=0, err_msg=str(size))


def legacy(variant: dict, folder: Path) -> Path:
    """The legacy exporter's file, told that batch and lengths are dynamic."""
    inputs = inputs_of(variant, 2, 7, 9)
    with written_out():
        export(SelfAttention(**variant).eval(), inputs, folder / "legacy.onnx", "legacy17", axes_of(variant))
    return folder / "legacy.onnx"


def test_a_file_that_holds_its_lengths_as_numbers_says_what_to_do(tmp_path: Path) -> None:
    options = Options(source=legacy({"batch_first": True, "mask": "padding"}, tmp_path), output=tmp_path / "out.onnx")
    with pytest.raises(UsageError) as error:
        pipeline.run(options, Talk(silent=True))
    assert "nn.MultiheadAttention" in error.value.do
    assert error.value.where.endswith("more")
    assert not options.output.exists()  # type: ignore[union-attr]


def test_cross_attention_of_the_legacy_exporter_is_proven_at_other_lengths(tmp_path: Path) -> None:
    source = legacy({"batch_first": True, "mask": "none", "cross": True}, tmp_path)
    result = pipeline.run(Options(source=source, output=tmp_path / "out.onnx"), Talk(silent=True))
    assert only(result.sites).status == "fused"
    settings = {run["setting"] for run in result.report["check"]["runs"]}  # type: ignore[index]
    assert len(settings) == 3

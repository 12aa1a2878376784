# SPDX-License-Identifier: Apache-2.0
"""nn.MultiheadAttention, in every variant and through every exporter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from exporter.graphs import only
from exporter.torch_exports import EXPORTERS, export, run

from flash_export.find import find
from flash_export.op import DOMAIN
from flash_export.rewrite import rewrite


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


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(f"{k}={x}" for k, x in v.items()))
def test_multihead_attention_is_fused_in_every_variant(variant: dict, exporter: str, tmp_path: Path) -> None:
    module = SelfAttention(**variant).eval()
    batch, length = 2, 7
    x = torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(1))
    x = x if variant["batch_first"] else x.transpose(0, 1).contiguous()
    inputs = [x]
    if variant.get("cross"):
        inputs += [torch.randn(batch, 5, 24), torch.randn(batch, 5, 20)]
    if variant["mask"] == "padding":
        padding = torch.zeros(batch, length, dtype=torch.bool)
        padding[1, 4:] = True
        inputs.append(padding)
    if variant["mask"] == "bool":
        inputs.append(torch.ones(length, length, dtype=torch.bool).triu(2))
    if variant["mask"] == "float":
        inputs.append(torch.randn(length, length))
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        right = module(*inputs)
        export(module, inputs, tmp_path / "mha.onnx", exporter)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    converted = ir.load(tmp_path / "mha.onnx")
    site = only(find(converted))
    rewrite(converted, [site])
    if variant.get("weights"):
        assert site.status == "refused"
        assert site.reason is not None
        assert site.reason.code == "probabilities_used"
        right = right[0]
    else:
        assert site.status == "fused", site.reason
        assert sum(n.domain == DOMAIN for n in converted.graph) == 1
        assert "Softmax" not in [n.op_type for n in converted.graph]
    got = run(ir.to_proto(converted).SerializeToString(), [i.numpy() for i in inputs])[0]
    np.testing.assert_allclose(got, right.detach().numpy(), atol=2e-6, rtol=0)

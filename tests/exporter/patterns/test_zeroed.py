# SPDX-License-Identifier: Apache-2.0
"""Probabilities that are set to 0 where the scores were masked are a mask of minus infinity, and nothing else is."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from exporter.graphs import CONSTANTS, PRODUCT, QKV, both, code, fuse, model, numbers, only
from exporter.torch_exports import run

MASKED = QKV + ", bool[B, 1, 1, T] pad"
BODY = (
    PRODUCT
    + "masked = Where (pad, {fill}, scaled)\n probs = Softmax <axis = -1> (masked)\n {zero}\n out = MatMul (w, v)\n"
)
ZERO = "w = Where (pad, zero, probs)"


def proto(fill: str = "lowest", zero: str = ZERO, scores: str = "", inputs: str = MASKED) -> onnx.ModelProto:
    body = BODY.format(fill=fill, zero=zero)
    body = body.replace(", scaled)", ", biased)").replace("masked =", scores + "\n masked =", 1) if scores else body
    return model(body, inputs=inputs, constants=CONSTANTS + ", float little = {-10000.0}, float small = {-50.0}")


def padding(batch: int, length: int) -> np.ndarray:
    """One row without padding, one with some, one with nothing but padding."""
    pad = np.zeros((batch, 1, 1, length), bool)
    pad[1, ..., length // 2 :] = True
    pad[2] = True
    return pad


@pytest.mark.parametrize("fill", ["lowest", "hidden", "little"])
def test_a_mask_that_is_repeated_hides_for_good(fill: str) -> None:
    graph = proto(fill)
    fused, sites = fuse(graph)
    assert only(sites).status == "fused", only(sites).reason
    q, k, v = numbers({"B": 3, "S": 5, "T": 7})
    right, got = both(graph, fused, [q, k, v, padding(3, 7)])
    np.testing.assert_allclose(got, right, atol=2e-6, rtol=0)
    assert not got[2].any()


def test_the_condition_may_be_computed_twice_and_the_other_way_round() -> None:
    twice = (
        "seen = Not (pad)\n again = Not (pad)\n masked = Where (seen, scaled, lowest)\n"
        " probs = Softmax <axis = -1> (masked)\n w = Where (again, probs, zero)\n out = MatMul (w, v)\n"
    )
    graph = model(PRODUCT + twice, inputs=MASKED)
    fused, sites = fuse(graph)
    assert only(sites).status == "fused", only(sites).reason
    q, k, v = numbers({"B": 3, "S": 5, "T": 7})
    right, got = both(graph, fused, [q, k, v, padding(3, 7)])
    np.testing.assert_allclose(got, right, atol=2e-6, rtol=0)


REFUSED = {
    "another_mask": (proto(zero="n = Not (pad)\n w = Where (n, zero, probs)"), "probabilities_changed"),
    "other_sense": (proto(zero="w = Where (pad, probs, zero)"), "probabilities_changed"),
    "another_number": (proto(zero="w = Where (pad, scale, probs)"), "probabilities_changed"),
    "a_number_that_counts": (proto("small"), "probabilities_changed"),
    "no_mask_before": (
        model(
            PRODUCT + "probs = Softmax <axis = -1> (scaled)\n w = Where (pad, zero, probs)\n out = MatMul (w, v)\n",
            inputs=MASKED,
        ),
        "probabilities_changed",
    ),
    "a_mask_below": (
        proto(scores="biased = Add (scaled, m)", inputs=MASKED + ", float[B, 1, 1, T] m"),
        "probabilities_changed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused(name: str) -> None:
    graph, why = REFUSED[name]
    assert code(graph) == why


def test_a_bias_that_is_no_mask_may_lie_below() -> None:
    """DeBERTa adds products of positions; a mask of minus infinity forgets whatever lies below it."""
    inputs = MASKED + ", float[B, 4, S, 8] a, float[B, 4, 8, T] b"
    positions = proto(scores="rel = MatMul (a, b)\n biased = Add (scaled, rel)", inputs=inputs)
    fused, sites = fuse(positions)
    assert only(sites).status == "fused", only(sites).reason
    q, k, v = numbers({"B": 3, "S": 5, "T": 7})
    random = np.random.default_rng(4)
    a, b = (random.standard_normal(s).astype(np.float32) for s in ((3, 4, 5, 8), (3, 4, 8, 7)))
    right, got = both(positions, fused, [q, k, v, padding(3, 7), a, b])
    np.testing.assert_allclose(got, right, atol=2e-6, rtol=0)
    exact = proto("hidden", scores="biased = Add (scaled, m)", inputs=MASKED + ", float[B, 1, 1, T] m")
    assert code(exact) == "fused"


class Speech(torch.nn.Module):
    """The masked attention of speech encoders, in their own words."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(k.shape[2])[None, :] >= lengths[:, None])[:, None, None, :]
        scores = (q @ k.transpose(-2, -1) / 8**0.5).masked_fill(mask, torch.finfo(q.dtype).min)
        weights = torch.softmax(scores, dim=-1).masked_fill(mask, 0.0)
        return weights @ v


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_speech_encoder_s_padding_is_read(dynamo: bool, tmp_path: object) -> None:
    arrays = [torch.from_numpy(x) for x in numbers({"B": 3, "S": 5, "T": 7})]
    lengths = torch.tensor([7, 3, 0])
    axes = {n: {0: "B", 2: "S" if n == "q" else "T"} for n in "qkv"} | {"n": {0: "B"}}
    path = f"{tmp_path}/speech.onnx"
    shapes = None if not dynamo else tuple(dict.fromkeys(d, torch.export.Dim.AUTO) for d in axes.values())
    torch.onnx.export(
        Speech().eval(), (*arrays, lengths), path, input_names=[*"qkv", "n"], dynamo=dynamo,
        opset_version=18 if dynamo else 17, dynamic_axes=None if dynamo else axes, dynamic_shapes=shapes,
    )  # fmt: skip
    graph = onnx.load(path)
    fused, sites = fuse(graph)
    assert only(sites).status == "fused", only(sites).reason
    feeds = [x.numpy() for x in (*arrays, lengths)]
    right = Speech()(*arrays, lengths).numpy()
    np.testing.assert_allclose(run(fused.SerializeToString(), feeds)[0], right, atol=2e-6, rtol=0)

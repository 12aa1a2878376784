# SPDX-License-Identifier: Apache-2.0
"""A softmax between two products is attention, however many operators only move numbers between them."""

from __future__ import annotations

import itertools
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
import transformers
from exporter.graphs import CONSTANTS, PRODUCT, fuse, model, only
from exporter.torch_exports import Wrapped, export

from flash_export.find import find

TURN = "Transpose <perm = [0, 1, 3, 2]>"


def turned(name: str, source: str, times: int) -> str:
    """Nodes that turn ``source`` round and round, each with a Slice that takes all of it, into ``name``."""
    lines, above = [], source
    for i in range(times):
        lines += [f"{name}t{i} = {TURN} ({above})", f"{name}s{i} = Slice ({name}t{i}, ax0, far, ax0)"]
        above = f"{name}s{i}"
    return "\n ".join([*lines, f"{name} = Identity ({above})"])


def chain(scores: str, probabilities: str) -> list[str]:
    """What becomes of a softmax with these nodes between the products."""
    body = f"{PRODUCT} {scores}\n probs = Softmax <axis = -1> (x)\n {probabilities}\n out = MatMul (w, v)\n"
    _, sites = fuse(model(body, constants=CONSTANTS + ", int64[1] far = {9223372036854775807}"))
    site = only(sites)
    return [site.status, *([site.reason.code] if site.reason else [])]


def test_nodes_that_move_numbers_make_the_way_no_longer() -> None:
    above = "a = Sin (scaled)\n " + turned("b", "a", 40) + " x = Sin (b)"
    below = "c = Sin (probs)\n " + turned("d", "c", 40) + " w = Sin (d)"
    assert chain(above, below)[0] == "refused"


@pytest.mark.parametrize("side", ["above", "below"])
def test_nodes_that_compute_do(side: str) -> None:
    first, last = {"above": ("scaled", "x"), "below": ("probs", "w")}[side]
    names = [first, *(f"n{i}" for i in range(30)), last]
    far = "\n ".join(f"{b} = Sin ({a})" for a, b in itertools.pairwise(names))
    above, below = (far, "w = Sin (probs)") if side == "above" else ("x = Sin (scaled)", far)
    assert chain(above, below) == ["not_attention"]


def test_places_read_from_a_softmax_hand_on_none_of_its_numbers() -> None:
    places = "many = Sin (probs)\n places = Cast <to = 7> (many)\n w = GatherElements <axis = 2> (k, places)"
    assert chain("x = Sin (scaled)", places) == ["not_attention"]


def test_a_window_in_chunks_is_refused_and_not_overlooked(tmp_path: Path) -> None:
    config = transformers.LongformerConfig(
        vocab_size=41,
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=64,
        attention_window=[4],
        pad_token_id=0,
    )
    module = transformers.LongformerModel(config, add_pooling_layer=False).eval().requires_grad_(False)

    class Encoder(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return module(ids, return_dict=False)[0]

    path = tmp_path / "m.onnx"
    export(Wrapped(Encoder()), [torch.randint(2, 41, (2, 7))], path, "legacy17", [{0: "batch", 1: "length"}])
    site = only(find(ir.load(path)))
    assert site.status == "refused"
    assert site.reason is not None
    assert site.reason.code == "probabilities_changed"
    assert "mask of the whole" in site.reason.action

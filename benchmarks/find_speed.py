#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times find and rewrite on GPT-2 graphs of 12 to 96 layers: seconds, and how they grow with the layers.

The graph is the legacy exporter's for GPT-2: one packed projection, a padded causal mask computed from lengths, shapes
computed in the graph. Process time, one thread; the sizes take turns, and of seven fresh loads of a file the fastest
counts: what else the machine does can only add.

    python benchmarks/find_speed.py            # rewrites the table in docs/performance.md, under a minute
    python benchmarks/find_speed.py --check    # only prints it
"""

from __future__ import annotations

import argparse
import gc
import logging
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import onnx_ir as ir
import page_table
import torch
import transformers

from flash_export.find import find
from flash_export.rewrite import rewrite

LAYERS = (12, 24, 48, 96)
REPEATS = 7


class Encoder(torch.nn.Module):
    """GPT-2 without its cache, its inputs by position."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = transformers.GPT2Config(n_layer=layers, n_head=2, n_embd=8, vocab_size=11, use_cache=False)
        self.model = transformers.GPT2Model._from_config(config, attn_implementation="eager").eval()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


def export(layers: int, path: Path) -> None:
    """Writes the graph; tiny widths, since only the number of nodes counts."""
    inputs = (torch.ones(2, 7, dtype=torch.long), torch.ones(2, 7, dtype=torch.long))
    axes = {name: {0: "batch", 1: "seq"} for name in ("ids", "mask")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Encoder(layers),
            inputs,
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=["ids", "mask"],
            dynamic_axes=axes,
        )


def measure(path: Path, layers: int) -> tuple[int, float, float]:
    """Nodes, and the seconds of find and of rewrite on a fresh load."""
    model = ir.load(path)
    nodes = model.graph.num_nodes()
    gc.collect()
    start = time.process_time()
    sites = find(model)
    middle = time.process_time()
    count = rewrite(model, sites)
    end = time.process_time()
    assert count == layers, [site.reason for site in sites]
    return nodes, middle - start, end - middle


def off_the_line(seconds: list[float]) -> list[float]:
    """How far each size is from the straight line that fits all best, relative errors weighed alike."""
    sizes, weights = np.array(LAYERS, float), 1 / np.array(seconds)
    slope, start = np.polyfit(sizes, seconds, 1, w=weights)
    return [float(second / (start + slope * size) - 1) for size, second in zip(sizes, seconds, strict=True)]


def main() -> None:
    """Measures every size and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print the table and leave the page alone")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = {layers: Path(folder) / f"gpt2_{layers}.onnx" for layers in LAYERS}
        for layers, path in paths.items():
            export(layers, path)
        rounds = [{layers: measure(path, layers) for layers, path in paths.items()} for _ in range(REPEATS)]
    fastest = {n: (rounds[0][n][0], min(r[n][1] for r in rounds), min(r[n][2] for r in rounds)) for n in LAYERS}
    rows = ["| layers | nodes | find, s | rewrite, s | ms a layer | off the line |", "|---|---|---|---|---|---|"]
    distances = off_the_line([found + rewritten for _, found, rewritten in fastest.values()])
    for (layers, (nodes, found, rewritten)), off in zip(fastest.items(), distances, strict=True):
        each = 1000 * (found + rewritten) / layers
        rows.append(f"| {layers} | {nodes:,} | {found:.2f} | {rewritten:.2f} | {each:.1f} | {100 * off:+.0f} % |")
    print("\n".join(rows))
    if not arguments.check:
        page_table.replace("find-table", rows)


if __name__ == "__main__":
    main()

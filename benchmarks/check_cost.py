#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the check costs beside PyTorch's export: `flash-export FOLDER` on models of usual size, with random weights.

Each run is a process of its own, as a user starts it; the seconds are those of its `report.json`. Of three runs the one
with the middle ratio counts.

    python benchmarks/check_cost.py            # rewrites the table in docs/performance.md, about six minutes
    python benchmarks/check_cost.py --check    # only prints it
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import page_table
import torch
import transformers

REPEATS = 3

MODELS = {
    "MiniLM, 6 layers": (
        transformers.BertModel,
        transformers.BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536),
    ),
    "BERT base": (transformers.BertModel, transformers.BertConfig()),
    "GPT-2": (transformers.GPT2LMHeadModel, transformers.GPT2Config()),
    "ViT base": (transformers.ViTForImageClassification, transformers.ViTConfig()),
}


def measure(source: Path, folder: Path) -> tuple[int, float, float]:
    """Attentions fused, and the seconds of the export and of the check."""
    command = [
        sys.executable,
        "-m",
        "flash_export",
        source,
        "-o",
        folder / "m.onnx",
        "--report",
        folder,
        "--require-all",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    report = json.loads((folder / "report.json").read_text())
    return report["fused"], report["seconds"]["export"], report["seconds"]["check"]


def row(name: str) -> str:
    """One model's line of the table."""
    make, config = MODELS[name]
    torch.manual_seed(0)
    model = make(config)
    weights = sum(p.numel() for p in model.parameters()) / 1e6
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "source"
        model.save_pretrained(source)
        runs = []
        for i in range(REPEATS):
            (folder := Path(place) / str(i)).mkdir()
            runs.append(measure(source, folder))
    fused, export, check = sorted(runs, key=lambda run: run[2] / run[1])[REPEATS // 2]
    return f"| {name} | {weights:.0f} | {fused} | {export:.1f} | {check:.1f} | {check / export:.2f} |"


def main() -> None:
    """Measures every model and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print the table and leave the page alone")
    arguments = parser.parse_args()
    rows = [
        "| model | weights, millions | fused | export, s | check, s | check / export |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(rows))
    for name in MODELS:
        rows.append(row(name))
        print(rows[-1], flush=True)
    if not arguments.check:
        page_table.replace("check-table", rows)


if __name__ == "__main__":
    main()

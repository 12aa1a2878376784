# SPDX-License-Identifier: Apache-2.0
"""A vision transformer, from training to labels computed with every attention fused.

Trains a small ViT on drawn images (stripes, checks, a disc) until it tells them apart, exports it with flash-export,
labels new images with the fused model, builds a TensorRT engine, and compares fused with unfused.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from transformers import ViTConfig, ViTForImageClassification
from transformers.utils import logging as transformers_logging

import flash_trt
from flash_trt import tensor_files

LABELS = ("rows", "columns", "checks", "disc")
SIZE, PATCH = 32, 8
TOLERANCE = 1e-4
ENGINE_TOLERANCE = 1e-2
"""TensorRT multiplies fp32 matrices in TF32, which keeps 13 bits less."""

talk = Console(stderr=True, highlight=False)


def main() -> int:
    """Runs the whole sample; returns 0 when every step did what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/image_classifier"), help="where the files go")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    model = train()
    transformers_logging.disable_progress_bar()
    model.save_pretrained(out / "vit")
    run("flash_export", out / "vit", "-o", out / "model.onnx", "--require-all")

    images, truth = draw(np.random.default_rng(1), 64)
    tensor_files.write(out / "images.npz", {"pixel_values": images})
    with torch.inference_mode():
        expected = model(torch.from_numpy(images)).logits.numpy()
    label(out / "model.onnx", out, expected, truth)

    shapes = f"pixel_values:1x3x{SIZE}x{SIZE},8x3x{SIZE}x{SIZE},64x3x{SIZE}x{SIZE}"
    run("flash_trt", "build", out / "model.onnx", "-o", out / "model.engine", "--shape", shapes)
    run("flash_trt", "compare", out / "model.onnx", out / "model.unfused.onnx", "--shape", shapes)
    if why := flash_trt.why_not_here(out / "model.engine"):
        print(f"The engine is not run here: {why}. On one, this same command labels the images with it too.")
    else:
        label(out / "model.engine", out, expected, truth, ENGINE_TOLERANCE)
    return 0


def draw(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """``count`` noisy images [count, 3, 32, 32] with their labels [count]."""
    labels = rng.integers(0, len(LABELS), count)
    y, x = np.mgrid[0:SIZE, 0:SIZE]
    images = np.empty((count, 3, SIZE, SIZE), np.float32)
    for image, kind in zip(images, labels, strict=True):
        width, shift = 4, rng.integers(0, 8)
        rows, columns = (y + shift) // width % 2, (x + shift) // width % 2
        disc = (x - rng.integers(10, 22)) ** 2 + (y - rng.integers(10, 22)) ** 2 < 100
        image[:] = (rows, columns, rows ^ columns, disc)[kind] + 0.3 * rng.standard_normal((3, SIZE, SIZE))
    return images, labels


def train() -> ViTForImageClassification:
    """A small ViT that tells the four kinds apart; a few seconds on one core."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model only waits for a second thread
    config = ViTConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96, image_size=SIZE,
        patch_size=PATCH, num_labels=len(LABELS), hidden_dropout_prob=0.0, id2label=dict(enumerate(LABELS)),
    )  # fmt: skip
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = np.random.default_rng(0)
    for _ in range(150):
        images, labels = draw(rng, 32)
        loss = model(torch.from_numpy(images), labels=torch.from_numpy(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    talk.print(f"trained: loss {loss.item():.3f}")
    return model.eval()


def label(model: Path, out: Path, expected: np.ndarray, truth: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """Labels the images with ``model`` through flash-trt run; ends the sample where PyTorch says otherwise."""
    run("flash_trt", "run", model, "--inputs", out / "images.npz", "-o", out / "logits.npz")
    logits = tensor_files.read(out / "logits.npz")["logits"]
    error = float(np.abs(logits - expected).max())
    same = (logits.argmax(-1) == expected.argmax(-1)).all()
    right = float((logits.argmax(-1) == truth).mean())
    if not same or not error <= tolerance * np.abs(expected).max():
        sys.exit(f"{model.name} and PyTorch disagree: max error {error:.1e}")
    print(
        f"{model.name}: {right:.0%} of {len(truth)} new images right, every label as in PyTorch, max error {error:.1e}"
    )


def run(module: str, *arguments: object) -> None:
    """Runs one of the two commands as a user would and ends the sample when it fails."""
    words = [str(argument) for argument in arguments]
    talk.print(f"\n[bold]$ {module.replace('_', '-')} {' '.join(words)}[/bold]", soft_wrap=True)
    code = subprocess.run([sys.executable, "-m", module, *words], check=False).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Long sequences: what attention takes of memory as the length grows, unfused and fused.

Exports a layer of causal attention in fp32 and one with capped scores in fp16, builds engines of both for one length
after the other, and runs the first on this machine's CPU. No GPU is needed: TensorRT says what an engine will take. On
a GPU the fused layers run there too, and must compute what the CPU does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import torch
from rich.console import Console
from rich.table import Table

import flash_trt
from flash_export.talk import Talk
from flash_trt.build import BuildOptions, build

WIDTH, HEADS, CAP = 512, 8, 30.0
LENGTHS = (1024, 4096, 16384)
CPU_LENGTH = 4096
ENGINE_TOLERANCE = 1e-2
"""Of the largest output: TensorRT multiplies fp32 matrices in TF32, and fp16 has 11 bits."""

PEAK_OF = """
import os, subprocess, sys
_, status, usage = os.wait4(subprocess.Popen(sys.argv[1:]).pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""

talk = Console(stderr=True, highlight=False)


class Layer(torch.nn.Module):
    """Causal attention with its projections, written out; ``cap`` > 0 bends scores to cap * tanh(score / cap)."""

    def __init__(self, cap: float = 0.0) -> None:
        super().__init__()
        self.cap = cap
        self.query, self.key, self.value, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, 512] -> [batch, seq, 512]."""
        batch, length, _ = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        place = torch.arange(length, device=x.device)
        scores = scores.masked_fill(place[None, :] > place[:, None], float("-inf"))
        heads = torch.softmax(scores, dim=-1) @ value
        return self.out(heads.transpose(1, 2).reshape(batch, length, WIDTH))


def main() -> int:
    """Runs the whole sample; returns 0 when every step did what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/long_context"), help="where the files go")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    engines = Table("attention", *(f"S = {length:,}" for length in LENGTHS), title="Scratch memory of an engine, MiB")
    for name, layer in (("causal fp32", Layer()), ("causal softcap fp16", Layer(CAP).half())):
        fused, unfused = export(layer, out / f"{name.replace(' ', '_')}.pt2")
        sizes = [(scratch_mib(unfused, length), scratch_mib(fused, length)) for length in LENGTHS]
        engines.add_row(name, *(f"{before:,.1f} -> {after:,.1f}" for before, after in sizes))
    Console(width=120).print(engines)

    fused, unfused = out / "causal_fp32.flash.onnx", out / "causal_fp32.flash.unfused.onnx"
    before, after = (peak_mib(path) for path in (unfused, fused))
    print(f"on this CPU, fp32, S = {CPU_LENGTH:,}: peak memory of a run {before:,.0f} -> {after:,.0f} MiB")
    for name in ("causal_fp32", "causal_softcap_fp16"):
        on_gpu(out / f"{name}.flash.onnx", out / f"{name}.flash.engine")
    return 0


def export(layer: Layer, path: Path) -> tuple[Path, Path]:
    """Saves the layer as an ExportedProgram and fuses it; returns the fused and the unfused file."""
    example = torch.zeros(1, 64, WIDTH, dtype=layer.out.weight.dtype)
    length = torch.export.Dim("seq", min=2, max=2**17)
    torch.export.save(torch.export.export(layer.eval(), (example,), dynamic_shapes=({1: length},)), path)
    command = [sys.executable, "-m", "flash_export", str(path), "--require-all"]
    talk.print(f"\n[bold]$ flash-export {path} --require-all[/bold]", soft_wrap=True)
    subprocess.run(command, check=True)
    return path.with_suffix(".flash.onnx"), path.with_suffix(".flash.unfused.onnx")


def on_gpu(fused: Path, engine: Path, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Runs an engine of ``fused`` on the GPU here at every length, and ends the sample where the CPU says otherwise."""
    low, usual, high = min(lengths), sorted(lengths)[len(lengths) // 2], max(lengths)
    shape = f"x:1x{low}x{WIDTH},1x{usual}x{WIDTH},1x{high}x{WIDTH}"
    build(BuildOptions(fused, engine, shapes=(shape,)), Talk(quiet=True))
    if why := flash_trt.why_not_here(engine):
        print(f"{engine.name} is not run here: {why}. On one, this same command runs it too.")
        return
    session, on_cpu = flash_trt.open_engine(engine), flash_trt.session(fused)
    try:
        for length in lengths:
            x = np.random.default_rng(0).standard_normal((1, length, WIDTH)).astype(session.input_dtypes["x"])
            (ours,), expected = session.run({"x": x}).values(), on_cpu.run(None, {"x": x})[0].astype(np.float64)
            error = float(np.abs(ours.astype(np.float64) - expected).max() / np.abs(expected).max())
            if not error <= ENGINE_TOLERANCE:
                sys.exit(f"{engine.name} and the CPU disagree at S = {length:,}: error {error:.1e}")
            print(f"{engine.name}, S = {length:,}: by {session.implementation()}, as on the CPU to {error:.1e}")
    finally:
        session.close()


def scratch_mib(path: Path, length: int) -> float:
    """Max Scratch Memory of an engine of ``path`` for this one length.

    The length is written into the model: with a dynamic one, TensorRT for RTX 1.7 does not count buffers past 8 GiB.
    """
    model = onnx.load(path, load_external_data=False)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = length
    fixed = path.with_name(f"{path.stem}.{length}.onnx")
    onnx.save(model, fixed)
    options = BuildOptions(fixed, fixed.with_suffix(".engine"), "tensorrt-rtx", targets=("sm89",), allow_none=True)
    sidecar = build(options, Talk(quiet=True))
    talk.print(f"{fixed.name}: {', '.join(found['by'] for found in sidecar['attention'])}")
    return sidecar["scratch_bytes"] / 2**20


def peak_mib(path: Path) -> float:
    """The largest memory of a process that runs ``path`` once."""
    command = [sys.executable, "-m", "flash_trt", "run", str(path), "--shape", f"x:1x{CPU_LENGTH}x{WIDTH}", "--quiet"]
    # Through a process between: a child's peak starts at its parent's, and this one has loaded PyTorch.
    done = subprocess.run([sys.executable, "-c", PEAK_OF, *command], stdout=subprocess.PIPE, text=True, check=True)
    *told, peak_kib = done.stdout.splitlines()
    talk.print(f"{path.name}: {told[-1]}")
    return int(peak_kib) / 2**10


if __name__ == "__main__":
    sys.exit(main())

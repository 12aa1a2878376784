# SPDX-License-Identifier: Apache-2.0
"""A causal language model that generates token by token with its KV cache, every attention fused.

Trains a small Llama (grouped queries, rotary positions) on a few lines until it knows them, exports it with --kv-cache,
and generates greedily with the fused model and with PyTorch: every token must be the same. Then builds a TensorRT
engine with the plugin in it, and says what a machine with a GPU would run next.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

import flash_trt

TEXT = (
    "the cat sat on the mat and the dog sat on the rug. the bird sang in the tree until the rain fell on the roof. "
    "the rain stopped, the sun came out, and the cat went out to look for the bird. "
)
PROMPT = "the dog sat"
STEPS = 64
# The first step takes a whole prompt and an empty past, every later one a single token and all before it.
LONGEST_PROMPT, LONGEST_PAST = 64, 192

Step = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
"""Runs a model once: inputs by name -> outputs by name."""

talk = Console(stderr=True, highlight=False)


def main() -> int:
    """Runs the whole sample; returns 0 when every step did what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/text_generation"), help="where the files go")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    model = train()
    transformers_logging.disable_progress_bar()
    model.save_pretrained(out / "llama")
    run("flash_export", out / "llama", "--kv-cache", "-o", out / "model.onnx", "--require-all")
    prompt = np.frombuffer(PROMPT.encode(), np.uint8).astype(np.int64)[None]
    theirs = generate_with_torch(model, prompt)
    ours = generate(onnx_step(out / "model.onnx"), model.config, prompt)
    print(f"{PROMPT}|{bytes(ours).decode(errors='replace')}")
    agree("our CPU operator in ONNX Runtime", ours, theirs)
    build(out / "model.onnx", out / "model.engine", model.config)
    if why := flash_trt.why_not_here(out / "model.engine"):
        print(f"The engine is not run here: {why}. On one, this same command generates with it too.")
    else:
        with_engine(out / "model.engine", model.config, prompt, theirs)
    return 0


def agree(who: str, ours: list[int], theirs: list[int]) -> None:
    """Says that all tokens are the same; ends the sample when they are not."""
    if ours != theirs:
        first = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        sys.exit(f"{who} and PyTorch part at step {first}")
    print(f"{who}: {STEPS} tokens, each as PyTorch chose it")


def train() -> LlamaForCausalLM:
    """A small Llama on bytes that knows TEXT; under a minute on one core."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model only waits for a second thread
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    text = torch.frombuffer(bytearray((TEXT * 3).encode()), dtype=torch.uint8).long()
    for _ in range(100):
        starts = torch.randint(0, len(TEXT), (8,)).tolist()
        batch = torch.stack([text[start : start + 96] for start in starts])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    talk.print(f"trained: loss {loss.item():.3f}")
    return model.eval()


def onnx_step(path: Path) -> Step:
    """The fused model in ONNX Runtime with our operator for the CPU."""
    session = flash_trt.session(path)
    inputs, outputs = [i.name for i in session.get_inputs()], [o.name for o in session.get_outputs()]
    return lambda feeds: dict(zip(outputs, session.run(outputs, {name: feeds[name] for name in inputs}), strict=True))


def generate(step: Step, config: LlamaConfig, prompt: np.ndarray) -> list[int]:
    """STEPS tokens after ``prompt`` [1, seq], greedily, one token a step behind the cache."""
    depth = config.hidden_size // config.num_attention_heads
    names = [name for i in range(config.num_hidden_layers) for name in (f"{i}.key", f"{i}.value")]
    empty = np.zeros((1, config.num_key_value_heads, 0, depth), np.float32)
    cache, tokens, chosen = dict.fromkeys(names, empty), prompt, []
    for _ in range(STEPS):
        past = cache[names[0]].shape[2]
        feeds = {
            "input_ids": tokens,
            "attention_mask": np.ones((1, past + tokens.shape[1]), np.int64),
            "position_ids": np.arange(past, past + tokens.shape[1])[None],
        }
        made = step(feeds | {f"past_key_values.{name}": array for name, array in cache.items()})
        cache = {name: made[f"present.{name}"] for name in names}
        chosen.append(int(made["logits"][0, -1].argmax()))
        tokens = np.array([[chosen[-1]]], np.int64)
    return chosen


def generate_with_torch(model: LlamaForCausalLM, prompt: np.ndarray) -> list[int]:
    """The same with PyTorch's own generation."""
    ids = torch.from_numpy(prompt)
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        pad_token_id=0,
    )
    return made[0, ids.shape[1] :].tolist()


def build(model: Path, engine: Path, config: LlamaConfig) -> None:
    """One engine with our plugin in it, with a profile for prompts and one for single tokens behind a cache.

    The mask's length is past + seq, which ``flash-trt build`` computes from the two.
    """
    heads, depth = config.num_key_value_heads, config.hidden_size // config.num_attention_heads

    def past(*lengths: int) -> str:
        return "--shape=past_key_values.0.key:" + ",".join(f"1x{heads}x{length}x{depth}" for length in lengths)

    prompt = [f"--shape=input_ids:1x1,1x{len(PROMPT)},1x{LONGEST_PROMPT}", past(0, 0, 0)]
    token = ["--shape=input_ids:1x1", past(1, LONGEST_PROMPT, LONGEST_PAST)]
    run("flash_trt", "build", model, "-o", engine, *prompt, *token)


def with_engine(engine: Path, config: LlamaConfig, prompt: np.ndarray, theirs: list[int]) -> None:
    """The same generation with the TensorRT engine on a GPU."""
    session = flash_trt.open_engine(engine)
    try:
        inputs = session.input_dtypes
        ours = generate(lambda feeds: session.run({name: feeds[name] for name in inputs}), config, prompt)
        agree(session.implementation(), ours, theirs)
    finally:
        session.close()


def run(module: str, *arguments: object) -> None:
    """Runs one of the two commands as a user would and ends the sample when it fails."""
    words = [str(argument) for argument in arguments]
    talk.print(f"\n[bold]$ {module.replace('_', '-')} {' '.join(words)}[/bold]", soft_wrap=True)
    code = subprocess.run([sys.executable, "-m", module, *words], check=False).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())

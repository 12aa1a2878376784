# SPDX-License-Identifier: Apache-2.0
"""``--kv-cache``: past keys and values as inputs, present ones as outputs, and the words that PyTorch would choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from corpus.families import randomise
from corpus.padding import softmax_in_float64
from exporter.test_load_huggingface import BART, GROUPED, TEXT, save_folder

from flash_export import pipeline
from flash_export.errors import UnsupportedModel, UsageError
from flash_export.inputs import parse_inputs
from flash_export.load import load
from flash_export.options import Options
from flash_export.talk import Talk

STEPS = 32
PROMPTS = [[0, 0, 5, 9, 33], [7, 12, 3, 60, 21]]
"""Two of them, the first padded on the left by two."""
MASK = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": GROUPED | {"sliding_window": 8},
    "Gemma2ForCausalLM": GROUPED | {"sliding_window": 8, "attn_logit_softcapping": 5.0, "tie_word_embeddings": False},
}


def eager(folder: Path, name: str) -> Any:
    import transformers

    return getattr(transformers, name).from_pretrained(folder, attn_implementation="eager").eval()


def greedy_in_pytorch(model: Any) -> tuple[list[list[int]], list[np.ndarray]]:
    """Every step from the whole text, without a cache: words, and the logits of the last position."""
    ids, mask = torch.tensor(PROMPTS), torch.tensor(MASK)
    logits = []
    for _ in range(STEPS):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            last = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
        logits.append(last.numpy())
        ids = torch.cat([ids, last.argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
    return ids[:, len(PROMPTS[0]) :].tolist(), logits


def greedy_with_cache(path: Path) -> tuple[list[list[int]], list[np.ndarray]]:
    """The prompt at once, from an empty past, then one word a step."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    past = {
        i.name: np.zeros([2, i.shape[1], 0, i.shape[3]], np.float32)
        for i in session.get_inputs()
        if i.name.startswith("past_key_values.")
    }
    names = [o.name for o in session.get_outputs()]
    ids, mask = np.array(PROMPTS), np.array(MASK)
    words, logits = [], []
    for _ in range(STEPS):
        positions = np.clip(mask.cumsum(1) - 1, 0, None)[:, -ids.shape[1] :]
        feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions} | past
        found = dict(zip(names, session.run(None, feeds), strict=True))
        last = found["logits"][:, -1]
        past = {name: found[name.replace("past_key_values.", "present.")] for name in past}
        ids = last.argmax(-1)[:, None]
        mask = np.concatenate([mask, np.ones((2, 1), mask.dtype)], 1)
        words.append(ids[:, 0].tolist())
        logits.append(last)
    return np.array(words).T.tolist(), logits


def randomised(folder: Path, name: str) -> Path:
    """A model whose every weight is random, so that no word is always the likeliest."""
    save_folder(folder, name, FAMILIES[name])
    model = eager(folder, name)
    with torch.no_grad():
        randomise(model, seed=3)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_32_greedy_steps_choose_pytorchs_words(name: str, tmp_path: Path) -> None:
    folder = randomised(tmp_path / "model", name)
    output = tmp_path / "model.onnx"
    done = pipeline.run(Options(source=folder, output=output, kv_cache=True), Talk(silent=True))
    assert [site.status for site in done.sites] == ["fused", "fused"], [site.reason for site in done.sites]
    assert [site.attributes.causal_kind for site in done.sites if site.attributes] == ["bottom_right"] * 2
    model = eager(folder, name)
    words, logits = greedy_in_pytorch(model)
    found_words, found = greedy_with_cache(output)
    assert len({word for row in words for word in row}) > 8  # a model that repeats itself would prove little
    assert found_words == words
    base = [np.asarray(step) for step in logits]
    with softmax_in_float64():
        _, exact = greedy_in_pytorch(model.double())
    allowed = max(np.abs(b - e).max() for b, e in zip(base, exact, strict=True))
    error = max(np.abs(f - e).max() for f, e in zip(found, exact, strict=True))
    assert error <= 2 * allowed + 2 * np.spacing(np.float32(np.abs(exact).max()))


def test_inputs_and_outputs_are_named_as_decoders_expect_them(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", "GPT2LMHeadModel", TEXT | {"n_layer": 2, "n_head": 3, "n_embd": 24})
    output = tmp_path / "model.onnx"
    pipeline.run(Options(source=folder, output=output, kv_cache=True, check=False), Talk(silent=True))
    graph = ir.load(output).graph
    shapes = {str(v.name): [str(d) for d in v.shape or ()] for v in [*graph.inputs, *graph.outputs]}
    cache = {f"past_key_values.0.{kind}": ["batch", "3", "past", "8"] for kind in ("key", "value")}
    assert {name: shapes[name] for name in cache} == cache
    assert shapes["input_ids"] == shapes["position_ids"] == ["batch", "seq"]
    assert shapes["attention_mask"][0] == "batch"
    assert sorted(shapes["attention_mask"][1].split(" + ")) == ["past", "seq"]
    assert [str(v.name) for v in graph.outputs] == [
        "logits", "present.0.key", "present.0.value", "present.1.key", "present.1.value"
    ]  # fmt: skip


NEO = TEXT | {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}
NEO |= {"window_size": 5, "intermediate_size": 48, "max_position_embeddings": 48}


XGLM = {"vocab_size": 71, "num_layers": 2, "attention_heads": 3, "d_model": 24, "ffn_dim": 40}
XGLM |= {"max_position_embeddings": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(("name", "settings"), [("GPTNeoForCausalLM", NEO), ("XGLMForCausalLM", XGLM)])
def test_a_mask_that_only_meets_both_lengths_is_as_long_as_their_sum(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """They never add up past and seq: torch.export takes the mask's axis for a third length."""
    folder = save_folder(tmp_path / "model", name, settings)
    output = tmp_path / "model.onnx"
    done = pipeline.run(Options(source=folder, output=output, kv_cache=True), Talk(silent=True))
    assert [site.status for site in done.sites] == ["fused", "fused"], [site.reason for site in done.sites]
    shapes = {str(v.name): [str(d) for d in v.shape or ()] for v in ir.load(output).graph.inputs}
    assert shapes["attention_mask"] == ["batch", "past + seq"]


def test_a_model_without_a_cache_of_its_own_is_refused(tmp_path: Path) -> None:
    for name, settings in (("BertModel", TEXT), ("BartModel", BART)):
        folder = save_folder(tmp_path / name, name, settings)
        with pytest.raises(UnsupportedModel, match="with a cache"):
            load(Options(source=folder, kv_cache=True))


def test_layers_that_keep_another_state_are_named(tmp_path: Path) -> None:
    """RecurrentGemma: two layers of a recurrence to one of attention."""
    settings = TEXT | {"num_key_value_heads": 1, "head_dim": 8, "lru_width": 24, "num_hidden_layers": 3}
    folder = save_folder(tmp_path / "model", "RecurrentGemmaForCausalLM", settings)
    with pytest.raises(UnsupportedModel, match="with a cache") as error:
        load(Options(source=folder, kv_cache=True))
    assert error.value.got == "2 of 3 layers that cache no keys, [0, 1]"


def test_a_folder_that_is_not_there_is_not_called_a_file(tmp_path: Path) -> None:
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name in ("llama", "nowhere"):
        with pytest.raises(UsageError, match="cannot be read") as error:
            load(Options(source=tmp_path / name, kv_cache=True))
        assert (error.value.got, error.value.where) == ("no such file or folder", str(tmp_path / name))


def test_a_file_and_inputs_do_not_go_with_a_cache(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"weights")
    with pytest.raises(UsageError, match="needs a Hugging Face folder"):
        load(Options(source=tmp_path / "model.pt", kv_cache=True))
    folder = save_folder(tmp_path / "model", "LlamaForCausalLM", GROUPED)
    with pytest.raises(UsageError, match="--input does not go"):
        load(Options(source=folder, kv_cache=True, inputs=parse_inputs(["input_ids:int64:2,9"])))

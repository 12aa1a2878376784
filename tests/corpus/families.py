# SPDX-License-Identifier: Apache-2.0
"""The architectures of the corpus: small models of well-known families, with random weights.

All but one are transformers' own classes, built from a small config; nothing is downloaded. Every weight, bias and norm
is random and different in every layer, so that no exporter merges what a trained model keeps apart. Sizes are odd.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from corpus.nano_gpt import NanoGPT

VOCABULARY = 71
LONGEST = 48
"""Positions of every model that has a table of them."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Lengths of the dynamic dims: batch, sequence, and the decoder's sequence where there is one."""

    batch: int = 2
    seq: int = 7
    decoder_seq: int = 5


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Args:
        name: what the tests and the table call it.
        build: ``"eager"`` or ``"sdpa"`` -> the model, in eval mode, weights not yet random.
        inputs: names of its inputs, each a key of ``INPUTS``.
        attentions: how many times it computes attention.
        implementations: the ways its attention can be written.
        outputs: which fields of its result count.
        hugging_face: whether it can be saved as a model folder.
    """

    name: str
    build: Callable[[str], torch.nn.Module]
    inputs: tuple[str, ...]
    attentions: int
    implementations: tuple[str, ...] = ("eager", "sdpa")
    outputs: tuple[str, ...] = ("last_hidden_state",)
    hugging_face: bool = True

    def draw(self, sizes: Sizes, seed: int = 1) -> list[torch.Tensor]:
        """Inputs in order; masks of ones."""
        generator = torch.Generator().manual_seed(seed)
        return [INPUTS[name][0](sizes, generator) for name in self.inputs]


class Adapter(torch.nn.Module):
    """A model that takes its inputs by position and returns plain tensors, as the exporters want it."""

    def __init__(self, model: torch.nn.Module, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.outputs = outputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.model(**dict(zip(self.inputs, tensors, strict=True)))
        return tuple(result[name] for name in self.outputs)


def adapter(family: Family, implementation: str, seed: int = 0) -> Adapter:
    """The family's model with random weights, ready to export."""
    model = family.build(implementation).eval().requires_grad_(False)
    randomise(model, seed)
    for part in model.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False
    return Adapter(model, family.inputs, family.outputs)


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Fills every parameter: matrices keep their input's size, norms stay near 1, biases near 0, none is alike."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            table = "embed" in name or "wte" in name or "wpe" in name or "relative_attention_bias" in name
            parameter.copy_(noise if table else noise / parameter[0].numel() ** 0.5)
        else:
            parameter.copy_(0.2 * noise + (1.0 if name.endswith("weight") else 0.0))


def _ids(batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def _mask(batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.ones(batch, length, dtype=torch.int64)


Draw = Callable[[Sizes, torch.Generator], torch.Tensor]
INPUTS: dict[str, tuple[Draw, dict[int, str]]] = {
    "input_ids": (lambda s, g: _ids(s.batch, s.seq, g), {0: "batch", 1: "seq"}),
    "attention_mask": (lambda s, g: _mask(s.batch, s.seq, g), {0: "batch", 1: "seq"}),
    "decoder_input_ids": (lambda s, g: _ids(s.batch, s.decoder_seq, g), {0: "batch", 1: "decoder_seq"}),
    "pixel_values": (lambda s, g: torch.randn(s.batch, 3, 24, 24, generator=g), {0: "batch"}),
    "input_features": (lambda s, g: torch.randn(s.batch, 10, 26, generator=g), {0: "batch"}),
}
"""Input name -> how it is drawn, and its dynamic axes."""


def _hugging_face(name: str, settings: dict[str, Any]) -> Callable[[str], torch.nn.Module]:
    def build(implementation: str) -> torch.nn.Module:
        cls = getattr(transformers, name)
        config = cls.config_class(**settings)
        return cls._from_config(config, attn_implementation=implementation)

    return build


_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 24, "intermediate_size": 40}
_POSITIONS = {"max_position_embeddings": LONGEST}
_TEXT = _SMALL | _TOKENS | _POSITIONS
_GROUPED = _TEXT | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
_WINDOW = _GROUPED | {"sliding_window": 8}
_CAPPED = _WINDOW | {"query_pre_attn_scalar": 7, "attn_logit_softcapping": 5.0}
_GPT2 = _TOKENS | {"n_layer": 2, "n_head": 3, "n_embd": 24, "n_positions": LONGEST}
_T5 = _TOKENS | {"num_layers": 2, "num_heads": 3, "d_model": 24, "d_kv": 8, "d_ff": 40}
_SEQ2SEQ = _TOKENS | {
    "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "decoder_start_token_id": 1,
}  # fmt: skip
_SPEECH = _SEQ2SEQ | {"num_mel_bins": 10, "max_source_positions": 13, "max_target_positions": LONGEST}
_IMAGE = {"image_size": 24, "patch_size": 8}
_PROJECTED = _SMALL | {"projection_dim": 15}
_CLIP = {"text_config": _PROJECTED | _TOKENS | _POSITIONS, "vision_config": _PROJECTED | _IMAGE, "projection_dim": 15}
_BLOOM = _TOKENS | {"n_layer": 2, "n_head": 3, "hidden_size": 24}
_LATENT = _TEXT | {
    "num_key_value_heads": 3, "q_lora_rank": 10, "kv_lora_rank": 9, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 7, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
"""DeepSeek's latent attention: V's head dim is not Q's. Without experts, which no exporter writes."""

_TOKEN_INPUTS = ("input_ids", "attention_mask")
_SEQ2SEQ_INPUTS = (*_TOKEN_INPUTS, "decoder_input_ids")
_CLIP_INPUTS = ("input_ids", "pixel_values", "attention_mask")
_EMBEDDINGS = ("text_embeds", "image_embeds")

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("bert", _hugging_face("BertModel", _TEXT), _TOKEN_INPUTS, 2),
        Family("gpt2", _hugging_face("GPT2Model", _GPT2), _TOKEN_INPUTS, 2),
        Family("llama", _hugging_face("LlamaModel", _GROUPED), _TOKEN_INPUTS, 2),
        Family("mistral", _hugging_face("MistralModel", _WINDOW), _TOKEN_INPUTS, 2),
        Family("gemma2", _hugging_face("Gemma2Model", _CAPPED), _TOKEN_INPUTS, 2, ("eager",)),
        Family("t5", _hugging_face("T5Model", _T5), _SEQ2SEQ_INPUTS, 6),
        Family("bart", _hugging_face("BartModel", _SEQ2SEQ | _POSITIONS), _SEQ2SEQ_INPUTS, 3),
        Family("whisper", _hugging_face("WhisperModel", _SPEECH), ("input_features", "decoder_input_ids"), 3),
        Family("vit", _hugging_face("ViTModel", _SMALL | _IMAGE), ("pixel_values",), 2),
        Family("clip", _hugging_face("CLIPModel", _CLIP), _CLIP_INPUTS, 4, outputs=_EMBEDDINGS),
        Family("bloom", _hugging_face("BloomModel", _BLOOM), _TOKEN_INPUTS, 2, ("eager",)),
        Family("falcon", _hugging_face("FalconModel", _SMALL | _TOKENS), _TOKEN_INPUTS, 2),
        Family("deepseek", _hugging_face("DeepseekV3Model", _LATENT), _TOKEN_INPUTS, 2),
        Family("nanogpt", lambda _: NanoGPT(VOCABULARY, LONGEST), ("input_ids",), 2, ("eager",), hugging_face=False),
    )
}

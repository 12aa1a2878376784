# SPDX-License-Identifier: Apache-2.0
"""The attention that Hugging Face models are exported with: one plain SDPA call and the smallest mask that is right.

transformers' own SDPA mask is built by indexing (GatherND in ONNX) and expanded to ``[B, 1, Sq, Skv]`` even where it
only says which keys are padding; and its forward branches on the query's length, which keeps length 1 out of a
dynamic export. Here a padding mask stays ``[B, 1, 1, Skv]``, a causal one is ``[1, 1, Sq, Skv]`` or none at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

NAME = "exported_attention"
"""Without "flash" in it, where transformers would look for a kernel of that name, and without "sdpa", where it would
refuse models with a soft cap."""


EXPERTS = "batched_mm"
"""How experts are computed: the only way without a choice by data and with an ONNX form."""


def register() -> None:
    """Makes ``attn_implementation=NAME`` known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


@contextlib.contextmanager
def exportable(module: torch.nn.Module) -> Iterator[None]:
    """Inside, the models of transformers in ``module`` compute what can be exported; afterwards all is as it was.

    Experts are computed in the form that ONNX has. A ``module`` that is such a model itself also calls our attention,
    where it can, and keeps no cache; of one inside a module of the user's own, that forward may rely on both.
    """
    owned = [part.config for part in module.modules() if isinstance(getattr(part, "config", None), PreTrainedConfig)]
    configs = list({id(config): config for config in owned}.values())
    before = [(config, dict(vars(config))) for config in configs]
    for config in configs:
        config._experts_implementation = EXPERTS
    if isinstance(module, PreTrainedModel):
        register()
        if module._supports_attention_backend:  # others have chosen their attention when they were built
            module.set_attn_implementation(NAME)
        keep_no_cache(module)
    try:
        yield
    finally:
        for config, state in before:
            vars(config).clear()
            vars(config).update(state)


def fits(cls: type[PreTrainedModel]) -> bool:
    """Whether the class calls the attention that it is told to; others write their own out."""
    return bool(cls._supports_sdpa or cls._supports_attention_backend)


def keep_no_cache(module: torch.nn.Module) -> None:
    """Turns the cache off, which is state between calls and no tensor to return."""
    for part in module.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query ``[B, Hq, Sq, D]``, key and value ``[B, Hkv, Skv, D]`` -> ``[B, Sq, Hq, Dv]``; no probabilities."""
    if kwargs.get("position_bias") is not None:
        stock: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return stock
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is not None or sinks is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        written = _written_out(query * scale, key, value, attention_mask, causal, softcap, sinks)
        return written.transpose(1, 2).contiguous(), None
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=causal and attention_mask is None,
        scale=scaling,
        enable_gqa=getattr(module, "num_key_value_groups", 1) > 1,
    )
    return output.transpose(1, 2).contiguous(), None


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a soft cap or sinks ``[Hq]``, which SDPA does not have; a row without a visible key gives 0."""
    group = query.shape[1] // key.shape[1]
    key, value = (t[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for t in (key, value))
    scores = query @ key.transpose(-2, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is None and causal:
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if visible is not None:
        scores = torch.where(visible, scores, float("-inf"))
    if sinks is None:
        probs = torch.softmax(scores, -1)
        return torch.where(torch.isnan(probs), 0.0, probs) @ value
    column = sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ value


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """Boolean, broadcastable to ``[B, 1, Sq, Skv]``, True where a query sees a key; None where ``is_causal`` says it.

    Args are those of transformers' mask interface; ``attention_mask`` is ``[B, Skv]``, True for a token.
    """
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None and padding.shape[-1] != kv_length:
        padding = padding[:, kv_offset : kv_offset + kv_length]
    keys = None if padding is None else padding.to(torch.bool).unsqueeze(1).unsqueeze(1)
    if mask_function is masking_utils.bidirectional_mask_function:
        return keys
    if mask_function is masking_utils.causal_mask_function:
        same_start = isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset == kv_offset == 0
        if keys is None and allow_is_causal_skip and same_start:
            return None
        queries = torch.arange(q_length, device=device)[:, None] + q_offset
        causal = (torch.arange(kv_length, device=device)[None, :] + kv_offset <= queries)[None, None]
        return causal if keys is None else causal & keys
    return masking_utils.sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=False,
        device=device,
        **kwargs,
    )

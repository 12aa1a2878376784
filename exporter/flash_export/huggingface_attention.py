# SPDX-License-Identifier: Apache-2.0
"""The attention that Hugging Face models are exported with: one plain SDPA call and the smallest mask that is right.

transformers' own SDPA mask is built by indexing (GatherND in ONNX) and expanded to ``[B, 1, Sq, Skv]`` even where it
only says which keys are padding; and its forward branches on the query's length, which keeps length 1 out of a
dynamic export. Here a padding mask stays ``[B, 1, 1, Skv]``, a causal one is ``[1, 1, Sq, Skv]`` or none at all.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

NAME = "export_sdpa"
"""Without "flash" in it: transformers would look for a kernel of that name."""


def register() -> None:
    """Makes ``attn_implementation=NAME`` known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


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
    """query ``[B, Hq, Sq, D]``, key and value ``[B, Hkv, Skv, D]`` -> ``[B, Sq, Hq, Dv]``; no probabilities.

    Raises:
        ValueError: soft capping or sinks, which SDPA does not have.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("SDPA has neither soft capping nor attention sinks")
    if kwargs.get("position_bias") is not None:
        stock: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return stock
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=bool(causal) and attention_mask is None,
        scale=scaling,
        enable_gqa=getattr(module, "num_key_value_groups", 1) > 1,
    )
    return output.transpose(1, 2).contiguous(), None


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

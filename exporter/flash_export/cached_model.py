# SPDX-License-Identifier: Apache-2.0
"""A causal language model with its key-value cache as inputs and outputs: what ``--kv-cache`` exports.

Inputs ``input_ids [B, S]``, ``attention_mask [B, P + S]`` (1 for a token, cached ones too), ``position_ids [B, S]``
where the model takes them, and for each layer ``past_key_values.N.key [B, Hkv, P, D]`` and ``.value [B, Hkv, P, Dv]``.
Outputs ``logits [B, S, vocabulary]`` and for each layer ``present.N.key`` and ``.value`` of length P + S. P may be 0.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from flash_export.errors import UnsupportedModel
from flash_export.load import Argument
from flash_export.options import Dim

PAST, SEQ = "past", "seq"
_BATCH_SIZE, _PAST_SIZE, _SEQ_SIZE = 2, 5, 3


class CachedModel(torch.nn.Module):  # type: ignore[misc]
    """Calls ``model`` with tensors by position, named ``names``, and returns ``logits`` and the grown cache by name.

    The cache is transformers' plain one, which keeps every key: a sliding window is a matter of the mask.
    """

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        inputs = dict(zip(self.names, tensors, strict=True))
        past = [inputs.pop(name) for name in self.names if name.startswith("past_key_values.")]
        cache = DynamicCache()
        for layer, (key, value) in enumerate(zip(past[::2], past[1::2], strict=True)):
            cache.update(key, value, layer)
        outputs = {"logits": call(self.model, cache, inputs).logits}
        for index, layer in enumerate(cache.layers):
            outputs |= {f"present.{index}.key": layer.keys, f"present.{index}.value": layer.values}
        return outputs


def call(model: Any, cache: DynamicCache, inputs: dict[str, torch.Tensor]) -> Any:
    """The model's result; ``cache`` grows. The argument's name changed within transformers 5."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(**inputs, **{name: cache}, use_cache=True)


def with_cache(model: Any, longest: int | None) -> tuple[CachedModel, tuple[Argument, ...]]:
    """The model for export and its example inputs; the shapes of the cache are those that the model fills it with.

    Args:
        model: a transformers model in eval mode.
        longest: the longest sequence; None where nothing limits it.

    Raises:
        UnsupportedModel: it is no causal language model, or keeps another kind of state.
    """
    taken = inspect.signature(model.forward).parameters
    if model.config.is_encoder_decoder or not {"cache", "past_key_values"} & taken.keys() or not model.can_generate():
        raise _unsupported(model, "a model that generates no text with a cache of its own")
    batch, past, seq = Dim("batch", 1), Dim(PAST, 0, longest), Dim(SEQ, 1, longest)
    ids = torch.zeros(_BATCH_SIZE, _SEQ_SIZE, dtype=torch.int64)
    arguments = [
        Argument("input_ids", ids, {0: batch, 1: seq}),
        Argument(
            "attention_mask", torch.ones(_BATCH_SIZE, _PAST_SIZE + _SEQ_SIZE, dtype=torch.int64),
            {0: batch, 1: Dim(f"{PAST} + {SEQ}")},
        ),
    ]  # fmt: skip
    if "position_ids" in taken:
        positions = torch.arange(_PAST_SIZE, _PAST_SIZE + _SEQ_SIZE).repeat(_BATCH_SIZE, 1)
        arguments.append(Argument("position_ids", positions, {0: batch, 1: seq}))
    for index, layer in enumerate(_filled(model).layers):
        for kind, tensor in (("key", layer.keys), ("value", layer.values)):
            arguments.append(Argument(f"past_key_values.{index}.{kind}", tensor, {0: batch, 2: past}))
    return CachedModel(model, tuple(a.name for a in arguments)), tuple(arguments)


def _filled(model: Any) -> DynamicCache:
    """The cache of a model that has read as many tokens as the example's past holds."""
    cache = DynamicCache()
    try:
        with torch.no_grad():
            call(model, cache, {"input_ids": torch.zeros(_BATCH_SIZE, _PAST_SIZE, dtype=torch.int64)})
        others = [
            i for i, layer in enumerate(cache.layers) if not isinstance(getattr(layer, "keys", None), torch.Tensor)
        ]
        if others:
            raise _unsupported(model, f"{len(others)} of {len(cache.layers)} layers that cache no keys, {others[:4]}")
        shapes = [tuple(t.shape) for layer in cache.layers for t in (layer.keys, layer.values)]
    except UnsupportedModel:
        raise
    except Exception as error:  # each model has its own way not to take a plain cache
        raise _unsupported(model, f"{type(error).__name__}: {str(error)[:200]}") from error
    if not shapes or any(len(s) != 4 or s[0] != _BATCH_SIZE or s[2] != _PAST_SIZE for s in shapes):
        raise _unsupported(model, f"a cache of {len(shapes)} tensors, shapes {shapes[:2]}")
    return cache


def _unsupported(model: Any, got: str) -> UnsupportedModel:
    return UnsupportedModel(
        "this model cannot be exported with a cache",
        where=f"--kv-cache, {type(model).__name__}",
        got=got,
        need="a causal language model whose layers cache keys and values [B, H, S, D]",
        do="leave --kv-cache out to export it without a cache; check architectures in config.json (...ForCausalLM)",
    )

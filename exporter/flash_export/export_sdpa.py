# SPDX-License-Identifier: Apache-2.0
"""How ``scaled_dot_product_attention`` is written in ONNX when the source is PyTorch.

The stock translation splits the scale, fills boolean masks with finfo.min (a fully masked row then gives the mean of
V, where PyTorch gives 0) and refuses multi-query calls. Ours is the plainest graph that equals eager PyTorch. With
query ``[..., Sq, D]``, key ``[..., Skv, D]``, value ``[..., Skv, Dv]``, and each part only where the call asks for it::

    key, value   Unsqueeze(2) -> Expand [1, 1, group, 1, 1] -> Reshape [B, Hq, Skv, D]     enable_gqa
    scores       MatMul(Mul(query, scale), Transpose(key, last two axes))                  no Mul at scale 1
    bias         Where(mask, 0, -inf)                                                      boolean mask
                 mask, Cast where its type is not the query's                              float mask
                 Where(LessOrEqual(Range(Skv)[None, :], Range(Sq)[:, None]), 0, -inf)      is_causal, top-left
    probs        Softmax(Add(scores, bias), axis=-1)
                 Where(IsNaN(probs), 0, probs)                                             only with a mask
    output       MatMul(probs, value)

A key with one head and a query with several needs no Expand: MatMul broadcasts it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset18

from flash_export.errors import UnsupportedModel

op: Any = opset18


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The ONNX values of one call of ``torch.nn.functional.scaled_dot_product_attention``; see the file's head.

    Args are the call's own; tensors are symbolic ONNX values.

    Raises:
        UnsupportedModel: the call drops probabilities at random, so its result is not a function of its inputs.
    """
    if dropout_p:
        raise UnsupportedModel(
            "scaled_dot_product_attention is called with dropout",
            where="a call of torch.nn.functional.scaled_dot_product_attention",
            got=f"dropout_p = {dropout_p}",
            need="dropout_p = 0 at inference",
            do="pass dropout_p=self.dropout if self.training else 0.0, as PyTorch's documentation shows",
        )
    if enable_gqa:
        key, value = _repeat_heads(query, key), _repeat_heads(query, value)
    factor = _scale_of(query, scale)
    scaled = query if factor is None else op.Mul(query, factor)
    scores = op.MatMul(scaled, op.Transpose(key, perm=_swap_last_two(len(query.shape))))
    if attn_mask is not None:
        scores = op.Add(scores, _bias_of(attn_mask, query.dtype))
    if is_causal:
        scores = op.Add(scores, _causal_bias(query, key))
    probs = op.Softmax(scores, axis=-1)
    if attn_mask is not None:
        # A row whose keys are all at -inf is NaN after Softmax and 0 in PyTorch. A causal row always sees key 0.
        probs = op.Where(op.IsNaN(probs), _constant(0.0, query.dtype), probs)
    return op.MatMul(probs, value)


def attention_for_cpu(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any]:
    """The same for ``aten._scaled_dot_product_flash_attention_for_cpu``, which a decomposed program holds instead.

    Its second output, the logsumexp, serves training alone: it is given as a placeholder without elements.
    """
    output = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return output, op.Constant(value=ir.tensor(np.zeros((0,), np.float32)))


def _constant(number: float, dtype: ir.DataType) -> Any:
    return op.Constant(value=ir.tensor(np.array(number, dtype.numpy()), dtype=dtype))


def _swap_last_two(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _scale_of(query: Any, scale: float | None) -> Any:
    """The scale as a constant of the query's type, or None where it is 1 and a Mul would do nothing."""
    if scale is None:
        head_dim = query.shape[-1]
        if not isinstance(head_dim, int):
            raise UnsupportedModel(
                "the head dim of an attention changes from run to run",
                where="a call of torch.nn.functional.scaled_dot_product_attention",
                got=f"a query whose last dimension is {head_dim}",
                need="a fixed head dim, or scale=... in the call",
                do="give that dimension as a number, in --input or dynamic_shapes",
            )
        scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    return None if scale == 1.0 else _constant(scale, query.dtype)


def _repeat_heads(query: Any, tensor: Any) -> Any:
    """``[B, Hkv, S, D]`` -> ``[B, Hq, S, D]`` with each head repeated inside its group, as enable_gqa does."""
    heads_q, heads_kv = query.shape[1], tensor.shape[1]
    if heads_q == heads_kv:
        return tensor

    def size(axis: int) -> Any:
        return op.Shape(tensor, start=axis, end=axis + 1)

    grouped = op.Expand(
        op.Unsqueeze(tensor, op.Constant(value_ints=[2])), op.Constant(value_ints=[1, 1, heads_q // heads_kv, 1, 1])
    )
    # Written out rather than as 0 and -1, so that a batch or length of 0 works too.
    return op.Reshape(grouped, op.Concat(size(0), op.Constant(value_ints=[heads_q]), size(2), size(3), axis=0))


def _bias_of(mask: Any, dtype: ir.DataType) -> Any:
    if mask.dtype == ir.DataType.BOOL:
        return op.Where(mask, _constant(0.0, dtype), _constant(-math.inf, dtype))
    return mask if mask.dtype == dtype else op.Cast(mask, to=dtype)


def _causal_bias(query: Any, key: Any) -> Any:
    """``[Sq, Skv]``: 0 where the key's index is at most the query's, else -inf. Aligned top-left, as is_causal is."""
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)

    def indices(tensor: Any, axis: int) -> Any:
        length = op.Squeeze(op.Shape(tensor, start=-2, end=-1), op.Constant(value_ints=[0]))
        return op.Unsqueeze(op.Range(zero, length, one), op.Constant(value_ints=[axis]))

    visible = op.LessOrEqual(indices(key, 0), indices(query, 1))
    return op.Where(visible, _constant(0.0, query.dtype), _constant(-math.inf, query.dtype))

# SPDX-License-Identifier: Apache-2.0
"""What ``find`` says of a model: one ``Site`` for every softmax and attention operator in it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from flash_export.op import Attributes

Status = Literal["fused", "refused", "not_attention"]


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a site was left as it is. Shown to the user as it stands.

    Args:
        code: stable snake_case word, e.g. ``mask_replaces_scores``; tests and tools read this.
        text: one sentence, with the numbers.
        node: name of the node that stands in the way.
        action: what the user can do about it.
    """

    code: str
    text: str
    node: str
    action: str


@dataclasses.dataclass(slots=True)
class Site:
    """One softmax or attention operator and what becomes of it.

    ``boundary`` and ``output`` are names of values that exist, with the same meaning, in the graph before and after
    the rewrite: everything between them is what the rewrite replaces. ``check`` feeds the boundary with
    numbers and compares ``output`` of both graphs. ``query_source`` and ``key_source`` are those boundary values whose
    product makes the scores (None where they are no boundary value of their own). ``product`` is the value in the
    unfused graph that holds the product of Q and K; None where an operator forms it inside. ``keys`` is the key length
    where it is fixed. ``already``: the node is a FlashAttention node in the source, and nothing is rewritten.
    """

    name: str
    status: Status
    reason: Refusal | None = None
    operator: str | None = None
    attributes: Attributes | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    bias_shape: list[int | str | None] | None = None
    output: str = ""
    boundary: tuple[str, ...] = ()
    query_source: str | None = None
    key_source: str | None = None
    product: str | None = None
    keys: int | None = None
    already: bool = False
    match: object | None = dataclasses.field(default=None, repr=False, compare=False)
    """What ``rewrite`` needs of ``find``; nobody else reads it."""
    origin: int | None = dataclasses.field(default=None, repr=False, compare=False)
    """The anchor's number in a file with functions: what is one node there is one at every call once written out."""

    def as_report(self) -> dict[str, object]:
        """The site's entry in ``report.json``, schema 1."""
        a = self.attributes
        return {
            "name": self.name,
            "status": self.status,
            "reason": dataclasses.asdict(self.reason) if self.reason else None,
            "operator": self.operator,
            "layout": a.layout if a else None,
            "q_heads": a.q_num_heads if a else None,
            "kv_heads": a.kv_num_heads if a else None,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
            "causal": a.causal_kind if a else None,
            "window": [a.window_left, a.window_right] if a else None,
            "bias": self.bias_shape,
            "kv_lengths": bool(a.has_kv_lengths) if a else None,
            "sinks": bool(a.has_sinks) if a else None,
            "softcap": a.softcap if a else None,
            "scale": a.scale if a else None,
        }

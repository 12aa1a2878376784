# SPDX-License-Identifier: Apache-2.0
"""What a comparison that passes did not see of FUSED's attention, and what becomes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flash_export.errors import UsageError
from flash_export.talk import Talk


@dataclasses.dataclass(frozen=True, slots=True)
class UnseenWindow:
    """A window without which every run passes: ``attribute`` of ``node`` is ``size``, as a rule past all lengths."""

    node: str
    attribute: str
    size: int

    @property
    def shortest(self) -> int:
        """The length from which the window hides a key of some row."""
        return self.size + 2

    def __str__(self) -> str:
        return f'{self.attribute} {self.size} of node "{self.node}" (needs a length of {self.shortest})'


@dataclasses.dataclass(frozen=True, slots=True)
class Sight:
    """``blind``: FUSED with every scale 1 % off would have passed as well.

    ``nodes``: those of which a scale ten times as large would have passed; ``together``: they were not tried each
    alone, which would have loaded too much. ``windows``: those that could have been left out. ``allowed``: the inputs
    are the user's, or there are no others, so that none of it is a failure.
    """

    blind: bool = False
    nodes: tuple[str, ...] = ()
    together: bool = False
    windows: tuple[UnseenWindow, ...] = ()
    allowed: bool = False

    @property
    def fails(self) -> bool:
        """Whether the comparison proves too little to pass."""
        return (self.blind or bool(self.nodes)) and not self.allowed

    def as_json(self) -> dict[str, Any]:
        """The entries of a verdict's JSON."""
        return {
            "attention_compared": not self.blind and not self.nodes,
            "nodes_not_compared": list(self.nodes),
            "nodes_tried_alone": not self.together,
            "windows_not_compared": [{**dataclasses.asdict(w), "length_needed": w.shortest} for w in self.windows],
        }

    def tell(self, fused: Path, runs: Iterable[str], talk: Talk) -> None:
        """Warns of what was not seen.

        Raises:
            UsageError: too little was, and other inputs are to be had.
        """
        if self.windows:
            talk.warn(
                "these windows could be left out as well, as where no inputs are longer, so that a wrong one passes: "
                f"{_some(self.windows)}; compare on such a length too, with --shape NAME:MIN,OPT,MAX or --values "
                "FILE.npz"
            )
        if self.together:
            talk.warn(
                f"{fused} is large, so the scales and windows of its attentions were made wrong all at once, not each "
                "alone: an attention on which no output depends would not have been noticed"
            )
        if not self.blind and not self.nodes:
            return
        what = "nothing of attention" if self.blind else f"nothing of {_some(self.nodes)}"
        why = (
            "with scales that are 1 % off in every node"
            if self.blind
            else f"with a scale ten times as large in {_some(self.nodes)}, each alone,"
        )
        if self.allowed:
            talk.warn(
                f"{what} was compared: {why} {fused} passes on these inputs as well, as where a row sees one key alone;"
                " give longer ones where the model takes them"
            )
            return
        raise UsageError(
            f"{what} was compared",
            where=f"{fused}, on {', '.join(dict.fromkeys(runs))}"[:400],
            got=f"outputs that pass {why} as well, as where a row sees one key alone",
            need="inputs on which such a fault shows: several keys",
            do="give lengths that REFERENCE takes with --shape NAME:MIN,OPT,MAX, or inputs with --values FILE.npz;"
            " given ones are compared as they are, with a warning",
        )


def _some(things: Iterable[object]) -> str:
    """The first five, and how many more."""
    every = [f'node "{one}"' if isinstance(one, str) else str(one) for one in things]
    return ", ".join(every[:5]) + (f" and {len(every) - 5} more" if len(every) > 5 else "")

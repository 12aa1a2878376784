# SPDX-License-Identifier: Apache-2.0
"""Which of the inputs planned for a run counts: the first that REFERENCE takes, and gives numbers on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from flash_export import twin
from flash_export.errors import UsageError
from flash_export.talk import Talk
from flash_export.trials import Trial
from flash_trt import runners
from flash_trt.compare_inputs import DrawnTrial, LongerTrials
from flash_trt.ort_errors import one_line
from flash_trt.verdict import Outputs

_UNSEEN = (
    "where that is the size of a window, a wrong or missing one in FUSED was not seen; compare on such a length, with "
    "--shape NAME:MIN,OPT,MAX or --values FILE.npz"
)


@dataclasses.dataclass(slots=True)
class Chooser:
    """Runs REFERENCE on the choices of every run, and remembers what it left out.

    ``base`` is REFERENCE as it runs, ``model`` its graph, ``planned`` the number of runs so far. ``refused``: a set of
    inputs that it takes in no form, and why; ``padded``: one on which it is NaN, and the one that was taken instead.
    ``unpassed``: the numbers that may be windows, where it takes no inputs that are longer than one of them;
    ``too_large``: those where such inputs ask for too much memory. ``last``: the choices of the last run.
    """

    base: Any
    model: ir.Model
    planned: int = 0
    refused: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    padded: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    unpassed: list[str] = dataclasses.field(default_factory=list)
    too_large: list[str] = dataclasses.field(default_factory=list)
    last: Sequence[Trial] = ()

    def taken(
        self, runs: Sequence[Sequence[Trial]], longer: Callable[[Sequence[Trial]], LongerTrials | None], talk: Talk
    ) -> Iterator[tuple[Trial, Outputs]]:
        """What REFERENCE takes of each of ``runs``, with its outputs; last of what is ``longer`` than all of those."""
        found: list[Trial] = []
        for choices in self._with_longer(runs, found, longer):
            talk.progress(choices[0].name, self.planned, len(runs))
            self.planned += 1
            self.last = choices
            taken = self._first_taken(choices)
            if taken is not None:
                found.append(taken[0])
                yield taken

    def _with_longer(
        self,
        runs: Sequence[Sequence[Trial]],
        found: Sequence[Trial],
        longer: Callable[[Sequence[Trial]], LongerTrials | None],
    ) -> Iterator[Sequence[Trial]]:
        yield from runs
        last = longer(found)
        if last is not None:
            self.too_large += last.too_large
            if len(last):
                yield last

    def _first_taken(self, choices: Sequence[Trial]) -> tuple[Trial, Outputs] | None:
        """The first of ``choices`` that REFERENCE takes, with its outputs; None when it takes none.

        Where exporters give one length several names, sizes that differ between them are refused by the model itself or
        broadcast to outputs that are none of the model's.
        """
        why = ""
        for trial in choices:
            outcome = self._outputs(trial)
            if not isinstance(outcome, str):
                return self._with_numbers(trial, outcome)
            why = why or outcome
        self.refused.append((choices[0].name, why))
        if isinstance(choices, LongerTrials):
            self.unpassed += choices.names
        return None

    def _outputs(self, trial: Trial) -> Outputs | str:
        """REFERENCE's outputs, or why these inputs are none for it."""
        base = infer(self.base, trial)
        if isinstance(base, Exception):
            return one_line(base)
        declared = {value: base[value.name] for value in self.model.graph.outputs if value.name and value.name in base}
        return (trial.why_unfair(declared) if trial.sizes is not None else "") or base

    def _with_numbers(self, trial: Trial, base: Outputs) -> tuple[Trial, Outputs]:
        """``trial``, or where REFERENCE is NaN on drawn padding the same with another on which it is not.

        Padding that this comparison drew itself must not fail a right model; where REFERENCE is NaN with every padding,
        the first counts, and fails.
        """
        if isinstance(trial, DrawnTrial) and _has_nan(base):
            for other in trial.others:
                outcome = self._outputs(other)
                if not isinstance(outcome, str) and not _has_nan(outcome):
                    self.padded.append((trial.name, other.name))
                    return other, outcome
        return trial, base

    def leave_out_last(self) -> bool:
        """Whether the last run can be left out, since windows alone are compared on it; they are too large then."""
        if isinstance(self.last, LongerTrials):
            self.too_large += self.last.names
            return True
        return False

    def tell(self, reference: Path, talk: Talk) -> None:
        """Says what was left out. A model may refuse lengths (past its positions), but not all.

        Raises:
            UsageError: it takes none.
        """
        if self.padded:
            name, other = self.padded[0]
            talk.warn(
                f"REFERENCE is NaN on {len(self.padded)} of {self.planned} sets of inputs whose drawn padding leaves a "
                f"row no key, which FlashAttention makes 0: the first key is kept there instead, e.g. {other} for "
                f"{name}"
            )
        if self.too_large:
            talk.warn(
                f"inputs longer than {_some(self.too_large)} were not tried, since they ask for too much memory: "
                f"{_UNSEEN}"
            )
        if not self.refused:
            return
        name, why = self.refused[0]
        if len(self.refused) == self.planned:
            raise UsageError(
                "REFERENCE runs on none of the inputs",
                where=f"{reference}, {name}",
                got=why,
                need="inputs that the model accepts",
                do="limit the lengths with --shape NAME:MIN,OPT,MAX, or give inputs with --values FILE.npz",
            )
        talk.warn(f"REFERENCE refused {len(self.refused)} of {self.planned} sets of inputs, e.g. {name}: {why}")
        if self.unpassed:
            talk.warn(f"REFERENCE takes no inputs longer than {_some(self.unpassed)}: {_UNSEEN}, where there is one")


def infer(runner: Any, trial: Trial) -> Outputs | Exception:
    """The outputs of ``runner`` by name, or the error that it raises."""
    try:
        outputs = runner.infer(runners.adapted(trial.feeds, runner))
    except Exception as error:  # ONNX Runtime's and Polygraphy's errors share no other base; the caller reports it
        return error
    # A runner may reuse its buffers.
    return {name: np.array(value) for name, value in outputs.items()}


def _some(names: Sequence[str]) -> str:
    """The first five, and how many more."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _has_nan(outputs: Outputs) -> bool:
    return any(twin.is_float(a.dtype) and bool(np.isnan(a.astype(np.float64)).any()) for a in outputs.values())

# SPDX-License-Identifier: Apache-2.0
"""The verdict of a comparison: every output of both sides, NaN and missing ones included, each with its numbers.

The rule is the project's one tolerance rule, at the level of a model: ``reference`` is REFERENCE in float64, ``base``
is REFERENCE as it runs, and FUSED may be off by twice what ``base`` is off, plus two units in the last place. What
``base`` is off is pooled over all runs of an output, relative to the output's largest number there, or to its usual
largest number where that is larger: one small output says little about its rounding, and a single logit that happens to
be near zero nothing about its scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from flash_export import accept, twin
from flash_export.accept import Noise, finite_or_none

Outputs = Mapping[str, np.ndarray]

PROVES_NOTHING = ("empty", "infinite")
"""Kinds of verdicts on outputs that are alike and hold no number to compare."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunOutputs:
    """What one set of inputs gave. ``wide`` is REFERENCE in float64, None where no float64 twin can be made."""

    name: str
    fused: Outputs
    base: Outputs
    wide: Outputs | None
    feeds: Outputs = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class OutputVerdict:
    """How one output of one run compares; ``why`` is empty when it passed.

    ``kind``: "passed", "differs", "missing", "nan_in_inputs", "nan_in_fused", "nan_in_reference" or "nan_in_both"; and
    "empty" or "infinite" where both sides agree without one number to compare, which neither fails nor proves anything.
    ``compared`` says how many numbers were compared.
    """

    run: str
    output: str
    kind: str
    why: str
    max_abs_error: float
    tolerance: float
    largest: float
    compared: int = 0

    @property
    def passed(self) -> bool:
        return self.kind == "passed"

    @property
    def failed(self) -> bool:
        return self.kind not in ("passed", *PROVES_NOTHING)

    def as_json(self) -> dict[str, object]:
        """The verdict as data; a number that JSON lacks becomes None."""
        return {
            field.name: finite_or_none(value) if isinstance(value, float) else value
            for field in dataclasses.fields(self)
            for value in [getattr(self, field.name)]
        }


def judge_runs(
    runs: Sequence[RunOutputs],
    *,
    more: Sequence[tuple[Outputs, Outputs]] = (),
    rounding: float = 1.0,
    softcap: bool = False,
) -> list[OutputVerdict]:
    """One verdict for each output of each run, of whichever side it is.

    Args:
        runs: every run of one comparison; their rounding is pooled.
        more: further pairs of REFERENCE as it runs and in float64, for the rounding alone.
        rounding: unit roundoff of the type FUSED computes in over that of REFERENCE; above 1 for an engine in float16.
        softcap: FUSED caps scores; three times the rounding is allowed then instead of twice.
    """
    names = list(dict.fromkeys(name for run in runs for side in (run.base, run.fused) for name in side))
    pairs = [(run.base, run.wide) for run in runs if run.wide is not None] + list(more)
    noises = {name: _Rounding.of(pairs, runs, name, rounding) for name in names}
    factor = accept.FACTOR_WITH_SOFTCAP if softcap else accept.FACTOR
    return [_judge(run, name, noises[name], factor) for run in runs for name in names]


@dataclasses.dataclass(frozen=True, slots=True)
class _Rounding:
    """How far REFERENCE is from itself in float64, relative to at least the ``usual`` largest number of one output."""

    noise: Noise
    usual: float

    @classmethod
    def of(
        cls, sides: Sequence[tuple[Outputs, Outputs]], runs: Sequence[RunOutputs], name: str, rounding: float
    ) -> _Rounding:
        """The pooled noise of ``sides``; a documented bound where nothing can tell."""
        usual = float(np.median([_largest(run.base.get(name)) for run in runs])) if runs else 0.0
        pairs = [(base[name], wide[name]) for base, wide in sides if name in base and name in wide]
        pairs = [(base, wide) for base, wide in pairs if twin.is_float(base.dtype) and base.shape == wide.shape]
        if not pairs:
            return cls(Noise(accept.UNKNOWN_NOISE, accept.UNKNOWN_NOISE).scaled(rounding), usual)
        unscaled = cls(Noise(0.0, 0.0), usual)
        measured = [_times(Noise.between(base, wide), unscaled.share(wide)) for base, wide in pairs]
        return cls(Noise.pooled(measured).scaled(rounding), usual)

    def share(self, reference: np.ndarray) -> float:
        """``reference``'s largest number over the scale that its noise is relative to; at most 1."""
        largest = _largest(reference)
        return largest / max(largest, self.usual) if largest else 1.0

    def at(self, reference: np.ndarray) -> Noise:
        """The noise relative to ``reference``'s own largest number, as ``accept.judge`` takes it."""
        return _times(self.noise, 1 / self.share(reference))


def _times(noise: Noise, by: float) -> Noise:
    return Noise(noise.maximum * by, noise.mean)


def _judge(run: RunOutputs, name: str, rounding: _Rounding, factor: float) -> OutputVerdict:
    def verdict(kind: str, why: str, error: float = np.inf, tolerance: float = 0.0, compared: int = 0) -> OutputVerdict:
        return OutputVerdict(run.name, name, kind, why, error, tolerance, largest, compared)

    largest = _largest(run.base.get(name))
    if name not in run.fused or name not in run.base:
        side = "FUSED" if name not in run.fused else "REFERENCE"
        return verdict("missing", f"{side} has no output of this name")
    fused, base = run.fused[name], run.base[name]
    reference = run.wide[name] if run.wide is not None and name in run.wide else base
    if fused.shape != base.shape:
        return verdict("differs", f"shape {list(fused.shape)} instead of {list(base.shape)}")
    if twin.is_float(fused.dtype) != twin.is_float(base.dtype):
        return verdict("differs", f"type {fused.dtype} instead of {base.dtype}")
    if nan := _nan_problem(fused, base, run.feeds):
        return verdict(*nan)
    if not twin.is_float(base.dtype):
        reference = base
    judged = accept.judge(fused, reference, rounding.at(reference), factor=factor, dtype=_unit_dtype(fused.dtype))
    kind = "passed" if judged.passed else "differs"
    if judged.passed and not judged.compared:
        kind = "infinite" if base.size else "empty"
    return verdict(kind, judged.why, judged.max_abs_error, judged.tolerance, judged.compared)


def _nan_problem(fused: np.ndarray, base: np.ndarray, feeds: Outputs) -> tuple[str, str] | None:
    if not twin.is_float(base.dtype):
        return None
    ours, theirs = (np.isnan(_wide(side)) for side in (fused, base))
    both, only_ours, only_theirs = (int(m.sum()) for m in (ours & theirs, ours & ~theirs, theirs & ~ours))
    fed = [name for name, array in feeds.items() if twin.is_float(array.dtype) and np.isnan(_wide(array)).any()]
    if fed and (both or only_ours or only_theirs):
        return (
            "nan_in_inputs",
            f"{int(ours.sum())} numbers of {ours.size} are NaN in FUSED and {int(theirs.sum())} in REFERENCE, as input "
            f"{fed[0]} holds NaN itself: nothing is compared there; compare on inputs without NaN (--values)",
        )
    if only_ours:
        return "nan_in_fused", f"{only_ours} numbers of {ours.size} are NaN in FUSED and numbers in REFERENCE"
    if only_theirs:
        return (
            "nan_in_reference",
            f"{only_theirs} numbers of {ours.size} are NaN in REFERENCE and numbers in FUSED: as a rule a row whose "
            "keys are all masked, which FlashAttention makes 0; compare on inputs that leave each row a key (--values)",
        )
    if both:
        return (
            "nan_in_both",
            f"{both} numbers of {ours.size} are NaN on both sides, at the same places: nothing is compared there; "
            "compare on inputs that give numbers (--values)",
        )
    return None


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def _unit_dtype(dtype: np.dtype) -> np.dtype:
    return dtype if twin.is_float(dtype) and dtype != np.float64 else np.dtype(np.float32)


def _largest(array: np.ndarray | None) -> float:
    if array is None or not array.size:
        return 0.0
    wide = np.abs(array.astype(np.float64))
    return float(np.max(wide, where=np.isfinite(wide), initial=0.0))

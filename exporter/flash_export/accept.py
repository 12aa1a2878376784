# SPDX-License-Identifier: Apache-2.0
"""The one rule by which the check accepts numbers: twice the unfused graph's own rounding, never a guess.

``reference`` is the unfused graph in float64 and ``base`` the same graph in float32. ``output`` may be off by
2 x max|base - reference| + 2 ulp, and over at least 1,024 numbers its mean error may be 1.5 x the base's + 1 ulp.
The rule is that of FlashAttention's own tests (github.com/Dao-AILab/flash-attention).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

FACTOR = 2.0
FACTOR_WITH_SOFTCAP = 3.0
FACTOR_BETWEEN_TWO = 2 * FACTOR
"""For two results that the rule allows to stand on opposite sides of the reference (triangle inequality)."""

MOST_APART = 8.0
"""Two float32 programs of one model differ by no more in how much they round."""

MEAN_FACTOR = 1.5
POOLED_AT_LEAST = 1024

ENOUGH_NUMBERS = 2**16
MOST_ROUNDINGS = 8

UNKNOWN_NOISE = 2.0**-13
"""Relative rounding of a whole float32 model that no float64 twin can measure: 1,024 units in the last place. A 1 %
fault is 80 times as large."""


def roundings(size: int) -> int:
    """How often the rounding of ``size`` numbers is measured before its maximum means something."""
    return max(1, min(MOST_ROUNDINGS, ENOUGH_NUMBERS // max(size, 1)))


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """Rounding error of the unfused graph, relative to its largest number and to the mean of its magnitudes.

    Of integers and truths: the share that rounding has turned over (an argmax between two near equals).
    """

    maximum: float
    mean: float

    @classmethod
    def between(cls, base: np.ndarray, reference: np.ndarray) -> Noise:
        """The error of ``base``; NaN and infinities of either are left out."""
        if reference.dtype.kind in "biu":
            share = float((base != reference).mean()) if reference.size else 0.0
            return cls(share, share)
        finite = np.isfinite(base) & np.isfinite(reference)
        ref = _among(reference, finite).astype(np.float64, copy=False)
        error = _among(base, finite) - ref
        largest, mean = _largest(ref), _mean(ref)
        return cls(_largest(error) / largest if largest else 0.0, _mean(error) / mean if mean else 0.0)

    @classmethod
    def pooled(cls, noises: Iterable[Noise]) -> Noise:
        """The largest of several trials: a single small output says little about its noise."""
        noises = list(noises)
        return cls(max((n.maximum for n in noises), default=0.0), max((n.mean for n in noises), default=0.0))

    def beside(self, other: Noise) -> Noise:
        """For ``FACTOR_BETWEEN_TWO`` results of which the other's rounding is ``other``; never less than without it.

        A rounding ``MOST_APART`` times as large is none: there float64 decided otherwise than float32, as where
        lengths are turned into integers by way of floats.
        """
        pairs = ((self.maximum, other.maximum), (self.mean, other.mean))
        both = [max(own, (own + its) / 2) if its <= MOST_APART * own else own for own, its in pairs]
        return Noise(both[0], both[1])

    def scaled(self, by: float) -> Noise:
        """The noise of a type whose unit roundoff is ``by`` times float32's."""
        return Noise(self.maximum * by, self.mean * by)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """How one output compares. ``why`` is empty when it is accepted; errors are over the ``compared`` numbers."""

    why: str
    max_abs_error: float
    tolerance: float
    mean_abs_error: float
    mean_tolerance: float | None
    reference_is_nan: int
    compared: int

    @property
    def passed(self) -> bool:
        return not self.why

    @property
    def excess(self) -> float:
        """Error over tolerance; above 1 it failed."""
        if self.why:
            return np.inf
        return self.max_abs_error / self.tolerance if self.tolerance else 0.0

    def beside(self, other: Verdict) -> Verdict:
        """The verdict on both parts of one output: the numbers are those of the part that came closest to failing."""
        closest = max(self, other, key=lambda verdict: verdict.excess)
        counts = self.reference_is_nan + other.reference_is_nan, self.compared + other.compared
        return dataclasses.replace(closest, reference_is_nan=counts[0], compared=counts[1])

    def as_report(self) -> dict[str, object]:
        """The verdict's part of a run in ``report.json``; a number that JSON lacks becomes None."""
        return {
            "passed": self.passed,
            "max_abs_error": finite_or_none(self.max_abs_error),
            "tolerance": finite_or_none(self.tolerance),
            "mean_abs_error": finite_or_none(self.mean_abs_error),
            "mean_tolerance": finite_or_none(self.mean_tolerance),
            "reference_is_nan": self.reference_is_nan,
            "compared": self.compared,
            "why": self.why or None,
        }


def finite_or_none(number: float | None) -> float | None:
    """``number`` where JSON can hold it."""
    return number if number is not None and np.isfinite(number) else None


def judge(
    output: np.ndarray,
    reference: np.ndarray,
    noise: Noise,
    *,
    factor: float = FACTOR,
    dtype: np.dtype | None = None,
    nan_may_stay: bool = False,
    overflow: np.ndarray | None = None,
    among: np.ndarray | None = None,
) -> Verdict:
    """Compares one output with its reference.

    A NaN of the reference (every key of a row masked, without a guard) is a class of its own: the output must be
    finite there, and nothing else is asked of it.

    Args:
        dtype: whose unit in the last place counts; float32 by default.
        nan_may_stay: the reference's NaN may have another origin, such as a NaN that went in.
        overflow: where the unfused graph leaves what float32 holds, as ``overflows`` says; nothing is asked there.
        among: the numbers of an output of floats that are judged; the others are no part of the verdict.
    """
    if output.shape != reference.shape:
        return failed(f"its shape is {list(output.shape)} instead of {list(reference.shape)}")
    if reference.dtype.kind in "biu":
        return _judge_exact(output, reference, factor * noise.maximum)
    out, ref = output.astype(np.float64), reference.astype(np.float64, copy=False)
    if overflow is not None:
        out, ref = np.where(overflow, 0.0, out), np.where(overflow, np.nan, ref)
    if among is not None:
        out, ref = np.where(among, out, 0.0), np.where(among, ref, 0.0)
    nan = np.isnan(ref)
    odd = _odd_values(out, ref, nan, nan_may_stay)
    finite = np.isfinite(ref) & np.isfinite(out) & (True if among is None else among)
    error = np.subtract(out, ref, where=finite, out=np.zeros_like(ref))
    np.abs(error, out=error)
    compared = _among(ref, finite)
    ulp = unit_in_last_place(compared, dtype or np.dtype(np.float32))
    tolerance = factor * noise.maximum * _largest(compared) + 2 * ulp
    mean_tolerance = None
    if compared.size >= POOLED_AT_LEAST:
        mean_tolerance = factor / FACTOR * MEAN_FACTOR * noise.mean * _mean(compared) + ulp
    worst, mean = float(error.max(initial=0.0)), float(error.sum() / compared.size) if compared.size else 0.0
    why = odd
    if not why and worst > tolerance:
        at = np.unravel_index(int(error.argmax()), error.shape)
        place = [int(i) for i in at]
        why = f"max |difference| {worst:.3g} (at {place}: {out[at]:.6g} instead of {ref[at]:.6g})"
    if not why and mean_tolerance is not None and mean > mean_tolerance:
        why = f"mean |difference| {mean:.3g}, more than {mean_tolerance:.3g}"
    return Verdict(why, worst, tolerance, mean, mean_tolerance, int(nan.sum()), compared.size)


def overflows(base: np.ndarray, reference: np.ndarray) -> np.ndarray | None:
    """Where the unfused graph gives a number in float64 and NaN or infinity in float32; None where it never does."""
    if reference.dtype.kind in "biu":
        return None
    found = np.isfinite(reference) & ~np.isfinite(base)
    return found if found.any() else None


def unit_in_last_place(reference: np.ndarray, dtype: np.dtype) -> float:
    """max|((ref + 0.3) - 0.3) - ref| in ``dtype``."""
    rounded = reference.astype(dtype)
    step = rounded + dtype.type(0.3)
    step -= dtype.type(0.3)
    step -= rounded
    return max(float(step.max(initial=0)), -float(step.min(initial=0)))


def _odd_values(out: np.ndarray, ref: np.ndarray, nan: np.ndarray, nan_may_stay: bool) -> str:
    """Where infinities and NaN stand; finite numbers where the reference is NaN are welcome."""
    if np.isfinite(out).all() and not np.isinf(ref).any():
        return ""
    broken = int((~np.isfinite(out) & nan).sum())
    if broken and not nan_may_stay:
        return f"{broken} numbers are not finite where the reference is NaN for want of a key that is not masked"
    if broken := int((np.isnan(out) & ~nan).sum()):
        return f"{broken} numbers are NaN where the reference is not"
    infinite = (np.isinf(ref) | np.isinf(out)) & ~nan
    if broken := int((out[infinite] != ref[infinite]).sum()):
        return f"{broken} numbers are infinite on one side only"
    return ""


def _judge_exact(output: np.ndarray, reference: np.ndarray, allowed_share: float) -> Verdict:
    """Integers and truths are equal, but for as many as rounding turns over in the unfused model itself."""
    different = int((output != reference).sum())
    why = ""
    if different > allowed_share * reference.size:
        why = f"{different} of {reference.size} integers differ"
    error = float(np.abs(output.astype(np.float64) - reference.astype(np.float64)).max(initial=0.0))
    return Verdict(why, error, 0.0, 0.0, None, 0, reference.size)


def failed(why: str) -> Verdict:
    """The verdict on an output that cannot be compared at all."""
    return Verdict(why, np.inf, 0.0, np.inf, None, 0, 0)


def _among(x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Its ``chosen`` numbers in a row, without a copy of them where that is all."""
    return x.ravel() if chosen.all() else x[chosen]


def _largest(x: np.ndarray) -> float:
    return max(float(x.max(initial=0.0)), -float(x.min(initial=0.0)))


def _mean(x: np.ndarray) -> float:
    return float(np.abs(x).mean()) if x.size else 0.0

# SPDX-License-Identifier: Apache-2.0
"""Each fused attention alone: its old subgraph against its new node, in float32, on numbers that show a 1 % fault.

A run of the whole model cannot do this: behind a few layers of rounding a scale that is off by 1 % is invisible.
Here the scores have a standard deviation of 2 to 4, so the softmax is neither flat nor a single peak. That a fault
would show is not assumed: the node is run once more with such a scale, and that must fail.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from flash_export import accept, nudge
from flash_export.accept import Noise, Verdict
from flash_export.boundary import Boundary, ScoreMeter
from flash_export.captured import Seen
from flash_export.cut import CannotCut, attention_nodes, cut
from flash_export.drowned import DrownedRows
from flash_export.function_body import functions_for
from flash_export.op import FLASH_ATTENTION_EX
from flash_export.runtime import AnySession, CannotRun, open_float64, open_session
from flash_export.sites import Site
from flash_export.twin import NoTwin

SCORE_SPREAD = 3.0
"""Standard deviation of scale * Q.K^T that the inputs are stretched to."""
SPREAD_RANGE = (2.0, 4.0)
"""What is good enough; normalised queries (cosine attention) cannot be stretched at all."""

_FLAT = 2.0**-10
"""Scores of a spread below this weigh all keys alike, whatever the scale."""

_STRETCHES = 4
_LARGEST = 2.0**60
"""Numbers up to this can be multiplied and summed in float32. A scale of 1e-44 asks for larger ones."""

SEEDED_FAULT = 1.01
"""What the scale is multiplied by to see whether the numbers tell a wrong node from a right one."""

_SWALLOWS = 2.0**20
"""A bias of this size leaves an eighth of a score's unit: larger ones leave nothing that could be off."""

_LEAST_ROUNDINGS = 4
"""How often the rounding of one trial is measured at least. With one measurement 1 of 200 right sites was refused."""
_LEAST_OF_LARGE = 3
"""The same over all trials of a site, where each gives ``accept.ENOUGH_NUMBERS``: a maximum over so many scatters less.
Measured so, none of 290 right sites came nearer to its tolerance than half of it."""


class CannotProve(Exception):
    """The site cannot be run alone, or its numbers pass with a wrong scale too; the text says which."""


@dataclasses.dataclass(frozen=True, slots=True)
class SiteRun:
    """One site at one setting."""

    site: str
    trial: str
    verdict: Verdict
    score_spread: float | None = None
    reference: str = "float64"
    noise: float = 0.0
    """What the old subgraph was taken to be off by, relative to its largest number."""

    def as_report(self) -> dict[str, object]:
        """The run's entry in ``report.json``."""
        return {
            "kind": "site",
            "name": self.site,
            "setting": self.trial,
            "reference": self.reference,
            "score_spread": self.score_spread,
            "note": None,
            **self.verdict.as_report(),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class _Sample:
    trial: str
    spread: float | None
    reference: np.ndarray
    noise: Noise
    drowned_noise: Noise | None
    """That of the numbers in ``drowned``, which ``noise`` leaves out."""
    drowned: np.ndarray | None
    """The numbers of rows whose every key carries a large number; they are judged by themselves."""
    output: np.ndarray | str
    """What the fused node gave, or why it does not run."""
    faulty: np.ndarray | str
    """The same with a scale that is off by ``SEEDED_FAULT``."""
    nan_goes_in: bool
    overflow: np.ndarray | None
    """Where the old subgraph leaves what float32 holds."""

    def judged(self, output: np.ndarray | str, noises: tuple[Noise, Noise], factor: float) -> Verdict:
        """The verdict by the rule, or on the refusal; ``noises``: of most numbers, and of those that are drowned."""
        if isinstance(output, str):
            return accept.failed(f"the fused node does not run: {output}")

        def of(noise: Noise, among: np.ndarray | None) -> Verdict:
            return accept.judge(
                output, self.reference, noise, factor=factor, nan_may_stay=self.nan_goes_in, overflow=self.overflow,
                among=among,
            )  # fmt: skip

        if self.drowned is None:
            return of(noises[0], None)
        return of(noises[0], ~self.drowned).beside(of(noises[1], self.drowned))


def check_site(
    site: Site,
    boundary: Boundary,
    plain: ir.Model,
    flash: ir.Model,
    seen: Mapping[str, Seen],
    folder: Path,
    seed: int,
    *,
    beside: Mapping[str, Seen] | None = None,
) -> list[SiteRun]:
    """Runs ``site`` alone in both graphs, once a trial, and judges the numbers by the rule of ``accept``.

    Args:
        boundary: that of ``site``.
        plain: the unfused model in float32.
        flash: the fused model in float32, with bodies for its FlashAttention nodes.
        seen: trial name -> what the boundary values were in that run of the whole model.
        folder: for temporary files.
        seed: what the drawn numbers depend on, besides names and shapes.
        beside: more of ``seen``, left out where the old subgraph does not run on it.

    Raises:
        CannotProve: whatever came out, it would not tell a right node from a wrong one.
    """
    try:
        samples, reference = _run(site, boundary, plain, flash, (seen, beside or {}), folder, seed)
    except (CannotCut, CannotRun) as error:
        raise CannotProve(f"it cannot be run alone: {error}") from error
    tried = [s for s in samples if s.trial in seen]
    noises = _pooled(tried)
    softcap = site.attributes is not None and site.attributes.softcap > 0
    factor = accept.FACTOR_WITH_SOFTCAP if softcap else accept.FACTOR

    def judged(sample: _Sample, output: np.ndarray | str) -> Verdict:
        # What rounding does on masks that hide everything lends the other settings nothing.
        return sample.judged(output, noises if sample.trial in seen else _pooled([*tried, sample]), factor)

    if not _has_no_scale(site) and all(judged(s, s.faulty).passed for s in samples):
        raise CannotProve(_why_no_scale_shows(site, samples))
    largest = max(noise.maximum for noise in noises)
    return [SiteRun(site.name, s.trial, judged(s, s.output), s.spread, reference, largest) for s in samples]


def _pooled(samples: Sequence[_Sample]) -> tuple[Noise, Noise]:
    """The noise of most numbers and of drowned ones. A few numbers of a small output say little about its rounding."""
    return (
        Noise.pooled(s.noise for s in samples),
        Noise.pooled(s.drowned_noise for s in samples if s.drowned_noise is not None),
    )


def _why_no_scale_shows(site: Site, samples: Sequence[_Sample]) -> str:
    text = "a scale that is 1 % off would not show on any input tried, "
    spreads = [s.spread for s in samples if s.spread is not None and np.isfinite(s.spread)]
    if spreads and max(spreads) < _FLAT:
        return text + f"since the scores hardly differ (their standard deviation is {max(spreads):g} at most)"
    sinks = site.attributes is not None and site.attributes.has_sinks
    return text + "as where a query sees no more than one key" + (", or a sink takes all the weight" if sinks else "")


def _has_no_scale(site: Site) -> bool:
    """Whether no scale can be wrong: the only key that the graph ever has gets all the weight that no sink has."""
    return site.keys == 1 and site.attributes is not None and not site.attributes.has_sinks


def _run(
    site: Site,
    boundary: Boundary,
    plain: ir.Model,
    flash: ir.Model,
    seen: tuple[Mapping[str, Seen], Mapping[str, Seen]],
    folder: Path,
    seed: int,
) -> tuple[list[_Sample], str]:
    """Every trial's numbers, and what they are measured against: ``float64``, or ``float32`` where no twin runs.

    Of ``seen`` the first part has to run, the second may.
    """
    unfused = cut(plain, site.boundary, [site.output])
    base = open_session(unfused, folder)
    try:
        wide = open_float64(unfused, folder)
    except NoTwin:
        wide = None
    part = cut(flash, site.boundary, [site.output])
    fused = open_session(part, folder)
    faulty = open_session(_with_seeded_fault(part), folder)
    meter = ScoreMeter(site, boundary, flash, folder)
    rows = DrownedRows(site, flash, folder)
    samples = []
    must, may = seen
    for i, (trial, values) in enumerate([*must.items(), *may.items()]):
        feeds, spread = stretch(_draw(boundary, values, seed + i), boundary, meter)
        try:
            narrow = base.run(feeds)[0]
            reference = narrow if wide is None else wide.run(feeds)[0]
        except CannotRun:
            if trial in may:
                continue
            raise
        overflow = accept.overflows(narrow, reference)
        drowned = None if wide is None else rows.of(feeds)
        if wide is None:
            noises: tuple[Noise, Noise | None] = _unknown_noise(part, feeds, folder), None
        else:
            noises = _noise(base, wide, boundary, feeds, (narrow, reference), drowned, len(must))
        outputs = _output_or_refusal(fused, feeds), _output_or_refusal(faulty, feeds)
        samples.append(_Sample(trial, spread, reference, *noises, drowned, *outputs, _makes_nan(feeds), overflow))
    return samples, "float32" if wide is None else "float64"


def _with_seeded_fault(part: ir.Model) -> ir.Model:
    """A copy whose scales are off, in the nodes and in their bodies: below opset 12 a body holds the scale itself."""
    faulty = part.clone()
    nodes = attention_nodes(faulty)
    for node in nodes:
        node.attributes["scale"] = ir.AttrFloat32("scale", SEEDED_FAULT * node.attributes["scale"].as_float())
    for function in functions_for(nodes, faulty.opset_imports[""]):
        faulty.functions[function.identifier()] = function
    return faulty


def _output_or_refusal(session: AnySession, feeds: Mapping[str, np.ndarray]) -> np.ndarray | str:
    try:
        return session.run(feeds)[0]
    except CannotRun as error:
        return str(error)


def _makes_nan(feeds: Mapping[str, np.ndarray]) -> bool:
    """Whether what goes in explains a NaN without any mask. Minus infinity is a mask."""
    floats = [array for array in feeds.values() if array.dtype.kind == "f"]
    return any(bool(np.isnan(array).any() or np.isposinf(array).any()) for array in floats)


def roundings(size: int, trials: int) -> int:
    """How often the rounding of ``size`` numbers is measured in each of a site's trials.

    A large site is what a check spends its time on: each measurement is a run in float64 beside one in float32.
    """
    if size >= accept.ENOUGH_NUMBERS:
        return math.ceil(_LEAST_OF_LARGE / trials)
    return max(_LEAST_ROUNDINGS, accept.roundings(size))


def _noise(
    base: AnySession,
    wide: AnySession,
    boundary: Boundary,
    feeds: Mapping[str, np.ndarray],
    first: tuple[np.ndarray, np.ndarray],
    drowned: np.ndarray | None,
    trials: int,
) -> tuple[Noise, Noise | None]:
    """The rounding of the old subgraph, measured several times, the ``first`` run in both types included; that of
    the numbers in ``drowned`` for itself.
    """
    groups = [None] if drowned is None else [~drowned, drowned]
    size = first[1].size if drowned is None else int((~drowned).sum())
    measured = [[_between(*first, group) for group in groups]]
    for k in range(1, roundings(size, trials)):
        by = nudge.factor(k)
        nearby = {name: np.asarray(array * by) if name in boundary.drawn else array for name, array in feeds.items()}
        pair = base.run(nearby)[0], wide.run(nearby)[0]
        measured.append([_between(*pair, group) for group in groups])
    most, *few = (Noise.pooled(column) for column in zip(*measured, strict=True))
    return most, few[0] if few else None


def _between(narrow: np.ndarray, reference: np.ndarray, group: np.ndarray | None) -> Noise:
    return Noise.between(narrow, reference) if group is None else Noise.between(narrow[group], reference[group])


def _unknown_noise(part: ir.Model, feeds: Mapping[str, np.ndarray], folder: Path) -> Noise:
    """What an operator without a float64 kernel may be off by.

    Beside a finite fill such as -10000 a score keeps few digits: in a row whose keys all have it, the weights are off
    by as much as the fill's unit in the last place. A fill beyond all scores leaves none of them, and no such error.
    """
    values = [node.inputs[3] for node in attention_nodes(part) if node.op_type == FLASH_ATTENTION_EX.name]
    biases = [value for value in values if value is not None and value.name]
    made = [str(value.name) for value in biases if value.producer() is not None]
    arrays = [feeds[str(value.name)] for value in biases if str(value.name) in feeds]
    if made:
        arrays += open_session(cut(part, [v.name or "" for v in part.graph.inputs], made), folder).run(feeds, made)
    fills = [np.abs(array[np.abs(array) < _SWALLOWS]).max(initial=0.0) for array in arrays]
    step = max((float(np.spacing(np.float32(fill))) for fill in fills), default=0.0)
    return Noise(max(accept.UNKNOWN_NOISE, step), max(accept.UNKNOWN_NOISE, step))


def _draw(boundary: Boundary, values: Seen, seed: int) -> dict[str, np.ndarray]:
    """Captured arrays as they are, standard normal numbers of the captured shape for those that are drawn."""
    feeds: dict[str, np.ndarray] = {}
    for name in boundary.names:
        value = values[name]
        value = value() if callable(value) else value
        shape = value if isinstance(value, tuple) else value.shape
        if name in boundary.drawn:
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            feeds[name] = np.asarray(rng.standard_normal(shape), np.float32)
        elif name in boundary.shaped:
            feeds[name] = np.zeros(shape, boundary.shaped[name].numpy())
        else:
            feeds[name] = np.asarray(value)
    return feeds


def stretch(
    feeds: dict[str, np.ndarray], boundary: Boundary, meter: ScoreMeter
) -> tuple[dict[str, np.ndarray], float | None]:
    """Multiplies what becomes the query (and the key) until the scores have their spread.

    Returns the feeds and the spread reached, rounded; None where the scores cannot be seen.
    """
    low, high = SPREAD_RANGE
    spread = meter.measure(feeds)
    for _ in range(_STRETCHES):
        if spread is None or not np.isfinite(spread) or spread == 0 or low <= spread <= high:
            break
        by = SCORE_SPREAD / spread
        by = np.sqrt(by) if boundary.squared else by
        if by * max((np.abs(feeds[name]).max(initial=0.0) for name in boundary.stretched), default=0.0) > _LARGEST:
            break
        feeds = feeds | {name: np.asarray(feeds[name] * by, np.float32) for name in boundary.stretched}
        spread = meter.measure(feeds)
    return feeds, None if spread is None else round(spread, 3)

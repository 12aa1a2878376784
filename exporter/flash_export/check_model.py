# SPDX-License-Identifier: Apache-2.0
"""The whole model: fused against unfused, and against eager PyTorch where the source is PyTorch, in float32.

The unfused model runs in float64 first, then in float32; what it is off by is its own noise, and by that the fused
model is judged. The float32 run also shows what stands at the boundary of each site.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from flash_export import accept, model_noise, nudge
from flash_export.accept import Noise, Verdict
from flash_export.boundary import Boundary
from flash_export.captured import Later, Seen, later, too_large_to_keep
from flash_export.eager import Eager, Reference
from flash_export.errors import UsageError
from flash_export.repeated_queries import spans_below, why_repeated
from flash_export.runtime import AnySession, CannotRun, open_session
from flash_export.score_probe import add_score_probes
from flash_export.sites import Site
from flash_export.trials import SMALL_MODEL_BYTES, Trial, weight_bytes


class CannotRunUnfused(Exception):
    """ONNX Runtime does not open the unfused model; the text is ONNX Runtime's."""


_SHAPE_OF = "flash_export/shape_of/"
_LARGEST_OF = "flash_export/largest_of/"


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRun:
    """One output of the whole model at one setting, against the unfused model or against eager PyTorch.

    ``verdict`` None: eager PyTorch did not run there, ``note`` says why.
    """

    output: str
    trial: str
    against: str
    verdict: Verdict | None
    reference: str
    note: str | None = None

    def as_report(self) -> dict[str, object]:
        """The run's entry in ``report.json``."""
        return {
            "kind": "model",
            "name": self.output,
            "setting": self.trial,
            "against": self.against,
            "reference": self.reference,
            "note": self.note,
            **({"passed": None} if self.verdict is None else self.verdict.as_report()),
        }


@dataclasses.dataclass(slots=True)
class Expected:
    """What the unfused model gave: outputs to compare with, its noise, and what stood at the sites' boundaries.

    ``overflow``: where each output leaves what float32 holds. ``largest``: the largest magnitude in each product of Q
    and K. ``refusals`` has the reason for each trial that the model did not take. ``evaluated``: why ONNX Runtime did
    not load the fused model, where onnx's reference evaluator ran it instead. ``measure_more`` measures the noise of a
    model that is too large to measure it often beforehand.
    """

    trials: list[Trial] = dataclasses.field(default_factory=list)
    outputs: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    noise: list[Noise] = dataclasses.field(default_factory=list)
    overflow: dict[str, list[np.ndarray | None]] = dataclasses.field(default_factory=dict)
    seen: dict[str, Seen] = dataclasses.field(default_factory=dict)
    largest: dict[str, float] = dataclasses.field(default_factory=dict)
    refusals: dict[str, str] = dataclasses.field(default_factory=dict)
    reference: str = "float64"
    evaluated: str = ""
    measure_more: Callable[[], list[Noise]] | None = None

    def settle_noise(self, runs: Sequence[ModelRun]) -> bool:
        """Measures the noise more often where one of ``runs`` failed by what a maximum may scatter; True where it did.

        The judgement is then to be made again. It is the same as with as many measurements in the first place.
        """
        failed = [run.verdict for run in runs if run.verdict is not None and not run.verdict.passed]
        near = all(
            verdict.max_abs_error <= accept.MOST_APART * verdict.tolerance
            if verdict.tolerance
            else np.isfinite(verdict.max_abs_error)  # integers: one that rounding turns over is off by any number
            for verdict in failed
        )
        if self.measure_more is None or not failed or not near:
            return False
        more, self.measure_more = self.measure_more(), None
        self.noise = [Noise.pooled(pair) for pair in zip(self.noise, more, strict=True)]
        return True

    def allow_noise(self, of_sites: Iterable[float]) -> None:
        """Where the noise of the whole model could not be measured, it is at least that of its attentions."""
        if self.reference == "float32":
            largest = max(of_sites, default=0.0)
            self.noise = [Noise(max(n.maximum, largest), max(n.mean, largest)) for n in self.noise]


def run_unfused(
    plain: ir.Model,
    trials: Sequence[Sequence[Trial]],
    boundaries: Sequence[Boundary],
    products: Sequence[str],
    folder: Path,
) -> Expected:
    """Runs the unfused model on every trial, in float64 where that can be done and in float32.

    Of each trial the first choice that the model takes counts; one without such a choice is left out.

    Args:
        products: values of the graph that hold products of Q and K.

    Raises:
        CannotRunUnfused: nothing here opens the model.
        UsageError: no trial runs.
    """
    nudged = nudge.add_nudge(plain)
    wide = model_noise.open_wide(nudged, folder)
    given = {v.name for v in (*plain.graph.inputs, *plain.graph.outputs)}
    late = too_large_to_keep(nudged, trials, [name for name in _captured(boundaries) if name not in given])
    kept = list(dict.fromkeys(name for edge in late.values() for name in edge if name not in given))
    spans = spans_below(plain, products)
    ends = [_SHAPE_OF + name for span in spans for name in (span.product, span.scores)]
    largest = [_LARGEST_OF + name for name in products]
    probes = list(dict.fromkeys([*_probe_names(plain, boundaries, late), *kept, *ends, *largest]))
    try:
        base = open_session(_with_probes(nudged, probes), folder)
    except CannotRun as error:
        raise CannotRunUnfused(str(error)) from error
    names = [v.name or "" for v in plain.graph.outputs]
    numbers = nudge.numbers(plain)
    small = weight_bytes(plain) <= SMALL_MODEL_BYTES and not late
    expected = Expected()
    noises: list[list[Noise]] = []
    refusals = expected.refusals

    def why_unfair(trial: Trial, found: Sequence[np.ndarray]) -> str:
        shown = dict(zip(names + probes, found, strict=True))
        shapes = {end.removeprefix(_SHAPE_OF): tuple(map(int, shown[end])) for end in ends}
        outputs = dict(zip(plain.graph.outputs, found, strict=False))
        return trial.why_unfair(outputs) or why_repeated(spans, shapes)

    for trial, found in _fair_runs(base, trials, names + probes, numbers, why_unfair, refusals):
        outputs = found[: len(names)]
        try:
            reference = outputs if wide is None else wide.run(nudge.feeds(trial.feeds, numbers, 0))
        except CannotRun:
            wide, reference = None, outputs
        expected.trials.append(trial)
        expected.outputs[trial.name] = reference
        expected.overflow[trial.name] = [accept.overflows(b, r) for b, r in zip(outputs, reference, strict=True)]
        shown = dict(zip(names + probes, found, strict=True)) | nudge.feeds(trial.feeds, numbers, 0)
        again = {name: later(nudged, {e: shown[e] for e in edge}, name, folder) for name, edge in late.items()}
        expected.seen[trial.name] = _seen(boundaries, shown, again)
        for name in products:
            expected.largest[name] = max(expected.largest.get(name, 0.0), float(shown[_LARGEST_OF + name]))
        if wide is not None:
            first = [Noise.between(b, r) for b, r in zip(outputs, reference, strict=True)]
            times = accept.roundings(min(r.size for r in reference)) if small else 1
            more = model_noise.measure(base, wide, trial, names, numbers, range(1, times))
            noises.append([Noise.pooled(column) for column in zip(first, *more, strict=True)])
    if not expected.trials:
        raise UsageError(
            "the unfused model runs on none of the inputs that were drawn for the check",
            where=next(iter(refusals)) + (f" and {len(refusals) - 1} more" if len(refusals) > 1 else ""),
            got=next(iter(refusals.values())),
            need="inputs that go together, and a model that takes every size that it declares",
            do="give inputs with --values FILE.npz, or leave the check out with --no-check; a file that holds one"
            " length where it declares any (PyTorch's legacy exporter does that to nn.MultiheadAttention) is exported"
            " anew, with dynamo=True or from PyTorch by flash-export itself",
        )
    if wide is None:
        expected.reference = "float32"
        expected.noise = [Noise(accept.UNKNOWN_NOISE, accept.UNKNOWN_NOISE)] * len(names)
    else:
        expected.noise = [Noise.pooled(column) for column in zip(*noises, strict=True)]
        if not small:
            expected.measure_more = functools.partial(
                model_noise.measure_more, nudged, expected.trials, numbers, folder
            )
    return expected


def _fair_runs(
    base: AnySession,
    trials: Sequence[Sequence[Trial]],
    outputs: Sequence[str],
    numbers: Collection[str],
    why_unfair: Callable[[Trial, Sequence[np.ndarray]], str],
    refusals: dict[str, str],
) -> Iterator[tuple[Trial, list[np.ndarray]]]:
    """Of each trial the first choice that the unfused model takes, and what it gave; why not, into ``refusals``."""
    for choices in trials:
        for trial in choices:
            try:
                found = base.run(nudge.feeds(trial.feeds, numbers, 0), outputs)
            except CannotRun as error:
                refusals[trial.name] = str(error)
                continue
            refusals[trial.name] = why_unfair(trial, found)
            if not refusals[trial.name]:
                yield trial, found
                break


def _captured(boundaries: Sequence[Boundary]) -> list[str]:
    return list(dict.fromkeys(name for boundary in boundaries for name in boundary.captured))


def _measured(boundaries: Sequence[Boundary]) -> list[str]:
    """Those of which a site needs the shape alone; another one may need the content too."""
    return list(dict.fromkeys(name for boundary in boundaries for name in (*boundary.drawn, *boundary.shaped)))


def _probe_names(plain: ir.Model, boundaries: Sequence[Boundary], late: Collection[str]) -> list[str]:
    """The extra outputs of a probed model: captured values but for the ``late`` ones, and the shapes of the others."""
    given = {v.name for v in (*plain.graph.inputs, *plain.graph.outputs)}.union(late)
    return [
        *(name for name in _captured(boundaries) if name not in given),
        *(_SHAPE_OF + name for name in _measured(boundaries)),
    ]


def _with_probes(plain: ir.Model, probes: Sequence[str]) -> ir.Model:
    """A copy with the boundary as extra outputs. Of values that are drawn for a site only the shape leaves, so memory
    stays small, and of products of Q and K only the largest magnitude.
    """
    probed = plain.clone()
    values = ir.convenience.create_value_mapping(probed.graph, include_subgraphs=False)
    for name in probes:
        if name.startswith(_SHAPE_OF):
            value = values[name.removeprefix(_SHAPE_OF)]
            shape = ir.node("Shape", [value])
            shape.outputs[0].name = name
            shape.outputs[0].dtype = ir.DataType.INT64
            _put_behind(value, [shape], probed.graph)
            probed.graph.outputs.append(shape.outputs[0])
        elif name.startswith(_LARGEST_OF):
            probed.graph.outputs.append(_largest(probed.graph, values[name.removeprefix(_LARGEST_OF)], name))
        else:
            probed.graph.outputs.append(values[name])
    return probed


def _largest(graph: ir.Graph, value: ir.Value, name: str) -> ir.Value:
    """The largest magnitude in ``value``, behind the node that makes it; 0 where it is empty."""
    zero, flat = (ir.node("Constant", [], {"value": ir.tensor(a)}) for a in (np.zeros(1, np.float32), np.array([-1])))
    size = ir.node("Abs", [value])
    row = ir.node("Reshape", [size.outputs[0], flat.outputs[0]])
    known = ir.node("Concat", [row.outputs[0], zero.outputs[0]], {"axis": 0})
    found = ir.node("ReduceMax", [known.outputs[0]], {"keepdims": 0})
    _put_behind(value, [zero, flat, size, row, known, found], graph)
    result = found.outputs[0]
    result.name, result.type, result.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape(())
    return result


def _put_behind(value: ir.Value, nodes: Sequence[ir.Node], graph: ir.Graph) -> None:
    """Puts ``nodes`` right behind the one that makes ``value``: at the end they would keep it until then."""
    maker = value.producer()
    if maker is None:
        graph.extend(nodes)
    else:
        maker.append(nodes)


def _seen(boundaries: Sequence[Boundary], shown: Mapping[str, np.ndarray], late: Mapping[str, Later]) -> Seen:
    captured = {name: late[name] if name in late else shown[name] for name in _captured(boundaries)}
    return {name: tuple(map(int, shown[_SHAPE_OF + name])) for name in _measured(boundaries)} | captured


def run_fused(
    flash: ir.Model,
    expected: Expected,
    folder: Path,
    *,
    eager: Reference | None,
    eager_roundoff: float,
    inside: Collection[Site] = (),
) -> list[ModelRun]:
    """Judges every output of the fused model on every trial, and those of eager PyTorch against the fused ones.

    Every site has been proven alone: it gives finite numbers for rows without a key. A NaN that is left in the fused
    model is then one that the model makes elsewhere, in both files, and may stay.

    Args:
        eager_roundoff: unit roundoff of the model's own float type over that of float32; eager PyTorch computes
            in that type.
        inside: sites whose scores no value of the unfused graph shows; ``expected.largest`` has them afterwards.
    """
    flash, probes = add_score_probes(flash, inside)
    session = open_session(flash, folder)
    expected.evaluated = session.refused
    names = [v.name or "" for v in flash.graph.outputs][: -len(probes) or None]
    runs = []
    for trial in expected.trials:
        references = expected.outputs[trial.name]
        try:
            found = session.run(trial.feeds)
        except CannotRun as error:
            verdict = accept.failed(f"the fused model does not run: {error}")
            runs += [ModelRun(name, trial.name, "unfused", verdict, expected.reference) for name in names]
            continue
        outputs = found[: len(names)]
        for name, size in zip(probes, found[len(names) :], strict=True):
            expected.largest[name] = max(expected.largest.get(name, 0.0), float(size))
        told = zip(names, outputs, references, expected.noise, expected.overflow[trial.name], strict=True)
        for name, out, ref, noise, overflow in told:
            verdict = accept.judge(out, ref, noise, nan_may_stay=True, overflow=overflow)
            runs.append(ModelRun(name, trial.name, "unfused", verdict, expected.reference))
        if eager is not None:
            runs += _against_eager(eager, trial, names, outputs, expected, eager_roundoff)
    return runs


def _against_eager(
    eager: Reference,
    trial: Trial,
    names: Sequence[str],
    outputs: Sequence[np.ndarray],
    expected: Expected,
    roundoff: float,
) -> list[ModelRun]:
    """In float32 both round for themselves and may stand on opposite sides of the reference; beside the rounding of
    eager PyTorch in half precision that of the fused twin is nothing.
    """
    try:
        references = eager(trial.feeds)
    except Exception as error:  # the user's own module: whatever it raises on drawn inputs is no fault of the file
        note = f"eager PyTorch does not run: {type(error).__name__}: {error}"
        return [ModelRun(name, trial.name, "eager", None, "eager PyTorch", note) for name in names]
    factor = accept.FACTOR_BETWEEN_TWO if roundoff == 1 else accept.FACTOR

    def judged(noises: Sequence[Noise]) -> list[Verdict]:
        told = zip(outputs, references, noises, strict=True)
        return [accept.judge(o, r, n, factor=factor, dtype=r.dtype, nan_may_stay=True) for o, r, n in told]

    verdicts = judged([noise.scaled(roundoff) for noise in expected.noise])
    if roundoff == 1 and not all(verdict.passed for verdict in verdicts):
        verdicts = judged(_beside_eager(eager, trial, references, expected.noise))
    told = zip(names, verdicts, strict=True)
    return [ModelRun(name, trial.name, "eager", verdict, "eager PyTorch") for name, verdict in told]


def _beside_eager(
    eager: Reference, trial: Trial, references: Sequence[np.ndarray], noises: Sequence[Noise]
) -> Sequence[Noise]:
    """The noise with that of eager PyTorch beside it; measured only where it matters, since it takes a float64 run."""
    if not isinstance(eager, Eager):
        return noises
    try:
        wide = eager.in_float64(trial.feeds)
        own = [Noise.between(ref, exact) for ref, exact in zip(references, wide, strict=True)]
    except Exception:  # the user's own module, in a type that it was not written for
        return noises
    return [noise.beside(other) for noise, other in zip(noises, own, strict=True)]

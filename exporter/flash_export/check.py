# SPDX-License-Identifier: Apache-2.0
"""Proves a fused file before it is published: structure, each site alone, and the whole model. See docs/checking.md."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

from flash_export import interrupt, twin
from flash_export.accept import finite_or_none
from flash_export.boundary import Boundary, read_boundary
from flash_export.check_model import Expected, ModelRun, run_fused, run_unfused
from flash_export.check_nan import may_be_of_nan, warn_of_nan
from flash_export.check_site import CannotProve, SiteRun, check_site
from flash_export.check_structure import check_structure
from flash_export.cut import CannotCut, attention_nodes
from flash_export.eager import Reference
from flash_export.errors import NumbersDiffer, UnsupportedModel, UsageError
from flash_export.function_body import functions_for
from flash_export.hidden_rows import HiddenRows
from flash_export.inline import CannotInline, inline, inline_near
from flash_export.own_sites import pattern_of
from flash_export.patterns import PATTERNS
from flash_export.runtime import why_not_loaded
from flash_export.runtime_defects import crash_of
from flash_export.same_site import identity
from flash_export.score_probe import PREFIX
from flash_export.sites import Site
from flash_export.trials import Trial, plan_trials
from flash_export.value_types import drop_contradicted

Progress = Callable[[str, int, int], None]

_FLOAT16_MAX, _NEAR = 65504.0, 0.5
"""What float16 holds, and the part of it from which on other inputs than the drawn ones may well pass it."""


class NotProven(Exception):
    """The check can say nothing about some sites. ``why`` has a sentence for the name of each."""

    def __init__(self, why: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {text}" for name, text in why.items()))
        self.why = why


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
    """What the check measured. ``max_abs_error`` and ``tolerance`` are those of the run that came closest to failing.

    ``runs`` holds one entry for each site and setting, and for each output of the whole model and setting.
    ``largest_scores``: site -> the largest magnitude of Q·Kᵀ in the model's own runs, before what the graph does to it
    (with the scale, where an operator forms it); None where it is beyond float32. ``warnings`` are of what was not
    tried, of NaN in the unfused model's outputs, and of scores that float16 does not hold.
    """

    passed: bool
    max_abs_error: float | None
    tolerance: float | None
    runs: list[dict[str, object]]
    largest_scores: dict[str, float | None]
    warnings: list[str]

    def as_report(self) -> dict[str, object]:
        """The ``check`` entry of ``report.json``, schema 1."""
        return dataclasses.asdict(self)


def check(
    unfused: Path,
    fused: Path,
    sites: list[Site],
    *,
    reference: Reference | None,
    example: Mapping[str, np.ndarray],
    dims: Mapping[str, tuple[int, int]],
    values: Path | None,
    seed: int = 0,
    progress: Progress | None = None,
) -> CheckResult:
    """Compares the fused file with the unfused one and returns what was measured.

    Args:
        reference: eager PyTorch on named inputs, outputs in the model's order; None for ONNX sources.
        example: inputs that the exporter knows to be valid; may be empty.
        dims: dynamic dim -> the range it may take.
        values: the user's ``--values FILE.npz``; replaces drawn inputs.
        progress: told (step, done, total).

    Raises:
        NotProven: sites that no input tried tells from wrong ones. They have to stay as they were.
        CannotRunUnfused: nothing here opens the unfused model.
        NumbersDiffer: a site, or else an output of the whole model, is off by more than rounding explains.
        UsageError: ``values`` cannot be used, or no inputs can be drawn on which the unfused model gives numbers.
        UnsupportedModel: eager PyTorch gives other numbers each time.
        check_structure.BrokenRewrite: the file itself is wrong.
    """
    tell = progress or (lambda step, done, total: None)
    tell("structure", 0, 1)
    check_structure(fused, unfused)
    tell("structure", 1, 1)
    with interrupt.temporary_folder("flash-export-check-") as name:
        folder = Path(name)
        roundoff, plain, flash, in_float16 = _load(unfused, fused, sites)
        rewritten = [s for s in sites if s.status == "fused" and s.boundary]
        loaded, windows = ir.load(unfused, format="protobuf"), _windows(flash)
        plan = plan_trials(loaded, example=example, ranges=dims, values=values, seed=seed, windows=windows)
        boundaries, doubts = _boundaries(rewritten, plain, flash)
        tell("unfused model", 0, 1)
        products = _products(rewritten, plain)
        expected = run_unfused(plain, plan.trials, list(boundaries.values()), list(products.values()), folder)
        tell("unfused model", 1, 1)
        site_runs: list[SiteRun] = []
        proven: dict[bytes | None, list[SiteRun]] = {}
        hidden = HiddenRows(plain, expected.trials, expected.seen, folder)
        for i, site in enumerate(rewritten):
            tell("sites", i, len(rewritten))
            boundary = boundaries.get(site.name)
            if boundary is None:
                continue
            try:
                beside = hidden.of(boundary, expected.seen)
                same = identity(site, boundary, plain, flash, expected.seen, beside)
                if same is None or same not in proven:
                    proven[same] = check_site(site, boundary, plain, flash, expected.seen, folder, seed, beside=beside)
                site_runs += [dataclasses.replace(run, site=site.name) for run in proven[same]]
            except CannotProve as error:
                doubts[site.name] = str(error)
        tell("sites", len(rewritten), len(rewritten))
        _raise_for_sites(site_runs, rewritten)
        if doubts:
            raise NotProven(doubts)
        tell("fused model", 0, 1)
        expected.allow_noise(run.noise for run in site_runs)
        ours = {v.name for node in attention_nodes(plain) for v in node.outputs}
        inside = [site for site in rewritten if site.name not in products and site.output not in ours]
        judged = functools.partial(run_fused, eager=reference, eager_roundoff=roundoff, inside=inside)
        model_runs = judged(flash, expected, folder)
        if expected.settle_noise(model_runs):
            model_runs = judged(flash, expected, folder)
        tell("fused model", 1, 1)
        _raise_for_random(model_runs, reference, expected)
        _raise_for_model(model_runs, site_runs, expected)
        _raise_for_nothing_compared(model_runs, expected)
    shown = products | {site.name: PREFIX + site.name for site in inside}
    largest = {name: expected.largest[value] for name, value in shown.items() if value in expected.largest}
    warnings = [
        *_warn_of_batch(plan.trials, expected),
        *_warn_of_windows(plan.too_large),
        *_warn_of_runtime(fused, roundoff, expected.evaluated),
        *warn_of_nan(model_runs, site_runs, expected),
        *_warn_of_eager(model_runs),
        *_warn_of_range({name: size for name, size in largest.items() if name in in_float16}, products),
    ]
    return _result(site_runs, model_runs, {n: finite_or_none(size) for n, size in largest.items()}, warnings)


def _warn_of_batch(trials: Sequence[Sequence[Trial]], expected: Expected) -> list[str]:
    """A model that says its batch may be anything and runs with one alone is the user's to know."""
    if any(trial.batch != 1 for trial in expected.trials):
        return []
    for first, *others in trials:
        if first.batch > 1 and any(other.name in expected.outputs for other in others):
            why = expected.refusals[first.name]
            return [f"the unfused model was checked with a batch of one only; with {first.name} it fails: {why}"]
    return []


def _warn_of_windows(too_large: Sequence[str]) -> list[str]:
    """Windows that hide nothing on any input tried were read from the graph, and that is all."""
    if not too_large:
        return []
    more = f" and {len(too_large) - 3} more" if len(too_large) > 3 else ""
    return [
        f"no input longer than {', '.join(too_large[:3])}{more} was tried, since it asks for too much memory: if that"
        " is a window, it was read from the graph and not seen to hide a key; --values FILE.npz of that length shows it"
    ]


def _windows(fused: ir.Model) -> set[int]:
    """The sizes of the windows that the fused model has."""
    read = [node.attributes.get(name) for node in attention_nodes(fused) for name in ("window_left", "window_right")]
    return {one.as_int() for one in read if one is not None and one.as_int() >= 0}


def _warn_of_runtime(fused: Path, roundoff: float, evaluated: str) -> list[str]:
    """A file that ONNX Runtime does not load is the user's to know, however right its numbers are.

    Of half-precision models ONNX Runtime's CPU provider lacks many kernels, and there the float32 twin alone tells; but
    none may end the user's process.

    Args:
        evaluated: why ONNX Runtime did not load the twin, which ran in onnx's reference evaluator then.
    """
    why = (why_not_loaded(fused) if roundoff == 1 else crash_of(fused)) or evaluated
    if not why:
        return []
    compared = "it was compared in onnx's reference evaluator" if evaluated else "a copy of it was compared"
    return [f"ONNX Runtime {onnxruntime.__version__} does not load the fused file; {compared} instead: {why}"]


def _warn_of_eager(runs: Sequence[ModelRun]) -> list[str]:
    eager = [run for run in runs if run.against == "eager"]
    if not eager or any(run.verdict is not None for run in eager):
        return []
    return [f"not compared with PyTorch: {eager[0].note}"]


def _warn_of_range(largest: Mapping[str, float], shown: Collection[str]) -> list[str]:
    """Products of Q and K that the unfused model forms in float16, and that come near to what that holds.

    Those that are not ``shown`` are formed inside an operator, where a runtime may do otherwise.
    """
    near = {name: size for name, size in largest.items() if not size < _NEAR * _FLOAT16_MAX}
    if not near:
        return []
    worst = max(near, key=lambda name: near[name])
    beyond = not near[worst] <= _FLOAT16_MAX
    where, gives = ("beyond", "gives") if beyond else ("near", "would give")
    who = "The unfused model" if worst in shown else "An operator that keeps its scores in float16"
    return [
        f"Q·Kᵀ of {len(near)} attention(s) comes {where} the {_FLOAT16_MAX:,.0f} that float16 holds: {near[worst]:,.0f}"
        f" at {worst}. {who} {gives} infinity and NaN there; the FlashAttention node keeps scores in"
        " float32. Compare the two in float32, as this check does, or export the model in bf16 or fp32"
    ]


def _load(unfused: Path, fused: Path, sites: Sequence[Site]) -> tuple[float, ir.Model, ir.Model, set[str]]:
    """Both models in float32, the roundoff of the original's type over that of float32, and the sites whose product of
    Q and K is formed in float16.
    """
    plain, flash = ir.load(unfused.resolve(), format="protobuf"), ir.load(fused.resolve(), format="protobuf")
    roundoff = twin.roundoff(plain)
    for model in (plain, flash):
        drop_contradicted(model)
        # As find does: the edge of a site in a function has its names in the graph.
        with contextlib.suppress(CannotInline):
            inline(model, PATTERNS)
    with contextlib.suppress(CannotInline):
        inline_near(plain, PATTERNS)  # in the fused file the softmax is gone; what find wrote out there is written out
    twin.infer_types(plain)
    before, after = (ir.convenience.create_value_mapping(m.graph, include_subgraphs=False) for m in (plain, flash))
    for name in {name for site in sites for name in site.boundary}:
        if name in before and name in after and after[name].type is None:
            after[name].type = before[name].type
    formed = {s.name: before.get(s.product if s.product in before else s.output) for s in sites}
    in_float16 = {name for name, v in formed.items() if v is not None and v.dtype == ir.DataType.FLOAT16}
    for model in (plain, flash):
        _add_bodies(model)
        twin.to_float32(model)
    return roundoff, plain, flash, in_float16


def _add_bodies(model: ir.Model) -> None:
    """A file written with --no-fallback has no bodies, and ONNX Runtime needs them."""
    for function in functions_for(attention_nodes(model), model.opset_imports[""]):
        model.functions.setdefault(function.identifier(), function)


def _products(sites: Sequence[Site], plain: ir.Model) -> dict[str, str]:
    """Site -> the value of the unfused graph that holds its product of Q and K, where there is one."""
    known = ir.convenience.create_value_mapping(plain.graph, include_subgraphs=False)
    return {site.name: site.product for site in sites if site.product in known}


def _boundaries(sites: Sequence[Site], plain: ir.Model, flash: ir.Model) -> tuple[dict[str, Boundary], dict[str, str]]:
    """The boundary of each site by its name, and why others have none."""
    found, doubts = {}, {}
    for site in sites:
        try:
            found[site.name] = read_boundary(site, plain, flash)
        except CannotCut as error:
            doubts[site.name] = f"it cannot be run alone: {error}"
    return found, doubts


def _raise_for_sites(runs: Sequence[SiteRun], sites: Sequence[Site]) -> None:
    failed = [(run, run.verdict) for run in runs if not run.verdict.passed]
    if not failed:
        return
    names = list(dict.fromkeys(run.site for run, _ in failed))
    worst, verdict = failed[0]
    skip = " ".join(f"--skip {name}" for name in names)
    patterns = dict.fromkeys(filter(None, (pattern_of(site) for site in sites if site.name in names)))
    mend = f"correct the reader in {', '.join(patterns)}" if patterns else "please report the model"
    raise NumbersDiffer(
        "the fused attention does not compute what the unfused one does",
        where=f"site {', '.join(names)}" + (f" of {len({r.site for r in runs})}" if len(names) > 1 else ""),
        got=f"{verdict.why} at {worst.trial}",
        need=f"at most {verdict.tolerance:.3g}: twice the unfused attention's own float32 rounding",
        do=f"leave it as standard ONNX with {skip}, and {mend}",
    )


def _raise_for_random(runs: Sequence[ModelRun], reference: Reference | None, expected: Expected) -> None:
    """Where eager PyTorch and the graph differ, PyTorch may differ from itself: a dropout that is always on."""
    failed = {run.trial for run in runs if run.against == "eager" and run.verdict and not run.verdict.passed}
    trial = next((trial for trial in expected.trials if trial.name in failed), None)
    if reference is None or trial is None:
        return
    first, second = reference(trial.feeds), reference(trial.feeds)
    if all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, second, strict=True)):
        return
    raise UnsupportedModel(
        "the module gives other numbers each time it is run",
        where=f"eager PyTorch at {trial.name}",
        got="two runs on the same inputs that differ",
        need="a module without random numbers, such as a dropout that eval() turns off",
        do="write torch.nn.Dropout, or pass training=self.training to torch.nn.functional.dropout and dropout_p=0.0 to "
        "scaled_dot_product_attention outside training",
    )


def _raise_for_model(runs: Sequence[ModelRun], site_runs: Sequence[SiteRun], expected: Expected) -> None:
    failed = [(run, run.verdict) for run in runs if run.verdict is not None and not run.verdict.passed]
    if not failed:
        return
    say_something = [(run, verdict) for run, verdict in failed if not may_be_of_nan(run, runs, site_runs, expected)]
    if not say_something:
        first, _ = failed[0]
        got = f"integers or truths that differ at {first.trial}, where the attention of rows without a key is NaN"
        raise _nothing(first.output, f"{got}: what is made of NaN says nothing, while the fused node gives 0 there")
    worst, verdict = say_something[0]
    if worst.against == "eager":
        what = "the exported model does not compute what the PyTorch model does"
        do = "do not use this export: PyTorch's exporter has changed the model before any fusion; please report it"
    else:
        what = "the fused model does not compute what the unfused one does, though every site alone does"
        do = "please report the model; --skip a site to narrow it down, --no-check writes the files unproven"
    raise NumbersDiffer(
        what,
        where=f"output {worst.output}",
        got=f"{verdict.why} at {worst.trial}",
        need=f"at most {verdict.tolerance:.3g}: what the unfused model's own float32 rounding explains",
        do=do,
    )


def _raise_for_nothing_compared(runs: Sequence[ModelRun], expected: Expected) -> None:
    """An output that is NaN or infinite in every run of the unfused model proves nothing, nor do empty ones."""
    names = list(dict.fromkeys(run.output for run in runs))
    sizes = [sum(arrays[i].size for arrays in expected.outputs.values()) for i in range(len(names))]
    for name, size in zip(names, sizes, strict=True):
        if size and not any(run.verdict.compared for run in runs if run.output == name and run.verdict is not None):
            raise _nothing(name, f"{size} numbers, each NaN or infinite")
    if not any(sizes):
        raise _nothing(", ".join(names), "tensors without any element")


def _nothing(output: str, got: str) -> UsageError:
    return UsageError(
        "the unfused model gives nothing to compare with",
        where=f"output {output}",
        got=got,
        need="inputs on which the unfused model gives numbers: each row of a mask with a key that it sees",
        do="give them with --values FILE.npz, or leave the check out with --no-check",
    )


def _result(
    site_runs: Sequence[SiteRun],
    model_runs: Sequence[ModelRun],
    largest_scores: dict[str, float | None],
    warnings: list[str],
) -> CheckResult:
    runs: list[SiteRun | ModelRun] = [*site_runs, *model_runs]
    verdicts = [run.verdict for run in runs if run.verdict is not None]
    closest = max(verdicts, key=lambda v: v.excess, default=None)
    return CheckResult(
        passed=True,
        max_abs_error=finite_or_none(closest.max_abs_error) if closest else None,
        tolerance=finite_or_none(closest.tolerance) if closest else None,
        runs=[run.as_report() for run in runs],
        largest_scores=largest_scores,
        warnings=warnings,
    )

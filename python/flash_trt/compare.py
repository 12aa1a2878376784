# SPDX-License-Identifier: Apache-2.0
"""FUSED against REFERENCE: the same inputs through both, and a verdict on every output.

REFERENCE must be the independent unfused file. Both run in Polygraphy's runners; inputs and verdict are ours, since
Polygraphy draws from [0, 1), where softmax is flat and a wrong scale or mask hides, and passes on missing outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
from rich.table import Table

from flash_export import interrupt, runtime, twin
from flash_export.advice import GUARD
from flash_export.errors import NumbersDiffer, UsageError
from flash_export.model_noise import FLOAT64_LIMIT_BYTES
from flash_export.op import DOMAIN
from flash_export.talk import Talk, plain
from flash_export.trials import Trial
from flash_trt import (
    compare_fault,
    compare_windows,
    engine_file,
    node_bodies,
    onnx_file,
    ort_errors,
    runners,
    tensor_files,
)
from flash_trt.compare_choice import Chooser, infer
from flash_trt.compare_html import as_html, nearness
from flash_trt.compare_inputs import InputOptions, LongerTrials, plan_longer, plan_runs
from flash_trt.compare_sight import Sight
from flash_trt.onnx_file import OnnxFile
from flash_trt.ort_errors import one_line
from flash_trt.output import check_outputs, files_read, write_atomically
from flash_trt.plugin_library import sha256_of
from flash_trt.rounding import more_roundings
from flash_trt.verdict import OutputVerdict, RunOutputs, judge_runs

COMPARISON_SCHEMA = 1
_TF32_ROUNDOFF = 2.0**13
"""Over float32's: TensorRT multiplies float32 matrices in TF32 unless told otherwise."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompareOptions:
    """The flags of ``flash-trt compare``; see its ``--help``."""

    fused: Path
    reference: Path
    inputs: InputOptions = dataclasses.field(default_factory=InputOptions)
    json: Path | None = None
    html: Path | None = None
    save_inputs: Path | None = None
    trust_engine: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Every verdict of one comparison. ``precision`` says in what the two were computed.

    ``saved``: run -> the file with its inputs, where they are saved. ``sight``: faults of FUSED's attentions that would
    have passed as well.
    """

    verdicts: tuple[OutputVerdict, ...]
    precision: str
    saved: dict[str, Path]
    sight: Sight = dataclasses.field(default_factory=Sight)

    @property
    def passed(self) -> bool:
        """Nothing fails, and every output was compared: none is infinite in all runs, nor are all of them empty."""
        if self.sight.fails:
            return False
        return not any(verdict.failed for verdict in self.verdicts) and not self.uncompared()

    def uncompared(self) -> list[OutputVerdict]:
        """A verdict for each output that no run proves anything of; an empty one counts where all outputs are empty."""
        by_output: dict[str, list[OutputVerdict]] = {}
        for verdict in self.verdicts:
            by_output.setdefault(verdict.output, []).append(verdict)
        without = [mine for mine in by_output.values() if not any(v.compared or v.failed for v in mine)]
        if len(without) < len(by_output):
            without = [mine for mine in without if any(v.kind == "infinite" for v in mine)]
        return [mine[0] for mine in without]

    def as_json(self, options: CompareOptions) -> dict[str, Any]:
        """The comparison as data, schema 1."""
        return {
            "schema": COMPARISON_SCHEMA,
            "passed": self.passed,
            "fused": str(options.fused),
            "reference": str(options.reference),
            "precision": self.precision,
            "seed": options.inputs.seed,
            **self.sight.as_json(),
            "runs": len({verdict.run for verdict in self.verdicts}),
            "inputs": {run: str(path) for run, path in self.saved.items()},
            "outputs": [verdict.as_json() for verdict in self.verdicts],
        }


def compare(options: CompareOptions, talk: Talk) -> Comparison:
    """Runs both on several drawn inputs and judges every output of both.

    Returns:
        The comparison when everything agrees. The JSON and the page are written and the table shown either way.

    Raises:
        NumbersDiffer: an output differs, is missing on a side, or is NaN.
        UsageError: an unreadable file, one compared with itself, inputs not drawn or refused, outputs without a number.
        UnsupportedModel, MissingHere, UnsafeInput: a side cannot be run here; see ``runners``.
    """
    with talk.step("read", f"{options.fused} and {options.reference}"):
        reference = onnx_file.read(options.reference)
        fused = None if engine_file.is_engine(options.fused) else onnx_file.read(options.fused)
        _refuse_same_file(options)
        for file in filter(None, (fused, reference)):
            node_bodies.require_obeyed(file)
        read = files_read([fused or options.fused, reference], [options.inputs.values])
        _check_outputs(options, read, runs=1)
    _warn_of_weak_comparisons(fused, reference, talk)
    with talk.step("draw", "inputs"):
        engine = engine_file.read(options.fused) if fused is None else None
        planned = plan_runs(options.inputs, reference, engine, talk)
        _check_outputs(options, read, runs=len(planned) + 1)  # and a longer one
        if first := _saved_as(options, 0):
            tensor_files.check(first, {name: array.dtype for name, array in planned[0][0].feeds.items()})
    with contextlib.ExitStack() as stack:
        sides = stack.enter_context(_open_sides(options, fused))
        with talk.step("run", f"{len(planned)} sets of inputs, {sides.precision}"):
            own = compare_windows.sizes_of(fused)
            longer = functools.partial(plan_longer, options.inputs, reference, engine, windows=own)
            runs = list(_run_all(planned, longer, sides, options, talk))
            sides.release()
            more = more_roundings(sides.model, runs, sides.folder)
            softcap = fused is not None and any(node.attributes.get("softcap") for node in fused.flash_nodes)
            verdicts = judge_runs(runs, more=more, rounding=sides.rounding, softcap=softcap)
            saved = {run.name: path for i, run in enumerate(runs) if (path := _saved_as(options, i))}
            comparison = Comparison(tuple(verdicts), sides.precision, saved)
            if comparison.passed and sides.fused_path and fused and fused.flash_nodes:
                sight = compare_fault.look(sides.fused_path, runs, more, softcap=softcap)
                comparison = dataclasses.replace(comparison, sight=_weighed(sight, options, reference, sides.model))
    document = comparison.as_json(options)
    if options.json:
        write_atomically(options.json, json.dumps(document, indent=2).encode() + b"\n")
    if options.html:
        write_atomically(options.html, as_html(document).encode())
    talk.result(verdict_table(comparison))
    _require_passed(comparison, options)
    comparison.sight.tell(options.fused, [run.name for run in runs], talk)
    return comparison


def _check_outputs(options: CompareOptions, read: Sequence[Path], *, runs: int) -> None:
    """``check_outputs`` of everything that ``runs`` runs write."""
    values, folder = options.inputs.values, options.save_inputs
    if values and folder and values.resolve().parent == folder.resolve():
        raise UsageError(
            "saving the inputs would replace those of other runs",
            where=f"--save-inputs {folder}",
            got=f"the folder that --values {values} is read from",
            need="another folder, or none: the values are saved already",
            do="leave --save-inputs out",
        )
    check_outputs((options.json, options.html, *(_saved_as(options, run) for run in range(runs))), read)


def _refuse_same_file(options: CompareOptions) -> None:
    if options.fused.samefile(options.reference) or sha256_of(options.fused) == sha256_of(options.reference):
        raise UsageError(
            "a file compared with itself always agrees",
            where=f"{options.fused} and {options.reference}",
            got="the same content twice",
            need="REFERENCE to be the independent unfused model",
            do="give the NAME.flash.unfused.onnx that flash-export writes beside its output; where the two are alike, "
            "every attention was refused, and its report.json says why",
        )


def _warn_of_weak_comparisons(fused: OnnxFile | None, reference: OnnxFile, talk: Talk) -> None:
    """A body that both sides inline agrees with itself, whatever it computes."""
    if fused is not None and not fused.flash_nodes:
        talk.warn(f"{fused.path} has no FlashAttention node: nothing of ours is compared")
    if not reference.flash_nodes:
        return
    bodies = _function_bodies(reference)
    shared = fused is not None and bool(bodies & _function_bodies(fused))
    talk.warn(
        f"REFERENCE has {len(reference.flash_nodes)} FlashAttention nodes of its own"
        + (" with the same function body as FUSED, so the two agree there by construction" if shared else "")
        + "; give the unfused model to compare attention"
    )


def _function_bodies(file: OnnxFile) -> set[bytes]:
    return {f.SerializeToString(deterministic=True) for f in file.proto.functions if f.domain == DOMAIN}


# --- running ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Sides:
    """Both sides, ready to run until ``release``, since what follows loads FUSED again.

    ``fused_path`` is the file that runs as FUSED, None for an engine; ``wide`` is REFERENCE in float64, None where that
    cannot be made; ``model`` is REFERENCE's float32 graph; ``folder`` takes temporary files.
    """

    fused: Any
    fused_path: Path | None
    base: Any
    wide: runtime.Session | runtime.EvaluatorSession | None
    precision: str
    rounding: float
    model: ir.Model
    folder: Path
    opened: contextlib.ExitStack

    def release(self) -> None:
        self.opened.close()
        self.wide = None


@contextlib.contextmanager
def _open_sides(options: CompareOptions, fused: OnnxFile | None) -> Iterator[_Sides]:
    with interrupt.temporary_folder("flash-trt-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)

        def opened(runner: Any) -> Any:
            stack.callback(runner.deactivate)
            return runner

        fused_path = (runners.float32_twin(fused.path, folder) or fused.path) if fused else None
        base_twin = runners.float32_twin(options.reference, folder)
        base = opened(runners.open_onnx(base_twin or options.reference, "reference"))
        if fused_path:
            other = opened(runners.open_onnx(fused_path, "fused"))
        else:
            other = opened(runners.open_engine(options.fused, trusted=options.trust_engine))
        model = ir.load(options.reference, format="protobuf")
        precision = "as they stand" if base_twin is None else "in float32, since half precision hides small faults"
        rounding = 1.0
        if fused is None:
            precision, rounding = "the engine against float32", max(_TF32_ROUNDOFF, twin.roundoff(model))
        twin.to_float32(model)
        yield _Sides(other, fused_path, base, _open_wide(model, folder), precision, rounding, model, folder, stack)


def _open_wide(model: ir.Model, folder: Path) -> runtime.Session | runtime.EvaluatorSession | None:
    weights = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    if 2 * sum(tensor.nbytes for tensor in weights) > FLOAT64_LIMIT_BYTES:
        return None
    wide_folder = folder / "float64"
    wide_folder.mkdir()
    try:
        return runtime.open_float64(model, wide_folder)
    except (twin.NoTwin, runtime.CannotRun):
        return None


def _run_all(
    planned: Sequence[Sequence[Trial]],
    longer: Callable[..., LongerTrials | None],
    sides: _Sides,
    options: CompareOptions,
    talk: Talk,
) -> Iterator[RunOutputs]:
    _require_same_inputs(sides, options)
    chooser = Chooser(sides.base, sides.model)
    numbers = itertools.count()
    for trial, base in chooser.taken(planned, lambda taken: longer(taken=taken), talk):
        if path := _saved_as(options, next(numbers)):
            tensor_files.write(path, trial.feeds)
        fused = infer(sides.fused, trial)
        if isinstance(fused, Exception):
            if ort_errors.is_out_of_memory(fused):
                if chooser.leave_out_last():
                    continue
                raise ort_errors.too_little_memory(options.fused, trial.name, fused)
            raise NumbersDiffer(
                "FUSED fails on inputs that REFERENCE takes",
                where=f"{options.fused}, {trial.name}",
                got=one_line(fused),
                need="the same inputs to work",
                do="report this with the model",
            )
        wide = None
        if sides.wide is not None:
            with contextlib.suppress(runtime.CannotRun):
                wide = dict(zip(base, sides.wide.run(trial.feeds, list(base)), strict=True))
        yield RunOutputs(trial.name, fused, base, wide, trial.feeds)
    chooser.tell(options.reference, talk)


def _saved_as(options: CompareOptions, number: int) -> Path | None:
    """Where the inputs of run ``number`` go, for a replay with ``--values``."""
    return options.save_inputs / f"inputs-{number:02d}.npz" if options.save_inputs else None


def _require_same_inputs(sides: _Sides, options: CompareOptions) -> None:
    names = [set(runners.input_dtypes(side)) for side in (sides.fused, sides.base)]
    if names[0] != names[1]:
        raise UsageError(
            "the two models take different inputs",
            where=f"{options.fused} and {options.reference}",
            got=f"only in FUSED: {sorted(names[0] - names[1])}; only in REFERENCE: {sorted(names[1] - names[0])}",
            need="the same inputs by name",
            do="compare a fused model with the unfused file written beside it",
        )


# --- the verdict ------------------------------------------------------------------------------------------------------


_UNCOMPARED = {
    "nan_in_inputs": "give inputs without NaN: what depends on one is NaN whatever the models compute",
    "nan_in_reference": f"give inputs that leave each row a key (--values FILE.npz). {GUARD}",
    "nan_in_both": "give inputs on which REFERENCE gives numbers: infinities in them, or rows without a key, make NaN",
}
"""Verdicts that say nothing of FUSED -> what helps."""


def _require_passed(comparison: Comparison, options: CompareOptions) -> None:
    failed = [verdict for verdict in comparison.verdicts if verdict.failed]
    if not failed:
        _require_compared(comparison, options)
        return
    kinds = ", ".join(dict.fromkeys(verdict.kind for verdict in failed))
    first = min(failed, key=lambda verdict: verdict.kind in _UNCOMPARED)  # stable: a fault goes before what proves none
    replay = comparison.saved.get(first.run)
    raise NumbersDiffer(
        f"{len(failed)} of {len(comparison.verdicts)} compared outputs fail ({kinds})",
        where=f"output {first.output}, {first.run}",
        got=first.why,
        need=f"max |difference| at most {first.tolerance:.3g}" if first.tolerance else "the same numbers",
        do=_UNCOMPARED.get(
            first.kind, "check the export with flash-export, whose own check names the attention that is wrong"
        )
        + (f"; replay this run with --values {replay}" if replay else ""),
    )


def _require_compared(comparison: Comparison, options: CompareOptions) -> None:
    """Two sides that agree on nothing prove nothing, as in flash-export's own check."""
    without = comparison.uncompared()
    if comparison.verdicts and not without:
        return
    kinds = {"empty": "tensors without any element", "infinite": "infinities alone, the same on both sides"}
    raise UsageError(
        "REFERENCE gives nothing to compare with",
        where=f"output {', '.join(verdict.output for verdict in without)}" if without else str(options.reference),
        got=", ".join(dict.fromkeys(kinds[verdict.kind] for verdict in without)) or "no output at all",
        need="inputs on which it gives numbers",
        do="give them with --values FILE.npz, or other sizes with --shape",
    )


def _weighed(sight: Sight, options: CompareOptions, reference: OnnxFile, model: ir.Model) -> Sight:
    """``sight`` without the windows that no length of REFERENCE passes; allowed where there are no other inputs."""
    ranges = reference.dim_ranges
    windows = tuple(w for w in sight.windows if compare_windows.may_be_passed(model, ranges, w.shortest))
    return dataclasses.replace(sight, windows=windows, allowed=_is_given(options, reference))


def _is_given(options: CompareOptions, reference: OnnxFile) -> bool:
    """Whether the user, or a model without dynamic dims, says of what sizes the inputs are."""
    return bool(options.inputs.shapes or options.inputs.values) or not any(i.is_dynamic for i in reference.inputs)


def verdict_table(comparison: Comparison) -> Table:
    """One line for each output: its worst run."""
    table = Table(title=f"compared {comparison.precision}", title_justify="left", box=None, pad_edge=False)
    for column in ("output", "verdict", "max |difference|", "allowed", "max |value|", "worst run"):
        table.add_column(column)
    for name in dict.fromkeys(verdict.output for verdict in comparison.verdicts):
        mine = [verdict for verdict in comparison.verdicts if verdict.output == name]
        worst = max(mine, key=lambda verdict: nearness(verdict.as_json()))
        colour = "green" if worst.passed else "red" if worst.failed else "yellow"
        table.add_row(
            plain(name),
            f"[{colour}]{worst.kind}[/{colour}]",
            f"{worst.max_abs_error:.3g}",
            f"{worst.tolerance:.3g}",
            f"{worst.largest:.3g}",
            f"{plain(worst.run)} ({len(mine)} runs)",
        )
    return table

# SPDX-License-Identifier: Apache-2.0
"""The way of a model, from the user's file to the fused ONNX file. Each step is one file of its name.

    load -> export -> find -> rewrite -> check -> save

Nothing is published before ``check`` has passed; ``save`` then renames finished files into place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from flash_export import dim_ranges, interrupt, own_patterns, report, report_example, square_bias
from flash_export.blame import blame
from flash_export.check import NotProven, check
from flash_export.check_model import CannotRunUnfused
from flash_export.check_structure import check_structure
from flash_export.errors import UnsupportedModel, UsageError
from flash_export.export import Exported, export
from flash_export.find import find
from flash_export.load import Loaded, load
from flash_export.options import Options
from flash_export.report_html import as_html
from flash_export.rewrite import rewrite
from flash_export.save import Saved, Staged, check_name, check_output, refuse_to_replace, staged, written_paths
from flash_export.save_report import replaced
from flash_export.sites import Refusal, Site
from flash_export.talk import Talk
from flash_export.value_types import drop_contradicted


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What one run did. ``saved`` is None after a dry run, and where everything was fused already."""

    saved: Saved | None
    sites: tuple[Site, ...]
    report: dict[str, object]


def run(options: Options, talk: Talk | None = None, loaded: Loaded | None = None) -> Result:
    """Exports ``options.source``, fuses its attention, proves it and publishes the files.

    ``loaded`` is the source where it is open already; nothing is read from ``options.source`` then.

    Raises:
        UserError: one of its kinds, each with its exit code; nothing was published then.
    """
    own_patterns.register(options.patterns)
    talk = talk or Talk(quiet=options.quiet)
    talk.steps = steps(options)
    output = output_path(options)
    check_name(output)
    if not options.dry_run:
        for path in written_paths(output, options.report):
            check_output(path)
    with interrupt.temporary_folder("flash-export-") as folder:
        with talk.step("load", str(options.source)):
            loaded = loaded or load(options)
            if not options.dry_run:
                _protect(loaded, output, options)
        with _exportable(loaded):
            return _export_and_fuse(options, loaded, Path(folder), output, talk)


def steps(options: Options) -> tuple[str, ...]:
    """The names of the steps that a run with these options has."""
    first = ("load", "export", "find")
    return first if options.dry_run else (*first, "rewrite", *(("check",) if options.check else ()), "save")


def _export_and_fuse(options: Options, loaded: Loaded, folder: Path, output: Path, talk: Talk) -> Result:
    with talk.step("export", "nothing to do: it is ONNX" if loaded.source_kind == "onnx" else "to ONNX, unfused"):
        exported = export(loaded, options, folder)
        if exported.reference is not None:  # of an ONNX file only its own makers know the ranges
            dim_ranges.write(exported.path, exported.dims)
    for note in exported.notes:
        talk.warn(note)
    doubts: dict[str, str] = {}
    while True:
        try:
            return _fuse(options, exported, output, doubts, talk)
        except NotProven as error:
            talk.warn(f"{len(error.why)} attention(s) could not be proven and are left as they were")
            doubts |= error.why


@contextlib.contextmanager
def _exportable(loaded: Loaded) -> Iterator[None]:
    """Inside, the models of transformers in a loaded module compute what can be exported."""
    if loaded.module is None or "transformers" not in sys.modules:
        yield
        return
    from flash_export import huggingface_attention

    with huggingface_attention.exportable(loaded.module):
        yield


def _fuse(options: Options, exported: Exported, output: Path, doubts: Mapping[str, str], talk: Talk) -> Result:
    """From ``find`` on. ``doubts`` names the sites that an earlier round could not prove, each with the reason.

    Raises:
        NotProven: there are more of them; nothing was published.
        UserError: one of its kinds.
    """
    theirs = exported.path if exported.reference is None else None
    with talk.step("find", "every softmax and attention operator"), blame(theirs):
        model = ir.load(exported.path, format="protobuf")
        drop_contradicted(model)
        before = node_count(model)
        sites = find(model)
        skip(sites, options.skip)
        leave_unproven(sites, doubts)
    talk.result(report.as_table(sites))
    judge(sites, options, talk)
    facts = report.Facts(options.source, exported.source_kind, sites, (before, before), talk.seconds)
    idle = exported.reference is None and report.nothing_new(sites) and not any(s.status == "refused" for s in sites)
    if idle and (options.dry_run or (options.output is None and options.report is None)):
        copies = "" if options.dry_run else "; no file was written (-o OUT writes a copy)"
        talk.result(f"already fused: nothing to do{copies}")
    elif not options.dry_run:
        return _write(options, exported, output, (model, sites, facts), talk)
    return Result(None, tuple(sites), report.as_json(facts, None, None, None))


def _write(
    options: Options, exported: Exported, output: Path, found: tuple[ir.Model, list[Site], report.Facts], talk: Talk
) -> Result:
    """From ``rewrite`` on. ``found`` is what ``find`` left.

    Raises:
        NotProven: as ``_fuse``.
        UserError: one of its kinds.
    """
    model, sites, facts = found
    theirs = exported.path if exported.reference is None else None
    with talk.step("rewrite", "each attention into one node"), blame(theirs):
        shown = report_example.look_before(model, sites)
        rewrite(model, sites, fallback=options.fallback)
        example = report_example.as_json(shown, model)
        facts = dataclasses.replace(facts, nodes=(facts.nodes[0], node_count(model)), example=example)
    with staged(model, exported.path, output, keep_unfused=exported.source_kind != "onnx") as files:
        checked = _check(options, exported, files, sites, talk)
        note = replaced(options.report or output.parent, output, options.source)
        with talk.step("save", str(output)):
            unfused = None if report.nothing_new(sites) else files.published_unfused
            document = report.as_json(facts, output, unfused, checked)
            saved = files.publish(document, options.report, page=as_html(document))
    if note is not None:
        talk.warn(note)
    talk.result(report.as_summary(saved, sites, checked))
    return Result(saved, tuple(sites), document)


def _check(
    options: Options, exported: Exported, files: Staged, sites: list[Site], talk: Talk
) -> dict[str, object] | None:
    """What ``check`` measured; None with --no-check."""
    theirs = exported.path if exported.reference is None else None
    if not options.check:
        with blame(theirs):
            check_structure(files.fused, files.unfused)
        talk.warn("--no-check: the numbers of this file are not proven")
        return None
    try:
        with talk.step("check", "each attention alone, then the whole model"), blame(theirs):
            result = check(
                files.unfused,
                files.fused,
                sites,
                reference=exported.reference,
                example=exported.example,
                dims=exported.dims,
                values=options.values,
                progress=talk.progress,
            )
    except CannotRunUnfused as error:
        raise UnsupportedModel(
            "nothing can be proven, since the unfused model itself does not run here",
            where=f"{options.source}, in ONNX Runtime on the CPU",
            got=str(error),
            need="a model that ONNX Runtime runs on a CPU",
            do="--no-check writes the fused file unproven; operators of your own need their runtime there",
        ) from error
    for warning in result.warnings:
        talk.warn(warning)
    return result.as_report()


def output_path(options: Options) -> Path:
    """OUT, or ``NAME.flash.onnx`` beside the source."""
    source = options.source.resolve()
    name = source.name if source.is_dir() else source.stem
    return options.output or source.parent / f"{name}.flash.onnx"


def _protect(loaded: Loaded, output: Path, options: Options) -> None:
    """Raises UsageError where the export would replace a file that it reads."""
    read = {options.source, *loaded.files, *([options.values] if options.values else [])}
    refuse_to_replace(read, written_paths(output, options.report, keep_unfused=loaded.source_kind != "onnx"))


def skip(sites: Sequence[Site], names: Sequence[str]) -> None:
    """Marks the sites that the user wants left alone as refused.

    Raises:
        UsageError: a name is no site of this model.
    """
    by_name = {site.name: site for site in sites}
    for name in names:
        site = by_name.get(name)
        if site is None:
            raise UsageError(
                "--skip names an attention that is not there",
                where=f"--skip {name}",
                got=name,
                need="one of " + (", ".join(by_name) or "none: this model has no attention"),
                do="copy the name from the table of --dry-run",
            )
        site.status = "refused"
        site.reason = Refusal("skipped", "left alone by --skip", name, f"leave --skip {name} out to fuse it")


def leave_unproven(sites: Sequence[Site], doubts: Mapping[str, str]) -> None:
    """Marks the sites that the check can say nothing about as refused. ``doubts`` has the reason for each name."""
    for site in sites:
        if site.name in doubts:
            site.status = "refused"
            site.reason = Refusal(
                "not_proven",
                f"the fused attention could not be proven: {doubts[site.name]}",
                site.name,
                "give inputs on which it shows with --values FILE.npz; or write it fused, unproven, with --no-check",
            )


def judge(sites: Sequence[Site], options: Options, talk: Talk) -> None:
    """Warns of refusals, or ends the run where the user asked for more.

    Raises:
        UnsupportedModel: no attention without --allow-none, or something refused under --require-all.
    """
    refused = [site for site in sites if site.status == "refused"]
    if refused and options.require_all:
        first = refused[0]
        assert first.reason is not None
        raise UnsupportedModel(
            f"{len(refused)} of {len(refused) + _fused(sites)} attentions cannot be fused",
            where=", ".join(site.name for site in refused),
            got=f"{first.reason.code} at {first.reason.node}: {first.reason.text}",
            need="every attention fused, as --require-all asks",
            do=f"{first.reason.action}; or leave --require-all out to keep these as standard ONNX",
        )
    if not refused and not _fused(sites) and not options.allow_none:
        others = len(sites)
        raise UnsupportedModel(
            "no attention was found",
            where=str(options.source),
            got=f"{others} softmax, none of them between two matrix products" if others else "no softmax at all",
            need="softmax(Q·Kᵀ)·V, in standard ONNX operators",
            do="check that this is the model you meant; --allow-none writes it as it is",
        )
    if refused:
        talk.warn(f"{len(refused)} attention(s) left as standard ONNX, each with its reason above")
    if (note := square_bias.warning(sites)) is not None:
        talk.warn(note)


def node_count(model: ir.Model) -> int:
    """Nodes of the graph and its subgraphs, function bodies apart."""
    return sum(1 for _ in model.graph.all_nodes())


def _fused(sites: Sequence[Site]) -> int:
    return sum(site.status == "fused" for site in sites)

# SPDX-License-Identifier: Apache-2.0
"""``flash_export.export`` and ``flash_export.rewrite``: what the command does, for programs. See docs/api.md."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from flash_export import interrupt, pipeline
from flash_export.errors import UsageError
from flash_export.load import Loaded
from flash_export.options import DtypeName, InputSpec, ModelSpec, Options
from flash_export.save import Saved
from flash_export.save_weights import tensors_of
from flash_export.sites import Site
from flash_export.talk import Talk

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

logging.getLogger("onnx_ir").addHandler(logging.NullHandler())  # or Python prints what it tells of models

PathLike = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A fused model and what was done to it.

    Args:
        model: the fused model; ``onnx_ir.to_proto`` turns it into a ``ModelProto``.
        sites: every softmax and attention operator: fused, refused with its reason, or no attention.
        report: the content of ``report.json``.
        warnings: what the command would have warned of.
        saved: the files that were published; None where no ``output`` was asked for.
    """

    model: ir.Model = dataclasses.field(repr=False)
    sites: tuple[Site, ...]
    report: dict[str, object] = dataclasses.field(repr=False)
    warnings: tuple[str, ...]
    saved: Saved | None

    @property
    def fused(self) -> tuple[Site, ...]:
        """The attentions that are one FlashAttention node now."""
        return tuple(site for site in self.sites if site.status == "fused")

    @property
    def refused(self) -> tuple[Site, ...]:
        """The attentions that were left as they are, each with its ``reason``."""
        return tuple(site for site in self.sites if site.status == "refused")


def export(
    source: torch.nn.Module | ExportedProgram | PathLike,
    example_inputs: torch.Tensor | Sequence[object] | Mapping[str, object] | None = None,
    *,
    dynamic_shapes: Mapping[str, object] | Sequence[object] | None = None,
    output: PathLike | None = None,
    model: ModelSpec | None = None,
    dtype: DtypeName | None = None,
    opset: int | None = None,
    require_all: bool = False,
    allow_none: bool = False,
    skip: str | Sequence[str] = (),
    check: bool = True,
    values: PathLike | None = None,
    fallback: bool = True,
    trust_pickle: bool = False,
    kv_cache: bool = False,
    report: PathLike | None = None,
) -> Result:
    """Exports ``source`` with every attention fused, proven numerically; nothing is written unless that holds.

    Args:
        source: a module in eval mode, an ExportedProgram, or a path to anything that ``flash-export`` takes.
        example_inputs: for a module, the tensors of one call: one tensor, a sequence in forward's order, or a mapping
            by name. For a path, a mapping, in the place of ``--input``; None where the file says it.
        dynamic_shapes: like ``torch.export.export``'s: for each input (by name, or in order) a mapping from axis to
            dimension, or a sequence with an entry for each axis. A dimension is a name, ``"NAME=LOW..HIGH"`` or a
            ``torch.export.Dim``; one name is one size everywhere. An axis without one is fixed.
        output: where the fused ``.onnx`` goes, its unfused twin and ``report.json`` beside it. None writes nothing.
        model, dtype, opset, require_all, allow_none, skip, values, fallback, trust_pickle, kv_cache, report: as the
            flags of ``flash-export``; ``model`` may also be the callable itself, ``skip`` one name or several.
            ``check=False`` is ``--no-check``, ``fallback=False`` is ``--no-fallback``.

    Raises:
        flash_export.errors.UserError: one of its kinds, as the command's exit codes.
    """
    _require_paths(output=output, values=values, report=report)
    options = Options(
        source=Path(source) if isinstance(source, (str, os.PathLike)) else Path(type(source).__name__),
        output=None if output is None else Path(output),
        model=model,
        dtype=dtype,
        opset=opset,
        require_all=require_all,
        allow_none=allow_none,
        skip=(skip,) if isinstance(skip, str) else tuple(skip),
        check=check,
        values=None if values is None else Path(values),
        fallback=fallback,
        trust_pickle=trust_pickle,
        kv_cache=kv_cache,
        report=None if report is None else Path(report),
    )
    if isinstance(source, (str, os.PathLike)):
        specs: tuple[InputSpec, ...] = ()
        if example_inputs is not None:
            from flash_export import example_call

            specs = example_call.specs_of(example_inputs, dynamic_shapes)
        return _run(dataclasses.replace(options, inputs=specs), None)
    from flash_export import example_call

    return _run(options, example_call.opened(source, example_inputs, dynamic_shapes, options))


def rewrite(
    model: ir.Model | onnx.ModelProto | PathLike,
    *,
    output: PathLike | None = None,
    require_all: bool = False,
    allow_none: bool = False,
    skip: str | Sequence[str] = (),
    check: bool = True,
    values: PathLike | None = None,
    fallback: bool = True,
    report: PathLike | None = None,
) -> Result:
    """Fuses every attention of an ONNX model, proven numerically; ``model`` itself stays as it is.

    Args:
        model: in memory, or a path.
        output, require_all, allow_none, skip, check, values, fallback, report: as for ``export``.

    Raises:
        flash_export.errors.UserError: one of its kinds, as the command's exit codes.
    """
    _require_paths(output=output, values=values, report=report)
    with _as_file(model) as (path, loaded):
        options = Options(
            source=path,
            output=None if output is None else Path(output),
            require_all=require_all,
            allow_none=allow_none,
            skip=(skip,) if isinstance(skip, str) else tuple(skip),
            check=check,
            values=None if values is None else Path(values),
            fallback=fallback,
            report=None if report is None else Path(report),
        )
        return _run(options, loaded)


def _require_paths(**given: object) -> None:
    for name, value in given.items():
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise UsageError(
                f"{name} is no path",
                where="flash_export",
                got=f"{name} of type {type(value).__name__}",
                need="a str or a path" + (", of an .npz file with an array for each input" if name == "values" else ""),
                do="write the arrays with numpy.savez and give the file's path" if name == "values" else "give a path",
            )


@contextlib.contextmanager
def _as_file(model: ir.Model | onnx.ModelProto | PathLike) -> Iterator[tuple[Path, Loaded | None]]:
    """The model as a verified file; one that was in memory disappears afterwards."""
    if isinstance(model, (str, os.PathLike)):
        yield Path(model), None
        return
    from flash_export.export import write
    from flash_export.load_onnx import verify

    with interrupt.temporary_folder("flash-export-") as folder:
        path = Path(folder, "model.onnx")
        if isinstance(model, ir.Model):
            write(model, path)
        else:
            onnx.save(model, path)
        verify(path)
        yield path, Loaded(path, "onnx_model", files=_files_of(model))


def _files_of(model: ir.Model | onnx.ModelProto) -> frozenset[Path]:
    """The files that a model in memory has mapped its weights from."""
    tensors = tensors_of(model) if isinstance(model, ir.Model) else []
    return frozenset(Path(tensor.path) for tensor in tensors if isinstance(tensor, ir.ExternalTensor))


def _run(options: Options, loaded: Loaded | None) -> Result:
    talk = Talk(silent=True)
    with interrupt.temporary_folder("flash-export-") as folder:
        wanted = options.output
        done = pipeline.run(dataclasses.replace(options, output=wanted or Path(folder, "model.onnx")), talk, loaded)
        assert done.saved is not None  # only a dry run saves nothing
        model = ir.load(done.saved.output, format="protobuf")
        if wanted is None:
            ir.external_data.load_to_model(model)
    saved = None if wanted is None else done.saved
    document: dict[str, Any] = done.report if saved else done.report | {"output": None, "unfused": None}
    return Result(model, done.sites, document, tuple(talk.warnings), saved)

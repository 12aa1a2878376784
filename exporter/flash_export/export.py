# SPDX-License-Identifier: Apache-2.0
"""Step 2: what ``load`` opened becomes an unfused ONNX file, with eager PyTorch kept beside it as the reference.

capture (``export_capture``: module -> ExportedProgram) -> translate (ExportedProgram -> ONNX) -> tidy
(``export_tidy``: names, dead nodes, constants) -> one file. An ONNX source is its own export.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from flash_export.eager import Reference
from flash_export.errors import UnsupportedModel, UsageError, UserError
from flash_export.inputs import MAX_DIM
from flash_export.load import Loaded, SourceKind
from flash_export.options import Options
from flash_export.save import INLINE_LIMIT_BYTES
from flash_export.save_weights import write_model

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from flash_export.export_capture import Call

OPSET = 18
"""The default of new exports: ONNX Runtime 1.17 runs it at IR version 9."""
OPSETS = range(18, 25)


@dataclasses.dataclass(slots=True)
class Exported:
    """The unfused model and what is known of its inputs.

    Args:
        path: the ``.onnx``; external data, if any, lies beside it.
        reference: eager PyTorch on inputs by graph input name, giving outputs in graph order; None for ONNX sources.
        example: a valid input set by graph input name; empty for ONNX sources.
        dims: dynamic dimension -> (smallest, largest) size it may take.
        source_kind: what ``load`` found.
        notes: what the user should hear of, e.g. a range that the model itself narrows.
    """

    path: Path
    reference: Reference | None
    example: dict[str, np.ndarray]
    dims: dict[str, tuple[int, int]]
    source_kind: SourceKind
    notes: list[str] = dataclasses.field(default_factory=list)


def export(loaded: Loaded, options: Options, folder: Path) -> Exported:
    """Writes the unfused ONNX file into ``folder``; an ONNX source stays where it is.

    Raises:
        UsageError: forward fails on the inputs described, or an opset outside 18 to 24.
        UnsupportedModel: PyTorch cannot export this model, in the user's terms.
    """
    if loaded.source_kind in ("onnx", "onnx_model"):
        return Exported(loaded.path, None, {}, _onnx_dims(loaded.path), loaded.source_kind)
    opset = OPSET if options.opset is None else options.opset
    if opset not in OPSETS:
        raise UsageError(
            "this opset cannot be exported to",
            where=f"--opset {opset}",
            got=str(opset),
            need=f"{OPSETS[0]} to {OPSETS[-1]}",
            do=f"leave --opset out for {OPSET}",
        )
    from flash_export import export_capture, export_dims, export_lengths, export_tidy, export_torchscript

    notes: list[str] = []
    left_out: dict[str, list[int]] = {}
    with quiet():
        call = export_capture.call_of(loaded)
        script = loaded.source_kind == "torchscript"
        outputs = export_torchscript.run_example(loaded, call) if script else call.run(call.tensors)
        if script:
            model = export_torchscript.translate(loaded, opset, folder)
            ranges = export_dims.ranges_of(loaded)
        else:
            captured = export_capture.capture(loaded, call)
            ranges, notes, left_out = captured.ranges, captured.notes, captured.left_out
            model = translate(captured.program, opset)
        names = [argument.name for argument in loaded.arguments] or [str(v.name) for v in model.graph.inputs]
        export_tidy.tidy(model, names, export_capture.output_names(outputs))
    _check_arity(model, call, len(export_capture.tensors_in(outputs)))
    dims = export_tidy.name_dims(model, export_dims.dims_of(loaded, model, ranges))
    export_dims.name_sums(loaded, model)
    path = folder / "unfused.onnx"
    write(model, path)
    example = {str(v.name): export_capture.to_numpy(t) for v, t in zip(model.graph.inputs, call.tensors, strict=True)}
    reference = call.reference([str(v.name) for v in model.graph.inputs])
    export_lengths.refuse_fixed_lengths(path, reference, example, dims, traced=script, told_in=loaded.told_in)
    notes = [*loaded.notes, *notes]
    left_out |= export_dims.left_out_at_one(loaded, dims)
    notes += export_lengths.take_back(path, reference, example, dims, left_out)
    return Exported(path, reference, example, dims, loaded.source_kind, notes)


def translate(program: ExportedProgram, opset: int) -> ir.Model:
    """The program as an ONNX graph, SDPA as ``export_sdpa`` writes it.

    Raises:
        UnsupportedModel: an operator has no ONNX form, named.
    """
    import torch

    from flash_export import export_sdpa

    aten = torch.ops.aten
    table = {
        aten.scaled_dot_product_attention.default: export_sdpa.scaled_dot_product_attention,
        aten._scaled_dot_product_flash_attention_for_cpu.default: export_sdpa.attention_for_cpu,
    }
    try:
        with _copied_before_reshapes(program):
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                custom_translation_table=table,
                optimize=False,
                verbose=False,
            )
    except Exception as error:  # the exporter raises many types; each is a model it cannot translate
        raise _untranslatable(error) from error
    model: ir.Model = exported.model
    return model


@contextlib.contextmanager
def _copied_before_reshapes(program: ExportedProgram) -> Iterator[None]:
    """Inside, what an attention gives is copied before it takes another shape.

    The exporter turns a reshape into a view by the strides that the attention has, and computes those anew later on,
    where they may come out as others.
    """
    import torch

    aten = torch.ops.aten
    reshapes = (aten.view.default, aten.reshape.default)
    copies = []
    for module in program.graph_module.modules():
        for node in list(module.graph.nodes) if isinstance(module, torch.fx.GraphModule) else ():
            above = node.args[0] if node.target in reshapes else None
            while above is not None and above.target is aten.transpose.int:
                above = above.args[0]
            if above is not None and above.target is aten.scaled_dot_product_attention.default:
                with module.graph.inserting_before(node):
                    copy = module.graph.call_function(
                        aten.clone.default, (node.args[0],), {"memory_format": torch.contiguous_format}
                    )
                copy.meta = dict(node.args[0].meta)
                node.args = (copy, *node.args[1:])
                copies.append((node, copy))
    try:
        yield
    finally:
        for node, copy in copies:
            node.args = (copy.args[0], *node.args[1:])
            copy.graph.erase_node(copy)


def _untranslatable(error: BaseException) -> UserError:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        if isinstance(cause, UserError):
            return cause
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    deepest = str(chain[-1]).splitlines()
    for link in chain:
        if type(link).__name__ == "DispatchError":
            deepest = str(link).splitlines()
    return UnsupportedModel(
        "PyTorch cannot translate this model to ONNX",
        where="torch.onnx.export",
        got=deepest[0][:300] if deepest else type(chain[-1]).__name__,
        need="operators that have an ONNX form",
        do="replace that operator in the model, or export to ONNX yourself and give the .onnx file",
    )


def _check_arity(model: ir.Model, call: Call, outputs: int) -> None:
    """The reference is compared with the graph by position, so both must have the same inputs and outputs."""
    for what, graph, eager in (
        ("input", len(model.graph.inputs), len(call.tensors)),
        ("output", len(model.graph.outputs), outputs),
    ):
        if graph != eager:
            raise UnsupportedModel(
                f"the exported graph has another number of {what}s than the model",
                where=f"the graph's {what}s",
                got=f"{graph} in the graph, {eager} in PyTorch",
                need=f"every {what} of the model used and a tensor",
                do="leave unused inputs out of --input or example_inputs, and return tensors from forward",
            )


def write(model: ir.Model, path: Path) -> None:
    """Writes ``model``; its weights into ``path`` + ``.data`` when they are more than ``INLINE_LIMIT_BYTES``."""
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    if size > INLINE_LIMIT_BYTES:
        ir.save(model, path, external_data=f"{path.name}.data")
    else:
        write_model(model, path, None)


def _onnx_dims(path: Path) -> dict[str, tuple[int, int]]:
    """Every named dimension of the graph's inputs, with no limit known."""
    shapes = [value.shape for value in ir.load(path, format="protobuf").graph.inputs if value.shape is not None]
    return {
        str(dim.value): (1, MAX_DIM)
        for shape in shapes
        for dim in shape
        if isinstance(dim, ir.SymbolicDim) and dim.value
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """PyTorch's exporter talks much; what matters is in its exceptions, which pass."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)

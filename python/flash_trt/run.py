# SPDX-License-Identifier: Apache-2.0
"""Runs a model once and says what computed its attention: ONNX Runtime on the CPU or CUDA, or an engine on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from flash_export import interrupt, twin
from flash_export.draw import draw_inputs
from flash_export.errors import UsageError
from flash_export.input_roles import fed_inputs
from flash_export.talk import Talk
from flash_trt import (
    engine_file,
    engine_load,
    input_types,
    node_bodies,
    onnx_file,
    ort,
    shape_agreement,
    shapes,
    tensor_files,
)
from flash_trt.engine_session import EngineSession
from flash_trt.onnx_file import OnnxFile
from flash_trt.output import check_outputs, files_read

Place = Literal["auto", "cpu", "cuda"]


@dataclasses.dataclass(frozen=True, slots=True)
class RunOptions:
    """The flags of ``flash-trt run``; see its ``--help``."""

    model: Path
    inputs: Path | None = None
    output: Path | None = None
    on: Place = "auto"
    bodies: bool = False
    shapes: tuple[str, ...] = ()
    seed: int = 0
    trust_engine: bool = False
    cuda_graph: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RunResult:
    """What one run gave. ``implementation`` says in words what computed the FlashAttention nodes."""

    outputs: dict[str, np.ndarray]
    implementation: str
    drawn: bool


def run(options: RunOptions, talk: Talk) -> RunResult:
    """Runs the model on ``options.inputs``, or on drawn ones, and writes the outputs where asked.

    Raises:
        UsageError: an unreadable file, inputs that do not fit, fall outside an engine's shapes, or make the model fail.
        UnsafeInput, UnsupportedModel, MissingHere: it cannot be run here; see ``runners`` and ``ort``.
    """
    if options.output:
        tensor_files.check(options.output)
    _require_one_source(options)
    is_engine = engine_file.is_engine(options.model)
    result = _run_engine(options, talk) if is_engine else _run_onnx(options, talk)
    if options.output:
        tensor_files.write(options.output, result.outputs)
    return result


def _require_one_source(options: RunOptions) -> None:
    if options.inputs is not None and options.shapes:
        raise UsageError(
            "--shape is for drawn inputs, and none are drawn",
            where=f"--shape {options.shapes[0]}",
            got=f"--inputs {options.inputs}, whose tensors have shapes of their own",
            need="one of the two",
            do="leave --shape out, or --inputs",
        )


def _run_onnx(options: RunOptions, talk: Talk) -> RunResult:
    with talk.step("read", str(options.model)):
        file = onnx_file.read(options.model)
        check_outputs((options.output,), files_read([file], [options.inputs]))
        if options.output:
            tensor_files.check(options.output, {tensor.name: tensor.numpy_dtype for tensor in file.output_tensors})
        model = ir.load(options.model, format="protobuf")
        feeds, drawn = _feeds(options, file, model, talk)
    with interrupt.temporary_folder("flash-trt-") as folder:
        with talk.step("load", str(options.model)):
            cuda = options.on == "cuda" or (options.on == "auto" and ort.has_cuda())
            library = bool(file.flash_nodes) and not (cuda or options.bodies) and ort.has_library()
            if not library:
                node_bodies.require_obeyed(file)
            session = ort.Session(file, cuda=cuda, library=library, profile_into=Path(folder))
        with talk.step("run", session.where):
            outputs = session.run(feeds)
        return RunResult(outputs, session.implementation(), drawn)


def _run_engine(options: RunOptions, talk: Talk) -> RunResult:
    check_outputs((options.output,), files_read([options.model], [options.inputs]))
    with talk.step("load", str(options.model)):
        session = EngineSession(
            engine_load.load(options.model, trusted=options.trust_engine), cuda_graph=options.cuda_graph
        )
    try:
        given = _given_to(session, options, talk)
        _warn_of_nan(given, talk)
        with talk.step("run", f"{engine_file.read(options.model).backend} on the GPU"):
            outputs = session.run(given)
        return RunResult(outputs, session.implementation(), False)
    finally:
        session.close()


def _given_to(session: EngineSession, options: RunOptions, talk: Talk) -> dict[str, np.ndarray]:
    """The inputs of an engine, in its types and within its shapes."""
    dtypes = session.input_dtypes
    if options.inputs is None:
        raise UsageError(
            "an engine does not tell what its inputs are for, so none are drawn",
            where=str(options.model),
            got="no --inputs",
            need=f"a file with {', '.join(dtypes)}",
            do="give --inputs FILE; flash-trt compare --save-inputs DIR makes such files from the .onnx",
        )
    given = tensor_files.read(options.inputs, dtypes)
    _require_names(options.inputs, given, set(dtypes))
    engine_file.require_shapes(engine_file.read(options.model), given)
    typed = {
        name: input_types.typed(f"tensor {name} in {options.inputs}", array, dtypes[name])
        for name, array in given.items()
    }
    input_types.warn(given, typed, talk)
    return typed


# --- inputs -----------------------------------------------------------------------------------------------------------


def _feeds(options: RunOptions, file: OnnxFile, model: ir.Model, talk: Talk) -> tuple[dict[str, np.ndarray], bool]:
    """The model's inputs in its own dtypes, and whether they were drawn."""
    wanted = fed_inputs(model)
    if options.inputs is None:
        return _drawn(options, file, model), True
    dtypes = {name: value.dtype.numpy() for name, value in wanted.items() if value.dtype is not None}
    given = tensor_files.read(options.inputs, dtypes)
    _require_names(options.inputs, given, set(wanted))
    typed = {
        name: input_types.typed(f"tensor {name} in {options.inputs}", given[name], dtypes.get(name)) for name in wanted
    }
    for graph_input in file.inputs:
        where = f"tensor {graph_input.name} in {options.inputs}"
        shape_agreement.require_taken(where, graph_input, typed[graph_input.name].shape, file.dim_ranges)
    shape_agreement.require_alike(
        str(options.inputs), file.inputs, {name: array.shape for name, array in typed.items()}
    )
    input_types.warn(given, typed, talk)
    _warn_of_nan(typed, talk)
    return typed, False


def _drawn(options: RunOptions, file: OnnxFile, model: ir.Model) -> dict[str, np.ndarray]:
    """Drawn inputs of the usual sizes by ``--shape`` or default; the values of one that it gives values."""
    given = [shapes.parse(text) for text in options.shapes]
    profile = shapes.plan_profile(file.inputs, given, file.dim_ranges)
    sizes = {name: triple[1] for name, triple in shapes.as_drawn(profile.lengths, file.inputs).items()}
    values = {name: usual for name, (_, usual, _) in shapes.given_values(file.inputs, given).items()}
    return draw_inputs(model, sizes, options.seed) | values


def _require_names(path: Path, given: Mapping[str, np.ndarray], wanted: set[str]) -> None:
    if given.keys() != wanted:
        raise UsageError(
            "the inputs given are not the model's",
            where=str(path),
            got=f"missing: {sorted(wanted - given.keys())}; unknown: {sorted(given.keys() - wanted)}",
            need=f"exactly {', '.join(sorted(wanted))}",
            do="rename the tensors as the model spells its inputs",
        )


def _warn_of_nan(feeds: Mapping[str, np.ndarray], talk: Talk) -> None:
    for name, count in nan_counts(feeds).items():
        talk.warn(f"input {name} holds {count} NaN; what depends on them is NaN too")


def nan_counts(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Name -> how many NaN, for those that hold any."""
    counts = {
        name: int(np.isnan(array.astype(np.float32)).sum())
        for name, array in arrays.items()
        if twin.is_float(array.dtype)
    }
    return {name: count for name, count in counts.items() if count}

# SPDX-License-Identifier: Apache-2.0
"""A model as a Triton Inference Server model repository: an engine on the GPU, or the ONNX file on either.

    DIR/NAME/config.pbtxt, DIR/NAME/1/model.plan or model.onnx, DIR/NAME/lib/ with our libraries

An engine gets our plugin through the autoload library, which the server preloads. An ONNX file on the GPU runs in ONNX
Runtime's TensorRT provider, which is given the autoload library by the configuration too (see ``tensorrt_provider``);
on the CPU the configuration names the operator library.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Literal

import onnx

from flash_export import interrupt
from flash_export.errors import MissingHere, UnsupportedModel, UsageError
from flash_export.save import check_output
from flash_export.talk import Talk
from flash_trt import cpu_operator, engine_file, native, onnx_file, plugin_library, shapes, tensorrt_provider
from flash_trt.onnx_file import GraphInput, OnnxFile
from flash_trt.triton_config import Served, batch_symbol, config
from flash_trt.triton_level import level_for

AUTOLOAD = "libflash_attention_autoload.so"
_BATCH = 8
"""The largest batch where neither ``--max-batch`` nor shapes tell one."""

Device = Literal["gpu", "cpu"]


@dataclasses.dataclass(frozen=True, slots=True)
class TritonOptions:
    """The flags of ``flash-trt triton``; see its ``--help``."""

    repository: Path
    model: Path
    name: str | None = None
    device: Device = "gpu"
    max_batch: int | None = None
    instances: int = 1
    delay_us: int = 100
    shapes: tuple[str, ...] = ()
    trust_engine: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Repository:
    """What was written: the model's folder, and the line that serves it."""

    folder: Path
    server_line: str


def triton(options: TritonOptions, talk: Talk) -> Repository:
    """Writes the model's folder into the repository, complete or not at all.

    Raises:
        UsageError: an unreadable model, a name that is taken or no folder's name.
        UnsafeInput: an engine that is not its sidecar's, unless trusted.
        UnsupportedModel: an engine of TensorRT for RTX, which Triton does not run, a type that it does not know, or an
            ONNX file that the TensorRT provider does not take.
        MissingHere: one of our libraries is not here.
    """
    name = options.name or options.model.name.partition(".")[0]
    folder = options.repository / name
    _require_free_name(name, folder)
    with talk.step("read", str(options.model)):
        is_engine = engine_file.is_engine(options.model)
        _require_no_shapes(options, is_engine)
        served = _engine(options, talk) if is_engine else _onnx(options, talk)
    _require_preloadable(folder, served)
    _require_smallest(options, served, talk)
    with talk.step("write", str(folder)), interrupt.temporary_folder(".", options.repository) as scratch:
        made = Path(scratch) / name
        (made / "1").mkdir(parents=True)
        (made / "lib").mkdir()
        for target, source in served.files.items():
            (made / "1" / target).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, bytes):
                (made / "1" / target).write_bytes(source)
            else:
                shutil.copyfile(source, made / "1" / target)
        for library in served.libraries:
            shutil.copy(library, made / "lib")
        (made / "config.pbtxt").write_text(config(name, served, options), encoding="utf-8")
        made.rename(folder)
    return Repository(folder, _server_line(options, folder))


def _require_free_name(name: str, folder: Path) -> None:
    if not name or name.startswith(".") or "/" in name:
        raise UsageError(
            "the model's name is no folder's name",
            where="--name",
            got=repr(name),
            need="a name without / and without a dot in front",
            do="give another --name",
        )
    if os.path.lexists(folder):  # Path.exists raises where a name is too long, which check_output tells of
        raise UsageError(
            "the repository has a model of this name",
            where=str(folder),
            got="a folder",
            need="a free name",
            do="give another --name, or remove that folder",
        )
    check_output(folder)


def _require_preloadable(folder: Path, served: Served) -> None:
    """LD_PRELOAD is a list, divided at spaces and colons, in which $ begins a variable; there is no way to quote."""
    library = (folder / "lib" / AUTOLOAD).absolute()
    if AUTOLOAD in {source.name for source in served.libraries} and re.search(r"[\s:;$]", str(library)):
        raise UsageError(
            "a server cannot preload a library from this folder",
            where=str(folder),
            got="a path with a space, a colon, a semicolon or a $ in it, which LD_PRELOAD cannot hold",
            need="a path without them",
            do="give another DIR or --name, or a link to the folder that has none",
        )


def _engine(options: TritonOptions, talk: Talk) -> Served:
    engine = engine_file.read(options.model)
    if not options.trust_engine:
        engine_file.require_trust(engine)
    if engine.backend == "tensorrt-rtx" or options.device == "cpu":
        raise UnsupportedModel(
            "Triton does not run this engine",
            where=str(options.model),
            got=f"an engine of {engine.backend} for the {options.device}",
            need="an engine of TensorRT, on a GPU",
            do="build with --backend tensorrt on the GPU machine, or give the .onnx",
        )
    if engine.tensors is None:
        raise UsageError(
            "the sidecar does not tell the engine's inputs and outputs",
            where=str(options.model),
            got="no 'tensors' in it that can be read",
            need="the sidecar that flash-trt build writes",
            do="build the engine again",
        )
    inputs, outputs = engine.tensors
    values = {tensor.name for tensor in inputs if tensor.may_hold_sizes}
    of_shapes = [
        [limits for name, limits in profile.items() if name not in values and limits["max"]]
        for profile in engine.profiles
    ]
    largest = [limits["max"][0] for profile in of_shapes for limits in profile]
    smallest = [max(limits["min"][0] for limits in profile) for profile in of_shapes if profile]
    libraries = () if engine.carries_plugin else (_autoload(), plugin_library.find())
    return Served(
        "tensorrt_plan",
        {"model.plan": options.model},
        inputs,
        outputs,
        libraries,
        _largest_batch(options, min(largest, default=None), talk),
        profiles=len(engine.profiles),
        min_batch=min(smallest, default=1),
        read_as_shapes=frozenset(t.name for t in inputs if any(_holds_values(t, p) for p in engine.profiles)),
    )


def _holds_values(tensor: GraphInput, profile: engine_file.Profile) -> bool:
    """Whether ``profile`` holds values of ``tensor``, as where TensorRT reads it as a shape, and not its shape."""
    if not tensor.may_hold_sizes or tensor.name not in profile:
        return False
    limits, dims = profile[tensor.name], [int(dim) for dim in tensor.dims]
    return len(limits["min"]) == math.prod(dims) and not limits["min"] == limits["max"] == dims


def _batch_range(file: OnnxFile) -> tuple[int, int] | None:
    """With which batches the model works, as flash-export wrote it; None where the file does not tell."""
    return file.dim_ranges.get(batch_symbol(file.inputs, file.output_tensors))


def _largest_batch(
    options: TritonOptions, of_shapes: int | None, talk: Talk, works_with: tuple[int, int] | None = None
) -> int:
    """``--max-batch`` within ``of_shapes``, the largest batch of the model's shapes; a warning tells of a limit.

    Where there are no shapes it stays in ``works_with``, the range of the file, whose end no default passes either.
    """
    asked = options.max_batch
    if of_shapes is None:
        largest = max(1, works_with[1]) if works_with else asked or _BATCH
        if asked is not None and asked > largest:
            talk.warn(f"--max-batch {asked}: the model works with a batch of at most {largest}, which is taken")
        return min(asked or _BATCH, largest)
    if asked is not None and asked > of_shapes:
        talk.warn(f"--max-batch {asked}: the shapes end at a batch of {of_shapes}, which is taken")
    elif asked is not None and asked < of_shapes:
        talk.warn(f"--max-batch {asked}: the shapes hold a batch of {of_shapes}, of which the server uses {asked}")
    return min(asked or of_shapes, of_shapes)


def _require_smallest(options: TritonOptions, served: Served, talk: Talk) -> None:
    """A server hands over requests of any batch from 1 on: a configuration has no smallest one."""
    if served.min_batch < 2 or not batch_symbol(served.inputs, served.outputs):
        return
    if served.min_batch > served.max_batch:
        raise UsageError(
            "the largest batch is smaller than any that the model takes",
            where=f"--max-batch {options.max_batch}" if options.max_batch else str(options.model),
            got=f"a largest batch of {served.max_batch}",
            need=f"{served.min_batch} or more, where the model's shapes begin",
            do="give a larger --max-batch, or shapes that begin at a batch of 1",
        )
    talk.warn(
        f"the model takes a batch of {served.min_batch} or more, of which a server knows nothing: smaller requests fail"
        " unless others join them in time; give it shapes that begin at 1"
    )


def _require_no_shapes(options: TritonOptions, is_engine: bool) -> None:
    if options.shapes and (is_engine or options.device == "cpu"):
        raise UsageError(
            "--shape is not for this model",
            where="--shape",
            got="an engine, which has shapes of its own" if is_engine else "an ONNX file on the CPU, which needs none",
            need="an ONNX file on the GPU",
            do="leave --shape out",
        )


def _onnx(options: TritonOptions, talk: Talk) -> Served:
    file = onnx_file.read(options.model)
    weights: dict[str, Path | bytes] = {**file.external}
    _require_free_names(file)
    if not file.flash_nodes:
        talk.warn(
            "the model has no FlashAttention node, so the server computes attention as written out; where flash-export "
            "made the file, every attention was refused, and its report.json says why"
        )
    elif options.device == "gpu":
        return _in_provider(options, file, weights, talk)
    library = cpu_operator.cpu_operator_path() if file.flash_nodes else ""
    libraries = (Path(library),) if library else ()
    level = level_for(options.model, library, talk) if options.device == "cpu" else 0
    files = {"model.onnx": options.model} | weights
    works_with = _batch_range(file)
    batch = _largest_batch(options, None, talk, works_with)
    smallest = works_with[0] if works_with else 1
    tensors = file.inputs, file.output_tensors
    return Served("onnxruntime_onnx", files, *tensors, libraries, batch, min_batch=smallest, level=level)


def _require_free_names(file: OnnxFile) -> None:
    """Refuses weights that lie where the model itself goes."""
    for name in file.external:
        if Path(name).parts[0] == "model.onnx":
            raise UsageError(
                "the model's weights have the name that Triton knows a model by",
                where=str(file.path),
                got=f"external data in {name}",
                need="another name than model.onnx, which the model gets",
                do="save the model again with onnx.save(..., save_as_external_data=True, location='model.weights')",
            )


def _in_provider(options: TritonOptions, file: OnnxFile, weights: dict[str, Path | bytes], talk: Talk) -> Served:
    """The model for ONNX Runtime's TensorRT provider, which gets our plugin."""
    model, computed_in = tensorrt_provider.provider_model(file)
    parameters = {}
    if onnx.TensorProto.FLOAT16 in computed_in:
        parameters["precision_mode"] = "FP16"
        talk.warn("TensorRT 10 in ONNX Runtime may compute this model's float32 parts in float16; an engine does not")
    works_with = _batch_range(file)
    largest: list[int] = []
    smallest = works_with[0] if works_with else 1
    if options.shapes:
        profile = shapes.plan_profile(file.inputs, [shapes.parse(text) for text in options.shapes], file.dim_ranges)
        if split := [range_.name for range_ in profile.ranges if "," in range_.name]:
            talk.warn(
                f"input {split[0]!r}: ONNX Runtime's TensorRT provider divides its shapes at commas, so --shape is left"
                " out: it builds an engine at the first request and again at every larger shape"
            )
        else:
            parameters |= profile.provider_parameters()
        largest = [range_.largest[0] for range_ in profile.ranges if range_.largest]
        smallest = max((range_.smallest[0] for range_ in profile.ranges if range_.smallest), default=1)
    else:
        talk.warn("no --shape: ONNX Runtime builds an engine at the first request and again at every larger shape")
    return Served(
        "onnxruntime_onnx",
        {"model.onnx": model.SerializeToString()} | weights,
        file.inputs,
        file.output_tensors,
        (_autoload(), plugin_library.find()),
        _largest_batch(options, min(largest, default=None), talk, works_with),
        parameters,
        min_batch=smallest,
    )


def _autoload() -> Path:
    found = native.find(AUTOLOAD)
    if found is None:
        raise MissingHere(
            "the autoload library is missing",
            where=", ".join(map(str, native.folders())),
            got=f"no {AUTOLOAD} there",
            need=f"{AUTOLOAD}, which brings the plugin into a server that only opens libraries",
            do="install flash-export from a wheel or with pip install -e .",
        )
    return found


def _server_line(options: TritonOptions, folder: Path) -> str:
    autoload = (folder / "lib" / AUTOLOAD).absolute()
    preload = [f"LD_PRELOAD={shlex.quote(str(autoload))}"] if autoload.exists() else []
    return " ".join([*preload, f"tritonserver --model-repository={shlex.quote(str(options.repository.absolute()))}"])

# SPDX-License-Identifier: Apache-2.0
"""``config.pbtxt``: what a Triton Inference Server is told of a model, in protobuf's text form (its ModelConfig)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from flash_export.errors import UnsupportedModel
from flash_trt.onnx_file import GraphInput

if TYPE_CHECKING:
    from flash_trt.triton import TritonOptions

_TYPES = {
    onnx.TensorProto.FLOAT: "TYPE_FP32", onnx.TensorProto.FLOAT16: "TYPE_FP16", onnx.TensorProto.BFLOAT16: "TYPE_BF16",
    onnx.TensorProto.DOUBLE: "TYPE_FP64", onnx.TensorProto.INT8: "TYPE_INT8", onnx.TensorProto.INT16: "TYPE_INT16",
    onnx.TensorProto.INT32: "TYPE_INT32", onnx.TensorProto.INT64: "TYPE_INT64", onnx.TensorProto.UINT8: "TYPE_UINT8",
    onnx.TensorProto.BOOL: "TYPE_BOOL",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """One model as Triton sees it: its files by their names in the version's folder, and what the server needs.

    ``provider`` are parameters of ONNX Runtime's TensorRT provider beside the library's path. ``profiles``: how many an
    engine has; the server takes the first alone unless it is told of the others. ``min_batch``: the smallest batch that
    the shapes, or the file, hold. ``read_as_shapes``: inputs whose numbers TensorRT computes shapes from. ``level``:
    how far ONNX Runtime may optimize the graph, as the backend counts it; 0 is its default.
    """

    platform: str
    files: dict[str, Path | bytes]
    inputs: Sequence[GraphInput]
    outputs: Sequence[GraphInput]
    libraries: tuple[Path, ...]
    max_batch: int
    provider: dict[str, str] = dataclasses.field(default_factory=dict)
    profiles: int = 0
    min_batch: int = 1
    read_as_shapes: frozenset[str] = frozenset()
    level: int = 0


def config(name: str, served: Served, options: TritonOptions) -> str:
    """``config.pbtxt`` in protobuf's text form (Triton's ModelConfig).

    Requests are batched where the first dim of every input and output is one and the same symbol.
    """
    batch = batch_symbol(served.inputs, served.outputs)
    parts = [f"name: {_quoted(name)}", f"platform: {_quoted(served.platform)}"]
    parts.append(f"max_batch_size: {served.max_batch if batch else 0}")
    for side, tensors in (("input", served.inputs), ("output", served.outputs)):
        for tensor in tensors:
            is_shape = " is_shape_tensor: true" if side == "input" and tensor.name in served.read_as_shapes else ""
            parts.append(f"{side} {{ {_tensor(tensor, skip=bool(batch))}{is_shape} }}")
    chosen = "".join(f" profile: {_quoted(str(n))}" for n in range(served.profiles)) if served.profiles > 1 else ""
    parts.append(f"instance_group {{ count: {options.instances} kind: KIND_{options.device.upper()}{chosen} }}")
    if batch:
        parts.append(f"dynamic_batching {{ max_queue_delay_microseconds: {options.delay_us} }}")
    if served.platform == "onnxruntime_onnx" and served.libraries:
        library = str((options.repository / name / "lib" / served.libraries[0].name).absolute())
        if options.device == "gpu":
            parts.append(_accelerator(served.provider | {"trt_extra_plugin_lib_paths": library}))
        else:
            parts.append(f"model_operations {{ op_library_filename: {_quoted(library)} }}")
    if served.level:
        parts.append(f"optimization {{ graph {{ level: {served.level} }} }}")
    return "\n".join(parts) + "\n"


def _accelerator(parameters: Mapping[str, str]) -> str:
    """ONNX Runtime's TensorRT provider with its options, as Triton's ONNX Runtime backend spells them."""
    spelled = " ".join(f"parameters {{ key: {_quoted(k)} value: {_quoted(v)} }}" for k, v in parameters.items())
    inner = f'gpu_execution_accelerator {{ name: "tensorrt" {spelled} }}'
    return f"optimization {{ execution_accelerators {{ {inner} }} }}"


def _quoted(text: str) -> str:
    """``text`` as a string of protobuf's text form, which is UTF-8: JSON's would have an emoji as two surrogates."""
    escaped = "".join(f"\\{ord(c):03o}" if c in '"\\' or ord(c) < 32 or ord(c) == 127 else c for c in text)
    return f'"{escaped}"'


def batch_symbol(inputs: Sequence[GraphInput], outputs: Sequence[GraphInput]) -> str:
    firsts = {tensor.dims[0] if tensor.dims else 0 for tensor in [*inputs, *outputs]}
    (only,) = firsts if len(firsts) == 1 else (0,)
    return only if isinstance(only, str) else ""


def _tensor(tensor: GraphInput, *, skip: bool) -> str:
    kind = _TYPES.get(tensor.dtype)
    if kind is None:
        raise UnsupportedModel(
            "Triton does not know the type of a tensor",
            where=f"tensor {tensor.name}",
            got=onnx.TensorProto.DataType.Name(tensor.dtype),
            need=f"one of {', '.join(_TYPES.values())}",
            do="change the model's interface to one of these",
        )
    dims = ", ".join(str(dim) if isinstance(dim, int) else "-1" for dim in tensor.dims[int(skip) :])
    # Triton wants at least one dim: a number for each item of the batch is a vector of one to it.
    shape = f"dims: [ {dims} ]" if dims else "dims: [ 1 ] reshape { shape: [ ] }"
    return f"name: {_quoted(tensor.name)} data_type: {kind} {shape}"

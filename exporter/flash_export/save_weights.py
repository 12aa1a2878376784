# SPDX-License-Identifier: Apache-2.0
"""Models and the one file of weights that they share, written and synced to disk."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

import numpy as np
import onnx_ir as ir

from flash_export.mapped import mapped

SMALL_TENSOR_BYTES = 4096
"""A tensor below this stays in the ``.onnx``: shapes and scales are read by tools that do not open the data file."""
ALIGNMENT_BYTES = 4096
"""A page, so that runtimes can map the weights instead of reading them."""


def tensors_of(model: ir.Model) -> list[ir.TensorProtocol]:
    """The values of every initializer, those of subgraphs included."""
    return [v.const_value for graph in model.graphs() for v in graph.initializers.values() if v.const_value is not None]


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """The weights' file. ``places`` says by a tensor's identity where its bytes lie: (offset, length)."""

    path: Path
    places: dict[int, tuple[int, int]]


def write_weights(tensors: list[ir.TensorProtocol], folder: Path, stem: str) -> Weights | None:
    """All tensors that are not small, each content once; named after the content, so equal weights share a name."""
    path = folder / "weights"
    by_content: dict[bytes, tuple[int, int]] = {}
    places: dict[int, tuple[int, int]] = {}
    with path.open("wb") as file:
        for tensor in filter(_goes_outside, tensors):
            with mapped(tensor):
                content = tensor.tobytes()
            digest = hashlib.sha256(content).digest()
            if digest not in by_content:
                file.write(b"\0" * (-file.tell() % ALIGNMENT_BYTES))
                by_content[digest] = (file.tell(), len(content))
                file.write(content)
            places[id(tensor)] = by_content[digest]
        file.flush()
        os.fsync(file.fileno())
    if not places:
        path.unlink()
        return None
    name = hashlib.sha256(b"".join(by_content)).hexdigest()[:16]
    return Weights(path.rename(folder / f"{stem}.{name}.data"), places)


def _goes_outside(tensor: ir.TensorProtocol) -> bool:
    return tensor.nbytes >= SMALL_TENSOR_BYTES and tensor.dtype != ir.DataType.STRING


def write_model(model: ir.Model, path: Path, data: Weights | None) -> None:
    """Writes one ``.onnx``. The model itself is as before afterwards: its tensors are put back."""
    _inline_attributes(model)
    changed: list[tuple[ir.Value, ir.TensorProtocol]] = []
    try:
        for value in [v for graph in model.graphs() for v in graph.initializers.values()]:
            tensor = value.const_value
            if tensor is None or (data is None and not isinstance(tensor, ir.ExternalTensor)):
                continue
            changed.append((value, tensor))
            value.const_value = _placed(tensor, data)
        write_synced(path, ir.to_proto(model).SerializeToString())
    finally:
        for value, tensor in changed:
            value.const_value = tensor


def _inline_attributes(model: ir.Model) -> None:
    """A Constant node may keep its tensor in a file too; its values are taken into the node."""
    for node in model.graph.all_nodes():
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                node.attributes[name] = ir.AttrTensor(name, _in_memory(attribute.value))


def _in_memory(tensor: ir.TensorProtocol) -> ir.Tensor:
    with mapped(tensor):
        return ir.Tensor(np.array(tensor.numpy()), dtype=tensor.dtype, name=tensor.name)


def _placed(tensor: ir.TensorProtocol, data: Weights | None) -> ir.TensorProtocol:
    """The tensor as it is written: a reference into the weights' file, or its values."""
    if data is not None and _goes_outside(tensor):
        offset, length = data.places[id(tensor)]
        return ir.ExternalTensor(
            data.path.name,
            offset,
            length,
            tensor.dtype,
            shape=tensor.shape,  # type: ignore[arg-type]
            name=tensor.name or "",
            base_dir=data.path.parent,
        )
    return _in_memory(tensor) if isinstance(tensor, ir.ExternalTensor) else tensor


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file and waits until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())

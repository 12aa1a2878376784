# SPDX-License-Identifier: Apache-2.0
"""An ONNX file made by anybody, verified before any of its weights is read.

1. It parses, holds a graph, and stays inside ``Limits``.
2. Every tensor's declared size is the size of its data. Sizes are checked before anything is allocated.
3. External data is a plain file inside the model's folder: no ``..``, no absolute path, no symbolic link on the way,
   no second hard link, and offset and length inside the file. onnx alone accepts a length that is too short or long.
4. onnx_ir reads it and onnx's checker accepts it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath

import google.protobuf.message  # type: ignore[import-untyped]
import onnx
import onnx.checker
import onnx_ir as ir
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]

from flash_export import (
    call_count,
    contrib_schemas,  # noqa: F401  (registers a schema)
)
from flash_export.errors import UnsafeInput, UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a model may ask for before we believe it is an attack and not a model."""

    file_bytes: int = 2**31 - 1
    """protobuf's own end."""
    nodes: int = 1_000_000
    """As the file writes them, and with every call of a function written out."""
    calls: int = 200
    """How deep functions may call one another."""
    rank: int = 8
    dim: int = 2**31 - 1


LIMITS = Limits()

EXTERNAL_KEYS = {"location", "offset", "length", "checksum"}


def verify(path: Path, limits: Limits = LIMITS) -> None:
    """Raises unless ``path`` is an ONNX model that is safe to read.

    Raises:
        UsageError: no ONNX model, broken external data, or refused by onnx's checker.
        UnsafeInput: external data outside the folder, or sizes that are no model's.
    """
    model = verify_files(path, limits)
    try:
        _verify_devices(ir.serde.deserialize_model(model))
    except Exception as error:  # onnx_ir raises whatever a malformed field makes it raise
        got = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise _broken(path, got, "a model that onnx_ir reads and writes") from None
    try:
        onnx.checker.check_model(os.fspath(path))
    except (onnx.checker.ValidationError, ValueError, OSError) as error:
        raise _broken(path, str(error).strip().splitlines()[0][:300], "a model that onnx.checker accepts") from None


def verify_files(path: Path, limits: Limits = LIMITS) -> onnx.ModelProto:
    """The first three of the above, and the model without its external data.

    ONNX Runtime runs models that the checker refuses, an output without a type among them.

    Raises:
        UsageError, UnsafeInput: as ``verify``, but nothing of the checker's.
    """
    if _undecodable(path):
        raise _broken(path, "a path that is no text in this locale", "UTF-8, with which onnx opens files", "rename it")
    size = path.stat().st_size
    if size > limits.file_bytes:
        raise _broken(path, f"{size} bytes in one file", f"at most {limits.file_bytes}, weights as external data")
    model = _parse(path)
    count = 0
    for graph in _graphs([model.graph, *model.functions]):
        count += len(graph.node)
        if count > limits.nodes:
            raise _unsafe(path, f"more than {limits.nodes} nodes", f"at most {limits.nodes}")
    written = call_count.written_out(model)
    if written.nodes > limits.nodes or written.deep > limits.calls:
        got = f"{written.nodes} nodes, functions {written.deep} deep, once every call is written out"
        raise _unsafe(path, got, f"at most {limits.nodes} nodes, {limits.calls} deep")
    for tensor in _tensors(model):
        _verify_tensor(tensor, path, limits)
    if not all(isinstance(text, str) for text in _texts(model)):
        raise _broken(path, "a name that is no UTF-8", "text in UTF-8, as ONNX says")
    for graph in _graphs([model.graph]):
        _verify_attributes(graph, path)
    return model


def _parse(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load_model(path, format="protobuf", load_external_data=False)
    except (google.protobuf.message.DecodeError, ValueError, OSError) as error:
        raise _broken(path, f"no ONNX ({error})", "an ONNX model") from None
    if not model.ir_version or not model.opset_import or not (model.graph.node or model.graph.output):
        raise _broken(path, "no ONNX: it has no version, opset or graph", "an ONNX model")
    return model


def _verify_devices(model: ir.Model) -> None:
    """Raises whatever onnx_ir raises at nodes whose placement on devices it cannot write again."""
    for node in model.graph.all_nodes():
        if node.device_configurations:
            ir.serde.serialize_node(node)


def data_files(path: Path) -> frozenset[Path]:
    """The files that a verified model keeps its weights in, itself apart."""
    tensors = _tensors(onnx.load_model(path, format="protobuf", load_external_data=False))
    locations = {e.value for tensor in tensors for e in tensor.external_data if e.key == "location"}
    return frozenset(path.resolve().parent / location for location in locations)


def _graphs(
    roots: list[onnx.GraphProto | onnx.FunctionProto],
) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """``roots`` and every subgraph in them."""
    waiting = list(roots)
    while waiting:
        graph = waiting.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                waiting += [attribute.g, *attribute.graphs] if attribute.HasField("g") else list(attribute.graphs)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in _graphs([model.graph, *model.functions]):
        if isinstance(graph, onnx.GraphProto):
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                for sparse in [
                    *attribute.sparse_tensors,
                    *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
                ]:
                    yield from (sparse.values, sparse.indices)


def _texts(message: google.protobuf.message.Message) -> Iterator[str | bytes]:
    """Every text of the message and of those inside it; protobuf gives bytes for one that is no UTF-8."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            yield from (value,) if isinstance(value, (str, bytes)) else value
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in (value,) if isinstance(value, google.protobuf.message.Message) else value:
                yield from _texts(inner)


def _verify_tensor(tensor: onnx.TensorProto, path: Path, limits: Limits) -> None:
    where = f"tensor {tensor.name!r} in {path}"
    if len(tensor.dims) > limits.rank or any(not 0 <= dim <= limits.dim for dim in tensor.dims):
        raise _unsafe(where, f"dims {list(tensor.dims)[:12]}", f"at most {limits.rank} dims of 0 to {limits.dim}")
    if tensor.data_type not in _T.DataType.values():
        raise _broken(where, f"data type {tensor.data_type}", "one that ONNX has")
    expected = _bytes_of(tensor)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        _verify_external(tensor, path, where, expected)
    elif tensor.HasField("raw_data") and expected is not None and len(tensor.raw_data) != expected:
        raise _broken(where, f"{len(tensor.raw_data)} bytes of data", f"{expected}, as its dims and type say")
    elif not tensor.HasField("raw_data") and tensor.data_type in _BITS:
        _verify_numbers(tensor, where)


def _verify_numbers(tensor: onnx.TensorProto, where: str) -> None:
    """Numbers in a typed field: one an element, but two of a complex one, and two elements of four bits in one."""
    given = len(getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type)))
    count = math.prod(tensor.dims)
    if tensor.data_type in (_T.COMPLEX64, _T.COMPLEX128):
        count *= 2
    if _BITS[tensor.data_type] == 4:
        count = math.ceil(count / 2)
    if given != count:
        raise _broken(where, f"{given} numbers", f"{count}, as its dims and type say")


def _verify_attributes(graph: onnx.GraphProto | onnx.FunctionProto, path: Path) -> None:
    """Outside a function there is no attribute of a function to refer to."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                raise _broken(
                    f"node {node.name or node.op_type!r} in {path}",
                    f"attribute {attribute.name!r} refers to {attribute.ref_attr_name!r} of a function",
                    "a value: this node is in no function",
                )


def _bytes_of(tensor: onnx.TensorProto) -> int | None:
    """The bytes of the tensor's data by dims and type; None for strings and types unknown to us."""
    bits = _BITS.get(tensor.data_type)
    return None if bits is None else math.ceil(math.prod(tensor.dims) * bits / 8)


_T = onnx.TensorProto
_BITS = {
    **dict.fromkeys((_T.DOUBLE, _T.INT64, _T.UINT64, _T.COMPLEX64), 64),
    **dict.fromkeys((_T.FLOAT, _T.INT32, _T.UINT32), 32),
    **dict.fromkeys((_T.FLOAT16, _T.BFLOAT16, _T.INT16, _T.UINT16), 16),
    **dict.fromkeys(
        (_T.INT8, _T.UINT8, _T.BOOL, _T.FLOAT8E4M3FN, _T.FLOAT8E4M3FNUZ, _T.FLOAT8E5M2, _T.FLOAT8E5M2FNUZ), 8
    ),
    **dict.fromkeys((_T.INT4, _T.UINT4, _T.FLOAT4E2M1), 4),
    _T.COMPLEX128: 128,
}


def _verify_external(tensor: onnx.TensorProto, path: Path, where: str, expected: int | None) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    # protobuf gives bytes for a string that is no UTF-8.
    is_text = all(isinstance(value, str) for value in entries.values())
    if len(entries) != len(tensor.external_data) or entries.keys() - EXTERNAL_KEYS or not is_text:
        keys = [entry.key for entry in tensor.external_data]
        raise _unsafe(
            where, f"external data with keys {keys}", f"text under {sorted(EXTERNAL_KEYS)}, each at most once"
        )
    file = _inside(entries.get("location", ""), path, where)
    offset, length = (_number(entries.get(key), key, where) for key in ("offset", "length"))
    try:
        status = file.lstat()
    except OSError as error:
        raise _broken(
            where, f"external data {file.name!r}: {error.strerror}", "the data file beside the model"
        ) from None
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        kind = "has a second hard link" if stat.S_ISREG(status.st_mode) else "is a link, folder or device"
        raise _unsafe(where, f"external data {file.name!r} that {kind}", "a plain file of the model's own")
    start = offset or 0
    size = status.st_size - start if length is None else length
    if start > status.st_size or start + size > status.st_size:
        raise _broken(where, f"bytes {start} to {start + size} of {status.st_size}", f"data inside {file.name!r}")
    if expected is None or size != expected:
        raise _broken(where, f"{size} bytes of external data", f"{expected} bytes, as its dims and type say")


def _inside(location: str, path: Path, where: str) -> Path:
    """The data file, after proof that neither its name nor a link on the way leads out of the model's folder."""
    parts = location.replace("\\", "/").split("/")
    windows = PureWindowsPath(location)
    if not location or "\0" in location or ".." in parts or location.startswith("/") or windows.drive or windows.root:
        raise _unsafe(where, f"external data at {location!r}", "a relative path inside the model's folder")
    folder = path.resolve().parent
    file = folder / location
    if file.resolve() != Path(os.path.normpath(file)):
        raise _unsafe(where, f"external data at {location!r}, which is reached through a link", "a plain file")
    return file


def _number(text: str | None, key: str, where: str) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise _unsafe(where, f"external data with {key} {text[:40]!r}", "a number of bytes, 0 or more")
    return int(text)


def _undecodable(path: Path) -> bool:
    """Whether Python holds bytes in the path that are no text in this locale."""
    return any("\udc80" <= letter <= "\udcff" for letter in str(path))


def _broken(
    where: object,
    got: str,
    need: str,
    do: str = "check that the .onnx and its data file were copied whole and together",
) -> UsageError:
    return UsageError(
        "the ONNX file cannot be read",
        where=str(where),
        got=got,
        need=need,
        do=do,
    )


def _unsafe(where: object, got: str, need: str) -> UnsafeInput:
    return UnsafeInput(
        "the ONNX file asks for something no model needs",
        where=str(where),
        got=got,
        need=need,
        do="get the model from its source again, and copy its data file (not a link) into the same folder",
    )

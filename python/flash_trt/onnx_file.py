# SPDX-License-Identifier: Apache-2.0
"""What a build and a comparison must know of an ONNX file: inputs, outputs, FlashAttention nodes. No weights."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from flash_export import call_count, dim_ranges, load_onnx
from flash_export.dim_ranges import Ranges
from flash_export.errors import UnsupportedModel, UsageError
from flash_export.op import DOMAIN, OPERATORS, VERSION
from flash_export.save_commit import finish_interrupted
from flash_trt import file_kinds

PROVIDER_DOMAIN = "trt.plugins"
"""Where ONNX Runtime's TensorRT provider keeps the operators that it makes of plugins."""

AttributeValue = int | float | str
_Bound = dict[str, onnx.AttributeProto]
"""A called function's attributes: its own name for each -> what the call hands over, or else the default."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlashNode:
    """One FlashAttention node as TensorRT meets it: a node inside a called function counts once for each call.

    ``is_needed`` is False where no output depends on it: TensorRT parses such a node and then drops it. ``written``: as
    it stands in the file.
    """

    name: str
    operator: str
    attributes: dict[str, AttributeValue]
    is_needed: bool = True
    written: onnx.NodeProto | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class GraphInput:
    """One input, or output, of a model; a dim is a number, a symbol, or "" when the file says nothing of it."""

    name: str
    dtype: int
    dims: tuple[int | str, ...]

    @property
    def is_dynamic(self) -> bool:
        """Whether a dim is not a number."""
        return any(isinstance(dim, str) for dim in self.dims)

    @property
    def may_hold_sizes(self) -> bool:
        """Whether it is a number, or a fixed row of numbers, that a shape may be computed from."""
        fixed = len(self.dims) < 2 and not self.is_dynamic
        return fixed and self.dtype in (onnx.TensorProto.INT32, onnx.TensorProto.INT64)

    @property
    def numpy_dtype(self) -> np.dtype | None:
        """The type of its arrays, object for text; None where the file says none, or one that NumPy has no name for."""
        known = onnx.helper.get_all_tensor_dtypes()
        return onnx.helper.tensor_dtype_to_np_dtype(self.dtype) if self.dtype in known else None

    def as_json(self) -> dict[str, Any]:
        """The tensor's entry in an engine's sidecar."""
        return {"name": self.name, "dtype": self.dtype, "dims": list(self.dims)}


@dataclasses.dataclass(frozen=True, slots=True)
class OnnxFile:
    """An ONNX file without its weights."""

    path: Path
    proto: onnx.ModelProto
    inputs: tuple[GraphInput, ...]
    flash_nodes: tuple[FlashNode, ...]

    @property
    def outputs(self) -> list[str]:
        """Names of the graph's outputs, in order."""
        return [value.name for value in self.proto.graph.output]

    @property
    def output_tensors(self) -> tuple[GraphInput, ...]:
        """The graph's outputs as it declares them, in order."""
        return tuple(_graph_input(value) for value in self.proto.graph.output)

    @property
    def dim_ranges(self) -> Ranges:
        """The ranges of its dynamic dims as flash-export wrote them; {} in a file of another origin."""
        return dim_ranges.read(self.proto)

    @property
    def external_files(self) -> list[Path]:
        """The files that hold weights outside the ``.onnx``."""
        return sorted(self.external.values())

    @property
    def external(self) -> dict[str, Path]:
        """The same files by their paths as seen from the model's folder."""
        return external_files(self.path, self.proto)


def external_files(path: Path, proto: onnx.ModelProto) -> dict[str, Path]:
    """The files that hold weights of the model at ``path``, by their paths as seen from its folder."""
    return {str(Path(location)): path.parent / location for location in _external_locations(proto)}


def path_of(given: object) -> Path:
    """What a caller from Python names a file by, as a path.

    Raises:
        UsageError: neither a string nor an ``os.PathLike`` of one, or with a NUL in it.
    """
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if isinstance(text, str) and "\0" not in text:
        return Path(text)
    raise UsageError(
        "this names no file",
        where="the path of a model",
        got=f"{type(given).__name__} {given!r}"[:200],
        need="a string without NUL, or a pathlib.Path",
        do="give the path of an .onnx, or of an engine where one is taken; os.fsdecode makes a string of bytes",
    )


def read(path: Path) -> OnnxFile:
    """Reads ``path`` without loading weights that lie in other files; ``flash_export.load_onnx`` verifies it first.

    Raises:
        UsageError: no such file, no ONNX model, its external data is missing or broken, or a killed export to it cannot
            be completed.
        UnsafeInput: its external data lies outside its folder, or its sizes are no model's.
        UnsupportedModel: its FlashAttention nodes are of a newer version, or of a name, that this one does not know, or
            of an overload.
    """
    _require_onnx(path)
    load_onnx.verify(path)
    proto = onnx.load(str(path), format="protobuf", load_external_data=False)
    _require_known_nodes(path, proto)
    constants = {tensor.name for tensor in proto.graph.initializer}
    inputs = tuple(_graph_input(value) for value in proto.graph.input if value.name not in constants)
    return OnnxFile(path, proto, inputs, tuple(flash_nodes(proto)))


def require_safe(path: Path) -> None:
    """Refuses what ``read`` refuses, but nothing for onnx's checker: ONNX Runtime runs models that it does not accept.

    Raises:
        UsageError, UnsafeInput, UnsupportedModel: as ``read``.
    """
    _require_onnx(path)
    _require_known_nodes(path, load_onnx.verify_files(path))


def _require_onnx(path: Path) -> None:
    """Completes a killed export to ``path``, and refuses what is no file or of another kind."""
    finish_interrupted(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _unreadable(path, "not a regular file")
        file_kinds.require_onnx(path)
        _refuse_cut_engine(path)
    except FileNotFoundError as error:
        raise UsageError(
            "there is no such file",
            where=str(path),
            got="nothing there" if path.parent.is_dir() else f"no folder {path.parent}",
            need="an ONNX model, or an engine where the command takes one",
            do="correct the path",
        ) from error
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error


def _require_known_nodes(path: Path, proto: onnx.ModelProto) -> None:
    _require_known_version(path, proto)
    _require_known_operators(path, proto)
    _require_no_overloads(path, proto)
    _require_no_servers_copy(path, proto)


def _require_known_version(path: Path, proto: onnx.ModelProto) -> None:
    """A function has opsets of its own, which ONNX Runtime passes over too."""
    imports = [(str(path), proto.opset_import)]
    imports += [(f'{path}, function "{function.name}"', function.opset_import) for function in proto.functions]
    for where, opset in ((where, opset) for where, opsets in imports for opset in opsets):
        if opset.domain != DOMAIN or opset.version <= VERSION:
            continue
        raise UnsupportedModel(
            "the model was written by a newer flash-export",
            where=where,
            got=f"version {opset.version} of the operators in domain {DOMAIN}",
            need=f"version {VERSION} or older",
            do="install the flash-export that wrote it, or export the model again with this one",
        )


def _require_known_operators(path: Path, proto: onnx.ModelProto) -> None:
    """An operator with a body of its own runs anywhere; without one nobody knows what it is."""
    bodies = {function.name for function in proto.functions if function.domain == DOMAIN}
    for node in _nodes_everywhere(proto):
        if node.domain == DOMAIN and node.op_type not in OPERATORS and node.op_type not in bodies:
            raise UnsupportedModel(
                f"no operator of domain {DOMAIN} has this name",
                where=f'{path}, node "{node.name or ", ".join(node.output)}"',
                got=node.op_type,
                need=f"one of {', '.join(OPERATORS)}, or a function in the file that says what it is",
                do="install the flash-export that wrote the model, or export it again with this one",
            )


def _require_no_overloads(path: Path, proto: onnx.ModelProto) -> None:
    """A runtime without our operators takes the overload's body, of which TensorRT and our libraries know nothing."""
    named = [(f'function "{function.name}"', function) for function in proto.functions]
    named += [(f'node "{node.name or ", ".join(node.output)}"', node) for node in _nodes_everywhere(proto)]
    for what, one in named:
        if one.domain == DOMAIN and one.overload:
            raise UnsupportedModel(
                f"an operator of domain {DOMAIN} has no overloads",
                where=f"{path}, {what}",
                got=f'the overload "{one.overload}"',
                need="one function body for each operator, as flash-export writes it",
                do="export the model again with flash-export",
            )


def _require_no_servers_copy(path: Path, proto: onnx.ModelProto) -> None:
    """What flash-trt triton gives a server for its GPU has no bodies, and would count as a model without a node."""
    for node in _nodes_everywhere(proto):
        if node.domain == PROVIDER_DOMAIN and node.op_type in OPERATORS:
            raise UsageError(
                "this is a server's copy of a fused model, which only ONNX Runtime's TensorRT provider runs",
                where=f'{path}, node "{node.name or ", ".join(node.output)}"',
                got=f"{node.op_type} in domain {PROVIDER_DOMAIN}, without the function body that runs anywhere",
                need=f"the fused model itself, with its nodes in domain {DOMAIN}",
                do="give the .onnx that flash-export wrote, of which flash-trt triton made this one",
            )


_ENGINE_SUFFIXES = (".engine", ".plan", ".trt")
_MAGIC_BYTES = len(file_kinds.PLAN_MAGIC[0])


def _refuse_cut_engine(path: Path) -> None:
    """Refuses an empty or cut file that is called an engine: it begins as none, and so is taken for ONNX."""
    if path.suffix in _ENGINE_SUFFIXES and (size := path.stat().st_size) < _MAGIC_BYTES:
        raise UsageError(
            "the engine cannot be read",
            where=str(path),
            got=f"a file of {size} bytes",
            need="an engine that flash-trt build wrote, copied whole",
            do="copy it once more, or build it again with flash-trt build",
        )


def _unreadable(path: Path, got: str) -> UsageError:
    return UsageError(
        "the ONNX model cannot be read",
        where=str(path),
        got=got,
        need="an ONNX model, as flash-export writes it",
        do="check the path, or export the model again",
    )


def _graph_input(value: onnx.ValueInfoProto) -> GraphInput:
    tensor = value.type.tensor_type
    # A negative number is how PyTorch's and TensorFlow's older exporters, and runtimes, write a dynamic dim.
    is_number = [dim.HasField("dim_value") and dim.dim_value >= 0 for dim in tensor.shape.dim]
    dims = tuple(d.dim_value if fixed else d.dim_param for d, fixed in zip(tensor.shape.dim, is_number, strict=True))
    return GraphInput(value.name, tensor.elem_type, dims)


def _external_locations(proto: onnx.ModelProto) -> Iterator[str]:
    for tensor in _tensors(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield from (entry.value for entry in tensor.external_data if entry.key == "location")


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from proto.graph.initializer
    for node in _nodes_everywhere(proto):
        for attribute in node.attribute:
            yield from [attribute.t] if attribute.HasField("t") else attribute.tensors
            for graph in graphs_of(attribute):
                yield from graph.initializer


# --- nodes ------------------------------------------------------------------------------------------------------------


def graphs_of(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """The graphs that an attribute holds."""
    return [attribute.g] if attribute.HasField("g") else list(attribute.graphs)


def _nodes_everywhere(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node that is written down, functions and subgraphs included."""
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        yield from call_count.all_nodes(nodes)


def flash_nodes(proto: onnx.ModelProto) -> Iterator[FlashNode]:
    """Every FlashAttention node that runs; ONNX forbids functions that call themselves."""
    functions = _functions_with_ours(proto)

    def walk(
        nodes: Sequence[onnx.NodeProto], outputs: Iterable[str], bound: _Bound, needed: bool, depth: int
    ) -> Iterator[FlashNode]:
        live = _live(nodes, outputs)
        for index, node in enumerate(nodes):
            is_needed = needed and index in live
            attributes = _bound(node, bound)
            if node.domain == DOMAIN and node.op_type in OPERATORS:
                values = {name: _value(attribute) for name, attribute in attributes.items()}
                yield FlashNode(node.name or node.output[0], node.op_type, values, is_needed, node)
            called = functions.get((node.domain, node.op_type, node.overload))
            if called is not None and depth < len(functions):
                handed = {a.name: a for a in called.attribute_proto} | attributes
                yield from walk(called.node, called.output, handed, is_needed, depth + 1)
            for attribute in node.attribute:
                for graph in graphs_of(attribute):
                    yield from walk(graph.node, [o.name for o in graph.output], bound, is_needed, depth)

    return walk(proto.graph.node, [o.name for o in proto.graph.output], {}, True, 0)


def _bound(node: onnx.NodeProto, bound: _Bound) -> _Bound:
    """The node's attributes; one that refers to what the call leaves out, and has no default, is not there."""
    found = {a.name: bound.get(a.ref_attr_name) if a.ref_attr_name else a for a in node.attribute}
    return {name: attribute for name, attribute in found.items() if attribute is not None}


def _functions_with_ours(proto: onnx.ModelProto) -> dict[call_count.Identifier, onnx.FunctionProto]:
    """The functions that hold a FlashAttention node or call one that does: the calls that are worth following."""
    functions = {name: f for name, f in call_count.functions_of(proto).items() if f.domain != DOMAIN}
    holding: set[call_count.Identifier] = set()
    named = {
        name: {(node.domain, node.op_type, node.overload) for node in call_count.all_nodes(function.node)}
        for name, function in functions.items()
    }
    callers: dict[call_count.Identifier, list[call_count.Identifier]] = defaultdict(list)
    for caller, operators in named.items():
        for operator in operators:
            callers[operator].append(caller)
    waiting = [
        name for name, operators in named.items() if any(d == DOMAIN and op in OPERATORS for d, op, _ in operators)
    ]
    while waiting:
        name = waiting.pop()
        if name not in holding:
            holding.add(name)
            waiting += callers[name]
    return {name: functions[name] for name in holding}


def _live(nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> set[int]:
    """Indices of the nodes that ``outputs`` depend on; ``nodes`` are in topological order, as ONNX demands."""
    wanted, live = set(outputs), set()
    for index in range(len(nodes) - 1, -1, -1):
        if wanted.intersection(nodes[index].output):
            live.add(index)
            wanted.update(_names_read(nodes[index]))
    return live


def _names_read(node: onnx.NodeProto) -> Iterator[str]:
    """The node's inputs and every name its subgraphs read, which may be captured from outside."""
    yield from node.input
    for attribute in node.attribute:
        for graph in graphs_of(attribute):
            yield from (output.name for output in graph.output)
            for inner in graph.node:
                yield from _names_read(inner)


def _value(attribute: onnx.AttributeProto) -> AttributeValue:
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value

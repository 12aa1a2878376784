# SPDX-License-Identifier: Apache-2.0
"""Runs a model in ONNX Runtime on the CPU, from memory or by path, with the graph's own meaning.

Only basic optimisations are on: the extended ones replace whole attentions by operators of ONNX Runtime, and then
the check would compare those.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime

from flash_export import graph as g
from flash_export import twin
from flash_export.op import DOMAIN
from flash_export.reference_run import run_nodes
from flash_export.save_weights import tensors_of

_INLINE_BYTES = 64 * 2**20
"""More than this of weights in memory is lent to ONNX Runtime beside the message: a protobuf message ends at 2 GiB."""
_LENT_BYTES = 2**31
"""More than this goes through a file, from which it is mapped."""
_LENT_FROM_BYTES = 2**16
"""Smaller weights stay in the message."""
_EXTERNAL_FROM_BYTES = 2**20
_EVALUATED_BYTES = 2**30
"""Of weights: the most that the reference evaluator takes, which holds them three times over."""
_PREPACK_BYTES = 2**30
"""Above this, weights stay mapped from their file; ONNX Runtime would hold a rearranged copy of them in memory."""


_DIVIDES_BY_LENGTHS = "Einsum"
"""ONNX Runtime's CPU kernel of it divides by the lengths of its axes: a length of 0 ends the whole process (SIGFPE)."""


class CannotRun(Exception):
    """ONNX Runtime refused a model or failed in it; the text is its own, on one line."""


class Session:
    """One loaded model. Inputs are cast to what the model takes, so that its twins share their feeds.

    Raises:
        CannotRun: ONNX Runtime does not load it.
    """

    def __init__(self, model: ir.Model, folder: Path) -> None:
        """Loads ``model``; weights that are in no file yet pass through ``folder``."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.enable_cpu_mem_arena = False  # one output that is kept would keep all of the session's arena
        # In the order of the file: a probe behind its value, which need not be kept until the end for it.
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # up to three sessions take turns
        if sum(t.nbytes for t in tensors_of(model)) > _PREPACK_BYTES:
            options.add_session_config_entry("session.disable_prepacking", "1")
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        try:
            with tempfile.TemporaryDirectory(dir=folder) as name:
                source, self._lent = _source(model, Path(name), options)
                self._session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise CannotRun(_one_line(error)) from error
        self._dtypes = {i.name: _numpy_dtype(i.type) for i in self._session.get_inputs()}
        nodes = (*model.graph.all_nodes(), *(n for f in model.functions.values() for n in f.all_nodes()))
        self._takes_empty = not any(g.is_op(node, _DIVIDES_BY_LENGTHS) for node in nodes)
        self.outputs = [o.name for o in self._session.get_outputs()]
        self.refused = ""

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> list[np.ndarray]:
        """The named outputs (all by default). Feeds that the model does not take are left out.

        Raises:
            CannotRun: ONNX Runtime fails on these numbers.
        """
        typed = {name: cast_array(feeds[name], dtype) for name, dtype in self._dtypes.items() if name in feeds}
        empty = [] if self._takes_empty else [name for name, array in typed.items() if not array.size]
        if empty:
            got = f"{empty[0]} is empty, {list(typed[empty[0]].shape)}"
            raise CannotRun(
                f"{got}, which ONNX Runtime's {_DIVIDES_BY_LENGTHS} does not survive: give it no length of 0"
            )
        try:
            return list(self._session.run(outputs, typed))
        except Exception as error:
            raise CannotRun(_one_line(error)) from error


class EvaluatorSession:
    """The same with onnx's reference evaluator: slow, for small graphs that ONNX Runtime does not take.

    Raises:
        CannotRun: onnx does not load the model.
    """

    def __init__(self, model: ir.Model, refused: str = "") -> None:
        """Loads ``model``; ``refused`` is why ONNX Runtime does not, which a failure here says first."""
        self.refused = refused
        if (size := sum(t.nbytes for t in tensors_of(model))) > _EVALUATED_BYTES:
            raise CannotRun(f"{size:,} bytes of weights are too many for onnx's reference evaluator")
        try:
            self._evaluator = onnx.reference.ReferenceEvaluator(ir.to_proto(model))
        except Exception as error:
            raise CannotRun(_one_line(error)) from error
        self._dtypes = {v.name or "": v.dtype.numpy() for v in model.graph.inputs if v.dtype is not None}
        self._outputs = [v.name or "" for v in model.graph.outputs]

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> list[np.ndarray]:
        """As ``Session.run``."""
        typed = {name: cast_array(feeds[name], dtype) for name, dtype in self._dtypes.items() if name in feeds}
        try:
            with np.errstate(all="ignore"):  # what becomes infinite or NaN is judged, not told
                return [np.asarray(x) for x in run_nodes(self._evaluator, typed, outputs or self._outputs)]
        except Exception as error:
            first = self.refused and f"{self.refused}; and in onnx's reference evaluator: "
            raise CannotRun(first + _one_line(error)) from error


AnySession = Session | EvaluatorSession


def open_session(model: ir.Model, folder: Path) -> AnySession:
    """ONNX Runtime's session, or the reference evaluator's where ONNX Runtime does not load ``model``.

    ONNX Runtime 1.32 refuses several files with the standard Attention operator that PyTorch writes at opset 23.

    Raises:
        CannotRun: neither loads it; the text is ONNX Runtime's.
    """
    try:
        return Session(model, folder)
    except CannotRun as refused:
        try:
            return EvaluatorSession(model, str(refused))
        except CannotRun:
            raise refused from None


def why_not_loaded(path: Path) -> str:
    """Why ONNX Runtime does not load the file, as it says; empty where it does.

    A file without the bodies of our operators (``--no-fallback``) is for runtimes with the plugin, and not asked about.
    """
    skeleton = onnx.load(path, format="protobuf", load_external_data=False)
    bodies = {(f.domain, f.name) for f in skeleton.functions}
    if any(node.domain == DOMAIN and (DOMAIN, node.op_type) not in bodies for node in skeleton.graph.node):
        return ""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")  # weights stay mapped from their file
    try:
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return re.sub(r"Load model from .* failed:\s*", "", _one_line(error))  # a path that is about to change
    return ""


def cast_array(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``array`` in ``dtype``; a fill of finfo.min stays one."""
    if array.dtype == dtype:
        return array
    if twin.is_float(array.dtype) and twin.is_float(dtype):
        return twin.convert_array(array, dtype)
    return array.astype(dtype)


def open_float64(model: ir.Model, folder: Path) -> AnySession:
    """The float64 twin of ``model``, loaded.

    Raises:
        twin.NoTwin: it cannot be made, or nothing here can run it.
    """
    in_float32: frozenset[str] = frozenset()
    while True:
        wide = model.clone()
        twin.to_float64(wide, in_float32=in_float32)
        try:
            return Session(wide, folder)
        except CannotRun as error:
            # "Could not find an implementation for Erf(13) node with name ..."
            lacking = re.search(r"implementation for (\w+)\(", str(error))
            if lacking is None or lacking[1] in in_float32:
                break
            in_float32 |= {lacking[1]}
    try:
        return EvaluatorSession(wide)
    except CannotRun as error:
        raise twin.NoTwin(str(error)) from error


def _source(model: ir.Model, folder: Path, options: onnxruntime.SessionOptions) -> tuple[str | bytes, list[np.ndarray]]:
    """What ONNX Runtime loads, and the arrays that have to outlive the session.

    Bytes that refer to the weights' own files where all lie in one folder, else a path.
    """
    tensors = tensors_of(model)
    folders = {str(t.base_dir) for t in tensors if isinstance(t, ir.ExternalTensor)}
    inline = sum(t.nbytes for t in tensors if not isinstance(t, ir.ExternalTensor))
    lent: list[np.ndarray] = []
    if _INLINE_BYTES < inline <= _LENT_BYTES:
        to_lend = [v for v in model.graph.initializers.values() if _may_be_lent(v.const_value)]
        left = inline - sum(v.const_value.nbytes for v in to_lend if v.const_value is not None)
        if left <= _INLINE_BYTES and len(folders) <= 1:
            inline = left
            model, lent = _lend(model, [v.name or "" for v in to_lend], options)
    if inline <= _INLINE_BYTES and len(folders) <= 1:
        for weights in folders:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", weights)
        serialized: bytes = ir.to_proto(model).SerializeToString()
        return serialized, lent
    path = folder / "model.onnx"
    ir.save(model, path, external_data="model.data", size_threshold_bytes=_EXTERNAL_FROM_BYTES)
    return str(path), []


def _may_be_lent(tensor: ir.TensorProtocol | None) -> bool:
    if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.nbytes < _LENT_FROM_BYTES:
        return False
    return tensor.dtype != ir.DataType.STRING and tensor.dtype.numpy().isbuiltin == 1


def _lend(
    model: ir.Model, names: Sequence[str], options: onnxruntime.SessionOptions
) -> tuple[ir.Model, list[np.ndarray]]:
    """A copy that refers to the named weights, and these, which ``options`` lends to the session as they are."""
    model = model.clone()
    arrays: list[np.ndarray] = []
    for name in names:
        value = model.graph.initializers[name]
        assert value.const_value is not None
        array = np.ascontiguousarray(value.const_value.numpy())
        arrays.append(array)
        shape = ir.Shape(array.shape)
        value.const_value = ir.ExternalTensor("lent", 0, array.nbytes, value.const_value.dtype, shape=shape, name=name)
    options.add_external_initializers(names, [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays])
    return model, arrays


def _numpy_dtype(name: str) -> np.dtype:
    """``tensor(float)`` as ONNX Runtime spells it -> the NumPy dtype."""
    spelling = {"float": "FLOAT", "double": "DOUBLE"}
    inner = name.removeprefix("tensor(").removesuffix(")")
    return ir.DataType[spelling.get(inner, inner.upper())].numpy()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:600]

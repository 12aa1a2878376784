# SPDX-License-Identifier: Apache-2.0
"""Runs a loaded engine on the GPU: buffers, one stream, and a CUDA graph where asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flash_export import twin
from flash_export.errors import MissingHere, UnsupportedModel, UsageError
from flash_trt import cuda, engine_load, engine_profiles, onnx_file, plan
from flash_trt.engine_load import LoadedEngine

_DTYPES: dict[str, type] = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "INT8": np.int8,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}
"""TensorRT's names of the types that arrays have here."""

Feeds = Mapping[str, np.ndarray]


def open_engine(path: str | Path, *, trusted: bool = False, cuda_graph: bool = False) -> EngineSession:
    """An engine on the GPU here, with the plugin loaded: ``run({name: array})`` gives its outputs by name.

    Args:
        path: an engine that ``flash-trt build`` wrote, with its sidecar beside it.
        trusted: take an engine that no sidecar vouches for. An engine is code.
        cuda_graph: launch each set of shapes as one CUDA graph, captured when it first comes.

    Raises:
        UsageError: no such file, or no engine.
        UnsafeInput: the engine is not the one that its sidecar describes, and ``trusted`` is False.
        UnsupportedModel: a tensor of a type that numpy cannot hold.
        MissingHere: no GPU that it was built for, no TensorRT or no plugin here.
    """
    return EngineSession(engine_load.load(onnx_file.path_of(path), trusted=trusted), cuda_graph=cuda_graph)


def why_not_here(path: str | Path) -> str:
    """What an engine lacks here, in words: a GPU that it was built for, its TensorRT, or our plugin; empty for nothing.

    Nothing of the engine runs, so whether it is to be trusted is not asked: ``open_engine`` does.

    Raises:
        UsageError: no such file, or no engine.
    """
    try:
        engine_load.admit(onnx_file.path_of(path), trusted=True)
    except MissingHere as error:
        return f"{error.got}; it needs {error.need}"
    return ""


class EngineSession:
    """One execution context of an engine with its buffers. Not for several threads at once.

    Args:
        loaded: the engine.
        cuda_graph: launch each set of shapes as one CUDA graph, captured when it first comes.

    Raises:
        UnsupportedModel: a tensor of a type that numpy cannot hold.
        MissingHere: CUDA reports an error, here and in every method.
    """

    def __init__(self, loaded: LoadedEngine, *, cuda_graph: bool = False) -> None:
        self._loaded = loaded
        self._trt = trt = loaded.backend.trt
        engine = loaded.engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self._dtypes = {name: self._dtype(name) for name in names}
        self._inputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        self._outputs = [n for n in names if n not in self._inputs]
        # Sizes that TensorRT computes shapes from stay in the host's memory.
        self._on_host = {n for n in names if engine.get_tensor_location(n) == trt.TensorLocation.HOST}
        # An output that is written over an input, as a cache is, has that input's memory; older TensorRTs tell of none.
        aliased_input = getattr(engine, "get_aliased_input_tensor", lambda name: None)
        self._memory_of = {name: aliased_input(name) or name for name in self._outputs}
        self._device = cuda.Device()
        self._context = engine.create_execution_context()
        self._profile = 0
        self._host: dict[str, np.ndarray] = {}
        self._buffers: dict[str, tuple[int, int]] = {}
        self._bound: object = None
        self._wants_graph = cuda_graph
        self._graph: Any = None
        self._events = (self._device.event(), self._device.event())

    @property
    def input_dtypes(self) -> dict[str, np.dtype]:
        """Name -> dtype of each input."""
        return {name: self._dtypes[name] for name in self._inputs}

    def implementation(self) -> str:
        """What computes the attention, in words."""
        ours = plan.plugin_records(self._loaded.file.path.read_bytes())
        who = (
            "the TensorRT plugin, in the engine"
            if ours
            else "TensorRT's own kernels: the engine holds no plugin of ours"
        )
        return who + (", launched as a CUDA graph" if self._wants_graph else "")

    def close(self) -> None:
        """Frees all GPU memory that it holds."""
        self._graph = None
        self._context = None
        self._device.close()

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Outputs by name.

        Args:
            feeds: every input by name; floats may be of another type, and are rounded to the engine's.

        Raises:
            UsageError: an input is missing or of another type, TensorRT refuses the shapes or reports an error.
            UnsupportedModel: an output whose shape only its contents tell, or a context that no graph can be made of.
        """
        self._prepare(feeds)
        self._execute()
        outputs = {}
        for name in self._outputs:
            if name in self._on_host:
                self._device.synchronize()
                outputs[name] = self._host[name].copy()
                continue
            outputs[name] = np.empty(tuple(self._context.get_tensor_shape(name)), self._dtypes[name])
            self._device.download(outputs[name], self._buffers[self._memory_of[name]][0])
        return outputs

    def time(self, feeds: Feeds) -> float:
        """Seconds of the GPU's work, without the copies; raises as ``run``."""
        self._prepare(feeds)
        start, end = self._events
        self._device.record(start)
        self._execute()
        self._device.record(end)
        return self._device.seconds(start, end)

    # --- binding ------------------------------------------------------------------------------------------------------

    def _prepare(self, feeds: Feeds) -> None:
        """Puts the inputs into their buffers; new shapes get new addresses and, where asked, a new graph."""
        if not feeds.keys() >= set(self._inputs):
            raise self._failed(f"no {', '.join(sorted(set(self._inputs) - feeds.keys()))}")
        typed = {name: self._typed(name, feeds[name]) for name in self._inputs}
        sizes = {name: typed[name].tobytes() for name in self._inputs if name in self._on_host}
        bound = (tuple(typed[name].shape for name in self._inputs), tuple(sizes.values()))
        if bound != self._bound:
            self._bind(typed)
        for name in self._inputs:
            if name not in self._on_host:
                self._device.upload(self._buffers[name][0], typed[name])
        self._device.synchronize()
        if bound != self._bound:
            if self._wants_graph:
                self._graph = self._captured()
            self._bound = bound

    def _typed(self, name: str, array: np.ndarray) -> np.ndarray:
        dtype = self._dtypes[name]
        if array.dtype != dtype and twin.is_float(array.dtype) and twin.is_float(dtype):
            array = twin.convert_array(array, dtype)
        if array.dtype != dtype:
            raise UsageError(
                "an input has another type than the engine takes",
                where=f"input {name} of {self._loaded.file.path}",
                got=str(array.dtype),
                need=str(dtype),
                do=f"give it as {dtype}",
            )
        return np.ascontiguousarray(array).reshape(array.shape)

    def _bind(self, typed: Feeds) -> None:
        self._bound = None
        if self._graph is not None:  # it holds the addresses and shapes of before
            self._device.drop(self._graph)
            self._graph = None
        self._choose_profile(typed)
        for name in self._inputs:
            if not self._context.set_input_shape(name, tuple(typed[name].shape)):
                raise self._failed(f"input {name} of shape {list(typed[name].shape)}")
            if name in self._on_host:
                self._host[name] = typed[name]
                self._context.set_tensor_address(name, typed[name].ctypes.data)
            else:
                self._place(name, typed[name].nbytes)
        if missing := self._context.infer_shapes():
            raise self._failed(f"what {', '.join(missing)} hold")
        for name in self._outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            if min(shape, default=0) < 0:
                raise UnsupportedModel(
                    "an output's shape is known only when it has been computed",
                    where=f"output {name} of {self._loaded.file.path}",
                    got=f"shape {list(shape)}",
                    need="shapes that follow from those of the inputs",
                    do="leave this output out of the model",
                )
            made = np.empty(shape, self._dtypes[name])
            if name in self._on_host:
                self._host[name] = made
                self._context.set_tensor_address(name, made.ctypes.data)
            elif self._memory_of[name] != name:
                self._context.set_tensor_address(name, self._buffers[self._memory_of[name]][0])
            else:
                self._place(name, made.nbytes)

    def _choose_profile(self, typed: Feeds) -> None:
        number = engine_profiles.first_holding(self._loaded.engine, typed)
        if number != self._profile:
            if not self._context.set_optimization_profile_async(number, self._device.stream):
                raise self._failed(f"optimization profile {number}")
            self._profile = number

    def _place(self, name: str, size_bytes: int) -> None:
        """A buffer of at least ``size_bytes`` for one tensor."""
        address, size = self._buffers.get(name, (0, -1))
        if size < size_bytes:
            if address:
                self._device.free(address)
                del self._buffers[name]
            address = self._device.allocate(size_bytes)
            self._buffers[name] = (address, size_bytes)
        self._context.set_tensor_address(name, address)

    def _dtype(self, name: str) -> np.dtype:
        kind = str(self._loaded.engine.get_tensor_dtype(name).name)
        if kind not in _DTYPES:
            raise UnsupportedModel(
                "a tensor of the engine has a type that numpy cannot hold",
                where=f"tensor {name} of {self._loaded.file.path}",
                got=kind,
                need=f"one of {', '.join(_DTYPES)}",
                do="cast it inside the model",
            )
        return np.dtype(_DTYPES[kind])

    # --- executing ----------------------------------------------------------------------------------------------------

    def _execute(self) -> None:
        if self._graph is not None:
            self._device.launch(self._graph)
        else:
            self._enqueue()

    def _enqueue(self) -> None:
        if not self._context.execute_async_v3(self._device.stream):
            raise self._failed("the inputs given")

    def _captured(self) -> Any:
        """The work as a graph. TensorRT wants one ordinary run after new shapes, before a capture."""
        self._enqueue()
        self._device.synchronize()
        # Only TensorRT for RTX tells: it may still compile kernels for these shapes while it runs.
        asked = getattr(self._context, "is_stream_capturable", None)
        if asked is not None and not asked(self._device.stream):
            raise UnsupportedModel(
                "this engine's work cannot be captured in a CUDA graph",
                where=str(self._loaded.file.path),
                got="is_stream_capturable says no for these shapes",
                need="work that neither synchronises nor allocates",
                do="leave --cuda-graph out",
            )
        with self._device.capture() as made:
            self._enqueue()
        return made[0]

    def _failed(self, got: str) -> UsageError:
        texts = [text.strip() for severity, text in self._loaded.backend.log if severity <= 1]
        return UsageError(
            "the engine fails on these inputs",
            where=str(self._loaded.file.path),
            got=f"{got}: {texts[-1]}" if texts else got,
            need="inputs that it takes",
            do="check their lengths against each other and against the shapes that flash-trt inspect shows",
        )

# SPDX-License-Identifier: Apache-2.0
"""A GPU for tests without one: the CUDA runtime's few calls and TensorRT's engine, done on the CPU.

Nothing that a stream is asked for happens before it is waited for, and memory is poisoned when it is handed out, so a
missing copy or wait shows in the numbers. Freed or foreign addresses, leaks and use while capturing are told.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import runtime as real

POISON = 0xA5
COPY_MS, WORK_MS = 100.0, 1.5
OK = real.cudaError_t.cudaSuccess


class FakeRuntime:
    """``cuda.bindings.runtime``: the real enumerations, and calls of the real signatures on host memory."""

    cudaStreamNonBlocking = real.cudaStreamNonBlocking
    cudaMemcpyKind = real.cudaMemcpyKind
    cudaStreamCaptureMode = real.cudaStreamCaptureMode
    cudaError_t = real.cudaError_t
    cudaGetErrorString = staticmethod(real.cudaGetErrorString)

    def __init__(self, capacity: int = 2**30) -> None:
        self.capacity = capacity
        self.memory: dict[int, Any] = {}
        self.open: dict[int, str] = {}
        self.failing: dict[str, Any] = {}
        self.captures = 0
        self.launches = 0
        self._numbers = itertools.count(1000)
        self._pending: list[Callable[[], None]] = []
        self._captured: list[Callable[[], None]] | None = None
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self._clock_ms = 0.0
        self._recorded: dict[int, float] = {}

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        status = object.__getattribute__(self, "__dict__").get("failing", {}).get(name)
        return (lambda *_: (status, None)) if status is not None else found

    # --- memory -------------------------------------------------------------------------------------------------------

    def cudaMalloc(self, size: int) -> tuple[Any, int | None]:
        assert size > 0, "the real one gives a null pointer"
        if sum(map(ctypes.sizeof, self.memory.values())) + size > self.capacity:
            return real.cudaError_t.cudaErrorMemoryAllocation, None
        block = (ctypes.c_ubyte * size)(*[POISON] * size)
        self.memory[ctypes.addressof(block)] = block
        return OK, ctypes.addressof(block)

    def cudaFree(self, devPtr: int) -> tuple[Any]:
        assert not self._pending, "freed while the stream may use it"
        del self.memory[devPtr]
        return (OK,)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: Any, stream: int) -> tuple[Any]:
        assert self.open[stream] == "stream"
        upload = kind == real.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.require_device(dst if upload else src, count)
        self.ask(lambda: ctypes.memmove(dst, src, count), COPY_MS)
        return (OK,)

    def require_device(self, address: int, size: int) -> None:
        assert ctypes.sizeof(self.memory[address]) >= size, "past the end of a buffer"

    # --- streams, events, graphs --------------------------------------------------------------------------------------

    def _new(self, kind: str) -> tuple[Any, int]:
        number = next(self._numbers)
        self.open[number] = kind
        return OK, number

    def _end(self, handle: int, kind: str) -> tuple[Any]:
        assert self.open.pop(handle) == kind
        return (OK,)

    def ask(self, work: Callable[[], object], ms: float) -> None:
        """Puts ``work`` at the end of the stream, or into the graph that is being captured."""

        def timed() -> None:
            self._clock_ms += ms
            work()

        (self._pending if self._captured is None else self._captured).append(timed)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, int]:
        assert flags == real.cudaStreamNonBlocking
        return self._new("stream")

    def cudaStreamDestroy(self, stream: int) -> tuple[Any]:
        return self._end(stream, "stream")

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any]:
        assert self._captured is None, "a capture ends in an error when it is waited for"
        assert self.open[stream] == "stream"
        self._run()
        return (OK,)

    def _run(self) -> None:
        pending, self._pending = self._pending, []
        for work in pending:
            work()

    def cudaEventCreate(self) -> tuple[Any, int]:
        return self._new("event")

    def cudaEventDestroy(self, event: int) -> tuple[Any]:
        return self._end(event, "event")

    def cudaEventRecord(self, event: int, stream: int) -> tuple[Any]:
        assert self.open[event] == "event"
        self.ask(lambda: self._recorded.update({event: self._clock_ms}), 0.0)
        return (OK,)

    def cudaEventSynchronize(self, event: int) -> tuple[Any]:
        assert self.open[event] == "event"
        self._run()
        return (OK,)

    def cudaEventElapsedTime(self, start: int, end: int) -> tuple[Any, float]:
        assert not self._pending
        return OK, self._recorded[end] - self._recorded[start]

    def cudaStreamBeginCapture(self, stream: int, mode: Any) -> tuple[Any]:
        assert self._captured is None
        self._captured = []
        return (OK,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, int]:
        assert self._captured is not None
        _, graph = self._new("graph")
        self._graphs[graph], self._captured = self._captured, None
        self.captures += 1
        return OK, graph

    def cudaGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, int]:
        _, made = self._new("exec")
        self._graphs[made] = list(self._graphs[graph])
        return OK, made

    def cudaGraphDestroy(self, graph: int) -> tuple[Any]:
        return self._end(graph, "graph")

    def cudaGraphLaunch(self, graphExec: int, stream: int) -> tuple[Any]:
        assert self.open[graphExec] == "exec"
        self.launches += 1
        self._pending += self._graphs[graphExec]
        return (OK,)

    def cudaGraphExecDestroy(self, graphExec: int) -> tuple[Any]:
        assert not self._pending, "destroyed while it may run"
        return self._end(graphExec, "exec")


def calls() -> dict[str, list[str]]:
    """Name -> parameters of every call that the fake has."""
    functions = inspect.getmembers(FakeRuntime, inspect.isfunction)
    return {n: list(inspect.signature(f).parameters)[1:] for n, f in functions if n.startswith("cuda")}


# --- TensorRT ---------------------------------------------------------------------------------------------------------

Arrays = dict[str, np.ndarray]
INPUT, OUTPUT, DEVICE, HOST = "INPUT", "OUTPUT", "DEVICE", "HOST"
TRT = SimpleNamespace(
    TensorIOMode=SimpleNamespace(INPUT=INPUT, OUTPUT=OUTPUT), TensorLocation=SimpleNamespace(HOST=HOST, DEVICE=DEVICE)
)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An input, or an output with how its shape follows from the inputs' shapes and from those in host memory."""

    name: str
    dtype: np.dtype
    kind: str
    shape: Callable[[dict[str, tuple[int, ...]], Arrays], tuple[int, ...]] | None = None
    location: str = DEVICE

    @property
    def mode(self) -> str:
        return INPUT if self.shape is None else OUTPUT


class FakeEngine:
    """An ``ICudaEngine`` whose contexts do ``compute`` (inputs by name -> outputs by name)."""

    def __init__(self, cuda: FakeRuntime, tensors: list[Tensor], compute: Callable[[Arrays], Arrays]) -> None:
        self.cuda, self.tensors, self.compute = cuda, {t.name: t for t in tensors}, compute
        self.num_io_tensors = len(tensors)
        self.fails = False
        self.profiles: list[dict[str, tuple[tuple[int, ...], ...]]] = [{}]
        self.capturable: bool | None = None

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> str:
        return self.tensors[name].mode

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=self.tensors[name].kind)

    def get_tensor_location(self, name: str) -> str:
        return self.tensors[name].location

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return list(self.profiles[profile_index][name])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name not in self.profiles[0]:
            return ()
        every = [shape for profile in self.profiles for shape in profile[name]]
        return tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*every, strict=True))

    def create_execution_context(self) -> FakeContext:
        context = FakeContext(self)
        if self.capturable is not None:
            context.is_stream_capturable = lambda stream: self.capturable
        return context


class FakeContext:
    """An ``IExecutionContext``."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self.profile = 0

    def set_optimization_profile_async(self, profile_index: int, stream: int) -> bool:
        assert self._engine.cuda.open[stream] == "stream"
        assert not self._engine.cuda._pending, "changed while the context may run"
        self.profile, self._shapes = profile_index, {}
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = tuple(shape)
        low, _, high = self._engine.profiles[self.profile].get(name, (shape,) * 3)
        within = all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
        return within and 99 not in shape  # outside the profile of an engine that has none here

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address
        self._addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        tensor = self._engine.tensors[name]
        if tensor.shape is None:
            return self._shapes[name]
        held = {
            n: self._view(n).copy() for n, t in self._engine.tensors.items() if t.mode == INPUT and t.location == HOST
        }
        return tensor.shape(self._shapes, held)

    def _view(self, name: str) -> np.ndarray:
        tensor, shape = self._engine.tensors[name], self.get_tensor_shape(name)
        size = int(np.prod(shape)) * tensor.dtype.itemsize
        if tensor.location == DEVICE:
            self._engine.cuda.require_device(self._addresses[name], size)
        raw = (ctypes.c_ubyte * size).from_address(self._addresses[name])
        return np.frombuffer(raw, tensor.dtype).reshape(shape)

    def execute_async_v3(self, stream: int) -> bool:
        if self._engine.fails:
            return False
        tensors = self._engine.tensors.values()
        inputs = {t.name: self._view(t.name) for t in tensors if t.mode == INPUT}
        outputs = {t.name: self._view(t.name) for t in tensors if t.mode == OUTPUT}

        def work() -> None:
            for name, made in self._engine.compute(inputs).items():
                outputs[name][...] = made

        self._engine.cuda.ask(work, WORK_MS)
        return True

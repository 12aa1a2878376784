# SPDX-License-Identifier: Apache-2.0
"""The few calls of the CUDA runtime that running an engine takes, through cuda-python; each failure is an error.

Handles are integers. ``Device`` owns all that it hands out: closing it gives everything back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from flash_export.errors import MissingHere
from flash_export.requirements import pip_install


def runtime() -> Any:
    """The module ``cuda.bindings.runtime``.

    Raises:
        MissingHere: cuda-python is not installed, or does not load.
    """
    try:
        from cuda.bindings import runtime
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingHere(
            "cuda-python is not usable here",
            where="import cuda.bindings.runtime",
            got=str(error),
            need="the Python package cuda-python, of CUDA 13",
            do=pip_install("rtx", "cuda-python"),
        ) from error
    return runtime


class Device:
    """The current GPU with one stream of ours, and buffers, events and graphs on it.

    Every method but ``synchronize``, ``seconds`` and ``download`` returns before the GPU is done.

    Raises:
        MissingHere: a call fails: no driver, one that is too old, not enough memory, an error of what ran.
    """

    def __init__(self) -> None:
        self._cuda = runtime()
        self._buffers: set[int] = set()
        self._events: list[Any] = []
        self._graphs: list[Any] = []
        self.stream = int(self._call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking))

    def close(self) -> None:
        """Waits for the stream and gives everything back."""
        self.synchronize()
        for graph in list(self._graphs):
            self.drop(graph)
        for event in self._events:
            self._call("cudaEventDestroy", event)
        for address in list(self._buffers):
            self.free(address)
        self._call("cudaStreamDestroy", self.stream)

    # --- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> int:
        """The address of a new buffer; at least one byte, since TensorRT takes no null address."""
        address = int(self._call("cudaMalloc", max(size_bytes, 1)))
        self._buffers.add(address)
        return address

    def free(self, address: int) -> None:
        """Gives a buffer back, once the stream no longer uses it."""
        self.synchronize()
        self._buffers.remove(address)
        self._call("cudaFree", address)

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copies a contiguous array to ``address``; the array must stay as it is until ``synchronize``."""
        self._copy(address, array.ctypes.data, array.nbytes, self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice)

    def download(self, array: np.ndarray, address: int) -> None:
        """Fills a contiguous array from ``address``, and waits for it."""
        self._copy(array.ctypes.data, address, array.nbytes, self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost)
        self.synchronize()

    def _copy(self, to: int, source: int, size_bytes: int, kind: Any) -> None:
        if size_bytes:
            self._call("cudaMemcpyAsync", to, source, size_bytes, kind, self.stream)

    # --- order and time -----------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits until all that was asked for is done."""
        self._call("cudaStreamSynchronize", self.stream)

    def event(self) -> Any:
        """A new event that measures time."""
        self._events.append(self._call("cudaEventCreate"))
        return self._events[-1]

    def record(self, event: Any) -> None:
        """Marks this place in the stream."""
        self._call("cudaEventRecord", event, self.stream)

    def seconds(self, start: Any, end: Any) -> float:
        """Between two recorded events; waits for the second. About half a microsecond fine."""
        self._call("cudaEventSynchronize", end)
        return float(self._call("cudaEventElapsedTime", start, end)) / 1e3

    # --- graphs -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Any]]:
        """What the body asks of the stream is not done but put into a graph, which the list holds afterwards."""
        made: list[Any] = []
        # Thread local: what other threads ask of the GPU meanwhile is neither captured nor forbidden.
        self._call(
            "cudaStreamBeginCapture", self.stream, self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        )
        try:
            yield made
        except BaseException:
            with contextlib.suppress(MissingHere):  # the first failure is the one to tell
                self._call("cudaGraphDestroy", self._call("cudaStreamEndCapture", self.stream))
            raise
        graph = self._call("cudaStreamEndCapture", self.stream)
        try:
            made.append(self._call("cudaGraphInstantiate", graph, 0))
            self._graphs.append(made[0])
        finally:
            self._call("cudaGraphDestroy", graph)

    def launch(self, graph: Any) -> None:
        """Does what was captured, with the buffers of then."""
        self._call("cudaGraphLaunch", graph, self.stream)

    def drop(self, graph: Any) -> None:
        """Gives a graph back."""
        self._graphs.remove(graph)
        self._call("cudaGraphExecDestroy", graph)

    # --- calling ------------------------------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._cuda, name)(*arguments)
        if int(status) != 0:
            raise _failure(self._cuda, name, status)
        return results[0] if results else None


def _failure(cuda: Any, name: str, status: Any) -> MissingHere:
    _, words = cuda.cudaGetErrorString(status)
    memory = int(status) == int(cuda.cudaError_t.cudaErrorMemoryAllocation)
    return MissingHere(
        "the GPU has too little free memory" if memory else "CUDA reports an error",
        where=name,
        got=f"{status.name}: {words.decode(errors='replace')}",
        need="smaller inputs or more memory"
        if memory
        else "a GPU with a driver for CUDA 13, and no failed kernel before",
        do="give smaller shapes or end other programs on the GPU" if memory else "see flash-trt env and nvidia-smi",
    )

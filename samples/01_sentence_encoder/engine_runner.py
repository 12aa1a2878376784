# SPDX-License-Identifier: Apache-2.0
"""Runs a TensorRT for RTX engine on this machine's GPU, with torch tensors as its buffers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from flash_trt import backends, plugin_library


class EngineRunner:
    """One engine, ready to run. Call it with arrays by input name; it returns the first output."""

    def __init__(self, engine: Path) -> None:
        self._backend = backend = backends.load("tensorrt-rtx")
        plugin_library.load(backend)
        self._trt = backend.trt
        self._runtime = self._trt.Runtime(backend.logger)
        self._engine = self._runtime.deserialize_cuda_engine(engine.read_bytes())
        if self._engine is None:
            raise RuntimeError(f"{engine} does not load here: {backend.log[-3:]}")
        self._context = self._engine.create_execution_context()

    def __call__(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        modes = {
            n: self._engine.get_tensor_mode(n)
            for n in map(self._engine.get_tensor_name, range(self._engine.num_io_tensors))
        }
        buffers = {}
        for name in (n for n, mode in modes.items() if mode == self._trt.TensorIOMode.INPUT):
            buffers[name] = torch.from_numpy(arrays[name]).cuda()
            self._context.set_input_shape(name, tuple(arrays[name].shape))
        outputs = [n for n, mode in modes.items() if mode == self._trt.TensorIOMode.OUTPUT]
        for name in outputs:
            buffers[name] = torch.empty(tuple(self._context.get_tensor_shape(name)), device="cuda")
        for name, buffer in buffers.items():
            self._context.set_tensor_address(name, buffer.data_ptr())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise RuntimeError(f"the engine reported an error: {self._backend.log[-3:]}")
        stream.synchronize()
        return buffers[outputs[0]].cpu().numpy()

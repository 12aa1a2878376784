# SPDX-License-Identifier: Apache-2.0
"""Drives the plugin library through its TensorRT interface on anybody's memory; ctypes half of ``driver.cpp``.

Knows nothing of who owns the memory: numpy arrays for the library with emulated kernels, CUDA tensors for the real one.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

DTYPE_CODES = {"fp32": 0, "fp16": 1, "int32": 3, "bf16": 7}
"""nvinfer1::DataType."""
FLOAT_ATTRIBUTES = ("scale", "softcap")


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 8),
    )


class _Field(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("is_float", ctypes.c_int32),
        ("int_value", ctypes.c_int32),
        ("float_value", ctypes.c_float),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """One tensor: where it lies, its dtype's name and its shape. The caller keeps the memory alive."""

    address: int
    dtype: str
    shape: tuple[int, ...]


class PluginFailed(Exception):
    """A call returned its error value; the text is what the plugin logged."""


class Plugin:
    """One FlashAttention plugin, as a TensorRT engine holds it.

    Args:
        driver: path of libplugin_driver.so.
        library: path of the plugin library.
        operator: the operator's name.
        attributes: every numeric attribute.

    Raises:
        PluginFailed: the library has no such plugin, or it refuses the attributes.
    """

    def __init__(self, driver: Path, library: Path, operator: str, attributes: Mapping[str, int | float]) -> None:
        self._c = _open(driver)
        fields = (_Field * len(attributes))()
        for field, (name, value) in zip(fields, attributes.items(), strict=True):
            field.name = name.encode()
            field.is_float = int(name in FLOAT_ATTRIBUTES)
            if field.is_float:
                field.float_value = value
            else:
                field.int_value = int(value)
        self._plugin = self._c.flashDriverCreate(str(library).encode(), operator.encode(), fields, len(fields))
        if not self._plugin:
            raise PluginFailed(self._messages())

    def __del__(self) -> None:
        if getattr(self, "_plugin", None):
            self._c.flashDriverDestroy(self._plugin)

    def prepare(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> int:
        """Tells the plugin the shapes (onShapeChange); returns the bytes of workspace that ``enqueue`` wants."""
        size = self._c.flashDriverPrepare(self._plugin, _tensors(inputs), len(inputs), _tensors(outputs), len(outputs))
        if size < 0:
            raise PluginFailed(self._messages())
        return int(size)

    def enqueue(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer], workspace: int = 0, stream: int = 0) -> None:
        """Enqueues the attention on ``stream`` (a cudaStream_t) and returns at once."""
        status = self._c.flashDriverEnqueue(
            self._plugin, _tensors(inputs), len(inputs), _tensors(outputs), len(outputs), workspace, stream
        )
        if status != 0:
            raise PluginFailed(self._messages())

    def _messages(self) -> str:
        return self._c.flashDriverMessages().decode() or "the plugin said nothing"


def _tensors(buffers: Sequence[Buffer]) -> ctypes.Array:
    array = (_Tensor * len(buffers))()
    for tensor, buffer in zip(array, buffers, strict=True):
        tensor.data = buffer.address or None
        tensor.dtype = DTYPE_CODES[buffer.dtype]
        tensor.rank = len(buffer.shape)
        tensor.dims[: len(buffer.shape)] = buffer.shape
    return array


def _open(path: Path) -> ctypes.CDLL:
    c = ctypes.CDLL(str(path))
    pointer, integer, tensors = ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(_Tensor)
    c.flashDriverCreate.restype = pointer
    c.flashDriverCreate.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Field), integer]
    c.flashDriverDestroy.restype = None
    c.flashDriverDestroy.argtypes = [pointer]
    c.flashDriverMessages.restype = ctypes.c_char_p
    c.flashDriverPrepare.restype = ctypes.c_int64
    c.flashDriverPrepare.argtypes = [pointer, tensors, integer, tensors, integer]
    c.flashDriverEnqueue.restype = integer
    c.flashDriverEnqueue.argtypes = [pointer, tensors, integer, tensors, integer, pointer, pointer]
    return c

# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA's driver says of this machine, asked through ``libcuda`` alone: no CUDA package is needed."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

_COMPUTE_CAPABILITY_MAJOR = 75  # CUdevice_attribute, CUDA driver API
_COMPUTE_CAPABILITY_MINOR = 76


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """One GPU: its name, ``sm80``-like generation and memory."""

    name: str
    sm: str
    memory_bytes: int


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return cuda if cuda.cuInit(0) == 0 else None


def driver_version() -> str | None:
    """The newest CUDA the driver supports, e.g. ``13.0``; None without a working driver."""
    cuda, version = _driver(), ctypes.c_int()
    if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def devices() -> list[Device]:
    """Every GPU the driver shows to this process; [] without one."""
    cuda, count = _driver(), ctypes.c_int()
    if cuda is None or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_device(cuda, ordinal) for ordinal in range(count.value)]


def _device(cuda: ctypes.CDLL, ordinal: int) -> Device:
    handle, memory = ctypes.c_int(), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(handle), ordinal)
    cuda.cuDeviceGetName(name, len(name), handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, handle)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, handle)
    return Device(name.value.decode(), f"sm{major.value}{minor.value}", memory.value)

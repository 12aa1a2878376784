# SPDX-License-Identifier: Apache-2.0
"""The Python module ``tensorrt`` for a machine without a GPU: TensorRT for RTX under that name, as ``flash-trt build
--backend tensorrt`` uses it. Copied to a folder on PYTHONPATH as tensorrt.py.

What only TensorRT for RTX has is not there, and what it lacks is: a timing cache. Without FAKE_TENSORRT_GPU=1 there is
no builder, as there is none of TensorRT's where no driver is.
"""

import os

from flash_trt import rtx_soname

rtx_soname.prepare()

import tensorrt_rtx as _rtx  # noqa: E402
from tensorrt_rtx import *  # noqa: E402, F403

__version__ = "11.4.0.106"
for _name in ("ComputeCapability",):
    globals().pop(_name, None)


class _TimingCache:
    def __init__(self, measured: bytes) -> None:
        self.measured = bytes(measured)

    def serialize(self) -> bytes:
        return self.measured


class _Config:
    """A builder's configuration with a timing cache, into which a build writes that it was there."""

    def __init__(self, real: object) -> None:
        object.__setattr__(self, "real", real)
        object.__setattr__(self, "cache", None)

    def __getattr__(self, name: str) -> object:
        if "compute_capabilit" in name:
            raise AttributeError(name)
        return getattr(self.real, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.real, name, value)

    def create_timing_cache(self, measured: bytes) -> _TimingCache:
        return _TimingCache(measured)

    def set_timing_cache(self, cache: _TimingCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        object.__setattr__(self, "cache", cache)
        return True

    def get_timing_cache(self) -> _TimingCache | None:
        return self.cache


class Builder(_rtx.Builder):
    """TensorRT's builder, which looks for a GPU when it is made."""

    def __init__(self, logger: object) -> None:
        if os.environ.get("FAKE_TENSORRT_GPU") != "1":
            logger.log(_rtx.ILogger.Severity.ERROR, "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        super().__init__(logger)

    def create_builder_config(self) -> _Config:
        return _Config(super().create_builder_config())

    def build_serialized_network(self, network: object, config: _Config) -> object:
        if config.cache is not None:
            config.cache.measured += b"\xffmeasured "
        return super().build_serialized_network(network, config.real)

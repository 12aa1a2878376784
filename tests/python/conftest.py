# SPDX-License-Identifier: Apache-2.0
"""What the tests of flash_trt share: TensorRT for RTX with our plugin, and the command line in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flash_export import command
from flash_trt import backends, plugin_library
from flash_trt.backends import Backend
from flash_trt.cli import app


@pytest.fixture(scope="session")
def rtx() -> Backend:
    """TensorRT for RTX with our plugin in its registry; its absence fails the tests that need it."""
    backend = backends.load("tensorrt-rtx")
    plugin_library.load(backend)
    return backend


@pytest.fixture
def flash_trt() -> Callable[..., int]:
    """``flash-trt`` in this process: takes its arguments, gives the exit code."""
    return lambda *arguments: command.run(app, [str(argument) for argument in arguments])

# SPDX-License-Identifier: Apache-2.0
"""Marks of every test, in tests/ and samples/, and which skips a complete machine may have."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator

import pytest

SKIPS_FAIL = "FLASH_EXPORT_SKIPS_FAIL"
"""Set by .ci/run: a test fails that is skipped for want of something that can be installed. Not these:"""

BY_DESIGN = (
    "tests/contract/test_cache_contract.py",
    "tests/contract/test_contract.py",
    "tests/plugin/test_contract.py",
)
"""Rows of the contract's tables that an implementation refuses, each with its own reason."""

NO_INSTALLATION_BRINGS = (
    "no NVIDIA driver here",
    "the NVIDIA driver finds no GPU",
    "a GPU is here",
    "TensorRT for RTX does not build for",  # ... this GPU, and TensorRT proper is no dependency of the tests
    "set TENSORRT_ROOT",
    "TensorRT is installed here",
    "this processor does not run",
    "an instruction set of x86-64",
    "bf16 rounds scores",
    "cannot express it",
    "root may write anywhere",
    "no tmpfs can be mounted",
    "GB of disk are free",
)
"""What reasons say that are no fault of a machine's setup."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; its twin on the CPU runs everywhere")
    config.addinivalue_line("markers", "slow: takes more than ten seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (reason := _why_no_gpu()) is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get(SKIPS_FAIL) and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not item.nodeid.startswith(BY_DESIGN) and not any(part in reason for part in NO_INSTALLATION_BRINGS):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} is skipped, and {SKIPS_FAIL} is set: {reason}"
    return report


def _why_no_gpu() -> str | None:
    """Why tests marked gpu cannot run here; asked of the driver, since torch may be a CPU build."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver here (libcuda.so.1)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver finds no GPU"
    return None

# SPDX-License-Identifier: Apache-2.0
"""The cache forms by the plugin's enqueue, kernels emulated, their caches the same memory on both sides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from contract import cache_cases
from contract.cache_cases import CACHE_CASES, CacheCase, CacheTensors
from contract.tensors import in_layout
from contract.tolerance import DTYPES
from numpy.typing import NDArray

from flash_export.op import OPERATORS
from plugin.driver import Plugin, PluginFailed
from plugin.host_plugin import buffer_of


def run(build: Path, tensors: CacheTensors) -> dict[str, NDArray]:
    """The node's outputs by name; the caches in ``tensors`` are written in place.

    Raises:
        PluginFailed: the plugin refuses, or the emulation found a fault.
    """
    case, given = tensors.case, tensors.given
    library = build / "lib" / "libflash_attention_plugin_emulated.so"
    plugin = Plugin(build / "lib" / "libplugin_driver.so", library, case.operator, case.attributes())
    shape = (case.batch, case.heads_q, case.seqlen_q, case.v_head_dim)
    got = {
        "output": in_layout(np.full(shape, np.nan, DTYPES[case.dtype]), case.layout),
        "lse": np.full(shape[:3], np.nan, np.float32),
        "kv_lengths_out": np.full(case.batch, -1, np.int32),
        "key_cache_out": given["key_cache"],
        "value_cache_out": given["value_cache"],
    }
    inputs = [buffer_of(given[name]) for name in OPERATORS[case.operator].inputs]
    outputs = [buffer_of(got[name]) for name in OPERATORS[case.operator].outputs]
    workspace = np.empty(plugin.prepare(inputs, outputs), np.uint8)
    plugin.enqueue(inputs, outputs, workspace.ctypes.data)
    return got


@pytest.mark.parametrize("case", CACHE_CASES, ids=lambda c: c.name)
def test_enqueue_appends_and_attends(case: CacheCase, native_build: Path) -> None:
    tensors, untouched = cache_cases.make(case), cache_cases.make(case)
    assert untouched.why_wrong(run(native_build, tensors)) == []


def test_a_page_of_no_size_of_the_kernels_is_refused_with_their_reason(native_build: Path) -> None:
    case = CacheCase("page_of_24", (3,), page=24)
    with pytest.raises(PluginFailed, match="page_size is 24; the kernels take powers of 2 from 16 to 256"):
        run(native_build, cache_cases.make(case))

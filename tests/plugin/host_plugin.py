# SPDX-License-Identifier: Apache-2.0
"""The plugin with emulated kernels, on numpy arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from contract import tensors
from contract.cases import Case
from contract.tensors import Tensors
from contract.tolerance import DTYPES
from numpy.typing import NDArray

from plugin.driver import Buffer, Plugin

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {np.dtype(np.int32): "int32"}


def output_shapes(case: Case) -> list[tuple[int, ...]]:
    """Shapes of the node's outputs."""
    if case.layout == 1:
        output: tuple[int, ...] = (case.batch, case.heads_q, case.seqlen_q, case.dv)
    else:
        output = (case.batch, case.seqlen_q, case.heads_q * case.dv)
    if case.operator != "FlashAttentionEx":
        return [output]
    return [output, (case.batch, case.heads_q, case.seqlen_q)]


def buffer_of(array: NDArray) -> Buffer:
    """The array's memory; an array without elements has the null address, as TensorRT may pass it."""
    return Buffer(array.ctypes.data if array.size else 0, DTYPE_NAMES[array.dtype], array.shape)


def run(build: Path, case: Case, given: Tensors) -> tuple[NDArray, NDArray | None]:
    """Heads-first output, and the lse of FlashAttentionEx, by the plugin's enqueue.

    Raises:
        PluginFailed: the plugin refuses, or the emulation found a fault.
    """
    plugin = Plugin(
        build / "lib" / "libplugin_driver.so",
        build / "lib" / "libflash_attention_plugin_emulated.so",
        case.operator,
        case.attributes(),
    )
    arrays = tensors.node_inputs(case, given)
    dtypes = [DTYPES[case.dtype], np.dtype(np.float32)]
    results = [np.full(shape, np.nan, dtype) for shape, dtype in zip(output_shapes(case), dtypes, strict=False)]
    inputs, outputs = [buffer_of(a) for a in arrays], [buffer_of(a) for a in results]
    workspace = np.empty(plugin.prepare(inputs, outputs), np.uint8)
    plugin.enqueue(inputs, outputs, workspace.ctypes.data)
    lse = results[1] if len(results) > 1 else None
    return tensors.heads_first(results[0], case.layout, case.heads_q), lse

# SPDX-License-Identifier: Apache-2.0
"""A mask that a fused file lacks, or has too much, is seen, also where only some lengths or some heads show it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter import graphs
from exporter.graphs import LENGTHS, PRODUCT, QKV, REST, holding, model

from flash_export.check import CheckResult, check
from flash_export.errors import NumbersDiffer
from flash_export.find import find
from flash_export.function_body import functions_for
from flash_export.op import DOMAIN
from flash_export.rewrite import rewrite

CONSTANTS = graphs.CONSTANTS + ", int64 n8 = {8}"
PAST = "past = LessOrEqual (j, i)\n d = Sub (i, j)\n"
MASKED = "masked = Where (keep, scaled, hidden)\n"
OF_HEADS = PAST + "near = Less (d, windows)\n keep = And (past, near)\n"
WHERE_MORE_KEYS = (
    PAST + "near = Less (d, n8)\n many = GreaterOrEqual (rows, columns)\n o = Or (near, many)\n keep = And (past, o)\n"
)


def checked(folder: Path, proto: onnx.ModelProto, change: Callable[[ir.Node], None]) -> CheckResult:
    """The check of a fused file whose node has been changed."""
    plain, fused = folder / "plain.onnx", folder / "fused.onnx"
    onnx.save(proto, plain)
    converted = ir.from_proto(proto)
    sites = find(converted)
    rewrite(converted, sites)
    (node,) = [n for n in converted.graph if n.domain == DOMAIN]
    change(node)
    for function in functions_for([node], 18):
        converted.functions[function.identifier()] = function
    ir.save(converted, fused)
    return check(plain, fused, sites, reference=None, example={}, dims={}, values=None)


def sets(name: str, value: int) -> Callable[[ir.Node], None]:
    return lambda node: node.attributes.add(ir.AttrInt64(name, value))


@pytest.mark.parametrize(
    ("windows", "has"),
    [([9999, 9999, 9999, 200], "has_bias"), ([16, 16, 16, 200], "has_bias"), ([200] * 4, "window_left")],
)
def test_a_window_of_one_head_alone_is_run_past(tmp_path: Path, windows: list[int], has: str) -> None:
    inputs = QKV.replace("T", "S") + ", int64[4, 1, 1] windows"
    proto = model(LENGTHS + PRODUCT + OF_HEADS + MASKED + REST, inputs=inputs, constants=CONSTANTS)
    proto = holding(proto, windows=np.array(windows).reshape(4, 1, 1))
    assert checked(tmp_path, proto, lambda node: None).passed
    with pytest.raises(NumbersDiffer):
        checked(tmp_path, proto, sets(has, 0 if has == "has_bias" else -1))


@pytest.mark.parametrize("size", [63, 200, 1000])
def test_a_window_that_only_the_file_has_is_run_past(tmp_path: Path, size: int) -> None:
    proto = model(LENGTHS + PRODUCT + PAST + "keep = Identity (past)\n" + MASKED + REST, constants=CONSTANTS)
    assert checked(tmp_path, proto, lambda node: None).passed
    with pytest.raises(NumbersDiffer):
        checked(tmp_path, proto, sets("window_left", size))


def test_a_mask_of_longer_keys_than_queries_is_seen(tmp_path: Path) -> None:
    proto = model(LENGTHS + PRODUCT + WHERE_MORE_KEYS + MASKED + REST, constants=CONSTANTS)
    assert checked(tmp_path, proto, lambda node: None).passed
    with pytest.raises(NumbersDiffer):
        checked(tmp_path, proto, sets("has_bias", 0))

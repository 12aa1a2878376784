# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's own attention operators are named in the report, never silently left."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from flash_export.find import find
from flash_export.patterns.contrib import OPERATORS


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_contrib_operator_is_refused_by_name(operator: str) -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>\n'
        "main (float[2, 5, 32] q, float[2, 5, 32] k, float[2, 5, 32] v) => (float[2, 5, 32] out)\n"
        f"{{ out = com.microsoft.{operator} <num_heads = 4> (q, k, v) }}\n"
    )
    (site,) = find(ir.from_proto(proto))
    assert site.status == "refused"
    assert site.reason is not None
    assert (site.reason.code, operator in site.reason.text) == ("contrib_operator", True)

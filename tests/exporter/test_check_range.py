# SPDX-License-Identifier: Apache-2.0
"""The check sees how large products of Q and K get in the model's own runs, and warns where float16 ends before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from exporter import graphs

from flash_export import pipeline
from flash_export.options import Options
from flash_export.talk import Talk

SIZES = {"small": 1.0, "near": 40.0, "beyond": 512.0}


def model(size: float, dtype: str, scores: str) -> onnx.ModelProto:
    """Queries times 64 and keys times ``size``, and a scale that brings the scores back to a spread of 3."""
    numbers = {"by_q": 64.0, "by_k": size, "scale": 1 / (64 * size)}
    if dtype == "float16":  # onnx's text form writes the bits of a half
        numbers = {name: int(np.float16(x).view(np.uint16)) for name, x in numbers.items()}
    body = (
        "many_q = Mul (q, by_q)\n many_k = Mul (k, by_k)\n kt = Transpose <perm = [0, 1, 3, 2]> (many_k)\n"
        f"product = MatMul (many_q, kt)\n{scores}\n out = MatMul (p, v)\n"
    )
    constants = ", ".join(f"{dtype} {name} = {{{x}}}" for name, x in numbers.items())
    return graphs.model(
        body,
        inputs=graphs.QKV.replace("float", dtype),
        outputs=graphs.OUT.replace("float", dtype),
        constants=constants,
    )


PLAIN = " scaled = Mul (product, scale)\n p = Softmax <axis = -1> (scaled)"


def outcome(proto: onnx.ModelProto, folder: Path) -> tuple[dict, str]:
    onnx.save(proto, folder / "in.onnx")
    talk = Talk(quiet=True)
    result = pipeline.run(Options(source=folder / "in.onnx", output=folder / "out.onnx"), talk)
    assert [s.status for s in result.sites] == ["fused"], result.sites[0].reason
    check = json.loads((folder / "report.json").read_text())["check"]
    return check, "\n".join(check["warnings"])


@pytest.mark.parametrize("name", SIZES)
def test_products_beyond_float16_or_near_its_end_are_told(name: str, tmp_path: Path) -> None:
    check, warnings = outcome(model(SIZES[name], "float16", PLAIN), tmp_path)
    (largest,) = check["largest_scores"].values()
    assert {"small": 300 < largest < 32000, "near": 32752 < largest < 65504, "beyond": largest > 65504}[name], largest
    assert ("float16 holds" in warnings) == (name != "small")
    assert (f"comes {name} the 65,504" in warnings) == (name != "small")


def test_other_types_are_measured_and_need_no_warning(tmp_path: Path) -> None:
    check, warnings = outcome(model(512.0, "float", PLAIN), tmp_path)
    (largest,) = check["largest_scores"].values()
    assert largest > 65504
    assert not warnings


OPERATORS = {
    "standard": ("out = Attention (q, k, v)", graphs.QKV, graphs.OUT, 23),
    "contrib": (
        "out = com.microsoft.MultiHeadAttention <num_heads = 4> (q, k, v)",
        "float[B, S, 32] q, float[B, T, 32] k, float[B, T, 32] v",
        "float[B, S, 32] out",
        18,
    ),
}


@pytest.mark.parametrize(
    ("form", "size", "dtype"),
    [
        ("standard", 36000, "float"),
        ("standard", 36000, "float16"),
        ("standard", 10, "float16"),
        ("contrib", 10, "float16"),
    ],
)
def test_scores_that_an_operator_forms_inside_are_told_as_well(
    form: str, size: float, dtype: str, tmp_path: Path
) -> None:
    """The keys are ``size`` times as large as what is drawn."""
    body, inputs, outputs, opset = OPERATORS[form]
    number = f"{size}.0" if dtype == "float" else str(int(np.float16(size).view(np.uint16)))
    body = body.replace("(q, k", "(q, many").replace("out =", "many = Mul (k, by)\n out =")
    text = (
        f'<ir_version: 9, opset_import: ["": {opset}, "com.microsoft": 1]>\n'
        f"main ({inputs}) => ({outputs}) <float by = {{{number}}}> {{ {body} }}"
    )
    proto = onnx.parser.parse_model(text.replace("float", dtype))
    check, warnings = outcome(proto, tmp_path)
    (largest,) = check["largest_scores"].values()
    assert largest > 10
    assert ("float16 holds" in warnings) == (dtype == "float16" and largest > 32752)
    assert ("An operator that keeps its scores in float16" in warnings) == ("float16 holds" in warnings)
    assert (largest > 32752) == (size > 10)

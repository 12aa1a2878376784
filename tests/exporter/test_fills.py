# SPDX-License-Identifier: Apache-2.0
"""The one number that takes the place of hidden scores: what arrives there, and what it may not do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from exporter import graphs
from exporter.graphs import SIZES, attention, both, fuse, numbers, only, padding

from flash_export.evaluate import Evaluator
from flash_export.find import find
from flash_export.mask_terms import uniform
from flash_export.shapes import Shapes

PAD_INPUTS = graphs.QKV + ", bool[B, 1, 1, T] pad"
CONSTANTS = graphs.CONSTANTS + ", float some = {-1e9}, float lower = {-3.4028234663852886e+38}, double far = {-1e300}"
HALF, FLOAT, BFLOAT, TRUTH, BYTE, INT8, INT64, FLOAT8 = 10, 1, 16, 9, 2, 3, 7, 17
GUARDED = (
    "p = Softmax <axis = -1> (masked)\n nan = IsNaN (p)\n probs = Where (nan, zero, p)\n out = MatMul (probs, v)\n"
)


def cast(start: str, *types: int) -> str:
    """Lines that make ``fill`` of a constant by one Cast after another."""
    names = [start, *(f"cast{i}" for i in range(len(types) - 1)), "fill"]
    return "".join(f"{names[i + 1]} = Cast <to = {to}> ({names[i]})\n" for i, to in enumerate(types))


@pytest.mark.parametrize(
    ("lines", "arrives"),
    [
        (cast("some", HALF, FLOAT), -np.inf),
        (cast("lower", HALF, FLOAT), -np.inf),
        (cast("lower", BFLOAT, FLOAT), -np.inf),
        (cast("far", FLOAT), -np.inf),
        (cast("some", BFLOAT, FLOAT), float(np.float32(-1e9).astype(ml_dtypes.bfloat16))),
        (cast("some", TRUTH, FLOAT), 1.0),
        (cast("some", INT64, FLOAT), -1e9),
        (cast("scale", INT64, FLOAT), 0.0),
        (cast("some", INT8, FLOAT), None),
        (cast("some", BYTE, FLOAT), None),
        (cast("some", FLOAT8, FLOAT), None),
        (cast("hidden", INT64, FLOAT), None),
        ("k_size = Size (k)\n one = Cast <to = 7> (k_size)\n fill = Cast <to = 1> (one)\n", None),
        ("wide = ConstantOfShape <value = float[1] {-1e9}> (q_shape)\n" + cast("wide", HALF, FLOAT), -np.inf),
    ],
)
def test_the_number_is_the_one_behind_all_casts(lines: str, arrives: float | None) -> None:
    body = graphs.LENGTHS + graphs.PRODUCT + lines + "masked = Where (pad, fill, scaled)\n" + graphs.REST
    graph = ir.from_proto(graphs.model(body, inputs=PAD_INPUTS, constants=CONSTANTS, opset=19)).graph
    (where,) = (node for node in graph if node.op_type == "Where")
    fill = where.inputs[1]
    assert fill is not None
    assert uniform(fill, Evaluator(Shapes(graph), 19)) == arrives


@pytest.mark.parametrize(
    "form", ["masked = Where (pad, fill, scaled)\n", "m = Where (pad, fill, zero)\n masked = Add (scaled, m)\n"]
)
@pytest.mark.parametrize("start", ["some", "lower"])
def test_a_fill_that_a_cast_makes_minus_infinity_hides_for_good(form: str, start: str) -> None:
    body = graphs.LENGTHS + graphs.PRODUCT + cast(start, HALF, FLOAT) + form + GUARDED
    proto = graphs.model(body, inputs=PAD_INPUTS, constants=CONSTANTS)
    fused, sites = fuse(proto)
    assert only(sites).status == "fused", only(sites).reason
    for sizes in SIZES:
        pad = padding(sizes)
        expected, got = both(proto, fused, [*numbers(sizes), pad])
        assert not expected[-1].any()
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("to", [TRUTH, INT8, BYTE])
def test_a_fill_that_a_cast_makes_another_number_is_refused(to: int) -> None:
    proto = attention(
        cast("some", to, FLOAT) + "masked = Where (pad, fill, scaled)", inputs=PAD_INPUTS, constants=CONSTANTS
    )
    assert graphs.code(proto) == "mask_replaces_scores"


@pytest.mark.parametrize(
    ("masked", "to", "code"),
    [
        ("Where (pad, some, scaled)", HALF, "mask_replaces_scores"),
        ("Where (pad, lower, scaled)", BFLOAT, "mask_replaces_scores"),
        ("Add (scaled, added)", HALF, "mask_replaces_scores"),
        ("Where (pad, some, scaled)", BFLOAT, "fused"),
        ("Where (pad, half, scaled)", HALF, "fused"),
        ("Where (pad, hidden, scaled)", HALF, "fused"),
    ],
)
def test_scores_that_a_cast_takes_beyond_its_type_are_refused(masked: str, to: int, code: str) -> None:
    """The twin that the check runs has no float16, and would not show it."""
    proto = graphs.model(
        graphs.LENGTHS + graphs.PRODUCT + f"added = Where (pad, half, zero)\n wide = {masked}\n"
        f"masked = Cast <to = {to}> (wide)\n p = Softmax <axis = -1> (masked)\n probs = Cast <to = 1> (p)\n"
        "out = MatMul (probs, v)\n",
        inputs=PAD_INPUTS,
        constants=CONSTANTS + ", float half = {-65504.0}",
    )
    assert graphs.code(proto) == code


NARROWED = "masked = Cast <to = 1> (cast)\n" + GUARDED
"""The scores back in float32: a twin without float16 shows no difference."""


@pytest.mark.parametrize(
    ("lines", "to", "code"),
    [
        ("truth = Cast <to = 1> (pad)\n m = Mul (truth, some)\n wide = Add (scaled, m)\n", HALF, ""),
        ("m = Where (pad, one, zero)\n n = Mul (m, some)\n wide = Add (scaled, n)\n", HALF, ""),
        ("m = Where (pad3, some, zero)\n n = Unsqueeze (m, ax1)\n wide = Add (scaled, n)\n", HALF, ""),
        ("wide = Add (scaled, given)\n", HALF, ""),
        ("wide = Add (scaled, given)\n", BFLOAT, ""),
        ("m = Where (pad, f40, zero)\n n = Add (scaled, m)\n wide = Add (n, m)\n", HALF, ""),
        ("m = Where (pad, f40, zero)\n n = Where (pad, f40, scaled)\n wide = Add (n, m)\n", HALF, ""),
        ("m = Where (pad, f20, zero)\n n = Add (scaled, m)\n wide = Add (n, m)\n", HALF, "fused"),
        ("m = Where (pad, f40, zero)\n n = Where (pad, hidden, scaled)\n wide = Add (n, m)\n", HALF, "fused"),
        ("m = Where (pad, hidden, zero)\n n = Add (scaled, m)\n wide = Add (n, m)\n", HALF, "fused"),
        ("wide = Add (scaled, given)\n", FLOAT, "fused"),
        ("wide = Identity (scaled)\n", HALF, "fused"),
    ],
)
def test_what_is_added_to_scores_is_known_to_fit_where_they_are_narrowed(lines: str, to: int, code: str) -> None:
    proto = graphs.model(
        graphs.LENGTHS + graphs.PRODUCT + lines + f"cast = Cast <to = {to}> (wide)\n" + NARROWED,
        inputs=PAD_INPUTS + ", bool[B, 1, T] pad3, float[B, 1, 1, T] given",
        constants=CONSTANTS + ", float one = {1.0}, float f40 = {-40000.0}, float f20 = {-20000.0}",
    )
    assert graphs.code(proto) == (code or "mask_replaces_scores")


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("m = Where (pad, f40, zero)\n wide = Add (scaled, m)\n", "fused"),
        ("wide = Identity (scaled)\n", "fused"),
        ("wide = Where (pad, hidden, scaled)\n", "fused"),
        ("m = Where (pad, f20, zero)\n wide = Add (scaled, m)\n", ""),
    ],
)
def test_what_is_added_to_narrowed_scores_is_known_to_fit_with_what_was_added_before(lines: str, code: str) -> None:
    """Neither -20,000 before the Cast nor -60,000 behind it is beyond float16, but their sum is."""
    after = {"fused": "n = Where (pad, few, small)\n", "": "n = Where (pad, most, small)\n"}[code]
    half = "half = Cast <to = 10> (wide)\n few = Cast <to = 10> (one)\n most = Cast <to = 10> (f60)\n"
    body = graphs.LENGTHS + graphs.PRODUCT + lines + half + "small = Cast <to = 10> (zero)\n" + after
    proto = graphs.model(
        body + "cast = Add (half, n)\n" + NARROWED,
        inputs=PAD_INPUTS,
        constants=CONSTANTS + ", float one = {-1.0}, float f40 = {-40000.0}, float f20 = {-20000.0}, "
        "float f60 = {-60000.0}",
    )
    assert graphs.code(proto) == (code or "mask_replaces_scores")


@pytest.mark.parametrize(("factor", "code"), [("two", "mask_replaces_scores"), ("scale", "fused")])
def test_narrowed_scores_are_multiplied_by_what_leaves_them_in_their_type(factor: str, code: str) -> None:
    lines = "m = Where (pad, f40, zero)\n wide = Add (scaled, m)\n half = Cast <to = 10> (wide)\n"
    proto = graphs.model(
        graphs.LENGTHS
        + graphs.PRODUCT
        + lines
        + f"by = Cast <to = 10> ({factor})\n cast = Mul (half, by)\n"
        + NARROWED,
        inputs=PAD_INPUTS,
        constants=CONSTANTS + ", float two = {2.0}, float f40 = {-40000.0}",
    )
    assert graphs.code(proto) == code


@pytest.mark.parametrize("wider", [FLOAT, BFLOAT])
def test_scores_of_float16_that_are_cast_to_more_keep_every_mask(wider: int) -> None:
    """As half precision is usually exported: masked in float16, the softmax in float32."""
    body = (
        "q16 = Cast <to = 10> (q)\n k16 = Cast <to = 10> (k)\n v16 = Cast <to = 10> (v)\n"
        "given16 = Cast <to = 10> (given)\n"
        "kt = Transpose <perm = [0, 1, 3, 2]> (k16)\n scores = MatMul (q16, kt)\n"
        f"wide = Add (scores, given16)\n masked = Cast <to = {wider}> (wide)\n p = Softmax <axis = -1> (masked)\n"
        "probs = Cast <to = 10> (p)\n o16 = MatMul (probs, v16)\n out = Cast <to = 1> (o16)\n"
    )
    proto = graphs.model(body, inputs=graphs.QKV + ", float[B, 1, 1, T] given", constants=CONSTANTS)
    assert graphs.code(proto) == "fused"


MORE = {"[1, 1, 1, 1, 1]": "it has rank 5, the scores 4", "[4, 1, 1, 1]": 'its 4 stands beside "B"'}
"""A shape that one number may have, and why it would make more scores."""
SOFTMAX = "p = Softmax <axis = -1> (masked)\n"


def of_shape(number: str) -> str:
    """A line that makes ``many``, which is one number in the shape ``dims``."""
    return f"many = ConstantOfShape <value = float[1] {{{number}}}> (dims)\n"


@pytest.mark.parametrize("shape", MORE)
@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (of_shape("-1e38") + "masked = Where (pad, many, scaled)\n" + graphs.REST, "bias_shape"),
        (of_shape("-1e38") + "masked = Max (scaled, many)\n" + graphs.REST, "bias_shape"),
        (of_shape("0.0") + "m = Where (pad, lower, many)\n masked = Add (scaled, m)\n" + graphs.REST, "bias_shape"),
        (of_shape("-5000.0") + "masked = Add (scaled, many)\n" + graphs.REST, "bias_shape"),
        (
            of_shape("1.0") + "b = Cast <to = 9> (many)\n masked = Where (b, scaled, hidden)\n" + graphs.REST,
            "bias_shape",
        ),
        ("masked = Mul (scaled, factor)\n" + graphs.REST, "scale_not_scalar"),
        ("masked = Div (scaled, factor)\n" + graphs.REST, "scale_not_scalar"),
        (
            "masked = Where (pad, hidden, scaled)\n" + SOFTMAX + of_shape("0.0") + "nan = IsNaN (p)\n"
            "probs = Where (nan, many, p)\n out = MatMul (probs, v)\n",
            "probabilities_changed",
        ),
        (
            "masked = Where (pad, some, scaled)\n" + SOFTMAX + of_shape("0.0") + "probs = Where (pad, many, p)\n"
            "out = MatMul (probs, v)\n",
            "probabilities_changed",
        ),
    ],
    ids=["fill", "bound", "added zero", "bias", "condition", "factor", "divisor", "guard's zero", "zeroing zero"],
)
def test_one_number_that_would_make_more_scores_is_refused_with_that_reason(lines: str, code: str, shape: str) -> None:
    dims = [int(n) for n in shape.strip("[]").split(",")]
    proto = graphs.model(
        graphs.LENGTHS + graphs.PRODUCT + lines,
        inputs=f"{PAD_INPUTS}, int64[{len(dims)}] dims, float{shape} factor",
        outputs=f"float[{'1, ' * (len(dims) - 4)}N, 4, S, 8] out",
        constants=CONSTANTS,
    )
    held = graphs.holding(proto, dims=np.array(dims), factor=np.full(dims, 0.5, np.float32))
    reason = only(find(ir.from_proto(held))).reason
    assert reason is not None
    assert reason.code == code
    assert MORE[shape] in reason.text


def test_a_mask_of_the_length_of_a_table_stays_beside_queries_and_keys_of_any_length() -> None:
    """A model of 77 positions may well be declared with any length."""
    body = graphs.LENGTHS + graphs.PRODUCT + "masked = Add (scaled, table)\n" + graphs.REST
    proto = graphs.holding(
        graphs.model(body, inputs=graphs.QKV + ", float[1, 4, 5, 7] table"), table=np.ones((1, 4, 5, 7), np.float32)
    )
    assert only(fuse(proto)[1]).bias_shape == [1, 4, 5, 7]

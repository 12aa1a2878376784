# SPDX-License-Identifier: Apache-2.0
"""A window that FUSED lost is seen however REFERENCE makes it from positions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from exporter import graphs
from python.attention_models import HEAD_DIM, HEADS, SCALE, flash_node, fused

from flash_export.errors import EXIT_NUMBERS_DIFFER, EXIT_OK
from flash_export.window_numbers import numbers_on_positions

Command = Callable[..., int]
WINDOW = 300

_QKV = ", ".join(f"float[batch, {HEADS}, seq, {HEAD_DIM}] {name}" for name in ("query", "key", "value"))
_CONSTANTS = (
    f"float scale = {{{SCALE}}}, float hidden = {{-inf}}, int64 zero = {{0}}, int64 one = {{1}}, "
    f"int64[1] none = {{0}}, int64[1] ax1 = {{1}}, bool yes = {{1}}, int64 size = {{{WINDOW}}}, "
    f"int64[1] sizes = {{{WINDOW}}}, int64 moved = {{-{WINDOW}}}, int64[4] widths = {{{WINDOW}, 0, 0, 0}}, "
    f"float real_size = {{{WINDOW}.0}}"
)
_BEFORE = (
    "length = Shape <start = 2, end = 3> (query)\n n = Squeeze (length)\n j = Range (zero, n, one)\n"
    "i = Unsqueeze (j, ax1)\n past = LessOrEqual (j, i)\n"
    "square = Concat <axis = 0> (length, length)\n trues = Expand (yes, square)\n ones = Cast <to = 1> (trues)\n"
)
_AFTER = (
    "visible = And (past, near)\n kt = Transpose <perm = [0, 1, 3, 2]> (key)\n products = MatMul (query, kt)\n"
    "scaled = Mul (products, scale)\n masked = Where (visible, scaled, hidden)\n"
    "probs = Softmax <axis = -1> (masked)\n output = MatMul (probs, value)\n"
)
_FIRST_ROWS = "far = Slice (tall, none, length, none)\n hides = Cast <to = 9> (far)\n near = Not (hides)\n"
_WAYS = {
    "a triangle moved": "far = Trilu <upper = 0> (ones, moved)\n hides = Cast <to = 9> (far)\n near = Not (hides)\n",
    "a triangle moved by a number made negative": (
        "down = Neg (size)\n far = Trilu <upper = 0> (ones, down)\n hides = Cast <to = 9> (far)\n near = Not (hides)\n"
    ),
    "a triangle below other rows": "low = Trilu <upper = 0> (ones)\n tall = Pad (low, widths)\n" + _FIRST_ROWS,
    "a triangle below a block": (
        "shape = Concat <axis = 0> (sizes, length)\n block = ConstantOfShape (shape)\n low = Trilu <upper = 0> (ones)\n"
        "tall = Concat <axis = 0> (block, low)\n" + _FIRST_ROWS
    ),
    "positions that start earlier": (
        "all = Range (moved, n, one)\n early = Slice (all, none, length, none)\n row = Unsqueeze (early, ax1)\n"
        "near = Greater (j, row)\n"
    ),
    "positions as floats": ("apart = Sub (i, j)\n real = Cast <to = 1> (apart)\n near = Less (real, real_size)\n"),
    "a number computed from others": (
        "third = Constant <value_int = 100> ()\n three = Constant <value_int = 3> ()\n all = Mul (third, three)\n"
        "first = Sub (i, all)\n near = Greater (j, first)\n"
    ),
    "a number chosen by a condition": (
        "other = Constant <value_int = 1> ()\n some = Greater (n, zero)\n by = Where (some, size, other)\n"
        "far = Sub (i, j)\n near = Less (far, by)\n"
    ),
    "a sum of floats": (
        "real_j = Cast <to = 1> (j)\n real_i = Cast <to = 1> (i)\n end = Sum (real_j, real_size)\n"
        "near = Greater (end, real_i)\n"
    ),
    "a number between two": (
        "half = Constant <value_float = 299.5> ()\n apart = Sub (i, j)\n real = Cast <to = 1> (apart)\n"
        "near = Less (real, half)\n"
    ),
}
"""The lines after which ``near`` is i - j < 300."""
_CHUNKS = "of_row = Div (i, size)\n of_key = Div (j, size)\n near = Equal (of_row, of_key)\n"


def _reference(path: Path, lines: str, *, positions: int | None = None, window: int = WINDOW) -> Path:
    """Which refuses lengths past ``positions``, and then compares them with 500 to no effect."""
    outputs = f"float[batch, {HEADS}, seq, {HEAD_DIM}] output"
    before, after, inputs, constants = _BEFORE, _AFTER, _QKV, _CONSTANTS.replace(str(WINDOW), str(window))
    if positions:
        before += "added = Gather (table, j)\n placed = Add (query, added)\n small = Less (j, far_size)\n"
        after = after.replace("(query, kt)", "(placed, kt)").replace("(past, near)", "(within, near)")
        before += "within = And (past, small)\n"
        inputs, constants = f"{inputs}, float[{positions}, {HEAD_DIM}] table", f"{constants}, int64 far_size = {{500}}"
    proto = graphs.model(before + lines + after, inputs=inputs, outputs=outputs, constants=constants)
    if positions:
        proto = graphs.holding(proto, table=np.zeros((positions, HEAD_DIM), np.float32))
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize("way", _WAYS)
def test_a_lost_window_differs_and_the_right_one_passes(tmp_path: Path, flash_trt: Command, way: str) -> None:
    reference = _reference(tmp_path / "u.onnx", _WAYS[way])
    assert flash_trt("compare", fused(tmp_path / "lost.onnx"), reference) == EXIT_NUMBERS_DIFFER
    right = fused(tmp_path / "right.onnx", flash_node(window_left=WINDOW - 1))
    assert flash_trt("compare", right, reference) == EXIT_OK


def test_lost_chunks_differ(tmp_path: Path, flash_trt: Command) -> None:
    reference = _reference(tmp_path / "u.onnx", _CHUNKS)
    assert flash_trt("compare", fused(tmp_path / "lost.onnx"), reference) == EXIT_NUMBERS_DIFFER


@pytest.mark.parametrize("positions", [WINDOW + 2, WINDOW + 10])
def test_a_lost_window_differs_where_positions_end_just_behind_it(
    tmp_path: Path, flash_trt: Command, positions: int
) -> None:
    """i - j <= 300 hides its first key at 302."""
    way = "apart = Sub (i, j)\n near = LessOrEqual (apart, size)\n"
    reference = _reference(tmp_path / "u.onnx", way, positions=positions)
    assert flash_trt("compare", fused(tmp_path / "lost.onnx"), reference) == EXIT_NUMBERS_DIFFER
    assert flash_trt("compare", fused(tmp_path / "right.onnx", flash_node(window_left=WINDOW)), reference) == EXIT_OK


_CUT = "near = Slice (table, none_2, square, axes)\n"


@pytest.mark.parametrize("longest", [400, WINDOW + 1])
@pytest.mark.parametrize("dtype", [np.bool_, np.float32])
def test_a_lost_window_differs_where_the_mask_is_a_table(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], dtype: type, longest: int
) -> None:
    """Which ends at ``longest``: longer inputs are refused."""
    distance = np.subtract.outer(np.arange(longest), np.arange(longest))
    table = np.where(distance < WINDOW, 0, -np.inf) if dtype is np.float32 else distance < WINDOW
    reference, lines = tmp_path / "u.onnx", _CUT
    after = _AFTER
    if dtype is np.float32:
        after = after.replace("And (past, near)", "Identity (past)")
        after = after.replace("(masked)", "(windowed)").replace("probs =", "windowed = Add (masked, near)\n probs =")
    kind = "float" if dtype is np.float32 else "bool"
    inputs = f"{_QKV}, {kind}[{longest}, {longest}] table"
    outputs = f"float[batch, {HEADS}, seq, {HEAD_DIM}] output"
    constants = f"{_CONSTANTS}, int64[2] none_2 = {{0, 0}}, int64[2] axes = {{0, 1}}"
    proto = graphs.model(_BEFORE + lines + after, inputs=inputs, outputs=outputs, constants=constants)
    onnx.save(graphs.holding(proto, table=table.astype(dtype)), reference)
    assert flash_trt("compare", fused(tmp_path / "lost.onnx"), reference) == EXIT_NUMBERS_DIFFER
    capsys.readouterr()
    right = fused(tmp_path / "right.onnx", flash_node(window_left=WINDOW - 1))
    assert flash_trt("compare", right, reference) == EXIT_OK
    assert "warning" not in capsys.readouterr().err


_MOVED = _WAYS["a triangle moved"]


@pytest.mark.parametrize("positions", [320, WINDOW + 1])
def test_a_lost_window_differs_where_the_length_past_a_larger_number_is_refused(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], positions: int
) -> None:
    reference = _reference(tmp_path / "u.onnx", _MOVED, positions=positions)
    assert flash_trt("compare", fused(tmp_path / "lost.onnx"), reference) == EXIT_NUMBERS_DIFFER
    right = fused(tmp_path / "right.onnx", flash_node(window_left=WINDOW - 1))
    capsys.readouterr()
    assert flash_trt("compare", right, reference) == EXIT_OK
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(("own", "code"), [(79, EXIT_OK), (80, EXIT_NUMBERS_DIFFER), (-1, EXIT_NUMBERS_DIFFER)])
def test_a_window_below_a_drawn_length_that_is_refused_is_passed_on_another(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], own: int, code: int
) -> None:
    """Of the drawn lengths, 67 and 131, REFERENCE takes the first alone."""
    reference = _reference(tmp_path / "u.onnx", _MOVED, positions=120, window=80)
    assert flash_trt("compare", fused(tmp_path / "f.onnx", flash_node(window_left=own)), reference) == code
    assert "warning" not in capsys.readouterr().err


_OF_TWO_LENGTHS = (
    "length = Shape <start = 2, end = 3> (query)\n n = Squeeze (length)\n rows = Range (zero, n, one)\n"
    "length_k = Shape <start = 2, end = 3> (key)\n m = Squeeze (length_k)\n j = Range (zero, m, one)\n"
    "i = Unsqueeze (rows, ax1)\n past = LessOrEqual (j, i)\n"
    "far = Sub (i, j)\n near = Less (far, size)\n"
)


_GUARDED = "some = Softmax <axis = -1> (masked)\n none_seen = IsNaN (some)\n probs = Where (none_seen, nothing, some)"


@pytest.mark.parametrize(("own", "code"), [(149, EXIT_OK), (150, EXIT_NUMBERS_DIFFER), (-1, EXIT_NUMBERS_DIFFER)])
def test_a_window_on_the_shorter_of_two_lengths_is_passed(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], own: int, code: int
) -> None:
    """131 queries and 197 keys, counted from their first, have no row that a window of 150 hides a key from."""
    after = _AFTER.replace("probs = Softmax <axis = -1> (masked)", _GUARDED)
    proto = graphs.model(
        _OF_TWO_LENGTHS + after,
        inputs=_QKV,
        outputs=f"float[batch, {HEADS}, seq, {HEAD_DIM}] output",
        constants=_CONSTANTS.replace(str(WINDOW), "150") + ", float nothing = {0.0}",
    )
    pair = [fused(tmp_path / "f.onnx", flash_node(window_left=own)), tmp_path / "u.onnx"]
    onnx.save(proto, pair[1])
    for path in pair:
        model = onnx.load(path)
        for value in model.graph.input[1:]:
            value.type.tensor_type.shape.dim[2].dim_param = "keys"
        onnx.save(model, path)
    assert flash_trt("compare", *pair) == code
    assert "warning" not in capsys.readouterr().err


def test_numbers_that_no_length_taken_is_past_are_warned_of(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    reference, written = _reference(tmp_path / "u.onnx", _MOVED, positions=WINDOW - 20), tmp_path / "v.json"
    fused_file = fused(tmp_path / "f.onnx", flash_node(window_left=WINDOW - 1))
    assert flash_trt("compare", fused_file, reference, "--json", written) == EXIT_OK
    told = " ".join(capsys.readouterr().err.split())
    assert (
        'REFERENCE takes no inputs longer than 500 at node "small", 300 at node "far", '
        "299 in the fused model: where that is the size of a window" in told
    )
    assert json.loads(written.read_text())["runs"] == 6


def _numbers(body: str, *, functions: str = "") -> dict[int, str]:
    text = f"""<ir_version: 9, opset_import: ["" : 18, "own" : 1]>
    main (float[N, 768] x, bool b) => (int64[M] y) <int64[1] start = {{200}}, int64[1] end = {{900}},
        int64[1] first = {{0}}, int64 zero = {{0}}, int64 one = {{1}}, int64 heads = {{12}},
        int64 width = {{768}}, float bias = {{700.0}}> {{
        {body}
    }}
    {functions}"""
    return numbers_on_positions(ir.from_proto(onnx.parser.parse_model(text)))


def test_cuts_of_positions_count_and_those_of_features_do_not() -> None:
    assert {200, 900} <= _numbers(
        "s = Shape <start = 0, end = 1> (x)\n n = Squeeze (s)\n r = Range (zero, n, one)\n y = Slice (r, start, end)"
    ).keys()
    kept = "part = Slice (x, first, end)\n more = Add (x, bias)\n each = Div (width, heads)\n y = Shape (part)"
    assert not {768, 900, 700} & _numbers(kept).keys()


def test_branches_and_functions_count_and_the_node_is_named() -> None:
    found = _numbers(
        "s = Shape <start = 0, end = 1> (x)\n"
        "y = If (b) <then_branch = g () => (t) { t = Add (s, start) }, else_branch = h () => (e) { e = own.Far (s) }>",
        functions="""<domain: "own", opset_import: ["" : 18]>
        Far (a) => (c) { k = Constant <value_int = 450> ()\n c = Sub (a, k) }""",
    )
    assert found[200] == "t"
    assert found[450] == "c"


def test_attributes_of_other_domains_operators_count() -> None:
    ours = "y = own.Attention <local_window_size = 450, window_left = 200, window_right = -1, heads = 12> (x)"
    assert _numbers(ours) == {450: "y", 451: "y", 200: "y", 201: "y"}

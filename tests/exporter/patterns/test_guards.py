# SPDX-License-Identifier: Apache-2.0
"""Whatever replaces NaN among the probabilities by 0 is a guard, as each exporter writes it, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from exporter import graphs

from flash_export import pipeline
from flash_export.options import Options
from flash_export.sites import Site
from flash_export.talk import Talk

INPUTS = graphs.QKV + ", bool[B, 1, 1, T] mask"
CONSTANTS = graphs.CONSTANTS + (
    ", float most = {3.4028234663852886e+38}, float[1] none = {0.0}, float one = {1.0}, double wide_zero = {0.0}"
)
MASKED = graphs.PRODUCT + "masked = Where (mask, scaled, hidden)\n p = Softmax <axis = -1> (masked)\n"
NAN = "nan = IsNaN (p)\n a = Where (nan, none, p)\n"
LATER = (
    "big = Cast <to = 11> (a)\n inf = IsInf (big)\n up = Greater (a, zero)\n inf1 = Cast <to = 9> (inf)\n"
    " up1 = Cast <to = 9> (up)\n top = And (inf1, up1)\n b = Where (top, most, a)\n"
    "big1 = Cast <to = 11> (b)\n neg = IsInf (big1)\n down = Less (b, zero)\n low = And (neg, down)\n"
    "c = Where (low, lowest, b)\n"
)
AT_ONCE = (
    "same = Cast <to = 1> (p)\n down = Less (same, zero)\n inf = IsInf (same)\n low = And (down, inf)\n"
    "b = Where (low, lowest, a)\n same1 = Cast <to = 1> (p)\n up = Greater (same1, zero)\n inf1 = IsInf (same1)\n"
    "top = And (up, inf1)\n c = Where (top, most, b)\n"
)
ZEROED = "inf = IsInf (a)\n b = Where (inf, zero, a)\n c = Identity (b)\n"


def export(folder: Path, body: str, last: str, outputs: str = graphs.OUT) -> Site:
    """The only site of attention whose probabilities p become ``last`` by ``body``, fused and checked."""
    text = MASKED + body + f"out = MatMul ({last}, v)\n"
    onnx.save(graphs.model(text, inputs=INPUTS, constants=CONSTANTS, outputs=outputs), folder / "in.onnx")
    options = Options(source=folder / "in.onnx", output=folder / "out.onnx")
    (site,) = pipeline.run(options, Talk(quiet=True)).sites
    return site


GUARDS = {
    "Where": (NAN, "a"),
    "a cast of the condition": ("n = IsNaN (p)\n nan = Cast <to = 9> (n)\n a = Where (nan, zero, p)\n", "a"),
    "a cast before the test": ("w = Cast <to = 11> (p)\n nan = IsNaN (w)\n a = Where (nan, zero, p)\n", "a"),
    "nan_to_num, each step on the last": (NAN + LATER, "c"),
    "nan_to_num, each step on the first": (NAN + AT_ONCE, "c"),
    "infinities to 0": (NAN + ZEROED, "c"),
    "not equal to itself": ("same = Equal (p, p)\n nan = Not (same)\n a = Where (nan, zero, p)\n", "a"),
    "zeros as long as the probabilities": (
        "nan = IsNaN (p)\n long = Shape (p)\n zeros = Expand (zero, long)\n a = Where (nan, zeros, p)\n",
        "a",
    ),
    "kept where it is no NaN": ("nan = IsNaN (p)\n some = Not (nan)\n a = Where (some, p, zero)\n", "a"),
    "kept where it equals itself": ("same = Equal (p, p)\n a = Where (same, p, none)\n", "a"),
    "kept, then nan_to_num": ("nan = IsNaN (p)\n some = Not (nan)\n a = Where (some, p, none)\n" + LATER, "c"),
    "behind an identity": (f"p0 = Identity (p)\n{NAN.replace('(p)', '(p0)').replace(', p)', ', p0)')}", "a"),
}


@pytest.mark.parametrize(("body", "last"), GUARDS.values(), ids=GUARDS)
def test_a_guard_is_read_and_leaves_nothing_behind(body: str, last: str, tmp_path: Path) -> None:
    assert export(tmp_path, body, last).status == "fused"
    left = {node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node}
    assert not left & {"IsNaN", "IsInf", "Softmax"}


OTHERS = {
    "NaN becomes 1": ("nan = IsNaN (p)\n a = Where (nan, one, p)\n", "a"),
    "all but NaN becomes 0": ("nan = IsNaN (p)\n some = Not (nan)\n a = Where (some, zero, p)\n", "a"),
    "all that is 1": ("nan = Equal (p, one)\n a = Where (nan, zero, p)\n", "a"),
    "what differs from another": ("s = Equal (p, one)\n nan = Not (s)\n a = Where (nan, zero, p)\n", "a"),
    "NaN of other numbers": ("nan = IsNaN (scaled)\n a = Where (nan, zero, p)\n", "a"),
    "what is large becomes a number": (NAN + "up = Greater (a, zero)\n c = Where (up, one, a)\n", "c"),
    "an infinity or what is large": (
        NAN + "inf = IsInf (a)\n up = Greater (a, zero)\n any = Or (inf, up)\n c = Where (any, one, a)\n",
        "c",
    ),
    "kept where it is NaN": ("nan = IsNaN (p)\n a = Where (nan, p, zero)\n", "a"),
    "kept where it is 1": ("some = Equal (p, one)\n a = Where (some, p, zero)\n", "a"),
    "kept where it differs from itself": ("same = Equal (p, p)\n nan = Not (same)\n a = Where (nan, p, zero)\n", "a"),
    "probabilities in the place of an infinity": (NAN + "inf = IsInf (a)\n c = Where (inf, p, a)\n", "c"),
    "probabilities in the place of NaN": ("nan = IsNaN (p)\n a = Where (nan, p, zero)\n", "a"),
}


@pytest.mark.parametrize(("body", "last"), OTHERS.values(), ids=OTHERS)
def test_what_changes_a_probability_is_no_guard(body: str, last: str, tmp_path: Path) -> None:
    site = export(tmp_path, body, last)
    assert site.status == "refused"
    assert site.reason is not None
    assert site.reason.code in ("probabilities_used", "probabilities_changed")


def test_a_condition_that_somebody_else_reads_needs_the_probabilities(tmp_path: Path) -> None:
    site = export(tmp_path, NAN, "a", outputs=graphs.OUT + ", bool[B, 4, S, T] nan")
    assert site.reason is not None
    assert site.reason.code == "probabilities_used"


ONE = "nan = IsNaN (p)\n a = Where (nan, one, p)\n"
OTHER_NUMBERS = {
    "1": (ONE, "a", "1"),
    "1 where it differs from itself": ("same = Equal (p, p)\n nan = Not (same)\n a = Where (nan, one, p)\n", "a", "1"),
    "1 where it is no number": ("nan = IsNaN (p)\n some = Not (nan)\n a = Where (some, p, one)\n", "a", "1"),
    "as nan_to_num writes it": (ONE + LATER, "c", "1"),
    "a tensor": ("nan = IsNaN (p)\n a = Where (nan, given, p)\n", "a", "what is not one known number"),
}


@pytest.mark.parametrize(("body", "last", "number"), OTHER_NUMBERS.values(), ids=OTHER_NUMBERS)
def test_another_number_than_0_in_the_place_of_nan_is_named(body: str, last: str, number: str) -> None:
    text = MASKED + body + f"out = MatMul ({last}, v)\n"
    proto = graphs.model(text, inputs=INPUTS + ", float[1, 1, 1, T] given", constants=CONSTANTS)
    reason = graphs.only(graphs.fuse(proto)[1]).reason
    assert reason is not None
    assert reason.code == "probabilities_changed"
    assert reason.text.startswith(f"Where puts {number} in the place of probabilities that are NaN")
    assert "put 0 there" in reason.action


def test_probabilities_that_somebody_else_reads_are_told_to_be_read_whatever_the_guard_gives() -> None:
    text = MASKED + ONE + "out = MatMul (a, v)\n again = MatMul (p, v)\n"
    proto = graphs.model(text, inputs=INPUTS, constants=CONSTANTS, outputs=graphs.OUT + ", float[B, 4, S, 8] again")
    assert graphs.code(proto) == "probabilities_used"

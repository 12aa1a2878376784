# SPDX-License-Identifier: Apache-2.0
"""The warning of a bias of queries x keys says what makes this one smaller, and where nothing does, it says that."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from flash_export import square_bias
from flash_export.canonical import Attention
from flash_export.find import find
from flash_export.patterns import PATTERNS
from flash_export.patterns.operator import Operator, attention_of
from flash_export.region import Region
from flash_export.sites import Site

MODEL = """<ir_version: 9, opset_import: ["" : 18, "corp" : 1]>
attention (float[B, 4, S, 16] q, float[B, 4, S, 16] k, float[B, 4, S, 16] v, bool[B, 1, 1, S] keep,
           bool[B, 1, S, S] seen, float[B, 1, S, S] added) => (float[B, 4, S, 16] out)
<float low = {-inf}, float zero = {0.0}, float one = {1.0}, float far = {-10000.0}, float farther = {-1e30}>
{
  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  products = MatMul (q, kt)
  length = Shape <start = 2, end = 3> (q)
  square = Concat <axis = 0> (length, length)
  ones = ConstantOfShape <value = float[1] {1.0}> (square)
  triangle = Trilu <upper = 0> (ones)
  causal = Cast <to = 9> (triangle)
  itself = EyeLike <dtype = 9> (ones)
  both = And (causal, keep)
  either = Or (both, itself)
  not_either = Not (either)
  not_both = Not (both)
  not_itself = Not (itself)
  still_hidden = And (not_both, not_itself)
  MASKED
  probs = Softmax <axis = -1> (scores)
  GUARDED
  out = MatMul (guarded, v)
}
"""
PLAIN = "guarded = Identity (probs)"
GUARD = "none = IsNaN (probs)\n guarded = Where (none, zero, probs)"


def site_of(masked: str, guarded: str = PLAIN) -> Site:
    (site,) = find(ir.from_proto(onnx.parser.parse_model(MODEL.replace("MASKED", masked).replace("GUARDED", guarded))))
    assert site.status == "fused", site.reason
    return site


def warning_of(site: Site) -> str:
    assert site.bias_shape == ["B", 1, "S", "S"]
    warning = square_bias.warning([site])
    assert warning is not None
    what, _, do = warning.partition("\n  do: ")
    assert what == "1 attention(s) read a bias of queries x keys: the model builds that tensor, S x S"
    assert do
    assert "what differs for each query (ALiBi, relative positions, a prefix, a mask that is an input) stays" in warning
    return warning


SHOWN_AGAIN = {
    "where": "scores = Where (either, products, low)",
    "not_where": "scores = Where (not_either, low, products)",
    "and_of_hidden": "scores = Where (still_hidden, low, products)",
    "added": "bias = Where (either, zero, low)\n scores = Add (products, bias)",
    "added_hidden": "bias = Where (still_hidden, low, zero)\n scores = Add (products, bias)",
    "with_another": "all = And (either, seen)\n scores = Where (all, products, low)",
}
FINITE = {
    "where": "scores = Where (both, products, farther)",
    "added_where": "bias = Where (both, zero, far)\n scores = Add (products, bias)",
    "added_product": "seen_f = Cast <to = 1> (both)\n left = Sub (one, seen_f)\n bias = Mul (left, far)\n"
    " scores = Add (products, bias)",
}
NEITHER = {
    "input_bias": "scores = Add (products, added)",
    "input_mask": "scores = Where (seen, products, low)",
    "beside_padding": "row = Where (keep, zero, far)\n biased = Add (products, added)\n scores = Add (biased, row)",
}


@pytest.mark.parametrize("masked", SHOWN_AGAIN.values(), ids=SHOWN_AGAIN)
def test_a_term_that_shows_keys_again_is_named(masked: str) -> None:
    warning = warning_of(site_of(masked))
    assert "do: a term that shows keys again, as in `mask | eye`, keeps the mask whole: " in warning
    assert "guard the probabilities with nan_to_num" in warning
    assert "finite" not in warning


@pytest.mark.parametrize("guarded", [PLAIN, GUARD])
def test_without_that_term_and_with_a_guard_the_mask_is_small(guarded: str) -> None:
    site = site_of("scores = Where (both, products, low)", guarded)
    assert site.bias_shape == ["B", 1, 1, "S"]
    assert site.attributes is not None
    assert site.attributes.causal
    assert square_bias.warning([site]) is None


@pytest.mark.parametrize("masked", FINITE.values(), ids=FINITE)
def test_a_large_finite_number_is_named(masked: str) -> None:
    warning = warning_of(site_of(masked))
    assert "do: where it only hides positions, hide them with -inf or a boolean mask, not with a large" in warning
    assert "shows keys again" not in warning


@pytest.mark.parametrize("masked", NEITHER.values(), ids=NEITHER)
def test_what_cannot_be_smaller_gets_no_advice(masked: str) -> None:
    warning = warning_of(site_of(masked))
    assert warning.endswith("do: " + warning[warning.index("what differs") :])
    assert "NaN" not in warning


def test_a_shape_that_broadcasts_or_no_bias_is_not_warned_of() -> None:
    row = site_of("scores = Where (keep, products, low)")
    none = site_of("scores = Identity (products)")
    assert row.bias_shape == ["B", 1, 1, "S"]
    assert none.bias_shape is None
    assert square_bias.warning([row, none]) is None
    assert square_bias.warning([]) is None


def test_several_sites_get_the_advice_of_each_once() -> None:
    sites = [site_of(masked) for masked in (*SHOWN_AGAIN.values(), *FINITE.values(), *NEITHER.values())]
    warning = square_bias.warning(sites)
    assert warning is not None
    assert warning.startswith(f"{len(sites)} attention(s)")
    for part in ("shows keys again", "large finite number", "what differs for each query"):
        assert warning.count(part) == 1


def test_of_a_mask_that_an_own_pattern_makes_its_reader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(anchor: ir.Node, region: Region) -> Attention:
        query, key, value, visible = anchor.inputs
        assert query is not None
        assert key is not None
        assert value is not None
        assert visible is not None
        return attention_of(anchor, Operator(query, key, value, 4, 4, masks=(visible,)), region)

    read.__module__ = "corp_patterns.windows"
    monkeypatch.setitem(PATTERNS, ("corp", "Windowed"), read)
    text = MODEL[: MODEL.index("  MASKED")] + "  out = corp.Windowed (q, k, v, either)\n}\n"
    (site,) = find(ir.from_proto(onnx.parser.parse_model(text)))
    warning = warning_of(site)
    assert "do: the reader in corp_patterns.windows may give a triangle or window as `band` and the rest as" in warning
    assert "shows keys again" not in warning

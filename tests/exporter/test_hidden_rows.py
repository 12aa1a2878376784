# SPDX-License-Identifier: Apache-2.0
"""Each attention is also tried with rows that see no key, on masks that the model's own operators make."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from exporter import graphs
from exporter.graphs import only

from flash_export import check_site, masks, rewrite
from flash_export.boundary import read_boundary
from flash_export.captured import Seen
from flash_export.errors import NumbersDiffer
from flash_export.hidden_rows import HiddenRows
from flash_export.runtime import CannotRun, Session
from flash_export.sites import Site
from flash_export.trials import Trial

PAD = graphs.QKV + ", bool[B, 1, 1, T] pad"
CONSTANTS = graphs.CONSTANTS + ", float some = {-1e9}, float one = {1.0}, int64[2] twice = {1, 2}"
WHERE = "masked = Where (pad, scaled, some)"
SIZES = {"B": 3, "S": 2, "T": 4}


def model(mask: str, inputs: str = PAD) -> onnx.ModelProto:
    return graphs.attention(mask, inputs=inputs, constants=CONSTANTS)


@pytest.mark.parametrize(
    ("mask", "inputs"),
    [
        (WHERE, PAD),
        (WHERE, PAD.replace("bool[B, 1, 1, T]", "bool[1, 1, 1, T]")),
        (WHERE, PAD.replace("bool[B, 1, 1, T]", "bool[1, 1, S, T]")),
        (WHERE, PAD.replace("bool[B, 1, 1, T]", "bool[T]")),
        ("masked = Where (pad, some, scaled)", PAD),
        (
            "wide = Unsqueeze (ones, twice)\n shown = Cast <to = 9> (wide)\n hides = Not (shown)\n"
            "masked = Where (hides, some, scaled)",
            graphs.QKV + ", int64[B, T] ones",
        ),
    ],
    ids=["batch", "one for all", "rows", "keys", "hidden", "integers"],
)
def test_a_number_that_is_taken_for_minus_infinity_is_caught(
    mask: str, inputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = model(mask, inputs)
    assert only(rewrite(proto).sites).status == "fused"
    monkeypatch.setattr(masks, "SWAMPED", -np.inf)
    # Where a mask's 1 hides, the masks of the model's own runs have rows without a key too.
    with pytest.raises(NumbersDiffer, match="masks=" if "pad, some" not in mask else " 0 instead of"):
        rewrite(proto)


def parts(proto: onnx.ModelProto, boundary: tuple[str, ...]) -> tuple[ir.Model, ir.Model, Site]:
    """The model, the same fused, and its site with another boundary."""
    fused, sites = graphs.fuse(proto)
    site = only(sites)
    plain, flash = ir.from_proto(proto), ir.from_proto(fused)
    for values in map(ir.convenience.create_value_mapping, (plain.graph, flash.graph)):
        for name in boundary:
            if name in values and values[name].dtype is None:
                values[name].dtype = ir.DataType.FLOAT
    return plain, flash, Site(**{f: getattr(site, f) for f in site.__slots__} | {"boundary": boundary})


def seen_of(pad: np.ndarray) -> tuple[list[Trial], dict[str, Seen]]:
    q, k, v = graphs.numbers(SIZES)
    trial = Trial("drawn", {"q": q, "k": k, "v": v, "pad": pad}, SIZES, 3)
    return [trial], {"drawn": {"q": q.shape, "k": k.shape, "v": v.shape, "pad": pad}}


def test_the_first_entry_of_a_mask_is_all_0_and_the_last_all_1(tmp_path: Path) -> None:
    plain, flash, site = parts(model(WHERE), ("q", "k", "v", "pad"))
    pad = np.ones((3, 1, 1, 4), bool)
    pad[1:, ..., :2] = False
    trials, seen = seen_of(pad)
    ((name, shown),) = HiddenRows(plain, trials, seen, tmp_path).of(read_boundary(site, plain, flash), seen).items()
    assert name == "drawn masks=0,1"
    changed = shown["pad"]
    assert isinstance(changed, np.ndarray)
    assert changed[:, 0, 0].tolist() == [[False] * 4, [False, False, True, True], [True] * 4]
    assert pad[0].all()  # that of the run itself stays
    assert {n: shown[n] for n in "qkv"} == {n: seen["drawn"][n] for n in "qkv"}


def test_given_values_are_left_alone(tmp_path: Path) -> None:
    plain, flash, site = parts(model(WHERE), ("q", "k", "v", "pad"))
    trials, seen = seen_of(np.ones((3, 1, 1, 4), bool))
    given = [Trial("drawn", trials[0].feeds)]
    assert HiddenRows(plain, given, seen, tmp_path).of(read_boundary(site, plain, flash), seen) == {}


def test_of_a_bias_that_the_model_computes_besides_the_mask_nothing_is_changed(tmp_path: Path) -> None:
    """What stands behind a product of the model would have to be run once more."""
    heads = "weighs = MatMul (k, ends)\n kind = Transpose <perm = [0, 1, 3, 2]> (weighs)\n"
    lines = heads + "bias = Where (pad, kind, some)\n masked = Add (scaled, bias)"
    proto = graphs.holding(model(lines, PAD + ", float[8, 1] ends"), ends=np.ones((8, 1), np.float32))
    plain, flash, site = parts(proto, ("q", "k", "v", "bias"))
    trials, seen = seen_of(np.ones((3, 1, 1, 4), bool))
    seen["drawn"] = {**{n: seen["drawn"][n] for n in "qkv"}, "bias": np.ones((3, 4, 1, 4), np.float32)}
    assert HiddenRows(plain, trials, seen, tmp_path).of(read_boundary(site, plain, flash), seen) == {}


def test_where_the_unfused_attention_does_not_run_so_the_others_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky(Session):
        def run(self, feeds, outputs=None):  # type: ignore[no-untyped-def]
            if "pad" in feeds and not feeds["pad"].reshape(len(feeds["pad"]), -1).any(-1).all():
                raise CannotRun("a row without a key")
            return super().run(feeds, outputs)

    monkeypatch.setattr(check_site, "open_session", lambda model, folder: Picky(model, folder))
    assert only(rewrite(model(WHERE)).sites).status == "fused"


def test_what_rounding_does_to_rows_without_a_key_lends_the_others_nothing() -> None:
    """A float64 that float32 does not hold: a guarded row is 0 in float32, and the mean of V in float64."""
    lines = (
        graphs.LENGTHS
        + graphs.PRODUCT
        + (
            "many = Cast <to = 1> (far)\n masked = Where (pad, scaled, many)\n p = Softmax <axis = -1> (masked)\n"
            "nan = IsNaN (p)\n probs = Where (nan, zero, p)\n out = MatMul (probs, v)\n"
        )
    )
    result = rewrite(graphs.model(lines, inputs=PAD, constants=CONSTANTS + ", double far = {-1e300}"))
    assert only(result.sites).status == "fused", only(result.sites).reason
    runs = [run for run in result.report["check"]["runs"] if run["kind"] == "site"]
    tolerance = {"masks=" in run["setting"]: run["tolerance"] for run in runs}
    assert tolerance[False] < 1e-5 < tolerance[True]

# SPDX-License-Identifier: Apache-2.0
"""The check holds one attention's scores at a time, however many layers and settings there are."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from exporter import graphs

from flash_export import captured, check, check_model, model_noise, runtime, trials
from flash_export.find import find
from flash_export.op import DOMAIN
from flash_export.rewrite import rewrite
from flash_export.runtime import AnySession, Session
from flash_export.sites import Site

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))}
HEAD = '<ir_version: 9, opset_import: ["": 18]>\n'


def layers(count: int, length: int) -> ir.Model:
    """Attentions in a row, each with a bias of queries x keys that is computed from its queries."""
    lines = []
    for i in range(count):
        lines.append(
            f"k{i} = Mul (x{i}, half)\n kt{i} = Transpose <perm = [0, 1, 3, 2]> (k{i})\n s{i} = MatMul (x{i}, kt{i})\n"
            f"r{i} = Sin (x{i})\n b{i} = MatMul (r{i}, table)\n t{i} = Tanh (b{i})\n m{i} = Add (s{i}, t{i})\n"
            f"p{i} = Softmax <axis = -1> (m{i})\n o{i} = MatMul (p{i}, k{i})\n x{i + 1} = Add (o{i}, x{i})"
        )
    shape = f"float[1, 1, {length}, 8]"
    table = ", ".join(f"{x:.3f}" for x in np.random.default_rng(0).standard_normal(8 * length))
    constants = f"float half = {{0.5}}, float[8, {length}] table = {{{table}}}"
    return ir.from_onnx_text(f"{HEAD} g ({shape} x0) => ({shape} x{count}) <{constants}> {{ {' '.join(lines)} }}")


def anonymous() -> int:
    """Bytes of memory that this process holds and that no file backs."""
    (kilobytes,) = re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def peak() -> int:
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def checked(folder: Path, count: int, length: int) -> tuple[check.CheckResult, list[Site], check_model.Expected]:
    """A full check of such a model, and what its unfused run gave."""
    model, plain = layers(count, length), folder / "plain.onnx"
    ir.save(model, plain)
    sites = find(model)
    rewrite(model, sites)
    ir.save(model, folder / "fused.onnx")
    expected: list[check_model.Expected] = []

    def run_unfused(*arguments: object) -> check_model.Expected:
        expected.append(check_model.run_unfused(*arguments))  # type: ignore[arg-type]
        return expected[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "run_unfused", run_unfused)
        result = check.check(plain, folder / "fused.onnx", sites, reference=None, example={}, dims={}, values=None)
    return result, sites, expected[0]


def kept(expected: check_model.Expected) -> int:
    arrays = [x for seen in expected.seen.values() for x in seen.values() if isinstance(x, np.ndarray)]
    return sum(x.nbytes for x in arrays)


def measured(result: check.CheckResult) -> list[tuple[object, ...]]:
    """All but the tolerance of the whole model: where arrays are computed anew its noise is measured once."""
    keys = ("kind", "name", "setting", "passed", "max_abs_error", "score_spread", "compared")
    return [tuple(run.get(key) for key in keys) for run in result.runs]


def test_large_arrays_at_the_edge_of_sites_are_computed_for_their_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, sites, expected = checked(tmp_path, 3, 70)
    assert [s.status for s in sites] == ["fused"] * 3
    assert kept(expected) >= 3 * trials.STATIC_TRIALS * 4 * 70**2

    monkeypatch.setattr(captured, "MOST_ELEMENTS", 2 * 70**2)
    monkeypatch.setattr(captured, "SMALL_ELEMENTS", 70)
    later, _, expected = checked(tmp_path, 3, 70)
    assert kept(expected) == 0
    assert measured(later) == measured(now), "computed anew they are the same numbers"


@pytest.mark.parametrize(("beside", "layers_above"), [(8, False), (70, True)])
def test_they_are_computed_from_what_is_small_beside_them(
    beside: int, layers_above: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias of 70 x 70 from queries of 70 x 8, not from the model's input through all layers above."""
    sizes: list[int] = []

    def open_session(model: ir.Model, folder: Path) -> AnySession:
        sizes.append(len(model.graph))
        return runtime.open_session(model, folder)

    now, _, _ = checked(tmp_path, 3, 70)
    monkeypatch.setattr(captured, "open_session", open_session)
    monkeypatch.setattr(captured, "MOST_ELEMENTS", 6 * 70 * 8 * trials.STATIC_TRIALS)
    monkeypatch.setattr(captured, "SMALL_ELEMENTS", 70)
    monkeypatch.setattr(captured, "SMALL_BESIDE", beside)
    later, _, _ = checked(tmp_path, 3, 70)
    assert measured(later) == measured(now)
    assert len(sizes) == 3 * trials.STATIC_TRIALS
    assert (max(sizes) > 10) == layers_above, sizes


def test_a_site_that_is_wrong_is_found_with_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_ELEMENTS", 70)
    monkeypatch.setattr(captured, "SMALL_ELEMENTS", 70)
    model = layers(2, 70)
    ir.save(model, tmp_path / "plain.onnx")
    sites = find(model)
    rewrite(model, sites)
    node = next(n for n in model.graph if n.domain == DOMAIN)
    node.attributes["scale"] = ir.AttrFloat32("scale", 1.01 * node.attributes["scale"].as_float())
    ir.save(model, tmp_path / "fused.onnx")
    with pytest.raises(check.NumbersDiffer):
        check.check(
            tmp_path / "plain.onnx", tmp_path / "fused.onnx", sites, reference=None, example={}, dims={}, values=None
        )


def test_an_output_that_is_kept_keeps_no_memory_of_its_session(tmp_path: Path) -> None:
    scores = 4 * 4 * 2048**2
    grown = measured_alone("kept", tmp_path)
    assert grown < scores, "three sessions each made scores of 64 MiB twice and are gone"


def test_the_largest_score_of_each_layer_is_taken_where_it_stands(tmp_path: Path) -> None:
    """Else a run holds the scores of all layers until its end."""
    assert measured_alone("largest", tmp_path) < 12 * 4 * 1500**2, "40 layers: fewer than twelve scores at once"


# --- in a process of its own: what other tests have freed there counts as held ---------------------------------------


def measured_alone(what: str, folder: Path) -> int:
    """Bytes that ``what`` takes."""
    child = subprocess.run(
        [sys.executable, __file__, what, str(folder)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return int(child.stdout)


def grown_by_kept_outputs(folder: Path) -> int:
    model = ir.from_proto(graphs.model(graphs.PLAIN))
    feeds = {name: np.ones((1, 4, 2048, 8), np.float32) for name in "qkv"}
    Session(model, folder).run({name: array[:, :, :2] for name, array in feeds.items()})
    before = anonymous()
    kept = [Session(model, folder).run(feeds) for _ in range(3)]
    gc.collect()
    assert len(kept) == 3
    return anonymous() - before


def peak_of_largest_scores(folder: Path) -> int:
    model_noise.open_wide = lambda *_: None  # type: ignore[assignment]

    def run_unfused(count: int, length: int) -> None:
        given = [[trials.Trial("one", {"x0": np.zeros((1, 1, length, 8), np.float32)})]]
        products = [f"s{i}" for i in range(count)]
        check_model.run_unfused(layers(count, length), given, [], products, folder)

    run_unfused(1, 10)
    start = peak()
    run_unfused(40, 1500)
    return peak() - start


if __name__ == "__main__":
    ways = {"kept": grown_by_kept_outputs, "largest": peak_of_largest_scores}
    print(ways[sys.argv[1]](Path(sys.argv[2])))

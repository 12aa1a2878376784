# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from flash_export.runtime import CannotRun, EvaluatorSession, Session, cast_array, open_session

DOUBLE = """<ir_version: 9, opset_import: ["": 18]>
    g (float[n] x) => (float[n] y) <float[1] w = {2.0}> { y = Mul(x, w) }"""
UNKNOWN = """<ir_version: 9, opset_import: ["": 18, "nobody": 1]>
    g (float[n] x) => (float[n] y) { y = nobody.Knows(x) }"""


def test_feeds_are_cast_to_what_the_model_takes_and_surplus_ones_left_out(tmp_path: Path) -> None:
    session = Session(ir.from_onnx_text(DOUBLE), tmp_path)
    half = np.array([1.5, -3.0], ml_dtypes.bfloat16)
    assert session.run({"x": half, "other": np.ones(1)})[0].tolist() == [3.0, -6.0]


def test_a_refusal_is_one_line_of_onnx_runtimes_own_words(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="Knows") as caught:
        Session(ir.from_onnx_text(UNKNOWN), tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(CannotRun, match="Knows"):
        open_session(ir.from_onnx_text(UNKNOWN), tmp_path)
    with pytest.raises(CannotRun, match="x"):
        Session(ir.from_onnx_text(DOUBLE), tmp_path).run({})


def test_the_reference_evaluator_takes_over_where_onnx_runtime_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CannotRun("not today")

    monkeypatch.setattr(Session, "__init__", refuse)
    session = open_session(ir.from_onnx_text(DOUBLE), tmp_path)
    assert isinstance(session, EvaluatorSession)
    assert session.run({"x": np.array([2.0])})[0].dtype == np.float32


def test_weights_beside_the_model_are_read_where_they_lie_and_no_copy_is_left(tmp_path: Path) -> None:
    model = ir.from_onnx_text(DOUBLE)
    model.graph.initializers["w"].const_value = ir.tensor(np.full(1000, 2.0, np.float32), name="w")
    model.graph.initializers["w"].shape = ir.Shape([1000])
    (tmp_path / "model").mkdir()
    ir.save(model, tmp_path / "model" / "m.onnx", external_data="m.data")
    (tmp_path / "scratch").mkdir()
    session = Session(ir.load(tmp_path / "model" / "m.onnx"), tmp_path / "scratch")
    assert session.run({"x": np.ones(1000, np.float32)})[0].sum() == 2000.0
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize(("most_lent", "smallest", "saved"), [(2**31, 0, 0), (0, 0, 1), (2**31, 2**16, 1)])
def test_large_weights_in_memory_are_lent_and_pass_through_a_file_only_where_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_lent: int, smallest: int, saved: int
) -> None:
    monkeypatch.setattr("flash_export.runtime._INLINE_BYTES", 0)
    monkeypatch.setattr("flash_export.runtime._EXTERNAL_FROM_BYTES", 0)
    monkeypatch.setattr("flash_export.runtime._LENT_BYTES", most_lent)
    monkeypatch.setattr("flash_export.runtime._LENT_FROM_BYTES", smallest)
    files: list[Path] = []
    save = ir.save
    monkeypatch.setattr(ir, "save", lambda model, path, **told: (files.append(path), save(model, path, **told)))
    session = Session(ir.from_onnx_text(DOUBLE), tmp_path)
    gc.collect()
    assert session.run({"x": np.array([4.0])})[0].tolist() == [8.0]
    assert len(files) == saved
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["FLOAT8E5M2", "BFLOAT16", "BOOL", "INT8"])
def test_weights_of_any_type_stand_beside_lent_ones(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy has no such type of its own for the first two."""
    monkeypatch.setattr("flash_export.runtime._INLINE_BYTES", 40)
    monkeypatch.setattr("flash_export.runtime._LENT_FROM_BYTES", 0)
    text = """<ir_version: 9, opset_import: ["": 19]> g (float[n] x) => (float[n] y)
        <float[7] w = {1, 2, 3, 4, 5, 6, 7}> { wide = Cast <to = 1> (narrow) s = Mul (x, w) y = Add (s, wide) }"""
    model = ir.from_onnx_text(text)
    ones = ir.tensor(np.ones(7, ir.DataType[dtype].numpy()), name="narrow")
    given = next(v for node in model.graph for v in node.inputs if v is not None and v.name == "narrow")
    given.const_value, given.dtype, given.shape = ones, ones.dtype, ir.Shape([7])
    model.graph.register_initializer(given)
    found = Session(model, tmp_path).run({"x": np.ones(7, np.float32)})[0]
    assert found.tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_a_fill_stays_a_fill_on_its_way_to_a_wider_type() -> None:
    low = np.array([np.finfo(np.float16).min], np.float16)
    assert cast_array(low, np.dtype(np.float32))[0] == np.finfo(np.float32).min
    assert cast_array(np.array([3]), np.dtype(np.int32)).dtype == np.int32


def test_the_reference_evaluator_tells_nobody_of_infinities(recwarn: pytest.WarningsRecorder) -> None:
    odd = ir.from_onnx_text('<ir_version: 9, opset_import: ["": 18]> g (float[n] x) => (float[n] y) { y = Log(x) }')
    (y,) = EvaluatorSession(odd).run({"x": np.array([0.0, -1.0], np.float32)})
    assert np.isneginf(y[0])
    assert np.isnan(y[1])
    assert not recwarn.list


def test_where_neither_runs_a_model_onnx_runtime_is_heard_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CannotRun("no kernel for this")

    monkeypatch.setattr(Session, "__init__", refuse)
    session = open_session(ir.from_onnx_text(DOUBLE), tmp_path)
    with pytest.raises(CannotRun, match="no kernel for this; and in onnx's reference evaluator: 'x'"):
        session.run({})


def test_the_reference_evaluator_takes_no_big_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ir.from_onnx_text(DOUBLE)
    EvaluatorSession(model)
    monkeypatch.setattr("flash_export.runtime._EVALUATED_BYTES", 3)
    with pytest.raises(CannotRun, match="4 bytes of weights"):
        EvaluatorSession(model)


EINSUM = """<ir_version: 9, opset_import: ["": 18, "ours": 1]>
    g (float[n, 3] x) => (float[n, n] y) { y = ours.Inner(x) }
    <domain: "ours", opset_import: ["": 18]>
    Inner (x) => (y) { y = Einsum <equation = "ad,bd->ab"> (x, x) }"""


def test_an_empty_array_where_an_einsum_is_is_refused_before_it_ends_the_process(tmp_path: Path) -> None:
    session = Session(ir.from_onnx_text(EINSUM), tmp_path)
    with pytest.raises(CannotRun, match=r"x is empty, \[0, 3\].*no length of 0"):
        session.run({"x": np.ones((0, 3))})
    assert session.run({"x": np.ones((1, 3))})[0].tolist() == [[3.0]]
    assert Session(ir.from_onnx_text(DOUBLE), tmp_path).run({"x": np.ones(0)})[0].size == 0

# SPDX-License-Identifier: Apache-2.0
"""A comparison passes an honest pair and catches each fault seeded into the fused side."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from python.attention_models import BF16, FLOAT, HALF, HEAD_DIM, HEADS, SCALE, flash_node, fused, unfused

from flash_export.errors import (
    EXIT_MISSING,
    EXIT_NUMBERS_DIFFER,
    EXIT_OK,
    EXIT_UNSAFE,
    EXIT_UNSUPPORTED,
    EXIT_USAGE,
    NumbersDiffer,
)
from flash_trt import compare, engine_file
from flash_trt.compare_inputs import InputOptions, plan_runs
from flash_trt.onnx_file import read
from flash_trt.verdict import OutputVerdict

Command = Callable[..., int]
DTYPES = {"fp32": FLOAT, "fp16": HALF, "bf16": BF16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_honest_pair_passes(tmp_path: Path, flash_trt: Command, dtype: str) -> None:
    reference = unfused(tmp_path / "unfused.onnx", dtype=DTYPES[dtype])
    assert flash_trt("compare", fused(tmp_path / "fused.onnx", dtype=DTYPES[dtype]), reference) == EXIT_OK


FAULTS = {
    "scale x 1.01": [flash_node(scale=SCALE * 1.01)],
    "not causal": [flash_node(causal=0)],
    "key and value swapped": [flash_node(("query", "value", "key"))],
    "mask off by one": [flash_node(causal=0, window_right=1)],
    "mask short by one": [flash_node(window_left=64)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_caught(tmp_path: Path, flash_trt: Command, fault: str, dtype: str) -> None:
    reference = unfused(tmp_path / "unfused.onnx", dtype=DTYPES[dtype])
    wrong = fused(tmp_path / "fused.onnx", *FAULTS[fault], dtype=DTYPES[dtype])
    assert flash_trt("compare", wrong, reference) == EXIT_NUMBERS_DIFFER


def test_heads_in_another_order_are_caught(tmp_path: Path, flash_trt: Command) -> None:
    order = helper.make_node("Gather", ["made", "order"], ["output"], axis=1)
    wrong = fused(
        tmp_path / "fused.onnx", flash_node(output="made"), order, constants={"order": np.array([1, 0, 2], np.int64)}
    )
    assert flash_trt("compare", wrong, unfused(tmp_path / "unfused.onnx")) == EXIT_NUMBERS_DIFFER


def test_every_verdict_is_written_whether_it_passes_or_not(tmp_path: Path, flash_trt: Command) -> None:
    reference, written = unfused(tmp_path / "unfused.onnx"), tmp_path / "deep" / "verdict.json"
    for name, nodes, passed in (("right", [], True), ("wrong", [flash_node(causal=0)], False)):
        flash_trt("compare", fused(tmp_path / f"{name}.onnx", *nodes), reference, "--json", written, "--repeats", 1)
        verdict = json.loads(written.read_text())
        assert verdict["passed"] is passed
        assert verdict["runs"] == len(verdict["outputs"]) == 3
        assert {"run", "output", "kind", "why", "max_abs_error", "tolerance"} <= set(verdict["outputs"][0])


def test_a_failed_run_can_be_replayed_from_its_saved_inputs(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = fused(tmp_path / "f.onnx", flash_node(scale=SCALE * 1.01)), unfused(tmp_path / "u.onnx")
    flags = ("--save-inputs", tmp_path / "deep" / "runs", "--json", tmp_path / "verdict.json")
    assert flash_trt("compare", *pair, *flags) == EXIT_NUMBERS_DIFFER
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert len(verdict["inputs"]) == verdict["runs"] == 6
    first = next(output for output in verdict["outputs"] if output["kind"] == "differs")
    replay = verdict["inputs"][first["run"]]
    assert f"replay this run with --values {replay}" in " ".join(capsys.readouterr().err.split())
    flags = ("--values", replay, "--json", tmp_path / "again.json")
    assert flash_trt("compare", *pair, *flags) == EXIT_NUMBERS_DIFFER
    (again,) = json.loads((tmp_path / "again.json").read_text())["outputs"]
    assert again["max_abs_error"] == first["max_abs_error"]


def test_runs_differ_in_sizes_seeds_and_spread(tmp_path: Path, flash_trt: Command) -> None:
    written = tmp_path / "verdict.json"
    flash_trt("compare", fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx"), "--json", written)
    runs = [output["run"] for output in json.loads(written.read_text())["outputs"]]
    assert len(set(runs)) == 6
    assert any("seq=1 " in run for run in runs)
    assert {run.rsplit(maxsplit=1)[-1] for run in runs} == {"x1", "x3"}


def test_shapes_limit_the_lengths_drawn(tmp_path: Path, flash_trt: Command) -> None:
    written = tmp_path / "verdict.json"
    limit = f"query:1x{HEADS}x3x{HEAD_DIM},1x{HEADS}x5x{HEAD_DIM},1x{HEADS}x7x{HEAD_DIM}"
    arguments = ("compare", fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx"), "--json", written)
    assert flash_trt(*arguments, "--shape", limit) == EXIT_OK
    runs = [output["run"] for output in json.loads(written.read_text())["outputs"]]
    assert all(run.startswith(("batch=1 seq=7 ", "batch=1 seq=3 ")) for run in runs)


# --- NaN and missing outputs ------------------------------------------------------------------------------------------


def _values(path: Path, **changed: np.ndarray) -> Path:
    rng = np.random.default_rng(5)
    shape, names = (2, HEADS, 9, HEAD_DIM), ("query", "key", "value")
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name in names}
    np.savez(path, **(arrays | changed))
    return path


@pytest.mark.parametrize(
    ("number", "kind", "told", "do"),
    [
        (np.nan, "nan_in_inputs", "input value holds NaN itself", "do give inputs without NaN"),
        (np.inf, "nan_in_both", "NaN on both sides", "do give inputs on which REFERENCE gives numbers"),
    ],
)
def test_nan_from_an_input_and_nan_that_both_sides_make_are_classes_of_their_own(
    tmp_path: Path,
    flash_trt: Command,
    capsys: pytest.CaptureFixture[str],
    number: float,
    kind: str,
    told: str,
    do: str,
) -> None:
    value = np.ones((2, HEADS, 9, HEAD_DIM), np.float32)
    value[0, 1, 8, 3] = number  # hidden from all rows but the last: 0 * inf
    values, written = _values(tmp_path / "values.npz", value=value), tmp_path / "verdict.json"
    arguments = ("compare", fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx"), "--values", values)
    assert flash_trt(*arguments, "--json", written) == EXIT_NUMBERS_DIFFER
    assert json.loads(written.read_text())["outputs"][0]["kind"] == kind
    said = " ".join(capsys.readouterr().err.split())
    assert told in said
    assert do in said
    assert "check the export" not in said


def test_a_fault_is_told_before_an_output_that_holds_nan_of_the_inputs() -> None:
    faults = [
        OutputVerdict(run, "output", kind, "why", 0.0, 0.0, 0.0)
        for run, kind in (("first", "nan_in_inputs"), ("second", "differs"))
    ]
    options = compare.CompareOptions(Path("f"), Path("u"))
    with pytest.raises(NumbersDiffer) as caught:
        compare._require_passed(compare.Comparison(tuple(faults), "", {}), options)
    assert "second" in caught.value.where
    assert caught.value.do.startswith("check the export")


def test_nan_of_the_reference_alone_fails_as_a_class_of_its_own(tmp_path: Path, flash_trt: Command) -> None:
    # Row 0 sees keys up to -1: none. Softmax of -inf alone is NaN, FlashAttention gives 0.
    reference = unfused(tmp_path / "u.onnx", offset=-1)
    written = tmp_path / "verdict.json"
    model = fused(tmp_path / "f.onnx", flash_node(causal=0, window_right=0, has_kv_lengths=0))
    values = _values(tmp_path / "values.npz")
    assert flash_trt("compare", model, reference, "--values", values, "--json", written) == EXIT_NUMBERS_DIFFER
    assert json.loads(written.read_text())["outputs"][0]["kind"] == "nan_in_reference"


def test_an_output_of_one_side_only_fails(tmp_path: Path, flash_trt: Command) -> None:
    written = tmp_path / "verdict.json"
    extra = helper.make_node("Identity", ["output"], ["copy"])
    model = fused(tmp_path / "f.onnx", flash_node(), extra, outputs={"output": FLOAT, "copy": FLOAT})
    assert flash_trt("compare", model, unfused(tmp_path / "u.onnx"), "--json", written) == EXIT_NUMBERS_DIFFER
    assert {o["output"]: o["kind"] for o in json.loads(written.read_text())["outputs"]} == {
        "output": "passed",
        "copy": "missing",
    }


# --- comparisons that would prove nothing -----------------------------------------------------------------------------


def _empty(path: Path, **sizes: int) -> Path:
    """Inputs of ``batch`` and ``seq``, one of which is 0."""
    shape = (sizes.get("batch", 2), HEADS, sizes.get("seq", 9), HEAD_DIM)
    np.savez(path, **{name: np.zeros(shape, np.float32) for name in ("query", "key", "value")})
    return path


@pytest.mark.parametrize("dim", ["batch", "seq"])
def test_outputs_without_elements_are_told_to_prove_nothing(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], dim: str
) -> None:
    values, written = _empty(tmp_path / "values.npz", **{dim: 0}), tmp_path / "verdict.json"
    arguments = ("compare", fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx"), "--values", values)
    assert flash_trt(*arguments, "--json", written) == EXIT_USAGE
    verdict = json.loads(written.read_text())
    assert verdict["passed"] is False
    assert [(o["kind"], o["compared"]) for o in verdict["outputs"]] == [("empty", 0)]
    told = " ".join(capsys.readouterr().err.split())
    assert "nothing to compare with" in told
    assert "without any element" in told
    assert "--values" in told


def _with_second_output(tmp_path: Path, *extra: onnx.NodeProto, **constants: np.ndarray) -> tuple[Path, Path]:
    """A fused and an unfused model, both with ``extra`` computing a second output, "more"."""
    pair = fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx")
    for path in pair:
        model = onnx.load(path)
        model.graph.node.extend(extra)
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
        model.graph.output.append(helper.make_tensor_value_info("more", FLOAT, list("abcd")))
        onnx.save(model, path)
    return pair


def test_an_output_that_is_infinite_in_every_run_proves_nothing(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    far = helper.make_node("Add", ["output", "infinity"], ["more"])
    pair = _with_second_output(tmp_path, far, infinity=np.array(np.inf, np.float32))
    assert flash_trt("compare", *pair, "--json", tmp_path / "v.json") == EXIT_USAGE
    assert "output more" in " ".join(capsys.readouterr().err.split())
    kinds = {o["output"]: o["kind"] for o in json.loads((tmp_path / "v.json").read_text())["outputs"]}
    assert kinds == {"output": "passed", "more": "infinite"}


def test_an_empty_output_beside_one_with_numbers_is_no_failure(tmp_path: Path, flash_trt: Command) -> None:
    none = helper.make_node("Slice", ["output", "start", "start"], ["more"])
    pair = _with_second_output(tmp_path, none, start=np.array([0], np.int64))
    assert flash_trt("compare", *pair, "--json", tmp_path / "v.json") == EXIT_OK
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert verdict["passed"] is True
    assert {o["output"]: o["kind"] for o in verdict["outputs"]} == {"output": "passed", "more": "empty"}


@pytest.mark.parametrize("how", ["same", "copy", "link"])
def test_a_file_is_not_compared_with_itself(tmp_path: Path, flash_trt: Command, how: str) -> None:
    model = fused(tmp_path / "m.onnx")
    other = model if how == "same" else tmp_path / "other.onnx"
    if how == "copy":
        shutil.copy(model, other)
    elif how == "link":
        other.symlink_to(model)
    assert flash_trt("compare", model, other) == EXIT_USAGE


def test_a_reference_with_the_same_body_is_warned_of(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    other = fused(tmp_path / "other.onnx", flash_node(name="another"))
    flash_trt("compare", fused(tmp_path / "m.onnx"), other)
    told = " ".join(capsys.readouterr().err.split())
    assert "same function body as FUSED" in told


def test_two_unfused_files_are_warned_of(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    flash_trt("compare", unfused(tmp_path / "a.onnx", offset=1), unfused(tmp_path / "b.onnx"))
    assert "nothing of ours is compared" in capsys.readouterr().err


# --- inputs that respect the model ------------------------------------------------------------------------------------


def _embedding_model(path: Path, *, scale: float = 1.0, positions: int = 2) -> Path:
    """token ids -> table[9] + positions[``positions``], masked by attention_mask, times ``scale``."""
    rng = np.random.default_rng(3)
    constants = {
        "table": rng.standard_normal((9, 4)).astype(np.float32),
        "places": rng.standard_normal((positions, 4)).astype(np.float32),
        "factor": np.array(scale, np.float32),
        "zero": np.array(0, np.int64),
        "one": np.array(1, np.int64),
        "second": np.array(1, np.int64),
        "last": np.array([2], np.int64),
    }
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["words"]),
        helper.make_node("Shape", ["ids"], ["shape"]),
        helper.make_node("Gather", ["shape", "second"], ["length"]),
        helper.make_node("Range", ["zero", "length", "one"], ["numbers"]),
        helper.make_node("Gather", ["places", "numbers"], ["placed"]),
        helper.make_node("Add", ["words", "placed"], ["sum"]),
        helper.make_node("Cast", ["mask"], ["kept"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["kept", "last"], ["kept_wide"]),
        helper.make_node("Mul", ["sum", "kept_wide"], ["masked"]),
        helper.make_node("Mul", ["masked", "factor"], ["output"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"]) for name in ("ids", "mask")]
    outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", "seq", 4])]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def test_ids_stay_in_their_table_and_lengths_past_the_positions_are_left_out(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    # Lengths of 67 and 131, and an eighth and a 32nd of them, do not fit 2 positions; that of 1 does.
    same = _embedding_model(tmp_path / "a.onnx", scale=1.0)
    model = onnx.load(same)
    model.doc_string = "another file of the same numbers"
    onnx.save(model, tmp_path / "b.onnx")
    assert flash_trt("compare", tmp_path / "b.onnx", same) == EXIT_OK
    assert "refused 4 of 6" in " ".join(capsys.readouterr().err.split())
    assert flash_trt("compare", _embedding_model(tmp_path / "c.onnx", scale=1.001), same) == EXIT_NUMBERS_DIFFER


def test_a_reference_that_takes_no_inputs_says_what_to_do(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (_embedding_model(tmp_path / "a.onnx", scale=2.0), _embedding_model(tmp_path / "b.onnx"))
    assert flash_trt("compare", *arguments, "--shape", "ids:2x60,2x60,2x60") == EXIT_USAGE
    assert "--shape" in capsys.readouterr().err


def test_models_with_other_inputs_are_refused(tmp_path: Path, flash_trt: Command) -> None:
    arguments = (_embedding_model(tmp_path / "a.onnx"), unfused(tmp_path / "b.onnx"))
    assert flash_trt("compare", *arguments) == EXIT_USAGE


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", None])
def test_unreadable_values_are_refused(tmp_path: Path, flash_trt: Command, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "values.npz").write_bytes(content)
    arguments = ("compare", fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx"))
    assert flash_trt(*arguments, "--values", tmp_path / "values.npz") == EXIT_USAGE


# --- what cannot run here ---------------------------------------------------------------------------------------------


def test_a_fused_file_without_its_body_is_refused_with_the_reason(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = fused(tmp_path / "f.onnx", fallback=False)
    assert flash_trt("compare", bare, unfused(tmp_path / "u.onnx")) == EXIT_UNSUPPORTED
    assert "--no-fallback" in capsys.readouterr().err


def test_a_reference_that_onnx_runtime_does_not_load_runs_in_onnxs_evaluator(
    tmp_path: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    real = onnxruntime.InferenceSession

    def refuse_the_reference(model: object, *arguments: object, **options: object) -> object:
        if str(model).endswith("u.onnx"):
            raise RuntimeError("not this one")
        return real(model, *arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse_the_reference)
    reference = unfused(tmp_path / "u.onnx")
    assert flash_trt("compare", fused(tmp_path / "f.onnx"), reference) == EXIT_OK
    assert flash_trt("compare", fused(tmp_path / "f.onnx", flash_node(causal=0)), reference) == EXIT_NUMBERS_DIFFER


def test_inputs_that_cannot_be_saved_are_refused_before_anything_runs(
    tmp_path: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (models := (fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx"))):
        model = onnx.load(path)
        model.graph.input[0].name = "a\0b"
        for node in model.graph.node:
            node.input[:] = ["a\0b" if name == "query" else name for name in node.input]
        onnx.save(model, path)
    assert flash_trt("compare", *models) == EXIT_OK
    monkeypatch.setattr(compare, "_run_all", lambda *_: pytest.fail("the models ran"))
    assert flash_trt("compare", *models, "--save-inputs", tmp_path / "runs") == EXIT_USAGE
    assert "a name without NUL" in capsys.readouterr().err
    assert not list((tmp_path / "runs").iterdir())


def test_an_engine_needs_its_sidecar_and_a_gpu(
    rtx: object, tmp_path: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flash_trt.gpu.devices", list)
    model, reference = fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx")
    assert flash_trt("build", model, "-o", tmp_path / "f.engine", "--target", "sm80") == EXIT_OK
    assert flash_trt("compare", tmp_path / "f.engine", reference) == EXIT_MISSING
    with (tmp_path / "f.engine").open("ab") as file:
        file.write(b"tampered")
    assert flash_trt("compare", tmp_path / "f.engine", reference) == EXIT_UNSAFE
    assert flash_trt("compare", tmp_path / "f.engine", reference, "--trust-engine") == EXIT_MISSING


def test_inputs_for_an_engine_stay_within_the_shapes_it_was_built_for(
    rtx: object, tmp_path: Path, flash_trt: Command
) -> None:
    built_for = f"query:1x{HEADS}x3x{HEAD_DIM},1x{HEADS}x5x{HEAD_DIM},2x{HEADS}x7x{HEAD_DIM}"
    model, engine, reference = fused(tmp_path / "f.onnx"), tmp_path / "f.engine", unfused(tmp_path / "u.onnx")
    assert flash_trt("build", model, "-o", engine, "--target", "sm80", "--shape", built_for) == EXIT_OK
    planned = plan_runs(InputOptions(), read(reference), engine_file.read(engine))
    sizes = [trial.feeds["query"].shape for choices in planned for trial in choices]
    assert sizes
    assert all(batch <= 2 and 3 <= length <= 7 for batch, _, length, _ in sizes)
    assert flash_trt("compare", engine, reference, "--values", _values(tmp_path / "values.npz")) == EXIT_USAGE


def test_missing_polygraphy_ends_with_5_and_names_the_extra(
    tmp_path: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "polygraphy.logger", None)
    assert flash_trt("compare", fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx")) == EXIT_MISSING
    assert 'pip install "polygraphy>=' in capsys.readouterr().err


def test_the_same_seed_gives_the_same_verdicts(tmp_path: Path, flash_trt: Command) -> None:
    arguments = ("compare", fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx"), "--seed", 7, "--json")
    for name in ("one.json", "two.json"):
        assert flash_trt(*arguments, tmp_path / name) == EXIT_OK
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()


def _head_model(path: Path, *, nudge: float = 1.0, order: np.ndarray | None = None) -> Path:
    """[1, 64] -> one logit after eight layers; ``nudge`` scales the last weights, ``order`` reorders the first sums."""
    rng = np.random.default_rng(11)
    layers = [(rng.standard_normal((64, 64)) * 1.2 / 8).astype(np.float32) for _ in range(8)]
    constants = {f"layer_{i}": layer for i, layer in enumerate(layers)}
    constants["last"] = (rng.standard_normal((64, 1)) * nudge).astype(np.float32)
    constants["order"] = np.arange(64) if order is None else order
    constants["layer_0"] = constants["layer_0"][constants["order"]]
    nodes, value = [helper.make_node("Gather", ["x", "order"], ["shuffled"], axis=1)], "shuffled"
    for i in range(len(layers)):
        nodes.append(helper.make_node("MatMul", [value, f"layer_{i}"], [f"product_{i}"]))
        nodes.append(helper.make_node("Tanh", [f"product_{i}"], [value := f"state_{i}"]))
    nodes.append(helper.make_node("MatMul", [value, "last"], ["logit"]))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])]
    outputs = [helper.make_tensor_value_info("logit", TensorProto.FLOAT, [1, 1])]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def test_one_logit_is_judged_by_more_than_its_own_rounding(tmp_path: Path, flash_trt: Command) -> None:
    reference = _head_model(tmp_path / "a.onnx")
    # The same numbers added up in another order: honest, and rounded otherwise.
    reordered = _head_model(tmp_path / "b.onnx", order=np.random.default_rng(1).permutation(64))
    for seed in range(0, 300, 20):
        assert flash_trt("compare", reordered, reference, "--seed", seed, "--repeats", 1) == EXIT_OK, seed
    wrong = _head_model(tmp_path / "c.onnx", nudge=1.0001)
    assert flash_trt("compare", wrong, reference) == EXIT_NUMBERS_DIFFER


def test_values_that_no_input_takes_are_refused_by_name(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    values = _values(tmp_path / "values.npz", masks=np.ones(3, np.float32))
    pair = fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx")
    assert flash_trt("compare", *pair, "--values", values) == EXIT_USAGE
    assert "got   masks" in capsys.readouterr().err


def _with_negative_dims(path: Path) -> Path:
    """The model with -1 where it has names, as older exporters of PyTorch and TensorFlow write it."""
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = -1
    onnx.save(model, path)
    return path


def test_negative_dims_are_dynamic_ones_for_every_command(tmp_path: Path, flash_trt: Command) -> None:
    model, reference = (_with_negative_dims(p) for p in (fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx")))
    sizes = [f"{name}:2x{HEADS}x9x{HEAD_DIM}" for name in ("query", "key", "value")]
    shapes = [word for size in sizes for word in ("--shape", size)]
    written = tmp_path / "v.json"
    assert flash_trt("run", model, *shapes) == EXIT_OK
    assert flash_trt("compare", model, reference, *shapes, "--json", written) == EXIT_OK
    assert "query.0=2 query.2=9" in json.loads(written.read_text())["outputs"][0]["run"]
    assert flash_trt("compare", model, reference) == EXIT_OK
    wrong = _with_negative_dims(fused(tmp_path / "w.onnx", flash_node(scale=1.01 * SCALE)))
    assert flash_trt("compare", wrong, reference) == EXIT_NUMBERS_DIFFER
    at = ",".join(f"{name}.{axis}=2" for name in ("query", "key", "value") for axis in (0, 2))
    assert flash_trt("bench", model, reference, "--seconds", 0, "--at", at) == EXIT_OK


def test_a_model_of_large_outputs_is_run_on_fewer_rows(tmp_path: Path) -> None:
    """All outputs of all runs are held; 131 positions of three rows would be 20 million numbers."""
    values = [helper.make_tensor_value_info("x", FLOAT, ["batch", "seq", 1])]
    outputs = [helper.make_tensor_value_info("y", FLOAT, ["batch", "seq", 50257])]
    weight = numpy_helper.from_array(np.ones((1, 50257), np.float32), "weight")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "weight"], ["y"])], "logits", values, outputs, [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "u.onnx")
    shapes = [
        choices[0].feeds["x"].shape[:2] for choices in plan_runs(InputOptions(repeats=1), read(tmp_path / "u.onnx"))
    ]
    assert max(batch for batch, _ in shapes) > 1
    assert max(length for _, length in shapes) == 131
    assert all(batch * length * 50257 < 2**23 for batch, length in shapes)

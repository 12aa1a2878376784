# SPDX-License-Identifier: Apache-2.0
"""A comparison has a set of inputs that is longer than the windows of its attentions, or says that it has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from python.attention_models import FLOAT, HEAD_DIM, HEADS, flash_node, fused, unfused

from flash_export import dim_ranges
from flash_export.errors import EXIT_MISSING, EXIT_NUMBERS_DIFFER, EXIT_OK
from flash_export.trials import Trial
from flash_trt import compare, compare_choice, compare_fault

Command = Callable[..., int]
WINDOW = 300


def _pair(tmp_path: Path, own: int = WINDOW, window: int = WINDOW) -> tuple[Path, Path]:
    return (
        fused(tmp_path / "f.onnx", flash_node(window_left=own)),
        unfused(tmp_path / "u.onnx", window=window),
    )


def _in_range(path: Path, seq: int) -> Path:
    dim_ranges.write(path, {"batch": (1, 64), "seq": (1, seq)})
    return path


def _static(path: Path, seq: int) -> Path:
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        for dim, size in zip(value.type.tensor_type.shape.dim, (1, HEADS, seq, HEAD_DIM), strict=True):
            dim.Clear()
            dim.dim_value = size
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("own", [WINDOW - 1, WINDOW + 1, WINDOW + 100, -1])
def test_a_wrong_or_missing_window_past_all_drawn_lengths_differs(tmp_path: Path, flash_trt: Command, own: int) -> None:
    assert flash_trt("compare", *_pair(tmp_path, own)) == EXIT_NUMBERS_DIFFER
    ranged = [_in_range(path, WINDOW + 2) for path in _pair(tmp_path, own)]
    assert flash_trt("compare", *ranged) == EXIT_NUMBERS_DIFFER  # the longest, which REFERENCE's own number asks for


@pytest.mark.parametrize("seq", [None, WINDOW + 2, 4096])
def test_a_right_window_passes_on_one_longer_set_of_inputs(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], seq: int | None
) -> None:
    pair, written = [_in_range(path, seq) if seq else path for path in _pair(tmp_path)], tmp_path / "v.json"
    assert flash_trt("compare", *pair, "--json", written) == EXIT_OK
    verdict = json.loads(written.read_text())
    assert (verdict["runs"], verdict["windows_not_compared"]) == (7, [])
    last = verdict["outputs"][-1]["run"]
    assert "batch=1 " in last
    assert " full " in last  # padding could hide what the window hides
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(("seq", "runs"), [(131, 6), (WINDOW, 6), (WINDOW + 1, 7)])
def test_a_window_that_no_length_of_the_model_passes_is_nothing_to_compare(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], seq: int, runs: int
) -> None:
    """At 301 REFERENCE's number, 300, may be that of keys a row sees, which would show."""
    written = tmp_path / "v.json"
    assert flash_trt("compare", *(_in_range(p, seq) for p in _pair(tmp_path)), "--json", written) == EXIT_OK
    assert (verdict := json.loads(written.read_text()))["runs"] == runs
    assert verdict["windows_not_compared"] == []
    assert flash_trt("compare", *(_static(p, 40) for p in _pair(tmp_path))) == EXIT_OK
    assert "warning" not in capsys.readouterr().err


def _shape(seq: int) -> str:
    return f"query:1x{HEADS}x1x{HEAD_DIM},1x{HEADS}x50x{HEAD_DIM},2x{HEADS}x{seq}x{HEAD_DIM}"


def test_shapes_of_the_user_that_end_before_a_window_are_warned_of(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, written = _pair(tmp_path), tmp_path / "v.json"
    assert flash_trt("compare", *pair, "--shape", _shape(WINDOW + 1), "--json", written) == EXIT_OK
    told = " ".join(capsys.readouterr().err.split())
    assert 'window_left 300 of node "attention" (needs a length of 302)' in told
    (entry,) = json.loads(written.read_text())["windows_not_compared"]
    assert entry == {"node": "attention", "attribute": "window_left", "size": 300, "length_needed": 302}
    assert flash_trt("compare", *pair, "--shape", _shape(WINDOW + 2)) == EXIT_OK
    assert "warning" not in capsys.readouterr().err


def test_a_window_whose_scores_would_be_too_large_is_warned_of(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash_trt("compare", *_pair(tmp_path, 100_000, 100_000)) == EXIT_OK
    assert "(needs a length of 100002)" in " ".join(capsys.readouterr().err.split())


def test_a_window_to_the_right_of_a_causal_mask_hides_nothing_anyway(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = fused(tmp_path / "f.onnx", flash_node(window_right=100_000)), unfused(tmp_path / "u.onnx")
    assert flash_trt("compare", *pair) == EXIT_OK
    assert "warning" not in capsys.readouterr().err


def test_a_number_of_reference_whose_scores_would_be_too_large_is_warned_of(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """FUSED lost the window."""
    assert flash_trt("compare", fused(tmp_path / "f.onnx"), unfused(tmp_path / "u.onnx", window=4000)) == EXIT_OK
    told = " ".join(capsys.readouterr().err.split())
    assert 'inputs longer than 4000 at node "first" were not tried, since they ask for too much memory' in told


def _beside_a_short_one(tmp_path: Path, *, rows: int) -> tuple[Path, Path]:
    """FUSED has two nodes with one window, and of the second only the first ``rows`` are an output."""
    nodes = [flash_node(window_left=100), flash_node(output="all", name="short", window_left=100)]
    pair = fused(tmp_path / "f.onnx", *nodes), unfused(tmp_path / "u.onnx", window=100)
    for path, source in zip(pair, ("all", "output"), strict=True):
        model = onnx.load(path)
        bounds = {"from_": [0], "to": [rows], "along": [2]}
        model.graph.initializer.extend(numpy_helper.from_array(np.array(v), name) for name, v in bounds.items())
        model.graph.node.append(helper.make_node("Slice", [source, *bounds], ["first_rows"]))
        model.graph.output.append(helper.make_tensor_value_info("first_rows", FLOAT, ["batch", HEADS, "r", HEAD_DIM]))
        onnx.save(model, path)
    return pair


def test_each_window_is_left_out_alone(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "v.json"
    assert flash_trt("compare", *_beside_a_short_one(tmp_path, rows=40), "--json", written) == EXIT_OK
    (entry,) = json.loads(written.read_text())["windows_not_compared"]
    assert (entry["node"], entry["size"]) == ("short", 100)
    assert 'window_left 100 of node "short"' in " ".join(capsys.readouterr().err.split())
    assert flash_trt("compare", *_beside_a_short_one(tmp_path, rows=120), "--json", written) == EXIT_OK
    assert json.loads(written.read_text())["windows_not_compared"] == []
    monkeypatch.setattr(compare_fault, "_MOST_LOADED", 1000)
    assert flash_trt("compare", *_beside_a_short_one(tmp_path, rows=40), "--json", written) == EXIT_OK
    assert json.loads(written.read_text())["windows_not_compared"] == []
    assert "scales and windows of its attentions were made wrong all at once" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize(
    ("error", "longest", "code"),
    [
        ("std::bad_alloc", 200, EXIT_OK),
        ("Failed to allocate memory for requested buffer of size 5", 200, EXIT_OK),
        ("std::bad_alloc", 100, EXIT_MISSING),
        ("Non-zero status code", 200, EXIT_NUMBERS_DIFFER),
    ],
)
def test_a_lack_of_memory_is_no_difference(
    tmp_path: Path,
    flash_trt: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: str,
    longest: int,
    code: int,
) -> None:
    """FUSED fails past the ``longest``; only the run for the windows can be left out."""

    def infer(runner: object, trial: Trial) -> object:
        return RuntimeError(error) if trial.feeds["query"].shape[2] > longest else compare_choice.infer(runner, trial)

    monkeypatch.setattr(compare, "infer", infer)
    assert flash_trt("compare", *_pair(tmp_path)) == code
    told = " ".join(capsys.readouterr().err.split())
    assert (code == EXIT_MISSING) == ("too little memory for the model" in told)
    assert (code == EXIT_OK) == ("not tried, since they ask for too much memory" in told)

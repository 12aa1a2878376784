# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from flash_export import trials
from flash_export.errors import UsageError
from flash_export.trials import Trial, plan_trials

MODEL = ir.from_onnx_text(
    """<ir_version: 9, opset_import: ["": 18]>
    g (float[b,s,4] x, int64[b,s] keep) => (float[b,s,4] y) { y = Identity(x) }"""
)


def plan(model: ir.Model = MODEL, **changes: object) -> list[list[Trial]]:
    settings: dict = {"example": {}, "ranges": {}, "values": None, "seed": 0} | changes
    return plan_trials(model, **settings).trials


def test_drawn_trials_come_first_and_a_whole_example_last() -> None:
    example = {"x": np.zeros((1, 3, 4), np.float32), "keep": np.ones((1, 3), np.int64)}
    names = [choices[0].name for choices in plan(example=example)]
    assert names == ["b=3 s=67 seed=0", "b=1 s=1 seed=1", "b=2 s=131 seed=2", "example"]
    assert len(plan(example={"x": example["x"]})) == 3


def test_nothing_is_drawn_at_the_sizes_of_the_example() -> None:
    example = {"x": np.zeros((1, 1, 4), np.float32), "keep": np.ones((1, 1), np.int64)}
    names = [choices[0].name for choices in plan(example=example)]
    assert names == ["b=3 s=67 seed=0", "b=2 s=131 seed=1", "example"]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("batch", "keys"), [("b", "s"), ("b", "99"), ("1", "99")])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_each_kind_of_padding_is_among_the_rows_of_a_mask(
    batch: str, keys: str, rows: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the example has: a mask of ones as a rule."""
    if large:
        monkeypatch.setattr(trials, "SMALL_MODEL_BYTES", -1)
    text = f'<ir_version: 9, opset_import: ["": 18]> g (int64[{batch},{keys}] keep) => (bool[{batch},{keys}] y)'
    model = ir.from_onnx_text(text + " { y = Cast<to = 9>(keep) }")
    example = {"keep": np.ones((rows if batch == "b" else 1, 67), np.int64)} if rows else {}
    planned = plan(model, example=example)
    drawn = [choices for choices in planned if choices[0].name != "example"]
    assert [first.batch for first, *_ in drawn] == ([3, 1, 2] if batch == "b" else [0] * trials.STATIC_TRIALS)
    kinds = set()
    for first, *_ in drawn:
        for row in first.feeds["keep"]:
            edges = np.flatnonzero(np.diff(row))
            kinds.add("full" if row.all() else "holes" if len(edges) > 1 else "left" if row[-1] else "right")
    assert kinds == {"right", "left", "holes"} | ({"full"} if batch == "b" else set())


def test_lengths_are_drawn_beside_an_example_of_full_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several rows: each number of keys ends elsewhere."""
    monkeypatch.setattr(trials, "SMALL_MODEL_BYTES", -1)
    model = ir.from_onnx_text(
        """<ir_version: 9, opset_import: ["": 18]> g (int64[b] n) => (bool[b,7] y)
        <int64[7] j = {0,1,2,3,4,5,6}, int64[1] one = {1}> { m = Unsqueeze (n, one)  y = Less (j, m) }"""
    )
    drawn = plan(model, example={"n": np.full(3, 7)})
    lengths = np.concatenate([first.feeds["n"] for first, *_ in drawn[:-1]])
    assert [first.batch for first, *_ in drawn[:-1]] == [3, 1, 2]
    assert lengths.min() < 7


@pytest.mark.parametrize(("rows", "settings"), [
    (2, ["b=1 seed=0", "example"]), (1, ["b=3 seed=0", "example"]), (0, ["b=1 seed=0", "b=3 seed=1"]),
])  # fmt: skip
def test_a_large_model_without_masks_or_lengths_is_tried_with_one_row_and_with_several(
    rows: int, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "SMALL_MODEL_BYTES", -1)
    text = '<ir_version: 9, opset_import: ["": 18]> g (float[b,9] pixels) => (float[b,9] y) { y = Identity(pixels) }'
    example = {"pixels": np.zeros((rows, 9), np.float32)} if rows else {}
    drawn = plan(ir.from_onnx_text(text), example=example)
    assert [first.name for first, *_ in drawn] == settings


def test_another_seed_draws_other_numbers() -> None:
    assert not np.array_equal(plan()[0][0].feeds["x"], plan(seed=10)[0][0].feeds["x"])


def write(folder: Path, **arrays: np.ndarray) -> Path:
    path = folder / "values.npz"
    np.savez(path, **arrays)
    return path


def test_values_are_the_only_trial_and_more_arrays_than_needed_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path, x=np.zeros((1, 3, 4)), keep=np.ones((1, 3)), other=np.ones(1))
    ((trial,),) = plan(values=path)
    assert trial.name == "values"
    assert set(trial.feeds) == {"x", "keep"}


def no_such_file(folder: Path) -> Path:
    return folder / "none.npz"


def text(folder: Path) -> Path:
    (folder / "text.npz").write_text("hello")
    return folder / "text.npz"


def empty(folder: Path) -> Path:
    (folder / "empty.npz").touch()
    return folder / "empty.npz"


def truncated(folder: Path) -> Path:
    path = write(folder, x=np.zeros((1, 3, 4)), keep=np.ones((1, 3)))
    path.write_bytes(path.read_bytes()[:200])
    return path


def one_array(folder: Path) -> Path:
    np.save(folder / "one.npy", np.zeros(3))
    return folder / "one.npy"


def objects(folder: Path) -> Path:
    return write(folder, x=np.array([{"a": 1}], dtype=object), keep=np.ones((1, 3)))


@pytest.mark.parametrize("make", [no_such_file, text, empty, truncated, one_array, objects])
def test_values_that_are_no_npz_of_plain_arrays_are_refused(make, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the values.*(\n.*)*numpy\.savez"):
        plan(values=make(tmp_path))


def test_a_missing_input_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"lack an input(\n.*)*add keep"):
        plan(values=write(tmp_path, x=np.zeros((1, 3, 4))))
    with pytest.raises(UsageError, match=r"array x(\n.*)*\[1, 3, 5\]"):
        plan(values=write(tmp_path, x=np.zeros((1, 3, 5)), keep=np.ones((1, 3))))


ODD = {
    "complex": ("x", np.complex64(1)),
    "text": ("x", np.str_("1")),
    "time": ("x", np.datetime64("2026-11-29")),
    "half an index": ("keep", 0.5),
    "an index that is NaN": ("keep", np.nan),
    "an index beyond int64": ("keep", np.uint64(2**63)),
}


@pytest.mark.parametrize("name", ODD)
def test_values_of_a_type_that_the_input_does_not_hold_are_refused(name: str, tmp_path: Path) -> None:
    to, number = ODD[name]
    arrays = {"x": np.ones((1, 3, 4)), "keep": np.ones((1, 3))}
    arrays[to] = np.full(arrays[to].shape, number)
    with pytest.raises(UsageError, match=rf"array {to}(\n.*)*numbers that"):
        plan(values=write(tmp_path, **arrays))


def test_values_may_be_wider_than_the_input_and_may_hold_nan_and_infinity(tmp_path: Path) -> None:
    for number in (1, True, 0.1, np.nan, -np.inf, np.float16(0.1)):
        plan(values=write(tmp_path, x=np.full((1, 3, 4), number), keep=np.ones((1, 3), np.uint8)))


def test_an_output_of_another_shape_than_declared_makes_a_trial_unfair() -> None:
    """Lengths that must be equal were broadcast: the model ran, but on something that it is not for."""
    trial = Trial("drawn", {}, {"b": 2, "s": 1})
    (output,) = MODEL.graph.outputs
    assert trial.why_unfair({output: np.zeros((2, 1, 4))}) == ""
    assert "[2, 5, 4]" in trial.why_unfair({output: np.zeros((2, 5, 4))})
    assert Trial("example", {}).why_unfair({output: np.zeros((9, 9, 9))}) == ""

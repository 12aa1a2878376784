# SPDX-License-Identifier: Apache-2.0
"""Dims such as ``2*n - 1``, ``s//2`` and ``past + seq``: a shape tells their names, by which every command draws."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from flash_export import dim_texts
from flash_export.errors import EXIT_OK, EXIT_USAGE, UsageError
from flash_trt import onnx_file, shape_agreement, tensor_files
from flash_trt.compare_inputs import InputOptions, plan_runs
from flash_trt.compare_ranges import rooms
from flash_trt.engine_file import EngineFile
from flash_trt.lengths import read
from flash_trt.onnx_file import GraphInput
from flash_trt.shapes import parse, plan_profile

Command = Callable[..., int]


@pytest.mark.parametrize(
    ("dim", "size", "span"),
    [
        ("2*n - 1", 7, (4, 4)),
        ("2*n - 1", 8, None),
        ("n - 1", 0, (1, 1)),
        ("(n + 1)*2", 8, (3, 3)),
        ("n//2", 4, (8, 9)),
        ("(n + 15)//16", 1, (1, 16)),
        ("64//n", 8, (8, 8)),
        ("10 - n", 3, (7, 7)),
        ("n*n", 49, (7, 7)),
        ("n*(8 - n)", 16, (4, 4)),
        ("1.5*n", 3, None),
    ],
)
def test_a_size_tells_the_name_in_an_expression(dim: str, size: int, span: tuple[int, int] | None) -> None:
    assert read(dim).solutions("n", size, {}) == span


def test_a_long_dim_is_not_asked_for_number_after_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer takes long where a stranger wrote hundreds of factors."""
    asked: list[int] = []
    length_at = dim_texts.length_at
    monkeypatch.setattr(dim_texts, "length_at", lambda dim, sizes: asked.append(1) or length_at(dim, sizes))
    assert read("*".join("s" * 249)).solutions("s", 7, {}) is None
    assert len(asked) < 100


@pytest.mark.parametrize("dim", ["2", "2*2", "floor(n/2)", "seq-len", "Max(1, n)", "a b", "n.1 + 2", "n" * 501])
def test_what_cannot_be_read_is_a_name(dim: str) -> None:
    assert read(dim).is_name
    profile = plan_profile([GraphInput("x", 1, (dim,))], [parse("x:7")])
    assert profile.lengths == {dim: (7, 7, 7)}


@pytest.mark.parametrize("dim", ["2*n - 1", "(n + 1)*2", "n//2 + 1", "n - 1"])
def test_what_one_input_tells_another_is_computed_from(dim: str) -> None:
    inputs = [GraphInput("x", 1, ("batch", dim)), GraphInput("y", 1, ("batch", "n + 1"))]
    sizes = [read(dim).at({"n": n}) for n in (4, 6, 8)]
    given = parse("x:" + ",".join(f"1x{size}" for size in sizes))
    profile = plan_profile(inputs, [given])
    assert profile.lengths["n"][:2] == (4, 6)
    assert profile.ranges[1].smallest == (1, 5)
    assert not profile.chosen


def test_a_default_makes_an_expression_a_length_with_elements() -> None:
    profile = plan_profile([GraphInput("x", 1, ("batch", "n - 3"))], [])
    assert profile.chosen["n"] == (4, 128, 512)
    limited = plan_profile(
        [GraphInput("x", 1, ("batch", "2*n - 1")), GraphInput("y", 1, ("n + 1",))], [], {"n": (2, 50)}
    )
    assert [str(range_) for range_ in limited.ranges] == ["x:1x3,1x99,8x99", "y:3,51,51"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["x:3x8"], r"a whole number for n in 2\*n - 1: \[batch, 2\*n - 1\]"),
        (["x:3x101"], r"n in 2\.\.50"),
        (["x:3x1"], r"n in 2\.\.50"),
        (["x:3x7", "y:9"], r"n \+ 1 = 5,5,5, since n = 4,4,4, as --shape x says"),
        (["x:1x3,1x5,1x7", "y:3,4,6"], r"n \+ 1 = 3,4,5, since n = 2,3,4, as --shape x says"),
        (["z:7", "x:3x7"], r"2\*n - 1 = 13,13,13, since n = 7,7,7, as --shape z says"),
    ],
)
def test_shapes_that_no_length_makes_or_that_disagree_are_refused(given: list[str], words: str) -> None:
    inputs = [GraphInput("x", 1, ("batch", "2*n - 1")), GraphInput("y", 1, ("n + 1",)), GraphInput("z", 1, ("n",))]
    with pytest.raises(UsageError, match=words):
        plan_profile(inputs, [parse(text) for text in given], {"n": (2, 50)})


def test_a_size_that_several_lengths_make_keeps_their_range() -> None:
    inputs = [GraphInput("x", 1, ("s//4",)), GraphInput("y", 1, ("s",))]
    assert plan_profile(inputs, [parse("x:4")]).lengths["s"] == (16, 16, 19)
    assert plan_profile(inputs, [parse("x:4"), parse("y:18")]).lengths["s"] == (18, 18, 18)
    assert plan_profile(inputs, [parse("x:4")], {"s": (18, 30)}).lengths["s"] == (18, 18, 19)
    with pytest.raises(UsageError, match=r"s//4 = 5,5,5, since s = 20,20,20"):
        plan_profile(inputs, [parse("x:4"), parse("y:20")])


MULTIPLE = [GraphInput("w", 7, ("batch", "h")), GraphInput("x", 1, ("batch", "4*h", 32))]


def test_a_multiple_must_agree_with_its_name_at_every_bound() -> None:
    given = [parse("w:1x2,2x4,4x10"), parse("x:1x8x32,2x16x32,4x40x32")]
    assert plan_profile(MULTIPLE, given, {"h": (2, 10)}).lengths["h"] == (2, 4, 10)
    for wrong in ("x:1x8x32,2x16x32,4x4000x32", "x:1x4x32,2x16x32,4x40x32", "x:1x8x32,2x20x32,4x40x32"):
        with pytest.raises(UsageError, match=r"4\*h = 8,16,40, since h = 2,4,10, as --shape w says") as caught:
            plan_profile(MULTIPLE, [given[0], parse(wrong)], {"h": (2, 10)})
        assert caught.value.got == wrong


SUM = [GraphInput("ids", 7, ("b", "s")), GraphInput("mask", 7, ("b", "p + s")), GraphInput("key", 1, ("b", "p", 16))]


def test_a_sum_cannot_be_more_than_its_parts_at_their_largest_or_less_than_at_their_smallest() -> None:
    parts = [parse("ids:1x1,1x3,1x40"), parse("key:1x2x16,1x70x16,1x500x16")]
    assert plan_profile(SUM, [*parts, parse("mask:1x3,1x73,1x540")])
    for wrong in ("mask:1x3,1x73,1x541", "mask:1x2,1x73,1x540"):
        with pytest.raises(UsageError, match=r"p \+ s in 3\.\.540, since p = 2,70,500, s = 1,3,40, as --shape key and"):
            plan_profile(SUM, [*parts, parse(wrong)])


def test_a_sum_tells_the_part_that_nothing_else_does() -> None:
    profile = plan_profile(SUM, [parse("ids:1x1,1x3,1x40"), parse("mask:1x1,1x73,1x512")])
    assert profile.lengths["p"] == (0, 70, 472)
    assert not profile.chosen
    with pytest.raises(UsageError, match=r"a whole number for p in p \+ s, where s = 30"):
        plan_profile(SUM, [parse("ids:1x30"), parse("mask:1x20")])


def test_a_sum_whose_parts_no_other_input_has_is_any_size() -> None:
    mask = [GraphInput("mask", 7, ("b", "past + s"))]
    profile = plan_profile(mask, [parse("mask:1x5,2x50,4x60")], {"past": (0, 40), "s": (1, 20)})
    assert profile.lengths == {"b": (1, 2, 4), "s": (5, 20, 20), "past": (0, 30, 40)}
    assert plan_profile(mask, [parse("mask:1x7")]).lengths["s"] == (7, 7, 7)
    with pytest.raises(UsageError, match=r"a size that s, past make in past \+ s, s in 1\.\.20, past in 0\.\.40"):
        plan_profile(mask, [parse("mask:1x61")], {"past": (0, 40), "s": (1, 20)})


# --- the commands -----------------------------------------------------------------------------------------------------


def _model(path: Path, dims: dict[str, list[str | int]], ranges: dict[str, list[int]]) -> Path:
    """Gives back the shapes of its inputs."""
    helper, kinds = onnx.helper, onnx.TensorProto
    given = [helper.make_tensor_value_info(name, kinds.FLOAT, shape) for name, shape in dims.items()]
    told = [helper.make_tensor_value_info(f"{name}_shape", kinds.INT64, [len(dims[name])]) for name in dims]
    nodes = [helper.make_node("Shape", [name], [f"{name}_shape"]) for name in dims]
    model = helper.make_model(helper.make_graph(nodes, "g", given, told), opset_imports=[helper.make_opsetid("", 18)])
    helper.set_model_props(model, {"flash_export.dims": json.dumps(ranges)})
    onnx.save(model, path)
    return path


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    return _model(tmp_path / "odd.onnx", {"x": ["b", "2*n - 1"], "y": ["b", "n + 1"]}, {"b": [1, 9], "n": [2, 50]})


@pytest.fixture
def summed(tmp_path: Path) -> Path:
    dims: dict[str, list[str | int]] = {"ids": ["b", "s"], "key": ["b", "p"], "mask": ["b", "p + s"]}
    return _model(tmp_path / "summed.onnx", dims, {"b": [1, 9], "s": [1, 200], "p": [0, 200]})


def test_a_run_takes_the_shape_given(odd: Path, tmp_path: Path, flash_trt: Command) -> None:
    assert flash_trt("run", odd, "--shape", "x:3x7", "-o", tmp_path / "out.npz") == EXIT_OK
    told = tensor_files.read(tmp_path / "out.npz")
    assert [told["x_shape"].tolist(), told["y_shape"].tolist()] == [[3, 7], [3, 5]]
    for wrong in (["x:3x8"], ["x:3x7", "y:3x9"], ["x:3x999"]):
        assert flash_trt("run", odd, *(word for text in wrong for word in ("--shape", text))) == EXIT_USAGE


def test_a_name_with_a_hyphen_has_the_length_given(tmp_path: Path, flash_trt: Command) -> None:
    model = _model(tmp_path / "m.onnx", {"x": ["batch-size", "seq-len"]}, {})
    assert plan_profile(onnx_file.read(model).inputs, []).chosen == {"batch-size": (1, 1, 8), "seq-len": (1, 128, 512)}
    assert flash_trt("run", model, "--shape", "x:3x7", "-o", tmp_path / "out.npz") == EXIT_OK
    assert tensor_files.read(tmp_path / "out.npz")["x_shape"].tolist() == [3, 7]
    assert {shapes["x"] for shapes in _drawn(model, "x:3x7")} == {(3, 7)}


def _drawn(model: Path, *given: str, engine: EngineFile | None = None) -> list[dict[str, tuple[int, ...]]]:
    planned = plan_runs(InputOptions(shapes=given), onnx_file.read(model), engine)
    return [{name: array.shape for name, array in trial.feeds.items()} for choices in planned for trial in choices]


def test_a_comparison_stays_within_the_shapes_given(odd: Path, summed: Path) -> None:
    drawn = _drawn(odd, "x:3x7,3x9,3x15")
    assert {shapes["x"][0] for shapes in drawn} == {3}
    assert {7, 15} <= {shapes["x"][1] for shapes in drawn} <= {7, 9, 11, 13, 15}
    given = ("ids:1x1,2x20,3x90", "key:1x0,2x20,3x90", "mask:1x1,2x40,3x100")
    drawn = _drawn(summed, *given)
    assert max(shapes["mask"][1] for shapes in drawn) <= 100
    assert all(shapes["mask"][1] == shapes["ids"][1] + shapes["key"][1] for shapes in drawn)
    assert {shapes["mask"][1] for shapes in _drawn(summed, "ids:1x5", "mask:1x95")} == {95}


def test_a_comparison_stays_within_an_engines_shapes_of_expressions(odd: Path) -> None:
    engine = _engine({"x": ([1, 7], [1, 9], [2, 15]), "y": ([1, 5], [1, 6], [2, 9])})
    assert {shapes["x"][1] for shapes in _drawn(odd, engine=engine)} <= {7, 9, 11, 13, 15}
    (room,) = rooms(["x:2x9"], onnx_file.read(odd), engine)
    assert room.ranges["n"] == (5, 5)
    with pytest.raises(UsageError, match="not built for these shapes"):
        rooms(["x:2x17"], onnx_file.read(odd), engine)


def test_an_engines_shapes_that_contradict_each_other_are_limits_each(summed: Path) -> None:
    """As trtexec takes them: the mask's usual length is not the sum of the usual parts."""
    limits = {
        "ids": ([1, 1], [1, 8], [2, 16]),
        "key": ([1, 0], [1, 8], [2, 64]),
        "mask": ([1, 1], [1, 30], [2, 70]),
    }
    (room,) = rooms([], onnx_file.read(summed), _engine(limits))
    assert room.ranges == {"b": (1, 2), "s": (1, 16), "p": (0, 64)}
    assert room.kept([{"b": 1, "s": 16, "p": 64}, {"b": 1, "s": 6, "p": 64}]) == [{"b": 1, "s": 6, "p": 64}]


def _engine(limits: dict[str, tuple[list[int], list[int], list[int]]]) -> EngineFile:
    profile = {name: dict(zip(("min", "opt", "max"), given, strict=True)) for name, given in limits.items()}
    return EngineFile(Path("m.engine"), {"profiles": [profile]})


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ((3, 8), (3, 5), r"a whole number for n in 2\*n - 1"),
        ((3, 999), (3, 501), r"n in 2\.\.50"),
        ((3, 7), (3, 9), r"n \+ 1 is 9 in y, not 5, as n is 4 in x"),
    ],
)
def test_tensors_that_no_length_makes_or_that_disagree_are_refused(
    odd: Path, tmp_path: Path, x: tuple[int, int], y: tuple[int, int], words: str
) -> None:
    inputs, limits = onnx_file.read(odd).inputs, onnx_file.read(odd).dim_ranges

    def check() -> None:
        for graph_input, shape in zip(inputs, (x, y), strict=True):
            shape_agreement.require_taken("in.npz", graph_input, shape, limits)
        shape_agreement.require_alike("in.npz", inputs, {"x": x, "y": y})

    with pytest.raises(UsageError, match=words):
        check()


def test_tensors_that_agree_are_taken(odd: Path, tmp_path: Path, flash_trt: Command) -> None:
    np.savez(tmp_path / "in.npz", x=np.zeros((3, 7), np.float32), y=np.zeros((3, 5), np.float32))
    assert flash_trt("run", odd, "--inputs", tmp_path / "in.npz") == EXIT_OK

# SPDX-License-Identifier: Apache-2.0
"""Inputs of other types than the model's: converted where that is told, refused where numbers would be others."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from python.attention_models import BF16, FLOAT, HALF, HEAD_DIM, HEADS, fused, unfused

from flash_export.errors import EXIT_NUMBERS_DIFFER, EXIT_OK, EXIT_USAGE, UsageError
from flash_trt import input_types

Command = Callable[..., int]
NAMES = ("query", "key", "value")
KINDS = {FLOAT: "float32", HALF: "float16", BF16: "bfloat16"}


def _words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def _values(path: Path, number: float) -> Path:
    arrays = {name: np.zeros((1, HEADS, 2, HEAD_DIM)) for name in NAMES}
    arrays["query"][0, 0, 0, 0] = number
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        path.write_text(json.dumps({name: array.tolist() for name, array in arrays.items()}))
    return path


@pytest.mark.parametrize("suffix", [".npz", ".json"])
@pytest.mark.parametrize(("dtype", "number"), [(FLOAT, 1e300), (HALF, -1e5), (BF16, 3.5e38)], ids=KINDS.values())
def test_a_float_beyond_the_models_type_is_told(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], suffix: str, dtype: int, number: float
) -> None:
    model, beyond = fused(tmp_path / "m.onnx", dtype=dtype), _values(tmp_path / f"v{suffix}", number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flash_trt("run", model, "--inputs", beyond, "--on", "cpu") == EXIT_OK
        assert f"input query holds 1 number beyond {KINDS[dtype]}" in _words(capsys)
        if suffix == ".npz":
            reference = unfused(tmp_path / "u.onnx", dtype=dtype)
            assert flash_trt("compare", model, reference, "--values", beyond) == EXIT_NUMBERS_DIFFER
            assert f"input query holds 1 number beyond {KINDS[dtype]}" in _words(capsys)
        assert flash_trt("run", model, "--inputs", _values(tmp_path / f"v{suffix}", 2.5), "--on", "cpu") == EXIT_OK
        assert "1 number beyond" not in _words(capsys)


def test_a_file_that_names_a_type_and_holds_numbers_beyond_it_is_refused(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    tensor = {"dtype": "float32", "shape": [1, HEADS, 1, HEAD_DIM], "data": [1e300] * HEADS * HEAD_DIM}
    (tmp_path / "v.json").write_text(json.dumps(dict.fromkeys(NAMES, tensor)))
    assert flash_trt("run", fused(tmp_path / "m.onnx"), "--inputs", tmp_path / "v.json") == EXIT_USAGE
    assert "beyond float32" in _words(capsys)


def test_the_smallest_number_of_a_float_type_stays_a_number() -> None:
    """A mask's fill of finfo.min is meant as such in every type."""
    fill = np.array([np.finfo(np.float32).min, -np.inf], np.float32)
    taken = input_types.typed("here", fill, np.dtype(np.float16))
    assert taken.tolist() == [np.finfo(np.float16).min, -np.inf]
    assert input_types.typed("here", fill, np.dtype(ml_dtypes.bfloat16))[0] == ml_dtypes.finfo(ml_dtypes.bfloat16).min


@pytest.mark.parametrize("given", [np.array([300]), np.array([-1]), np.array([1.0]), np.array(["1"])])
def test_numbers_that_the_type_does_not_hold_are_refused(given: np.ndarray) -> None:
    with pytest.raises(UsageError, match="another type"):
        input_types.typed("here", given, np.dtype(np.uint8))


def _shifted(path: Path) -> Path:
    """The model with an INT64 input of one number added to its output."""
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("shift", TensorProto.INT64, [1]))
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "half"))
    model.graph.node.append(helper.make_node("Cast", ["shift"], ["shift_float"], to=FLOAT))
    model.graph.node.append(helper.make_node("Mul", ["shift_float", "half"], ["by"]))
    model.graph.node.append(helper.make_node("Add", ["output", "by"], ["shifted"]))
    model.graph.output[0].name = "shifted"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("kind", ["int32", "uint8", "int64"])
def test_values_of_integers_of_another_type_are_converted_and_told(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal((2, HEADS, 9, HEAD_DIM)).astype(np.float32) for name in NAMES}
    np.savez(tmp_path / "v.npz", shift=np.array([3], kind), **arrays)
    pair = _shifted(fused(tmp_path / "f.onnx")), _shifted(unfused(tmp_path / "u.onnx"))
    assert flash_trt("compare", *pair, "--values", tmp_path / "v.npz") == EXIT_OK
    told = f"input shift holds {kind} where the model takes int64: it is converted"
    assert (told in _words(capsys)) is (kind != "int64")

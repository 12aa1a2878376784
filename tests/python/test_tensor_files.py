# SPDX-License-Identifier: Apache-2.0
"""Tensors survive each kind of file; broken files and pickles are refused."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from flash_export.errors import UsageError
from flash_trt import tensor_files

TENSORS = {
    "float32": np.array([[1.5, -np.inf], [np.nan, np.inf]], np.float32),
    "float16": np.array([6.5e4, -6.1e-5], np.float16),
    "bfloat16": np.array([[3.140625]], ml_dtypes.bfloat16),
    "float64": np.array(1e300),
    "int64": np.array([-(2**62), 2**62 + 1]),
    "int8": np.zeros((2, 0, 3), np.int8),
    "uint16": np.array([[0, 65535]], np.uint16),
    "uint64": np.array([2**64 - 1], np.uint64),
    "float8_e4m3fn": np.array([448.0, 0.015625], ml_dtypes.float8_e4m3fn),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "bool": np.array([True, False]),
}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".json"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(tmp_path: Path, suffix: str, name: str) -> None:
    written = TENSORS[name]
    tensor_files.write(tmp_path / f"file{suffix}", {name: written})
    read = tensor_files.read(tmp_path / f"file{suffix}")[name]
    if suffix == ".npz" and name in ("bfloat16", "float8_e4m3fn"):  # NPZ has neither
        written = written.astype(np.float32)
    assert read.dtype == written.dtype
    assert read.shape == written.shape
    assert read.tobytes() == written.tobytes()


def test_json_written_by_hand_takes_the_dtypes_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"ids": [[1, 2]], "x": [1, "NaN"], "y": 3}')
    read = tensor_files.read(tmp_path / "x.json", {"ids": np.dtype(np.int64), "x": np.dtype(np.float16)})
    assert read["ids"].dtype == np.int64
    assert read["ids"].tolist() == [[1, 2]]
    assert read["x"].dtype == np.float16
    assert np.isnan(read["x"][1])
    assert read["y"].shape == ()


def test_the_written_json_is_json(tmp_path: Path) -> None:
    tensor_files.write(tmp_path / "x.json", TENSORS)
    json.loads((tmp_path / "x.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


BROKEN = {
    "nothing": b"",
    "text": b"hello",
    "a list": b"[1]",
    "ragged": b'{"x": [[1], [1, 2]]}',
    "unknown dtype": b'{"x": {"dtype": "float7", "shape": [1], "data": [1]}}',
    "no data": b'{"x": {"dtype": "float32", "shape": [1]}}',
    "wrong shape": b'{"x": {"dtype": "float32", "shape": [3], "data": [1]}}',
    "a dtype that is code": b'{"x": {"dtype": "(2,", "shape": [1], "data": [1]}}',
    "an object": b'{"x": {"dtype": "object", "shape": [], "data": 1}}',
    "half an integer": b'{"x": {"dtype": "int64", "shape": [1], "data": [1.5]}}',
    "an int8 of 300": b'{"x": {"dtype": "int8", "shape": [1], "data": [300]}}',
    "NaN as an integer": b'{"x": {"dtype": "int64", "shape": [1], "data": [NaN]}}',
    "null": b'{"x": null}',
    "deep": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not a zip": b"PK\x03\x04 no zip",
    "safetensors cut short": b"\xff\x00\x00\x00\x00\x00\x00\x00{}",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "x").write_bytes(BROKEN[what])
    with pytest.raises(UsageError, match="cannot be read"):
        tensor_files.read(tmp_path / "x")


def test_integers_by_hand_must_be_integers(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"ids": [1.5]}')
    with pytest.raises(UsageError, match="none of int64"):
        tensor_files.read(tmp_path / "x.json", {"ids": np.dtype(np.int64)})


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".json"])
@pytest.mark.parametrize("name", ["allow_pickle", "file", "args", "a/b", "x.npy", "é\U0001f600", "x:0"])
def test_no_name_of_a_tensor_is_lost(tmp_path: Path, suffix: str, name: str) -> None:
    tensors = {name: np.arange(3.0), "x": np.arange(2.0)}
    tensor_files.write(tmp_path / f"file{suffix}", tensors)
    read = tensor_files.read(tmp_path / f"file{suffix}")
    assert {name: array.tolist() for name, array in read.items()} == {name: [0, 1, 2], "x": [0, 1]}


def test_the_name_that_safetensors_keeps_for_itself_is_refused(tmp_path: Path) -> None:
    tensors = {"__metadata__": np.arange(3.0)}
    with pytest.raises(UsageError, match="safetensors has no tensor of this name"):
        tensor_files.write(tmp_path / "x.safetensors", tensors)
    assert not list(tmp_path.iterdir())
    for suffix in (".npz", ".json"):
        tensor_files.write(tmp_path / f"x{suffix}", tensors)
        assert tensor_files.read(tmp_path / f"x{suffix}").keys() == tensors.keys()


@pytest.mark.parametrize("name", ["a\0b", "é" * 40_000], ids=["NUL", "long"])
def test_the_names_that_a_zip_archive_would_cut_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="NPZ has no array of this name"):
        tensor_files.write(tmp_path / "x.npz", {name: np.arange(3.0)})
    assert not list(tmp_path.iterdir())
    for suffix in (".safetensors", ".json"):
        tensor_files.write(tmp_path / f"x{suffix}", {name: np.arange(3.0)})
        assert tensor_files.read(tmp_path / f"x{suffix}").keys() == {name}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".json"])
@pytest.mark.parametrize("text", [np.array(["a"], object), np.array(["a"]), np.array([1j])], ids=["O", "U", "c"])
def test_what_holds_no_numbers_is_not_written(tmp_path: Path, suffix: str, text: np.ndarray) -> None:
    with pytest.raises(UsageError, match="has no place in a tensor file"):
        tensor_files.write(tmp_path / f"x{suffix}", {"x": text})
    assert not list(tmp_path.iterdir())


def test_a_pickled_array_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.array([{"an": "object"}], dtype=object))
    with pytest.raises(UsageError):
        tensor_files.read(tmp_path / "x.npz")


def test_a_missing_file_and_an_unknown_suffix_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        tensor_files.read(tmp_path / "none.npz")
    with pytest.raises(UsageError, match=r"\.npz, \.safetensors, \.json"):
        tensor_files.write(tmp_path / "x.pt", {})


@pytest.mark.parametrize(
    ("text", "twice"),
    [
        ('{"x": [1], "y": [2], "x": [3]}', "x"),
        ('{"x": {"dtype": "int8", "data": [1], "shape": [1], "data": [2]}}', "data"),
    ],
)
def test_json_with_one_name_twice_is_refused_by_that_name(tmp_path: Path, text: str, twice: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UsageError) as caught:
        tensor_files.read(tmp_path / "t.json")
    assert f"two values are named '{twice}'" in caught.value.got


def test_one_array_without_a_name_is_named_as_what_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.zeros(3))
    with pytest.raises(UsageError) as caught:
        tensor_files.read(tmp_path / "t.npy")
    assert ".npy" in caught.value.got
    assert "numpy.savez" in caught.value.do


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ('{"dtype": "float32", "shape": [2, -1], "data": [1, 2, 3, 4]}', "the shape of 'x' is [2, -1]"),
        ('{"dtype": "float32", "shape": 4, "data": [1, 2, 3, 4]}', "the shape of 'x' is 4"),
        ('{"dtype": "float32", "shape": [true], "data": [1]}', "the shape of 'x' is [True]"),
        ('{"dtype": "float32", "shape": [1]}', "'x' has no data"),
        ('{"data": [1]}', "'x' has no dtype and no shape"),
    ],
)
def test_a_json_tensor_that_is_not_wholly_described_is_refused(tmp_path: Path, entry: str, why: str) -> None:
    (tmp_path / "x.json").write_text(f'{{"x": {entry}}}')
    with pytest.raises(UsageError) as error:
        tensor_files.read(tmp_path / "x.json")
    assert why in error.value.got

# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_check_primitives.py: the emulation's primitives are what PTX says, and any other output is noticed."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def script(repo_root: Path) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repo_root / "scripts"))
        return importlib.import_module("gpu_check_primitives")


@pytest.fixture(scope="module")
def emulated(script: ModuleType, native_build: Path):  # type: ignore[no-untyped-def]
    return script.Primitives(native_build / "lib" / "libkernel_primitives_emulated.so", gpu=False)


@pytest.fixture(scope="module")
def outputs(emulated) -> dict[str, NDArray[np.uint8]]:  # type: ignore[no-untyped-def]
    return emulated.outputs()  # type: ignore[no-any-return]


def given(script: ModuleType, emulated, case: str) -> NDArray[np.uint8]:  # type: ignore[no-untyped-def]
    name = case.split()[0]
    return script.make_inputs(name, emulated.in_bytes(name))[case]  # type: ignore[no-any-return]


def test_both_compilers_make_the_same_probes(script: ModuleType, emulated, native_build: Path) -> None:  # type: ignore[no-untyped-def]
    compiled = script.Primitives(native_build / "lib" / "libkernel_primitives.so", gpu=True)  # runs none of them
    assert compiled.names == emulated.names
    assert len(set(emulated.names)) == len(emulated.names) >= 25


def test_a_probe_is_given_what_it_reads_and_says_the_same_every_time(script: ModuleType, emulated, outputs) -> None:  # type: ignore[no-untyped-def]
    assert script.compare(emulated.outputs(), outputs) == {}
    with pytest.raises(ValueError, match=r"combine reads \d+ bytes, not 4"):
        emulated.run("combine", np.zeros(4, np.uint8))


def test_a_split_row_is_the_weighted_mean_of_its_parts(script: ModuleType, emulated, outputs) -> None:  # type: ignore[no-untyped-def]
    parts = given(script, emulated, "combine").view(np.float32).astype(np.float64)
    partial, maxima, sums = parts[:480].reshape(3, 4, 40), parts[480:492].reshape(3, 4), parts[492:504].reshape(3, 4)
    sinks = np.repeat(parts[504:], 2)  # two heads of two queries
    weights = sums * np.exp(maxima)
    total = weights.sum(0) + np.exp(sinks)
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = np.nan_to_num((weights[:, :, None] * partial).sum(0) / total[:, None])
        lse = np.log(total)
    found = outputs["combine"].view(np.float32)
    np.testing.assert_allclose(found[:160].reshape(4, 40), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[160:], lse, rtol=1e-5)


def test_any_other_output_is_noticed(script: ModuleType, outputs: dict[str, NDArray[np.uint8]]) -> None:
    assert script.compare(outputs, outputs) == {}
    for case in outputs:
        other = outputs | {case: outputs[case].copy()}
        other[case][outputs[case].size // 2 + 3] ^= 0x40  # an exponent's bit, where it is a float
        assert list(script.compare(other, outputs)) == [case]
    fewer = {case: array for case, array in outputs.items() if case != "append"}
    assert script.compare(fewer, outputs) == {"append": ["is on one side only"]}


def test_a_float_may_be_off_by_what_its_unit_is(script: ModuleType) -> None:
    one = np.array([1.0, np.nan, np.inf], np.float32)
    for ulp, says in ((5, ""), (6, "1 of 3 differ, the first is 0")):
        other = one.copy()
        other[0] += ulp * np.spacing(np.float32(1))
        assert script.why_apart("exp2_approx", other.view(np.uint8), one.view(np.uint8)).startswith(says)
    assert "3 of 3" in script.why_apart("exp2_approx", np.zeros(12, np.uint8), one.view(np.uint8))
    off = one * np.float32(1 + 2**-23)
    assert script.why_apart("divide", off.view(np.uint8), one.view(np.uint8)) != ""


def test_a_fixture_comes_back(
    script: ModuleType, outputs: dict[str, NDArray[np.uint8]], native_build: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(script, "FIXTURES", tmp_path / "fixtures")
    path = tmp_path / "fixtures" / "a_card.npz"
    assert script.check_all(native_build, gpu=False, device="a card", fixture=path) == {}
    device, found = script.load(path)
    assert device == "a card"
    assert script.compare(found, outputs) == {}
    found["ldmatrix"][7] ^= 1
    script.save(path, found, device="a card")
    assert list(script.check_all(native_build, gpu=False, device="")) == ["ldmatrix of a card"]
    assert "WRONG ldmatrix of a card: 1 of 128 differ, the first is 1" in capsys.readouterr().out
    assert [p.name for p in path.parent.iterdir()] == ["a_card.npz"]


@pytest.mark.parametrize(("name", "dtype"), [("mma_fp16", np.float16), ("mma_bf16", ml_dtypes.bfloat16)])
def test_mma_multiplies_what_ptx_says(script: ModuleType, emulated, outputs, name: str, dtype: type) -> None:  # type: ignore[no-untyped-def]
    data = given(script, emulated, f"{name} integers")
    lanes = np.arange(32)
    group, quad = lanes // 4, lanes % 4 * 2
    a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    in_a = data[:512].view(dtype).reshape(32, 4, 2).astype(np.float64)
    in_b = data[512:768].view(dtype).reshape(32, 2, 2).astype(np.float64)
    in_c = data[768:].view(np.float32).reshape(32, 4)
    for half in range(2):
        for i in range(4):  # PTX ISA, mma.m16n8k16: a0..a7, b0..b3, c0..c3
            a[group + i % 2 * 8, quad + i // 2 * 8 + half] = in_a[:, i, half]
            c[group + i // 2 * 8, quad + i % 2] = in_c[:, i]
        for i in range(2):
            b[quad + i * 8 + half, group] = in_b[:, i, half]
    d = a @ b + c
    found = outputs[f"{name} integers"].view(np.float32).reshape(32, 4)
    for i in range(4):
        assert np.array_equal(found[:, i], d[group + i // 2 * 8, quad + i % 2])


TRUTHS = {
    "exp2_approx": lambda x, y: np.where(np.exp2(x) < 2.0**-126, 0.0, np.exp2(x)),
    "log2_approx": lambda x, y: np.log2(np.where(y < 2.0**-126, 0.0, y)),
    "divide": lambda x, y: x / y,
    "exp_precise": lambda x, y: np.where(x < -87, 0.0, np.exp(x)),
    "tanh": lambda x, y: np.tanh(x),
}


def test_numbers_are_those_of_float64(script: ModuleType, emulated, outputs) -> None:  # type: ignore[no-untyped-def]
    with np.errstate(all="ignore"):
        for name, of in TRUTHS.items():
            x, y = given(script, emulated, name).view(np.float32).reshape(2, -1).astype(np.float64)
            found = outputs[name].view(np.float32)
            tolerance = 2.0**-24 if name == "divide" else 2.0**-21
            truth = np.float32(of(x, y)).astype(np.float64) if name == "divide" else of(x, y)
            defined = x <= 88 if name == "exp_precise" else np.full(x.shape, fill_value=True)  # softmax.h
            good = np.isclose(found, truth, rtol=tolerance, atol=2.0**-126, equal_nan=True)
            assert good[defined].all(), (name, x[defined & ~good])
        for name, dtype in (("pack_fp16", np.float16), ("pack_bf16", ml_dtypes.bfloat16)):
            x, y = given(script, emulated, name).view(np.float32).reshape(2, -1)
            low, high = outputs[name].view(dtype).reshape(-1, 2).T.astype(np.float32)
            assert np.array_equal(low, x.astype(dtype).astype(np.float32), equal_nan=True), name
            assert np.array_equal(high, y.astype(dtype).astype(np.float32), equal_nan=True), name


def test_copies_fill_with_zeros_and_rows_land_where_the_swizzle_says(script: ModuleType, emulated, outputs) -> None:  # type: ignore[no-untyped-def]
    data = given(script, emulated, "copy_async").reshape(32, 16)
    kept = np.arange(16) < (np.arange(32) % 17)[:, None]
    assert np.array_equal(outputs["copy_async"].reshape(32, 16), np.where(kept, data, 0))
    for case, columns in (("tile_of_vectors", 56), ("tile_of_elements", 51)):
        rows = given(script, emulated, case).view(np.uint16).reshape(64, 64).copy()
        rows[50:] = 0
        rows[:, columns:] = 0
        found = outputs[case].view(np.uint16).reshape(64, 8, 8)
        for row in range(64):
            assert np.array_equal(found[row, np.arange(8) ^ (row & 7)].reshape(64), rows[row]), (case, row)


def test_a_table_leads_to_its_pages_and_a_wrong_entry_to_the_last(script: ModuleType, emulated, outputs) -> None:  # type: ignore[no-untyped-def]
    pool = given(script, emulated, "pages")[:-32].reshape(6, 16, 8, 16)
    found = outputs["pages"].reshape(4, 16, 8, 16)
    for place, page in enumerate((3, 0, 5, 4)):  # 77 is none
        for row in range(16):
            assert np.array_equal(found[place, row, np.arange(8) ^ (row & 7)], pool[page, row])


@pytest.mark.parametrize("name", ["ldmatrix", "ldmatrix_trans"])
def test_ldmatrix_hands_out_what_ptx_says(script: ModuleType, emulated, outputs, name: str) -> None:  # type: ignore[no-untyped-def]
    rows = given(script, emulated, name).view(np.uint16).reshape(32, 8)
    lanes = np.arange(32)
    matrices = rows[(lanes * 5 + 3) % 32].reshape(4, 8, 8)  # lane i names row i % 8 of matrix i / 8
    if name == "ldmatrix_trans":
        matrices = matrices.transpose(0, 2, 1)
    found = outputs[name].view(np.uint16).reshape(32, 4, 2)
    for half in range(2):
        assert np.array_equal(found[:, :, half], matrices[:, lanes // 4, lanes % 4 * 2 + half].T)


@pytest.mark.parametrize("name", ["products_fp16", "products_bf16", "products_fp32"])
def test_the_products_are_those_of_matrices(script: ModuleType, emulated, outputs, name: str) -> None:  # type: ignore[no-untyped-def]
    dtype, columns, keys = {
        "products_fp16": (np.float16, 64, 64),
        "products_bf16": (ml_dtypes.bfloat16, 64, 64),
        "products_fp32": (np.float32, 32, 32),
    }[name]
    tile = given(script, emulated, name).view(dtype).reshape(-1, columns).astype(np.float64)
    q, k, v = tile[:64], tile[64 : 64 + keys], tile[64 + keys :]
    scores = q @ k.T
    found = outputs[name].view(np.float32).reshape(128, -1, 4)
    thread = np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    for matrix, first in ((scores, 0), (scores @ v, keys // 8)):
        for n in range(matrix.shape[1] // 8):
            for j in range(4):
                expected = matrix[row + j // 2 * 8, n * 8 + column + j % 2]
                assert np.array_equal(found[:, first + n, j], expected), (n, j)

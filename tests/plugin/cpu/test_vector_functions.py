# SPDX-License-Identifier: Apache-2.0
"""The kernels' vector functions: conversions exact for every number, exp and tanh to a few units."""

from __future__ import annotations

import ctypes
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from plugin.cpu.cpu_library import KERNELS, CpuLibrary


@pytest.fixture(params=KERNELS)
def functions(request: pytest.FixtureRequest, native_build: Path) -> ctypes.CDLL:
    """One instruction set's functions."""
    if reason := CpuLibrary(native_build / "lib" / "libcpu_door.so").why_not(request.param):
        pytest.skip(reason)
    return ctypes.CDLL(str(native_build / "lib" / f"libvector_functions_{request.param}.so"))


def apply(function: object, x: NDArray, dtype: type) -> NDArray:
    """``function`` on every element."""
    y = np.empty(x.shape, dtype)
    function(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_int64(x.size))  # type: ignore[operator]
    return y


def steps_off(got: NDArray[np.float32], exact: NDArray[np.float64]) -> float:
    """The largest error in units in the last place."""
    return float(np.max(np.abs(got - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)))


def test_exp_is_exact_to_three_units_of_the_largest_weight(functions: ctypes.CDLL) -> None:
    x = np.concatenate([np.linspace(-87.3, 0, 2**20), np.linspace(-2, 0, 2**18)]).astype(np.float32)
    y, exact = apply(functions.exponentials, x, np.float32), np.exp(x.astype(np.float64))
    units = np.abs(y - exact) / np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert np.max(units + 1.25 * x) <= 3  # log2(e) and the argument's product with it are rounded
    assert np.max(np.abs(y - exact)) <= 3 * 2.0**-24


def test_exp_of_special_numbers(functions: ctypes.CDLL) -> None:
    payload = np.array([0x7FC001FF, 0xFFC00123], np.uint32).view(np.float32)
    x = np.concatenate([np.array([0, -0.0, -110, -1e9, -3.4e38, -np.inf, np.nan], np.float32), payload])
    y = apply(functions.exponentials, np.resize(x, 16), np.float32)
    np.testing.assert_array_equal(y[: len(x)], [1, 1, 0, 0, 0, 0, np.nan, np.nan, np.nan])
    below = np.resize(np.linspace(-105, -87.5, 1000).astype(np.float32), 1008)
    tiny = apply(functions.exponentials, below, np.float32)
    assert np.all((tiny >= 0) & (tiny <= 2.0**-126))


def test_tanh_is_exact_to_four_units_and_odd(functions: ctypes.CDLL) -> None:
    x = np.concatenate([np.linspace(1e-6, 1, 2**18), np.linspace(1, 30, 2**16), [1e30] * 16]).astype(np.float32)
    y = apply(functions.hyperbolicTangents, x, np.float32)
    assert steps_off(y, np.tanh(x.astype(np.float64))) <= 4
    np.testing.assert_array_equal(apply(functions.hyperbolicTangents, -x, np.float32), -y)
    special = np.resize(np.array([np.nan, np.inf, -np.inf, 0], np.float32), 16)
    np.testing.assert_array_equal(apply(functions.hyperbolicTangents, special, np.float32)[:4], [np.nan, 1, -1, 0])


@pytest.mark.parametrize(("name", "dtype"), [("Halves", np.float16), ("BFloats", ml_dtypes.bfloat16)])
def test_every_16_bit_number_widens_exactly_and_comes_back(functions: ctypes.CDLL, name: str, dtype: type) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    wide = apply(getattr(functions, f"widen{name}"), every, np.float32)
    np.testing.assert_array_equal(wide, every.astype(np.float32))
    back = apply(getattr(functions, f"narrowTo{name}"), wide, dtype)
    np.testing.assert_array_equal(back.astype(np.float32), wide)


def test_subnormal_halves_stay_where_subnormal_floats_are_taken_for_0(functions: ctypes.CDLL) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    wide = apply(functions.widenHalvesWithoutSubnormals, every, np.float32)
    np.testing.assert_array_equal(wide, every.astype(np.float32))
    back = apply(functions.narrowToHalvesWithoutSubnormals, wide, np.float16)
    np.testing.assert_array_equal(back, every)


@pytest.mark.parametrize(("name", "dtype"), [("Halves", np.float16), ("BFloats", ml_dtypes.bfloat16)])
def test_narrowing_rounds_to_nearest_even(functions: ctypes.CDLL, name: str, dtype: type) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    finite = np.sort(every[np.isfinite(every)])
    ties = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    x = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    x = np.concatenate([x, np.array([65519.996, 65520, 1e6, -1e6, 3.4e38, np.inf, 1e-9, 1e-45], np.float32)])
    x = np.resize(x, -(-x.size // 16) * 16)
    with np.errstate(over="ignore"):
        wanted = x.astype(dtype)
    got = apply(getattr(functions, f"narrowTo{name}"), x, dtype)
    np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32))


def test_squares_are_transposed_and_rows_summed(functions: ctypes.CDLL) -> None:
    x = np.arange(256, dtype=np.float32)
    y = np.zeros(256, np.float32)
    lanes = functions.transposed(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data))
    square = x[: lanes * lanes].reshape(lanes, lanes)
    np.testing.assert_array_equal(y[: lanes * lanes].reshape(lanes, lanes), square.T)
    functions.rowSums(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data))
    np.testing.assert_array_equal(y[:lanes], square.sum(1))

# SPDX-License-Identifier: Apache-2.0
"""What gpu_check.py tries of the kernels' primitives: a GPU's outputs against the emulation's.

The kernels' tests run on the emulation, so whatever it misreads of an instruction they misread too. Here small kernels
(tests/plugin/kernels/primitives), one a primitive, get the same bytes on both: fragments of ldmatrix and mma, copies
that fill with zeros, the swizzle, the exponentials, the fp32 products, pages, combining, appending. What a GPU gave is
kept as a fixture, with which the emulation is compared where there is no GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "plugin" / "kernels" / "primitives" / "fixtures"
"""Outputs of GPUs, one file each: ``gpu_check.sh --fixture``."""

Outputs = dict[str, NDArray[np.uint8]]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How far two outputs may lie apart.

    Args:
        dtype: what the bytes are; integers must be equal.
        ulp: of float32; infinities must be equal, NaN is NaN.
        absolute: allowed besides.
    """

    dtype: str = "uint32"
    ulp: int = 0
    absolute: float = 0.0


EXACT = Rule()
RULES = {
    "exp2_approx": Rule("float32", ulp=5),  # each side is off by 2 at most, and rounded
    "log2_approx": Rule("float32", ulp=5, absolute=2.0**-21),
    "tanh": Rule("float32", ulp=4),
    "combine": Rule("float32", ulp=8, absolute=2.0**-20),
    "mma_fp16 random": Rule("float32", absolute=1e-4),  # how tensor cores round inside a product is their own
    "mma_bf16 random": Rule("float32", absolute=1e-4),
} | {name: Rule("float32") for name in ("exp_precise", "divide", "multiply_add", "maximum", "load_fp16", "load_bf16")}


class Primitives:
    """The probes of one library, on the GPU or emulated."""

    def __init__(self, library: Path, *, gpu: bool) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.primitiveName.restype = ctypes.c_char_p
        self._library.primitiveError.restype = ctypes.c_char_p
        self._library.primitiveRun.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self._place = "cuda" if gpu else "cpu"
        self.names = [self._library.primitiveName(i).decode() for i in range(self._library.primitiveCount())]

    def in_bytes(self, name: str) -> int:
        """What the probe reads."""
        return int(self._library.primitiveInBytes(self.names.index(name)))

    def run(self, name: str, given: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The probe's output; what it leaves alone is 0xa5.

        Raises:
            RuntimeError: the launch failed.
            ValueError: ``given`` is not as long as what the probe reads.
        """
        i = self.names.index(name)
        if given.size != self.in_bytes(name):
            raise ValueError(f"{name} reads {self.in_bytes(name)} bytes, not {given.size}")
        source = torch.from_numpy(given.copy()).to(self._place)
        out = torch.full((self._library.primitiveOutBytes(i),), 0xA5, dtype=torch.uint8, device=self._place)
        stream = torch.cuda.current_stream().cuda_stream if self._place == "cuda" else 0
        if status := self._library.primitiveRun(i, source.data_ptr(), out.data_ptr(), stream):
            raise RuntimeError(f"{name}: cudaError {status} {self._library.primitiveError().decode()}")
        return np.asarray(out.cpu().numpy())

    def outputs(self) -> Outputs:
        """Those of every input of ``make_inputs``, by its name."""
        given = {case: array for name in self.names for case, array in make_inputs(name, self.in_bytes(name)).items()}
        return {case: self.run(case.split()[0], array) for case, array in given.items()}


def make_inputs(name: str, in_bytes: int) -> dict[str, NDArray[np.uint8]]:
    """Bytes for a probe, the same everywhere and always; more than one where the name is followed by a word."""
    random = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    if name.startswith("mma_"):
        dtype = ml_dtypes.bfloat16 if name.endswith("bf16") else np.float16
        whole = [random.integers(-8, 9, 384).astype(dtype), random.integers(-99, 99, 128).astype(np.float32)]
        real = [random.standard_normal(384).astype(dtype), random.standard_normal(128).astype(np.float32)]
        return {f"{name} integers": _bytes(*whole), f"{name} random": _bytes(*real)}
    if name.startswith("products_"):
        types = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
        dtype = types[name.removeprefix("products_")]
        return {name: _bytes(random.integers(-1, 2, in_bytes // np.dtype(dtype).itemsize).astype(dtype))}
    if name == "shuffles_and_vote":
        numbers = random.uniform(0.5, 2.0, 64)
        return {name: _bytes((numbers * np.repeat([1, -1], 32)).astype(np.float32))}
    if name.startswith("load_"):
        return {name: _bytes(np.arange(3, 65536, 8, dtype=np.uint16))}
    if name == "pages":
        return {name: _bytes(random.bytes(in_bytes - 32), np.int32([-7, 3, 0, 77, 4, 9, 9, 9]))}
    if name == "combine":
        maxima, sums = random.standard_normal(12) * 3, random.uniform(1, 9, 12)
        empty = [1, 5, 9, 2]  # row 1 has no key at all, row 2 none in the first split
        maxima[empty], sums[empty] = -np.inf, 0
        return {name: _bytes(*(x.astype(np.float32) for x in (random.standard_normal(480), maxima, sums)),
                             np.float32([-np.inf, 0.5]))}  # fmt: skip
    if name == "append":
        return {name: _bytes(random.bytes(in_bytes - 16), np.int32([15, 1, 0, 0]))}
    if in_bytes == 2048 * 8:
        return {name: _bytes(*_pairs(random))}
    return {name: _bytes(random.bytes(in_bytes))}


def _pairs(random: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """x over what an exponent may be, y positive and near 1 at times, both with odd numbers first."""
    odd = [0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 65519.9, 65520.0, -126.5, -150.0, 6.1e-5, 2049.0]
    x, y = random.uniform(-130, 20, 2048), np.exp2(random.uniform(-100, 100, 2048))
    y[::3] = random.uniform(0.5, 2.0, y[::3].size)
    x[: len(odd)] = odd
    y[: len(odd)] = np.roll(np.abs(odd), 5)
    return x.astype(np.float32), y.astype(np.float32)


def _bytes(*parts: bytes | NDArray) -> NDArray[np.uint8]:
    joined = b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)
    return np.frombuffer(joined, np.uint8)


def why_apart(case: str, found: NDArray[np.uint8], expected: NDArray[np.uint8]) -> str:
    """Empty, or how far the outputs of a case lie apart."""
    if found.size != expected.size:
        return f"{found.size} bytes, not {expected.size}"
    rule = RULES.get(case, RULES.get(case.split()[0], EXACT))
    a, b = (x.view(rule.dtype) for x in (found, expected))
    bad = a != b
    if rule.dtype == "float32":
        with np.errstate(invalid="ignore", over="ignore"):
            allowed = rule.ulp * np.spacing(np.abs(b)) + rule.absolute
            near = np.isfinite(a) & np.isfinite(b) & (np.abs(a.astype(np.float64) - b) <= allowed)
        bad &= ~near & ~(np.isnan(a) & np.isnan(b))
    if not bad.any():
        return ""
    first = int(np.argmax(bad))
    return f"{bad.sum()} of {bad.size} differ, the first is {first}: {a[first]!r}, not {b[first]!r}"


def compare(found: Mapping[str, NDArray[np.uint8]], expected: Mapping[str, NDArray[np.uint8]]) -> dict[str, list[str]]:
    """Case name -> what is wrong with it, of all cases that either side has."""
    wrong = {}
    for case in sorted({*found, *expected}):
        if case not in found or case not in expected:
            wrong[case] = ["is on one side only"]
        elif reason := why_apart(case, found[case], expected[case]):
            wrong[case] = [reason]
    return wrong


def save(path: Path, outputs: Outputs, *, device: str) -> None:
    """Writes a fixture, complete or not at all."""
    beside = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside.open("wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps({"device": device})), **outputs)  # type: ignore[arg-type]
    beside.replace(path)


def load(path: Path) -> tuple[str, Outputs]:
    """A fixture's device and outputs."""
    with np.load(path, allow_pickle=False) as file:
        about = json.loads(str(file["about"]))
        return str(about["device"]), {case: file[case] for case in file.files if case != "about"}


def check_all(build: Path, *, gpu: bool, device: str, fixture: Path | None = None) -> dict[str, list[str]]:
    """Compares this GPU with the emulation, or the emulation with what GPUs gave before; prints what differs.

    Args:
        build: the build tree with both libraries; the emulated one alone where there is no GPU.
        device: the GPU's name, kept in the fixture.
        fixture: where to keep this device's outputs.
    """
    emulated = Primitives(build / "lib" / "libkernel_primitives_emulated.so", gpu=False).outputs()
    found = emulated
    wrong = {}
    if gpu:
        found = Primitives(build / "lib" / "libkernel_primitives.so", gpu=True).outputs()
        wrong = compare(found, emulated)
    for path in sorted(FIXTURES.glob("*.npz")):
        known_device, known = load(path)
        wrong |= {f"{case} of {known_device}": why for case, why in compare(emulated, known).items()}
    if fixture:
        save(fixture, found, device=device)
    for case, reasons in wrong.items():
        print(f"WRONG {case}: " + "; ".join(reasons), flush=True)
    kept = len(list(FIXTURES.glob("*.npz")))
    print(f"{len(found)} outputs of primitives, {len(wrong)} wrong; compared with {kept} GPUs' of before")
    return wrong

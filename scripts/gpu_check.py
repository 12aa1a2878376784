#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks and times the built plugin on this machine's GPU, through its TensorRT interface; see gpu_check.sh.

Correct: every row of the operator's contract and a few larger ones, enqueued plainly and replayed from a captured CUDA
graph, against float64 by the contract's tolerance rule; a batch past 2^31 elements; through the kernels' own door
packed sequences and paged caches (gpu_check_caches.py); and each primitive against its emulation
(gpu_check_primitives.py). Fast: prefill and decoding beside PyTorch's SDPA, paged decoding beside a contiguous cache
(gpu_check_paged.py), measured in turns, each call on other tensors than the one before.
Exits 1 if a number is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import gpu_check_caches as caches
import gpu_check_paged as paged
import gpu_check_primitives as primitives
from contract import reference, tensors, tolerance
from contract.cases import CASES, Case
from plugin.driver import Buffer, Plugin, PluginFailed
from plugin.host_plugin import output_shapes

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int32": torch.int32}

LARGE = [
    Case(name="large_fp16", dtype="fp16", batch=1, heads_q=4, seqlen_q=1000, seqlen_kv=1009, head_dim=128, causal=1),
    Case(name="large_bf16_gqa", dtype="bf16", batch=1, heads_q=8, seqlen_q=777, seqlen_kv=1025, head_dim=64, layout=1),
    Case(name="large_fp32", batch=1, seqlen_q=515, seqlen_kv=600, head_dim=64, causal=1, diagonal=1),
    Case(name="large_decode", dtype="fp16", heads_q=8, seqlen_q=1, seqlen_kv=4099, head_dim=128, layout=1),
]
FEW = ["fp16_top_left", "bf16_bottom_right", "gqa_fp32", "bias_of_keys", "lengths_bottom_right", "packed_gqa", "no_key"]
"""Rows for --without-gpu; the plugin's own tests run all of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What is timed; heads first, as PyTorch's SDPA takes it. One query is a step of decoding: it sees every key."""

    dtype: str
    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        mask = "decode" if self.decodes else "causal" if self.causal else "full"
        heads = f"H{self.heads}" if self.heads == self.heads_kv else f"H{self.heads}/{self.heads_kv}"
        return f"{self.dtype} {mask} B{self.batch} {heads} S{self.seqlen_kv} D{self.head_dim}"

    @property
    def decodes(self) -> bool:
        """Whether reading the keys and values is the work."""
        return self.seqlen_q == 1

    @property
    def flop(self) -> float:
        """Operations of the two products; half of them where causal, as papers count."""
        products = 4.0 * self.batch * self.heads * self.seqlen_q * self.seqlen_kv * self.head_dim
        return products / (2 if self.causal else 1)

    @property
    def kv_bytes(self) -> float:
        """Keys and values, each read once."""
        return 2.0 * self.batch * self.heads_kv * self.seqlen_kv * self.head_dim * (4 if self.dtype == "fp32" else 2)

    def rate(self, ms: float) -> str:
        """What a call that takes so long does: GB/s of keys and values while decoding, else TFLOP/s."""
        return f"{self.kv_bytes / ms / 1e6:9.1f} GB/s   " if self.decodes else f"{self.flop / ms / 1e9:9.1f} TFLOP/s"

    def case(self) -> Case:
        """The operator that computes it."""
        return Case(name=str(self), dtype=self.dtype, batch=self.batch, heads_q=self.heads, heads_kv=self.heads_kv,
                    seqlen_q=self.seqlen_q, seqlen_kv=self.seqlen_kv, head_dim=self.head_dim, layout=1,
                    causal=int(self.causal))  # fmt: skip


def prefill(dtype: str, seqlen: int, head_dim: int, *, causal: bool) -> Shape:
    """16,384 tokens in sequences of ``seqlen``, heads of 2,048 numbers together: as papers time it."""
    heads = 2048 // head_dim
    return Shape(dtype, 16384 // seqlen, heads, heads, seqlen, seqlen, head_dim, causal)


TIMED = [
    *(prefill("fp16", s, d, causal=c) for d in (64, 128) for c in (True, False) for s in (512, 2048, 16384)),
    prefill("bf16", 4096, 128, causal=True),
    Shape("fp16", 1, 32, 8, 1, 16384, 128, False),
    Shape("fp16", 16, 32, 8, 1, 4096, 128, False),
    Shape("fp16", 1, 16, 16, 1, 65536, 64, False),
]
CALLS_A_TURN = 5
TIMED_ON_HOST = [Shape("fp16", 1, 1, 1, 65, 65, 16, True), Shape("fp16", 1, 4, 2, 1, 133, 16, False)]
FAR_BATCHES = 8193
"""Of 16 heads of 128 x 128 numbers: the first such batch that starts past 2^31 elements is the last."""
FAR_BYTES = 24 << 30


class Device:
    """Where the plugin runs: a GPU, or host memory with the emulated kernels."""

    def __init__(self, build: Path, *, gpu: bool) -> None:
        self.gpu = gpu
        self.name = torch.cuda.get_device_name() if gpu else "emulated kernels on the CPU"
        self._place = "cuda" if gpu else "cpu"
        self._driver = build / "lib" / "libplugin_driver.so"
        self._library = build / "lib" / f"libflash_attention_plugin{'' if gpu else '_emulated'}.so"

    def tensor(self, array: NDArray) -> torch.Tensor:
        """A copy of the array here."""
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(self._place)
        return torch.from_numpy(array.copy()).to(self._place)

    def filled(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """NaN everywhere, so that what is not written shows."""
        return torch.full(shape, math.nan, dtype=TORCH_DTYPES[dtype], device=self._place)

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
        """Standard normal numbers."""
        generator = torch.Generator(self._place).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self._place).to(TORCH_DTYPES[dtype])

    def call(self, case: Case, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Callable[[], None]:
        """A function that enqueues ``case`` on PyTorch's current stream."""
        plugin = Plugin(self._driver, self._library, case.operator, case.attributes())
        ins, outs = [_buffer(t) for t in inputs], [_buffer(t) for t in outputs]
        workspace = torch.empty(plugin.prepare(ins, outs), dtype=torch.uint8, device=self._place)

        def enqueue() -> None:
            stream = torch.cuda.current_stream().cuda_stream if self.gpu else 0
            plugin.enqueue(ins, outs, workspace.data_ptr(), stream)

        return enqueue

    def captured(self, call: Callable[[], None]) -> Callable[[], None]:
        """The call as a CUDA graph's replay; on the host the call itself."""
        if not self.gpu:
            return call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def wait(self) -> None:
        """Until everything enqueued is done; raises what went wrong on the way."""
        if self.gpu:
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """One call's time, by CUDA events on a GPU."""
        if not self.gpu:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after))


def _buffer(tensor: torch.Tensor) -> Buffer:
    name = next(name for name, dtype in TORCH_DTYPES.items() if dtype == tensor.dtype)
    return Buffer(tensor.data_ptr(), name, tuple(tensor.shape))


def to_numpy(tensor: torch.Tensor) -> NDArray:
    """The tensor's numbers, dtype kept."""
    if tensor.dtype == torch.bfloat16:
        return tensor.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.cpu().numpy()


def why_wrong(device: Device, case: Case) -> list[str]:
    """What is wrong with the plugin's numbers for ``case``, plainly and captured; empty: nothing.

    Raises:
        PluginFailed: the plugin refuses the case or its launch fails.
    """
    given = tensors.make(case)
    inputs = [device.tensor(array) for array in tensors.node_inputs(case, given)]
    outputs = [device.filled(s, d) for s, d in zip(output_shapes(case), (case.dtype, "fp32"), strict=False)]
    call = device.call(case, inputs, outputs)
    expected_output, expected_lse, base = tensors.expected(case)
    reasons = []
    for how, run in (("plainly", call), ("captured", device.captured(call))):
        for tensor in outputs:
            tensor.fill_(math.nan)
        run()
        device.wait()
        output = tensors.heads_first(to_numpy(outputs[0]), case.layout, case.heads_q)
        found = tolerance.why_rejected(output, expected_output, base, softcap=case.softcap)
        if len(outputs) > 1:
            found += tolerance.why_lse_rejected(to_numpy(outputs[1]), expected_lse)
        reasons += [f"{how}: {reason}" for reason in found]
    return reasons


def check_all(device: Device, cases: list[Case]) -> dict[str, list[str]]:
    """Case name -> what is wrong; prints as it goes."""
    wrong = {}
    for i, case in enumerate(cases):
        try:
            reasons = why_wrong(device, case)
        except PluginFailed as failure:
            reasons = [str(failure)]
        if reasons:
            wrong[case.name] = reasons
            print(f"WRONG {case.name}: " + "; ".join(reasons), flush=True)
        if (i + 1) % 20 == 0:
            print(f"{i + 1} of {len(cases)} cases, {len(wrong)} wrong", flush=True)
    print(f"{len(cases) - len(wrong)} cases right, {len(wrong)} wrong, each plainly and from a captured graph")
    return wrong


def rivals(device: Device) -> Iterator[tuple[str, Callable[[], AbstractContextManager]]]:
    """PyTorch's ways of doing the same, as (name, context to call SDPA in)."""
    if not device.gpu:
        yield "PyTorch", nullcontext
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    yield "SDPA flash", lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    yield "SDPA cuDNN", lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def why_end_wrong(
    shape: Shape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
) -> list[str]:
    """Checks the last 64 rows of the last head against float64: in a square problem they are bottom-right causal."""
    q, k, v, got = (to_numpy(t[-1:, -1:]) for t in (query, key, value, output))
    rows = {"scale": shape.head_dim**-0.5, "causal": int(shape.causal), "diagonal": 1}
    truth, _ = reference.attention(q[:, :, -64:], k, v, **rows)  # type: ignore[arg-type]
    base = tolerance.unfused(q[:, :, -64:], k, v, **rows)  # type: ignore[arg-type]
    return tolerance.why_rejected(got[:, :, -64:], truth, base)


def time_shape(device: Device, shape: Shape, rounds: int) -> dict[str, Any]:
    """Median times in ms of the plugin and its rivals, called in turns so that clocks and caches are the same.

    Each turn replays a CUDA graph of several calls: what the host needs to start them is not measured. Each call has
    tensors of its own, so none finds the last one's in the cache.
    """
    dims = (shape.batch, shape.heads, shape.seqlen_q, shape.head_dim)
    kv_dims = (shape.batch, shape.heads_kv, shape.seqlen_kv, shape.head_dim)
    inputs = [
        [device.normal(d, shape.dtype, 3 * i + j) for j, d in enumerate((dims, kv_dims, kv_dims))]
        for i in range(CALLS_A_TURN)
    ]
    outputs = [device.filled(dims, shape.dtype) for _ in inputs]
    calls: dict[str, list[Callable[[], Any]]] = {
        "plugin": [device.call(shape.case(), given, [output]) for given, output in zip(inputs, outputs, strict=True)]
    }
    for name, context in rivals(device):

        def attend(given: list[torch.Tensor], context: Callable[[], AbstractContextManager] = context) -> None:
            with context():
                torch.nn.functional.scaled_dot_product_attention(
                    *given, is_causal=shape.causal, enable_gqa=shape.heads != shape.heads_kv
                )

        calls[name] = [functools.partial(attend, given) for given in inputs]
    medians = in_turns(device, str(shape), calls, rounds)
    return row_of(shape, medians, why_end_wrong(shape, *inputs[-1], outputs[-1]))


def time_paged(device: Device, door: caches.Door, case: paged.PagedDecode, rounds: int) -> dict[str, Any]:
    """The same of a step over a paged cache, beside one that lies in one piece."""
    steps = [paged.Step(door, case, 10 * i) for i in range(CALLS_A_TURN)]
    calls = {way: [step.call(way) for step in steps] for way in ("paged", "contiguous")}
    medians = in_turns(device, str(case), calls, rounds)
    return row_of(case, medians, [reason for step in steps[-1:] for reason in step.why_wrong()])


def row_of(shape: Shape | paged.PagedDecode, medians: dict[str, float], wrong: list[str]) -> dict[str, Any]:
    """A row of the table."""
    rates = {name: shape.rate(ms) for name, ms in medians.items()}
    return {"shape": str(shape), "ms": medians, "rates": rates, "wrong": wrong}


def in_turns(device: Device, shape: str, calls: dict[str, list[Callable[[], Any]]], rounds: int) -> dict[str, float]:
    """Median time of a call in ms; who does not run is left out, with a line that says why."""
    turns = {}
    for name, some in calls.items():
        try:
            some[0]()  # loads modules; a capture must not
            device.wait()
            turns[name] = device.captured(lambda some=some: [call() for call in some])
        except RuntimeError as error:
            print(f"{name} does not run {shape}: {str(error).splitlines()[0]}")
    times: dict[str, list[float]] = {name: [] for name in turns}
    for i in range(rounds + 2):
        for name, turn in turns.items():
            elapsed = device.milliseconds(turn) / CALLS_A_TURN
            if i >= 2:  # the first ones warm the clocks
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def why_far_wrong(device: Device, batches: int) -> list[str]:
    """Whether the last of many batches, past 2^31 elements on a GPU, has the bits that it has alone."""
    case = Case(name="far", dtype="fp16", batch=batches, heads_q=16, heads_kv=16, seqlen_q=128, seqlen_kv=128,
                head_dim=128, layout=1)  # fmt: skip
    if not device.gpu:
        case = dataclasses.replace(case, heads_q=2, heads_kv=2, seqlen_q=16, seqlen_kv=16)
    dims = (batches, case.heads_q, case.seqlen_q, case.head_dim)
    inputs = [device.normal(dims, "fp16", seed) for seed in (1, 2, 3)]
    output = device.filled(dims, "fp16")
    device.call(case, inputs, [output])()
    alone = device.filled((1, *dims[1:]), "fp16")
    device.call(dataclasses.replace(case, batch=1), [t[-1:] for t in inputs], [alone])()
    device.wait()
    same = bool(torch.equal(output[-1:], alone)) and bool(torch.isfinite(alone).all())
    return [] if same else [f"batch {batches - 1} of {batches} differs from the same batch alone"]


def print_times(rows: list[dict[str, Any]], device: Device) -> None:
    """The table: time, rate and how many times as fast as each rival the first, ours, is."""
    print(f"\nMedian times on {device.name}" + ("" if device.gpu else " (no measurement of anything)"))
    for row in rows:
        first = next(iter(row["ms"]))
        ours = row["ms"][first]
        print(f"  {row['shape']}")
        for name, ms in row["ms"].items():
            beside = "" if name == first else f"   {first} is {ms / ours:5.2f} x as fast"
            print(f"    {name:<12}{ms:10.3f} ms {row['rates'][name]}{beside}")
        for reason in row["wrong"]:
            print(f"    WRONG: {reason}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="the build tree")
    parser.add_argument("--without-gpu", action="store_true", help="emulated kernels, few and small cases")
    parser.add_argument("--json", type=Path, help="write everything here too")
    parser.add_argument("--fixture", type=Path, help="keep what the primitives gave here")
    arguments = parser.parse_args()
    if not arguments.without_gpu and not torch.cuda.is_available():
        print("gpu_check: PyTorch finds no GPU; --without-gpu tries what needs none", file=sys.stderr)
        return 5

    start = time.monotonic()
    device = Device(arguments.build.resolve(), gpu=not arguments.without_gpu)
    cases = [*CASES, *LARGE] if device.gpu else [case for case in CASES if case.name in FEW]
    wrong = check_all(device, cases)
    door = caches.Door(arguments.build.resolve(), gpu=device.gpu)
    cache_cases = caches.CASES if device.gpu else caches.CASES_ON_HOST
    wrong |= caches.check_all(door, cache_cases)
    large_enough = device.gpu and torch.cuda.mem_get_info()[0] > FAR_BYTES
    if device.gpu and not large_enough:
        print(f"no {FAR_BYTES / 2**30:.0f} GiB are free here: tensors past 2^31 elements are not tried")
    if reasons := why_far_wrong(device, FAR_BATCHES if large_enough else 3):
        wrong["far"] = reasons
    wrong |= primitives.check_all(
        arguments.build.resolve(), gpu=device.gpu, device=device.name, fixture=arguments.fixture
    )
    rounds = 15 if device.gpu else 1
    rows = [time_shape(device, s, rounds) for s in (TIMED if device.gpu else TIMED_ON_HOST)]
    rows += [time_paged(device, door, c, rounds) for c in (paged.TIMED if device.gpu else paged.TIMED_ON_HOST)]
    print_times(rows, device)
    if arguments.json:
        report = {
            "device": device.name,
            "torch": torch.__version__,
            "cases": len(cases) + len(cache_cases),
            "wrong": wrong,
            "times": rows,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    failed = bool(wrong) or any(row["wrong"] for row in rows)
    print(f"\n{'WRONG NUMBERS' if failed else 'All right'}, {time.monotonic() - start:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

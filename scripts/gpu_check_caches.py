# SPDX-License-Identifier: Apache-2.0
"""What gpu_check.py tries of the kernels' own door: packed sequences, a paged cache, and keys appended to it.

The operator's nodes have none of these, so the door (plugin/kernels/flash_attention.h) is called directly.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from contract import reference, tolerance
from contract.emulated_library import KERNEL_DTYPES, FlashAppendArgs, FlashAttentionArgs, FlashTensor
from numpy.typing import NDArray

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, slots=True)
class CacheCase:
    """Sequences of their own lengths: packed where ``page_size`` is 0, else in a cache of such pages."""

    name: str
    dtype: str
    head_dim: int
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 4
    heads_kv: int = 2
    page_size: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The last query stands at the last key."""
        return {"scale": self.head_dim**-0.5, "causal": 1, "diagonal": 1}


CASES = [
    CacheCase("packed_fp16", "fp16", 128, (257, 0, 1000, 3), (257, 9, 1000, 640)),
    CacheCase("packed_fp32", "fp32", 64, (65, 130, 0), (65, 200, 70)),
    CacheCase("packed_decode_bf16", "bf16", 64, (1, 0, 2, 1), (4099, 12, 1500, 1), heads=8),
    CacheCase("paged_decode_fp16", "fp16", 128, (1, 1, 1), (4099, 17, 1030), heads=8, page_size=16),
    CacheCase("paged_prefill_bf16", "bf16", 64, (300, 300), (1025, 301), page_size=64),
    CacheCase("paged_fp32", "fp32", 128, (70, 70), (500, 71), page_size=256),
]
CASES_ON_HOST = [
    CacheCase("packed_fp16", "fp16", 64, (131, 0, 5), (131, 9, 70)),
    CacheCase("paged_decode_bf16", "bf16", 64, (1, 1), (291, 17), heads=8, page_size=16),
    CacheCase("paged_fp32", "fp32", 64, (19, 19), (70, 21), page_size=32),
]


class Door:
    """The kernels' library, on the GPU or emulated."""

    def __init__(self, build: Path, *, gpu: bool) -> None:
        name = "door" if gpu else "emulated"
        self._library = ctypes.CDLL(str(build / "lib" / f"libflash_attention_{name}.so"))
        self._library.flashAttentionWorkspace.restype = ctypes.c_size_t
        self._library.flashAttentionLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self._library.flashAttentionAppend.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.place = "cuda" if gpu else "cpu"
        self._gpu = gpu

    def _stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self._gpu else 0

    def workspace(self, arguments: FlashAttentionArgs) -> torch.Tensor:
        """What the attention asks for."""
        size = self._library.flashAttentionWorkspace(ctypes.byref(arguments))
        return torch.empty(size, dtype=torch.uint8, device=self.place)

    def enqueue(self, arguments: FlashAttentionArgs, workspace: torch.Tensor) -> None:
        """Enqueues the attention on PyTorch's current stream.

        Raises:
            RuntimeError: the door reports a cudaError_t.
        """
        address = workspace.data_ptr() if workspace.numel() else None
        if status := self._library.flashAttentionLaunch(ctypes.byref(arguments), address, self._stream()):
            raise RuntimeError(f"flashAttentionLaunch: cudaError {status}")

    def attend(self, arguments: FlashAttentionArgs) -> None:
        """Enqueues the attention and waits; raises as ``enqueue``."""
        self.enqueue(arguments, self.workspace(arguments))
        self.wait()

    def append(self, arguments: FlashAppendArgs) -> None:
        """Enqueues the append and waits; raises as ``attend``."""
        if status := self._library.flashAttentionAppend(ctypes.byref(arguments), self._stream()):
            raise RuntimeError(f"flashAttentionAppend: cudaError {status}")
        self.wait()

    def wait(self) -> None:
        """Until everything enqueued is done."""
        if self._gpu:
            torch.cuda.synchronize()

    def ints(self, numbers: Sequence[int]) -> torch.Tensor:
        """An int32 tensor here."""
        return torch.tensor(numbers, dtype=torch.int32, device=self.place)

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
        """Standard normal numbers."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(TORCH_DTYPES[dtype]).to(self.place)

    def nan(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Memory that nobody has written yet."""
        return torch.full(shape, math.nan, dtype=TORCH_DTYPES[dtype], device=self.place)


def view(tensor: torch.Tensor) -> FlashTensor:
    """Of ``[B or pages, S, H, D]``, or packed ``[S, H, D]``."""
    batch = tensor.stride(0) if tensor.dim() == 4 else 0
    return FlashTensor(tensor.data_ptr(), batch, tensor.stride(-2), tensor.stride(-3))


def _numpy(tensor: torch.Tensor) -> NDArray:
    if tensor.dtype == torch.bfloat16:
        return tensor.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.cpu().numpy()


def _heads_first(tensor: torch.Tensor) -> NDArray:
    return _numpy(tensor.contiguous()).transpose(1, 0, 2)[None]


def starts_of(lengths: Sequence[int]) -> list[int]:
    """cu_seqlens."""
    return [0, *itertools.accumulate(lengths)]


class Run:
    """A case's tensors: packed queries, and keys that are packed, or in shuffled pages with NaN all around."""

    def __init__(self, door: Door, case: CacheCase) -> None:
        self.door, self.case = door, case
        total_q, total_kv = sum(case.rows), sum(case.keys)
        self.query = door.normal((total_q, case.heads, case.head_dim), case.dtype, 1) * 2.5
        self.key = door.normal((total_kv, case.heads_kv, case.head_dim), case.dtype, 2)
        self.value = door.normal((total_kv, case.heads_kv, case.head_dim), case.dtype, 3)
        self.output = door.nan((total_q, case.heads, case.head_dim), case.dtype)
        self._starts_q, self._starts_kv = door.ints(starts_of(case.rows)), door.ints(starts_of(case.keys))

    def arguments(self) -> FlashAttentionArgs:
        """The attention over packed keys."""
        case = self.case
        return FlashAttentionArgs(
            dtype=KERNEL_DTYPES[case.dtype], batch=len(case.rows), q_num_heads=case.heads, kv_num_heads=case.heads_kv,
            head_dim=case.head_dim, v_head_dim=case.head_dim, seqlen_q=max(case.rows), seqlen_kv=max(case.keys),
            query=view(self.query), key=view(self.key), value=view(self.value), output=view(self.output),
            scale=case.options["scale"], causal=1, diagonal=1, window_left=-1, window_right=-1,
            cu_seqlens_q=self._starts_q.data_ptr(), cu_seqlens_kv=self._starts_kv.data_ptr(),
            total_q=sum(case.rows), total_kv=sum(case.keys),
        )  # fmt: skip

    def attend_packed(self) -> torch.Tensor:
        """The outputs, keys packed."""
        self.output.fill_(math.nan)
        self.door.attend(self.arguments())
        return self.output.clone()

    def attend_paged(self) -> torch.Tensor:
        """The outputs over a cache that all keys were appended to."""
        case, door = self.case, self.door
        width = -(-max(case.keys) // case.page_size)
        used = [-(-keys // case.page_size) for keys in case.keys]
        order = torch.randperm(sum(used) + 3, generator=torch.Generator().manual_seed(4)).tolist()
        table = [[order.pop() if i < n else -1 for i in range(width)] for n in used]
        pages = (sum(used) + 3, case.page_size, case.heads_kv, case.head_dim)
        key_cache, value_cache = door.nan(pages, case.dtype), door.nan(pages, case.dtype)
        page_table = torch.tensor(table, dtype=torch.int32, device=door.place)
        lengths, after = door.ints([0] * len(used)), door.ints([-1] * len(used))
        append = FlashAppendArgs(
            dtype=KERNEL_DTYPES[case.dtype], batch=len(used), kv_num_heads=case.heads_kv, head_dim=case.head_dim,
            v_head_dim=case.head_dim, page_size=case.page_size, page_count=pages[0], seqlen_new=max(case.keys),
            capacity=width * case.page_size, key=view(self.key), value=view(self.value), key_cache=view(key_cache),
            value_cache=view(value_cache), kv_lengths=lengths.data_ptr(), kv_lengths_stride=1,
            lengths_after=after.data_ptr(), cu_seqlens_new=self._starts_kv.data_ptr(), total_new=sum(case.keys),
            page_table=page_table.data_ptr(), page_table_stride=width,
        )  # fmt: skip
        door.append(append)
        arguments = self.arguments()
        arguments.key, arguments.value = view(key_cache), view(value_cache)
        arguments.cu_seqlens_kv, arguments.total_kv = None, 0
        arguments.kv_lengths, arguments.kv_lengths_stride = after.data_ptr(), 1
        arguments.page_table, arguments.page_table_stride = page_table.data_ptr(), width
        arguments.page_size, arguments.page_count = case.page_size, pages[0]
        self.output.fill_(math.nan)
        door.attend(arguments)
        return self.output.clone()

    def why_wrong(self, output: torch.Tensor) -> list[str]:
        """Each sequence against float64 by the contract's rule."""
        case, reasons = self.case, []
        starts_q, starts_kv = starts_of(case.rows), starts_of(case.keys)
        for b, rows in enumerate(case.rows):
            if rows == 0:
                continue
            mine, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_kv[b], starts_kv[b + 1])
            q, k, v = (_heads_first(t) for t in (self.query[mine], self.key[keys], self.value[keys]))
            truth, _ = reference.attention(q, k, v, **case.options)
            base = tolerance.unfused(q, k, v, **case.options)
            found = tolerance.why_rejected(np.ascontiguousarray(_heads_first(output[mine])), truth, base)
            reasons += [f"sequence {b}: {reason}" for reason in found]
        return reasons


def why_wrong(door: Door, case: CacheCase) -> list[str]:
    """What is wrong with the door's numbers; a paged cache must give a packed one's bits."""
    run = Run(door, case)
    try:
        packed = run.attend_packed()
        reasons = run.why_wrong(packed)
        if case.page_size and not torch.equal(packed, run.attend_paged()):
            reasons.append("the paged cache gives other bits than packed keys")
    except RuntimeError as failure:
        return [str(failure)]
    return reasons


def check_all(door: Door, cases: list[CacheCase], check: Callable[..., list[str]] = why_wrong) -> dict[str, list[str]]:
    """Case name -> what is wrong; prints as it goes."""
    wrong = {case.name: reasons for case in cases if (reasons := check(door, case))}
    for name, reasons in wrong.items():
        print(f"WRONG {name}: " + "; ".join(reasons), flush=True)
    print(f"{len(cases) - len(wrong)} cases of packed sequences and paged caches right, {len(wrong)} wrong")
    return wrong

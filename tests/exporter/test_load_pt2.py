# SPDX-License-Identifier: Apache-2.0
"""Honest ExportedPrograms pass the look-through: whatever PyTorch itself writes must not be taken for an attack."""

from __future__ import annotations

import collections
import contextlib
import re
import zipfile
from pathlib import Path

import pytest
import torch
from exporter.torch_models import Attention, save_program

from flash_export.errors import UsageError, UserError
from flash_export.load import load
from flash_export.load_pt2 import load_program
from flash_export.options import InputSpec, Options


def test_a_program_comes_back_with_its_weights_and_ranges(tmp_path: Path) -> None:
    saved = save_program(tmp_path / "a.pt2")
    program = load(Options(source=tmp_path / "a.pt2")).program
    assert program is not None
    assert sorted(str(r) for r in program.range_constraints.values()) == ["VR[0, int_oo]", "VR[1, 64]"]
    x = torch.randn(3, 5, 24)
    torch.testing.assert_close(program.module()(x), saved.module()(x), rtol=0, atol=0)


class Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))


class Containers(torch.nn.Module):
    def forward(self, pair: tuple, table: dict) -> dict:
        return collections.OrderedDict(total=pair[0] + pair[1], parts=[table["a"], table["b"]])


class Sizes(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x[:, : x.shape[1] // 2]
        grid = torch.arange(x.shape[1] * 2).reshape(2, -1) % max(x.shape[0], 3)
        return half.sum() + grid.sum() + torch.einsum("ab,cb->ac", x, x).sum()


class Bits(torch.nn.Module):
    """Masks as they are written: with ``&``, ``|``, ``^`` and their forms in place."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        position = torch.arange(x.shape[1])
        mask = (position[:, None] >= position) & keep[:, None, :]
        mask = mask | (position == 0) ^ keep[:, None, :]
        mask &= keep[:, :, None]
        return x.masked_fill(~mask.any(-1, keepdim=True), 0) + (position << 1)[:, None]


class Buffers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(0, 5))
        self.register_buffer("half_precision", torch.ones(3, dtype=torch.bfloat16))
        self.constant = torch.arange(4.0)
        self.tied = torch.nn.Linear(4, 4)
        self.other = self.tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.tied(x + self.constant)) + self.table.sum() + self.half_precision.sum()


DIM = torch.export.Dim.DYNAMIC


@pytest.mark.parametrize(
    ("module", "arguments", "shapes"),
    [
        (Branches(), (torch.randn(3, 5),), None),
        (Containers(), ((torch.ones(3), torch.ones(3)), {"a": torch.ones(2), "b": torch.ones(1)}), None),
        (Sizes(), (torch.randn(5, 6),), ({0: DIM, 1: DIM},)),
        (Bits(), (torch.randn(2, 7, 5), torch.ones(2, 7, dtype=torch.bool)), ({0: DIM, 1: DIM}, {0: DIM, 1: DIM})),
        (Buffers(), (torch.randn(3, 4),), ({0: DIM},)),
        (torch.nn.MultiheadAttention(24, 3), (torch.randn(5, 2, 24),) * 3, None),
        (Attention(is_causal=True), tuple(torch.randn(2, 3, 7, 8) for _ in range(3)), None),
        (torch.nn.LSTM(8, 5), (torch.randn(7, 2, 8),), None),
        (
            torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3, padding="same"), torch.nn.GELU("tanh")),
            (torch.ones(1, 3, 9, 9),),
            None,
        ),
    ],
    ids=["cond", "containers", "sizes", "bits", "buffers", "mha", "causal", "lstm", "conv"],
)
def test_what_pytorch_writes_passes(tmp_path: Path, module: torch.nn.Module, arguments: tuple, shapes: tuple) -> None:
    program = torch.export.export(module.eval(), arguments, dynamic_shapes=shapes, strict=False)
    for name, saved in (("training.pt2", program), ("decomposed.pt2", program.run_decompositions())):
        torch.export.save(saved, tmp_path / name)
        assert load_program(tmp_path / name).graph_signature.user_outputs


def test_extra_files_are_left_alone(tmp_path: Path) -> None:
    program = torch.export.export(torch.nn.Linear(3, 5), (torch.ones(2, 3),))
    torch.export.save(program, tmp_path / "a.pt2", extra_files={"notes.txt": "import os"})
    load_program(tmp_path / "a.pt2")


def test_flags_of_a_module_do_not_go_with_a_program(tmp_path: Path) -> None:
    save_program(tmp_path / "a.pt2")
    with pytest.raises(UsageError, match="does not go with an ExportedProgram"):
        load(Options(source=tmp_path / "a.pt2", inputs=(InputSpec("x", "float32", (2,)),)))


def test_a_truncated_program_is_a_usage_error(tmp_path: Path) -> None:
    save_program(tmp_path / "a.pt2")
    content = (tmp_path / "a.pt2").read_bytes()
    (tmp_path / "a.pt2").write_bytes(content[:-300])
    with pytest.raises(UsageError):
        load(Options(source=tmp_path / "a.pt2"))


METHOD, COMPRESSED_SIZE, SIZE, OFFSET = 10, 20, 24, 42
"""Where a record of a zip's table says how a member is packed, how large it is and where it lies (APPNOTE 4.3.12)."""


def test_a_damaged_record_of_the_archives_table_is_never_a_bug_of_ours(tmp_path: Path) -> None:
    save_program(tmp_path / "a.pt2")
    content = (tmp_path / "a.pt2").read_bytes()
    refused = 0
    for i, record in enumerate(re.finditer(b"PK\x01\x02", content)):
        damaged = bytearray(content)
        damaged[record.start() + (METHOD, COMPRESSED_SIZE, OFFSET, METHOD, SIZE)[i % 5]] ^= 0xFF
        (tmp_path / "b.pt2").write_bytes(damaged)
        with contextlib.suppress(UserError):
            load(Options(source=tmp_path / "b.pt2"))
            continue
        refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    "config",
    [
        "[]",
        '{"config": []}',
        '{"config": {"w": 3}}',
        '{"config": {"w": {"tensor_meta": []}}}',
        '{"config": {"w": {"tensor_meta": {"sizes": [5]}}}}',
    ],
)
def test_a_config_of_another_form_is_a_usage_error(tmp_path: Path, config: str) -> None:
    save_program(tmp_path / "a.pt2")
    with zipfile.ZipFile(tmp_path / "a.pt2") as old, zipfile.ZipFile(tmp_path / "b.pt2", "w") as new:
        for member in old.infolist():
            changed = member.filename.endswith("weights_config.json")
            new.writestr(member.filename, config if changed else old.read(member))
    with pytest.raises(UsageError, match="cannot be read"):
        load(Options(source=tmp_path / "b.pt2"))

# SPDX-License-Identifier: Apache-2.0
"""A file that is written appears whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from flash_export.errors import MissingHere
from flash_trt import output
from flash_trt.output import write_atomically


def test_the_new_content_replaces_the_old(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    path.write_bytes(b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(_: int) -> None:
        raise OSError(code, "full")

    path = tmp_path / "engine"
    path.write_bytes(b"old")
    monkeypatch.setattr(output.os, "fsync", full)
    with pytest.raises(MissingHere, match="disk is full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]

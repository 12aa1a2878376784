# SPDX-License-Identifier: Apache-2.0
"""ONNX files whose external data ends before the tensor does: ``attack(path, marker)``.

They may be copied badly as well as made badly, so they are a usage error; what counts is that nothing is read.
"""

from __future__ import annotations

from pathlib import Path

from security.attacks.graphs import model_with


def offset_past_the_end(path: Path, marker: Path) -> None:
    model_with(path, location="w.data", offset="4096", length="16")


def offset_just_past_the_end(path: Path, marker: Path) -> None:
    model_with(path, location="w.data", offset="1", length="16")


def length_too_big(path: Path, marker: Path) -> None:
    model_with(path, location="w.data", offset="0", length=str(2**40))


def length_that_overflows_with_its_offset(path: Path, marker: Path) -> None:
    model_with(path, location="w.data", offset=str(10**18 - 1), length=str(10**18 - 1))


def length_too_small(path: Path, marker: Path) -> None:
    model_with(path, location="w.data", length="4")


def file_that_is_missing(path: Path, marker: Path) -> None:
    model_with(path, location="missing.data")

# SPDX-License-Identifier: Apache-2.0
"""Hostile files under a name that promises another format, here ``.safetensors``: ``attack(path, marker)``."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import torch
from security.attacks import graphs, pickles
from security.attacks.marker import Payload


def a_pickle(path: Path, marker: Path) -> None:
    pickles.bare(path, marker)


def a_torch_zip(path: Path, marker: Path) -> None:
    pickles.in_a_torch_zip(path, marker)


def a_torchscript_archive(path: Path, marker: Path) -> None:
    pickles.in_a_torchscript_archive(path, marker)


def an_onnx_file_that_reads_outside(path: Path, marker: Path) -> None:
    graphs.parent_folder(path, marker)


def a_torch_zip_inside_a_torch_zip(path: Path, marker: Path) -> None:
    """The outer archive's own pickle is the payload's archive: a scan of the outer names finds nothing."""
    inner = io.BytesIO()
    torch.save({"weight": Payload(marker)}, inner)
    with zipfile.ZipFile(path, "w") as outer:
        outer.writestr("archive/data.pkl", inner.getvalue())
        outer.writestr("archive/version", "3\n")

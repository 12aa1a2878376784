# SPDX-License-Identifier: Apache-2.0
"""What the user asked for: the flags of ``flash-export`` as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

DtypeName = Literal["fp32", "fp16", "bf16"]


@dataclasses.dataclass(frozen=True, slots=True)
class Dim:
    """A dynamic dimension: its name and the range it may take (inclusive)."""

    name: str
    low: int | None = None
    high: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class InputSpec:
    """One ``--input NAME:DTYPE:DIM,DIM,...``; a dim is a number or a ``Dim``. ``x:float32:`` is a scalar."""

    name: str
    dtype: str
    dims: tuple[int | Dim, ...]


ModelSpec = str | Callable[[], object]
"""``--model``: ``PKG.MOD:CALLABLE``; from a program also the callable itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The flags of ``flash-export``; see ``flash-export --help``.

    ``output`` is None when not given: ``NAME.flash.onnx`` beside the source then. ``opset`` None means 18 for
    PyTorch sources; an ONNX source keeps its own. ``patterns`` are modules that register readers of operators.
    """

    source: Path
    output: Path | None = None
    model: ModelSpec | None = None
    inputs: tuple[InputSpec, ...] = ()
    dtype: DtypeName | None = None
    opset: int | None = None
    require_all: bool = False
    allow_none: bool = False
    skip: tuple[str, ...] = ()
    dry_run: bool = False
    check: bool = True
    values: Path | None = None
    fallback: bool = True
    trust_pickle: bool = False
    kv_cache: bool = False
    patterns: tuple[str, ...] = ()
    report: Path | None = None
    quiet: bool = False

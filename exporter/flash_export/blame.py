# SPDX-License-Identifier: Apache-2.0
"""Whose fault an exception is: the model's, where onnx itself finds a contradiction in it, else ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from flash_export.check_structure import why_refused
from flash_export.errors import UsageError, UserError


@contextlib.contextmanager
def blame(path: Path | None) -> Iterator[None]:
    """Turns an exception of the block into a ``UsageError`` if the ONNX file at ``path`` contradicts itself.

    A file is not refused for that beforehand: some exporters write wrong shapes beside right operators, and onnx
    cannot tell those files from one whose Transpose has more axes than its input. ``path`` is None where the file is
    an export of ours: what is wrong with it is our fault as well.

    Raises:
        UsageError: with onnx's own words.
        Exception: what the block raised, where onnx finds nothing wrong with the file.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        why = None if path is None else why_refused(path)
        if why is None:
            raise
        raise UsageError(
            "the ONNX file contradicts itself",
            where=str(path),
            got=" ".join(str(why).split())[:300],
            need="a model that onnx.checker accepts with full_check=True",
            do="export the model again, or give its nodes shapes and attributes that fit",
        ) from error

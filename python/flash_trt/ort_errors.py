# SPDX-License-Identifier: Apache-2.0
"""What ONNX Runtime raises, in our five parts: its own errors share no base and are many lines long."""

from __future__ import annotations

import os
import re
from pathlib import Path

from flash_export.errors import MissingHere, UnsupportedModel, UsageError, UserError

_FIVE_PARTS = re.compile(
    r"(?P<what>[^\n:]+)\n  where (?P<where>.*)\n  got   (?P<got>.*)\n  need  (?P<need>.*)\n  do    (?P<do>.*)"
)
"""An error of the operator library, without what ONNX Runtime says before it."""


_UNWRITTEN = re.compile(
    r"SystemError : (?P<number>\d+)$|Protobuf serialization failed|Failed to save ORT format model to file"
)
"""An optimized model could not be opened, or not be written whole. What it reads it names by another error."""


_OUT_OF_MEMORY = re.compile(r"bad[ _]alloc|failed to allocate memory|out of memory|outofmemory", re.IGNORECASE)


def one_line(error: Exception) -> str:
    """The error's text on one line, cut where it stops being readable."""
    return " ".join(str(error).split())[:500]


def cannot_load(model: Path, error: Exception) -> UserError:
    """What to say when ONNX Runtime does not load ``model``: in the operator library's own words where it refused.

    What the environment asks of that library in vain is a mistake of the user's, all else is the model's.
    """
    told = _FIVE_PARTS.search(str(error))
    if told is None:
        return UnsupportedModel(
            "ONNX Runtime cannot load the model",
            where=str(model),
            got=one_line(error),
            need="a model that runs in plain ONNX Runtime: a fused one carries its function bodies",
            do="export without --no-fallback; an operator of another library needs that library",
        )
    kind = UsageError if told["where"].startswith("environment variable ") else UnsupportedModel
    return kind(told["what"].strip(), where=told["where"], got=told["got"], need=told["need"], do=told["do"])


def unwritten_file(option: str, path: str, error: Exception) -> UsageError | None:
    """What to say when ONNX Runtime does not write the file that an option asks for; None for another error."""
    failed = _UNWRITTEN.search(str(error))
    if failed is None:
        return None
    why = os.strerror(int(failed["number"])) if failed["number"] else one_line(error)
    return UsageError(
        "ONNX Runtime cannot write a file that an option asks for",
        where=f"option {option}",
        got=f"{option}={path!r}: {why}",
        need="the path of a file in a folder that is there, may be written to and has room",
        do="make the folder, or correct the path",
    )


def fails_on(model: Path, error: Exception) -> UsageError:
    """What to say when a model that loads fails on the inputs it was given."""
    return UsageError(
        "the model fails on these inputs",
        where=str(model),
        got=one_line(error),
        need="inputs that it takes",
        do="check their lengths against each other, and ids against their table",
    )


def is_out_of_memory(error: Exception) -> bool:
    """Whether a run failed for want of memory, the machine's or the device's: which says nothing of the model."""
    return isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)) is not None


def too_little_memory(model: Path, inputs: str, error: Exception) -> MissingHere:
    """What to say when ``model`` fails on ``inputs`` for want of memory."""
    return MissingHere(
        "there is too little memory for the model on these inputs",
        where=f"{model}, {inputs}",
        got=one_line(error) or type(error).__name__,
        need="more memory, or smaller inputs",
        do="limit them with --shape NAME:MIN,OPT,MAX, or give inputs with --values FILE.npz",
    )

# SPDX-License-Identifier: Apache-2.0
"""What ONNX Runtime raises, in our five parts: its own errors share no base and are many lines long."""

from __future__ import annotations

import re
from pathlib import Path

from flash_export.errors import UnsupportedModel, UsageError, UserError

_FIVE_PARTS = re.compile(
    r"(?P<what>[^\n:]+)\n  where (?P<where>.*)\n  got   (?P<got>.*)\n  need  (?P<need>.*)\n  do    (?P<do>.*)"
)
"""An error of the operator library, without what ONNX Runtime says before it."""


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


def fails_on(model: Path, error: Exception) -> UsageError:
    """What to say when a model that loads fails on the inputs it was given."""
    return UsageError(
        "the model fails on these inputs",
        where=str(model),
        got=one_line(error),
        need="inputs that it takes",
        do="check their lengths against each other, and ids against their table",
    )

# SPDX-License-Identifier: Apache-2.0
"""Tables in docs/performance.md that a benchmark writes, each between two marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


def replace(name: str, rows: Sequence[str]) -> None:
    """Puts ``rows`` between the marks ``NAME:begin`` and ``NAME:end`` of the page."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    table = "\n".join([begin, *rows, end])
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: table, text, flags=re.DOTALL))

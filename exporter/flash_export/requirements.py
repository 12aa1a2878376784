# SPDX-License-Identifier: Apache-2.0
"""How to install what an optional part needs, for the last line of an error.

flash-export itself may come from a checkout, a wheel or a package index, and its extras are spelled otherwise in each;
the requirements that an extra stands for are the same everywhere, and the installed package names them.
"""

from __future__ import annotations

import importlib.metadata
import re

DISTRIBUTION = "flash-export"


def pip_install(extra: str, *packages: str) -> str:
    """``pip install "torch>=2.10,<3"``: what ``extra`` requires, of which ``packages`` alone where some are named.

    Without the package's metadata, as when its folders are only on ``PYTHONPATH``, the names have no ranges.
    """
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    of_extra = [text.partition(";")[0].strip() for text in required if re.search(rf"extra == .{extra}\W", text)]
    found = {re.split(r"[^\w.-]", text, maxsplit=1)[0]: _lower_bound_first(text) for text in of_extra}
    wanted = [found.get(name, name) for name in packages] or list(found.values())
    return "pip install " + " ".join(f'"{text}"' for text in wanted)


def _lower_bound_first(requirement: str) -> str:
    """``torch<3,>=2.10`` as people write it: ``torch>=2.10,<3``."""
    name, *_ = re.split(r"[<>=!~]", requirement, maxsplit=1)
    bounds = requirement[len(name) :].split(",")
    return name + ",".join(sorted(bounds, key=lambda bound: not bound.startswith(">")))

# SPDX-License-Identifier: Apache-2.0
"""``--pattern PKG.MOD``: readers of the user's own operators, which the module puts into ``PATTERNS`` by itself.

Never implied by anything in a model file: a module runs as the user's own code, as with ``--model``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flash_export.errors import UsageError
from flash_export.own_code import ANYTHING, import_from_here, is_dotted, raised
from flash_export.patterns import PATTERNS

_FORM = "PATTERNS[DOMAIN, OPERATOR] = read in that module, with PATTERNS of flash_export.patterns (docs/api.md)"


def register(modules: Sequence[str]) -> None:
    """Imports each of ``modules``, the working folder on the path.

    Raises:
        UsageError: not of the form PKG.MOD, not importable, or it puts no reader into ``PATTERNS``.
    """
    for name in modules:
        where, before, known = f"--pattern {name}", dict(PATTERNS), name in sys.modules
        if not is_dotted(name):
            raise _wrong(where, repr(name), "PKG.MOD, for example mypatterns.tempered", "name the module, without .py")
        try:
            import_from_here(name)
        except ANYTHING as error:
            need = f"a module that can be imported from {Path.cwd()}"
            do = "run flash-export in the folder that it is imported from, or put that on PYTHONPATH"
            raise _wrong(where, raised(error), need, do) from error
        new = {key: reader for key, reader in PATTERNS.items() if before.get(key) is not reader}
        if not new and not known:
            raise _wrong(where, "a module that registers nothing", "at least one reader in PATTERNS", _FORM)
        for key, reader in new.items():
            names = isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) for part in key)
            if not names or not callable(reader):
                PATTERNS.clear()
                PATTERNS.update(before)
                got = f"PATTERNS[{key!r}] = {reader!r}"[:200]
                raise _wrong(where, got, "(domain, operator) -> a function read(anchor, region)", _FORM)


def _wrong(where: str, got: str, need: str, do: str) -> UsageError:
    return UsageError("the pattern cannot be used", where=where, got=got, need=need, do=do)

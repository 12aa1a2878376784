# SPDX-License-Identifier: Apache-2.0
"""``--pattern PKG.MOD``: readers of the user's own operators, which the module puts into ``PATTERNS`` by itself.

Never implied by anything in a model file: a module runs as the user's own code, as with ``--model``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flash_export.errors import UsageError
from flash_export.own_code import ANYTHING, forget, import_from_here, is_dotted, raised
from flash_export.patterns import PATTERNS

_FORM = "PATTERNS[DOMAIN, OPERATOR] = read in that module, with PATTERNS of flash_export.patterns (docs/api.md)"


def register(modules: Sequence[str]) -> None:
    """Imports each of ``modules``, the working folder on the path.

    One that is refused leaves ``PATTERNS`` as it was, and is imported anew the next time; one that was imported before
    has put its readers there already.

    Raises:
        UsageError: not of the form PKG.MOD, not importable, it puts no reader into ``PATTERNS``, or takes one out.
    """
    for name in modules:
        before, loaded = dict(PATTERNS), set(sys.modules)
        try:
            _register(name, before, known=name in loaded)
        except BaseException:  # an interrupt too
            PATTERNS.clear()
            PATTERNS.update(before)
            forget(name, loaded)
            raise


def _register(name: str, before: Mapping[tuple[str, str], object], *, known: bool) -> None:
    where = f"--pattern {name}"
    if not is_dotted(name):
        raise _wrong(where, repr(name), "PKG.MOD, for example mypatterns.tempered", "name the module, without .py")
    try:
        import_from_here(name)
    except ANYTHING as error:
        need = f"a module that can be imported from {Path.cwd()}"
        do = "run flash-export in the folder that it is imported from, or put that on PYTHONPATH"
        raise _wrong(where, raised(error), need, do) from error
    gone = [key for key in before if key not in PATTERNS]
    if gone:
        got = f"a module that takes {len(gone)} readers out, e.g. of {gone[0]!r}"[:200]
        raise _wrong(where, got, "a module that adds to PATTERNS", _FORM)
    new = {key: reader for key, reader in PATTERNS.items() if before.get(key) is not reader}
    if not new and not known:
        raise _wrong(where, "a module that registers nothing", "at least one reader in PATTERNS", _FORM)
    for key, reader in new.items():
        names = isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) for part in key)
        if not names or not callable(reader):
            got = f"PATTERNS[{key!r}] = {reader!r}"[:200]
            raise _wrong(where, got, "(domain, operator) -> a function read(anchor, region)", _FORM)


def _wrong(where: str, got: str, need: str, do: str) -> UsageError:
    return UsageError("the pattern cannot be used", where=where, got=got, need=need, do=do)

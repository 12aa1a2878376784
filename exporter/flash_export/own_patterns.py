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
from flash_export.own_reader import root_of
from flash_export.patterns import PATTERNS

_FORM = "PATTERNS[DOMAIN, OPERATOR] = read in that module, with PATTERNS of flash_export.patterns (docs/api.md)"

_put: dict[str, set[tuple[str, str]]] = {}
"""Which readers a module that was imported here put into ``PATTERNS``."""


def register(modules: Sequence[str]) -> None:
    """Imports each of ``modules``, the working folder on the path.

    One that is refused leaves ``PATTERNS`` as it was, and is imported anew the next time. One that was imported before
    may have put its readers there already.

    Raises:
        UsageError: not of the form PKG.MOD, not importable, it puts no reader into ``PATTERNS``, or takes one out.
    """
    for name in modules:
        before, loaded = dict(PATTERNS), set(sys.modules)
        try:
            _register(name, before)
        except BaseException:  # an interrupt too
            PATTERNS.clear()
            PATTERNS.update(before)
            forget(name, loaded)
            raise


def _register(name: str, before: Mapping[tuple[str, str], object]) -> None:
    where = f"--pattern {name}"
    if not is_dotted(name):
        raise _wrong(where, repr(name), "PKG.MOD, for example mypatterns.tempered", "name the module, without .py")
    try:
        module = import_from_here(name)
    except ANYTHING as error:
        need = f"a module that can be imported from {Path.cwd()}"
        do = "run flash-export in the folder that it is imported from, or put that on PYTHONPATH"
        raise _wrong(where, raised(error), need, do) from error
    gone = [key for key in before if key not in PATTERNS]
    if gone:
        got = f"a module that takes {len(gone)} readers out, e.g. of {gone[0]!r}"[:200]
        raise _wrong(where, got, "a module that adds to PATTERNS", _FORM)
    new = {key: reader for key, reader in PATTERNS.items() if before.get(key) is not reader}
    if not new and not _is_known(name):
        got = f"a module that registers nothing, {getattr(module, '__file__', None) or 'built into Python'}"
        raise _wrong(where, got, "at least one reader in PATTERNS", _FORM)
    for key, reader in new.items():
        names = isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) for part in key)
        if not names or not callable(reader):
            got = f"PATTERNS[{key!r}] = {reader!r}"[:200]
            raise _wrong(where, got, "(domain, operator) -> a function read(anchor, region)", _FORM)
    _put.setdefault(name, set()).update(new)


def _is_known(name: str) -> bool:
    """Whether readers of the module, or of its package, are in ``PATTERNS`` already."""
    root = name.partition(".")[0]
    put = any(key in PATTERNS for key in _put.get(name, ()))
    return put or (root != __package__ and any(root_of(reader) == root for reader in PATTERNS.values()))


def _wrong(where: str, got: str, need: str, do: str) -> UsageError:
    return UsageError("the pattern cannot be used", where=where, got=got, need=need, do=do)

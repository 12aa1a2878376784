# SPDX-License-Identifier: Apache-2.0
"""Finds our TensorRT plugin and loads it into a backend's registry.

``load_library`` of TensorRT answers None for every failure: a missing symbol, a plugin already there. So what it did is
read back from the registry's list of creators, never assumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

from flash_export.errors import MissingHere
from flash_export.op import DOMAIN, OPERATORS, VERSION
from flash_trt import native
from flash_trt.backends import Backend

LIBRARY = "libflash_attention_plugin.so"
VARIABLE = "FLASH_TRT_PLUGIN"


@dataclasses.dataclass(frozen=True, slots=True)
class PluginLibrary:
    """A plugin library that is loaded.

    Args:
        path: the file it came from.
        sha256: of that file, so an engine can say which plugin it was built with.
        operators: name -> plugin version, as the registry has them.
    """

    path: Path
    sha256: str
    operators: dict[str, str]


_loaded: dict[str, PluginLibrary] = {}
"""By backend name: a registry takes a library once."""


def find() -> Path:
    """The plugin library: ``$FLASH_TRT_PLUGIN`` when set, else the installed one, else the build tree's.

    Raises:
        MissingHere: there is none; the message lists every place searched.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        if Path(chosen).is_file():
            return Path(chosen).resolve()
        raise MissingHere(
            "the plugin library is not where the environment says",
            where=f"{VARIABLE}={chosen}",
            got="no such file",
            need=f"the path of {LIBRARY}",
            do=f"correct {VARIABLE}, or unset it to use the installed library",
        )
    found = native.find(LIBRARY)
    if found is not None:
        return found
    raise MissingHere(
        "the TensorRT plugin is missing",
        where=", ".join(map(str, native.folders())),
        got=f"no {LIBRARY} there, and {VARIABLE} is not set",
        need=f"{LIBRARY} with the operators {', '.join(OPERATORS)}",
        do=f"install flash-export from a wheel or with pip install -e ., or set {VARIABLE} to the library's path",
    )


def load(backend: Backend) -> PluginLibrary:
    """Puts every operator of ours into ``backend``'s registry, once a process.

    Raises:
        MissingHere: the library is not found, does not load, or lacks an operator of this version.
    """
    if backend.name not in _loaded:
        path = find()
        mark = len(backend.log)
        registry = backend.trt.get_plugin_registry()
        registry.load_library(str(path))
        operators = {c.name: c.plugin_version for c in registry.all_creators if c.plugin_namespace == DOMAIN}
        missing = [name for name in OPERATORS if operators.get(name) != str(VERSION)]
        if missing:
            raise MissingHere(
                f"the plugin library does not serve {', '.join(missing)}",
                where=str(path),
                got="; ".join(backend.errors_since(mark)) or f"registered: {operators or 'nothing'}",
                need=f"{', '.join(OPERATORS)}, each version {VERSION} in namespace {DOMAIN}",
                do="use the library of this flash-export version; flash-trt env shows which file is taken",
            )
        _loaded[backend.name] = PluginLibrary(path, sha256_of(path), operators)
    return _loaded[backend.name]


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hex, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

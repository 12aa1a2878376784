# SPDX-License-Identifier: Apache-2.0
"""Gives TensorRT for RTX the library name that its own ONNX parser asks for.

The parser dlopens "libtensorrt_rtx.so" at a plugin node and ends the process when there is none; the PyPI packages
only have "libtensorrt_rtx.so.1". Two ways to give it that name, neither of which writes into the packages: a shim
library of that SONAME which needs the real one, built with the plugin; or, before the first import, links in a
temporary folder.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.util
import sys
from pathlib import Path

from flash_export import interrupt
from flash_export.errors import MissingHere
from flash_trt import native

SHIM = "libtensorrt_rtx.so"


def prepare() -> None:
    """Makes ``dlopen("libtensorrt_rtx.so")`` find the installed library; does nothing where none is installed.

    Raises:
        MissingHere: there is no shim and tensorrt_rtx has been imported already, so it is too late for the links.
    """
    libraries = _installed_libraries()
    if libraries is None:
        return
    shim = native.find(SHIM)
    if shim is not None:
        importlib.import_module("tensorrt_rtx_libs")  # first: the shim needs libtensorrt_rtx.so.1 in the process
        ctypes.CDLL(str(shim))
    elif "tensorrt_rtx_libs" not in sys.modules:
        _load_through_links(libraries)
    else:
        raise MissingHere(
            "TensorRT for RTX cannot read plugin nodes in this process",
            where=str(libraries),
            got=f"tensorrt_rtx was imported before flash_trt, and there is no {SHIM} beside the plugin",
            need=f"a library whose SONAME is {SHIM}; without it the ONNX parser ends the process",
            do="call flash_trt.backends.load() before importing tensorrt_rtx, or install flash-export again",
        )


def _installed_libraries() -> Path | None:
    """The folder of the PyPI package's libraries; None when it was installed by other means or not at all."""
    try:
        spec = importlib.util.find_spec("tensorrt_rtx_libs")
    except ValueError:  # sys.modules holds None for it: hidden on purpose
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    return folder if (folder / f"{SHIM}.1").exists() else None


def _load_through_links(libraries: Path) -> None:
    """Loads both libraries from a folder of links, so that the parser's RPATH ($ORIGIN) is that folder.

    The dynamic linker takes $ORIGIN from the path a library was first loaded by; the later import finds them loaded.
    """
    folder = interrupt.temporary_folder("flash-trt-rtx-")
    links = Path(folder.__enter__())
    atexit.register(folder.__exit__, None, None, None)
    (links / SHIM).symlink_to(libraries / f"{SHIM}.1")
    for library in sorted(libraries.glob("lib*.so.1")):
        (links / library.name).symlink_to(library)
        ctypes.CDLL(str(links / library.name))

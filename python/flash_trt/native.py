# SPDX-License-Identifier: Apache-2.0
"""Where the compiled parts lie: in the installed package, or in a checkout's build tree."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import flash_trt


def folders() -> list[Path]:
    """Every folder that can hold them, in the order they are searched, whether it exists or not."""
    packages = [Path(entry) for entry in flash_trt.__path__]
    # scikit-build-core's editable install leaves compiled files in site-packages, away from the sources.
    installed = [Path(sysconfig.get_path(scheme)) / "flash_trt" for scheme in ("platlib", "purelib")]
    found = [package / "lib" for package in packages + installed]
    # A checkout has the sources in <checkout>/python/flash_trt.
    found += [package.parents[1] / "build" / "native" for package in packages if package.parent.name == "python"]
    return list(dict.fromkeys(found))


def find(library: str) -> Path | None:
    """The first file of that name, in subfolders too."""
    for folder in folders():
        for path in sorted(folder.rglob(library)):
            return path.resolve()
    return None

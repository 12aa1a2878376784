# SPDX-License-Identifier: Apache-2.0
"""Run as a program: loads and exports one file as the command does, and prints the error's class and exit code."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from flash_export.errors import UserError
from flash_export.export import export
from flash_export.load import load
from flash_export.options import Options


def main(source: str) -> None:
    options = Options(source=Path(source))
    try:
        with tempfile.TemporaryDirectory() as folder:
            exported = export(load(options), options, Path(folder))
            if exported.reference is not None:
                exported.reference(exported.example)
    except UserError as error:
        print(type(error).__name__, error.exit_code, flush=True)
    else:
        print("loaded", 0, flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(name)

# SPDX-License-Identifier: Apache-2.0
"""``python -m flash_trt.polygraphy ...``: NVIDIA's Polygraphy with our plugin in its TensorRT.

Polygraphy's own ``--plugins`` only opens a library; the plugin needs the registry, and TensorRT for RTX a library name
besides. This loads both and then hands every argument to Polygraphy's main.

    python -m flash_trt.polygraphy run model.flash.onnx --trt --onnxrt
    python -m flash_trt.polygraphy plugin match model.onnx

``FLASH_TRT_BACKEND`` (auto, tensorrt, tensorrt-rtx) chooses the TensorRT.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from flash_export.errors import UsageError, UserError
from flash_trt import backends, plugin_library, runners
from flash_trt.backends import BackendChoice

VARIABLE = "FLASH_TRT_BACKEND"
PLUGINS = Path(__file__).with_name("polygraphy_plugins")
"""What ``polygraphy plugin match`` reads: one folder with a ``pattern.py`` for each plugin."""


def main(arguments: Sequence[str]) -> int:
    """Loads TensorRT with the plugin, and runs Polygraphy on ``arguments``; returns its exit code.

    Raises:
        UsageError: ``FLASH_TRT_BACKEND`` names no TensorRT.
        MissingHere: no TensorRT, plugin or Polygraphy here.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in get_args(BackendChoice):
        raise UsageError(
            "the environment names no TensorRT",
            where=VARIABLE,
            got=repr(choice),
            need=f"one of {', '.join(get_args(BackendChoice))}",
            do=f"correct {VARIABLE}, or unset it",
        )
    backend = backends.select(choice)  # type: ignore[arg-type]
    plugin_library.load(backend)
    runners.tell_polygraphy(backend.name)
    runners.polygraphy_logger(quiet=False)
    from polygraphy.tools import main as polygraphy_main

    return int(polygraphy_main([*arguments, *_plugin_folder(arguments)]) or 0)


def _plugin_folder(arguments: Sequence[str]) -> list[str]:
    """``polygraphy plugin`` asks for the folder of patterns: ours, unless the user gives one."""
    return ["--plugin-dir", str(PLUGINS)] if arguments[:1] == ["plugin"] and "--plugin-dir" not in arguments else []


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

# SPDX-License-Identifier: Apache-2.0
"""``python -m flash_trt.polygraphy ...``: NVIDIA's Polygraphy with our plugin in its TensorRT.

Polygraphy's own ``--plugins`` only opens a library; the plugin needs the registry, and TensorRT for RTX a library name
besides. This loads both and then hands every argument to Polygraphy's main.

    python -m flash_trt.polygraphy run model.flash.onnx --trt --onnxrt --input-shapes x:[2,128,64] --val-range x:[-3,3]
    python -m flash_trt.polygraphy plugin match model.onnx

``FLASH_TRT_BACKEND`` (auto, tensorrt, tensorrt-rtx) chooses the TensorRT.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from flash_export import process
from flash_export.errors import MissingHere, UsageError
from flash_trt import backends, gpu
from flash_trt.backends import BackendChoice

VARIABLE = "FLASH_TRT_BACKEND"
_OF_NO_FILE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE)
_WRITES = ("-o", "--output", "--save", "--iter-artifact", "--intermediate-artifact", "--artifacts")
"""How arguments begin after which a model is named that need not be there yet."""
PLUGINS = Path(__file__).with_name("polygraphy_plugins")
"""What ``polygraphy plugin match`` reads: one folder with a ``pattern.py`` for each operator."""


def main(arguments: Sequence[str]) -> int:
    """Loads TensorRT with the plugin, and runs Polygraphy on ``arguments``; returns its exit code.

    Raises:
        UsageError: ``FLASH_TRT_BACKEND`` names no TensorRT, a rewrite is asked for, or Polygraphy would end with a
            traceback, as it does where a file is missing.
        MissingHere: no TensorRT, plugin or Polygraphy here, or a run in TensorRT without a GPU.
    """
    _refuse_early(arguments)
    _require_models(arguments)
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in get_args(BackendChoice):
        raise UsageError(
            "the environment names no TensorRT",
            where=VARIABLE,
            got=repr(choice),
            need=f"one of {', '.join(get_args(BackendChoice))}",
            do=f"correct {VARIABLE}, or unset it",
        )
    from flash_trt import plugin_library, runners  # onnx, numpy and more, which signals must not wait for

    backend = backends.select(choice)  # type: ignore[arg-type]
    plugin_library.load(backend)
    runners.tell_polygraphy(backend.name)
    runners.polygraphy_logger(quiet=False)
    from polygraphy.tools import main as polygraphy_main

    try:
        return int(polygraphy_main([*arguments, *_plugin_folder(arguments)]) or 0)
    except OSError as error:
        if error.errno in _OF_NO_FILE:
            raise
        need, do = "files that are there, and folders that can be written to", "correct the path"
        raise _fails("a file cannot be opened", arguments, error, need, do) from error
    except Exception as error:  # what it foresees it tells itself, and gives a code
        need, do = "a file, and arguments, that it takes", "look at its words above; polygraphy -vv says more"
        raise _fails("Polygraphy fails", arguments, error, need, do) from error


def _fails(what: str, arguments: Sequence[str], error: Exception, need: str, do: str) -> UsageError:
    from flash_trt.ort_errors import one_line

    got = one_line(error) or type(error).__name__
    return UsageError(what, where=f"polygraphy {' '.join(arguments)}"[:200], got=got, need=need, do=do)


def _refuse_early(arguments: Sequence[str]) -> None:
    """Refuses what would end in another's words, and late: a rewrite, and a run in TensorRT where no GPU is."""
    if not {"-h", "--help"}.isdisjoint(arguments):
        return
    if list(arguments[:2]) == ["plugin", "replace"]:
        from flash_trt import polygraphy_matches

        raise polygraphy_matches.refuse_to_replace()
    only_written = any(word.startswith("--gen") for word in arguments)
    if arguments[:1] == ["run"] and "--trt" in arguments and not only_written and not gpu.devices():
        raise MissingHere(
            "an engine cannot run here",
            where="run --trt",
            got="no GPU that NVIDIA's driver shows",
            need="an NVIDIA GPU with its driver",
            do="run it on a machine with one; here flash-trt compare checks the ONNX file, and with TensorRT for RTX"
            " polygraphy convert MODEL.onnx -o MODEL.engine builds",
        )


def _require_models(arguments: Sequence[str]) -> None:
    """Refuses a model that is not there, or is a folder.

    TensorRT's parser, which ``convert`` asks, ends at an assertion of its own, and a folder is taken for TensorFlow's.
    """
    own = itertools.takewhile(lambda word: not word.startswith("--chec"), arguments)  # then comes a command of its own
    for before, word in itertools.pairwise(own):
        if not word.endswith(".onnx") or word.startswith("-") or before.startswith(_WRITES):
            continue
        path = Path(word)
        number = errno.EISDIR if path.is_dir() else None if path.exists() else errno.ENOENT
        if number:
            error = OSError(number, os.strerror(number), word)
            raise _fails("a file cannot be opened", arguments, error, "a model that is there", "correct the path")


def _plugin_folder(arguments: Sequence[str]) -> list[str]:
    """``polygraphy plugin`` asks for the folder of patterns: ours, unless the user gives one."""
    return ["--plugin-dir", str(PLUGINS)] if arguments[:1] == ["plugin"] and "--plugin-dir" not in arguments else []


def script() -> int:
    """``main`` of this process's arguments; Polygraphy ends at a wrong one, and at ``--help``, by leaving."""
    try:
        return main(sys.argv[1:])
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)


if __name__ == "__main__":
    process.main("flash_trt.polygraphy", "script")

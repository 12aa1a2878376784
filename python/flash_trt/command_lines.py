# SPDX-License-Identifier: Apache-2.0
"""A build as the command lines of NVIDIA's own tools, ready to paste."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flash_trt import shapes
from flash_trt.backends import Backend
from flash_trt.plugin_library import PluginLibrary

if TYPE_CHECKING:
    from flash_trt.build import BuildOptions


def trtexec(options: BuildOptions, backend: Backend, plugin: PluginLibrary | None, profile: shapes.Profile) -> str:
    """The build for ``trtexec``, or for its twin ``tensorrt_rtx``."""
    parts = ["tensorrt_rtx" if backend.name == "tensorrt-rtx" else "trtexec --stronglyTyped"]
    parts += [f"--onnx={options.model}", f"--saveEngine={options.output}"]
    if plugin:
        parts.append(f"--dynamicPlugins={plugin.path}")
    if plugin and options.embed_plugin:
        parts.append(f"--setPluginsToSerialize={plugin.path}")
    if options.timing_cache and backend.name == "tensorrt":
        parts.append(f"--timingCacheFile={options.timing_cache}")
    parts += [flags] if (flags := profile.trtexec_flags()) else []
    return " ".join(parts)


def polygraphy(options: BuildOptions, backend: Backend, targets: Sequence[str], profile: shapes.Profile) -> str:
    """The build for ``polygraphy convert`` with the plugin loaded."""
    parts = [
        f"FLASH_TRT_BACKEND={backend.name} python -m flash_trt.polygraphy convert {shlex.quote(str(options.model))}"
    ]
    parts.append(f"--convert-to trt -o {shlex.quote(str(options.output))}")
    if backend.name == "tensorrt":  # the other product knows nothing else
        parts.append("--strongly-typed")
    for flag, attribute in (("min", "smallest"), ("opt", "usual"), ("max", "largest")):
        spelled = [f"{r.name}:[{','.join(map(str, getattr(r, attribute)))}]" for r in profile.ranges]
        parts += [f"--trt-{flag}-shapes {shlex.join(spelled)}"] if spelled else []
    if targets:
        numbers = [target.removeprefix("sm") for target in targets]
        parts.append("--compute-capabilities " + " ".join(f"{number[:-1]}.{number[-1]}" for number in numbers))
    return " ".join(parts)

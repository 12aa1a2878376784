# SPDX-License-Identifier: Apache-2.0
"""A build as the command lines of NVIDIA's own tools, ready to paste."""

from __future__ import annotations

import glob
import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from flash_trt import shapes
from flash_trt.backends import Backend
from flash_trt.plugin_library import PluginLibrary

if TYPE_CHECKING:
    from flash_trt.build import BuildOptions


def trtexec(
    options: BuildOptions,
    backend: Backend,
    plugin: PluginLibrary | None,
    targets: Sequence[str],
    profiles: Sequence[shapes.Profile],
    *,
    in_place: bool = False,
) -> str:
    """The build for ``trtexec``, or for its twin ``tensorrt_rtx``; ``in_place``: it has a cache that is written so."""
    words = ["tensorrt_rtx"] if backend.name == "tensorrt-rtx" else ["trtexec", "--stronglyTyped"]
    words += [f"--onnx={options.model}", f"--saveEngine={options.output}"]
    if plugin:
        words.append(f"--dynamicPlugins={plugin.path}")
    if plugin and options.embed_plugin:
        words.append(f"--setPluginsToSerialize={plugin.path}")
    if options.timing_cache and backend.name == "tensorrt":
        words.append(f"--timingCacheFile={options.timing_cache}")
    if in_place:
        words.append("--preview=+aliasedPluginIO1003")
    if targets:
        words.append("--computeCapabilities=" + ",".join(target.removeprefix("sm") for target in targets))
    for number, profile in enumerate(profiles):
        words += [f"--profile={number}"] if len(profiles) > 1 else []
        words += profile.trtexec_flags()
    return shlex.join(words)


def polygraphy(
    options: BuildOptions,
    backend: Backend,
    targets: Sequence[str],
    profiles: Sequence[shapes.Profile],
    *,
    in_place: bool = False,
) -> str:
    """The build for ``polygraphy convert`` with the plugin loaded, but for what ``polygraphy_lacks`` names."""
    words = ["python", "-m", "flash_trt.polygraphy", "convert", str(options.model)]
    words += ["--convert-to", "trt", "-o", str(options.output)]
    if backend.name == "tensorrt":  # the other product knows nothing else
        words.append("--strongly-typed")
    if options.timing_cache and backend.name == "tensorrt":
        cache = str(options.timing_cache)
        words += ["--load-timing-cache", cache, "--save-timing-cache", cache]
    if in_place:
        words += ["--preview-features", "ALIASED_PLUGIN_IO_10_03"]
    kinds = (("min", "smallest"), ("opt", "usual"), ("max", "largest"))
    for profile, (flag, attribute) in itertools.product(profiles, kinds):
        # Polygraphy reads a name as a pattern of fnmatch.
        spelled = [f"{glob.escape(r.name)}:[{','.join(map(str, getattr(r, attribute)))}]" for r in profile.ranges]
        words += [f"--trt-{flag}-shapes", *spelled] if spelled else []
    if targets:
        numbers = [target.removeprefix("sm") for target in targets]
        words += ["--compute-capabilities", *(f"{number[:-1]}.{number[-1]}" for number in numbers)]
    return f"FLASH_TRT_BACKEND={backend.name} {shlex.join(words)}"


def polygraphy_lacks(options: BuildOptions, plugin: PluginLibrary | None) -> list[str]:
    """The flags of the build that ``polygraphy convert`` cannot express."""
    return ["--embed-plugin"] if plugin and options.embed_plugin else []


def names_that_trtexec_splits(profiles: Iterable[Mapping[str, object]]) -> list[str]:
    """The inputs of ``profiles`` whose names mean something else in ``trtexec``'s flags, as repr spells them."""
    names = dict.fromkeys(name for profile in profiles for name in profile)
    return [repr(name) for name in names if set(name) & set(",'\"")]

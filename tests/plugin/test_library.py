# SPDX-License-Identifier: Apache-2.0
"""The built files themselves: what the plugin library exports and needs, and the RTX name library."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

PLUGIN = "libflash_attention_plugin.so"
RTX_NAME = "libtensorrt_rtx.so"
C_LIBRARY = re.compile(r"^(libc|libm|libdl|libpthread|librt|ld-linux[-\w]*)\.so(\.\d+)?$")


def tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def dynamic_entries(library: Path, tag: str) -> list[str]:
    """The values of ``tag`` (NEEDED, SONAME, ...) in the dynamic section."""
    return re.findall(rf"\({tag}\).*\[(.*)\]", tool("readelf", "-d", str(library)))


def test_the_plugin_exports_its_two_entry_points_alone(native_build: Path) -> None:
    symbols = tool("nm", "-D", "--defined-only", str(native_build / "lib" / PLUGIN)).split("\n")
    assert sorted(line.split()[-1] for line in symbols if line) == ["getCreators", "setLoggerFinder"]


def test_the_autoload_library_exports_nothing(native_build: Path) -> None:
    assert tool("nm", "-D", "--defined-only", str(native_build / "lib" / "libflash_attention_autoload.so")) == ""


def test_the_plugin_needs_the_c_library_alone(native_build: Path) -> None:
    needed = dynamic_entries(native_build / "lib" / PLUGIN, "NEEDED")
    assert needed, "readelf printed no NEEDED entry"
    assert [name for name in needed if not C_LIBRARY.match(name)] == []


def test_no_built_library_asks_for_more_of_the_c_library_than_it_uses(native_build: Path) -> None:
    # std::random_device, which nothing here uses, would: arc4random came with glibc 2.36.
    for name in (PLUGIN, "libflash_attention_cpu.so", "libflash_attention_autoload.so"):
        assert "arc4random" not in tool("nm", "-D", "--undefined-only", str(native_build / "lib" / name))


def test_no_built_library_has_a_search_path_of_the_building_machine(native_build: Path) -> None:
    for name in (PLUGIN, RTX_NAME):
        for tag in ("RPATH", "RUNPATH"):
            assert dynamic_entries(native_build / "lib" / name, tag) == []


def test_the_plugin_needs_no_undefined_cuda_or_tensorrt_symbol(native_build: Path) -> None:
    undefined = tool("nm", "-D", "--undefined-only", str(native_build / "lib" / PLUGIN))
    assert re.findall(r"\b(?:cu[A-Z]\w+|cuda\w+|\w*nvinfer\w*|getPluginRegistry|flashAttention\w+)", undefined) == []


def test_the_rtx_name_library_has_the_name_and_needs_the_real_one(native_build: Path) -> None:
    assert dynamic_entries(native_build / "lib" / RTX_NAME, "SONAME") == [RTX_NAME]
    assert "libtensorrt_rtx.so.1" in dynamic_entries(native_build / "lib" / RTX_NAME, "NEEDED")


def test_the_plugin_holds_machine_code_for_every_listed_gpu(native_build: Path) -> None:
    cache = (native_build / "CMakeCache.txt").read_text()
    listed = re.search(r"^FLASH_EXPORT_CUDA_ARCHITECTURES:\w+=(.*)$", cache, re.MULTILINE)
    assert listed, "FLASH_EXPORT_CUDA_ARCHITECTURES is not in CMakeCache.txt"
    flags = (native_build / "build.ninja").read_text()
    for architecture in listed[1].split(";"):
        number, _, kind = architecture.partition("-")
        assert f"{'compute' if kind == 'virtual' else 'sm'}_{number}" in flags

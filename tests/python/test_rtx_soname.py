# SPDX-License-Identifier: Apache-2.0
"""TensorRT for RTX's parser finds the library name it asks for, with our shim and without it."""

from __future__ import annotations

from pathlib import Path

from python.attention_models import fused
from python.fresh_process import run_python

from flash_trt import native, rtx_soname

PARSE = """
from pathlib import Path
from flash_export.errors import MissingHere
from flash_trt import backends, native, onnx_file, plugin_library, shapes
from flash_trt.build import build_engine
{before}
try:
    backend = backends.load("tensorrt-rtx")
    plugin_library.load(backend)
    file = onnx_file.read(Path({model!r}))
    print("layers", len(build_engine(backend, file, shapes.plan_profiles(file.inputs, []), ("sm80",)).layers))
except MissingHere as error:
    print("refused:", error)
"""
HIDE_THE_SHIM = """
find = native.find
native.find = lambda library: None if library == "libtensorrt_rtx.so" else find(library)
"""


def _parse(model: Path, before: str = "") -> tuple[int, str]:
    ran = run_python(PARSE.format(model=str(model), before=before))
    return ran.returncode, ran.stdout + ran.stderr


def test_the_shim_is_built_with_the_plugin() -> None:
    assert native.find(rtx_soname.SHIM) is not None


def test_with_the_shim_plugin_nodes_parse(tmp_path: Path) -> None:
    assert _parse(fused(tmp_path / "m.onnx")) == (0, "layers 1\n")


def test_without_the_shim_links_do(tmp_path: Path) -> None:
    assert _parse(fused(tmp_path / "m.onnx"), HIDE_THE_SHIM) == (0, "layers 1\n")


def test_too_late_for_links_is_an_error_and_no_abort(tmp_path: Path) -> None:
    code, told = _parse(fused(tmp_path / "m.onnx"), HIDE_THE_SHIM + "import tensorrt_rtx")
    assert code == 0
    assert "was imported before flash_trt" in told


def test_the_shim_serves_a_process_that_imported_rtx_first(tmp_path: Path) -> None:
    assert _parse(fused(tmp_path / "m.onnx"), "import tensorrt_rtx") == (0, "layers 1\n")

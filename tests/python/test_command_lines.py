# SPDX-License-Identifier: Apache-2.0
"""The lines for NVIDIA's tools hold every flag of the build, and a shell reads every path as one word."""

from __future__ import annotations

import json
import shlex
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from polygraphy.tools import convert
from python.attention_models import fused, renamed

from flash_export.errors import EXIT_OK
from flash_trt import command_lines
from flash_trt.backends import Backend, BackendName
from flash_trt.build import BuildOptions
from flash_trt.output import sidecar_path
from flash_trt.plugin_library import PluginLibrary
from flash_trt.shapes import Profile, parse

Command = Callable[..., int]

PLUGIN = PluginLibrary(Path("/li b/p$.so"), "0" * 64, {})
PROFILE = Profile((parse("in put:1x1,2x3,4x5"),), {})
OPTIONS = BuildOptions(
    Path("a model's.onnx"), Path("out dir/m;x.engine"), embed_plugin=True, timing_cache=Path("the cache")
)


def _backend(name: BackendName) -> Backend:
    return Backend(name, types.SimpleNamespace(__version__="0"), [], None)


def test_trtexec_gets_every_flag_and_each_path_as_one_word() -> None:
    assert shlex.split(command_lines.trtexec(OPTIONS, _backend("tensorrt"), PLUGIN, (), [PROFILE])) == [
        "trtexec",
        "--stronglyTyped",
        "--onnx=a model's.onnx",
        "--saveEngine=out dir/m;x.engine",
        "--dynamicPlugins=/li b/p$.so",
        "--setPluginsToSerialize=/li b/p$.so",
        "--timingCacheFile=the cache",
        "--minShapes=in put:1x1",
        "--optShapes=in put:2x3",
        "--maxShapes=in put:4x5",
    ]


def test_tensorrt_rtx_gets_the_targets_and_no_timing_cache() -> None:
    line = command_lines.trtexec(OPTIONS, _backend("tensorrt-rtx"), PLUGIN, ("sm80", "sm86", "sm120"), [PROFILE])
    words = shlex.split(line)
    assert words[0] == "tensorrt_rtx"
    assert "--computeCapabilities=80,86,120" in words
    assert not [word for word in words if "timingCache" in word or "stronglyTyped" in word]


def test_polygraphys_own_parser_takes_the_line_with_the_timing_cache_and_odd_paths() -> None:
    words = shlex.split(command_lines.polygraphy(OPTIONS, _backend("tensorrt"), (), [PROFILE]))
    assert words[:5] == ["FLASH_TRT_BACKEND=tensorrt", "python", "-m", "flash_trt.polygraphy", "convert"]
    arguments = convert.Convert().setup_parser().parse_args(words[5:])
    assert arguments.model_file == "a model's.onnx"
    assert arguments.output == "out dir/m;x.engine"
    assert arguments.load_timing_cache == arguments.save_timing_cache == "the cache"
    assert arguments.trt_opt_shapes == [["in put:[2,3]"]]


def test_a_cache_that_is_written_in_place_takes_the_preview_feature_in_both_lines() -> None:
    for name in ("tensorrt", "tensorrt-rtx"):
        line = command_lines.trtexec(OPTIONS, _backend(name), PLUGIN, (), [PROFILE], in_place=True)
        assert "--preview=+aliasedPluginIO1003" in shlex.split(line)
        assert "preview" not in command_lines.trtexec(OPTIONS, _backend(name), PLUGIN, (), [PROFILE])
    words = shlex.split(command_lines.polygraphy(OPTIONS, _backend("tensorrt"), (), [PROFILE], in_place=True))
    arguments = convert.Convert().setup_parser().parse_args(words[5:])
    assert arguments.preview_features == ["ALIASED_PLUGIN_IO_10_03"]
    assert arguments.model_file == "a model's.onnx"


def test_what_polygraphy_cannot_express_is_said(
    rtx: Backend, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    model, engine = fused(tmp_path / "m.onnx"), tmp_path / "m.engine"
    assert flash_trt("build", model, "-o", engine, "--target", "sm80") == EXIT_OK
    assert json.loads(sidecar_path(engine).read_text())["polygraphy_lacks"] == []
    assert "polygraphy convert has no" not in capsys.readouterr().err
    assert flash_trt("build", model, "-o", engine, "--target", "sm80", "--embed-plugin") == EXIT_OK
    assert json.loads(sidecar_path(engine).read_text())["polygraphy_lacks"] == ["--embed-plugin"]
    assert "polygraphy convert has no --embed-plugin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "warned"), [("a,b", True), ("it's", True), ("plain", False)], ids=["comma", "quote", "plain"]
)
def test_a_name_that_trtexec_would_split_is_said(
    rtx: Backend, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], name: str, warned: bool
) -> None:
    model = renamed(fused(tmp_path / "m.onnx"), name)
    assert flash_trt("build", model, "-o", tmp_path / "m.engine", "--target", "sm80") == EXIT_OK
    told = " ".join(capsys.readouterr().err.split())
    assert (f"trtexec reads commas and quotes in names itself: its line below has no input {name!r}" in told) is warned


def test_a_control_character_in_a_name_does_not_reach_the_terminal(
    rtx: Backend, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    model = renamed(fused(tmp_path / "m.onnx"), "q\x1b[31m")
    assert flash_trt("build", model, "-o", tmp_path / "m.engine", "--target", "sm80") == EXIT_OK
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err
    assert "--minShapes=q\\x1b[31m:1x" in told.out

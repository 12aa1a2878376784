# SPDX-License-Identifier: Apache-2.0
"""Opening the autoload library is enough in every TensorRT, and each wrong combination ends in a message, not a crash.

The registries are NVIDIA's own: TensorRT for RTX as installed, TensorRT 10 and 11 from the lean runtimes on PyPI.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plugin.autoload import lean_runtime
from python.attention_models import fused

from flash_export.op import INT_ATTRIBUTES, OPERATORS, Attributes
from flash_export.requirements import pip_install
from flash_trt import plan

HERE = Path(__file__).parent
OURS = len(OPERATORS)

pytestmark = pytest.mark.xdist_group("autoload")


@pytest.fixture(scope="session")
def autoload(native_build: Path) -> Path:
    return native_build / "lib" / "libflash_attention_autoload.so"


@pytest.fixture(scope="session")
def plugin(native_build: Path) -> Path:
    return native_build / "lib" / "libflash_attention_plugin.so"


@pytest.fixture(scope="session", params=["rtx", "10", "11"])
def tensorrt(request: pytest.FixtureRequest, repo_root: Path) -> Path:
    """The library that holds the registry of one TensorRT."""
    if request.param == "rtx":
        spec = importlib.util.find_spec("tensorrt_rtx_libs")
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"TensorRT for RTX is not installed: {pip_install('rtx')}")
        return Path(next(iter(spec.submodule_search_locations))) / "libtensorrt_rtx.so.1"
    return lean_runtime.library(repo_root, request.param)


def _host(*arguments: object, **environment: str) -> tuple[dict, str]:
    """What the child process saw, and what it said on stderr."""
    command = [sys.executable, str(HERE / "host_child.py"), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_opening_it_brings_every_operator_without_a_word(tensorrt: Path, autoload: Path) -> None:
    seen, said = _host(tensorrt, "--", f"open={autoload}")
    assert seen["added"] == OURS
    assert said == ""


@pytest.mark.parametrize("order", ["autoload first", "plugin first", "twice"])
def test_together_with_load_library_the_operators_come_once(
    tensorrt: Path, autoload: Path, plugin: Path, order: str
) -> None:
    actions = {
        "autoload first": [f"open={autoload}", f"load={plugin}"],
        "plugin first": [f"load={plugin}", f"open={autoload}"],
        "twice": [f"open={autoload}", f"open={autoload}"],
    }[order]
    seen, said = _host(tensorrt, "--", *actions)
    assert seen["added"] == OURS
    assert "autoload" not in said.replace(str(autoload), "")


def test_the_registry_that_is_asked_to_load_it_gets_the_operators_and_a_message(
    tensorrt: Path, autoload: Path, plugin: Path
) -> None:
    seen, said = _host(tensorrt, "--", f"load={autoload}")
    assert seen["given"] == [False]
    assert seen["added"] == OURS
    assert "the library that loads itself was given to a registry" in said
    assert f"need  load_library of {plugin}" in said


def test_the_plugin_itself_does_nothing_when_it_is_only_opened_and_says_what_to_open(
    tensorrt: Path, plugin: Path
) -> None:
    seen, said = _host(tensorrt, "--", f"open={plugin}")
    assert seen["added"] == 0
    assert "the plugin library was opened and never used" in said
    assert "libflash_attention_autoload.so" in said


def test_opened_or_loaded_in_other_ways_the_plugin_says_nothing(tensorrt: Path, plugin: Path) -> None:
    assert _host(tensorrt, "--", f"load={plugin}")[1] == ""
    assert _host("--", f"open={plugin}")[1] == ""


def test_preloaded_it_opens_the_tensorrt_on_the_library_path(autoload: Path, repo_root: Path) -> None:
    library = lean_runtime.library(repo_root, "11")
    plain, _ = _host(library, "--")
    seen, said = _host(library, "--", LD_PRELOAD=str(autoload), LD_LIBRARY_PATH=str(library.parent))
    assert seen["before"] == plain["before"] + OURS
    assert said == ""


def test_tensorrt_11s_own_bindings_load_the_plugin_and_make_every_operator(repo_root: Path, plugin: Path) -> None:
    attributes = Attributes(q_num_heads=4, kv_num_heads=2, scale=0.25)
    fields = [[n, "INT" if n in INT_ATTRIBUTES else "FLOAT", v] for n, v in dataclasses.asdict(attributes).items()]
    command = [sys.executable, str(HERE / "bindings_child.py"), str(lean_runtime.library(repo_root, "11"))]
    command += [str(lean_runtime.bindings(repo_root)), json.dumps(fields)]
    environment = {**os.environ, "FLASH_TRT_PLUGIN": str(plugin)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["version"].startswith("11.4")
    assert seen["operators"] == dict.fromkeys(OPERATORS, "1")
    assert seen["made"] == {name: [name, "1", "flash_export"] for name in OPERATORS}


def test_polygraphy_that_only_opens_it_builds_the_plugin_into_an_engine(autoload: Path, tmp_path: Path) -> None:
    """TensorRT for RTX's parser ends the process at a plugin node where no library has the name that it asks for."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip(f"TensorRT for RTX is not installed: {pip_install('rtx')}")
    model, engine = fused(tmp_path / "model.onnx", fallback=False), tmp_path / "model.engine"
    command = [sys.executable, "-c", "from polygraphy.tools import main; main()"]
    command += ["convert", str(model), "--convert-to", "trt", "-o", str(engine)]
    command += ["--plugins", str(autoload), "--compute-capabilities", "8.9"]
    environment = {**os.environ, "POLYGRAPHY_USE_TENSORRT_RTX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(plan.plugin_records(engine.read_bytes())) == 1


# --- wrong combinations -----------------------------------------------------------------------------------------------


def test_without_tensorrt_it_says_so(autoload: Path) -> None:
    seen, said = _host("--", f"open={autoload}")
    assert seen["given"] == [True]
    assert "there is no TensorRT in this process" in said
    assert "open TensorRT first" in said


@pytest.mark.parametrize("version", [8601, 10500, 100600, 120000, 0, -1])
def test_an_unknown_tensorrt_is_not_touched_and_its_version_told(
    autoload: Path, native_build: Path, version: int
) -> None:
    fake = native_build / "tests" / "plugin" / "autoload" / "libnvinfer.so.11"
    code = f"import ctypes; ctypes.CDLL({str(fake)!r}); ctypes.CDLL({str(autoload)!r}); print('alive')"
    environment = {**os.environ, "FAKE_TENSORRT_VERSION": str(version)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "alive\n"
    assert "this TensorRT is not supported" in done.stderr
    assert f"libnvinfer.so.11, version {version}\n" in done.stderr


def test_alone_without_the_plugin_beside_it_says_which_file_it_wants(
    tensorrt: Path, autoload: Path, tmp_path: Path
) -> None:
    shutil.copy(autoload, tmp_path)
    seen, said = _host(tensorrt, "--", f"open={tmp_path / autoload.name}")
    assert seen["added"] == 0
    assert f"no {tmp_path / 'libflash_attention_plugin.so'} in its registry" in said


def test_the_environment_names_another_plugin(tensorrt: Path, autoload: Path, plugin: Path, tmp_path: Path) -> None:
    shutil.copy(autoload, tmp_path)
    seen, said = _host(tensorrt, "--", f"open={tmp_path / autoload.name}", FLASH_TRT_PLUGIN=str(plugin))
    assert seen["added"] == OURS
    assert said == ""


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_a_broken_plugin_beside_it_is_told(tensorrt: Path, autoload: Path, tmp_path: Path, content: bytes) -> None:
    shutil.copy(autoload, tmp_path)
    (tmp_path / "libflash_attention_plugin.so").write_bytes(content)
    seen, said = _host(tensorrt, "--", f"open={tmp_path / autoload.name}")
    assert seen["added"] == 0
    assert "the plugin library does not load into TensorRT" in said

# SPDX-License-Identifier: Apache-2.0
"""The plugin is found where it is said to be searched, and a library that does not serve is never taken for loaded."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from python.fresh_process import run_python

from flash_export.errors import MissingHere
from flash_export.op import OPERATORS
from flash_trt import native, plugin_library
from flash_trt.backends import Backend

LOAD = """
from flash_trt import backends, plugin_library
from flash_export.errors import MissingHere
try:
    library = plugin_library.load(backends.load("tensorrt-rtx"))
    print("loaded", library.path, sorted(library.operators))
except MissingHere as error:
    print("refused:", error)
"""


@pytest.fixture
def nothing_native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An installation without compiled parts: the one folder that is searched, empty."""
    monkeypatch.delenv(plugin_library.VARIABLE, raising=False)
    monkeypatch.setattr(native, "folders", lambda: [tmp_path / "lib"])
    return tmp_path / "lib"


def test_the_environment_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = tmp_path / "mine.so"
    chosen.write_bytes(b"")
    monkeypatch.setenv(plugin_library.VARIABLE, str(chosen))
    assert plugin_library.find() == chosen


def test_a_wrong_path_in_the_environment_is_not_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(plugin_library.VARIABLE, str(tmp_path / "gone.so"))
    with pytest.raises(MissingHere, match="gone"):
        plugin_library.find()


def test_the_library_is_found_in_subfolders(nothing_native: Path) -> None:
    (nothing_native / "deep").mkdir(parents=True)
    library = nothing_native / "deep" / plugin_library.LIBRARY
    library.write_bytes(b"")
    assert plugin_library.find() == library


def test_a_missing_library_lists_the_places_searched(nothing_native: Path) -> None:
    with pytest.raises(MissingHere) as caught:
        plugin_library.find()
    assert str(nothing_native) in caught.value.where
    assert plugin_library.VARIABLE in caught.value.do


def test_package_and_build_tree_are_searched() -> None:
    folders = [str(folder) for folder in native.folders()]
    assert any(folder.endswith("flash_trt/lib") for folder in folders)


def test_every_operator_is_in_the_registry(rtx: Backend) -> None:
    library = plugin_library.load(rtx)
    assert dict.fromkeys(OPERATORS, "1").items() <= library.operators.items()
    assert library.sha256 == hashlib.sha256(library.path.read_bytes()).hexdigest()


def test_loading_twice_is_loading_once(rtx: Backend) -> None:
    assert plugin_library.load(rtx) is plugin_library.load(rtx)


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF"])
def test_a_file_that_is_no_library_is_refused(tmp_path: Path, content: bytes) -> None:
    library = tmp_path / "broken.so"
    library.write_bytes(content)
    ran = run_python(LOAD, FLASH_TRT_PLUGIN=str(library))
    assert "refused: the plugin library does not serve FlashAttention" in ran.stdout, ran.stderr
    assert str(library) in ran.stdout


def test_a_library_without_creators_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "other.so"
    source = tmp_path / "other.c"
    source.write_text("int nothing_of_ours(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    ran = run_python(LOAD, FLASH_TRT_PLUGIN=str(library))
    assert "refused: the plugin library does not serve FlashAttention" in ran.stdout, ran.stderr

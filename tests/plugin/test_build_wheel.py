# SPDX-License-Identifier: Apache-2.0
"""`pip wheel .` gives a wheel with the tag that its libraries allow (scripts/wheel_backend.py), and `make wheel` gives
out none that is too large, for this machine alone or with its libraries (scripts/build_wheel.py)."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from scikit_build_core.settings.skbuild_read_settings import SettingsReader

TAGGED = "flash_export-0.1.0-py3-none-manylinux_2_35_x86_64.whl"


def _imported(repo_root: Path, name: str) -> ModuleType:
    sys.path.insert(0, str(repo_root / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(repo_root / "scripts"))


@pytest.fixture(scope="module")
def script(repo_root: Path) -> ModuleType:
    return _imported(repo_root, "build_wheel")


@pytest.fixture(scope="module")
def backend(repo_root: Path) -> ModuleType:
    return _imported(repo_root, "wheel_backend")


def wheel(path: Path, *members: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("flash_trt/lib/libflash_attention_plugin.so", *members):
            archive.writestr(name, "")
    return path


def test_a_tagged_wheel_of_our_own_libraries_is_given_out(script: ModuleType, tmp_path: Path) -> None:
    assert script.find_fault(wheel(tmp_path / TAGGED)) == ""


def test_a_wheel_for_this_machine_alone_is_not(script: ModuleType, tmp_path: Path) -> None:
    alone = wheel(tmp_path / "flash_export-0.1.0-py3-none-linux_x86_64.whl")
    assert "no manylinux tag" in script.find_fault(alone)


def test_a_wheel_with_a_library_of_this_machine_is_not(script: ModuleType, tmp_path: Path) -> None:
    grafted = wheel(tmp_path / TAGGED, "flash_export.libs/libgomp-a34b3233.so.1.0.0")
    assert "libgomp-a34b3233" in script.find_fault(grafted)


def test_a_wheel_over_the_limit_is_not(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.LIMIT_BYTES == 30 << 20
    monkeypatch.setattr(script, "LIMIT_BYTES", 10)
    assert "the limit is 10" in script.find_fault(wheel(tmp_path / TAGGED))


def test_a_plain_pip_build_leaves_the_folder_of_make_test_alone_and_make_wheel_compiles_nothing_anew(
    script: ModuleType, repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build without the tests' options in that folder would take out its tests, and compile it anew."""
    # As if CMakeLists.txt had just changed, so that the installation is among what it would do.
    make = ["make", "-n", "-W", "CMakeLists.txt", "test-native"]
    plan = subprocess.run(make, cwd=repo_root, capture_output=True, text=True, check=True, timeout=60).stdout
    (tested,) = re.findall(r"-C build-dir=(\S+)", plan)
    assert "-C cmake.define.FLASH_EXPORT_TESTS=ON" in plan
    assert f"ctest --test-dir {tested} " in plan

    plain = SettingsReader.from_file(repo_root / "pyproject.toml", {}, state="wheel").settings.build_dir
    assert plain
    assert not {Path(plain), *Path(plain).parents} & {Path(tested)}  # neither it nor a folder in it

    (tmp_path / TAGGED).touch()
    asked: list[str] = []
    monkeypatch.setattr(script.subprocess, "run", lambda command, **_: asked.extend(command))
    assert script.build(tmp_path) == tmp_path / TAGGED
    settings = dict(asked[at + 1].split("=") for at, flag in enumerate(asked) if flag == "-C")
    wheel = SettingsReader.from_file(repo_root / "pyproject.toml", settings, state="wheel").settings.build_dir
    assert wheel == tested


# --- the build backend ------------------------------------------------------------------------------------------------

ALONE = "flash_export-0.1.0-py3-none-linux_x86_64.whl"


def _real_wheel(path: Path, *libraries: Path) -> Path:
    """A wheel that auditwheel can read, with ``libraries`` in flash_trt/lib."""
    info = "flash_export-0.1.0.dist-info"
    members = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: flash-export\nVersion: 0.1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n",
        "flash_trt/__init__.py": b"",
        **{f"flash_trt/lib/{library.name}": library.read_bytes() for library in libraries},
    }
    record = "".join(f"{name},,\n" for name in [*members, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**members, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def core(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What scikit-build-core's ``build_wheel`` puts into its wheel, in its place."""
    libraries: list[Path] = []

    def build_wheel(folder: str, *_: object) -> str:
        return _real_wheel(Path(folder, ALONE), *libraries).name

    monkeypatch.setattr(backend.core, "build_wheel", build_wheel)
    return libraries


def test_a_wheel_of_our_libraries_is_tagged_for_every_linux(
    backend: ModuleType, script: ModuleType, core: list[Path], native_build: Path, tmp_path: Path
) -> None:
    names = ("plugin", "autoload", "cpu")
    core += [native_build / "lib" / f"libflash_attention_{name}.so" for name in names]
    name = backend.build_wheel(str(tmp_path))
    assert re.fullmatch(r"flash_export-0\.1\.0-py3-none-manylinux_2_\d+_x86_64(\.manylinux\S+)?\.whl", name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert script.find_fault(tmp_path / name) == ""
    with zipfile.ZipFile(tmp_path / name) as archive:
        assert {f"flash_trt/lib/{library.name}" for library in core} <= set(archive.namelist())


def test_a_wheel_that_auditwheel_does_not_take_keeps_its_tag_and_says_why(
    backend: ModuleType, core: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert backend.build_wheel(str(tmp_path)) == ALONE  # without a library there is nothing to tag
    assert [path.name for path in tmp_path.iterdir()] == [ALONE]
    assert f"{ALONE} is for this machine alone: auditwheel says" in capsys.readouterr().err


def test_pip_takes_this_backend_and_fetches_what_it_needs(backend: ModuleType, repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())
    assert project["build-system"]["build-backend"] == backend.__name__
    assert (repo_root / project["build-system"]["backend-path"][0] / "wheel_backend.py").is_file()
    assert set(backend.AUDIT) <= set(project["project"]["optional-dependencies"]["dev"])
    assert set(backend.AUDIT) <= set(backend.get_requires_for_build_wheel())
    for hook in backend.__all__:
        assert callable(getattr(backend, hook))

# SPDX-License-Identifier: Apache-2.0
"""With FLASH_EXPORT_SKIPS_FAIL set, a test that is skipped for want of something installable fails; no other does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

def test_fetches():
    pytest.skip("the schema cannot be fetched: no network")

@pytest.mark.skipif(True, reason="no Chromium here (apt-get install chromium)")
def test_browser():
    pass

@pytest.fixture
def compiler():
    pytest.skip("no aarch64-linux-gnu-g++ here")

def test_compiles(compiler):
    pass

@pytest.mark.skipif(True, reason="no NVIDIA driver here (libcuda.so.1)")
def test_gpu():
    pass

def test_root():
    pytest.skip("root may write anywhere")

@pytest.mark.xfail
def test_known():
    assert False

def test_runs():
    pass
"""


def outcomes(folder: Path, repo_root: Path, **variables: str) -> str:
    """The last line of a run of TESTS with this repository's conftest.py."""
    shutil.copy(repo_root / "conftest.py", folder)
    (folder / "test_some.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if name != "FLASH_EXPORT_SKIPS_FAIL"}
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder), str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env={**environment, **variables}
    )
    return done.stdout


def test_skips_are_skips_unless_they_are_to_fail(tmp_path: Path, repo_root: Path) -> None:
    assert "1 passed, 5 skipped, 1 xfailed" in outcomes(tmp_path, repo_root)


def test_what_could_be_installed_fails_with_its_reason(tmp_path: Path, repo_root: Path) -> None:
    said = outcomes(tmp_path, repo_root, FLASH_EXPORT_SKIPS_FAIL="1")
    for reason in ("the schema cannot be fetched", "no Chromium here", "no aarch64-linux-gnu-g++ here"):
        assert f"FLASH_EXPORT_SKIPS_FAIL is set: {reason}" in said
    assert "1 failed, 1 passed, 2 skipped, 1 xfailed, 2 errors" in said


def test_the_ci_sets_it_before_the_tests(repo_root: Path) -> None:
    lines = (repo_root / ".ci" / "run").read_text().splitlines()
    (setting,) = (i for i, line in enumerate(lines) if line.startswith("export FLASH_EXPORT_SKIPS_FAIL=1"))
    assert setting < lines.index("make test")


def test_the_tests_that_are_left_out_by_design_are_there(repo_root: Path) -> None:
    named = re.findall(r'"(tests/[^"]*\.py)"', (repo_root / "conftest.py").read_text())
    assert len(named) == 3
    assert all((repo_root / path).is_file() for path in named)


def test_a_native_test_without_its_tool_is_skipped_or_fails_too(native_build: Path) -> None:
    """The command that stands for a fuzz target without libFuzzer, and the target itself where there is one."""
    listed = (native_build / "tests/plugin/sanitized/CTestTestfile.cmake").read_text()
    if "no clang++ with libFuzzer here" not in listed:
        assert "-max_total_time=60" in listed
    source = (Path(__file__).parent / "plugin/sanitized/CMakeLists.txt").read_text()
    command = re.search(r"add_test\(NAME fuzz_fields COMMAND sh -c \"(.*)\"\)", source)
    assert command is not None
    script = command[1].replace("\\$", "$")
    for value, code in (("", 77), ("1", 1)):
        environment = {**os.environ, "FLASH_EXPORT_SKIPS_FAIL": value}
        done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert done.stdout == "skipped: no clang++ with libFuzzer here\n"
    assert "SKIP_RETURN_CODE 77" in source

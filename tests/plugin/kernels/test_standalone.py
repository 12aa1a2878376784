# SPDX-License-Identifier: Apache-2.0
"""The kernels without TensorRT: the commands of plugin/kernels/README.md, run as they stand there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

SECTION = re.compile(r"^## Use without TensorRT\n(.*?)^## ", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"(?:^    .+\n)+", re.MULTILINE)
NO_DRIVER = "cannot allocate device memory: error 35: CUDA driver version is insufficient for CUDA runtime version"


@pytest.fixture(scope="module")
def blocks(repo_root: Path) -> list[str]:
    section = SECTION.search((repo_root / "plugin/kernels/README.md").read_text())
    assert section is not None
    return [textwrap.dedent(block) for block in BLOCK.findall(section[1])]


@pytest.fixture(scope="module")
def environment(native_build: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Nothing can be fetched in it; the toolkit is the one that the native build found."""
    cache = (native_build / "CMakeCache.txt").read_text()
    cudart = re.search(r"^CUDA_cudart_static_LIBRARY:FILEPATH=(.+)$", cache, re.MULTILINE)
    assert cudart is not None
    toolkit = Path(cudart[1]).parents[1]
    return {
        "PATH": f"{toolkit / 'bin'}:{os.environ['PATH']}",
        "PREFIX": str(tmp_path_factory.mktemp("prefix")),
        "CUDA": str(toolkit),
        "PIP_NO_INDEX": "1",
    }


@pytest.fixture(scope="module")
def source(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree by links, so that the commands' build folder lies elsewhere."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("CMakeLists.txt", "cmake", "plugin", "scripts", "tests"):
        (folder / name).symlink_to(repo_root / name)
    return folder


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(blocks: list[str], source: Path, environment: dict[str, str], native_build: Path) -> Path:
    """The first block. What nvcc compiles for minutes is the native build's: the same target of the same sources."""
    configure, build, install = blocks[0].splitlines()
    assert "Fetching" not in run(configure, source, environment)
    assert build == "cmake --build build/kernels -j"
    folder = source / "build/kernels"
    assert not (folder / "tensorrt_headers").exists()
    run("make -C build/kernels/plugin/kernels append.o dispatch.o", source, environment)  # it compiles, CUDA too
    shutil.copy(native_build / "plugin/kernels/libflash_attention_kernels.a", folder / "plugin/kernels")
    run(install, source, environment)
    return Path(environment["PREFIX"])


def judge_example(program: Path) -> None:
    """It runs where there is a GPU and says what is missing where there is none."""
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        assert re.fullmatch(r"(head \d: lse \S+, output( \S+){3}\n){8}", done.stdout)
    else:
        assert (done.returncode, done.stdout, done.stderr) == (1, "", NO_DRIVER + "\n")


def test_what_is_installed_is_the_library_its_header_and_its_package(installed: Path) -> None:
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert files == {
        "include/flash_attention.h",
        "lib/libflash_attention_kernels.a",
        "lib/cmake/flash_attention_kernels/flash_attention_kernels-config.cmake",
    }


def test_a_c_program_links_by_the_line_of_the_readme(
    blocks: list[str], installed: Path, source: Path, environment: dict[str, str]
) -> None:
    line = blocks[1]
    assert line.startswith("cc plugin/kernels/example/decode.c -o decode ")
    run(line, source, environment)
    judge_example(source / "decode")


def test_a_c_project_finds_the_package(
    blocks: list[str], installed: Path, repo_root: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    find, link = blocks[2].splitlines()
    example = repo_root / "plugin/kernels/example/decode.c"
    tmp_path.joinpath("CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(mine LANGUAGES C)\n"
        f"{find}\nadd_executable(decode {example})\n{link}\n"
    )
    run("cmake -S . -B build -DCMAKE_PREFIX_PATH=$PREFIX && cmake --build build", tmp_path, environment)
    judge_example(tmp_path / "build/decode")


def test_the_emulated_examples_run(blocks: list[str], native_build: Path) -> None:
    for program, last in zip(blocks[3].splitlines(), ("head 7: lse ", "the cache holds 103 keys"), strict=True):
        there = native_build / Path(program).relative_to("build/kernels")
        done = subprocess.run([there], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith(last)


def test_a_program_of_ones_own_runs_on_the_emulation(
    blocks: list[str], source: Path, environment: dict[str, str], native_build: Path
) -> None:
    (source / "build").mkdir(exist_ok=True)
    (source / "emulation").symlink_to(native_build)
    line = blocks[4].replace("build/kernels", "emulation")
    assert line.startswith("cc plugin/kernels/example/decode.c ")
    run(line, source, environment)
    assert run("./decode_emulated", source, environment).splitlines()[-1].startswith("head 7: lse ")


@pytest.mark.parametrize("rows", [1, 4, 16, 17])
def test_the_paged_example_has_memory_for_any_prompt(
    repo_root: Path, native_build: Path, tmp_path: Path, rows: int
) -> None:
    """Prompts up to 16 rows are split over the keys, and need more of the workspace than a single token does."""
    example = (repo_root / "plugin/kernels/example/paged.c").read_text()
    assert "kPrompt = 100" in example
    program, source = tmp_path / "paged", tmp_path / "paged.c"
    source.write_text(example.replace("kPrompt = 100", f"kPrompt = {rows}"))
    kernels, library = repo_root / "plugin/kernels", native_build / "lib"
    options = ["-DFLASH_ON_HOST", "-fsanitize=address", f"-I{kernels}", f"-I{kernels / 'example'}", f"-L{library}"]
    linked = ["-lflash_attention_emulated", f"-Wl,-rpath,{library}", "-lm"]
    subprocess.run(["cc", source, "-o", program, *options, *linked], check=True)
    no_leaks = {"ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([program], env=no_leaks, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"the cache holds {rows + 3} keys"

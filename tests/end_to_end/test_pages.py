# SPDX-License-Identifier: Apache-2.0
"""Every command that the README and docs/engines.md give to a reader works, up to the point where it needs a GPU.

The commands are taken from the pages' text. A GPU that is here is hidden: the tests are of a machine without one.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from end_to_end import pages, readers_models

from flash_export.errors import EXIT_MISSING, EXIT_UNSUPPORTED

pytestmark = pytest.mark.xdist_group("pages")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.flash.onnx and model.flash.unfused.onnx of an encoder."""
    folder = tmp_path_factory.mktemp("files")
    readers_models.save_folder(folder / "encoder")
    done = pages.run("flash-export encoder -o model.flash.onnx --require-all", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(files: Path, tmp_path: Path) -> Path:
    """A copy of ``files`` to work in."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    return tmp_path


def require_five_parts(told: str, *words: str) -> None:
    """An error says what, where, got, need and do, and holds ``words``."""
    lines = told.strip().splitlines()
    for part in ("error: ", "  where ", "  got   ", "  need  ", "  do    "):
        assert any(line.startswith(part) for line in lines), told
    for word in words:
        assert word in told, told


def test_the_readme_gives_no_commands_but_those_tried_here() -> None:
    """And the two of make, which run all of this and the demo."""
    first_words = [block.split()[:2] for block in pages.blocks("README.md")]
    assert first_words == [
        ["make", "demo"],
        [".", ".venv/bin/activate"],
        ["flash-trt", "build"],
        ["pip", "install"],
        ["pip", "install"],
    ]


# --- the README's recipes for the CI of a user's own repository -------------------------------------------------------


def recipe(containing: str) -> str:
    """One of the two, with this checkout for DIR."""
    return pages.the_block("README.md", containing).replace("DIR", str(pages.ROOT))


def test_the_recipe_for_a_machine_without_a_gpu_runs_as_it_stands(tmp_path: Path) -> None:
    readers_models.save_program(tmp_path / "model.pt2")
    done = pages.run(recipe("[torch,rtx]"), tmp_path, gpu=False)
    assert done.returncode == 0, done.stderr
    assert "Would install flash-export" in done.stdout
    assert json.loads((tmp_path / "verdict.json").read_text())["passed"] is True
    assert "agrees with" in (tmp_path / "verdict.html").read_text()
    assert list((tmp_path / "runs").glob("inputs-*.npz"))
    sidecar = json.loads((tmp_path / "model.flash.engine.json").read_text())
    assert sidecar["targets"] == ["sm80", "sm89"]
    assert len(sidecar["plugin_layers"]) == 1


def test_an_attention_that_is_not_fused_fails_that_recipe(tmp_path: Path) -> None:
    """Exit codes decide: without --require-all it would go on."""
    readers_models.save_program(tmp_path / "model.pt2")
    script = recipe("[torch,rtx]").replace("--require-all", "--require-all --skip /Softmax")
    assert pages.run(script, tmp_path).returncode == EXIT_UNSUPPORTED
    assert not (tmp_path / "verdict.json").exists()


@pytest.fixture
def tensorrt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which Python and pip find a TensorRT that has no GPU, see ``fake_tensorrt``."""
    site = tmp_path_factory.mktemp("site")
    shutil.copy(Path(__file__).with_name("fake_tensorrt.py"), site / "tensorrt.py")
    metadata = site / "tensorrt-11.4.0.106.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: tensorrt\nVersion: 11.4.0.106\n")
    return {"PYTHONPATH": str(site)}


def test_the_recipe_for_a_gpu_runs_up_to_the_driver(folder: Path, tensorrt: dict[str, str]) -> None:
    install, build, *with_engine = recipe("[torch,trt]").strip().splitlines()
    done = pages.run(install, folder, **tensorrt)
    assert done.returncode == 0, done.stderr
    assert "Would install flash-export" in done.stdout
    without = pages.run(install, folder)
    assert without.returncode != 0, "or else the extra [trt] asks for no TensorRT"
    assert "tensorrt" in without.stderr
    done = pages.run(build, folder, gpu=False, **tensorrt)
    assert done.returncode == EXIT_MISSING, done.stderr
    require_five_parts(done.stderr, "tensorrt 11.4.0.106", "an NVIDIA GPU with its driver")
    assert not (folder / "model.engine").exists()
    # What lies behind the driver: TensorRT's own build, played by TensorRT for RTX.
    assert pages.run(build, folder, gpu=False, FAKE_TENSORRT_GPU="1", **tensorrt).returncode == 0
    sidecar = json.loads((folder / "model.engine.json").read_text())
    assert sidecar["backend"] == {"name": "tensorrt", "version": "11.4.0.106"}
    assert {found["by"] for found in sidecar["attention"]} == {"plugin"}
    assert sidecar["targets"] == []
    assert (folder / "timings.bin").read_bytes() == b"\xffmeasured "
    assert sidecar["trtexec"].startswith("trtexec ")
    assert [line.split()[1] for line in with_engine] == ["compare", "bench"]
    for line in with_engine:
        done = pages.run(line, folder, gpu=False, **tensorrt)
        assert done.returncode == EXIT_MISSING, done.stderr
        require_five_parts(done.stderr, "model.engine", "no NVIDIA GPU")


def test_a_timing_cache_grows_from_build_to_build(folder: Path, tensorrt: dict[str, str]) -> None:
    build = recipe("[torch,trt]").strip().splitlines()[1]
    for _ in range(2):
        done = pages.run(build, folder, gpu=False, FAKE_TENSORRT_GPU="1", **tensorrt)
        assert done.returncode == 0, done.stderr
    assert (folder / "timings.bin").read_bytes() == b"\xffmeasured " * 2


def test_an_engine_of_tensorrt_goes_to_triton_as_the_page_says(folder: Path, tensorrt: dict[str, str]) -> None:
    (line,) = [
        line for line in pages.the_block("docs/engines.md", FOR_TENSORRT, "").splitlines() if FOR_TENSORRT in line
    ]
    build = recipe("[torch,trt]").strip().splitlines()[1]
    done = pages.run(f"{build}\n{line}", folder, gpu=False, FAKE_TENSORRT_GPU="1", **tensorrt)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("LD_PRELOAD=")
    assert (folder / "models" / "encoder" / "1" / "model.plan").is_file()


# --- the README's five minutes ----------------------------------------------------------------------------------------


def test_every_kind_of_model_is_exported_as_the_readme_says(tmp_path: Path) -> None:
    readers_models.save_each_kind(tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    script = pages.the_block("README.md", "flash-export anybodys.onnx")
    assert script.count("flash-export ") == 4
    done = pages.run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 fused, 0 refused") == 4
    assert (tmp_path / "fused.onnx").is_file()
    assert (tmp_path / "report.html").is_file()


def test_the_readmes_commands_on_the_fused_file_run(folder: Path) -> None:
    done = pages.run(pages.the_block("README.md", "flash-trt inspect"), folder, gpu=False)
    assert done.returncode == 0, done.stderr
    assert "attention computed by: " in done.stdout
    assert (folder / "bench.svg").is_file()
    assert (folder / "models").is_dir()


# --- docs/engines.md --------------------------------------------------------------------------------------------------


ON_A_GPU = ("flash-trt run model.engine", "flash-trt bench model.engine")
FOR_TENSORRT = "flash-trt triton models/ model.engine"
POLYGRAPHYS_OWN = "python -m flash_trt.polygraphy run"


def test_every_command_of_the_page_on_engines_runs_or_says_what_it_lacks(folder: Path) -> None:
    found = [block for block in pages.blocks("docs/engines.md", "") if "model" in block]
    lines = [line for block in found for line in block.strip().splitlines()]
    assert len(lines) >= 10
    assert sum(line.startswith((*ON_A_GPU, FOR_TENSORRT, POLYGRAPHYS_OWN)) for line in lines) == 4
    readers_models.save_inputs(folder / "in.npz")
    shutil.copy(folder / "model.flash.unfused.onnx", folder / "model.onnx")
    for line in lines:
        done = pages.run(line, folder, gpu=False)
        if line.startswith(ON_A_GPU):
            assert done.returncode == EXIT_MISSING, line + done.stderr
            require_five_parts(done.stderr, "no NVIDIA GPU")
        elif line.startswith(FOR_TENSORRT):
            assert done.returncode == EXIT_UNSUPPORTED, line + done.stderr
            require_five_parts(done.stderr, "tensorrt-rtx")
        elif line.startswith(POLYGRAPHYS_OWN):
            assert done.returncode == EXIT_MISSING, line + done.stderr
            require_five_parts(done.stderr, "no GPU")
            assert "engine building" not in done.stdout + done.stderr
        else:
            assert done.returncode == 0, line + done.stderr
    for name in ("out.npz", "verdict.json", "verdict.html", "bench.json", "bench.svg", "found.yaml"):
        assert (folder / name).is_file(), name

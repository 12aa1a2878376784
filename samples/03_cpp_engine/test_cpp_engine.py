# SPDX-License-Identifier: Apache-2.0
"""The README's lines build the program, which runs an engine: NVIDIA's on a GPU, and a stand-in of the tests anywhere.

Under the stand-ins for libnvinfer and libcudart our plugin computes with emulated kernels; the program is the same.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from contract.reference import attention
from cpp_engine import interfaces
from end_to_end import pages
from plugin.autoload import lean_runtime

from flash_export.errors import EXIT_MISSING
from flash_export.op import Attributes
from flash_trt import gpu, plugin_library

PAGE = "samples/03_cpp_engine/README.md"
ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "build" / "native"
HEADERS = NATIVE / "tensorrt_headers"
STAND_INS = ROOT / "tests" / "cpp_engine"
EMULATED = NATIVE / "lib" / "libflash_attention_plugin_emulated.so"
B, H, SQ, SKV, D, DV = 2, 3, 7, 21, 20, 12

# One worker fetches the lean runtime; tests/plugin/autoload needs the same.
pytestmark = pytest.mark.xdist_group("autoload")


def toolkit() -> Path:
    """The CUDA toolkit that the native build took."""
    found = re.search(r"^CUDA_cudart_static_LIBRARY:\w+=(.+)$", (NATIVE / "CMakeCache.txt").read_text(), re.M)
    assert found is not None
    return Path(found[1]).parents[1]


def lines() -> list[str]:
    """The README's four lines."""
    configure, build, engine, run = pages.the_block(PAGE, "run_engine").strip().splitlines()
    assert "-DTENSORRT_ROOT=/path/to/TensorRT" in configure
    return [configure, build, engine, run]


def built(tensorrt: Path, folder: Path) -> Path:
    """The program by the README's first two lines, with ``tensorrt`` as TENSORRT_ROOT; its folder."""
    configure, build, *_ = lines()
    script = f"cd {ROOT}\n{configure}\n{build}".replace("/path/to/TensorRT", str(tensorrt))
    script = script.replace("build/cpp_engine", str(folder / "build" / "cpp_engine"))
    os.environ.setdefault("CUDAToolkit_ROOT", str(toolkit()))
    done = pages.run(script, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def tensorrt_root(folder: Path, library: Path, name: str) -> Path:
    """A folder as NVIDIA's archive is laid out: the headers, and ``library`` under ``name``."""
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(HEADERS)
    (folder / "lib" / name).symlink_to(library)
    return folder


# --- with NVIDIA's own library, up to the driver ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, built as its README says, with the lean TensorRT in TensorRT's place."""
    folder = tmp_path_factory.mktemp("lean")
    lean = lean_runtime.library(ROOT, "10")
    built(tensorrt_root(folder / "TensorRT", lean, "libnvinfer_lean.so"), folder)
    return folder / "build" / "cpp_engine" / "run_engine"


def _run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    # The lean library's name for the loader is that of its file, beside which it lies.
    paths = {"LD_LIBRARY_PATH": str(lean_runtime.library(ROOT, "10").parent)}
    command = [program, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **paths}
    )


def test_without_tensorrt_the_build_says_what_to_give_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"need +include/NvInferRuntime.h.*\n.*-DTENSORRT_ROOT="):
        built(tmp_path, tmp_path)


def test_wrong_arguments_end_with_2_and_the_usage(program: Path) -> None:
    done = _run(program, "only one")
    assert done.returncode == 2
    assert "ENGINE libflash_attention_plugin.so" in done.stderr


def test_without_a_gpu_it_ends_with_5_and_says_so(program: Path) -> None:
    if gpu.devices():
        pytest.skip("a GPU is here; without one the program must say so")
    done = _run(program, "model.engine", plugin_library.find())
    assert done.returncode == 5
    assert "this machine's GPU" in done.stderr


def test_the_readmes_build_of_the_engine_runs_up_to_the_driver(tmp_path: Path) -> None:
    from python.attention_models import fused

    fused(tmp_path / "model.flash.onnx")
    done = pages.run(lines()[2], tmp_path, gpu=False)
    assert done.returncode == EXIT_MISSING, done.stderr


@pytest.mark.gpu
def test_on_a_gpu_the_readmes_lines_build_an_engine_and_run_it(tmp_path: Path) -> None:
    """TensorRT is the folder that TENSORRT_ROOT names, or the Python package's libraries with the build's headers."""
    from python.attention_models import fused

    if os.environ.get("TENSORRT_ROOT"):
        root = Path(os.environ["TENSORRT_ROOT"])
    else:
        spec = importlib.util.find_spec("tensorrt_libs")
        if spec is None or spec.origin is None:
            pytest.skip("no TensorRT here: set TENSORRT_ROOT, or pip install tensorrt")
        (library,) = Path(spec.origin).parent.glob("libnvinfer.so.*")
        root = tensorrt_root(tmp_path / "TensorRT", library, "libnvinfer.so")
        major = re.search(r"define (?:NV_TENSORRT_MAJOR|TRT_MAJOR_ENTERPRISE) (\d+)", _version_header())
        if major is None or not library.name.endswith(f".{major[1]}"):
            pytest.skip(f"the headers of the build are not those of {library.name}: set TENSORRT_ROOT")
    built(root, tmp_path)
    fused(tmp_path / "model.flash.onnx")
    paths = f"export LD_LIBRARY_PATH={root / 'lib'}:${{LD_LIBRARY_PATH:-}}\n"
    done = pages.run(paths + "\n".join(lines()[2:]), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^output: \d+ numbers( -?\d\S*){4}$", done.stdout, re.M)


def _version_header() -> str:
    return (HEADERS / "NvInferVersion.h").read_text()


# --- the whole program, with stand-ins --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program, linked with a stand-in of libnvinfer, and a libcudart of the tests in ``cuda``."""
    folder = tmp_path_factory.mktemp("stand_in")
    (folder / "unexpected.h").write_text(interfaces.unexpected(HEADERS))
    (folder / "cuda").mkdir()
    (real,) = (toolkit() / "lib").glob("libcudart.so.[0-9][0-9]")
    (folder / "exports").write_text(f"{real.name} {{ cuda*; }};\n")  # the version that the program's symbols ask for
    shared = [
        "g++",
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-w",
        f"-I{HEADERS}",
        f"-I{toolkit() / 'include'}",
        f"-I{folder}",
    ]
    cudart = [str(STAND_INS / "fake_cudart.cpp"), "-o", str(folder / "cuda" / real.name)]
    named = [f"-Wl,-soname,{real.name}", f"-Wl,--version-script={folder / 'exports'}"]
    subprocess.run([*shared, *cudart, *named], check=True, timeout=200)
    nvinfer = [str(STAND_INS / "fake_tensorrt.cpp"), "-o", str(folder / "libnvinfer.so"), "-Wl,-soname,libnvinfer.so"]
    subprocess.run([*shared, *nvinfer, str(folder / "cuda" / real.name)], check=True, timeout=200)
    return built(tensorrt_root(folder / "TensorRT", folder / "libnvinfer.so", "libnvinfer.so"), folder)


def plan(path: Path, dtype: int, operator: str = "FlashAttention") -> Path:
    """An engine of the stand-in: one causal attention on [B, H, S, D]."""
    values = Attributes(q_num_heads=H, kv_num_heads=H, scale=0.3, layout=1, causal=1, diagonal=1).as_dict()
    kinds = {name: "float" if isinstance(value, float) else "int" for name, value in values.items()}
    shapes = {"query": (B, H, SQ, D), "key": (B, H, SKV, D), "value": (B, H, SKV, DV), "output": (B, H, SQ, DV)}
    tensors = [
        f"{'output' if name == 'output' else 'input'} {name} {dtype} {' '.join(map(str, dims))}"
        for name, dims in shapes.items()
    ]
    fields = [f"{kinds[n]} {n} {v}" for n, v in values.items() if not n.startswith("plugin_")]
    path.write_text("\n".join([f"plan {operator}", *tensors, *fields, ""]))
    return path


def run_line(folder: Path, where: Path, plugin: Path = EMULATED, **more: str) -> subprocess.CompletedProcess[str]:
    """The README's last line, in ``where``, with the stand-ins before the real libraries."""
    paths = {"LD_LIBRARY_PATH": f"{folder / 'cuda'}:{folder}", "FLASH_TRT_PLUGIN": str(plugin), **more}
    script = "".join(f"export {name}='{value}'\n" for name, value in paths.items()) + lines()[3]
    (where / "build").symlink_to(folder / "build")
    return pages.run(script, where)


def filled(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """What the program gives an input of floats."""
    numbers = (np.arange(np.prod(shape)) * 7919 % 2048) / 1024 - 1.0
    return numbers.astype(dtype).reshape(shape).astype(np.float64)


@pytest.mark.parametrize(
    ("dtype", "kind", "bound"), [(0, np.float32, 1e-5), (1, np.float16, 2e-3)], ids=["fp32", "fp16"]
)
def test_the_whole_program_computes_attention(
    stand_in: Path, tmp_path: Path, dtype: int, kind: type, bound: float
) -> None:
    plan(tmp_path / "model.engine", dtype)
    done = run_line(stand_in, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.fullmatch(r"output: (\d+) numbers (\S+) (\S+) (\S+) (\S+)\n", done.stdout)
    assert told is not None, done.stdout
    assert int(told[1]) == B * H * SQ * DV
    query, key, value = (filled(shape, kind) for shape in ((B, H, SQ, D), (B, H, SKV, D), (B, H, SKV, DV)))
    expected, _ = attention(query, key, value, scale=0.3, causal=1, diagonal=1)
    np.testing.assert_allclose([float(n) for n in told.groups()[1:]], expected.ravel()[:4], rtol=0, atol=bound)
    assert "0 buffers and 0 streams left" in done.stderr


FAILING = {
    "cudaGetDeviceCount": "this machine's GPU",
    "cudaMalloc": "out of memory",
    "cudaStreamCreate": "cudaStreamCreate",
    "cudaMemcpyAsync": "copy to the GPU",
    "cudaStreamSynchronize": "the engine's work",
}


@pytest.mark.parametrize("call", FAILING)
def test_a_call_that_fails_is_told_and_all_is_given_back(stand_in: Path, tmp_path: Path, call: str) -> None:
    plan(tmp_path / "model.engine", 0)
    done = run_line(stand_in, tmp_path, FAKE_CUDA_FAILS=call)
    assert done.returncode == 5, done.stdout + done.stderr
    assert FAILING[call] in done.stderr
    assert "0 buffers and 0 streams left" in done.stderr
    assert not done.stdout


def test_what_is_no_engine_or_no_plugin_ends_with_5(stand_in: Path, tmp_path: Path) -> None:
    cases = {"bytes": ("no engine", EMULATED), "another": (None, EMULATED), "plugin": (None, shutil.which("true"))}
    for name, (content, plugin) in cases.items():
        (where := tmp_path / name).mkdir()
        plan(where / "model.engine", 0, "NoSuchOperator" if name == "another" else "FlashAttention")
        if content:
            (where / "model.engine").write_text(content)
        done = run_line(stand_in, where, Path(str(plugin)))
        assert done.returncode == 5, name + done.stderr
        assert ("the plugin does not load" if name == "plugin" else "the engine does not load") in done.stderr


def test_an_engine_that_is_not_there_ends_with_5(stand_in: Path, tmp_path: Path) -> None:
    done = run_line(stand_in, tmp_path)
    assert done.returncode == 5
    assert "cannot read model.engine" in done.stderr

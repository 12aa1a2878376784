# SPDX-License-Identifier: Apache-2.0
"""``flash-trt triton`` writes a repository that Triton's own schema reads, with everything that a server loads."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import text_format
from python.attention_models import BF16, FLOAT, HALF, HEAD_DIM, HEADS, flash_node, fused, renamed, unfused

from flash_export import dim_ranges
from flash_export.errors import EXIT_OK, EXIT_UNSAFE, EXIT_UNSUPPORTED, EXIT_USAGE
from flash_export.inputs import MAX_DIM
from flash_trt.output import sidecar_path

Command = Callable[..., int]

pytestmark = pytest.mark.xdist_group("triton")


@pytest.fixture(scope="module")
def schema(repo_root: Path) -> ModuleType:
    """Triton's ModelConfig, as NVIDIA's client package has it."""
    folder = repo_root / "build" / "triton_schema"
    if not folder.exists():
        fetch = [sys.executable, str(repo_root / "scripts" / "fetch_wheels.py")]
        fetch += [str(Path(__file__).with_name("triton_schema.txt")), "--below", "tritonclient/grpc", "--into", folder]
        fetched = subprocess.run(fetch, capture_output=True, text=True, timeout=300, check=False)
        if fetched.returncode != 0:
            pytest.skip(f"Triton's schema cannot be fetched: {fetched.stderr.strip()[-300:]}")
    spec = importlib.util.spec_from_file_location("model_config_pb2", folder / "model_config_pb2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _config(schema: ModuleType, folder: Path) -> Any:
    return text_format.Parse((folder / "config.pbtxt").read_text(), schema.ModelConfig())


@pytest.mark.parametrize(("dtype", "kind"), [(FLOAT, "TYPE_FP32"), (HALF, "TYPE_FP16"), (BF16, "TYPE_BF16")])
def test_an_onnx_file_is_served_on_the_cpu_with_the_operator_library(
    schema: ModuleType, tmp_path: Path, flash_trt: Command, dtype: int, kind: str
) -> None:
    model, repository = fused(tmp_path / "my.model.onnx", dtype=dtype), tmp_path / "models"
    flags = ("--device", "cpu", "--max-batch", 16, "--instances", 2, "--delay-us", 250)
    assert flash_trt("triton", repository, model, *flags) == EXIT_OK
    config = _config(schema, repository / "my")
    assert config.name == "my"
    assert config.platform == "onnxruntime_onnx"
    assert config.max_batch_size == 16
    assert [(i.name, list(i.dims)) for i in config.input] == [
        (name, [HEADS, -1, HEAD_DIM]) for name in ("query", "key", "value")
    ]
    assert {schema.DataType.Name(tensor.data_type) for tensor in [*config.input, *config.output]} == {kind}
    (group,) = config.instance_group
    assert group.count == 2
    assert group.kind == schema.ModelInstanceGroup.KIND_CPU
    assert config.dynamic_batching.max_queue_delay_microseconds == 250
    (library,) = config.model_operations.op_library_filename
    served = onnxruntime.SessionOptions()
    served.register_custom_ops_library(library)
    onnxruntime.InferenceSession(repository / "my" / "1" / "model.onnx", served)


def test_an_onnx_file_on_the_gpu_has_its_nodes_where_the_provider_finds_plugins_and_the_plugins_path(
    schema: ModuleType, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash_trt("triton", tmp_path / "my(models)", fused(tmp_path / "m.onnx")) == EXIT_OK
    folder, told = tmp_path / "my(models)" / "m", capsys.readouterr()
    autoload = str(folder / "lib" / "libflash_attention_autoload.so")
    preload, server, where = shlex.split(told.out.strip())
    assert preload == f"LD_PRELOAD={autoload}"
    assert [server, where] == ["tritonserver", f"--model-repository={tmp_path / 'my(models)'}"]
    assert (folder / "lib" / "libflash_attention_plugin.so").is_file()
    config = _config(schema, folder)
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.name == "tensorrt"
    assert dict(accelerator.parameters) == {"trt_extra_plugin_lib_paths": autoload}
    assert config.instance_group[0].kind == schema.ModelInstanceGroup.KIND_GPU
    served = onnx.load(folder / "1" / "model.onnx")
    assert [node.domain for node in served.graph.node] == ["trt.plugins"]
    assert not served.functions, "a function body would run silently where the plugin is missing"
    assert "no --shape" in told.err


@pytest.mark.parametrize("command", ["inspect", "run", "bench", "build"])
def test_the_servers_copy_is_refused_where_the_fused_model_is_needed(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert flash_trt("triton", tmp_path / "models", fused(tmp_path / "m.onnx")) == EXIT_OK
    assert flash_trt(command, tmp_path / "models" / "m" / "1" / "model.onnx") == EXIT_USAGE
    said = " ".join(capsys.readouterr().err.split())
    assert "a server's copy of a fused model" in said
    assert "give the .onnx that flash-export wrote" in said


def test_shapes_and_precision_of_an_onnx_file_go_to_the_provider(
    schema: ModuleType, tmp_path: Path, flash_trt: Command
) -> None:
    model = fused(tmp_path / "m.onnx", dtype=HALF)
    shape = f"query:1x{HEADS}x1x{HEAD_DIM},2x{HEADS}x37x{HEAD_DIM},3x{HEADS}x131x{HEAD_DIM}"
    assert flash_trt("triton", tmp_path / "r", model, "--shape", shape) == EXIT_OK
    config = _config(schema, tmp_path / "r" / "m")
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.parameters["precision_mode"] == "FP16"
    for kind, dims in (("min", (1, 1)), ("opt", (2, 37)), ("max", (3, 131))):
        spelled = f"{dims[0]}x{HEADS}x{dims[1]}x{HEAD_DIM}"
        told = accelerator.parameters[f"trt_profile_{kind}_shapes"]
        assert told == f"query:{spelled},key:{spelled},value:{spelled}"
    assert config.max_batch_size == 3


def test_shapes_of_a_name_that_the_provider_divides_are_left_out_with_a_warning(
    schema: ModuleType, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    model = renamed(fused(tmp_path / "m.onnx", dtype=HALF), "a,b")
    assert flash_trt("triton", tmp_path / "r", model, "--shape", f"key:1x{HEADS}x1x{HEAD_DIM}") == EXIT_OK
    assert "input 'a,b': ONNX Runtime's TensorRT provider divides its shapes" in " ".join(
        capsys.readouterr().err.split()
    )
    (accelerator,) = _config(schema, tmp_path / "r" / "m").optimization.execution_accelerators.gpu_execution_accelerator
    assert not [name for name in accelerator.parameters if name.endswith("_shapes")]


@pytest.mark.parametrize(
    ("flags", "batch", "warned"),
    [
        ((), 16, None),
        (("--max-batch", 16), 16, None),
        (("--max-batch", 32), 16, "--max-batch 32: the shapes end at a batch of 16"),
        (("--max-batch", 4), 4, "--max-batch 4: the shapes hold a batch of 16"),
    ],
)
@pytest.mark.parametrize("kind", ["onnx", "engine"])
def test_the_largest_batch_is_that_of_the_shapes_and_a_limit_is_told(
    schema: ModuleType,
    tmp_path: Path,
    flash_trt: Command,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    flags: tuple[object, ...],
    batch: int,
    warned: str | None,
) -> None:
    if kind == "onnx":
        model = fused(tmp_path / "m.onnx")
        flags += ("--shape", f"query:1x{HEADS}x1x{HEAD_DIM},4x{HEADS}x37x{HEAD_DIM},16x{HEADS}x131x{HEAD_DIM}")
    else:
        model = _engine(tmp_path / "m.engine", profile={"ids": {"min": [1, 1], "opt": [4, 37], "max": [16, 131]}})
    assert flash_trt("triton", tmp_path / "r", model, *flags) == EXIT_OK
    assert _config(schema, tmp_path / "r" / "m").max_batch_size == batch
    told = " ".join(capsys.readouterr().err.split())
    assert warned in told if warned else "--max-batch" not in told


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("flags", "largest", "batch"),
    [((), 4, 4), ((), 16, 8), ((), None, 8), (("--max-batch", 64), 16, 16), (("--max-batch", 64), None, 64),
     (("--max-batch", 3), 4, 3)],
)  # fmt: skip
def test_the_largest_batch_stays_in_the_range_that_the_file_declares(
    schema: ModuleType,
    tmp_path: Path,
    flash_trt: Command,
    capsys: pytest.CaptureFixture[str],
    device: str,
    flags: tuple[object, ...],
    largest: int | None,
    batch: int,
) -> None:
    model = fused(tmp_path / "m.onnx")
    dim_ranges.write(model, {"batch": (1, largest or MAX_DIM), "seq": (1, 2)})
    assert flash_trt("triton", tmp_path / "r", model, "--device", device, *flags) == EXIT_OK
    assert _config(schema, tmp_path / "r" / "m").max_batch_size == batch
    told = " ".join(capsys.readouterr().err.split())
    limited = "--max-batch 64: the model works with a batch of at most 16, which is taken"
    assert (limited in told) is (largest == 16 and bool(flags))


@pytest.mark.parametrize("kind", ["onnx on cpu", "onnx", "onnx without shapes", "engine", "engine of two profiles"])
def test_a_smallest_batch_is_told_and_a_largest_one_below_it_is_refused(
    schema: ModuleType, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    flags: tuple[object, ...] = ("--device", "cpu") if kind == "onnx on cpu" else ()
    if kind.startswith("onnx"):
        model = fused(tmp_path / "m.onnx")
        dim_ranges.write(model, {"batch": (4, 8), "seq": (1, 131)})
        if kind == "onnx":
            flags = ("--shape", f"query:4x{HEADS}x1x{HEAD_DIM},4x{HEADS}x37x{HEAD_DIM},8x{HEADS}x131x{HEAD_DIM}")
    else:
        profiles = [{"ids": {"min": [4, 1], "opt": [4, 37], "max": [8, 131]}}]
        profiles += [{"ids": {"min": [5, 200], "opt": [6, 200], "max": [8, 200]}}] * (kind != "engine")
        model = _engine(tmp_path / "m.engine", profiles=profiles)
    assert flash_trt("triton", tmp_path / "r", model, *flags) == EXIT_OK
    assert _config(schema, tmp_path / "r" / "m").max_batch_size == 8
    assert "takes a batch of 4 or more" in " ".join(capsys.readouterr().err.split())
    assert flash_trt("triton", tmp_path / "s", model, *flags, "--max-batch", 3) == EXIT_USAGE
    assert "need 4 or more" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "s" / "m").exists()


def test_an_input_of_numbers_that_the_engine_only_computes_with_is_no_shape(
    schema: ModuleType, tmp_path: Path, flash_trt: Command
) -> None:
    ids = {"name": "ids", "dtype": onnx.TensorProto.INT64, "dims": ["batch", "seq"]}
    unread = [{"name": name, "dtype": onnx.TensorProto.INT64, "dims": [3]} for name in ("a", "b")]
    score = {"name": "score", "dtype": onnx.TensorProto.FLOAT, "dims": ["batch"]}
    profile = {
        "ids": {"min": [1, 1], "opt": [4, 128], "max": [6, 512]},
        "b": {"min": [3], "opt": [3], "max": [3]},
    }
    told = {"inputs": [ids, *unread], "outputs": [score]}
    engine = _engine(tmp_path / "m.engine", profiles=[profile], tensors=told)
    assert flash_trt("triton", tmp_path / "r", engine) == EXIT_OK
    assert not any(tensor.is_shape_tensor for tensor in _config(schema, tmp_path / "r" / "m").input)


def test_a_smallest_batch_of_one_is_no_warning(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash_trt("triton", tmp_path / "r", _engine(tmp_path / "m.engine")) == EXIT_OK
    assert "takes a batch" not in capsys.readouterr().err


def test_shapes_are_refused_where_they_mean_nothing(tmp_path: Path, flash_trt: Command) -> None:
    shape = f"query:1x{HEADS}x1x{HEAD_DIM}"
    model = fused(tmp_path / "m.onnx")
    assert flash_trt("triton", tmp_path / "r", model, "--device", "cpu", "--shape", shape) == EXIT_USAGE
    assert flash_trt("triton", tmp_path / "r", _engine(tmp_path / "m.engine"), "--shape", shape) == EXIT_USAGE


@pytest.mark.parametrize("flags", [(), ("--shape", f"query:1x{HEADS}x5x{HEAD_DIM}")], ids=["no shape", "a shape"])
def test_a_model_that_the_provider_cannot_be_given_ends_with_4_and_leaves_nothing(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    assert flash_trt("triton", tmp_path / "r", fused(tmp_path / "m.onnx", dtype=BF16), *flags) == EXIT_UNSUPPORTED
    assert "flash-trt triton DIR MODEL.engine" in " ".join(capsys.readouterr().err.split())
    assert list((tmp_path / "r").iterdir()) == []


def test_a_model_without_our_nodes_needs_no_library_of_ours(
    schema: ModuleType, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash_trt("triton", tmp_path / "r", unfused(tmp_path / "m.onnx"), "--device", "cpu") == EXIT_OK
    assert list((tmp_path / "r" / "m" / "lib").iterdir()) == []
    assert not _config(schema, tmp_path / "r" / "m").model_operations.op_library_filename
    assert "LD_PRELOAD" not in capsys.readouterr().out


def _engine(path: Path, **sidecar: Any) -> Path:
    """A file that begins like an engine of TensorRT, with the sidecar that build writes."""
    path.write_bytes(b"ftrt and the rest of a plan")
    tensors = {
        "inputs": [{"name": "ids", "dtype": onnx.TensorProto.INT64, "dims": ["batch", "seq"]}],
        "outputs": [{"name": "score", "dtype": onnx.TensorProto.FLOAT, "dims": ["batch"]}],
    }
    document = {
        "schema": 1,
        "engine": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "backend": {"name": "tensorrt", "version": "11.4"},
        "profile": {"ids": {"min": [1, 1], "opt": [4, 128], "max": [6, 512]}},
        "tensors": tensors,
    }
    sidecar_path(path).write_text(json.dumps(document | sidecar))
    return path


def test_an_engine_is_served_with_its_own_largest_batch(schema: ModuleType, tmp_path: Path, flash_trt: Command) -> None:
    engine = _engine(tmp_path / "m.engine")
    assert flash_trt("triton", tmp_path / "r", engine, "--name", "reader") == EXIT_OK
    folder = tmp_path / "r" / "reader"
    assert (folder / "1" / "model.plan").read_bytes() == engine.read_bytes()
    config = _config(schema, folder)
    assert config.platform == "tensorrt_plan"
    assert config.max_batch_size == 6
    assert list(config.input[0].dims) == [-1]
    # One number an item.
    assert list(config.output[0].dims) == [1]
    assert config.output[0].HasField("reshape")
    assert {path.name for path in (folder / "lib").iterdir()} == {
        "libflash_attention_autoload.so",
        "libflash_attention_plugin.so",
    }


def test_an_engine_with_several_profiles_is_served_with_all_of_them_and_the_batch_that_each_holds(
    schema: ModuleType, tmp_path: Path, flash_trt: Command
) -> None:
    prompt = {"ids": {"min": [1, 64], "opt": [1, 512], "max": [2, 4096]}}
    decode = {"ids": {"min": [1, 1], "opt": [8, 1], "max": [32, 1]}}
    engine = _engine(tmp_path / "m.engine", profiles=[prompt, decode])
    assert flash_trt("triton", tmp_path / "r", engine) == EXIT_OK
    config = _config(schema, tmp_path / "r" / "m")
    assert list(config.instance_group[0].profile) == ["0", "1"]
    assert config.max_batch_size == 2
    assert flash_trt("triton", tmp_path / "r", _engine(tmp_path / "one.engine")) == EXIT_OK
    assert not _config(schema, tmp_path / "r" / "one").instance_group[0].profile


def test_values_that_tensorrt_reads_as_a_shape_are_no_batch(
    schema: ModuleType, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = {
        "ids": {"min": [1, 1], "opt": [4, 128], "max": [6, 512]},
        "sizes": {"min": [1, 1], "opt": [2, 2], "max": [3, 3]},
    }
    ids = {"name": "ids", "dtype": onnx.TensorProto.INT64, "dims": ["batch", "seq"]}
    sizes = {"name": "sizes", "dtype": onnx.TensorProto.INT64, "dims": [2]}
    score = {"name": "score", "dtype": onnx.TensorProto.FLOAT, "dims": ["batch"]}
    told = {"inputs": [ids, sizes], "outputs": [score]}
    engine = _engine(tmp_path / "m.engine", profiles=[profile], tensors=told)
    assert flash_trt("triton", tmp_path / "r", engine, "--max-batch", 6) == EXIT_OK
    config = _config(schema, tmp_path / "r" / "m")
    assert config.max_batch_size == 0, "not every input has a batch"
    assert {tensor.name: tensor.is_shape_tensor for tensor in config.input} == {"ids": False, "sizes": True}
    assert "--max-batch" not in capsys.readouterr().err, "6 is the largest batch of the one that has"


def test_an_engine_that_carries_the_plugin_needs_no_library(tmp_path: Path, flash_trt: Command) -> None:
    assert flash_trt("triton", tmp_path / "r", _engine(tmp_path / "m.engine", embedded_plugin=True)) == EXIT_OK
    assert list((tmp_path / "r" / "m" / "lib").iterdir()) == []


def test_a_model_without_a_batch_is_served_without_batching(
    schema: ModuleType, tmp_path: Path, flash_trt: Command
) -> None:
    path = fused(tmp_path / "m.onnx")
    model = onnx.load(path)
    for value in [*model.graph.input, *model.graph.output]:
        value.type.tensor_type.shape.dim[0].dim_value = 3
    onnx.save(model, path)
    assert flash_trt("triton", tmp_path / "r", path) == EXIT_OK
    config = _config(schema, tmp_path / "r" / "m")
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert list(config.input[0].dims) == [3, HEADS, -1, HEAD_DIM]


def test_weights_in_a_file_of_their_own_go_along(tmp_path: Path, flash_trt: Command) -> None:
    path = unfused(tmp_path / "m.onnx")
    model = onnx.load(path)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((300, 300), np.float32), "spare"))
    onnx.save(model, path, save_as_external_data=True, location="m.weights", size_threshold=10**4)
    assert flash_trt("triton", tmp_path / "r", path, "--device", "cpu") == EXIT_OK
    onnxruntime.InferenceSession(tmp_path / "r" / "m" / "1" / "model.onnx")


def _saved_apart(path: Path, locations: Mapping[str, str]) -> Path:
    """A model with one weight for each location, outside the file."""
    model = onnx.load(fused(path))
    for name, location in locations.items():
        weight = onnx.numpy_helper.from_array(np.full(4, len(name), np.float32), name)
        onnx.external_data_helper.set_external_data(weight, location)
        (path.parent / location).parent.mkdir(exist_ok=True)
        (path.parent / location).write_bytes(weight.raw_data)
        weight.ClearField("raw_data")
        model.graph.initializer.append(weight)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_weights_in_folders_stay_in_them(tmp_path: Path, flash_trt: Command, device: str) -> None:
    path = _saved_apart(tmp_path / "m.onnx", {"w": "a/w.data", "ww": "b/w.data"})
    assert flash_trt("triton", tmp_path / "repository", path, "--device", device) == EXIT_OK
    served = onnx.load(tmp_path / "repository" / "m" / "1" / "model.onnx")
    values = {tensor.name: onnx.numpy_helper.to_array(tensor).tolist() for tensor in served.graph.initializer}
    assert values == {"w": [1] * 4, "ww": [2] * 4}


def test_weights_named_as_the_model_is_served_are_refused(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _saved_apart(tmp_path / "m.onnx", {"w": "model.onnx"})
    assert flash_trt("triton", tmp_path / "repository", path, "--device", "cpu") == EXIT_USAGE
    assert "external data in model.onnx" in capsys.readouterr().err
    assert not (tmp_path / "repository" / "m").exists()


def test_weights_in_a_file_of_their_own_go_along_to_the_provider_too(tmp_path: Path, flash_trt: Command) -> None:
    weights = np.random.default_rng(0).standard_normal((HEAD_DIM, HEAD_DIM)).astype(np.float32)
    nodes = [flash_node(output="half"), onnx.helper.make_node("MatMul", ["half", "weights"], ["output"])]
    path = fused(tmp_path / "m.onnx", *nodes, constants={"weights": weights})
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.weights", size_threshold=0)
    assert flash_trt("triton", tmp_path / "r", path) == EXIT_OK
    path.unlink()
    (tmp_path / "m.weights").unlink()
    served = onnx.load(tmp_path / "r" / "m" / "1" / "model.onnx")
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(served.graph.initializer[0]), weights)
    assert [node.domain for node in served.graph.node] == ["trt.plugins", ""]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_triton_does_not_run_and_what_is_not_trusted_is_refused(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    rtx = _engine(tmp_path / "rtx.engine", backend={"name": "tensorrt-rtx", "version": "1.7"})
    assert flash_trt("triton", tmp_path / "r", rtx) == EXIT_UNSUPPORTED
    assert "--backend tensorrt" in capsys.readouterr().err
    strange = _engine(tmp_path / "m.engine", engine={"sha256": "0"})
    assert flash_trt("triton", tmp_path / "r", strange) == EXIT_UNSAFE
    silent = _engine(tmp_path / "m.engine", tensors=None)
    assert flash_trt("triton", tmp_path / "r", silent) == EXIT_USAGE
    assert list((tmp_path / "r").iterdir()) == []


@pytest.mark.parametrize("name", ["a/b", ".hidden"])
def test_a_name_that_is_no_folders_is_refused(tmp_path: Path, flash_trt: Command, name: str) -> None:
    assert flash_trt("triton", tmp_path / "r", fused(tmp_path / "m.onnx"), "--name", name) == EXIT_USAGE


def test_a_model_of_the_same_name_is_not_replaced(tmp_path: Path, flash_trt: Command) -> None:
    model = fused(tmp_path / "m.onnx")
    assert flash_trt("triton", tmp_path / "r", model) == EXIT_OK
    before = (tmp_path / "r" / "m" / "config.pbtxt").read_text()
    assert flash_trt("triton", tmp_path / "r", model, "--max-batch", 3) == EXIT_USAGE
    assert (tmp_path / "r" / "m" / "config.pbtxt").read_text() == before


@pytest.mark.parametrize("name", ["q\U0001f600", "q\u00e9", 'q"\\', "q\n\x7f\x01", "\u0080q"])
def test_a_tensor_of_any_name_is_configured(schema: ModuleType, tmp_path: Path, flash_trt: Command, name: str) -> None:
    proto = onnx.load(fused(tmp_path / "m.onnx"))
    proto.graph.input[0].name = name
    for node in proto.graph.node:
        node.input[:] = [name if given == "query" else given for given in node.input]
    onnx.save(proto, tmp_path / "m.onnx")
    assert flash_trt("triton", tmp_path / "models", tmp_path / "m.onnx", "--device", "cpu") == EXIT_OK
    text = (tmp_path / "models" / "m" / "config.pbtxt").read_bytes().decode()
    # The parser in C++, which is the server's, takes no surrogates; Python's would.
    assert "\\ud" not in text
    assert text_format.Parse(text, schema.ModelConfig()).input[0].name == name


@pytest.mark.parametrize("place", ["my repo", "a:b", "a;b", "$LIB", "a\nb"])
def test_a_folder_that_cannot_be_preloaded_from_is_refused(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    model = fused(tmp_path / "m.onnx")
    assert flash_trt("triton", tmp_path / place, model, "--shape", f"query:2x{HEADS}x8x{HEAD_DIM}") == EXIT_USAGE
    assert "LD_PRELOAD" in capsys.readouterr().err
    assert not (tmp_path / place / "m").exists()
    # On the CPU nothing is preloaded.
    assert flash_trt("triton", tmp_path / place, model, "--device", "cpu") == EXIT_OK


@pytest.mark.parametrize("flags", [("--max-batch", 2**31), ("--instances", 2**31), ("--delay-us", 2**63)])
def test_a_number_that_the_configuration_cannot_hold_is_refused(
    tmp_path: Path, flash_trt: Command, flags: tuple[str, int]
) -> None:
    model = fused(tmp_path / "m.onnx")
    assert flash_trt("triton", tmp_path / "models", model, "--device", "cpu", *flags) == EXIT_USAGE

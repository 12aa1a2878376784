# SPDX-License-Identifier: Apache-2.0
"""``flash-trt run``: right numbers, a true word on what computed them, and a clear end for everything it cannot run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from contract import cache_cases
from contract.cache_cases import CACHE_CASES
from contract.cache_model import node_of
from contract.cases import CASES
from contract.node_model import feeds, inputs_of, model_of
from contract.node_model import node_of as node_of_case
from contract.reference import attention
from contract.tensors import make, node_inputs
from onnx import TensorProto, helper
from python.attention_models import BF16, FLOAT, HALF, HEAD_DIM, HEADS, SCALE, fused, unfused

from flash_export.errors import EXIT_MISSING, EXIT_OK, EXIT_UNSAFE, EXIT_UNSUPPORTED, EXIT_USAGE, UsageError
from flash_trt import engine_file, gpu, onnx_file, ort, session, tensor_files
from flash_trt.output import sidecar_path

Command = Callable[..., int]
NAMES = ("query", "key", "value")
BUILT_FOR = f"query:1x{HEADS}x3x{HEAD_DIM},1x{HEADS}x5x{HEAD_DIM},2x{HEADS}x7x{HEAD_DIM}"


def _inputs(path: Path, shape: tuple[int, ...] = (2, HEADS, 37, HEAD_DIM), **changed: np.ndarray) -> Path:
    rng = np.random.default_rng(5)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name in NAMES} | changed
    tensor_files.write(path, arrays)
    return path


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("suffix", "bodies"), [(".npz", False), (".npz", True), (".safetensors", False), (".json", True)]
)
def test_the_outputs_are_those_of_float64_attention(
    tmp_path: Path, flash_trt: Command, suffix: str, bodies: bool, dtype: int
) -> None:
    model, given = fused(tmp_path / "m.onnx", dtype=dtype), _inputs(tmp_path / f"in{suffix}")
    bodies = ["--bodies"] if bodies else []
    assert flash_trt("run", model, "--inputs", given, "-o", tmp_path / f"out{suffix}", *bodies) == EXIT_OK
    (name, output), *_ = tensor_files.read(tmp_path / f"out{suffix}").items()
    arrays = tensor_files.read(given)
    wide = [arrays[name].astype(np.float64) for name in NAMES]
    expected, _ = attention(*wide, scale=SCALE, causal=1)
    assert name == "output"
    np.testing.assert_allclose(output.astype(np.float64), expected, atol={FLOAT: 1e-5, HALF: 4e-3, BF16: 4e-2}[dtype])


@pytest.mark.parametrize(
    ("make", "flags", "told"),
    [(fused, [], ort.LIBRARY), (fused, ["--bodies"], ort.BODIES), (unfused, [], "no FlashAttention node in the model")],
    ids=["library", "bodies", "unfused"],
)
def test_it_says_what_computed_the_attention(
    tmp_path: Path,
    flash_trt: Command,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], Path],
    flags: list[str],
    told: str,
) -> None:
    assert flash_trt("run", make(tmp_path / "m.onnx"), *flags) == EXIT_OK
    assert capsys.readouterr().out.splitlines()[-1] == f"attention computed by: {told}"


def test_without_the_cpu_library_the_function_bodies_compute(
    tmp_path: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flash_trt.native.find", lambda _: None)
    assert flash_trt("run", fused(tmp_path / "m.onnx")) == EXIT_OK
    assert ort.BODIES in capsys.readouterr().out


def test_a_cpu_library_that_the_environment_names_must_be_there(
    tmp_path: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_TRT_CPU_OPERATOR", str(tmp_path / "nowhere.so"))
    assert flash_trt("run", fused(tmp_path / "m.onnx")) == EXIT_MISSING


def test_drawn_inputs_have_the_shape_asked_for_and_depend_on_the_seed(tmp_path: Path, flash_trt: Command) -> None:
    model, shape = fused(tmp_path / "m.onnx"), f"query:3x{HEADS}x11x{HEAD_DIM}"
    outputs = []
    for i, seed in enumerate((7, 7, 8)):
        assert flash_trt("run", model, "--shape", shape, "--seed", seed, "-o", tmp_path / f"{i}.npz") == EXIT_OK
        outputs.append(tensor_files.read(tmp_path / f"{i}.npz")["output"])
    assert outputs[0].shape == (3, HEADS, 11, HEAD_DIM)
    assert np.array_equal(outputs[0], outputs[1])
    assert not np.array_equal(outputs[0], outputs[2])


@pytest.mark.parametrize("shape", [(0, HEADS, 5, HEAD_DIM), (2, HEADS, 0, HEAD_DIM)], ids=["batch", "length"])
def test_inputs_of_size_zero_give_outputs_of_size_zero(
    tmp_path: Path, flash_trt: Command, shape: tuple[int, ...]
) -> None:
    given = _inputs(tmp_path / "in.npz", shape)
    assert flash_trt("run", fused(tmp_path / "m.onnx"), "--inputs", given, "-o", tmp_path / "out.npz") == EXIT_OK
    assert tensor_files.read(tmp_path / "out.npz")["output"].shape == shape


def test_nan_in_an_input_is_told_and_counted(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    query = np.ones((2, HEADS, 9, HEAD_DIM), np.float32)
    query[0, 1, 4, 3] = np.nan
    given = _inputs(tmp_path / "in.json", (2, HEADS, 9, HEAD_DIM), query=query)
    assert flash_trt("run", fused(tmp_path / "m.onnx"), "--inputs", given) == EXIT_OK
    told = capsys.readouterr()
    assert "input query holds 1 NaN" in told.err
    assert told.out.splitlines()[-2].split()[-1] == str(HEAD_DIM)  # the row of that query


# --- inputs that do not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"mask": np.ones(3, np.float32)}, "unknown: ['mask']"),
        ({"key": np.ones((2, HEADS, 37, HEAD_DIM), np.int64)}, "int64"),
        ({"key": np.ones((2, HEADS, 37, HEAD_DIM + 1), np.float32)}, f"[2, {HEADS}, 37, {HEAD_DIM + 1}]"),
        ({"key": np.ones((HEADS, 37, HEAD_DIM), np.float32)}, f"[{HEADS}, 37, {HEAD_DIM}]"),
        ({"key": np.ones((5, HEADS, 37, HEAD_DIM), np.float32)}, "batch is 2 in query and 5 in key"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], changed: dict[str, np.ndarray], told: str
) -> None:
    given = _inputs(tmp_path / "in.npz", **changed)
    assert flash_trt("run", fused(tmp_path / "m.onnx"), "--inputs", given) == EXIT_USAGE
    assert told in capsys.readouterr().err


def test_an_output_with_another_suffix_is_refused_before_anything_runs(tmp_path: Path, flash_trt: Command) -> None:
    assert flash_trt("run", tmp_path / "no_such.onnx", "-o", tmp_path / "out.pkl") == EXIT_USAGE
    assert flash_trt("run", tmp_path / "no_such.onnx") == EXIT_USAGE


@pytest.mark.parametrize("name", ["decode", "decode_paged"])
def test_the_library_runs_cache_forms_too(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    case, tensors = CASES[0], cache_cases.make(next(c for c in CACHE_CASES if c.name == name))
    arrays = node_inputs(case, make(case))
    nodes = [node_of_case(case, inputs_of(case, arrays, "a_"), "a_"), node_of(tensors, "b_")]
    onnx.save(onnx.shape_inference.infer_shapes(model_of(nodes, 18)), tmp_path / "m.onnx")
    given = feeds(case, arrays, "a_") | {f"b_{name}": array for name, array in tensors.given.items()}
    np.savez(tmp_path / "in.npz", **given)
    for options, implementation in (((), ort.LIBRARY), (("--bodies",), ort.BODIES)):
        assert flash_trt("run", tmp_path / "m.onnx", "--inputs", tmp_path / "in.npz", *options) == EXIT_OK
        told = " ".join(capsys.readouterr().out.split())
        assert implementation in told
        assert ({ort.LIBRARY, ort.BODIES} - {implementation}).pop() not in told
    assert len(session(tmp_path / "m.onnx").run(None, given)) == 6


def test_an_operator_that_a_library_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, tensors = CASES[0], cache_cases.make(next(c for c in CACHE_CASES if c.name == "decode"))
    nodes = [node_of_case(case, inputs_of(case, node_inputs(case, make(case)), "a_"), "a_"), node_of(tensors, "b_")]
    onnx.save(onnx.shape_inference.infer_shapes(model_of(nodes, 18)), tmp_path / "m.onnx")
    opened = ort.Session(onnx_file.read(tmp_path / "m.onnx"), library=True, profile_into=tmp_path)
    monkeypatch.setattr(ort, "_operators_run", lambda _: Counter({"FlashAttention": 1, "MatMul": 2}))
    assert opened.implementation() == f"{ort.LIBRARY}; FlashAttentionCache by {ort.BODIES}"


# --- inputs that disagree ---------------------------------------------------------------------------------------------


def _two_inputs(path: Path, *dims: str) -> Path:
    """ids [batch, seq] + pad of ``dims``, both int64."""
    inputs = [
        helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["batch", "seq"]),
        helper.make_tensor_value_info("pad", onnx.TensorProto.INT64, list(dims)),
    ]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.INT64, list(dims))
    nodes = [helper.make_node("ReduceSum", ["ids"], ["a"]), helper.make_node("Add", ["pad", "a"], ["y"])]
    graph = helper.make_graph(nodes, "g", inputs, [output])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.mark.parametrize(
    ("dims", "shape", "told"),
    [
        (("batch", "seq"), (1, 4), "batch is 2 in ids and 1 in pad"),
        (("batch", "seq"), (2, 4), "seq is 6 in ids and 4 in pad"),
        (("batch", "2*seq"), (2, 6), "2*seq is 6 in pad, not 12, as seq is 6 in ids"),
        (("batch", "seq"), (2, 6), ""),
        (("batch", "2*seq"), (2, 12), ""),
        (("batch", "past + seq"), (2, 7), ""),
        (("batch", "other"), (2, 7), ""),
    ],
)
def test_inputs_that_disagree_on_a_length_are_told_by_its_name(
    tmp_path: Path,
    flash_trt: Command,
    capsys: pytest.CaptureFixture[str],
    dims: tuple[str, ...],
    shape: tuple[int, ...],
    told: str,
) -> None:
    model = _two_inputs(tmp_path / "m.onnx", *dims)
    np.savez(tmp_path / "in.npz", ids=np.ones((2, 6), np.int64), pad=np.ones(shape, np.int64))
    assert flash_trt("run", model, "--on", "cpu", "-i", tmp_path / "in.npz") == (EXIT_USAGE if told else EXIT_OK)
    assert told in " ".join(capsys.readouterr().err.split())
    if told:
        other = onnx.load(model)
        other.doc_string = "another"
        onnx.save(other, tmp_path / "other.onnx")
        assert flash_trt("compare", model, tmp_path / "other.onnx", "--values", tmp_path / "in.npz") == EXIT_USAGE
        assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integers_of_another_type_are_converted_with_a_warning(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], dtype: type
) -> None:
    np.savez(tmp_path / "in.npz", ids=np.ones((2, 6), dtype), pad=np.ones((2, 6), np.int64))
    model = _two_inputs(tmp_path / "m.onnx", "batch", "seq")
    assert flash_trt("run", model, "--on", "cpu", "-i", tmp_path / "in.npz", "-q") == EXIT_OK
    warned = "input ids holds int32 where the model takes int64: it is converted" in capsys.readouterr().err
    assert warned is (dtype is np.int32)


@pytest.mark.parametrize("name", ["m.onnx", "m.engine"])
def test_shapes_beside_given_inputs_are_refused(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    fused(tmp_path / "m.onnx")
    (tmp_path / "m.engine").write_bytes(b"ftrt")
    flags = ("-i", _inputs(tmp_path / "in.npz"), "--shape", f"query:1x{HEADS}x7x{HEAD_DIM}")
    assert flash_trt("run", tmp_path / name, *flags) == EXIT_USAGE
    assert "do leave --shape out, or --inputs" in " ".join(capsys.readouterr().err.split())


def test_inputs_that_are_not_there_are_not_told_to_be_written(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flash_trt("run", fused(tmp_path / "m.onnx"), "-i", tmp_path / "none.npz") == EXIT_USAGE
    assert "do    correct the path" in capsys.readouterr().err


# --- what cannot run here ---------------------------------------------------------------------------------------------


def test_cuda_without_a_cuda_provider_ends_with_5_and_the_extra(
    tmp_path: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert flash_trt("run", fused(tmp_path / "m.onnx"), "--on", "cuda") == EXIT_MISSING
    told = capsys.readouterr().err
    assert "providers CPUExecutionProvider" in told
    assert 'pip install "onnxruntime-gpu>=' in " ".join(told.split())


def test_a_file_without_function_bodies_needs_the_cpu_library(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fused(tmp_path / "m.onnx", fallback=False)
    assert flash_trt("run", model) == EXIT_OK  # the CPU library needs none
    assert flash_trt("run", model, "--bodies") == EXIT_UNSUPPORTED
    assert "--no-fallback" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("run", "--on", "cpu"), ("bench", "--seconds", "0.001")], ids=lambda c: c[0])
def test_kernels_that_the_environment_names_in_vain_are_refused_by_the_variables_name(
    tmp_path: Path,
    flash_trt: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    monkeypatch.setenv("FLASH_TRT_CPU_TARGET", "foo")
    assert flash_trt(command[0], fused(tmp_path / "m.onnx"), *command[1:]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert "where environment variable FLASH_TRT_CPU_TARGET" in told
    assert "avx2, plain" in told
    assert "do    name one of them, or leave the variable unset" in told
    assert "--no-fallback" not in told


@pytest.fixture
def engine(rtx: object, tmp_path: Path, flash_trt: Command) -> Path:
    """An engine for sm80 with its sidecar."""
    model = fused(tmp_path / "m.onnx")
    assert flash_trt("build", model, "-o", tmp_path / "m.engine", "--target", "sm80", "--shape", BUILT_FOR) == EXIT_OK
    return tmp_path / "m.engine"


def _pretend_gpu(monkeypatch: pytest.MonkeyPatch, *sms: str) -> None:
    monkeypatch.setattr(gpu, "devices", lambda: [gpu.Device("a GPU", sm, 2**34) for sm in sms])


def _fits(tmp_path: Path) -> Path:
    return _inputs(tmp_path / "in.npz", (2, HEADS, 7, HEAD_DIM))


def test_an_engine_without_a_gpu_ends_with_5(
    engine: Path, tmp_path: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend_gpu(monkeypatch)
    assert flash_trt("run", engine, "--inputs", _fits(tmp_path)) == EXIT_MISSING


def test_an_engine_for_other_gpus_is_refused_with_both_generations(
    engine: Path,
    tmp_path: Path,
    flash_trt: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _pretend_gpu(monkeypatch, "sm89")
    assert flash_trt("run", engine, "--inputs", _fits(tmp_path)) == EXIT_MISSING
    told = capsys.readouterr().err
    assert "got   sm89" in told
    assert "one of sm80" in told


def test_an_engine_built_for_the_gpu_of_another_machine_is_refused_with_its_name(
    engine: Path,
    tmp_path: Path,
    flash_trt: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    described = sidecar_path(engine)
    facts = json.loads(described.read_text()) | {"targets": [], "gpu": {"name": "their GPU", "sm": "sm90"}}
    described.write_text(json.dumps(facts))
    _pretend_gpu(monkeypatch, "sm89", "sm90")
    assert flash_trt("run", engine, "--inputs", _fits(tmp_path)) == EXIT_MISSING
    told = capsys.readouterr().err
    assert "got   sm89 (a GPU)" in told
    assert "one of sm90 (their GPU)" in told
    _pretend_gpu(monkeypatch, "sm90")
    monkeypatch.setenv("FLASH_TRT_PLUGIN", str(tmp_path / "nowhere.so"))
    monkeypatch.setattr("flash_trt.plugin_library._loaded", {})
    assert flash_trt("run", engine, "--inputs", _fits(tmp_path)) == EXIT_MISSING
    assert "nowhere.so" in capsys.readouterr().err  # its GPU is here: the next thing is missing


@pytest.mark.parametrize("described", [None, "sm90", {"name": "their GPU"}, {"sm": 90}, ["sm90"]])
def test_a_sidecar_that_does_not_tell_the_gpu_leaves_it_to_tensorrt(described: object) -> None:
    assert engine_file.EngineFile(Path("m.engine"), {"targets": [], "gpu": described}).targets == []


def test_an_engine_whose_plugin_is_not_here_is_refused_with_the_places_searched(
    engine: Path,
    tmp_path: Path,
    flash_trt: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _pretend_gpu(monkeypatch, "sm80")
    monkeypatch.setattr("flash_trt.plugin_library._loaded", {})
    monkeypatch.setenv("FLASH_TRT_PLUGIN", str(tmp_path / "nowhere.so"))
    assert flash_trt("run", engine, "--inputs", _fits(tmp_path)) == EXIT_MISSING
    assert "nowhere.so" in capsys.readouterr().err


def test_an_engine_of_another_plugin_version_is_refused_with_both_numbers(
    engine: Path,
    tmp_path: Path,
    flash_trt: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _pretend_gpu(monkeypatch, "sm80")
    version = b"\x01\x00\x00\x00\x00\x00\x00\x00" + b"%s"
    data = engine.read_bytes()
    at = data.index(b"FlashAttention", data.index(b"FlashAttention")) + len(b"FlashAttention")
    place = data.index((version % b"1"), at) + 8
    engine.write_bytes(data[:place] + b"7" + data[place + 1 :])
    assert flash_trt("run", engine, "--inputs", _fits(tmp_path), "--trust-engine") == EXIT_MISSING
    told = capsys.readouterr().err
    assert "got   version 1 in " in told
    assert "need  version 7" in told


def test_an_output_of_text_is_refused_before_the_model_runs(
    tmp_path: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["words"], to=TensorProto.STRING)]
    ends = [helper.make_tensor_value_info(*v, [2]) for v in (("x", TensorProto.FLOAT), ("words", TensorProto.STRING))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    assert flash_trt("run", tmp_path / "m.onnx") == EXIT_OK
    monkeypatch.setattr("flash_trt.ort.Session.run", lambda *_: pytest.fail("the model ran"))
    assert flash_trt("run", tmp_path / "m.onnx", "-o", tmp_path / "out.npz") == EXIT_USAGE
    assert "tensor words" in capsys.readouterr().err


@pytest.mark.parametrize("length", [2, 8])
def test_shapes_outside_the_profile_are_refused_with_name_and_range(engine: Path, tmp_path: Path, length: int) -> None:
    feeds = tensor_files.read(_inputs(tmp_path / "in.npz", (1, HEADS, length, HEAD_DIM)))
    with pytest.raises(UsageError) as caught:
        engine_file.require_shapes(engine_file.read(engine), feeds)
    assert "input query" in caught.value.where
    assert caught.value.got == f"1x{HEADS}x{length}x{HEAD_DIM}"
    assert caught.value.need == f"1x{HEADS}x3x{HEAD_DIM} to 2x{HEADS}x7x{HEAD_DIM}"


@pytest.mark.parametrize("length", [2, 8])
def test_run_refuses_shapes_outside_the_profile_with_name_got_and_range(
    engine: Path,
    tmp_path: Path,
    flash_trt: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    length: int,
) -> None:
    _pretend_gpu(monkeypatch, "sm80")
    opened = SimpleNamespace(
        input_dtypes=dict.fromkeys(NAMES, np.dtype(np.float32)), close=lambda: None, run=lambda _: pytest.fail("it ran")
    )
    monkeypatch.setattr("flash_trt.engine_load.load", lambda path, *, trusted: None)
    monkeypatch.setattr("flash_trt.run.EngineSession", lambda loaded, *, cuda_graph: opened)
    given = _inputs(tmp_path / "in.npz", (1, HEADS, length, HEAD_DIM))
    assert flash_trt("run", engine, "--inputs", given) == EXIT_USAGE
    told = capsys.readouterr().err
    assert f"where input query of {engine}" in "".join(told.replace("\n        ", ""))
    assert f"got   1x{HEADS}x{length}x{HEAD_DIM}" in told
    assert f"need  1x{HEADS}x3x{HEAD_DIM} to 2x{HEADS}x7x{HEAD_DIM}" in told


@pytest.mark.parametrize(
    "tamper",
    [
        lambda sidecar: sidecar["engine"].update(sha256="0" * 64),
        lambda sidecar: sidecar.update(schema=99),
        lambda sidecar: sidecar.pop("engine"),
        lambda sidecar: sidecar.update(engine=["no object"]),
        lambda sidecar: sidecar.clear(),
    ],
    ids=["hash", "schema", "no engine", "engine of another type", "empty"],
)
def test_a_tampered_sidecar_ends_with_3(
    engine: Path,
    tmp_path: Path,
    flash_trt: Command,
    monkeypatch: pytest.MonkeyPatch,
    tamper: Callable[[dict[str, object]], object],
) -> None:
    _pretend_gpu(monkeypatch, "sm80")
    sidecar = json.loads(sidecar_path(engine).read_text())
    tamper(sidecar)
    sidecar_path(engine).write_text(json.dumps(sidecar))
    assert flash_trt("run", engine, "--inputs", _fits(tmp_path)) == EXIT_UNSAFE


@pytest.mark.parametrize("content", [None, b"", b"no JSON", b"[1, 2]", b"\xff\xfe"])
def test_a_sidecar_that_cannot_be_read_ends_with_3(
    engine: Path, tmp_path: Path, flash_trt: Command, content: bytes | None
) -> None:
    sidecar_path(engine).unlink()
    if content is not None:
        sidecar_path(engine).write_bytes(content)
    assert flash_trt("run", engine, "--inputs", _fits(tmp_path)) == EXIT_UNSAFE

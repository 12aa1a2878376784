# SPDX-License-Identifier: Apache-2.0
"""An engine's run gives what it computes, with and without a CUDA graph, and gives back all that it takes.

What a GPU and its driver do is done by ``fake_cuda``; all else is what runs on a GPU too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contract.reference import attention
from cuda.bindings import runtime as real
from python.attention_models import HEAD_DIM, HEADS, SCALE, fused
from python.fake_cuda import COPY_MS, HOST, TRT, WORK_MS, FakeEngine, FakeRuntime, Tensor, calls

import flash_trt
from flash_export.errors import EXIT_MISSING, EXIT_OK, EXIT_USAGE, MissingHere, UnsupportedModel, UsageError
from flash_trt import backends, cuda, engine_load, gpu, plugin_library
from flash_trt.backends import Backend
from flash_trt.engine_file import EngineFile
from flash_trt.engine_load import LoadedEngine
from flash_trt.engine_session import EngineSession

Command = Callable[..., int]
KINDS = {"FLOAT": np.dtype(np.float32), "HALF": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
GRAPH = pytest.mark.parametrize("graph", [False, True], ids=["plain", "graph"])


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(cuda, "runtime", lambda: fake)
    return fake


def compute(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Causal attention in float64."""
    wide = [arrays[name].astype(np.float64) for name in ("query", "key", "value")]
    return {"output": attention(*wide, scale=SCALE, causal=1)[0]}


def attention_engine(runtime: FakeRuntime, kind: str = "FLOAT") -> FakeEngine:
    """query, key, value -> output, all [batch, 3, seq, 20]."""
    inputs = [Tensor(name, KINDS[kind], kind) for name in ("query", "key", "value")]
    output = Tensor("output", KINDS[kind], kind, lambda shapes, _: shapes["query"])
    return FakeEngine(runtime, [*inputs, output], compute)


def loaded(engine: FakeEngine, path: Path, sidecar: dict[str, Any] | None = None) -> LoadedEngine:
    """``engine`` as if it had been read from ``path``."""
    if not path.exists():
        path.write_bytes(b"ftrt")
    backend = Backend("tensorrt-rtx", TRT, [(1, "TensorRT's own words")], None)
    return LoadedEngine(EngineFile(path, sidecar or {}), backend, None, engine)


def feeds(batch: int = 2, length: int = 7, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (batch, HEADS, length, HEAD_DIM)
    return {name: rng.standard_normal(shape).astype(np.float32) for name in ("query", "key", "value")}


# --- what it gives ----------------------------------------------------------------------------------------------------


@GRAPH
def test_the_outputs_are_the_engines_at_every_shape_in_any_order(
    runtime: FakeRuntime, tmp_path: Path, graph: bool
) -> None:
    session = EngineSession(loaded(attention_engine(runtime), tmp_path / "m.engine"), cuda_graph=graph)
    for seed, (batch, length) in enumerate([(2, 7), (2, 7), (1, 3), (3, 37), (0, 7), (2, 0), (2, 7)]):
        given = feeds(batch, length, seed)
        made = session.run(given)
        np.testing.assert_array_equal(made["output"], compute(given)["output"].astype(np.float32))
        assert made["output"].shape == (batch, HEADS, length, HEAD_DIM)
    session.close()
    assert not runtime.memory
    assert not runtime.open


@GRAPH
def test_an_engine_opens_from_python(
    runtime: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: bool
) -> None:
    path, asked = tmp_path / "m.engine", []

    def load(path: Path, *, trusted: bool) -> LoadedEngine:
        asked.append((path, trusted))
        return loaded(attention_engine(runtime), path)

    monkeypatch.setattr(engine_load, "load", load)
    session = flash_trt.open_engine(str(path), trusted=graph, cuda_graph=graph)
    assert asked == [(path, graph)]
    given = feeds()
    np.testing.assert_array_equal(session.run(given)["output"], compute(given)["output"].astype(np.float32))
    assert ("CUDA graph" in session.implementation()) == graph
    session.close()


def test_an_engine_that_is_not_there_is_a_mistake_of_the_callers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.engine"):
        flash_trt.open_engine(tmp_path / "none.engine")


@pytest.mark.parametrize(
    ("here", "why"),
    [
        ([], "no NVIDIA GPU, or no driver for it; it needs a GPU that it was built for: sm80, sm89"),
        (["sm80"], ""),
        (["sm90", "sm80"], "sm90 (a GPU); it needs one of sm80, sm89"),
    ],
    ids=["none", "fits", "first does not fit"],
)
def test_why_an_engine_is_not_run_here_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: list[str], why: str
) -> None:
    path = tmp_path / "m.engine"
    path.write_bytes(b"ftrt")
    monkeypatch.setattr(gpu, "devices", lambda: [gpu.Device("a GPU", sm, 2**34) for sm in here])
    monkeypatch.setattr(EngineFile, "targets", ["sm80", "sm89"])
    monkeypatch.setattr(backends, "load", lambda name: None)
    monkeypatch.setattr(plugin_library, "load", lambda backend: SimpleNamespace(operators={}))
    assert flash_trt.why_not_here(str(path)) == why


def test_a_tensorrt_or_a_plugin_that_is_not_here_is_why_an_engine_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.engine"
    path.write_bytes(b"ftrt")
    monkeypatch.setattr(gpu, "devices", lambda: [gpu.Device("a GPU", "sm80", 2**34)])

    def missing(_: object) -> None:
        raise MissingHere("x", where="x", got="nothing", need="the thing", do="x")

    monkeypatch.setattr(backends, "load", missing)
    assert flash_trt.why_not_here(path) == "nothing; it needs the thing"
    monkeypatch.setattr(backends, "load", lambda name: None)
    monkeypatch.setattr(plugin_library, "load", missing)
    assert flash_trt.why_not_here(path) == "nothing; it needs the thing"


@pytest.mark.parametrize(
    ("path", "got"), [("/dev/null", "a device, pipe or socket"), ("/", "a folder"), ("/none.engine", "no such file")]
)
def test_what_is_no_file_is_told_as_what_it_is(path: str, got: str) -> None:
    with pytest.raises(UsageError) as error:
        flash_trt.why_not_here(path)
    assert error.value.got == got


@GRAPH
def test_a_cache_that_is_written_in_place_has_one_memory(runtime: FakeRuntime, tmp_path: Path, graph: bool) -> None:
    def append(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays["cache"][:, -1] = arrays["new"]  # the memory of both: the output has it already
        return {"total": arrays["cache"].sum()}

    float32 = np.dtype(np.float32)
    tensors = [
        Tensor("cache", float32, "FLOAT"),
        Tensor("new", float32, "FLOAT"),
        Tensor("cache_out", float32, "FLOAT", lambda shapes, _: shapes["cache"]),
        Tensor("total", float32, "FLOAT", lambda shapes, _: ()),
    ]
    engine = FakeEngine(runtime, tensors, append)
    engine.get_aliased_input_tensor = lambda name: {"cache_out": "cache"}.get(name)
    session = EngineSession(loaded(engine, tmp_path / "m.engine"), cuda_graph=graph)
    for length in (3, 5, 3):
        cache, new = np.ones((2, length), np.float32), np.array([7, 9], np.float32)
        made = session.run({"cache": cache, "new": new})
        np.testing.assert_array_equal(made["cache_out"], np.concatenate([cache[:, 1:], new[:, None]], 1))
        assert made["total"] == 2 * (length - 1) + 16
    session.close()
    assert not runtime.memory


@pytest.mark.parametrize("kind", ["HALF", "BF16"])
def test_floats_are_rounded_to_the_engines_type(runtime: FakeRuntime, tmp_path: Path, kind: str) -> None:
    session = EngineSession(loaded(attention_engine(runtime, kind), tmp_path / "m.engine"))
    given = feeds()
    made = session.run(given)["output"]
    assert made.dtype == KINDS[kind]
    narrow = {name: array.astype(KINDS[kind]) for name, array in given.items()}
    np.testing.assert_array_equal(made, compute(narrow)["output"].astype(KINDS[kind]))


def test_an_input_that_is_not_contiguous_is_read_in_its_order(runtime: FakeRuntime, tmp_path: Path) -> None:
    session = EngineSession(loaded(attention_engine(runtime), tmp_path / "m.engine"))
    given = feeds()
    turned = {name: np.asfortranarray(array) for name, array in given.items()}
    np.testing.assert_array_equal(session.run(turned)["output"], session.run(given)["output"])


@GRAPH
def test_sizes_that_shapes_follow_from_stay_on_the_host(runtime: FakeRuntime, tmp_path: Path, graph: bool) -> None:
    engine = FakeEngine(
        runtime,
        [
            Tensor("x", np.dtype(np.float32), "FLOAT"),
            Tensor("times", np.dtype(np.int64), "INT64", location=HOST),
            Tensor("tiled", np.dtype(np.float32), "FLOAT", lambda s, held: (s["x"][0] * int(held["times"][0]),)),
            Tensor("size", np.dtype(np.int64), "INT64", lambda s, held: (1,), location=HOST),
        ],
        lambda a: {"tiled": np.tile(a["x"], a["times"][0]), "size": np.array([a["x"].size * a["times"][0]])},
    )
    session = EngineSession(loaded(engine, tmp_path / "m.engine"), cuda_graph=graph)
    x = np.float32([1, 2, 5])
    for times in (2, 4, 1):
        made = session.run({"x": x, "times": np.array([times])})
        np.testing.assert_array_equal(made["tiled"], np.tile(x, times))
        assert made["size"] == 3 * times


# --- CUDA graphs and time ---------------------------------------------------------------------------------------------


def test_a_graph_is_captured_once_for_each_set_of_shapes(runtime: FakeRuntime, tmp_path: Path) -> None:
    session = EngineSession(loaded(attention_engine(runtime), tmp_path / "m.engine"), cuda_graph=True)
    for length in (7, 7, 7, 9, 9):
        session.run(feeds(length=length))
    assert (runtime.captures, runtime.launches) == (2, 5)
    assert list(runtime.open.values()).count("exec") == 1, "the graph of the first shapes is given back"


def test_without_the_flag_nothing_is_captured(runtime: FakeRuntime, tmp_path: Path) -> None:
    EngineSession(loaded(attention_engine(runtime), tmp_path / "m.engine")).run(feeds())
    assert (runtime.captures, runtime.launches) == (0, 0)


@GRAPH
def test_the_time_is_that_of_the_work_and_not_of_the_copies(runtime: FakeRuntime, tmp_path: Path, graph: bool) -> None:
    session = EngineSession(loaded(attention_engine(runtime), tmp_path / "m.engine"), cuda_graph=graph)
    for _ in range(3):
        assert session.time(feeds()) == pytest.approx(WORK_MS / 1e3)
    assert COPY_MS > WORK_MS


@pytest.mark.parametrize("capturable", [True, False])
def test_an_engine_that_cannot_be_captured_says_so(runtime: FakeRuntime, tmp_path: Path, capturable: bool) -> None:
    engine = attention_engine(runtime)
    engine.capturable = capturable
    session = EngineSession(loaded(engine, tmp_path / "m.engine"), cuda_graph=True)
    if capturable:
        session.run(feeds())
        return
    with pytest.raises(UnsupportedModel) as caught:
        session.run(feeds())
    assert "--cuda-graph" in caught.value.do


# --- what goes wrong --------------------------------------------------------------------------------------------------


@GRAPH
def test_an_engine_that_reports_an_error_is_told_in_its_words(
    runtime: FakeRuntime, tmp_path: Path, graph: bool
) -> None:
    engine = attention_engine(runtime)
    session = EngineSession(loaded(engine, tmp_path / "m.engine"), cuda_graph=graph)
    engine.fails = True
    with pytest.raises(UsageError) as caught:
        session.run(feeds())
    assert "TensorRT's own words" in caught.value.got
    engine.fails = False
    given = feeds(seed=4)
    np.testing.assert_array_equal(session.run(given)["output"], compute(given)["output"].astype(np.float32))
    session.close()
    assert not runtime.open
    assert not runtime.memory


def test_an_error_while_a_graph_is_captured_ends_the_capture(runtime: FakeRuntime, tmp_path: Path) -> None:
    engine = attention_engine(runtime)
    session = EngineSession(loaded(engine, tmp_path / "m.engine"), cuda_graph=True)
    begun = runtime.cudaStreamBeginCapture

    def begin_and_break(stream: int, mode: object) -> tuple[Any]:
        engine.fails = True
        return begun(stream, mode)

    runtime.cudaStreamBeginCapture = begin_and_break
    with pytest.raises(UsageError):
        session.run(feeds())
    engine.fails, runtime.cudaStreamBeginCapture = False, begun
    given = feeds(seed=4)
    np.testing.assert_array_equal(session.run(given)["output"], compute(given)["output"].astype(np.float32))
    session.close()
    assert not runtime.open


BAD: dict[str, tuple[Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], str]] = {
    "missing": (lambda f: {"query": f["query"]}, "no key, value"),
    "another type": (lambda f: f | {"key": f["key"].astype(np.int64)}, "int64"),
    "outside the profile": (lambda f: feeds(length=99), "shape [2, 3, 99, 20]"),
}


@pytest.mark.parametrize("case", BAD)
def test_inputs_that_do_not_fit_are_refused(runtime: FakeRuntime, tmp_path: Path, case: str) -> None:
    change, told = BAD[case]
    session = EngineSession(loaded(attention_engine(runtime), tmp_path / "m.engine"))
    with pytest.raises(UsageError) as caught:
        session.run(change(feeds()))
    assert told in str(caught.value)


def test_an_output_whose_shape_its_contents_tell_is_refused(runtime: FakeRuntime, tmp_path: Path) -> None:
    tensors = [Tensor("x", np.dtype(np.float32), "FLOAT"), Tensor("y", np.dtype(np.int64), "INT64", lambda *_: (-1,))]
    session = EngineSession(loaded(FakeEngine(runtime, tensors, lambda a: {}), tmp_path / "m.engine"))
    with pytest.raises(UnsupportedModel, match="known only when"):
        session.run({"x": np.zeros(3, np.float32)})


def test_a_type_that_numpy_cannot_hold_is_refused(runtime: FakeRuntime, tmp_path: Path) -> None:
    engine = FakeEngine(runtime, [Tensor("x", np.dtype(np.uint8), "FP8")], lambda a: {})
    with pytest.raises(UnsupportedModel, match="cannot hold"):
        EngineSession(loaded(engine, tmp_path / "m.engine"))


def test_too_little_memory_is_told_as_such(runtime: FakeRuntime, tmp_path: Path) -> None:
    session = EngineSession(loaded(attention_engine(runtime), tmp_path / "m.engine"))
    runtime.capacity = 1000
    with pytest.raises(MissingHere, match="too little free memory"):
        session.run(feeds())
    session.close()
    assert not runtime.memory


USED = sorted(
    calls().keys() - {"cudaGraphDestroy", "cudaGraphExecDestroy", "cudaFree", "cudaEventDestroy", "cudaStreamDestroy"}
)


@pytest.mark.parametrize("name", USED)
def test_a_call_that_fails_is_told_by_name_with_cudas_words(runtime: FakeRuntime, tmp_path: Path, name: str) -> None:
    runtime.failing[name] = real.cudaError_t.cudaErrorInsufficientDriver
    with pytest.raises(MissingHere) as caught:
        EngineSession(loaded(attention_engine(runtime), tmp_path / "m.engine"), cuda_graph=True).time(feeds())
    assert caught.value.where == name
    assert "cudaErrorInsufficientDriver: CUDA driver version is insufficient" in caught.value.got


@pytest.mark.parametrize("name", calls())
def test_the_fake_has_the_signature_of_the_real_call(name: str) -> None:
    """Or else the tests here would hold calls that cuda-python refuses."""
    (signature,) = [line for line in getattr(real, name).__doc__.splitlines() if line.startswith(f"{name}(")][:1]
    declared = [part.split(":")[0].split()[-1] for part in signature[len(name) + 1 : -1].split(", ") if part]
    assert declared == calls()[name]


def test_without_a_driver_the_real_runtime_is_told_in_five_parts() -> None:
    if gpu.devices():
        pytest.skip("a GPU is here: the real runtime works")
    with pytest.raises(MissingHere) as caught:
        cuda.Device()
    assert caught.value.where == "cudaStreamCreateWithFlags"
    assert caught.value.got.startswith("cudaError")


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def engine_here(runtime: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine that loads, and its ONNX file beside it as m.onnx."""
    fused(tmp_path / "m.onnx")
    path = tmp_path / "m.engine"
    low, high = [1, HEADS, 3, HEAD_DIM], [2, HEADS, 64, HEAD_DIM]
    profile = {name: {"min": low, "opt": high, "max": high} for name in ("query", "key", "value")}
    made = loaded(attention_engine(runtime), path, {"profile": profile})
    (tmp_path / "m.engine.json").write_text(json.dumps({"profile": profile}))
    monkeypatch.setattr(engine_load, "load", lambda path, trusted: made)
    return path


@pytest.mark.parametrize("flags", [(), ("--cuda-graph",)], ids=["plain", "graph"])
def test_run_writes_the_engines_outputs_and_says_how_they_came(
    engine_here: Path,
    tmp_path: Path,
    runtime: FakeRuntime,
    flash_trt: Command,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
) -> None:
    given = feeds()
    np.savez(tmp_path / "in.npz", **given)
    assert flash_trt("run", engine_here, "-i", tmp_path / "in.npz", "-o", tmp_path / "out.npz", *flags) == EXIT_OK
    with np.load(tmp_path / "out.npz") as written:
        np.testing.assert_array_equal(written["output"], compute(given)["output"].astype(np.float32))
    said = capsys.readouterr().out
    assert "no plugin of ours" in said, "the file of this test holds none"
    assert ("launched as a CUDA graph" in said) is bool(flags)
    assert not runtime.open
    assert not runtime.memory


def test_bench_times_an_engine_with_and_without_a_graph(
    engine_here: Path, tmp_path: Path, runtime: FakeRuntime, flash_trt: Command
) -> None:
    flags = ("--at", "batch=2,seq=37", "--at", "batch=1,seq=9", "--seconds", 0, "--json", tmp_path / "bench.json")
    assert flash_trt("bench", engine_here, tmp_path / "m.onnx", "--cuda-graph", *flags) == EXIT_OK
    for setting in json.loads((tmp_path / "bench.json").read_text())["settings"]:
        plain, graph, *onnx = setting["timings"]
        assert len(onnx) == 2
        for timing in (plain, graph):
            assert timing["runs"] >= 5
            assert [timing[f"p{p}_ms"] for p in (10, 50, 90, 99)] == pytest.approx([WORK_MS] * 4)
        assert "CUDA graph" in graph["implementation"]
        assert "CUDA graph" not in plain["implementation"]
    assert not runtime.open
    assert not runtime.memory


def test_bench_refuses_sizes_outside_an_engines_shapes(
    engine_here: Path, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--at", "batch=2,seq=65", "--seconds", 0)
    assert flash_trt("bench", engine_here, tmp_path / "m.onnx", *flags) == EXIT_USAGE
    assert "1x3x3x20 to 2x3x64x20" in capsys.readouterr().err


def test_an_engine_that_tensorrt_does_not_take_ends_with_5_and_its_words(
    rtx: object,
    tmp_path: Path,
    flash_trt: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Here for want of a driver; with one, an engine cut short."""
    built_for = f"query:1x{HEADS}x3x{HEAD_DIM},1x{HEADS}x5x{HEAD_DIM},2x{HEADS}x7x{HEAD_DIM}"
    engine = tmp_path / "m.engine"
    build = ("build", fused(tmp_path / "m.onnx"), "-o", engine, "--target", "sm80", "--shape", built_for)
    assert flash_trt(*build) == EXIT_OK
    engine.write_bytes(engine.read_bytes()[:5000])
    monkeypatch.setattr(gpu, "devices", lambda: [gpu.Device("a GPU", "sm80", 2**34)])
    np.savez(tmp_path / "in.npz", **feeds())
    capsys.readouterr()
    assert flash_trt("run", engine, "-i", tmp_path / "in.npz", "--trust-engine") == EXIT_MISSING
    told = capsys.readouterr().err
    for part in ("error: the engine does not load", "where ", "got   ", "need  tensorrt-rtx", "do    build"):
        assert part in told

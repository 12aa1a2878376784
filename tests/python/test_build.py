# SPDX-License-Identifier: Apache-2.0
"""Engines are really built here, with our plugin in them; every way it can be missing fails loudly."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from contract import cache_cases
from contract.cache_cases import CACHE_CASES
from contract.cache_model import node_of
from contract.node_model import model_of
from onnx import TensorProto, helper
from python.attention_models import HALF, HEAD_DIM, HEADS, SCALE, flash_node, fused, unfused, with_bodies
from python.fresh_process import run_python

from flash_export.errors import EXIT_MISSING, EXIT_OK, EXIT_UNSUPPORTED, EXIT_USAGE, MissingHere, UserError
from flash_export.op import ATTENTION_OPERATORS, CACHE_OPERATORS, DOMAIN, Attributes
from flash_export.talk import Talk
from flash_trt import backends, gpu, onnx_file, shapes
from flash_trt.backends import Backend
from flash_trt.build import (
    BuildOptions,
    Engine,
    build,
    build_engine,
    default_targets,
    prove_plugins,
    served_targets,
    sidecar_path,
)

SHAPES = f"query:1x{HEADS}x1x{HEAD_DIM},2x{HEADS}x37x{HEAD_DIM},3x{HEADS}x131x{HEAD_DIM}"
ALL_TARGETS = ("sm80", "sm86", "sm89", "sm120")

Command = Callable[..., int]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_help_says_what_is_built_for_with_a_gpu_and_without(
    flash_trt: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert flash_trt("build", "--help") == EXIT_OK
    assert "the GPU here; without one, all that the backend" in " ".join(
        capsys.readouterr().out.replace("│", "").split()
    )


def test_one_engine_serves_four_generations_and_its_sidecar_tells_what_it_is(rtx: Backend, tmp_path: Path) -> None:
    model = fused(tmp_path / "m.onnx", dtype=HALF)
    engine = tmp_path / "out" / "m.engine"
    build(BuildOptions(model, engine, "tensorrt-rtx", (SHAPES,), ALL_TARGETS), Talk(quiet=True))
    sidecar = json.loads(sidecar_path(engine).read_text())
    assert sidecar["engine"] == {"file": "m.engine", "bytes": engine.stat().st_size, "sha256": _sha256(engine)}
    assert sidecar["model"]["sha256"] == _sha256(model)
    assert sidecar["plugin"]["sha256"] == _sha256(Path(sidecar["plugin"]["file"]))
    assert sidecar["plugin_layers"] == [{"name": "attention", "operator": "FlashAttention"}]
    assert sidecar["plan_proof"] == "fields"
    assert sidecar["targets"] == list(ALL_TARGETS)
    assert sidecar["backend"] == {"name": "tensorrt-rtx", "version": rtx.version}
    (profile,) = sidecar["profiles"]
    assert profile["value"] == {
        "min": [1, HEADS, 1, HEAD_DIM],
        "opt": [2, HEADS, 37, HEAD_DIM],
        "max": [3, HEADS, 131, HEAD_DIM],
    }
    assert isinstance(sidecar["scratch_bytes"], int)
    assert f"--maxShapes=query:3x{HEADS}x131x{HEAD_DIM},key:" in sidecar["trtexec"]


# --- every operator and every place a node can stand ------------------------------------------------------------------


def _engine(rtx: Backend, path: Path, *given: str) -> tuple[tuple[str, str], ...]:
    """Builds ``path`` for one generation at the ``given`` shapes, proves it, and gives its plugin layers."""
    file = onnx_file.read(path)
    engine = build_engine(
        rtx, file, shapes.plan_profiles(file.inputs, [shapes.parse(text) for text in given]), ("sm80",)
    )
    assert prove_plugins(rtx, file, engine).kind == "fields"
    return engine.layers


def _typed(name: str, dtype: int, dims: list[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, dims)


def _save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    functions: list[onnx.FunctionProto] | None = None,
) -> Path:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1), helper.make_opsetid("mine", 1)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions or []), path)
    return path


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_every_operator_builds(rtx: Backend, tmp_path: Path, dtype: int) -> None:
    width = HEADS * HEAD_DIM
    flat: list[int | str] = ["batch", "seq", width]
    attributes = Attributes(q_num_heads=HEADS, kv_num_heads=HEADS, scale=SCALE)
    extended = Attributes(q_num_heads=HEADS, kv_num_heads=HEADS, scale=SCALE, has_bias=1, has_kv_lengths=1, has_sinks=1)
    nodes = [
        helper.make_node("FlashAttention", ["q", "k", "v"], ["a"], name="a", domain=DOMAIN, **attributes.as_dict()),
        helper.make_node(
            "FlashAttentionEx",
            ["a", "k", "v", "bias", "lengths", "sinks"],
            ["b", "lse"],
            name="b",
            domain=DOMAIN,
            **extended.as_dict(),
        ),
        helper.make_node("Concat", ["b", "k", "v"], ["qkv"], axis=2),
        helper.make_node("FlashAttentionPacked", ["qkv"], ["c"], name="c", domain=DOMAIN, **attributes.as_dict()),
    ]
    inputs = [_typed(name, dtype, flat) for name in ("q", "k", "v")]
    inputs += [
        _typed("bias", dtype, ["batch", 1, 1, "seq"]),
        _typed("lengths", TensorProto.INT32, ["batch"]),
        _typed("sinks", TensorProto.FLOAT, [HEADS]),
    ]
    outputs = [_typed("c", dtype, flat), _typed("lse", TensorProto.FLOAT, ["batch", HEADS, "seq"])]
    layers = _engine(rtx, _save(tmp_path / "m.onnx", nodes, inputs, outputs))
    assert [operator for _, operator in layers] == list(ATTENTION_OPERATORS)


@pytest.mark.parametrize("operator", CACHE_OPERATORS)
def test_a_cache_form_with_its_body_builds_as_a_plugin(rtx: Backend, tmp_path: Path, operator: str) -> None:
    path = tmp_path / "m.onnx"
    case = next(c for c in CACHE_CASES if c.operator == operator and c.name.startswith("decode"))
    onnx.save(onnx.shape_inference.infer_shapes(model_of([node_of(cache_cases.make(case))], 18)), path)
    given = cache_cases.make(case).given
    fixed = [f"{i.name}:" + "x".join(map(str, given[i.name].shape)) for i in onnx_file.read(path).inputs]
    assert [kind for _, kind in _engine(rtx, path, *fixed)] == [operator]


def test_a_tensorrt_without_aliases_is_told_for_a_cache() -> None:
    old = Backend("tensorrt", SimpleNamespace(__version__="10.2", PreviewFeature=None), [], None)
    with pytest.raises(MissingHere, match="cannot write a cache in place"):
        backends.alias_outputs(old, None)


def test_nodes_in_functions_and_branches_become_plugins_too(rtx: Backend, tmp_path: Path) -> None:
    dims: list[int | str] = ["batch", HEADS, "seq", HEAD_DIM]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    block = helper.make_function("mine", "Block", ["query", "key", "value"], ["output"], [flash_node()], opsets)
    made = [_typed("made", HALF, dims)]
    one = helper.make_graph([flash_node(("half", "key", "value"), "made", name="one")], "t", [], made)
    two = helper.make_graph([flash_node(("half", "key", "value"), "made", name="two", causal=0)], "e", [], made)
    nodes = [
        helper.make_node("Block", ["query", "key", "value"], ["quarter"], domain="mine"),
        helper.make_node("Block", ["quarter", "key", "value"], ["half"], domain="mine"),
        helper.make_node("If", ["choice"], ["output"], then_branch=one, else_branch=two),
    ]
    inputs = [_typed(name, HALF, dims) for name in ("query", "key", "value")] + [_typed("choice", TensorProto.BOOL, [])]
    path = _save(tmp_path / "m.onnx", nodes, inputs, [_typed("output", HALF, dims)], [block])
    # TensorRT for RTX 1.7 builds no plugin with a workspace inside a branch; 17 queries need none (attention.h).
    layers = _engine(rtx, path, f"query:1x{HEADS}x17x{HEAD_DIM},2x{HEADS}x37x{HEAD_DIM},3x{HEADS}x131x{HEAD_DIM}")
    assert len(layers) == 4


def test_a_node_that_nothing_needs_does_not_fail_the_proof(rtx: Backend, tmp_path: Path) -> None:
    _engine(rtx, fused(tmp_path / "m.onnx", flash_node(output="unused", name="dead"), flash_node()))


def test_weights_in_a_file_of_their_own_are_found(rtx: Backend, tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((HEAD_DIM, HEAD_DIM)).astype(np.float32)
    nodes = [flash_node(output="half"), helper.make_node("MatMul", ["half", "weights"], ["output"])]
    path = fused(tmp_path / "m.onnx", *nodes, constants={"weights": weights})
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    output = tmp_path / "m.engine"
    sidecar = build(BuildOptions(path, output, "tensorrt-rtx", (SHAPES,), ("sm80",)), Talk(quiet=True))
    assert sidecar["model"]["external"] == {"m.data": _sha256(tmp_path / "m.data")}
    assert weights[0].tobytes() in output.read_bytes()


def test_the_plugin_can_be_put_into_the_engine(rtx: Backend, tmp_path: Path, flash_trt: Command) -> None:
    model, engine = fused(tmp_path / "m.onnx"), tmp_path / "m.engine"
    assert flash_trt("build", model, "-o", engine, "--target", "sm80", "--embed-plugin") == EXIT_OK
    sidecar = json.loads(sidecar_path(engine).read_text())
    library = Path(sidecar["plugin"]["file"])
    assert library.read_bytes() in engine.read_bytes()
    assert sidecar["embedded_plugin"] is True
    assert f"--setPluginsToSerialize={library}" in sidecar["trtexec"]


def test_rtx_keeps_no_timing_cache_and_says_so(
    rtx: Backend, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    model, cache = fused(tmp_path / "m.onnx"), tmp_path / "cache"
    assert flash_trt("build", model, "--target", "sm80", "--timing-cache", cache) == EXIT_OK
    assert "--timing-cache is left out" in capsys.readouterr().err
    assert not cache.exists()


@pytest.mark.parametrize(
    "held",
    [b"ftrt, an engine", b"\x7fELF, a library", b"PK\x03\x04", "Prosa, überall\n".encode(), b"{}"],
    ids=lambda held: repr(held[:8]),
)
def test_what_is_no_timing_cache_is_not_replaced_by_one(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], held: bytes
) -> None:
    model, cache = fused(tmp_path / "m.onnx"), tmp_path / "cache"
    cache.write_bytes(held)
    assert flash_trt("build", model, "--target", "sm80", "--timing-cache", cache) == EXIT_USAGE
    assert "is no timing cache" in capsys.readouterr().err
    assert cache.read_bytes() == held
    assert not (tmp_path / "m.engine").exists()


# --- a plugin that is not used never passes ---------------------------------------------------------------------------


def test_a_node_that_names_another_version_is_no_plugin_and_fails(
    rtx: Backend, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    node = flash_node()
    next(a for a in node.attribute if a.name == "plugin_version").s = b"2"
    model = fused(tmp_path / "m.onnx", node)
    assert flash_trt("build", model, "-o", tmp_path / "e", "--target", "sm80") == EXIT_UNSUPPORTED
    told = capsys.readouterr().err
    assert "took the function body" in told
    assert "plugin_version '2'" in told
    assert not (tmp_path / "e").exists()


BUILD_WITHOUT_PLUGIN = """
import sys
from pathlib import Path
from flash_trt import backends, onnx_file, shapes
from flash_trt.build import build_engine
from flash_export.errors import MissingHere

backend = backends.load("tensorrt-rtx")
file = onnx_file.read(Path(sys.argv[1] if len(sys.argv) > 1 else {model!r}))
try:
    build_engine(backend, file, shapes.plan_profiles(file.inputs, []), ("sm80",))
except MissingHere as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("given", ["", ",", "sm80,", " "])
def test_a_target_without_a_name_is_refused(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    assert flash_trt("build", fused(tmp_path / "m.onnx"), "--target", given) == EXIT_USAGE
    told = " ".join(capsys.readouterr().err.split())
    assert "a target has no name" in told
    assert repr(given) in told
    assert not (tmp_path / "m.engine").exists()


def test_a_build_without_the_plugin_does_not_take_the_function_body_silently(tmp_path: Path) -> None:
    model = fused(tmp_path / "m.onnx")
    ran = run_python(BUILD_WITHOUT_PLUGIN.format(model=str(model)))
    assert "refused: TensorRT took the function body" in ran.stdout, ran.stderr
    assert "0 plugin layers for 1 FlashAttention nodes; missing: attention" in ran.stdout


def test_a_plan_that_lacks_a_node_is_not_written(
    tmp_path: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tampered(*arguments: Any) -> Engine:
        engine = build_engine(*arguments)
        return dataclasses.replace(engine, data=engine.data.replace(struct.pack("<f", SCALE), struct.pack("<f", 0.5)))

    monkeypatch.setattr("flash_trt.build.build_engine", tampered)
    assert flash_trt("build", fused(tmp_path / "m.onnx"), "--target", "sm80") == EXIT_MISSING
    assert "lacks FlashAttention with causal 1, diagonal 0, has_bias 0" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_a_full_disk_leaves_the_old_engine_and_its_sidecar(
    rtx: Backend, tmp_path: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    (tmp_path / "m.engine").write_text("ftrt old")
    older = '{"schema": 1, "engine": {}}'
    (tmp_path / "m.engine.json").write_text(older)
    monkeypatch.setattr("flash_trt.output.os.fsync", full)
    assert flash_trt("build", fused(tmp_path / "m.onnx"), "--target", "sm80") == EXIT_MISSING
    assert (tmp_path / "m.engine").read_text() == "ftrt old"
    assert (tmp_path / "m.engine.json").read_text() == older
    assert len(list(tmp_path.iterdir())) == 3


def test_a_missing_library_ends_with_5_and_the_places_searched(
    tmp_path: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flash_trt.plugin_library._loaded", {})
    monkeypatch.setenv("FLASH_TRT_PLUGIN", str(tmp_path / "nowhere.so"))
    assert flash_trt("build", fused(tmp_path / "m.onnx"), "--target", "sm80") == EXIT_MISSING
    assert str(tmp_path / "nowhere.so") in capsys.readouterr().err
    assert not (tmp_path / "m.engine").exists()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_model_without_flash_attention_is_refused_unless_allowed(
    rtx: Backend, tmp_path: Path, flash_trt: Command
) -> None:
    model = unfused(tmp_path / "m.onnx")
    assert flash_trt("build", model, "--target", "sm80") == EXIT_UNSUPPORTED
    assert flash_trt("build", model, "--target", "sm80", "--allow-none") == EXIT_OK
    assert json.loads((tmp_path / "m.engine.json").read_text())["plugin"] is None


@pytest.mark.parametrize("target", ["sm90", "sm75", "sm80,sm90", "80", "hopper"])
def test_an_unserved_target_is_refused_with_the_list_of_the_others(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    assert flash_trt("build", fused(tmp_path / "m.onnx"), "--target", target) == EXIT_USAGE
    assert "sm80, sm86, sm89, sm120, sm121" in capsys.readouterr().err


def _pretend_gpus(monkeypatch: pytest.MonkeyPatch, *sms: str) -> None:
    monkeypatch.setattr("flash_trt.gpu.devices", lambda: [gpu.Device(f"a GPU {sm}", sm, 2**34) for sm in sms])


@pytest.mark.parametrize(
    ("here", "taken"), [([], None), (["sm90"], None), (["sm89"], "sm89"), (["sm90", "sm120"], "sm120")]
)
def test_without_a_target_the_gpu_here_counts_only_where_rtx_builds_for_it(
    rtx: Backend, monkeypatch: pytest.MonkeyPatch, here: list[str], taken: str | None
) -> None:
    _pretend_gpus(monkeypatch, *here)
    assert default_targets(rtx) == (served_targets(rtx) if taken is None else (taken,))


def test_a_build_for_the_gpu_here_names_it_in_the_sidecar(
    rtx: Backend,
    tmp_path: Path,
    flash_trt: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _pretend_gpus(monkeypatch, "sm89", "sm80")
    monkeypatch.setattr("flash_trt.build.default_targets", lambda _: ())  # as of a TensorRT without targets
    assert flash_trt("build", fused(tmp_path / "m.onnx"), "--backend", "tensorrt-rtx") == EXIT_OK
    sidecar = json.loads((tmp_path / "m.engine.json").read_text())
    assert (sidecar["targets"], sidecar["gpu"]) == ([], {"name": "a GPU sm89", "sm": "sm89"})
    assert "the GPU here, a GPU sm89 (sm89)" in capsys.readouterr().out
    assert flash_trt("build", tmp_path / "m.onnx", "--target", "sm80") == EXIT_OK
    assert json.loads((tmp_path / "m.engine.json").read_text())["gpu"] is None


def test_targets_can_be_given_in_any_of_the_usual_spellings(rtx: Backend, tmp_path: Path, flash_trt: Command) -> None:
    model = fused(tmp_path / "m.onnx")
    assert flash_trt("build", model, "--target", "SM80, sm89", "--target", "sm120") == EXIT_OK
    assert json.loads((tmp_path / "m.engine.json").read_text())["targets"] == ["sm80", "sm89", "sm120"]


def test_what_tensorrt_refuses_is_told_in_its_own_words(rtx: Backend, tmp_path: Path) -> None:
    dims: list[int | str] = [1, HEADS, 5, HEAD_DIM]
    node = helper.make_node("NoSuchOperator", ["x"], ["y"], domain="mine", name="strange")
    path = _save(tmp_path / "m.onnx", [node], [_typed("x", HALF, dims)], [_typed("y", HALF, dims)])
    with pytest.raises(UserError) as caught:
        build(BuildOptions(path, tmp_path / "e", "tensorrt-rtx", (), ("sm80",), allow_none=True), Talk(quiet=True))
    assert caught.value.exit_code == EXIT_UNSUPPORTED
    assert re.search("strange.*NoSuchOperator", str(caught.value))


def test_what_the_plugin_refuses_is_told_in_its_own_words(
    rtx: Backend, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    width = HEADS * HEAD_DIM
    node = helper.make_node(
        "FlashAttention",
        ["x", "x", "x"],
        ["y"],
        domain=DOMAIN,
        name="odd",
        **Attributes(q_num_heads=7, kv_num_heads=7, scale=SCALE).as_dict(),
    )
    path = _save(tmp_path / "m.onnx", [node], [_typed("x", HALF, [1, 5, width])], [_typed("y", HALF, [1, 5, width])])
    with pytest.raises(UserError) as caught:
        build(BuildOptions(path, tmp_path / "e", "tensorrt-rtx", (), ("sm80",)), Talk(quiet=True))
    assert caught.value.exit_code == EXIT_UNSUPPORTED
    assert "node odd (FlashAttention)" in caught.value.got
    assert "cudaError" not in caught.value.got
    assert re.search(rf"shape \[1, 5, {width}\]\s+need .* 7\*D", capfd.readouterr().err)


def test_a_head_that_is_too_large_is_refused_at_build_with_both_reasons_and_the_limit(
    rtx: Backend, tmp_path: Path, flash_trt: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    shape: list[int | str] = ["batch", "seq", 2 * 320]
    attributes = Attributes(q_num_heads=2, kv_num_heads=2, scale=SCALE)
    node = helper.make_node(
        "FlashAttention", ["q", "k", "v"], ["y"], name="wide", domain=DOMAIN, **attributes.as_dict()
    )
    path = tmp_path / "m.onnx"
    _save(path, [node], [_typed(name, HALF, shape) for name in "qkv"], [_typed("y", HALF, shape)])
    assert flash_trt("build", path, "--target", "sm80", "--shape", "q:1x1x640,2x64x640,4x128x640") == EXIT_UNSUPPORTED
    told = capfd.readouterr().err
    assert re.search(
        r'where node "wide"\n  got   head_dim is 320; .* 256\.?\n        v_head_dim is 320; .* 256\.?\n  need  ', told
    ), told
    assert not (tmp_path / "m.engine").exists()


@pytest.mark.parametrize("content", [b"", b"just text\n", None])
def test_an_unreadable_model_ends_with_2(tmp_path: Path, flash_trt: Command, content: bytes | None) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    assert flash_trt("build", path, "--target", "sm80") == EXIT_USAGE


def test_an_output_below_a_file_ends_with_2_before_anything_is_built(
    tmp_path: Path, flash_trt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the build started")

    monkeypatch.setattr("flash_trt.build.build_engine", never)
    (tmp_path / "file").write_text("")
    model = fused(tmp_path / "m.onnx")
    assert flash_trt("build", model, "-o", tmp_path / "file" / "e", "--target", "sm80") == EXIT_USAGE


def test_a_failed_build_leaves_the_old_engine_alone(rtx: Backend, tmp_path: Path, flash_trt: Command) -> None:
    node = flash_node()
    next(a for a in node.attribute if a.name == "plugin_version").s = b"2"
    (tmp_path / "m.engine").write_text("ftrt old")
    assert flash_trt("build", fused(tmp_path / "m.onnx", node), "--target", "sm80") == EXIT_UNSUPPORTED
    assert (tmp_path / "m.engine").read_text() == "ftrt old"
    assert not list(tmp_path.glob(".*"))


def test_the_shapes_are_printed_ready_to_paste(
    rtx: Backend, tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fused(tmp_path / "m.onnx")
    assert flash_trt("build", model, "--target", "sm80", "--shape", SHAPES, "--quiet") == EXIT_OK
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line.startswith("tensorrt_rtx --onnx=")
    assert f"--optShapes=query:2x{HEADS}x37x{HEAD_DIM},key:2x{HEADS}x37x{HEAD_DIM}" in line


def test_with_bodies_the_same_node_stays_a_plugin(rtx: Backend, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(with_bodies(onnx.load(fused(tmp_path / "bare.onnx", fallback=False))), path)
    assert _engine(rtx, path) == _engine(rtx, tmp_path / "bare.onnx")

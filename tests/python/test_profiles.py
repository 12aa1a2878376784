# SPDX-License-Identifier: Apache-2.0
"""An engine with several optimization profiles: built for real, described, and run in the first that holds the shapes.

Profile 0 is for prompts and profile 1 for many short sequences, so neither holds the other's shapes.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from polygraphy.tools import convert
from python.attention_models import HALF, HEAD_DIM, HEADS, flash_node, fused, unfused
from python.fake_cuda import FakeRuntime
from python.test_engine_session import attention_engine, compute, feeds, loaded

from flash_export.errors import EXIT_OK, EXIT_USAGE, UsageError
from flash_trt import cuda, engine_file, plan, runners
from flash_trt.backends import Backend
from flash_trt.compare_inputs import InputOptions, plan_runs
from flash_trt.engine_session import EngineSession
from flash_trt.onnx_file import GraphInput, read
from flash_trt.output import sidecar_path
from flash_trt.profile_order import never_run
from flash_trt.shapes import ShapeRange, parse, plan_profiles

Command = Callable[..., int]

IDS = GraphInput("ids", 7, ("batch", "seq"))
MASK = GraphInput("mask", 7, ("batch", "seq"))
PAST = GraphInput("past", 1, ("batch", 2, "past", 16))


def _query(*shapes: tuple[int, int]) -> str:
    return "query:" + ",".join(f"{batch}x{HEADS}x{length}x{HEAD_DIM}" for batch, length in shapes)


PROMPT = _query((1, 128), (1, 1024), (2, 4096))
DECODE = _query((1, 1), (16, 1), (32, 3))


def _limits(text: str) -> dict[str, dict[str, list[int]]]:
    """What a sidecar says of the three inputs of ``fused`` where ``text`` settles their symbols."""
    range_ = parse(text)
    told = {"min": [*range_.smallest], "opt": [*range_.usual], "max": [*range_.largest]}
    return dict.fromkeys(("query", "key", "value"), told)


# --- which shapes make which profile ----------------------------------------------------------------------------------


def test_the_second_shape_of_an_input_makes_a_second_profile_and_settles_its_own_symbols() -> None:
    given = [parse(text) for text in ("ids:1x64,1x512,4x2048", "past:1x2x0x16,1x2x0x16,4x2x0x16", "ids:1x1,8x1,64x1")]
    prompt, decode = plan_profiles([IDS, MASK, PAST], [*given, parse("past:1x2x1x16,8x2x512x16,64x2x2048x16")])
    assert prompt.ranges[1] == ShapeRange("mask", (1, 64), (1, 512), (4, 2048))
    assert decode.ranges[1] == ShapeRange("mask", (1, 1), (8, 1), (64, 1))
    assert prompt.ranges[2].largest == (4, 2, 0, 16)
    assert decode.ranges[2].largest == (64, 2, 2048, 16)


def test_a_dim_that_is_a_sum_is_computed_in_each_profile() -> None:
    total = GraphInput("mask", 7, ("batch", "seq + past"))
    given = ["ids:1x1,8x1,16x1", "past:1x2x1x16,8x2x128x16,16x2x255x16"]
    given += ["ids:1x1,1x64,1x256", "past:1x2x0x16"]
    step, prompt = plan_profiles([IDS, total, PAST], [parse(text) for text in given])
    assert step.ranges[1] == ShapeRange("mask", (1, 2), (8, 129), (16, 256))
    assert prompt.ranges[1] == ShapeRange("mask", (1, 1), (1, 64), (1, 256))


@pytest.mark.parametrize(
    ("given", "never"),
    [
        (["ids:1x1,4x64,8x512", "ids:1x1,1x1,8x1"], [(1, 0)]),
        (["ids:1x1,1x1,8x1", "ids:1x1,4x64,8x512"], []),
        (["ids:1x1,4x64,8x512", "ids:1x1,1x1,9x1"], []),
        (["ids:2x9", "ids:1x1,4x64,8x512", "ids:1x1,4x64,8x513", "ids:8x512"], [(3, 1)]),
    ],
)
def test_a_profile_that_an_earlier_one_contains_never_runs(given: list[str], never: list[tuple[int, int]]) -> None:
    assert list(never_run(plan_profiles([IDS, MASK], [parse(text) for text in given]))) == never


def test_a_build_warns_of_a_profile_that_never_runs(
    tmp_path: Path, flash_trt: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fused(tmp_path / "m.onnx")
    wide, narrow = _query((1, 1), (1, 64), (8, 512)), _query((1, 1), (1, 1), (2, 1))
    for first, second, warned in ((wide, narrow, True), (narrow, wide, False)):
        assert flash_trt("build", model, "--shape", first, "--shape", second, "--target", "sm80") == EXIT_OK
        told = " ".join(capsys.readouterr().err.split())
        assert ("flash-trt never runs profile 1 (query:1x3x1x20" in told) is warned


def test_an_input_with_one_shape_has_it_in_every_profile() -> None:
    given = [parse(text) for text in ("ids:2x1,2x2,2x3", "past:2x2x5x16", "ids:2x7,2x8,2x9")]
    assert [profile.ranges[2] for profile in plan_profiles([IDS, MASK, PAST], given)] == [given[1]] * 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["ids:1x1", "ids:1x2", "past:1x2x1x16", "past:1x2x2x16", "past:1x2x3x16"], "2 for ids, 3 for past"),
        (["ids:1x1", "ids:1x1"], "two optimization profiles are the same"),
        (["ids:1x1", "ids:1x1x1"], "rank 2"),
        (["ids:2x1", "ids:3x1", "past:2x2x1x16"], "batch = 3,3,3, as --shape ids says"),
        (["ids:2x1", "ids:3x1", "past:2x2x1x16"], "--shape, profile 1"),
    ],
)
def test_shapes_that_make_no_profiles_are_refused(given: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_profiles([IDS, MASK, PAST], [parse(text) for text in given])
    assert words in str(caught.value)


# --- a real engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(rtx: Backend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine for two generations with two nodes and two profiles, by the command."""
    from flash_export import command
    from flash_trt.cli import app

    folder = tmp_path_factory.mktemp("profiles")
    nodes = (flash_node(output="first"), flash_node(("first", "key", "value"), name="second"))
    model = fused(folder / "m.onnx", *nodes, dtype=HALF)
    flags = ["--target", "sm80,sm89", "--shape", PROMPT, "--shape", DECODE, "-o", str(folder / "m.engine")]
    assert command.run(app, ["build", str(model), *flags]) == EXIT_OK
    return folder / "m.engine"


def test_a_build_with_two_profiles_has_every_node_in_each_and_says_so(built: Path) -> None:
    sidecar = json.loads(sidecar_path(built).read_text())
    assert sidecar["profiles"] == [_limits(PROMPT), _limits(DECODE)]
    assert sidecar["profile"] == _limits(PROMPT), "readers that know of one profile find the first"
    assert sidecar["plan_proof"] == "fields"
    assert [layer["name"] for layer in sidecar["plugin_layers"]] == ["attention", "second"]
    data = built.read_bytes()
    assert len(plan.plugin_records(data)) == 4, "this TensorRT writes each plugin once for each profile"
    assert b"second [profile 1]" in data
    # Decoding splits the keys among blocks, prompts do not: what the node keeps is that of the larger one.
    assert {entry["name"]: entry["by"] for entry in sidecar["attention"]} == {"attention": "plugin", "second": "plugin"}
    assert all(isinstance(entry["scratch_bytes"], int) for entry in sidecar["attention"])
    assert sidecar["scratch_bytes"] > 0


def test_the_table_and_inspect_name_both_profiles(built: Path, flash_trt: Command, capsys: Any) -> None:
    assert flash_trt("inspect", built) == EXIT_OK
    told = " ".join(capsys.readouterr().out.split())
    assert f"profile 0, shape query min 1x{HEADS}x128x{HEAD_DIM}" in told
    assert f"profile 1, shape query min 1x{HEADS}x1x{HEAD_DIM}" in told
    assert flash_trt("inspect", "--json", built) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["profiles"] == [_limits(PROMPT), _limits(DECODE)]


def test_nvidias_tools_are_given_both_profiles(built: Path) -> None:
    sidecar = json.loads(sidecar_path(built).read_text())
    words = shlex.split(sidecar["trtexec"])
    at = [words.index(word) for word in ("--profile=0", "--profile=1")]
    assert [word.partition("=")[0] for word in words[at[0] :]] == [
        *("--profile", "--minShapes", "--optShapes", "--maxShapes") * 2
    ]
    assert f"query:2x{HEADS}x4096x{HEAD_DIM}" in words[at[0] + 3]
    assert f"query:32x{HEADS}x3x{HEAD_DIM}" in words[at[1] + 3]
    words = shlex.split(sidecar["polygraphy"])
    words = words[5 : words.index("--compute-capabilities")]  # Polygraphy knows it with TensorRT for RTX alone
    arguments = convert.Convert().setup_parser().parse_args(words)
    assert [shapes[0] for shapes in arguments.trt_max_shapes] == [
        f"query:[2,{HEADS},4096,{HEAD_DIM}]",
        f"query:[32,{HEADS},3,{HEAD_DIM}]",
    ]


def test_polygraphys_line_builds_the_same_profiles(built: Path, tmp_path: Path) -> None:
    words = shlex.split(json.loads(sidecar_path(built).read_text())["polygraphy"])
    words[words.index("-o") + 1] = str(tmp_path / "p.engine")
    environment = os.environ | dict([words[0].split("=")])
    done = subprocess.run([sys.executable, *words[2:]], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    data = (tmp_path / "p.engine").read_bytes()
    assert b"second [profile 1]" in data
    assert len(plan.plugin_records(data)) == 4


def test_the_workspace_of_a_node_is_that_of_its_largest_profile(
    rtx: Backend, tmp_path: Path, flash_trt: Command
) -> None:
    model, long = fused(tmp_path / "m.onnx", dtype=HALF), _query((1, 1), (1, 1), (1, 4096))
    taken = []
    for given in ([PROMPT], [long], [PROMPT, long], [long, PROMPT]):
        shapes = [word for text in given for word in ("--shape", text)]
        assert flash_trt("build", model, "-o", tmp_path / "m.engine", "--target", "sm89", *shapes) == EXIT_OK
        (entry,) = json.loads(sidecar_path(tmp_path / "m.engine").read_text())["attention"]
        taken.append(entry["scratch_bytes"])
    assert 0 == taken[0] < taken[1], "only where few queries can come are the keys split among blocks"
    assert taken[2] == taken[3] == taken[1]


def test_an_attention_that_is_a_chain_in_one_profile_is_told_as_one(tmp_path: Path, flash_trt: Command) -> None:
    """TensorRT for RTX fuses ordinary attention at 7 queries, and not at 1."""
    model, told = unfused(tmp_path / "u.onnx", dtype=HALF), []
    one, seven = _query((1, 1), (1, 1), (1, 1)), _query((1, 7), (1, 7), (1, 7))
    for given in ([one], [seven], [one, seven], [seven, one]):
        shapes = [word for text in given for word in ("--shape", text)]
        assert flash_trt("build", model, "--allow-none", "-o", tmp_path / "e", "--target", "sm89", *shapes) == EXIT_OK
        (entry,) = json.loads(sidecar_path(tmp_path / "e").read_text())["attention"]
        told.append((entry["by"], entry["scratch_bytes"]))
    assert [by for by, _ in told[:2]] == ["unfused_chain", "tensorrt_fused"]
    assert told[2:] == [told[0]] * 2


# --- shapes choose the profile ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "length"), [(1, 128), (2, 4096), (1, 1), (32, 3)])
def test_shapes_that_a_profile_holds_are_taken(built: Path, batch: int, length: int) -> None:
    engine_file.require_shapes(engine_file.read(built), feeds(batch, length))


@pytest.mark.parametrize(("batch", "length"), [(3, 128), (1, 4), (1, 4097), (33, 1), (0, 1)])
def test_shapes_outside_every_profile_are_refused_with_each_ones_range(built: Path, batch: int, length: int) -> None:
    with pytest.raises(UsageError) as caught:
        engine_file.require_shapes(engine_file.read(built), feeds(batch, length))
    assert caught.value.got == f"query {batch}x{HEADS}x{length}x{HEAD_DIM}"
    prompt, decode = caught.value.need.split("; ")
    assert prompt == f"profile 0: query 1x{HEADS}x128x{HEAD_DIM} to 2x{HEADS}x4096x{HEAD_DIM}"
    assert decode == f"profile 1: query 1x{HEADS}x1x{HEAD_DIM} to 32x{HEADS}x3x{HEAD_DIM}"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(cuda, "runtime", lambda: fake)
    return fake


def _profiles(*texts: str) -> list[dict[str, tuple[tuple[int, ...], ...]]]:
    ranges = [parse(text) for text in texts]
    return [dict.fromkeys(("query", "key", "value"), (r.smallest, r.usual, r.largest)) for r in ranges]


@pytest.mark.parametrize("graph", [False, True], ids=["plain", "graph"])
def test_an_engine_runs_in_the_first_profile_that_holds_the_shapes(
    runtime: FakeRuntime, tmp_path: Path, graph: bool
) -> None:
    engine = attention_engine(runtime)
    engine.profiles = _profiles(_query((1, 5), (1, 7), (2, 40)), _query((1, 1), (4, 1), (8, 7)))
    session = EngineSession(loaded(engine, tmp_path / "m.engine"), cuda_graph=graph)
    for (batch, length), number in {(1, 40): 0, (8, 1): 1, (2, 6): 0, (3, 6): 1, (8, 7): 1, (1, 5): 0}.items():
        given = feeds(batch, length, seed=number)
        np.testing.assert_array_equal(session.run(given)["output"], compute(given)["output"].astype(np.float32))
        assert session._context.profile == number
    with pytest.raises(UsageError, match="fails on these inputs"):
        session.run(feeds(8, 8))
    session.close()
    assert not runtime.memory


def test_a_comparison_runs_each_set_of_inputs_in_its_profile() -> None:
    engine = attention_engine(FakeRuntime())
    engine.profiles = _profiles(_query((1, 5), (1, 7), (2, 40)), _query((1, 1), (4, 1), (8, 7)))
    did: list[object] = []
    inner = SimpleNamespace(
        engine=engine, set_profile=did.append, infer=lambda given: did.append(given["query"].shape[:3:2])
    )
    runner = runners.ProfiledRunner(inner)
    for batch, length in ((2, 40), (8, 1), (4, 7), (1, 5)):
        runner.infer(feeds(batch, length))
    assert did == [(2, 40), 1, (8, 1), (4, 7), 0, (1, 5)]


# --- what else reads profiles -----------------------------------------------------------------------------------------


def _settings(tmp_path: Path, built: Path, *given: str) -> set[tuple[int, int]]:
    options = InputOptions(shapes=given, repeats=1)
    planned = plan_runs(options, read(unfused(tmp_path / "u.onnx")), engine_file.read(built))
    return {trial.feeds["query"].shape[:3:2] for choices in planned for trial in choices}


def test_a_comparison_draws_inputs_for_every_profile(built: Path, tmp_path: Path) -> None:
    sizes = _settings(tmp_path, built)
    prompts = {(batch, length) for batch, length in sizes if 1 <= batch <= 2 and 128 <= length <= 4096}
    decodes = {(batch, length) for batch, length in sizes if 1 <= batch <= 32 and 1 <= length <= 3}
    assert prompts
    assert decodes
    assert prompts | decodes == sizes


def test_shapes_given_to_a_comparison_choose_among_the_profiles(built: Path, tmp_path: Path) -> None:
    assert {length for _, length in _settings(tmp_path, built, _query((1, 1), (1, 2), (9, 2)))} <= {1, 2}
    with pytest.raises(UsageError) as caught:
        _settings(tmp_path, built, _query((1, 1), (1, 1), (1, 128)))
    assert PROMPT in caught.value.need
    assert DECODE in caught.value.need


def test_several_shapes_of_one_input_are_for_build_alone(built: Path, tmp_path: Path, flash_trt: Command) -> None:
    model, twice = fused(tmp_path / "m.onnx"), ("--shape", PROMPT, "--shape", DECODE)
    assert flash_trt("run", model, *twice) == EXIT_USAGE
    assert flash_trt("compare", model, unfused(tmp_path / "u.onnx"), *twice) == EXIT_USAGE
    assert flash_trt("triton", tmp_path / "r", model, *twice) == EXIT_USAGE

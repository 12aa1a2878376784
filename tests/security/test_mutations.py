# SPDX-License-Identifier: Apache-2.0
"""Thousands of broken ONNX files end in an error of ours or in a fused model, in a minute and little memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import onnx.helper
import pytest
from exporter import graphs, small_models
from security.mutations import mutated

from flash_export import pipeline
from flash_export.blame import blame
from flash_export.errors import UsageError
from flash_export.options import Options

COUNT, SEED = 2000, 1
MOST_BYTES = 2 * 2**30
MOST_SECONDS = 60


def honest_models() -> dict[str, onnx.ModelProto]:
    """What is mutated: a plain attention, one that is refused, a mask that is proven, a fused file, an operator."""
    causal = graphs.attention("keep = LessOrEqual (j, i)\n masked = Where (keep, scaled, hidden)")
    return {
        "plain": onnx.parser.parse_model(small_models.ATTENTION),
        "refused": onnx.parser.parse_model(small_models.TWO_ATTENTIONS_ONE_REFUSED),
        "causal": causal,
        "fused": graphs.fuse(causal)[0],
        "operator": graphs.model("out = Attention <is_causal = 1, scale = 0.5> (q, k, v)\n", opset=23),
    }


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``open_mutated.py`` says of ``COUNT`` mutations, made in a process of its own."""
    folder = tmp_path_factory.mktemp("honest")
    sources = []
    for name, model in honest_models().items():
        onnx.save(model, folder / f"{name}.onnx")
        sources.append(str(folder / f"{name}.onnx"))
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("open_mutated.py")), str(COUNT), str(SEED), *sources],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


def test_every_mutation_ends_in_an_error_of_ours_or_in_a_model(outcome: dict[str, Any]) -> None:
    assert not outcome["bugs"], "\n".join(outcome["bugs"][:3])
    assert sum(outcome["endings"].values()) == COUNT


def test_mutations_reach_every_step_and_not_the_parser_alone(outcome: dict[str, Any]) -> None:
    assert outcome["endings"]["done"] > COUNT / 10
    assert outcome["endings"]["UsageError"] > COUNT / 10


def test_mutations_take_little_memory_and_time(outcome: dict[str, Any]) -> None:
    assert outcome["peak"] < MOST_BYTES
    assert outcome["seconds"] < MOST_SECONDS  # of the processor; the clock counts other tests as well


def test_a_mutation_is_the_same_again_from_its_seed() -> None:
    model = honest_models()["causal"]
    first, second, other = (mutated(model, random.Random(seed)) for seed in ("1/7", "1/7", "1/8"))
    assert first == second != other


def test_an_exception_is_ours_unless_onnx_finds_the_file_at_fault(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(small_models.ATTENTION)
    onnx.save(model, tmp_path / "right.onnx")
    model.graph.node[0].attribute[0].ints[:] = [0, 1, 2, 4]
    onnx.save(model, tmp_path / "wrong.onnx")
    with pytest.raises(IndexError), blame(tmp_path / "right.onnx"):
        raise IndexError
    with pytest.raises(IndexError), blame(None):  # an export of ours
        raise IndexError
    with pytest.raises(UsageError, match="contradicts itself") as error, blame(tmp_path / "wrong.onnx"):
        raise IndexError
    assert "perm" in error.value.got


@pytest.mark.parametrize("check", [True, False])
def test_a_file_of_the_users_own_that_contradicts_itself_is_blamed_with_and_without_a_check(
    tmp_path: Path, check: bool
) -> None:
    model = onnx.parser.parse_model(small_models.ATTENTION)
    model.graph.output[0].type.Clear()
    model.graph.output[0].type.opaque_type.name = "b"
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="contradicts itself"):
        pipeline.run(Options(source=tmp_path / "m.onnx", check=check, quiet=True))
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]

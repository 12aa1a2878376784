# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` at any moment of a save leaves the old or the new export, whole, once any command has looked at it.

Until then each file is whole, and the old or the new one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exporter.test_save import write_unfused

KILLS, SEED = 100, 20261129
# unfused model, page, numbers, fused model: 0 is old, 1 is new. They are moved in this order.
OLD, NEW = [0, 0, 0, 0], [1, 1, 1, 1]
BETWEEN = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``save_and_die.py`` found after each kill."""
    folder = tmp_path_factory.mktemp("killed")
    sources = [write_unfused(folder / f"{seed}.onnx", seed=seed, elements=300_000) for seed in (0, 1)]
    (folder / "out").mkdir()
    program = Path(__file__).with_name("save_and_die.py")
    child = subprocess.run(
        [sys.executable, str(program), str(folder / "out"), *map(str, sources), str(KILLS), str(SEED)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path))), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    found: dict[str, Any] = json.loads(child.stdout)
    return found


def test_a_kill_at_each_change_of_the_disk_leaves_whole_files(left: dict[str, Any]) -> None:
    killed = [states["killed"] for states in left["every"]]
    assert killed == sorted(killed)
    assert all(state in [OLD, *BETWEEN, NEW] for state in killed)
    assert all(state in killed for state in [OLD, *BETWEEN, NEW])


def test_what_was_killed_is_finished_as_the_old_or_the_new_export(left: dict[str, Any]) -> None:
    finished = [states["finished"] for states in left["every"]]
    assert finished == sorted(finished)
    assert OLD in finished
    assert all(state in (OLD, NEW) for state in finished)
    assert all(states["finished"] == NEW for states in left["every"] if states["killed"] != OLD)


def test_the_finishing_can_be_killed_too(left: dict[str, Any]) -> None:
    assert any(s["killed"] != s["killed_again"] != s["finished"] for s in left["every"])


def test_a_kill_at_a_random_moment_leaves_the_old_or_the_new_export(left: dict[str, Any]) -> None:
    states = [(state, count) for *state, count in left["moments"]]
    assert all(state in (OLD, NEW) for state, _ in states)
    assert sum(count for _, count in states) == KILLS


def test_random_kills_are_spread_over_the_whole_save(left: dict[str, Any]) -> None:
    states = [state for *state, _ in left["moments"]]
    assert OLD in states
    assert NEW in states


def test_the_next_save_removes_what_killed_ones_left(left: dict[str, Any]) -> None:
    assert left["hidden"] == []
    assert left["last"] == NEW

# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` at any moment of a save leaves the old or the new files, each whole, and a fused model that loads."""

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
# unfused model, page, numbers, fused model: 0 is old, 1 is new. They are renamed in this order.
OLD, NEW = [0, 0, 0, 0], [1, 1, 1, 1]
ALLOWED = [OLD, [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], NEW]


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


def test_a_kill_at_each_change_of_the_disk_leaves_whole_files_in_the_order_of_their_renames(
    left: dict[str, Any],
) -> None:
    assert all(state in ALLOWED for state in left["every"])
    assert left["every"] == sorted(left["every"])
    assert left["every"][0] == OLD
    assert left["every"][-1] == NEW
    assert all(state in left["every"] for state in ALLOWED)


def test_a_kill_at_a_random_moment_leaves_whole_files(left: dict[str, Any]) -> None:
    states = [(state, count) for *state, count in left["moments"]]
    assert all(state in ALLOWED for state, _ in states)
    assert sum(count for _, count in states) == KILLS


def test_random_kills_are_spread_over_the_whole_save(left: dict[str, Any]) -> None:
    states = [state for *state, _ in left["moments"]]
    assert OLD in states
    assert NEW in states


def test_the_next_save_removes_what_killed_ones_left(left: dict[str, Any]) -> None:
    assert left["hidden"] == []
    assert left["last"] == NEW

# SPDX-License-Identifier: Apache-2.0
"""Every hostile file is refused as unsafe by the real loader in a process of its own, and nothing of it runs."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from security.attacks import beyond, graphs, pickles, programs, renamed
from security.attacks.marker import Payload

Attack = Callable[[Path, Path], None]
OPEN_HOSTILE = Path(__file__).with_name("open_hostile.py")


def attacks_in(module: ModuleType) -> list[Attack]:
    """The functions of ``module`` that take (path, marker)."""
    functions = inspect.getmembers(module, lambda f: inspect.isfunction(f) and f.__module__ == module.__name__)
    return [f for _, f in functions if list(inspect.signature(f).parameters) == ["path", "marker"]]


MODULES = {pickles: "pt", programs: "pt2", graphs: "onnx", renamed: "safetensors", beyond: "onnx"}
"""Where attacks are, and the suffix that their files get."""
ATTACKS = [attack for module in MODULES for attack in attacks_in(module)]


def identify(attack: Attack) -> str:
    return f"{attack.__module__.rpartition('.')[2]}-{attack.__name__}"


def open_in_a_child(sources: list[Path], folder: Path) -> list[str]:
    """The verdict on each of ``sources``, opened one after the other by one child with working folder ``folder``."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path))), "PYTHONSAFEPATH": "1"}
    child = subprocess.run(
        [sys.executable, str(OPEN_HOSTILE), *map(str, sources)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    verdicts = child.stdout.splitlines()
    assert len(verdicts) == len(sources), child.stdout + child.stderr
    return verdicts


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, bool]]:
    """Attack -> (the child's verdict, whether its marker appeared). One child opens all: PyTorch's import is slow."""
    sources: dict[str, tuple[Path, Path]] = {}
    for attack in ATTACKS:
        folder = tmp_path_factory.mktemp("attack")
        source = folder / f"model.{MODULES[sys.modules[attack.__module__]]}"
        attack(source, folder / "marker")
        assert not (folder / "marker").exists(), f"{identify(attack)} ran while it was made"
        sources[identify(attack)] = source, folder / "marker"
    found = open_in_a_child([source for source, _ in sources.values()], tmp_path_factory.mktemp("cwd"))
    return {
        name: (verdict, marker.exists()) for (name, (_, marker)), verdict in zip(sources.items(), found, strict=True)
    }


@pytest.mark.parametrize("attack", ATTACKS, ids=identify)
def test_a_hostile_file_is_refused_and_nothing_of_it_runs(
    attack: Attack, verdicts: dict[str, tuple[str, bool]]
) -> None:
    verdict, marker_exists = verdicts[identify(attack)]
    assert not marker_exists
    assert verdict == ("UsageError 2" if attack in attacks_in(beyond) else "UnsafeInput 3")


def test_there_are_at_least_ten_attacks_of_each_kind() -> None:
    assert min(len(attacks_in(module)) for module in (pickles, programs, graphs)) >= 10


def test_the_payload_works_where_pickle_is_trusted(tmp_path: Path) -> None:
    """Else the tests above could not fail."""
    torch.save({"weight": Payload(tmp_path / "marker")}, tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "marker").exists()

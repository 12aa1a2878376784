# SPDX-License-Identifier: Apache-2.0
"""Advice to install something names what pip can find, with the ranges of pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from flash_export.requirements import pip_install


@pytest.mark.parametrize("extra", ["torch", "rtx", "trt", "gpu"])
def test_an_extra_is_spelled_out_as_the_project_declares_it(extra: str, repo_root: Path) -> None:
    declared = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    assert pip_install(extra) == "pip install " + " ".join(f'"{requirement}"' for requirement in declared)


def test_one_package_of_an_extra_can_be_named() -> None:
    assert re.fullmatch(r'pip install "polygraphy>=[\d.]+,<[\d.]+"', pip_install("rtx", "polygraphy"))


def test_without_metadata_the_package_is_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert pip_install("torch", "torch") == 'pip install "torch"'


def test_no_message_and_no_page_names_an_extra_of_a_package_that_no_index_has(repo_root: Path) -> None:
    folders = ("exporter", "python", "samples", "docs", "tests")
    files = [path for folder in folders for path in (repo_root / folder).rglob("*") if path.suffix in (".py", ".md")]
    spelled = re.compile(r"flash-export\[\w+\]")
    assert [str(path) for path in [*files, repo_root / "README.md"] if spelled.search(path.read_text())] == []

# SPDX-License-Identifier: Apache-2.0
"""scripts/fetch_wheels.py: what a build takes from PyPI is what its hashes say, complete or not there."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

HEADER = "kept/include/answer.h"


def make_wheel(folder: Path, members: dict[str, str]) -> tuple[Path, str]:
    """A wheel with these members, and its hash."""
    folder.mkdir()
    wheel = folder / "odd_part-1.0-py3-none-any.whl"
    info = "odd_part-1.0.dist-info"
    metadata = {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: odd-part\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (members | metadata).items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o755 if name.endswith("tool") else 0o644) << 16
            archive.writestr(entry, text)
    return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()


def fetch(repo_root: Path, tmp_path: Path, digest: str, below: str = "kept") -> subprocess.CompletedProcess[str]:
    requirements = tmp_path / "parts.txt"
    requirements.write_text(f"odd-part==1.0 --hash=sha256:{digest}\n")
    command = [sys.executable, repo_root / "scripts" / "fetch_wheels.py", requirements, "--below", below]
    return subprocess.run(
        [*command, "--into", tmp_path / "out" / "parts"],
        env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_folder_is_unpacked_with_its_executable_bits(repo_root: Path, tmp_path: Path) -> None:
    _, digest = make_wheel(tmp_path / "index", {HEADER: "42\n", "kept/bin/tool": "#!/bin/sh\n", "other/x": "no"})
    done = fetch(repo_root, tmp_path, digest)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out" / "parts"
    assert (out / "include" / "answer.h").read_text() == "42\n"
    assert (out / "bin" / "tool").stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in out.iterdir()) == ["bin", "include"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["parts"]


def test_another_hash_is_refused_and_nothing_appears(repo_root: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", {HEADER: "42\n"})
    done = fetch(repo_root, tmp_path, "0" * 64)
    assert done.returncode != 0
    assert "hash" in done.stderr.lower()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_wheel_without_the_folder_is_refused(repo_root: Path, tmp_path: Path) -> None:
    _, digest = make_wheel(tmp_path / "index", {"other/x": "no"})
    done = fetch(repo_root, tmp_path, digest)
    assert done.returncode != 0
    assert "holds nothing below kept" in done.stderr


def test_a_path_that_leaves_its_folder_is_refused(repo_root: Path, tmp_path: Path) -> None:
    _, digest = make_wheel(tmp_path / "index", {"kept/../../stolen": "no"})
    done = fetch(repo_root, tmp_path, digest)
    assert done.returncode != 0
    assert "leaves its folder" in done.stderr
    assert not (tmp_path / "stolen").exists()

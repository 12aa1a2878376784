# SPDX-License-Identifier: Apache-2.0
"""The sample does what its README says, and leaves no process and no file behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent / "ray_serve.py"
MARK = "FLASH_EXPORT_SAMPLE_RUN"


def processes_of(run: str) -> list[int]:
    """Every process that was started, however indirectly, with MARK=``run`` in its environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if f"{MARK}={run}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@pytest.fixture
def marked() -> Iterator[str]:
    """A mark for the environment of one run. What still bears it after the test is ended."""
    run = uuid.uuid4().hex
    yield run
    for process in processes_of(run):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for the sockets in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.xdist_group("ray_serve")
def test_no_request_is_lost_when_a_replica_dies_and_nothing_is_left(tmp_path: Path, short: Path, marked: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, MARK: marked, "HOME": str(home), "TMPDIR": str(short)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    requests, answers, again = (
        int(re.search(pattern, said)[1])
        for pattern in (
            r"(\d+) requests by 8 clients, 0 lost",
            r"(\d+) answers equal .*, 0 not",
            r"(\d+) requests were",
        )
    )
    assert requests == answers >= 120
    assert 1 <= again <= 8
    assert said.count(" answers\n") == 2, "the other replica and the successor"
    assert said.count("answers before it was killed") == 1
    assert not processes_of(marked)
    assert not list(short.glob("ray*"))
    assert not (home / ".ray").exists()


@pytest.mark.xdist_group("ray_serve")
def test_the_processes_of_a_run_are_found(marked: str) -> None:
    """Or else the test above could not see one that is left."""
    sleeper = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: marked}, start_new_session=True)
    try:
        end = time.monotonic() + 10
        while processes_of(marked) != [sleeper.pid] and time.monotonic() < end:
            time.sleep(0.01)  # until it is no longer this process's copy
        assert processes_of(marked) == [sleeper.pid]
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not processes_of(marked)


@pytest.fixture(scope="module")
def sample() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("ray_serve_sample", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with warnings.catch_warnings(action="ignore"):  # Ray's own
        spec.loader.exec_module(module)
    return module


BAD = {
    "empty": b"",
    "no object": b"[1]",
    "no texts": b"{}",
    "one text that is no list": b'{"texts": "a"}',
    "a number": b'{"texts": [1]}',
    "no text": b'{"texts": []}',
    "too many": json.dumps({"texts": ["a"] * 33}).encode(),
    "too long": json.dumps({"texts": ["a" * 2**18]}).encode(),
    "nested": b"[" * 100_000,
    "no utf-8": b'{"texts": ["\xff"]}',
    "half a pair": rb'{"texts": ["\ud800"]}',
}


@pytest.mark.xdist_group("ray_serve")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_before_it_reaches_a_replica(sample: ModuleType, name: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        sample.texts_of(BAD[name])


@pytest.mark.xdist_group("ray_serve")
def test_the_texts_of_a_request_are_read(sample: ModuleType) -> None:
    assert sample.texts_of('{"texts": ["ä", ""]}'.encode()) == ["ä", ""]

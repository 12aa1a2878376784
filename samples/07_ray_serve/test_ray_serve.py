# SPDX-License-Identifier: Apache-2.0
"""The sample does what its README says, and leaves no process and no file behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import engine_stand_in
import numpy as np
import pytest

from flash_export.errors import EXIT_MISSING
from flash_trt import gpu

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


def run_sample(tmp_path: Path, short: Path, marked: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """The sample with a home of its own, into ``out``."""
    home = tmp_path / "home"
    home.mkdir()
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out"), *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env={**os.environ, MARK: marked, "HOME": str(home), "TMPDIR": str(short)},
    )


@pytest.mark.xdist_group("ray_serve")
def test_no_request_is_lost_when_a_replica_dies_and_nothing_is_left(tmp_path: Path, short: Path, marked: str) -> None:
    done = run_sample(tmp_path, short, marked)
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
    assert not (tmp_path / "home" / ".ray").exists()


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
    return engine_stand_in.as_module(SCRIPT)


@pytest.mark.gpu
@pytest.mark.xdist_group("ray_serve")
def test_on_a_gpu_replicas_with_an_engine_lose_no_request(tmp_path: Path, short: Path, marked: str) -> None:
    done = run_sample(tmp_path, short, marked, "--engine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ requests by 8 clients, 0 lost", done.stdout)


@pytest.mark.xdist_group("ray_serve")
def test_without_a_gpu_an_engine_cannot_be_served_and_that_ends_with_5(
    tmp_path: Path, short: Path, marked: str
) -> None:
    if gpu.devices():
        pytest.skip("a GPU is here: the engine is served")
    done = run_sample(tmp_path, short, marked, "--engine")
    assert done.returncode == EXIT_MISSING, done.stdout + done.stderr
    assert "the engine cannot be served here: no NVIDIA GPU" in done.stderr
    sidecar = json.loads((tmp_path / "out" / "model.engine.json").read_text())
    assert len(sidecar["plugin_layers"]) == 6
    assert sidecar["profile"]["input_ids"]["max"] == [32, 256]
    assert not processes_of(marked)


@pytest.mark.xdist_group("ray_serve")
def test_an_encoder_with_an_engine_gives_what_the_session_gives(
    sample: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's way through a replica, with a stand-in for the engine."""
    folder, fused = sample.minilm_folder(), tmp_path / "model.onnx"
    sample.run("flash_export", folder, "-o", fused, "--no-check", "--quiet")
    engine_stand_in.put_in(monkeypatch, {"m.engine": fused})
    plain = sample.Encoder(str(fused), str(folder))
    with_engine = sample.Encoder(str(fused), str(folder), "m.engine")
    for texts in sample.TEXTS:
        ours, expected = with_engine.encode(texts), plain.encode(texts)
        assert sample.is_as_expected(ours, expected, sample.ENGINE_TOLERANCE)
        assert not sample.is_as_expected(ours + 0.1, expected, sample.ENGINE_TOLERANCE)
    assert engine_stand_in.EngineStandIn.open == 1


@pytest.mark.parametrize(("tolerance", "off", "passes"), [(0.0, 0.0, True), (0.0, 1e-7, False), (1e-2, np.nan, False)])
@pytest.mark.xdist_group("ray_serve")
def test_an_answer_is_right_or_not(sample: ModuleType, tolerance: float, off: float, passes: bool) -> None:
    expected = np.full((2, 3), 0.25, np.float32)
    assert sample.is_as_expected(expected + np.float32(off), expected, tolerance) is passes
    assert not sample.is_as_expected(expected[:1], expected, tolerance)


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

# SPDX-License-Identifier: Apache-2.0
"""Both commands as processes: a signal ends them at once and leaves nothing, a reader that left changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from python.attention_models import fused, unfused
from python.fresh_process import run_python

pytestmark = pytest.mark.timeout(120)

COMMANDS = ["flash_trt", "flash_export"]
STOP = "import time; open('tmp/ready', 'x').close(); time.sleep(60)"
"""What a command does at the moment that is tried; it runs in a folder with a folder ``tmp``."""
HEAVY = {"numpy", "onnx", "onnx_ir", "onnxruntime", "rich", "torch", "typer"}


def start(module: str, *arguments: object, before: str = "", folder: Path) -> subprocess.Popen[bytes]:
    """``python -m module`` after ``before``, with temporary files in ``folder``/tmp."""
    (folder / "tmp").mkdir()
    code = f"{before}\nimport sys\nsys.argv = {[module, *map(str, arguments)]}\n"
    code += f"from {module}.__main__ import main\nmain()\n"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(folder / "tmp")}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables,
        cwd=folder,
        preexec_fn=_take_signals,
    )


def _take_signals() -> None:
    """Tests that run in the background, or under nohup, are started with signals ignored, and so is what they start."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def end(process: subprocess.Popen[bytes], number: int, folder: Path) -> tuple[int, str]:
    """Sends the signal once the process is ready; its exit code and what it said."""
    while not (folder / "tmp" / "ready").exists():
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.02)
    process.send_signal(number)
    _, said = process.communicate(timeout=50)
    (folder / "tmp" / "ready").unlink()
    return process.returncode, said.decode()


def swallowed(code: str, indent: str) -> str:
    """``code`` as a block at ``indent`` after its first line, in which whatever is raised is lost."""
    return f"try:\n{indent}    {code}\n{indent}except BaseException:\n{indent}    pass"


def stops_in(name: str, *, swallowing: bool = False) -> str:
    """Code after which the import of ``name`` waits; ``swallowing``: and ends whatever is raised in it."""
    wait = swallowed(STOP, "        ") if swallowing else STOP
    return f"""
import sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name != {name!r}:
            return None
        sys.meta_path.remove(self)
        {wait}
        return None
sys.meta_path.insert(0, Stop())
"""


@pytest.mark.parametrize("module", [*(f"{name}.__main__" for name in COMMANDS), "flash_trt.polygraphy"])
def test_nothing_heavy_is_imported_before_signals_are_caught(module: str) -> None:
    loaded = run_python(f"import sys, {module}; print(*{{n.partition('.')[0] for n in sys.modules}})")
    assert loaded.returncode == 0, loaded.stderr
    assert not HEAVY & set(loaded.stdout.split())


@pytest.mark.parametrize("swallowing", [False, True])
@pytest.mark.parametrize("module", COMMANDS)
def test_an_interrupt_during_the_imports_is_one_line_and_130(module: str, swallowing: bool, tmp_path: Path) -> None:
    process = start(module, "--help", before=stops_in("numpy", swallowing=swallowing), folder=tmp_path)
    assert end(process, signal.SIGINT, tmp_path) == (130, "interrupted\n")


@pytest.mark.parametrize("module", COMMANDS)
def test_an_interrupt_before_signals_are_handled_is_no_traceback_either(module: str, tmp_path: Path) -> None:
    process = start(module, "--help", before=stops_in("tempfile"), folder=tmp_path)  # what handles them imports it
    assert end(process, signal.SIGINT, tmp_path) == (-signal.SIGINT, "")


@pytest.mark.parametrize("module", COMMANDS)
def test_little_is_imported_before_that(module: str) -> None:
    loaded = run_python(f"import sys; sys.modules['typing'] = None; import {module}.__main__")
    assert loaded.returncode == 0, loaded.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_comparison_leaves_no_temporary_folder(number: signal.Signals, tmp_path: Path) -> None:
    models = fused(tmp_path / "m.onnx"), unfused(tmp_path / "u.onnx")
    stop = f"""
from flash_trt import runners
real = runners.input_dtypes
def stopped(side):
    {swallowed(STOP, "    ")}
    return real(side)
runners.input_dtypes = stopped
"""
    process = start("flash_trt", "compare", *models, before=stop, folder=tmp_path)
    code, said = end(process, number, tmp_path)
    assert code == 128 + number
    assert said.endswith("interrupted\n")
    assert not list((tmp_path / "tmp").glob("flash-*"))


def test_an_export_leaves_nothing_where_it_was_going_to_write(tmp_path: Path) -> None:
    source = unfused(tmp_path / "in.onnx")
    stop = f"""
from flash_export import save
def stopped(*_):
    {STOP}
save.write_model = stopped
"""
    process = start("flash_export", source, "-o", tmp_path / "out.onnx", before=stop, folder=tmp_path)
    code, said = end(process, signal.SIGINT, tmp_path)
    assert (code, said.splitlines()[-1]) == (130, "interrupted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.onnx", "tmp"]
    assert not list((tmp_path / "tmp").glob("flash-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_build_that_is_ended_in_the_middle_leaves_the_engine_that_was_there(
    number: signal.Signals, tmp_path: Path
) -> None:
    """The signal comes while TensorRT for RTX builds: inside the call that its builder makes of a progress monitor."""
    model, engine = fused(tmp_path / "m.onnx"), tmp_path / "m.engine"
    engine.write_bytes(b"ftrt old")
    stop = f"""
from flash_export.talk import Talk
import traceback
def stopped(self, phase, done, total):
    if "build_serialized_network" in "".join(traceback.format_stack()):
        {STOP}
Talk.progress = stopped
"""
    process = start("flash_trt", "build", model, "-o", engine, "--target", "sm80", before=stop, folder=tmp_path)
    code, said = end(process, number, tmp_path)
    assert (code, said.splitlines()[-1]) == (128 + number, "interrupted")
    assert engine.read_bytes() == b"ftrt old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.engine", "m.onnx", "tmp"]
    assert not list((tmp_path / "tmp").glob("flash-*"))


def test_an_interrupt_while_files_are_renamed_waits_until_all_are(tmp_path: Path) -> None:
    source = unfused(tmp_path / "in.onnx")
    stop = f"""
from flash_export import save_commit
real = save_commit._move_all
def stopped(folder):
    {STOP.replace("60", "1")}
    real(folder)
save_commit._move_all = stopped
"""
    process = start("flash_export", source, "-o", tmp_path / "out.onnx", before=stop, folder=tmp_path)
    code, said = end(process, signal.SIGINT, tmp_path)
    assert (code, said.splitlines()[-1]) == (130, "interrupted")
    written = {path.name for path in tmp_path.iterdir()} - {"in.onnx", "tmp"}
    assert written == {"out.onnx", "report.json", "report.html"}


def test_an_interrupt_after_the_work_changes_nothing(tmp_path: Path) -> None:
    late = f"""
import atexit
atexit.register(lambda: exec({STOP.replace("60", "1")!r}))
"""
    assert end(start("flash_trt", "--version", before=late, folder=tmp_path), signal.SIGINT, tmp_path)[0] == 0


def test_a_signal_that_was_ignored_before_stays_ignored(tmp_path: Path) -> None:
    before = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + stops_in("numpy").replace("60", "1")
    assert end(start("flash_trt", "--version", before=before, folder=tmp_path), signal.SIGHUP, tmp_path)[0] == 0


# --- readers that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", ["stdout", "stderr", "both"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [("env", 0), ("--help", 0), ("compare m.onnx u.onnx", 0), ("compare m.onnx other.onnx", 1), ("--no-such-flag", 2)],
)
def test_a_reader_that_left_changes_no_exit_code(tmp_path: Path, gone: str, arguments: str, code: int) -> None:
    fused(tmp_path / "m.onnx")
    unfused(tmp_path / "u.onnx")
    unfused(tmp_path / "other.onnx", scale=0.9)
    reading, writing = os.pipe()
    os.close(reading)
    streams = {name: writing for name in ("stdout", "stderr") if gone in (name, "both")}
    line = [sys.executable, "-m", "flash_trt", *arguments.split()]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    whole = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    done = subprocess.run(line, **whole, env=variables, cwd=tmp_path, timeout=100, check=False)
    os.close(writing)
    assert done.returncode == code
    assert b"Traceback" not in (done.stderr or b"")
    assert b"Exception ignored" not in (done.stderr or b"")


@pytest.mark.parametrize("stream", [1, 2])
def test_a_full_disk_under_the_output_is_told_of(stream: int) -> None:
    line = f"exec {sys.executable} -m flash_trt env {'--nope' if stream == 2 else ''} {stream}>/dev/full"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(line, shell=True, capture_output=True, env=variables, timeout=100, check=False)
    assert done.returncode == (5 if stream == 1 else 2)
    assert stream == 2 or b"no space left" in done.stderr

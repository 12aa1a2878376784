# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_check.sh, as far as it goes without a GPU, and that it notices wrong numbers."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


def run(repo_root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # cmake and ninja of this environment
    return subprocess.run(
        [repo_root / "scripts" / "gpu_check.sh", *arguments],
        env=os.environ | {"PATH": path, "PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_it_runs_without_a_gpu(repo_root: Path, native_build: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    fixture = tmp_path / "fixture.npz"
    files = ["--json", str(report), "--fixture", str(fixture)]
    done = run(repo_root, "--without-gpu", "--build", str(native_build), *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All right" in done.stdout
    found = json.loads(report.read_text())
    assert found["cases"] >= 10
    assert "3 cases of packed sequences and paged caches right, 0 wrong" in done.stdout
    assert found["wrong"] == {}
    assert "27 outputs of primitives, 0 wrong" in done.stdout
    assert [set(row["ms"]) for row in found["times"]] == [{"plugin", "PyTorch"}] * 2 + [{"paged", "contiguous"}]
    assert "TFLOP/s" in found["times"][0]["rates"]["plugin"]
    assert "GB/s" in found["times"][1]["rates"]["plugin"]
    assert "GB/s" in found["times"][2]["rates"]["paged"]
    assert fixture.is_file()
    assert done.stdout.rstrip().splitlines()[-1].startswith("All right")  # the table is last


def test_it_ends_with_5_where_it_needs_a_gpu_and_finds_none(repo_root: Path, tmp_path: Path) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nexit 9\n")
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [repo_root / "scripts" / "gpu_check.sh"],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 5, done.stdout + done.stderr
    assert "no NVIDIA GPU here" in done.stderr


def test_an_unknown_argument_is_a_usage_error(repo_root: Path) -> None:
    assert run(repo_root, "--fast").returncode == 2


def test_wrong_numbers_are_noticed(
    repo_root: Path, native_build: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(repo_root / "scripts"))
    import gpu_check

    class Faulty(gpu_check.Device):
        def call(self, case, inputs, outputs):  # type: ignore[no-untyped-def]
            return super().call(dataclasses.replace(case, scale=case.softmax_scale * 1.05), inputs, outputs)

    device = Faulty(native_build, gpu=False)
    case = next(case for case in gpu_check.CASES if case.name == "fp16_top_left")
    assert "plainly: max error" in gpu_check.check_all(device, [case])["fp16_top_left"][0]
    row = gpu_check.time_shape(device, gpu_check.TIMED_ON_HOST[0], 1)
    assert row["wrong"] != []
    gpu_check.print_times([row], device)
    assert "WRONG: max error" in capsys.readouterr().out


def test_wrong_numbers_of_packed_sequences_and_caches_are_noticed(
    repo_root: Path, native_build: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(repo_root / "scripts"))
    import gpu_check_caches as caches

    class Faulty(caches.Door):
        def attend(self, arguments):  # type: ignore[no-untyped-def]
            if arguments.page_table:
                arguments.page_table += 4  # every page one too far
            else:
                arguments.scale *= 1.05
            super().attend(arguments)

    packed, paged, _ = caches.CASES_ON_HOST
    wrong = caches.check_all(Faulty(native_build, gpu=False), [packed, paged])
    assert "sequence 0: max error" in wrong["packed_fp16"][0]
    assert wrong["paged_decode_bf16"][-1] == "the paged cache gives other bits than packed keys"
    assert "WRONG packed_fp16" in capsys.readouterr().out


@pytest.mark.parametrize(("finds", "returncode"), [(0, 0), (9, 1)])
def test_what_a_sanitizer_finds_in_an_example_is_the_exit_code(
    repo_root: Path, tmp_path: Path, finds: int, returncode: int
) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(f'#!/bin/sh\necho "$@"\n[ "$2" = memcheck ] || exit {finds}\n')
    fake.chmod(0o755)
    done = subprocess.run(
        [repo_root / "scripts" / "sanitize_examples.sh", tmp_path],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == returncode, done.stdout + done.stderr
    assert "memcheck finds nothing in flash_attention_paged" in done.stdout
    assert ("WRONG: racecheck on flash_attention_decode" in done.stdout) == bool(finds)


def test_a_batch_that_differs_from_itself_alone_is_noticed(
    repo_root: Path, native_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repo_root / "scripts"))
    import gpu_check

    class Faulty(gpu_check.Device):
        def call(self, case, inputs, outputs):  # type: ignore[no-untyped-def]
            return super().call(dataclasses.replace(case, scale=0.1 if case.batch == 1 else 0.2), inputs, outputs)

    assert gpu_check.why_far_wrong(gpu_check.Device(native_build, gpu=False), 3) == []
    assert "batch 2 of 3 differs" in gpu_check.why_far_wrong(Faulty(native_build, gpu=False), 3)[0]


def test_a_paged_step_that_differs_from_a_contiguous_one_is_noticed(
    repo_root: Path, native_build: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(repo_root / "scripts"))
    import gpu_check

    class Faulty(gpu_check.caches.Door):
        def enqueue(self, arguments, workspace):  # type: ignore[no-untyped-def]
            if arguments.page_table:
                arguments.page_size *= 2
            super().enqueue(arguments, workspace)

    device = gpu_check.Device(native_build, gpu=False)
    (case,) = gpu_check.paged.TIMED_ON_HOST
    door = gpu_check.caches.Door(native_build, gpu=False)
    assert gpu_check.time_paged(device, door, case, 1)["wrong"] == []
    row = gpu_check.time_paged(device, Faulty(native_build, gpu=False), case, 1)
    assert row["wrong"] != []
    gpu_check.print_times([row], device)
    assert "WRONG: the paged cache gives other bits" in capsys.readouterr().out

# SPDX-License-Identifier: Apache-2.0
"""The sample does what its README says, and its figures show what it claims."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "long_context.py"


@pytest.mark.xdist_group("long_context")
def test_memory_grows_with_the_square_of_the_length_unfused_and_with_the_length_fused(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    for name in ("causal fp32", "causal softcap fp16"):
        (row,) = (line for line in done.stdout.splitlines() if name in line)
        sizes = [float(number.replace(",", "")) for number in re.findall(r"[\d,]+\.\d", row)]
        unfused, fused = sizes[0::2], sizes[1::2]
        assert unfused[2] > 10 * unfused[1] > 100 * unfused[0] / 1.5
        assert fused[2] <= 4.1 * fused[1]
        assert fused[2] < unfused[2] / 50
    assert done.stderr.count("unfused_chain") == 6
    assert done.stderr.count(": plugin") == 6
    told = re.search(r"peak memory of a run ([\d,]+) -> ([\d,]+) MiB", done.stdout)
    assert told is not None
    before, after = (int(number.replace(",", "")) for number in told.groups())
    assert after < before / 4

# SPDX-License-Identifier: Apache-2.0
"""The kernels' tests can fail: faults seeded into a copy of the kernel source are caught by name and line."""

from __future__ import annotations

import shutil

import pytest
from plugin.kernels.fault_bench import KERNELS, Bench, Fault
from plugin.kernels.faults import FAULTS

pytestmark = pytest.mark.xdist_group("seeded_faults")  # one worker compiles what all share
SAMPLE = FAULTS[::5]
"""scripts/mutate_kernels.py runs them all."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the emulated kernels with")
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_one_place(fault: Fault) -> None:
    assert (KERNELS / fault.file).read_text().count(fault.old) == 1


def test_the_cases_that_faults_are_sought_in_pass_without_one(bench: Bench) -> None:
    for cases in sorted({fault.cases for fault in FAULTS}):
        assert bench.why_sound_fails(cases) == ""


@pytest.mark.parametrize("fault", SAMPLE, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_caught(fault: Fault, bench: Bench) -> None:
    assert bench.why_missed(fault) == ""

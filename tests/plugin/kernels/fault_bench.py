# SPDX-License-Identifier: Apache-2.0
"""The bench that says whether the kernels' tests catch a one-line fault.

The emulation and forward_tests are compiled once, with a table of variants cut down to two head dims; the one kernel
source that a fault sits in is compiled again for each, and forward_tests runs the few cases that it should show in.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
KERNELS = REPOSITORY / "plugin/kernels"
TESTS = REPOSITORY / "tests/plugin/kernels"
UNITS = ["forward_fp16_plain", "forward_fp16_paged", "forward_fp16_general", "forward_fp32", "combine", "append"]
TEST_SOURCES = [
    "append_cases",
    "far_cases",
    "judge",
    "launched",
    "memory_cases",
    "places",
    "problem",
    "sink_cases",
    "sizes",
    "test_forward",
]
HOST_UNITS = ["append.cpp", "dispatch.cpp"]
"""The door's own files."""
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off"]
SMALL_TABLE = re.compile(r"^FLASH_VARIANT\((Half|Float), (32|64),.*\n", re.MULTILINE)
SEEDS = ("1", "7")
"""Two schedules a fault: a race that shows only when the right thread comes first is no catch."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One edit to the kernels.

    Args:
        name: what is wrong.
        file: below plugin/kernels.
        old: text that is there once.
        new: what stands in its place.
        caught_as: what the report must say (a regular expression).
        unit: the kernel source to compile with it, or one of HOST_UNITS.
        cases: forward_tests runs those whose description holds this.
    """

    name: str
    file: str
    old: str
    new: str
    caught_as: str
    unit: str = "forward_fp16_plain"
    cases: str = "D 64 Dv 64 heads-first bottom-right"


def copy_kernels(folder: Path) -> Path:
    """A copy of the kernels' sources with few variants, to compile quickly."""
    kernels = folder / "kernels"
    shutil.copytree(KERNELS, kernels)
    table = (KERNELS / "variants.inc").read_text()
    (kernels / "variants.inc").write_text("".join(match[0] for match in SMALL_TABLE.finditer(table)))
    return kernels


def compile_source(source: Path, target: Path, kernels: Path) -> None:
    """Compiles one C++ file; ``kernels`` is the folder its includes come from."""
    command = ["g++", *FLAGS, f"-I{kernels}", "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, text=True)


def compile_unit(unit: str, kernels: Path, folder: Path) -> Path:
    """Compiles one kernel source for the emulation, or one of HOST_UNITS, and returns its object file."""
    if unit in HOST_UNITS:
        target = folder / f"{Path(unit).stem}_host.o"
        compile_source(kernels / unit, target, kernels)
        return target
    wrapper = folder / f"{unit}.cpp"
    wrapper.write_text(f'#include "{kernels}/{unit}.cu"\n')
    compile_source(wrapper, folder / f"{unit}.o", kernels)
    return folder / f"{unit}.o"


def run_cases(objects: list[Path], folder: Path, cases: str, seed: str) -> subprocess.CompletedProcess[str]:
    """Links forward_tests of these objects, once, and runs it."""
    program = folder / "forward_tests"
    if not program.exists():
        subprocess.run(["g++", *map(str, objects), "-o", str(program)], check=True)
    environment = {"FLASH_EMULATION_SEED": seed}
    return subprocess.run([program, cases], env=environment, capture_output=True, text=True, timeout=60, check=False)


class Bench:
    """Sound objects in ``folder``; raises CalledProcessError where they do not compile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        kernels = copy_kernels(folder)
        self._objects = {unit: compile_unit(unit, kernels, folder) for unit in UNITS + HOST_UNITS}
        for source in [
            *(kernels / "emulation").glob("*.cpp"),
            *(TESTS / f"{name}.cpp" for name in TEST_SOURCES),
        ]:
            self._objects[str(source)] = folder / f"{source.stem}_host.o"
            compile_source(source, self._objects[str(source)], kernels)

    def why_sound_fails(self, cases: str) -> str:
        """What the cases report without any fault; empty when they pass."""
        sound = run_cases(list(self._objects.values()), self._folder, cases, SEEDS[0])
        return "" if sound.returncode == 0 else f"{cases}: {sound.stdout}"

    def why_missed(self, fault: Fault) -> str:
        """Empty when the fault is caught with every schedule and reported as it should be."""
        folder = self._folder / fault.name
        folder.mkdir()
        kernels = copy_kernels(folder)
        source = (kernels / fault.file).read_text()
        if source.count(fault.old) != 1:
            return f"{fault.file} holds this {source.count(fault.old)} times: {fault.old}"
        (kernels / fault.file).write_text(source.replace(fault.old, fault.new))
        objects = self._objects | {fault.unit: compile_unit(fault.unit, kernels, folder)}
        for seed in SEEDS:
            result = run_cases(list(objects.values()), folder, fault.cases, seed)
            if result.returncode != 1:
                return f"not caught with schedule {seed}: {result.stdout}{result.stderr}"
            if not re.search(fault.caught_as, result.stdout):
                return f"reported as something else with schedule {seed}: {result.stdout}"
        return ""

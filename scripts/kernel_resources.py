# SPDX-License-Identifier: Apache-2.0
"""Reads what each compiled kernel takes of a GPU, and fails on a spill.

    python scripts/kernel_resources.py build/native/lib/libflash_attention_plugin.so

A register that does not fit is spilled to local memory, which is device memory: in a hot loop that costs more than it
saves. So every kernel of variants.inc must be there for every architecture with no stack and no local memory.
Ends with 0: all is well; 1: a spill or a kernel missing; 5: cuobjdump is not here (``pip install
nvidia-cuda-cuobjdump``, or the CUDA toolkit).
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

VARIANTS = Path(__file__).resolve().parents[1] / "plugin" / "kernels" / "variants.inc"
ELEMENTS = {"6__half": "Half", "13__nv_bfloat16": "BFloat", "f": "Float"}
REGISTERS_OF_A_MULTIPROCESSOR = 65536

ARCHITECTURE = re.compile(r"^arch = (sm_\w+)$")
FUNCTION = re.compile(r"Function (\w+):")
# forwardKernel<Forward<Element, head_dim, tile_q, tile_kv, warps, features>>, as the Itanium ABI mangles it.
KERNEL = re.compile(r"ForwardI(6__half|13__nv_bfloat16|f)Li(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELNS0_8FeaturesE([012])E")
HELPER = re.compile(r"(Combine|Append)I(6__half|13__nv_bfloat16|f)E")
PTX = re.compile(r"^\.target (?P<target>sm_\w+)|^(?:\.\w+ )*\.entry (?P<entry>\w+)", re.MULTILINE)
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
VARIANT = re.compile(r"^FLASH_VARIANT\((\w+), (\d+), (\d+), (\d+), (\d+), (\w+)\)", re.MULTILINE)

Variant = tuple[str, int, int, int, int, str]
"""A line of variants.inc: element, head_dim, tile_q, tile_kv, warps, features."""
COMBINES: list[Variant] = [(element, 0, 0, 0, 4, "Combine") for element in ELEMENTS.values()]
"""The kernels that put splits of the keys together, one an element type, as variants without tiles."""
APPENDS: list[Variant] = [(element, 0, 0, 0, 4, "Append") for element in ("Half", "Float")]
"""The kernels that append to a cache: numbers are only moved, so one serves fp16 and bf16."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """One kernel on one architecture; stack and local memory in bytes a thread."""

    variant: Variant
    architecture: str
    registers: int
    stack: int
    local: int

    @property
    def spills(self) -> bool:
        """Whether the kernel uses local memory: spilled registers lie on the stack."""
        return self.stack > 0 or self.local > 0

    @property
    def blocks(self) -> int:
        """Thread blocks that the registers of one multiprocessor (65,536, given out by 8 a thread) hold."""
        threads = self.variant[4] * 32
        return REGISTERS_OF_A_MULTIPROCESSOR // ((self.registers + 7) // 8 * 8 * threads)


def read_variants(text: str) -> list[Variant]:
    """The lines of variants.inc."""
    return [(e, int(d), int(q), int(kv), int(w), f) for e, d, q, kv, w, f in VARIANT.findall(text)]


def read_usage(text: str) -> list[Resources]:
    """What ``cuobjdump -res-usage`` says of our kernels; functions of other libraries are left out."""
    found = []
    architecture, variant = "", None
    for line in text.splitlines():
        if match := ARCHITECTURE.match(line.strip()):
            architecture = match[1]
        if match := FUNCTION.search(line):
            variant = kernel_of(match[1])
        if (match := USAGE.search(line)) and variant:
            found.append(Resources(variant, architecture, *(int(n) for n in match.groups())))
            variant = None
    return found


def kernel_of(function: str) -> Variant | None:
    """Which of our kernels a mangled name is; None: none."""
    if kernel := KERNEL.search(function):
        element, *sizes, features = kernel.groups()
        head_dim, tile_q, tile_kv, warps = (int(n) for n in sizes)
        return (ELEMENTS[element], head_dim, tile_q, tile_kv, warps, ("Plain", "General", "Paged")[int(features)])
    if helper := HELPER.search(function):
        return (ELEMENTS[helper[2]], 0, 0, 0, 4, helper[1])
    return None


def read_ptx(text: str) -> dict[str, set[Variant]]:
    """Our kernels in what ``cuobjdump -ptx`` prints, by the virtual architecture that the PTX is for."""
    found: dict[str, set[Variant]] = {}
    target = ""
    for match in PTX.finditer(text):
        if match["target"]:
            target = match["target"].replace("sm_", "compute_")
        elif variant := kernel_of(match["entry"]):
            found.setdefault(target, set()).add(variant)
    return found


def strangers(text: str) -> list[str]:
    """One sentence for every function of our namespace in the listing that is none of the kernels known here."""
    functions = {match[1] for match in FUNCTION.finditer(text) if "flash_export" in match[1]}
    return [f"{f} is a kernel that no table lists" for f in sorted(functions) if kernel_of(f) is None]


def find_faults(found: list[Resources], variants: list[Variant]) -> list[str]:
    """One sentence for every kernel that spills or is missing on an architecture which others were built for."""
    faults = [
        f"{name(r.variant)} on {r.architecture} spills: {r.registers} registers, {r.stack} bytes of stack, "
        f"{r.local} of local memory"
        for r in found
        if r.spills
    ]
    there = {(r.variant, r.architecture) for r in found}
    for architecture in sorted({r.architecture for r in found}):
        faults += [f"{name(v)} is missing on {architecture}" for v in variants if (v, architecture) not in there]
    return faults or ([] if found else ["the library holds no kernel of ours"])


def name(variant: Variant) -> str:
    """The variant as one word, e.g. ``Half64Plain``."""
    return f"{variant[0]}{variant[1] or ''}{variant[5]}"


def table(found: list[Resources]) -> str:
    """Registers a thread and blocks a multiprocessor, a row a kernel and a column an architecture."""
    architectures = sorted({r.architecture for r in found}, key=lambda a: int(re.sub(r"\D", "", a)))
    by_place = {(r.variant, r.architecture): r for r in found}
    lines = [f"{'registers/blocks':18}" + "".join(f"{a:>9}" for a in architectures)]
    for variant in dict.fromkeys(r.variant for r in found):
        cells = [by_place.get((variant, a)) for a in architectures]
        lines.append(
            f"{name(variant):18}" + "".join(f"{f'{r.registers}/{r.blocks}':>9}" if r else f"{'-':>9}" for r in cells)
        )
    return "\n".join(lines)


def find_tool(tool: str) -> str | None:
    """cuobjdump or nvdisasm of the machine, else of NVIDIA's wheel in this environment."""
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
    return shutil.which(tool) or shutil.which(tool, path=str(wheel))


def main() -> int:
    """Prints the table and the faults; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="anything that holds the fatbin: the plugin or the kernels' archive")
    library = parser.parse_args().library
    cuobjdump = find_tool("cuobjdump")
    if cuobjdump is None:
        print("cuobjdump is not here; pip install nvidia-cuda-cuobjdump", file=sys.stderr)
        return 5
    listing = subprocess.run([cuobjdump, "-res-usage", str(library)], capture_output=True, text=True, check=True)
    found = read_usage(listing.stdout)
    faults = find_faults(found, read_variants(VARIANTS.read_text()) + COMBINES + APPENDS) + strangers(listing.stdout)
    print(table(found))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

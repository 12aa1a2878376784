# SPDX-License-Identifier: Apache-2.0
"""Reads the compiled kernels' machine code: writes docs/kernels.md and holds the gates that need no GPU.

    python scripts/kernel_table.py build/native/lib/libflash_attention_door.so [--write docs/kernels.md]

A hot loop is the innermost loop with a kernel's multiplications that has the shortest way round: in Plain and Paged
kernels the loop over the key tiles that no mask touches, in the others the only one. Counted is that way, which jumps
over what most tiles do not need (machine_code.py): rescaling, masks, a bias. Its tensor-bound ratio is what the tensor
cores of an A100 need for it (8 clocks for one HMMA.16816 on each quarter of a multiprocessor) over what everything else
of that quarter needs: one clock an instruction issued, or 8 a MUFU. Above 1 the tensor cores set the pace, and what is
above 1 is the room for the stalls that no count shows.

Plain and Paged kernels have a second such loop, over the tiles that a mask touches: counted alike, without a gate.

Helpers are listed with the loop that moves their data: of Combine one column of one split, of Append 16 bytes of a row.

Ends with 0: all gates hold; 1: one does not; 5: cuobjdump or nvdisasm is not here (``pip install nvidia-cuda-cuobjdump
nvidia-cuda-nvdisasm``, or the CUDA toolkit).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from kernel_resources import (
    APPENDS,
    COMBINES,
    VARIANTS,
    Resources,
    Variant,
    find_faults,
    find_tool,
    kernel_of,
    name,
    read_ptx,
    read_usage,
    read_variants,
    strangers,
)
from machine_code import NEEDED, Listing, fragment_leads, loops_with, read_listings

HMMA_CLOCKS = 8
MUFU_CLOCKS = 8
LIBRARY_LIMIT_BYTES = 25 << 20
MODELLED = "sm_80"
"""Whose clocks the ratio is in; the gates are held there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What bounds the blocks that run on one at a time (CUDA C++ Programming Guide, technical specifications)."""

    shared_bytes: int
    block_shared_bytes: int
    threads: int
    blocks: int


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(164 << 10, 163 << 10, 2048, 32),
    "sm_86": Multiprocessor(100 << 10, 99 << 10, 1536, 16),
    "sm_89": Multiprocessor(100 << 10, 99 << 10, 1536, 24),
    "sm_90": Multiprocessor(228 << 10, 227 << 10, 2048, 32),
    "sm_120": Multiprocessor(100 << 10, 99 << 10, 1536, 32),
}
MULTIPLIES = {"Combine": "FFMA", "Append": "STG"}
"""What the hot loop of a helper is known by."""
TWO_LOOPS = ("Plain", "Paged")
"""Feature classes with a loop of its own for the tiles that a mask touches."""
RESERVED_SHARED_BYTES = 1 << 10
"""That the system takes of every block."""


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """The most that a hot loop may take on sm_80, and the least of its ratio and of its shortest lead."""

    total: int
    hmma: int = 0
    ldsm: int = 0
    mufu: int = 0
    ratio: float = 0.0
    lead: int = 0


def ratio_of(counts: Counter[str]) -> float:
    """The tensor-bound ratio of a loop's way round."""
    return HMMA_CLOCKS * counts["HMMA"] / max(counts.total(), MUFU_CLOCKS * counts["MUFU"])


@dataclasses.dataclass(frozen=True, slots=True)
class HotLoop:
    """Instructions of one kernel's hot loop, a warp and an iteration.

    Args:
        counts: of the shortest way round, by opcode.
        size: how many the loop has in all.
        leads: instructions between the load of each fragment and its first use.
        masked: as ``counts``, of the loop over masked tiles; empty where a kernel has one loop for all.
        wide_stores: stores of 16 bytes that the kernel has, outside the loop too.
    """

    variant: Variant
    architecture: str
    counts: Counter[str]
    size: int = 0
    leads: tuple[int, ...] = ()
    wide_stores: int = 1
    masked: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Of the shortest way round: issue slots."""
        return self.counts.total()

    @property
    def ratio(self) -> float:
        """Clocks of the tensor cores over those of the busiest other unit; 0 where none are used."""
        return ratio_of(self.counts)


# fmt: off
BUDGETS = {
    ("16-bit", 32, "Plain"): Budget(total=460, hmma=64, ldsm=20, mufu=64, ratio=1.0, lead=5),
    ("16-bit", 64, "Plain"): Budget(total=565, hmma=128, ldsm=40, mufu=64, ratio=1.8, lead=5),
    ("16-bit", 128, "Plain"): Budget(total=460, hmma=128, ldsm=72, mufu=32, ratio=2.2, lead=5),
    ("16-bit", 256, "Plain"): Budget(total=420, hmma=128, ldsm=80, mufu=16, ratio=2.4, lead=5),
    ("16-bit", 32, "Paged"): Budget(total=500, hmma=64, ldsm=20, mufu=64, ratio=1.0, lead=5),
    ("16-bit", 64, "Paged"): Budget(total=640, hmma=128, ldsm=40, mufu=64, ratio=1.6, lead=5),
    ("16-bit", 128, "Paged"): Budget(total=540, hmma=128, ldsm=72, mufu=32, ratio=1.9, lead=5),
    ("16-bit", 256, "Paged"): Budget(total=495, hmma=128, ldsm=80, mufu=16, ratio=2.0, lead=5),
    ("16-bit", 32, "General"): Budget(total=405, hmma=32, ldsm=18, mufu=32),
    ("16-bit", 64, "General"): Budget(total=525, hmma=64, ldsm=36, mufu=32),
    ("16-bit", 128, "General"): Budget(total=650, hmma=128, ldsm=72, mufu=32),
    ("16-bit", 256, "General"): Budget(total=580, hmma=128, ldsm=80, mufu=16),
    ("fp32", 32, "General"): Budget(total=210),
    ("fp32", 64, "General"): Budget(total=210),
    ("fp32", 128, "General"): Budget(total=210),
    ("fp32", 256, "General"): Budget(total=210),
    ("16-bit", 0, "Combine"): Budget(total=60),
    ("fp32", 0, "Combine"): Budget(total=60),
    ("16-bit", 0, "Append"): Budget(total=20),
    ("fp32", 0, "Append"): Budget(total=20),
}
# fmt: on


def budget_of(variant: Variant) -> Budget | None:
    """The budget for this line of variants.inc; None: it has none yet."""
    return BUDGETS.get(("fp32" if variant[0] == "Float" else "16-bit", variant[1], variant[5]))


def read_hot_loops(library: Path, architectures: list[str]) -> list[HotLoop]:
    """The hot loop of each of our kernels in the library's fatbin, on each of these architectures."""
    found = []
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        for architecture in architectures:
            subprocess.run(
                [cuobjdump, "-xelf", f"{architecture}.cubin", str(library.resolve())],
                cwd=folder, check=True, capture_output=True,
            )  # fmt: skip
            for cubin in sorted(Path(folder).glob(f"*.{architecture}.cubin")):
                text = subprocess.run([nvdisasm, "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
                for listing in read_listings(text):
                    if variant := kernel_of(listing.function):
                        found += loop_of(listing, variant, architecture)
    return found


def loop_of(listing: Listing, variant: Variant, architecture: str) -> list[HotLoop]:
    """The hot loop of one kernel; empty where it has none."""
    loops = loops_with(
        listing, MULTIPLIES.get(variant[5]) or ("FFMA" if variant[0] == "Float" else "HMMA"), needed_by(variant)
    )
    if not loops:
        return []
    counts, *others = (Counter(instruction.opcode for instruction in loop.path) for loop in loops)
    masked = others[0] if others and variant[5] in TWO_LOOPS else Counter[str]()
    wide = sum(i.opcode == "STG" and i.operands.startswith(".E.128") for i in listing.instructions)
    leads = tuple(fragment_leads(loops[0].path))
    return [HotLoop(variant, architecture, counts, loops[0].size, leads, wide, masked)]


def needed_by(variant: Variant) -> frozenset[str]:
    """What no tile of a kernel goes without; a General kernel reads global memory for a bias or a page table alone."""
    if variant[5] in MULTIPLIES:
        return frozenset({"LDG"})
    return NEEDED if variant[0] == "Float" else NEEDED - ({"LDG", "FFMA"} if variant[5] == "General" else {"FFMA"})


def shared_bytes(variant: Variant) -> int:
    """Dynamic shared memory of a block: the tiles of Q, K and V."""
    element, head_dim, tile_q, tile_kv, _, _ = variant
    return (tile_q + 2 * tile_kv) * head_dim * (4 if element == "Float" else 2)


def blocks_at_a_time(resources: Resources) -> int:
    """Thread blocks that one multiprocessor runs at a time."""
    unit = MULTIPROCESSORS[resources.architecture]
    threads = resources.variant[4] * 32
    by_shared = unit.shared_bytes // (shared_bytes(resources.variant) + RESERVED_SHARED_BYTES)
    return min(resources.blocks, by_shared, unit.threads // threads, unit.blocks)


def gate_faults(loops: list[HotLoop], resources: list[Resources], library_bytes: int) -> list[str]:
    """One sentence for every gate that does not hold."""
    faults = []
    if library_bytes > LIBRARY_LIMIT_BYTES:
        faults.append(f"the library has {library_bytes} bytes; the limit is {LIBRARY_LIMIT_BYTES}")
    for r in resources:
        if shared_bytes(r.variant) > MULTIPROCESSORS[r.architecture].block_shared_bytes:
            faults.append(f"{name(r.variant)} takes more shared memory than a block may have on {r.architecture}")
    there = {(loop.variant, loop.architecture) for loop in loops}
    faults += [f"{name(r.variant)} has no hot loop on {r.architecture}" for r in resources
               if (r.variant, r.architecture) not in there]  # fmt: skip
    for loop in loops:
        if loop.wide_stores == 0 and loop.variant[5] != "Combine":
            faults.append(f"{name(loop.variant)} on {loop.architecture} stores no 16 bytes at once")
        if loop.architecture == MODELLED:
            faults += loop_faults(loop)
    return faults


def loop_faults(loop: HotLoop) -> list[str]:
    """Where a hot loop goes over its budget."""
    budget = budget_of(loop.variant)
    if budget is None:
        return [f"{name(loop.variant)} has no budget; add one to BUDGETS"]
    seen = {"instructions": (loop.total, budget.total)}
    if loop.variant[0] != "Float":
        seen |= {op: (loop.counts[op.upper()], getattr(budget, op)) for op in ("hmma", "ldsm", "mufu")}
    faults = [f"{name(loop.variant)}: {count} {what} in the hot loop; the budget is {limit}"
              for what, (count, limit) in seen.items() if count > limit]  # fmt: skip
    if loop.leads and min(loop.leads) < budget.lead:
        faults.append(f"{name(loop.variant)}: a fragment is multiplied {min(loop.leads)} instructions after its load; "
                      f"the gate is {budget.lead}")  # fmt: skip
    if loop.ratio < budget.ratio:
        faults.append(f"{name(loop.variant)}: tensor-bound ratio {loop.ratio:.2f}; the gate is {budget.ratio}")
    return faults


HEAD = """# The compiled kernels

Made by `scripts/kernel_table.py --write docs/kernels.md` from the machine code in the library; do not edit. A test
holds the gates: no register is spilled on any architecture, every hot loop on sm_80 stays within its budget, every
block within its shared memory, the library under 25 MB; and `forward_tests` fails where it has not run one of these
kernels. No number here is a measured speed.

A table an architecture, a row a kernel. *Registers* a thread, *shared* memory a block, *blocks* that a multiprocessor
runs at a time, by registers, shared memory and threads.

*Instructions* a warp and a tile of keys, in the loop that runs most: in Plain kernels the tiles without a mask, in
Paged ones the same of a paged cache, in the others all tiles; in fp32 kernels, which loop inside a tile, 8 numbers of
the head dim in the first product. Counted is the shortest way round that leaves out no product and no copy: a tile
without a mask and a bias, in which no maximum grows so far that its row is rescaled. *In all* is what the loop holds.
*Ratio*: clocks of the tensor cores over those of the busiest other unit; above 1 the tensor cores set the pace. It is
in an A100's clocks, so only sm_80 has it. *Lead*: the fewest instructions, and the median, between a fragment's load
and the product that takes it; where it is short, a warp waits for its load, and another warp must fill the gap.

The gates are on sm_80. Every kernel has a budget of instructions. Plain and Paged kernels also have gates of 2.2 for
the ratio of head dim 128 and 1.8 for 64, paged 1.9 and 1.6, and of 5 for the lead. General kernels have neither:
theirs are smaller tiles, and they serve what the others do not.

*Masked* and *its ratio* are the same of the loop over the tiles that a mask touches, in kernels that have one: the
last tile of keys where it is not whole, and with a causal mask those on the diagonal, which of all tiles are
{diagonal}. A window adds as many at its other end.

*Combine* puts together what the splits of a row found, where few queries meet many keys; its loop is one split of one
output column, which the compiler also has four at a time. *Append* writes new keys and values into a cache; its loop is
16 bytes of a row, likewise. It only moves numbers, so HalfAppend serves bf16 as well as fp16.
"""
PTX_SECTION = """
## {architecture}

All {count} kernels are in the library as PTX for {architecture} too, from which a driver makes machine code for an
architecture without a table here. It has no registers and no machine code to count before that.
"""
COLUMNS = (
    "kernel|queries x keys|warps|registers|shared|blocks|instructions|in all|HMMA|LDSM|MUFU|FFMA|ratio|lead|"
    "masked|its ratio"
)


def page(loops: list[HotLoop], resources: list[Resources], variants: list[Variant], ptx: dict[str, int]) -> str:
    """docs/kernels.md; ``ptx``: how many kernels there are as PTX, by virtual architecture."""
    text = HEAD.format(diagonal=shares_of_the_diagonal(variants))
    by_loop = {(loop.variant, loop.architecture): loop for loop in loops}
    by_place = {(r.variant, r.architecture): r for r in resources}
    kernels = variants + COMBINES + APPENDS
    for architecture in (a for a in MULTIPROCESSORS if any(r.architecture == a for r in resources)):
        header = COLUMNS.split("|")
        text += f"\n## {architecture}\n\n| {' | '.join(header)} |\n{'|---' * len(header)}|\n"
        for v in kernels:
            text += row(by_loop[v, architecture], by_place[v, architecture])
    for architecture, count in ptx.items():
        text += PTX_SECTION.format(architecture=architecture, count=count)
    return text


def shares_of_the_diagonal(variants: list[Variant]) -> str:
    """What part of the visited tiles a causal mask touches, in Plain kernels and for as many keys as queries."""
    shares = []
    for length in (1024, 4096, 16384):
        found = set()
        for _, _, tile_q, tile_kv, _, features in variants:
            if features == "Plain":
                visited = [-(-(first + tile_q) // tile_kv) for first in range(0, length, tile_q)]
                whole = [(first + 1) // tile_kv for first in range(0, length, tile_q)]
                found.add(f"{1 - sum(whole) / sum(visited):.0%}")
        shares.append(f"{' or '.join(sorted(found))} at {length:,}")
    return f"{', '.join(shares)} tokens"


def row(loop: HotLoop, resources: Resources) -> str:
    """One line of a table."""
    v = loop.variant
    ratio, masked_ratio = (f"{r:.2f}" if loop.architecture == MODELLED and r > 0 else "-"
                           for r in (loop.ratio, ratio_of(loop.masked) if loop.masked else 0.0))  # fmt: skip
    lead = f"{min(loop.leads)}, {statistics.median(loop.leads):.0f}" if loop.leads else "-"
    cells = [name(v), f"{v[2]} x {v[3]}" if v[1] else "-", v[4], resources.registers]
    cells += [f"{shared_bytes(v) >> 10} KB", blocks_at_a_time(resources), loop.total, loop.size]
    cells += [*(loop.counts[op] for op in ("HMMA", "LDSM", "MUFU", "FFMA")), ratio, lead]
    cells += [loop.masked.total() or "-", masked_ratio]
    return f"| {' | '.join(map(str, cells))} |\n"


def ptx_faults(ptx: dict[str, set[Variant]], kernels: list[Variant]) -> list[str]:
    """One sentence for every kernel that a PTX of the library lacks."""
    return [f"{name(v)} is not in the PTX of {architecture}" for architecture, there in ptx.items()
            for v in kernels if v not in there]  # fmt: skip


def main() -> int:
    """Prints or writes the page and prints the faults; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="anything that holds the fatbin: the plugin or the kernels' archive")
    parser.add_argument("--write", type=Path, help="write the page here instead of printing it")
    arguments = parser.parse_args()
    for tool in ("cuobjdump", "nvdisasm"):
        if find_tool(tool) is None:
            print(f"{tool} is not here; pip install nvidia-cuda-{tool}", file=sys.stderr)
            return 5
    library, variants = arguments.library, read_variants(VARIANTS.read_text())
    usage = subprocess.run(
        [find_tool("cuobjdump"), "-res-usage", str(library)], capture_output=True, text=True, check=True
    )
    resources = read_usage(usage.stdout)
    loops = read_hot_loops(library, sorted({r.architecture for r in resources}))
    listing = subprocess.run([find_tool("cuobjdump"), "-ptx", str(library)], capture_output=True, text=True, check=True)
    ptx = read_ptx(listing.stdout)
    kernels = variants + COMBINES + APPENDS
    faults = find_faults(resources, kernels) + strangers(usage.stdout) + ptx_faults(ptx, kernels)
    faults = faults or gate_faults(loops, resources, library.stat().st_size)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        text = page(loops, resources, variants, {a: len(there) for a, there in ptx.items()})
        if arguments.write:
            arguments.write.write_text(text)
        else:
            print(text, end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

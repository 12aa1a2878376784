# SPDX-License-Identifier: Apache-2.0
"""Machine code as nvdisasm prints it: its functions, and the way round a loop that most iterations take."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+),")
LABEL = re.compile(r"^(\.L_\w+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([^;]*)")
TARGET = re.compile(r"`\((\.L_\w+)\)")
ALWAYS_JUMPS = re.compile(r"^(\.U)?\s*`\(")
REGISTER = re.compile(r"\bR(\d+)\b")

JUMPS = {"BRA", "JMP"}
NEEDED = frozenset({"HMMA", "FFMA", "LDSM", "LDS", "LDGSTS", "LDG"})
"""What a tile of keys takes: products, fragments from shared memory, copies into it, a look into a page table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line: ``operands`` with the opcode's modifiers in front, the label that it may jump to."""

    opcode: str
    operands: str = ""
    predicated: bool = False
    target: str | None = None

    @property
    def falls_through(self) -> bool:
        """Whether the next line may follow."""
        if self.predicated:
            return True
        if self.opcode in JUMPS:
            return ALWAYS_JUMPS.match(self.operands) is None
        return self.opcode not in {"EXIT", "RET", "BRX", "JMX"}


@dataclasses.dataclass(slots=True)
class Listing:
    """One function, and where its labels are."""

    function: str
    instructions: list[Instruction] = dataclasses.field(default_factory=list)
    labels: dict[str, int] = dataclasses.field(default_factory=dict)

    def jump(self, at: int) -> int | None:
        """Where the instruction there may jump to."""
        instruction = self.instructions[at]
        return self.labels.get(instruction.target or "") if instruction.opcode in JUMPS else None


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A loop: the instructions of its cheapest way round, and how many it has in all."""

    path: list[Instruction]
    size: int


def read_listings(text: str) -> Iterator[Listing]:
    """The functions of one cubin."""
    listing = Listing("")
    for line in text.splitlines():
        if match := SECTION.match(line):
            if listing.function:
                yield listing
            listing = Listing(match[1])
        elif match := LABEL.match(line):
            listing.labels[match[1]] = len(listing.instructions)
        elif match := INSTRUCTION.match(line):
            target = TARGET.search(match[3])
            listing.instructions.append(
                Instruction(match[2], match[3], match[1] is not None, target[1] if target else None)
            )
    if listing.function:
        yield listing


def loops_with(listing: Listing, opcode: str, needed: frozenset[str] = NEEDED) -> list[Loop]:
    """The innermost loops that hold ``opcode``, the one with the shortest way round first: the hot loop."""
    spans = {}
    for end in range(len(listing.instructions)):
        start = listing.jump(end)
        if start is not None and start <= end:
            path = way_round(listing, start, end, needed)
            if path and any(i.opcode == opcode for i in path):
                spans[start, end] = path
    innermost = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    innermost.sort(key=lambda span: len(spans[span]))
    return [Loop(spans[start, end], end - start + 1) for start, end in innermost]


def way_round(listing: Listing, start: int, end: int, needed: frozenset[str]) -> list[Instruction] | None:
    """The fewest instructions from ``start`` to ``end`` among the ways with the most of ``needed``.

    So what is jumped over in most iterations is not counted, and what only the last iteration jumps over, the next
    tile's copy, is. Jumps backwards are not followed.
    """
    best: dict[int, tuple[int, int]] = {start: (0, 0)}
    came_from: dict[int, int] = {}
    for at in range(start, end):
        if at not in best:
            continue
        done, minus_length = best[at]
        reached = (done + (listing.instructions[at].opcode in needed), minus_length - 1)
        jump = listing.jump(at)
        following = [at + 1] if listing.instructions[at].falls_through else []
        for to in following + ([jump] if jump is not None and at < jump <= end else []):
            if to not in best or reached > best[to]:
                best[to], came_from[to] = reached, at
    if end not in best:
        return None
    way = [end]
    while way[-1] != start:
        way.append(came_from[way[-1]])
    return [listing.instructions[at] for at in reversed(way)]


def fragment_leads(path: list[Instruction]) -> list[int]:
    """How many instructions lie between each LDSM of a loop and the first HMMA that takes what it loads.

    A fragment that is taken too soon stalls the warp: some 30 clocks pass until it is there.
    """
    leads = []
    for at, load in enumerate(path):
        if load.opcode != "LDSM":
            continue
        first = int(REGISTER.search(load.operands)[1])  # type: ignore[index]
        loaded = set(range(first, first + 4))
        for distance in range(1, len(path)):
            taker = path[(at + distance) % len(path)]
            if taker.opcode == "HMMA" and loaded & _fragments_of(taker):
                leads.append(distance - 1)
                break
    return leads


def _fragments_of(product: Instruction) -> set[int]:
    """The registers of A (four) and B (two) of an HMMA.16816."""
    _, a, b, *_ = (int(n) for n in REGISTER.findall(product.operands))
    return {*range(a, a + 4), b, b + 1}

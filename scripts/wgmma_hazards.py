"""Registers that Hopper's asynchronous products still read when something else writes to them, found in machine code.

`wgmma` with its left operand in registers goes on reading them until a wait that covers it. Triton 3.6 with the
assembler that it brings lets the next step of a loop write there before (triton-lang/triton#9433): rare wrong outputs,
at no fixed place. What is read here is the assembler's text (`cuobjdump -sass`), loops with such products twice over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_LINE = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_FRAGMENT = 4  # registers that hold a warp's part of a 64 x 16 operand
_WRITES_NOTHING = (
    "ST", "RED", "BAR", "BRA", "DEPBAR", "WARPGROUP", "LDGDEPBAR", "LDGSTS", "EXIT", "MEMBAR", "FENCE", "ISETP",
    "FSETP", "R2UR", "R2P", "SYNCS", "CCTL", "ERRBAR", "WARPSYNC", "NOP", "PLOP", "U", "BSYNC", "BSSY",
)  # fmt: skip


class Instruction(NamedTuple):
    address: int
    name: str
    arguments: str


class Hazard(NamedTuple):
    """`writer` overwrites what the product at `reader` may still read; addresses in the kernel."""

    writer: int
    reader: int


def hazards(sass: str) -> list[Hazard]:
    """Each once, in the order of the loops."""
    found: dict[Hazard, None] = {}
    for body in _loops([Instruction(int(m[1], 16), m[2], m[3].strip()) for m in _LINE.finditer(sass)]):
        found |= dict.fromkeys(_in_loop(body))
    return list(found)


def _loops(code: list[Instruction]) -> Iterator[list[Instruction]]:
    for branch in code:
        target = re.search(r"0x([0-9a-f]+)", branch.arguments) if branch.name.startswith("BRA") else None
        if target is not None and int(target[1], 16) < branch.address:
            body = [i for i in code if int(target[1], 16) <= i.address <= branch.address]
            if any(i.name.startswith("HGMMA") for i in body):
                yield body


def _in_loop(body: list[Instruction]) -> Iterator[Hazard]:
    pending: list[tuple[int, range]] = []  # products under way, oldest first: each a group of its own
    for name, address, arguments in ((i.name, i.address, i.arguments) for i in (*body, *body)):
        if name.startswith("WARPGROUP.DEPBAR"):
            left = int(arguments.split(",")[1].strip(), 16)
            pending = pending[max(0, len(pending) - left) :] if left else []
        elif name.startswith("HGMMA"):
            operand = re.match(r"R(\d+)", arguments.split(",")[1].strip())
            first = 0 if operand is None else int(operand[1])
            pending.append((address, range(first, first + (0 if operand is None else _FRAGMENT))))
        else:
            written = _written(name, arguments)
            yield from (Hazard(address, reader) for reader, read in pending if any(r in read for r in written))


def _written(name: str, arguments: str) -> range:
    """The general registers that an instruction writes."""
    first = re.match(r"(?:P\w+,\s*)?R(\d+)\b", arguments)
    if first is None or name.startswith(_WRITES_NOTHING):
        return range(0)
    count = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    if name.startswith("LDSM"):
        count = int(name[-1]) if name[-1] in "124" else 4
    return range(int(first[1]), int(first[1]) + count)

"""Compiled programs as XLA prints them (`Compiled.as_text()`): instructions and collectives.

Sizes are those of one device, padded to the tiles of their layout.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from math import prod

ITEM_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"(\w+)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|body|condition|to_apply|true_computation|false_computation)=%([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TILE = re.compile(r"T\(([\d,]+)\)")
COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation: its result's type, operands, and attributes (`rest`)."""

    name: str
    type_text: str
    opcode: str
    operands: tuple[str, ...]
    rest: str

    @property
    def num_bytes(self) -> int:
        """The bytes of the result, of all arrays of a tuple."""
        return sum(map(_num_bytes, _ARRAY.finditer(self.type_text)))

    @property
    def called(self) -> list[str]:
        """The computations that it runs."""
        branches = _BRANCHES.search(self.rest)
        return _CALLED.findall(self.rest) + (_OPERAND.findall(branches[1]) if branches else [])

    @property
    def trips(self) -> int:
        """How often a loop runs, 1 if XLA does not know."""
        trips = _TRIPS.search(self.rest)
        return int(trips[1]) if trips else 1


Run = tuple[int, Instruction, Mapping[str, Instruction]]


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """The computations of a program by name, and the name of its entry."""

    computations: dict[str, list[Instruction]]
    entry: str

    def run(self, name: str = "", times: int = 1) -> Iterator[Run]:
        """Yield (times it runs, instruction, its computation's instructions by name).

        Loops of an unknown number of iterations count once.
        """
        body = self.computations.get(name or self.entry, [])
        by_name = {one.name: one for one in body}
        for one in body:
            yield times, one, by_name
            for called in one.called:
                yield from self.run(called, times * one.trips)


def parse(text: str) -> Module:
    """Return the computations of a program's text."""
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        if current is None:
            header = _COMPUTATION.match(line)
            if header:
                current = computations[header[2]] = []
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif match := _LINE.match(line):
            current.append(_instruction(match[1], match[2]))
    return Module(computations, entry)


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type_text, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    last = _closing(rest, len(opcode))
    operands = tuple(_OPERAND.findall(rest[len(opcode) + 1 : last]))
    return Instruction(name, type_text, opcode, operands, rest[last + 1 :])


def _closing(text: str, first: int) -> int:
    """Return the index of the parenthesis that closes the one at `first`."""
    depth = 0
    for at in range(first, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
    return len(text) - 1


def _num_bytes(match: re.Match[str]) -> int:
    dtype, sizes_text, layout = match[1], match[2], match[3] or ""
    sizes = [int(size.strip("<= ")) for size in sizes_text.split(",") if size.strip()]
    bits = ITEM_BITS.get(dtype)
    if bits is None:
        width = re.search(r"\d+", dtype)
        bits = int(width[0]) if width else 8
    return -(-prod(_padded(sizes, layout)) * bits // 8)


def _padded(sizes: list[int], layout: str) -> list[int]:
    """Return the sizes in whole tiles; the layout names minor dimensions first."""
    tile = _TILE.search(layout)
    order = [int(n) for n in layout.partition(":")[0].split(",") if n]
    if tile is None or len(order) != len(sizes):
        return sizes
    padded, tiles = list(sizes), [int(n) for n in tile[1].split(",")]
    for dimension, size in zip(order, reversed(tiles), strict=False):
        padded[dimension] = -(-padded[dimension] // size) * size
    return padded


def collectives_of(module: Module) -> dict[str, int]:
    """Return bytes by kind of collective: of its larger side, on one device."""
    moved: dict[str, int] = {}
    for times, one, by_name in module.run():
        kind = one.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            given, result = sum(by_name[name].num_bytes for name in one.operands), one.num_bytes
            if one.opcode.endswith("-start") and one.type_text.startswith("(") and result > given:
                result -= given  # such a result names its operands too
            moved[kind] = moved.get(kind, 0) + times * max(given, result)
    return moved

"""Compiled programs as XLA prints them (`Compiled.as_text()`): instructions, collectives, bytes.

Sizes are those of one device, padded to the tiles of their layout.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_THUNK = re.compile(r"^(\s*)\d+: (k\w+)\b")
_LAUNCHED = "kKernel", "kCustomKernel", "kCustomCall", "kGemm", "kCublasLtMatmul"
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all".split()
)
_SLICES = "gather", "dynamic-slice", "slice"  # read as much as they return
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # in place: the operand that they write
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


Body = Mapping[str, Instruction]
Run = tuple[int, Instruction, Body]


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


def decisions(module: Module) -> dict[str, int]:
    """Return the numbers of loops of an unknown number of iterations and of conditionals.

    Outside of command buffers (`waiting_conditionals`), XLA's runtime for GPUs copies the predicate
    of each to the host and waits, for a loop before every iteration.
    """
    loops = conditionals = 0
    for times, one, _ in module.run():
        loops += times * (one.opcode == "while" and not _TRIPS.search(one.rest))
        conditionals += times * (one.opcode == "conditional")
    return {"unknown_loops": loops, "conditionals": conditionals}


def waiting_conditionals(thunks: str) -> int:
    """Return the number of conditionals outside of command buffers in XLA's sequence of thunks.

    The lines of a loop, a conditional or a command buffer are followed by its own, indented.
    """
    count = 0
    around: list[tuple[int, str]] = []  # indentation and kind of the enclosing lines
    for line in thunks.splitlines():
        thunk = _THUNK.match(line)
        if thunk is None:
            continue
        indentation = len(thunk[1])
        while around and around[-1][0] >= indentation:
            around.pop()
        is_buffered = any(kind == "kCommandBuffer" for _, kind in around)
        count += thunk[2] == "kConditional" and not is_buffered
        around.append((indentation, thunk[2]))
    return count


def kernels(thunks: str) -> int:
    """Return the number of kernels in XLA's sequence of thunks: of loops once, of all branches.

    Copies and fills are not kernels.
    """
    lines = map(_THUNK.match, thunks.splitlines())
    return sum(thunk is not None and thunk[2] in _LAUNCHED for thunk in lines)


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


def bytes_of(
    module: Module,
    of_kernel: Callable[[Instruction, Body], int],
    counts: Callable[[Instruction], bool] = lambda _: True,
) -> int:
    """Return the bytes that a program for GPUs reads and writes, each operand once.

    Slices count as what they return, updates in place as what they write, the branches of a
    conditional as the least of them. `of_kernel` counts a Mosaic kernel. `counts` chooses
    instructions of the entry.
    """

    def of_computation(name: str) -> int:
        body = module.computations[name]
        by_name = {one.name: one for one in body}
        return sum(of_instruction(one, by_name) for one in body)

    def of_instruction(one: Instruction, by_name: Body) -> int:
        if one.opcode == "conditional":
            return min(map(of_computation, one.called))
        if one.opcode in ("while", "call"):
            return one.trips * sum(map(of_computation, one.called))
        if one.opcode == "custom-call" and "mosaic" in one.rest:
            return of_kernel(one, by_name)
        if one.opcode in _FREE or "AllocateBuffer" in one.rest:
            return 0
        if one.opcode == "fusion":
            return _bytes_of_fusion(module.computations[one.called[0]])
        return _written(one, by_name) + sum(
            _read(one, i, by_name[name].num_bytes) for i, name in enumerate(one.operands)
        )

    body = module.computations[module.entry]
    by_name = {one.name: one for one in body}
    return sum(of_instruction(one, by_name) for one in body if counts(one))


def _bytes_of_fusion(body: Sequence[Instruction]) -> int:
    by_name = {one.name: one for one in body}
    users: dict[str, list[tuple[Instruction, int]]] = {one.name: [] for one in body}
    for one in body:
        for i, name in enumerate(one.operands):
            users[name].append((one, i))

    def read(name: str, size: int) -> int:
        uses = (
            read(user.name, size) if user.opcode == "bitcast" else _read(user, i, size)
            for user, i in users[name]
        )
        return min(size, sum(uses))

    inputs = (one for one in body if one.opcode == "parameter")
    return _written(body[-1], by_name) + sum(read(one.name, one.num_bytes) for one in inputs)


def _read(user: Instruction, operand: int, size: int) -> int:
    """Return how much an instruction reads of an operand of this size."""
    if operand == 0 and user.opcode in _SLICES:
        return user.num_bytes
    return 0 if operand == 0 and user.opcode in _UPDATES else size


def _written(one: Instruction, by_name: Body) -> int:
    if one.opcode == "tuple":
        return sum(_written(by_name[name], by_name) for name in one.operands)
    if one.opcode == "bitcast" and one.operands[0] in by_name:
        return _written(by_name[one.operands[0]], by_name)
    if one.opcode in _UPDATES:
        return by_name[one.operands[_UPDATES[one.opcode]]].num_bytes
    return one.num_bytes

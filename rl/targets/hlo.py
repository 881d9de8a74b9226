"""Compiled programs as XLA prints them: instructions, their arrays, collectives and kernels.

The text is that of `Compiled.as_text()`, whose instructions are in the order in which they run.
Sizes are those of one device, padded to the tiles of their layout.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from math import prod

ITEM_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"(\w+)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|body|condition|to_apply|true_computation|false_computation)=")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_DONATED = re.compile(r"\((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"T\(([\d,]+)\)")
COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result; `on_device`: it lies in the device's main memory."""

    text: str
    num_bytes: int
    on_device: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation; `type_text` is that of its result, `rest` its attributes.

    `inside` is what stands in its parentheses: operands, or a parameter's number.
    """

    name: str
    type_text: str
    opcode: str
    operands: tuple[str, ...]
    inside: str
    rest: str
    is_root: bool

    @cached_property
    def arrays(self) -> list[Array]:
        """The arrays of the result, those of a tuple in turn."""
        return [_array(match) for match in _ARRAY.finditer(self.type_text)]

    @cached_property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays)

    @property
    def op_name(self) -> str:
        """Return its name in the source program."""
        return self.quoted("op_name")

    def quoted(self, key: str) -> str:
        """Return an attribute in quotes, empty where there is none."""
        found = re.search(rf'\b{key}="([^"]*)"', self.rest)
        return found[1] if found else ""

    @cached_property
    def called(self) -> list[str]:
        """The computations that it runs."""
        names = [_OPERAND.match(self.rest, m.end()) for m in _CALLED.finditer(self.rest)]
        found = [match[1] for match in names if match]
        branches = _BRANCHES.search(self.rest)
        return found + (_OPERAND.findall(branches[1]) if branches else [])

    @property
    def trips(self) -> int:
        """Return how often a loop runs, 1 where XLA does not know."""
        found = _TRIPS.search(self.rest)
        return int(found[1]) if found else 1


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """The computations of a program by name, and that which is run.

    `donated` are the numbers of the parameters whose memory results may take.
    """

    computations: dict[str, list[Instruction]]
    entry: str
    donated: frozenset[int] = frozenset()

    def run(self) -> Iterator[tuple[int, Instruction, Callable[[str], Instruction]]]:
        """Yield (how often, instruction, its computation's instructions by name) of all that runs.

        Loops of an unknown number of rounds count once.
        """
        yield from self._run(self.entry, 1)

    def _run(
        self, name: str, times: int
    ) -> Iterator[tuple[int, Instruction, Callable[[str], Instruction]]]:
        body = self.computations.get(name, [])
        by_name = {one.name: one for one in body}
        for one in body:
            yield times, one, by_name.__getitem__
            for called in one.called:
                yield from self._run(called, times * one.trips)


def parse(text: str) -> Module:
    """Return the computations of a program's text. Raises ValueError where it has no entry."""
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
            current.append(_instruction(match[1], match[2], "ROOT " in line[: match.start(2)]))
    if not entry:
        raise ValueError("expected a program with an entry, got a text without one")
    first_line, _, _ = text.partition("\n")
    return Module(computations, entry, frozenset(map(int, _DONATED.findall(first_line))))


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type_text, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    last = _closing(rest, len(opcode))
    inside = rest[len(opcode) + 1 : last]
    operands = tuple(_OPERAND.findall(inside))
    return Instruction(name, type_text, opcode, operands, inside, rest[last + 1 :], is_root)


def _closing(text: str, first: int) -> int:
    """Return the place of the parenthesis that closes the one at `first`."""
    depth = 0
    for at in range(first, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
    return len(text) - 1


def _array(match: re.Match[str]) -> Array:
    dtype, sizes_text, layout = match[1], match[2], match[3] or ""
    sizes = [int(size.strip("<= ")) for size in sizes_text.split(",") if size.strip()]
    space = _SPACE.search(layout)
    bits = ITEM_BITS.get(dtype)
    if bits is None:
        width = re.search(r"\d+", dtype)
        bits = int(width[0]) if width else 8
    num_bytes = -(-prod(_padded(sizes, layout)) * bits // 8)
    text = f"{dtype}[{sizes_text}]"
    return Array(text, num_bytes, on_device=space is None or space[1] == "0")


def _padded(sizes: list[int], layout: str) -> list[int]:
    """Return the sizes in whole tiles of the layout: minor dimensions first, as it names them."""
    tile = _TILE.search(layout)
    order = [int(n) for n in layout.partition(":")[0].split(",") if n]
    if tile is None or len(order) != len(sizes):
        return sizes
    padded, tiles = list(sizes), [int(n) for n in tile[1].split(",")]
    for dimension, size in zip(order, reversed(tiles), strict=False):
        padded[dimension] = -(-padded[dimension] // size) * size
    return padded


@dataclasses.dataclass(frozen=True)
class Moved:
    """The times that a kind of collective runs, and the bytes of its larger side, of one device."""

    count: int = 0
    num_bytes: int = 0


def collectives_of(module: Module) -> dict[str, Moved]:
    """Return the collectives of a program by kind."""
    found: dict[str, Moved] = {}
    for times, one, by_name in module.run():
        kind = one.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        given = sum(by_name(name).num_bytes for name in one.operands)
        result = one.num_bytes
        if one.opcode.endswith("-start") and one.type_text.startswith("(") and result > given:
            result -= given  # such a result names its operands too
        before = found.get(kind, Moved())
        size = before.num_bytes + times * max(given, result)
        found[kind] = Moved(before.count + times, size)
    return found


# custom calls that compute nothing: memory, views, marks
BOOKKEEPING = {
    *("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "ZeroCrop", "Sharding"),
    *("PrepareAsyncCallStart", "PrepareAsyncCallDone", "GatherScatterIndicesBitpacked"),
}


def kernels_of(module: Module) -> dict[str, int]:
    """Return the kernels that a program calls, by name, with how often they run."""
    found = collections.Counter[str]()
    for times, one, _ in module.run():
        if one.opcode != "custom-call":
            continue
        target = one.quoted("custom_call_target")
        if target in BOOKKEEPING:
            continue
        name = one.quoted("kernel_name") or one.op_name.rpartition("/")[2]
        kernel = target in ("tpu_custom_call", "mosaic_gpu_v2", "mosaic_gpu", "triton_kernel_call")
        found[f"{target} {name}" if kernel and name else target] += times
    return dict(found)

"""The largest arrays that live at a program's peak of memory, by name.

A walk over the instructions in the order in which they run: an array lives from where it is made
to where it is last read. Results stand in the place of an operand of their size that is not read
later, as XLA has them wherever it can, so that the sum is close to what the compiler gives, not
equal to it. Arguments live all the time but for those that are donated.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

from rl.targets.hlo import Array, Instruction, Module

# what gives its operand under another name
SAME = {"bitcast", "optimization-barrier", "all-reduce-done", "while", "reshape"}
COPIES = {"copy", "copy-start", "convert", "transpose", "slice-start"}
SECOND = {
    "slice-done",
    "dynamic-slice-done",
    "dynamic-update-slice-done",
    "all-gather-done",
    "collective-permute-done",
    "async-done",
    "async-update",
}
# whose results never lie where an operand did
APART = {"copy", "dot", "convolution", "custom-call", "transpose", "gather", "reduce", "all-gather"}
VIEWS = {"ConcatBitcast", "AssumeGatherIndicesInBound"}  # custom calls
NO_MEMORY = {"constant", "partition-id", "replica-id", "iota", "after-all"}


@dataclasses.dataclass(frozen=True)
class Live:
    """Arrays that live together: their shape and name, how many there are, and all their bytes."""

    name: str
    shape: str
    count: int
    num_bytes: int


@dataclasses.dataclass
class _Storage:
    array: Array
    name: str
    first: int
    last: int


def largest_live(module: Module, most: int = 8) -> tuple[int, list[Live]]:
    """Return the bytes of all arrays at the peak, and the largest of them.

    Arrays whose names differ in numbers alone, such as those of layers, count together.
    """
    peak, arrays = _peak(module, module.entry, is_entry=True)
    groups = collections.defaultdict[tuple[str, str], list[int]](list)
    for name, array in arrays:
        groups[re.sub(r"\d+", "#", name), array.text].append(array.num_bytes)
    found = [Live(name, text, len(x), sum(x)) for (name, text), x in groups.items()]
    return peak, sorted(found, key=lambda one: -one.num_bytes)[:most]


def _peak(module: Module, name: str, *, is_entry: bool) -> tuple[int, list[tuple[str, Array]]]:
    """Return the bytes at the peak of a computation, and the arrays there with their names."""
    body = module.computations.get(name, [])
    storages = _storages(body, module.donated if is_entry else None)
    inner: dict[int, tuple[int, list[tuple[str, Array]]]] = {}
    for at, one in enumerate(body):
        if one.opcode == "fusion" or not one.called:
            continue
        if one.opcode in ("while", "conditional", "call", "async-start"):
            inner[at] = max((_peak(module, c, is_entry=False) for c in one.called), key=_bytes)
    changes = collections.Counter[int]()
    for storage in storages:
        changes[storage.first] += storage.array.num_bytes
        changes[storage.last + 1] -= storage.array.num_bytes
    now, best, best_at = 0, -1, 0
    for at in range(len(body)):
        now += changes[at]
        total = now + inner.get(at, (0, []))[0]
        if total > best:
            best, best_at = total, at
    live = [(s.name, s.array) for s in storages if s.first <= best_at <= s.last]
    return max(best, 0), live + inner.get(best_at, (0, []))[1]


def _bytes(found: tuple[int, list[tuple[str, Array]]]) -> int:
    return found[0]


def _storages(body: list[Instruction], donated: frozenset[int] | None) -> list[_Storage]:
    """Return the memory that a computation's own arrays take, from its first to its last use."""
    values = _Values(body, donated)
    merged: dict[int, int] = {}  # a storage, and that whose place it takes

    def place(one: int) -> int:
        while one in merged:
            one = merged[one]
        return one

    found = values.storages
    for at, made in values.made.items():
        one = body[at]
        dying = {
            place(s)
            for name in one.operands
            for s in values.flat(name)
            if found[place(s)].last == at
        }
        for new in made:
            size = found[new].array.num_bytes
            old = next((s for s in dying if found[s].array.num_bytes == size), None)
            if old is not None and one.opcode not in APART:
                dying.discard(old)
                merged[new] = old
                found[old].last = max(found[old].last, found[new].last)
    return [s for i, s in enumerate(found) if i not in merged and s.array.on_device]


class _Values:
    """The parts of each instruction's result: numbers of storages, nested as its tuples are.

    Parameters have storages of their own in the entry, where some are `donated`.
    """

    def __init__(self, body: list[Instruction], donated: frozenset[int] | None) -> None:
        self.storages: list[_Storage] = []
        self.made: dict[int, list[int]] = {}  # by instruction, whose operands may give the place
        self._body, self._donated = body, donated
        self._of: dict[str, Any] = {}
        self._num_arrays = {one.name: len(one.arrays) for one in body}
        for at, one in enumerate(body):
            for name in one.operands:
                for storage in self.flat(name):
                    self.storages[storage].last = max(at, self.storages[storage].last)
            self._of[one.name] = self._value(at, one)
            if one.is_root:
                for storage in self.flat(one.name):
                    self.storages[storage].last = len(body)

    def flat(self, name: str) -> list[int]:
        """Return all storages of an instruction's result."""
        return _flat(self._of.get(name, []))

    def _value(self, at: int, one: Instruction) -> Any:
        given = [self._of.get(name, []) for name in one.operands]
        if one.opcode == "parameter":
            if self._donated is None:
                return []  # what it is given is counted where it is called
            given_up = int(one.inside) in self._donated
            return self._new(at, one, at if given_up else len(self._body))
        if (one.opcode in SAME or one.quoted("custom_call_target") in VIEWS) and given:
            return given[0] if len(given) == 1 else [x for value in given for x in _flat(value)]
        if one.opcode == "tuple":
            return given
        if one.opcode == "get-tuple-element":
            index = int(one.rest.partition("index=")[2].partition(",")[0] or 0)
            whole = given[0] if given and isinstance(given[0], list) else []
            return whole[index] if index < len(whole) else []
        if one.opcode == "copy-done":
            return given[0][0] if given and given[0] else []
        if one.opcode in SECOND and given and isinstance(given[0], list) and len(given[0]) > 1:
            return given[0][1]
        if one.opcode in NO_MEMORY:
            return []
        return self._new(at, one, at)

    def _new(self, at: int, one: Instruction, last: int) -> Any:
        """Return new storages for the result's arrays, in a tuple's order."""
        numbers, first = [], 0 if one.opcode == "parameter" else at
        name = one.op_name or self._name_of(one)
        for array in one.arrays:
            numbers.append(len(self.storages))
            self.storages.append(_Storage(array, name, first, last))
        if one.opcode != "parameter":
            self.made[at] = list(numbers)
        if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
            return self._started(one, numbers)
        return numbers if one.type_text.startswith("(") else numbers[0] if numbers else []

    def _name_of(self, one: Instruction) -> str:
        """Return a name for what the source program does not name: of what it is made from."""
        given = [s for operand in one.operands for s in self.flat(operand)]
        if not given or one.opcode not in COPIES:
            return one.name
        return f"copy of {self.storages[given[0]].name.removeprefix('copy of ')}"

    def _started(self, one: Instruction, numbers: list[int]) -> Any:
        """Return the value of what runs beside others: its operands, or copies of them, and more.

        A copy names its result first, the others their operands.
        """
        given = [self._of.get(name, []) for name in one.operands]
        count = sum(self._num_arrays.get(name, 0) for name in one.operands)
        own = numbers[:1] if one.opcode == "copy-start" else numbers[count:]
        for number in set(numbers) - set(own):
            storage = self.storages[number]
            storage.array = dataclasses.replace(storage.array, num_bytes=0)
        if one.opcode == "copy-start":
            return own
        return [given, own[0] if own else []]


def _flat(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [number for part in value for number in _flat(part)]

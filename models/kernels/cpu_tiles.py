"""Tiles of products on CPUs: sums of vectors that stay in registers, in LLVM code.

numba has no vectors, and keeps sums in memory. A tile is a function for numba that gets addresses
(int64) of float32 numbers, and strides in numbers. Each lane adds its terms one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
LINE = 16  # numbers of a line of memory
FLOAT, WORD, INDEX = ir.FloatType(), ir.IntType(64), ir.IntType(32)
VECTOR = ir.VectorType(FLOAT, LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)
_FMA = f"llvm.fmuladd.v{LANES}f32", ir.FunctionType(VECTOR, [VECTOR] * 3)
_BYTE = ir.IntType(8).as_pointer()
_FETCH = "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [_BYTE, *[INDEX] * 3])


class Code:
    """Writes the code of a tile."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def number(self, value: int) -> Any:
        return ir.Constant(WORD, value)

    def place(self, array: Any, row: int, stride: Any, at: Any) -> Any:
        """Return the address of a number: `at` in a row."""
        b = self.builder
        number = b.add(b.mul(self.number(row), stride), at)
        return b.add(array, b.mul(number, self.number(4)))

    def load(self, address: Any, kind: Any = VECTOR) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)

    def store(self, value: Any, address: Any) -> None:
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=4)

    def everywhere(self, number: Any) -> Any:
        """Return a vector with a number in every lane."""
        b = self.builder
        one = b.insert_element(ir.Constant(VECTOR, ir.Undefined), number, ir.Constant(INDEX, 0))
        return self.shuffled(one, one, [0] * LANES)

    def shuffled(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        kind = ir.VectorType(INDEX, len(lanes))
        return self.builder.shuffle_vector(a, b, ir.Constant(kind, list(lanes)))

    def multiplied(self, a: Any, b: Any, total: Any) -> Any:
        """Return a · b + total."""
        return self._call(_FMA, a, b, total)

    def fetch(self, address: Any) -> None:
        """Have a line brought from memory."""
        line = self.builder.inttoptr(address, _BYTE)
        self._call(_FETCH, line, *(ir.Constant(INDEX, n) for n in (0, 3, 1)))

    def _call(self, function: tuple[str, Any], *arguments: Any) -> Any:
        name, kind = function
        found = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(found, arguments)

    def sums(
        self, first: Sequence[Any], count: Any, step: int, body: Callable[[Any, list], list]
    ) -> list[Any]:
        """Return the sums after `body(i, sums)` for i = 0, step … below count."""
        b = self.builder
        before, loop = b.block, b.append_basic_block("terms")
        after = b.append_basic_block("sums")
        b.cbranch(b.icmp_unsigned("<", self.number(0), count), loop, after)
        b.position_at_end(loop)
        i = b.phi(WORD)
        i.add_incoming(self.number(0), before)
        sums = [b.phi(VECTOR) for _ in first]
        totals = body(i, list(sums))
        for one, start, total in zip(sums, first, totals, strict=True):
            one.add_incoming(start, before)
            one.add_incoming(total, loop)
        following = b.add(i, self.number(step))
        i.add_incoming(following, loop)
        b.cbranch(b.icmp_unsigned("<", following, count), loop, after)
        b.position_at_end(after)
        found = [b.phi(VECTOR) for _ in first]
        for one, start, total in zip(found, first, totals, strict=True):
            one.add_incoming(start, before)
            one.add_incoming(total, loop)
        return found


def tile(write: Callable[..., None]) -> Any:
    """Return a function for numba of words, whose code `write(code, *words)` writes."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        [words] = arguments
        write(Code(builder), *cgutils.unpack_tuple(builder, words))
        return ir.Constant(WORD, 0)

    def typed(_typing: Any, *words: Any) -> Any:
        return types.int64(types.StarArgTuple.from_types(words)), code

    return intrinsic(typed)

"""Tiles of products on CPUs: sums of vectors that stay in registers, in LLVM code.

numba has no vectors and keeps sums in memory. A tile is a numba function that takes addresses
(int64) of float32 numbers, and strides in numbers. Each lane adds its terms in sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
LINE = 16  # numbers per line of memory
FLOAT = ir.FloatType()
HALF = ir.IntType(16)
WORD = ir.IntType(64)
INDEX = ir.IntType(32)
_BYTE = ir.IntType(8).as_pointer()
_FETCH = "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [_BYTE, *[INDEX] * 3])


def _has_wide_registers() -> bool:
    """Return whether numba compiles for AVX-512, with 32 registers of sixteen numbers each."""
    features = numba.config.CPU_FEATURES  # from the environment
    if features is None:
        features = llvmlite.binding.get_host_cpu_features().flatten()
    return "+avx512f" in features.split(",")


HAS_WIDE_REGISTERS = _has_wide_registers()  # else AVX2, with 16 of eight numbers


class Code:
    """A builder for the code of a tile."""

    def __init__(self, builder: Any, lanes: int) -> None:
        self.builder = builder
        self.lanes = lanes
        self.vector = ir.VectorType(FLOAT, lanes)
        self.zero = ir.Constant(self.vector, [0.0] * lanes)

    def number(self, value: int) -> Any:
        return ir.Constant(WORD, value)

    def place(self, array: Any, row: int, stride: Any, at: Any, size_bytes: int = 4) -> Any:
        """Return the address of number `at` in a row."""
        b = self.builder
        number = b.add(b.mul(self.number(row), stride), at)
        return b.add(array, b.mul(number, self.number(size_bytes)))

    def load(self, address: Any, kind: Any = None) -> Any:
        kind = kind or self.vector
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)

    def load_halves(self, address: Any) -> Any:
        """Load bfloat16 numbers, the upper halves of float32."""
        b = self.builder
        words = ir.VectorType(INDEX, self.lanes)
        pointer = b.inttoptr(address, ir.VectorType(HALF, self.lanes).as_pointer())
        bits = b.zext(b.load(pointer, align=2), words)
        return b.bitcast(b.shl(bits, ir.Constant(words, [16] * self.lanes)), self.vector)

    def store(self, value: Any, address: Any) -> None:
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=4)

    def everywhere(self, number: Any) -> Any:
        """Return a vector with a number in every lane."""
        b = self.builder
        nothing = ir.Constant(self.vector, ir.Undefined)
        one = b.insert_element(nothing, number, ir.Constant(INDEX, 0))
        return self.shuffled(one, one, [0] * self.lanes)

    def shuffled(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        kind = ir.VectorType(INDEX, len(lanes))
        return self.builder.shuffle_vector(a, b, ir.Constant(kind, list(lanes)))

    def multiplied(self, a: Any, b: Any, total: Any) -> Any:
        """Return a · b + total."""
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        return self._call((f"llvm.fmuladd.v{self.lanes}f32", kind), a, b, total)

    def fetch(self, address: Any) -> None:
        """Prefetch one line of memory into the second-level cache of the core.

        That cache can wait for more lines concurrently than the first level.
        """
        line = self.builder.inttoptr(address, _BYTE)
        self._call(_FETCH, line, *(ir.Constant(INDEX, n) for n in (0, 2, 1)))

    def _call(self, function: tuple[str, Any], *arguments: Any) -> Any:
        name, kind = function
        found = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(found, arguments)

    def cases(self, word: Any, bodies: Mapping[int, Callable[[], None]]) -> None:
        """Run the body for the value of a word, which must be a key of `bodies`."""
        b = self.builder
        choice = b.block
        after = b.append_basic_block("after")
        never = b.append_basic_block("never")
        b.position_at_end(never)
        b.unreachable()
        b.position_at_end(choice)
        switch = b.switch(word, never)
        for value, body in bodies.items():
            block = b.append_basic_block(f"case_{value}")
            switch.add_case(self.number(value), block)
            b.position_at_end(block)
            body()
            b.branch(after)
        b.position_at_end(after)

    def sums(
        self, first: Sequence[Any], count: Any, step: int, body: Callable[[Any, list], list]
    ) -> list[Any]:
        """Return the sums after `body(i, sums)` for i = 0, step … below count."""
        b = self.builder
        before = b.block
        loop = b.append_basic_block("terms")
        after = b.append_basic_block("sums")
        b.cbranch(b.icmp_unsigned("<", self.number(0), count), loop, after)
        b.position_at_end(loop)
        i = b.phi(WORD)
        i.add_incoming(self.number(0), before)
        sums = [b.phi(self.vector) for _ in first]
        totals = body(i, list(sums))
        for one, start, total in zip(sums, first, totals, strict=True):
            one.add_incoming(start, before)
            one.add_incoming(total, loop)
        following = b.add(i, self.number(step))
        i.add_incoming(following, loop)
        b.cbranch(b.icmp_unsigned("<", following, count), loop, after)
        b.position_at_end(after)
        found = [b.phi(self.vector) for _ in first]
        for one, start, total in zip(found, first, totals, strict=True):
            one.add_incoming(start, before)
            one.add_incoming(total, loop)
        return found


def tile(write: Callable[..., None], lanes: int = LANES) -> Any:
    """Return a numba function of words, with the code that `write(code, *words)` writes."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        [words] = arguments
        write(Code(builder, lanes), *cgutils.unpack_tuple(builder, words))
        return ir.Constant(WORD, 0)

    def typed(_typing: Any, *words: Any) -> Any:
        return types.int64(types.StarArgTuple.from_types(words)), code

    return intrinsic(typed)

"""Figures of compiled programs: memory, operations, collectives, kernels, live arrays.

    needed by a program = arguments + outputs − aliases + temporaries     (bytes of one device)

Programs that run a deep model may be compiled at two smaller depths instead: every figure is
linear in the number of layers but for what XLA decides differently (where memory is short it orders
a program by that), so that

    figure(L) = figure(a) + (figure(b) − figure(a)) · (L − a) / (b − a)
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl.targets.hlo import Moved, collectives_of, kernels_of, parse
from rl.targets.live import Live, largest_live
from rl.targets.run_shapes import RunProgram
from rl.targets.table import Target
from rl.targets.topologies import COMPILER_OPTIONS

_OF_NEEDED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of one program on one device; seconds and operations None where nobody says.

    `compiled_s` are those of the compiler at work, on this machine. `refused`: the compiler gave
    up, since it needs more memory than a device has; only `needed_bytes` is known then.
    """

    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temporary_bytes: int = 0
    operations: float | None = None
    compiler_s: float | None = None
    collectives: Mapping[str, Moved] = dataclasses.field(default_factory=dict)
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    live: tuple[Live, ...] = ()
    compiled_s: float = 0.0
    refused: str = ""

    @property
    def needed_bytes(self) -> int:
        """Arguments, temporaries, and what comes out beside the arguments."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


@dataclasses.dataclass(frozen=True)
class Measured:
    """A program with its figures, and the roofline's seconds of it."""

    program: RunProgram
    figures: Figures
    roofline_s: float | None

    @property
    def beyond_held_bytes(self) -> int:
        """Return the bytes that it needs of a device beyond what lies there between programs."""
        return self.figures.needed_bytes - self.program.held_bytes


def compiled_figures(program: RunProgram, target: Target) -> Figures:
    """Compile a program for the target, and read what its compiler says of it.

    Where its memory is more than a device's the compiler's own figure is all there is.
    """
    began_s = time.perf_counter()
    options = COMPILER_OPTIONS.get(target.kind.platform)
    try:
        compiled = program.lower().compile(compiler_options=options)
    except Exception as error:
        needed = _needed(error)
        if needed is None:
            raise
        return Figures(temporary_bytes=needed, refused=str(error).partition("\n")[0][:300])
    taken_s = time.perf_counter() - began_s
    memory, costs = compiled.memory_analysis(), _costs(compiled)
    module = parse(compiled.as_text())
    seconds = costs.get("optimal_seconds", 0.0)
    return Figures(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        operations=costs.get("flops") if costs.get("flops", 0.0) > 0 else None,
        compiler_s=seconds if seconds > 0 else None,  # negative where its model has no meaning
        collectives=collectives_of(module),
        kernels=kernels_of(module),
        live=tuple(largest_live(module)[1]),
        compiled_s=taken_s,
    )


def _costs(compiled: Any) -> Mapping[str, float]:
    """The compiler's costs; GPUs have none."""
    try:
        return compiled.cost_analysis() or {}
    except (NotImplementedError, RuntimeError):
        return {}


def _needed(error: Exception) -> int | None:
    """Return the bytes that a compiler says a program needs, where that is why it gave up."""
    text = str(error)
    found = _OF_NEEDED.search(text)
    if found and ("RESOURCE_EXHAUSTED" in text or "hbm" in text):
        return int(float(found[1]) * _UNITS[found[2]])
    return None


def extrapolated(few: Figures, more: Figures, depths: Sequence[int], layers: int) -> Figures:
    """Return the figures of a program of so many layers from those of two smaller depths."""
    ways = (layers - depths[0]) / (depths[1] - depths[0])

    def line(a: float | None, b: float | None) -> Any:
        return None if a is None or b is None else a + (b - a) * ways

    def whole(a: int, b: int) -> int:
        return max(0, round(line(a, b)))

    def moved(kind: str) -> Moved:
        a, b = (x.collectives.get(kind, Moved()) for x in (few, more))
        return Moved(whole(a.count, b.count), whole(a.num_bytes, b.num_bytes))

    kinds = sorted(few.collectives.keys() | more.collectives.keys())
    kernels = sorted(few.kernels.keys() | more.kernels.keys())
    counts = {name: (few.kernels.get(name, 0), more.kernels.get(name, 0)) for name in kernels}
    return Figures(
        argument_bytes=whole(few.argument_bytes, more.argument_bytes),
        output_bytes=whole(few.output_bytes, more.output_bytes),
        alias_bytes=whole(few.alias_bytes, more.alias_bytes),
        temporary_bytes=whole(few.temporary_bytes, more.temporary_bytes),
        operations=line(few.operations, more.operations),
        compiler_s=line(few.compiler_s, more.compiler_s),
        collectives={kind: moved(kind) for kind in kinds},
        kernels={name: whole(*both) for name, both in counts.items()},
        live=_live_at(few.live, more.live, ways),
        compiled_s=few.compiled_s + more.compiled_s,
        refused=few.refused or more.refused,
    )


def _live_at(few: tuple[Live, ...], more: tuple[Live, ...], ways: float) -> tuple[Live, ...]:
    """Return the live arrays by their name and shape, as many as so many layers have."""
    before = {(one.name, one.shape): one for one in few}
    found = []
    for one in more:
        old = before.get((one.name, one.shape), one)
        count = max(one.count, round(old.count + (one.count - old.count) * ways))
        size = one.num_bytes // one.count
        found.append(Live(one.name, one.shape, count, count * size))
    return tuple(sorted(found, key=lambda one: -one.num_bytes))


def roofline_s(program: RunProgram, figures: Figures, target: Target, params: int) -> float | None:
    """Return max(operations / peak, bytes / bandwidth) + collectives / link; None on a CPU.

    `params` meet every token in each pass, 2 operations each. Bytes are those of arguments and of
    results that are no arguments, each once.
    """
    device = target.kind.figures
    if device is None or figures.refused:
        return None
    operations = 2.0 * params * program.tokens * program.passes / target.count
    bytes_once = figures.argument_bytes + figures.output_bytes - figures.alias_bytes
    work_s = max(
        max(operations, figures.operations or 0.0) / device.operations_per_s,
        bytes_once / device.bytes_per_s,
    )
    # a sum goes around twice: once to be added up, once to be handed out
    moved = sum(
        one.num_bytes * (2 if kind == "all-reduce" else 1)
        for kind, one in figures.collectives.items()
    )
    return work_s + moved / device.link_bytes_per_s

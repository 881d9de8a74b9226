"""The warm-up in two parts: the programs of longer responses follow a run's first step.

The longer buckets of positions have as many programs as the first, and a first step rarely gets
there. They are compiled once its rewards are shown, or as soon as a response grows into one of
them before; after that nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from models.transformer import Params
from rl.cluster.processes import ALONE, Processes
from rl.runtime.parallel_compile import OnCompiled, unwatched
from rl.runtime.signals import COMPILING, Watch
from rl.warm_up import compile_buckets, round_times
from rl.warm_up.rollout_programs import Pool
from spec.round_times import RoundTimes


def first_positions(pool: Pool) -> int:
    """Return the positions that rollouts begin with, whatever the number of their slots."""
    longest = pool.reach.max_prompt_tokens
    sizes = [pool.engine.round_positions(B) for B in pool.slots]
    return max(next((s for s in found if s > longest), found[-1]) for found in sizes)


class LongerBuckets:
    """The warm-up of one engine whose longer buckets of positions wait for the first step.

    `told` is called while they are compiled, and may raise. Between the two parts weights are
    not kept, but for their shapes: training may donate them.
    """

    def __init__(self, pool: Pool, watch: Watch, told: OnCompiled = unwatched) -> None:
        self.most_positions = first_positions(pool)
        self.done = False
        self._pool, self._watch, self._told = pool, watch, told
        programs, most = pool.programs(), self.most_positions
        self._first = [program for program in programs if program.num_positions <= most]
        self._longer = [program for program in programs if program.num_positions > most]
        self._compiled = False

    def warm_up(self, told: OnCompiled = unwatched, others: Sequence[Any] = ()) -> None:
        """Compile and run what needs at most `most_positions`, as `compile_buckets.warm_up`."""
        pool = self._pool
        compile_buckets.compile_programs(pool.engine, self._first, told, others)
        compile_buckets.run_once(pool.engine, self._first)
        pool.params = jax.tree.map(_shape, pool.params)
        pool.engine.before_positions = self._before_positions

    def _before_positions(self, num_positions: int) -> None:
        if num_positions > self.most_positions:
            self._compile()

    def _compile(self) -> None:
        if self._longer and not self._compiled:
            with self._watch.within(COMPILING):
                compile_buckets.compile_programs(self._pool.engine, self._longer, self._told)
        self._compiled = True

    def finish(
        self,
        params: Params,
        path: Path,
        times: RoundTimes | None,
        *,
        processes: Processes = ALONE,
    ) -> None:
        """Compile the rest and run it once; measure its rounds for `times`, where there are any.

        The table of measured rounds is written to `path`; the rest is as of
        `rl.warm_up.round_times.load_or_measure`.
        """
        if self.done:
            return
        self._compile()
        pool = self._pool
        with self._watch.within(COMPILING):
            placed = pool.params = pool.engine.place(params)
            compile_buckets.run_once(pool.engine, self._longer)
            if times is not None:
                rest = placed, pool.sampling, pool.reach, self.most_positions
                round_times.complete(path, times, pool.engine, *rest, processes=processes)
        self._pool.params = jax.tree.map(_shape, placed)
        self.done = True


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the array's shape, which a step can be lowered on."""
    sharding = x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

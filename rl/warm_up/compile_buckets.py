"""Compile the programs of rollouts before the first step; later steps compile nothing.

Each program is lowered on the shapes of engine arrays, compiled in a thread, then run once on idle
slots, which proves that calls find the compiled program. With one engine, the programs of longer
responses follow after the first step (`LongerBuckets`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from reprise.models import transformer
from reprise.models.transformer import Params
from reprise.rl.cluster.processes import ALONE, Processes
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec, draft_with
from reprise.rl.records.trajectory import Request
from reprise.rl.runtime.parallel_compile import OnCompiled, compile_all, unwatched
from reprise.rl.runtime.signals import COMPILING, Watch
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.device_drafters import NO_DRAFTERS, DeviceDrafters, DrafterSource
from reprise.rl.speculation.sources import Speculation
from reprise.rl.warm_up import round_times
from reprise.rl.warm_up.rollout_programs import WHOLE_MODEL, Pool, Program, Reach
from reprise.spec.budget.budget import SeeingBudget
from reprise.spec.budget.config import TunerConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Program as DrafterProgram
from reprise.spec.reuse.rollout_cache import CachedGroup, CachedResponse, RolloutCache
from reprise.spec.round_times import RoundTimes
from reprise.spec.sampling import step_key

REHEARSED_TOKENS = 24  # of a response, at most


def warm_up(
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    reach: Reach,
    on_compiled: OnCompiled = unwatched,
    others: Sequence[Any] = (),
) -> int:
    """Compile the programs that rollouts can reach; return their number.

    `others` are lowered training steps, compiled concurrently. `on_compiled` is called with the
    number of compiled programs. Raises TooManyMappings if Linux allows a process too few memory
    mappings.
    """
    programs = Pool(engine, params, sampling, reach).programs()
    compile_programs(engine, programs, on_compiled, others)
    run_once(engine, programs)
    return len(programs)


def compile_programs(
    engine: Engine,
    programs: Sequence[Program],
    on_compiled: OnCompiled = unwatched,
    others: Sequence[Any] = (),
) -> None:
    """Compile `programs` and `others` as in `warm_up`, without running them."""
    with engine.mesh_context():
        steps = itertools.chain(others, (lowered(engine, program) for program in programs))
        compile_all(steps, len(others) + len(programs), on_compiled)


def lowered(engine: Engine, program: Program) -> Any:
    """Return the program lowered on shapes, under the mesh or device of the engine."""
    with engine.shapes_only():
        args, kwargs = program.arguments()
        return program.step.lower(*args, **kwargs)


def run_once(engine: Engine, programs: Sequence[Program]) -> None:
    """Run each compiled program on idle slots."""

    def run(program: Program) -> None:  # frees the arguments of a program before the next
        args, kwargs = program.arguments()
        jax.block_until_ready(program.step(*args, **kwargs))

    with engine.mesh_context():
        for program in programs:
            run(program)


def prepare(
    engine: Engine, programs: Iterable[DrafterProgram], on_compiled: OnCompiled = unwatched
) -> None:
    """Compile the programs of drafters on an engine, and run each once."""
    own = [Program(*program) for program in programs]
    compile_programs(engine, own, on_compiled)
    run_once(engine, own)


def num_whole_model(engine: Engine, sampling: SamplingConfig, reach: Reach) -> int:
    """Return how many programs run the whole policy, and thus take long to compile."""
    weights: Any = None  # no program arguments are made
    pool = Pool(engine, weights, sampling, reach)
    return sum(program.step in WHOLE_MODEL for program in (*pool.plain(), *pool.trees()))


class LongerBuckets:
    """The warm-up of one engine that compiles longer buckets of positions after the first step.

    Longer buckets are compiled after the rewards of the first step are shown, or earlier once a
    response grows into such a bucket. `on_compiled` is called during compilation, and may raise.
    Between the two parts only shapes of the weights are kept, since training may donate the
    weights.
    """

    def __init__(self, pool: Pool, watch: Watch, on_compiled: OnCompiled = unwatched) -> None:
        sizes = [pool.engine.round_positions(B) for B in pool.slots]
        prompt = pool.reach.max_prompt_tokens
        # the positions that rollouts start with, for any number of slots
        self.max_positions = limit = max(
            next((s for s in some if s > prompt), some[-1]) for some in sizes
        )
        self.done = False
        self._pool, self._watch, self._on_compiled = pool, watch, on_compiled
        programs = pool.programs()
        self._first = [program for program in programs if program.num_positions <= limit]
        self._longer = [program for program in programs if program.num_positions > limit]
        self._compiled = False

    def warm_up(self, on_compiled: OnCompiled = unwatched, others: Sequence[Any] = ()) -> None:
        """Compile and run programs of up to `max_positions`, like the function `warm_up`."""
        pool = self._pool
        compile_programs(pool.engine, self._first, on_compiled, others)
        run_once(pool.engine, self._first)
        pool.params = jax.tree.map(_shape, pool.params)
        pool.engine.before_positions = self._before_positions

    def _before_positions(self, num_positions: int) -> None:
        if num_positions > self.max_positions:
            self._compile()

    def _compile(self) -> None:
        if self._longer and not self._compiled:
            with self._watch.within(COMPILING):
                compile_programs(self._pool.engine, self._longer, self._on_compiled)
        self._compiled = True

    def finish(
        self,
        params: Params,
        path: Path,
        times: RoundTimes | None,
        *,
        speculation: SpeculationConfig = round_times.TEXT_DRAFTS,
        processes: Processes = ALONE,
    ) -> None:
        """Compile and run the longer buckets; measure their rounds for `times`, unless it is None.

        The table is written to `path`, as in `rl.warm_up.round_times.load_or_measure`.
        """
        if self.done:
            return
        self._compile()
        pool = self._pool
        with self._watch.within(COMPILING):
            placed = pool.params = pool.engine.place(params)
            run_once(pool.engine, self._longer)
            if times is not None:
                round_times.complete(
                    path,
                    times,
                    pool.engine,
                    placed,
                    pool.sampling,
                    pool.reach,
                    self.max_positions,
                    speculation=speculation,
                    processes=processes,
                )
        pool.params = jax.tree.map(_shape, placed)
        self.done = True


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape of an array, for lowering a step."""
    sharding = x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def compile_host_kernels(
    config: SpeculationConfig,
    times: RoundTimes,
    engine: Engine,
    params: Params,
    sampling: SamplingConfig,
    drafters: DeviceDrafters = NO_DRAFTERS,
    tuner: TunerConfig | None = None,
    apart: Mapping[str, DrafterSource] | None = None,
) -> None:
    """Compile the kernels of the host in two short rollouts of made-up prompts, after `warm_up`.

    The first rollout verifies draft tokens, the second has the budget of `config`.
    """
    prompt, tokens = (0, 1), np.arange(8, dtype=np.int32) % 2
    cached = tuple(CachedResponse(i, tokens, 0.0, None) for i in range(2))
    cache = RolloutCache()
    cache.replace("rehearsal", CachedGroup(np.asarray(prompt, np.int32), cached))
    # end tokens that are never drawn; their number stays, since it sets a shape
    num_ends = len({*engine.model.eos_token_ids, *sampling.stop_ids})
    no_stop = tuple(range(-1 - num_ends, -1))
    limit = min(REHEARSED_TOKENS, sampling.max_new_tokens)
    sampling = dataclasses.replace(sampling, stop_ids=(), stop=(), by_task=())
    requests = [Request(i, prompt, 0, i, limit) for i in range(2)]
    with Speculation(config, cache, drafters, tuner) as speculation:
        speculation.times, speculation.apart = times, apart or {}
        for fixed in (SeeingBudget(2), None):
            drafts = speculation.drafter_factory(
                ["rehearsal"], [prompt], dict.fromkeys(range(2), tokens)
            )
            spec = RolloutSpec(params, sampling, step_key(0, 0), no_stop)
            drafter, budget = drafts(engine.drafter_context(spec))
            drafts = draft_with(drafter, fixed or budget)
            engine.run(dataclasses.replace(spec, drafts=drafts), requests)

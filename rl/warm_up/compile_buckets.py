"""Compile the programs of rollouts before the first step; later steps compile nothing.

Each program is lowered on the shapes of engine arrays, compiled in a thread, then run once on idle
slots, which proves that calls find the compiled program.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from reprise.models.decoder import transformer
from reprise.models.decoder.transformer import Params
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec, draft_with
from reprise.rl.records.trajectory import Request
from reprise.rl.runtime.parallel_compile import OnCompiled, compile_all, unwatched
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.device_drafters import NO_DRAFTERS, DeviceDrafters, DrafterSource
from reprise.rl.speculation.sources import NOWHERE, Speculation, make_bandits
from reprise.rl.warm_up.rollout_programs import WHOLE_MODEL, Pool, Program, Reach
from reprise.spec.budget.budget import SeeingBudget
from reprise.spec.budget.config import TunerConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Program as DrafterProgram
from reprise.spec.reuse.rollout_cache import CachedGroup, CachedResponse, RolloutCache
from reprise.spec.round_times import RoundTimes
from reprise.spec.verification.sampling import step_key

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


def compile_host_kernels(
    config: SpeculationConfig,
    times: RoundTimes,
    engine: Engine,
    params: Params,
    sampling: SamplingConfig,
    drafters: DeviceDrafters = NO_DRAFTERS,
    tuner: TunerConfig | None = None,
    apart: Mapping[str, DrafterSource] = NOWHERE,
) -> None:
    """Compile the kernels of the host in two short rollouts of made-up prompts, after `warm_up`.

    The first rollout verifies draft tokens, the second has the budget of `config`.
    """
    prompt = (0, 1)
    tokens = np.arange(8, dtype=np.int32) % 2
    cached = tuple(CachedResponse(i, tokens, 0.0, None) for i in range(2))
    cache = RolloutCache()
    cache.replace("rehearsal", CachedGroup(np.asarray(prompt, np.int32), cached))
    # end tokens that are never drawn; their number stays, since it sets a shape
    num_ends = len({*engine.model.eos_token_ids, *sampling.stop_ids})
    no_stop = tuple(range(-1 - num_ends, -1))
    limit = min(REHEARSED_TOKENS, sampling.max_new_tokens)
    sampling = dataclasses.replace(sampling, stop_ids=(), stop=(), by_task=())
    requests = [Request(i, prompt, 0, i, limit) for i in range(2)]
    own = {name: drafter for name, drafter in drafters.items() if name not in apart}
    bandits = make_bandits(config, own, tuner or TunerConfig(), 0)
    with Speculation(
        config, cache, drafters, times=times, bandits=bandits, apart=apart
    ) as speculation:
        for fixed in (SeeingBudget(2), None):
            drafts = speculation.drafter_factory(
                ["rehearsal"], [prompt], dict.fromkeys(range(2), tokens)
            )
            spec = RolloutSpec(params, sampling, step_key(0, 0), no_stop)
            drafter, budget = drafts(engine.drafter_context(spec))
            drafts = draft_with(drafter, fixed or budget)
            engine.run(dataclasses.replace(spec, drafts=drafts), requests)

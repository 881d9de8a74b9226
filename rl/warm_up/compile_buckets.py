"""Compile an engine's pool of buckets before the first request needs one.

Every program is lowered on the shapes of the engine's arrays, all are compiled in
threads, then each runs once on slots at rest, which proves that calls find what
was compiled. After it, a rollout within the stated lengths compiles nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from models import transformer
from rl.engine.engine import Engine
from rl.runtime.parallel_compile import OnCompiled, compile_all, unwatched
from rl.warm_up.rollout_programs import WHOLE_MODEL, Pool, Program, Reach
from spec.config import SamplingConfig
from spec.drafter import Program as DrafterProgram


def warm_up(
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    reach: Reach,
    told: OnCompiled = unwatched,
    others: Sequence[Any] = (),
) -> int:
    """Compile what rollouts can reach; return the number of programs.

    `others` are steps of somebody else, lowered: they are compiled meanwhile, from the start on.
    `told` is called with the number of compiled programs. Raises TooManyMappings where the
    programs do not fit into what Linux allows a process.
    """
    pool = Pool(engine, params, sampling, reach)
    programs = pool.programs()
    compile_programs(engine, programs, told, others)
    run_once(engine, programs)
    return len(programs)


def compile_programs(
    engine: Engine,
    programs: Sequence[Program],
    told: OnCompiled = unwatched,
    others: Sequence[Any] = (),
) -> None:
    """Compile `programs`, and `others` as `warm_up` does; nothing runs."""
    with engine.mesh_context():
        steps = itertools.chain(others, _lowered(engine, programs))
        compile_all(steps, len(others) + len(programs), told)


def run_once(engine: Engine, programs: Sequence[Program]) -> None:
    """Run each compiled program on slots at rest."""

    def run(program: Program) -> None:  # what it is given is gone before the next one's is made
        args, kwargs = program.arguments()
        jax.block_until_ready(program.step(*args, **kwargs))

    with engine.mesh_context():
        for program in programs:
            run(program)


def prepare(
    engine: Engine, programs: Iterable[DrafterProgram], told: OnCompiled = unwatched
) -> None:
    """Compile what drafters run on an engine, and run each once."""
    found = [Program(*program) for program in programs]
    compile_programs(engine, found, told)
    run_once(engine, found)


def num_whole_model(engine: Engine, sampling: SamplingConfig, reach: Reach) -> int:
    """Return how many of the programs run the whole policy: those that take long to compile."""
    weights: Any = None  # no argument of a program is made
    pool = Pool(engine, weights, sampling, reach)
    programs = [*pool.plain(), *pool.trees()]
    return sum(program.step in WHOLE_MODEL for program in programs)


def _lowered(engine: Engine, programs: Sequence[Program]) -> Iterator[Any]:
    for program in programs:
        yield lowered(engine, program)


def lowered(engine: Engine, program: Program) -> Any:
    """Return the program lowered on shapes, under the engine's mesh or device."""
    with engine.shapes_only():
        args, kwargs = program.arguments()
        return program.step.lower(*args, **kwargs)

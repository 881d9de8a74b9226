"""Compile an engine's pool of buckets before the first request needs one.

Every program is lowered on the shapes of the engine's arrays, all are compiled in
threads, then each runs once on slots at rest, which proves that calls find what
was compiled. After it, a phase within the stated lengths compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from models import kv_cache, transformer
from models.attention import Packing
from rl.engine import cache_ops
from rl.engine.engine import Engine
from rl.engine.rollout_spec import DrafterContext, RolloutSpec
from rl.packing import Shape
from rl.runtime.parallel_compile import OnCompiled, compile_all, unwatched
from rl.speculation.device_drafters import NO_DRAFTERS, DeviceDrafters
from rl.speculation.learned_drafter import LearnedDrafter
from spec.buckets import bucket
from spec.config import SamplingConfig
from spec.reuse.packed_verify import PackedResponses, verify_packed
from spec.sampling import Processing, step_key
from spec.tree import DraftTree
from spec.verify import decode_rounds, verify_round

NodeSizes = Callable[[int], Collection[int]]  # of trees, by slots


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted step with a maker of its arguments (fresh ones: many are donated)."""

    step: Any
    arguments: Callable[[], tuple[tuple, dict[str, Any]]]


def warm_up(
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    *,
    max_requests: int,
    max_prompt_tokens: int,
    speculative: bool = False,
    reuse: bool = False,
    moves: bool = False,
    drafters: DeviceDrafters = NO_DRAFTERS,
    nodes: NodeSizes | None = None,
    told: OnCompiled = unwatched,
) -> int:
    """Compile what phases of these sizes can reach; returns the number of programs.

    Rounds of draft trees are compiled only where rollouts are `speculative`, passes over cached
    responses only with `reuse`, what moves requests between workers only with `moves`. `nodes`
    returns the sizes of the trees that rounds of so many slots have; None: all sizes. `told` is
    called with the number of compiled programs. Raises TooManyMappings where the programs do not
    fit into what Linux allows a process.
    """
    most = _most_positions(engine, sampling, max_prompt_tokens)
    # a request that moves without keys and values is recomputed, response and all
    longest_prefill = most if moves else max_prompt_tokens
    with engine.mesh_context():
        programs = list(
            _programs(engine, params, sampling, max_requests, max_prompt_tokens, longest_prefill)
        )
        if moves:
            programs += _move_programs(engine, max_requests, most)
        if speculative:
            for bucket in round_buckets(engine, sampling, max_requests, max_prompt_tokens, nodes):
                if bucket[1] > 1:
                    arguments = partial(_verify, engine, params, sampling, *bucket)
                    programs.append(Program(verify_round, arguments))
        if (learned := drafters.learned) is not None:
            programs += _learned_programs(engine, params, sampling, max_requests, most, learned)
            if not moves:  # else they leave with their rows
                programs += _hidden_state_programs(engine, max_requests, most)
        if (small := drafters.model) is not None:
            drafter = small.drafter_for(
                engine.drafter_context(RolloutSpec(params, sampling, step_key(0, 0)))
            )
            rows = slot_sizes(engine, max_requests)[0]
            steps = drafter.programs(max_requests=rows, max_tokens=most)
            programs += [Program(step, arguments) for step, arguments in steps]
        if reuse:
            programs += _reuse_programs(engine, params, sampling, max_requests, max_prompt_tokens)
        compile_all(_lowered(engine, programs), len(programs), told)
        for program in programs:
            args, kwargs = program.arguments()
            jax.block_until_ready(program.step(*args, **kwargs))
        return len(programs)


def _lowered(engine: Engine, programs: Sequence[Program]) -> Iterator[Any]:
    with engine.shapes_only():
        for program in programs:
            args, kwargs = program.arguments()
            yield program.step.lower(*args, **kwargs)


def slot_sizes(engine: Engine, max_requests: int) -> list[int]:
    """The buckets of slots that a phase of up to `max_requests` passes through, largest first."""
    sizes = [engine.config.slot_bucket(max_requests)]
    while sizes[-1] > engine.config.slot_bucket(1):
        sizes.append(engine.config.slot_bucket(-(-sizes[-1] // 2)))
    return sizes


def round_buckets(
    engine: Engine,
    sampling: SamplingConfig,
    max_requests: int,
    max_prompt_tokens: int,
    nodes: NodeSizes | None = None,
) -> Iterator[tuple[int, int, int]]:
    """(slots, nodes, positions) of every round that phases of these sizes can reach."""
    for B in slot_sizes(engine, max_requests):
        for S in engine.position_sizes(_most_positions(engine, sampling, max_prompt_tokens)):
            for N in (1, *engine.config.node_sizes(S)):
                if N == 1 or nodes is None or N in nodes(B):
                    yield B, N, S


def _most_positions(engine: Engine, sampling: SamplingConfig, max_prompt_tokens: int) -> int:
    return max_prompt_tokens + sampling.max_new_tokens


def _programs(
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    max_requests: int,
    max_prompt_tokens: int,
    longest_prefill: int,
) -> Iterator[Program]:
    config = engine.config
    positions = engine.position_sizes(_most_positions(engine, sampling, max_prompt_tokens))
    prompts = sorted(
        {
            bucket(n, config.min_prompt_tokens, S)
            for S in positions
            for n in range(1, longest_prefill)
            if n + 2 <= S
        }
    )
    for T in prompts:
        yield Program(cache_ops.prefill, partial(_prefill, engine, params, T))
    for B in slot_sizes(engine, max_requests):
        yield Program(cache_ops.make_slots, partial(_make_slots, engine, sampling, B))
        half = engine.config.slot_bucket(-(-B // 2))
        for S in positions:
            yield Program(decode_rounds, partial(_decode, engine, params, sampling, B, S))
            for T in (T for T in prompts if T <= S):
                yield Program(cache_ops.insert_rows, partial(_insert, engine, B, S, T))
            yield Program(cache_ops.copy_rows, partial(_copy, engine, B, S))
            for name, axis in _kinds(engine):
                rows = partial(_rows, engine, name, B, S)
                if half < B:
                    yield Program(cache_ops.resize_layer, partial(_resize, rows, half, S, axis))
                for larger in positions[positions.index(S) + 1 :][:1]:
                    arguments = partial(_resize, rows, B, larger, axis)
                    yield Program(cache_ops.resize_layer, arguments)


def _move_programs(engine: Engine, max_requests: int, most_positions: int) -> Iterator[Program]:
    """How rows leave for the host and come back, and how a batch grows again."""
    positions = engine.position_sizes(most_positions)
    for B in slot_sizes(engine, max_requests):
        half = engine.config.slot_bucket(-(-B // 2))
        for S in positions:
            for name, axis in _kinds(engine):
                rows = partial(_rows, engine, name, B, S)
                some = engine.config.prefill_rows
                yield Program(cache_ops.resize_layer, partial(_resize, rows, some, S, axis))
                if half < B:
                    fewer = partial(_rows, engine, name, half, S)
                    yield Program(cache_ops.resize_layer, partial(_resize, fewer, B, S, axis))


def _learned_programs(
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    max_requests: int,
    most_positions: int,
    learned: LearnedDrafter,
) -> Iterator[Program]:
    """Searches for draft tokens."""
    drafter = learned.drafter_for(
        engine.drafter_context(RolloutSpec(params, sampling, step_key(0, 0)))
    )
    for B in slot_sizes(engine, max_requests):
        for S in engine.position_sizes(most_positions):
            for step, arguments in drafter.programs(partial(_rows, engine, "features", B, S)):
                yield Program(step, arguments)


def _drafter_context(
    engine: Engine, params: transformer.Params, sampling: SamplingConfig
) -> DrafterContext:
    return engine.drafter_context(RolloutSpec(params, sampling, step_key(0, 0)))


def _hidden_state_programs(
    engine: Engine, max_requests: int, most_positions: int
) -> Iterator[Program]:
    """How hidden states leave for the host."""
    some = engine.config.prefill_rows
    for B in slot_sizes(engine, max_requests):
        for S in engine.position_sizes(most_positions):
            rows = partial(_rows, engine, "features", B, S)
            arguments = partial(_resize, rows, some, S, kv_cache.VALUE_AXIS)
            yield Program(cache_ops.resize_layer, arguments)


def _reuse_programs(
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    max_requests: int,
    max_prompt_tokens: int,
) -> Iterator[Program]:
    """Packed passes, and how their keys and values get into rows."""
    most = _most_positions(engine, sampling, max_prompt_tokens)
    lengths = range(sampling.max_new_tokens + 1, most + 1)
    shapes = {shape for n in lengths for shape in engine.config.verify_shapes(n)}
    for shape in shapes:
        arguments = partial(_verify_packed, engine, params, sampling, shape)
        yield Program(verify_packed, arguments)
    for B in slot_sizes(engine, max_requests):
        for S in engine.position_sizes(most):
            for X in {shape.rows * shape.length for shape in shapes}:
                yield Program(cache_ops.gather_rows, partial(_gather, engine, B, S, X))


def _verify_packed(
    engine: Engine, params: transformer.Params, sampling: SamplingConfig, shape: Shape
) -> tuple[tuple, dict[str, Any]]:
    def zeros() -> jax.Array:
        return engine.put(np.zeros((shape.rows, shape.length), np.int32))

    packing = Packing(zeros(), zeros(), zeros())
    batch = PackedResponses(zeros(), zeros(), packing, zeros(), zeros())
    options = engine.verify_packed_options(sampling.draw)
    return (params, batch, step_key(0, 0), Processing.of(sampling)), options


def _gather(engine: Engine, B: int, S: int, X: int) -> tuple[tuple, dict[str, Any]]:
    cache, packed = engine.empty_cache(B, S), engine.empty_cache(1, X)
    return (cache, packed, np.zeros((B, S), np.int32), np.zeros(B, np.int32), np.int32(0)), {}


def _kinds(engine: Engine) -> list[tuple[str, int]]:
    """The arrays of a cache that programs differ for, and where positions lie in them."""
    kinds = [("keys", kv_cache.KEY_AXIS), ("values", kv_cache.VALUE_AXIS)]
    if engine.feature_layers is not None:
        kinds.append(("features", kv_cache.VALUE_AXIS))
    return kinds


def _rows(engine: Engine, name: str, B: int, S: int) -> jax.Array:
    """One array of a cache."""
    with engine.shapes_only():
        shape = getattr(engine.empty_cache(B, S), name)[0].shape
    return engine.zero_rows(shape, engine.dtype)


def _prefill(engine: Engine, params: transformer.Params, T: int) -> tuple[tuple, dict[str, Any]]:
    tokens_PT = engine.put(np.zeros((engine.config.prefill_rows, T), np.int32))
    return (params, tokens_PT), engine.prefill_options()


def _make_slots(engine: Engine, sampling: SamplingConfig, B: int) -> tuple[tuple, dict[str, Any]]:
    ints_BC = np.zeros((B, len(cache_ops.COLUMNS)), np.int32)
    return engine.slot_arguments(ints_BC, sampling, step_key(0, 0)), {}


def _decode(
    engine: Engine, params: transformer.Params, sampling: SamplingConfig, B: int, S: int
) -> tuple[tuple, dict[str, Any]]:
    args, _ = _make_slots(engine, sampling, B)
    stop_E = engine.put(np.zeros(max(1, len(engine.model.eos_token_ids)), np.int32))
    slots = cache_ops.make_slots(*args)
    cache = engine.empty_cache(B, S)
    options = engine.decode_options(sampling.draw)
    return (params, cache, slots, stop_E, np.int32(1), np.int32(1)), options


def _verify(
    engine: Engine, params: transformer.Params, sampling: SamplingConfig, B: int, N: int, S: int
) -> tuple[tuple, dict[str, Any]]:
    (_, cache, slots, stop_E, _, _), _ = _decode(engine, params, sampling, B, S)
    parents_BN = np.broadcast_to(np.arange(-1, N - 1, dtype=np.int32), (B, N))
    tree = DraftTree(engine.argument(np.zeros((B, N), np.int32)), engine.argument(parents_BN))
    return (params, cache, slots, tree, stop_E), engine.verify_options(sampling.draw)


def _insert(engine: Engine, B: int, S: int, T: int) -> tuple[tuple, dict[str, Any]]:
    new, pairs = engine.empty_cache(engine.config.prefill_rows, T), np.zeros(B, np.int32)
    return (engine.empty_cache(B, S), new, pairs, pairs, np.int32(0)), {}


def _copy(engine: Engine, B: int, S: int) -> tuple[tuple, dict[str, Any]]:
    pairs = np.zeros(B, np.int32)
    return (engine.empty_cache(B, S), pairs, pairs, np.int32(0)), {}


def _resize(
    rows: Callable[[], jax.Array], B: int, S: int, axis: int
) -> tuple[tuple, dict[str, Any]]:
    index = jax.device_put(np.zeros(B, np.int32))
    return (rows(), index), {"num_positions": S, "axis": axis}

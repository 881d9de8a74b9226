"""The programs that rollouts can reach, each with a maker of its arguments.

B = slots, S = cache positions, M = nodes of a round, T = chunks, or positions of rows on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from reprise.models import kv_cache, paged_cache, transformer
from reprise.rl.engine import cache_ops
from reprise.rl.engine.ending import padded_ids
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.speculation.device_drafters import DeviceDrafters
from reprise.spec.budget.budget import DraftDecision
from reprise.spec.config import SamplingConfig
from reprise.spec.draft_cache.drafter import CachingDrafter
from reprise.spec.draft_cache.drafting import draft_rounds
from reprise.spec.drafter import no_drafts
from reprise.spec.nodes import NOT_GIVEN, pack
from reprise.spec.sampling import step_key
from reprise.spec.verify import (
    chunks_alone,
    chunks_beside_roots,
    decode_beside_chunks,
    decode_rounds,
    settle,
    verify_round,
)

NodeSizes = Callable[[int], Collection[int]]  # of trees, by slots
Decisions = Callable[[int], Collection[DraftDecision]]  # by slots
Arguments = tuple[tuple, dict[str, Any]]
# Steps that run the whole policy, in descending order of compile time.
WHOLE_MODEL = (
    draft_rounds,
    verify_round,
    chunks_beside_roots,
    decode_beside_chunks,
    chunks_alone,
    decode_rounds,
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted step with a maker of its arguments, made for each call since many are donated.

    `num_positions` are the positions of the cache that the step makes or uses; 0 without a cache.
    """

    step: Any
    arguments: Callable[[], Arguments]
    num_positions: int = 0


@dataclasses.dataclass(frozen=True)
class Reach:
    """Bounds of the rollouts to compile for: number of requests, longest prompt, and features.

    Rounds with draft tokens are compiled only for `speculative` rollouts or `reuse` of cached
    responses; programs that move requests between workers only with `moves`. `nodes` returns the
    node counts that rounds can have for a number of slots; None allows every count. `alone` has,
    by drafter, the decisions for rounds with only that drafter, on the device.
    """

    max_requests: int
    max_prompt_tokens: int
    speculative: bool = False
    reuse: bool = False
    moves: bool = False
    drafters: DeviceDrafters = dataclasses.field(default_factory=dict)
    nodes: NodeSizes | None = None
    alone: Mapping[str, Decisions] = dataclasses.field(default_factory=dict)


def round_buckets(
    engine: Engine, sampling: SamplingConfig, reach: Reach
) -> Iterator[tuple[int, int, int]]:
    """Yield (slots, nodes, positions) of every round that rollouts can reach."""
    engine.expect(reach.max_requests, reach.max_prompt_tokens + sampling.max_any_new_tokens)
    for B in _slot_sizes(engine, reach.max_requests):
        for S in engine.round_positions(B):
            for M in (B, *engine.config.node_sizes(B)):
                if M == B or reach.nodes is None or M in reach.nodes(B):
                    yield B, M, S


def _slot_sizes(engine: Engine, max_requests: int) -> list[int]:
    """Return the buckets of slots that a rollout of `max_requests` can reach, largest first."""
    sizes = [engine.config.slot_bucket(max_requests)]
    while sizes[-1] > engine.config.slot_bucket(1):
        sizes.append(engine.config.slot_bucket(-(-sizes[-1] // 2)))
    return sizes


class Pool:
    """The programs of rollouts, by use."""

    def __init__(
        self, engine: Engine, params: transformer.Params, sampling: SamplingConfig, reach: Reach
    ) -> None:
        self.engine, self.params, self.sampling, self.reach = engine, params, sampling, reach
        self.slots = _slot_sizes(engine, reach.max_requests)
        engine.expect(reach.max_requests, reach.max_prompt_tokens + sampling.max_any_new_tokens)
        self.buckets = [(B, S) for B in self.slots for S in engine.round_positions(B)]
        self.positions = sorted({S for _, S in self.buckets})
        # with moves, prompts can come at any batch size, else only before the batch shrinks
        self.first_slots = self.slots if reach.moves else self.slots[:1]
        engine.first_slots.update(self.first_slots)
        # kinds of cache arrays that need separate programs
        self.kinds = [("keys", kv_cache.KEYS), ("values", kv_cache.VALUES)]
        if engine.feature_layers is not None:
            self.kinds.append(("features", kv_cache.FEATURES))

    def programs(self) -> list[Program]:
        """Return the programs of rollouts; small programs are last, to fill the remaining time."""
        with self.engine.mesh_context():
            programs = [*self.plain(), *self._drafts()]
            if self.engine.is_paged:
                programs += self._of_pages()
            else:
                programs += self._of_rows()
            programs += self.trees()

        def size(program: Program) -> int:
            whole = program.step in WHOLE_MODEL
            return WHOLE_MODEL.index(program.step) if whole else len(WHOLE_MODEL)

        return sorted(programs, key=size)

    def plain(self) -> Iterator[Program]:
        """Yield the programs of prompts and plain rounds."""
        engine, reuse = self.engine, self.reach.reuse
        for B in self.slots:
            yield Program(cache_ops.make_slots, partial(self._make_slots, B))
            if B in self.first_slots:
                yield Program(cache_ops.join_slots, partial(self._join_slots, B))
        for B, S in self.buckets:
            yield Program(decode_rounds, partial(self.decode_arguments, B, S), S)
            yield Program(settle, partial(self._settle, B, S), S)
            if B not in self.first_slots:
                continue
            yield Program(decode_beside_chunks, partial(self.prompt_arguments, B, S), S)
            prompts = engine.config.prefill_rows, engine.chunk_tokens
            alone, beside = engine.drawing_chunks(B), engine.beside_chunks
            drawing = {(T, engine.drawing_tokens) for T in (*alone, *beside)} if reuse else set()
            for T in alone if reuse else ():
                yield Program(chunks_alone, partial(self._chunks_alone, B, S, T), S)
            for T in beside if reuse else ():
                yield Program(chunks_beside_roots, partial(self._chunks_beside, B, S, T), S)
            if self.reach.speculative or reuse:
                # a rule also decides on tokens in rounds without draft tokens
                beside = engine.config.sizes_beside_prompts(B)
                for M in (B, *beside) if reuse else beside:
                    yield Program(verify_round, partial(self._verify, B, M, S, chunks=True), S)
            for T, C in {prompts, *drawing}:
                yield Program(cache_ops.write_chunks, partial(self._write_chunks, B, S, T, C), S)

    def trees(self) -> Iterator[Program]:
        """Yield the rounds with draft tokens, or with tokens of cached responses."""
        if self.reach.speculative or self.reach.reuse:
            for B, M, S in round_buckets(self.engine, self.sampling, self.reach):
                if M > B or self.reach.reuse:  # a rule decides, as above
                    yield Program(verify_round, partial(self._verify, B, M, S), S)

    def plain_round(self, B: int) -> Program:
        """Return rounds of `B` slots without draft tokens, with the most positions."""
        S = self.engine.round_positions(B)[-1]
        return Program(decode_rounds, partial(self.decode_arguments, B, S), S)

    def verifying_round(self, B: int, M: int) -> Program:
        """Return the round of `B` slots and `M` nodes, with the most positions."""
        S = self.engine.round_positions(B)[-1]
        return Program(verify_round, partial(self._verify, B, M, S), S)

    # -- rounds --------------------------------------------------------------------------

    def _make_slots(self, B: int) -> Arguments:
        ints_BC = np.zeros((B, len(cache_ops.COLUMNS)), np.int32)
        processing_B2 = np.ones((B, 2), np.float32)
        key = self.engine.put(self._key())
        return self.engine.slot_arguments(ints_BC, processing_B2, key), {}

    def _key(self) -> jax.Array:
        return self.engine.made(step_key, 0, 0)

    def _join_slots(self, B: int) -> Arguments:
        arguments, none = self._make_slots(B)
        slots = self.engine.made(cache_ops.make_slots, *arguments)
        return (slots, *arguments, self.engine.argument(np.zeros(B, bool))), none

    def at_rest(self, B: int) -> tuple[Any, Any, Any]:
        """Return pending entries, slots and end tokens of rounds, for idle slots."""
        engine = self.engine
        stop_E = engine.put(padded_ids((*engine.model.eos_token_ids, *self.sampling.stop_ids)))
        slots = engine.made(cache_ops.make_slots, *self._make_slots(B)[0])
        return engine.empty_pending(B), slots, stop_E

    def _at_rest(self, B: int, S: int) -> tuple:
        """Return weights, cache, pending entries, slots and end tokens of rounds."""
        return self.params, self.engine.empty_cache(B, S), *self.at_rest(B)

    def _no_chunks(self, T: int, C: int | None = None) -> Any:
        return self.engine.argument(self.engine.no_chunks(T, C))

    def decode_arguments(self, B: int, S: int) -> Arguments:
        """Return the arguments of `decode_rounds` for idle slots."""
        options = self.engine.decode_options(self.sampling.scheme)
        return (*self._at_rest(B, S), np.int32(1), np.int32(1)), options

    def prompt_arguments(self, B: int, S: int) -> Arguments:
        """Return the arguments of `decode_beside_chunks` for idle slots."""
        chunks_TX = self._no_chunks(self.engine.config.prefill_rows)
        return (*self._at_rest(B, S), chunks_TX), self.engine.prompt_options(self.sampling.scheme)

    def _chunks_alone(self, B: int, S: int, T: int) -> Arguments:
        params, cache, _, slots, _ = self._at_rest(B, S)
        options = self.engine.prompt_options(self.sampling.scheme)
        return (params, cache, slots, *self._drawing(T)), options

    def _chunks_beside(self, B: int, S: int, T: int) -> Arguments:
        options = self.engine.prompt_options(self.sampling.scheme)
        return (*self._at_rest(B, S), *self._drawing(T)), options

    def _drawing(self, T: int) -> tuple[Any, Any]:
        """Return tables of chunks that draw, and of the tokens given to a rule."""
        C = self.engine.drawing_tokens
        inputs_2X = np.full((2, T * C), NOT_GIVEN, np.int32)
        return self._no_chunks(T, C), self.engine.argument(inputs_2X)

    def _write_chunks(self, B: int, S: int, T: int, C: int) -> Arguments:
        engine = self.engine
        return (engine.empty_cache(B, S), engine.empty_entries(T, C), self._no_chunks(T, C)), {}

    def _settle(self, B: int, S: int) -> Arguments:
        return (self.engine.empty_cache(B, S), self.engine.empty_pending(B)), {}

    def _verify(self, B: int, M: int, S: int, *, chunks: bool = False) -> Arguments:
        engine, nothing = self.engine, no_drafts(0, 1)
        *state, stop_E = self._at_rest(B, S)
        nodes_5M = pack(nothing, nothing.count_A, np.zeros(0, np.int32), B, M, 1)
        chunks_TX = self._no_chunks(engine.config.prefill_rows) if chunks else None
        options = engine.verify_options(self.sampling.scheme, B, M)
        return (*state, engine.argument(nodes_5M), stop_E, chunks_TX), options

    # -- drafters on the device ----------------------------------------------------------

    def _drafts(self) -> Iterator[Program]:
        """Yield the programs of drafters, and the rounds with a single drafter."""
        spec = RolloutSpec(self.params, self.sampling, self._key())
        context = self.engine.drafter_context(spec)
        drafters = {name: x.drafter_for(context) for name, x in self.reach.drafters.items()}
        for drafter in drafters.values():
            for B, S in self.buckets:
                yield from (Program(*program) for program in drafter.programs(B, S))
        for name, decisions in sorted(self.reach.alone.items()):  # the same order everywhere
            if drafters[name].in_rounds() is not None:
                for B, S in self.buckets:
                    for decision in decisions(B):
                        arguments = partial(self._draft_rounds, drafters[name], decision, B, S)
                        yield Program(draft_rounds, arguments)

    def _draft_rounds(
        self, drafter: CachingDrafter, decision: DraftDecision, B: int, S: int
    ) -> Arguments:
        rounds, put = drafter.empty_rounds(B, S), self.engine.argument
        numbers = put(np.ones(4, np.int32)), put(np.ones(B, np.float32))
        drafting = rounds.cache, rounds.constants, rounds.table_RX, *numbers
        options = self.engine.draft_options(self.sampling.scheme, B, decision)
        args = *self._at_rest(B, S), *drafting
        return args, options | {"drafting": rounds.drafting}

    # -- a cache of pages ----------------------------------------------------------------

    def _of_pages(self) -> Iterator[Program]:
        """Yield programs that copy pages, also to and from the host."""
        engine, T = self.engine, self.engine.config.page_tokens
        [B, S], some = self.buckets[0], cache_ops.PAGES_AT_ONCE

        def pages() -> Any:
            cache: Any = engine.empty_cache(B, S)
            return dataclasses.replace(cache, table_BN=None)

        def some_pages() -> Any:
            cache = paged_cache.init(
                engine.model,
                1,
                1,
                some,
                T,
                engine.dtype,
                engine.feature_layers,
                engine.zero_rows,
            )
            return dataclasses.replace(cache, table_BN=None)

        def numbers(count: int = some) -> Any:
            return engine.put(np.full(count, -1, np.int32))

        yield Program(cache_ops.copy_pages, lambda: ((pages(), numbers(), numbers()), {}))
        if self.reach.moves:
            yield Program(cache_ops.insert_pages, lambda: ((pages(), some_pages(), numbers()), {}))
            yield Program(cache_ops.read_pages, lambda: ((pages(), numbers()), {}))
            for name, _ in self.kinds if engine.spans_processes else ():

                def arrays(name: str = name) -> Arguments:
                    return (getattr(some_pages(), name)[0],), {}

                yield Program(cache_ops.gathered, arrays)
        if engine.feature_layers is not None:
            count = max(1, cache_ops.STATE_COPY_TOKENS // T)  # pages of one copy
            states = cache_ops.states_of_pages
            yield Program(states, lambda: ((pages().features[0], numbers(count)), {}))
            if engine.spans_processes:
                yield Program(cache_ops.gathered, partial(self._states, count * T))

    # -- a cache of rows -----------------------------------------------------------------

    def _of_rows(self) -> Iterator[Program]:
        """Yield programs that copy rows, also to and from the host, or change the bucket."""
        engine, moves, P = self.engine, self.reach.moves, self.engine.config.prefill_rows
        states = [min(cache_ops.STATE_COPY_TOKENS, S) for S in self.positions]
        states = [] if engine.feature_layers is None else sorted({*states})
        lengths = engine.config.position_sizes(engine.longest_tokens)  # of rows from the host
        for B, S in self.buckets:
            yield Program(cache_ops.copy_rows, partial(self._copy, B, S), S)
            for new in self._changes(B, S):
                yield from (self._resize(B, S, *new, *kind) for kind in self.kinds)
            for T in sorted({*lengths, S}) if moves else ():
                if T <= S:
                    yield Program(cache_ops.insert_rows, partial(self._insert, B, S, T), S)
            if states:
                yield Program(cache_ops.copy_states, partial(self._copy_states, B, S))
        if engine.spans_processes:
            for S in self.positions if moves else ():
                for name, kind in self.kinds:
                    arguments = partial(self._gathered, name, P, S, kind)
                    yield Program(cache_ops.gathered, arguments, S)
            for C in states:
                yield Program(cache_ops.gathered, partial(self._states, C))

    def _changes(self, B: int, S: int) -> Iterator[tuple[int, int]]:
        """Yield the next buckets; with moves, also buckets for leaving rows and a growing batch."""
        sizes, bucket = self.engine.position_sizes, self.engine.config.slot_bucket
        yield from [(B, larger) for larger in sizes(B) if larger > S][:1]
        half, more = bucket(-(-B // 2)), bucket(B + 1)
        if half < B:
            yield half, max(S, sizes(half)[0])
        if self.reach.moves:
            yield self.engine.config.prefill_rows, S
            if more > B:
                yield more, S

    def _copy(self, B: int, S: int) -> Arguments:
        pairs = np.zeros(B, np.int32)
        return (self.engine.empty_cache(B, S), pairs, pairs, np.int32(0), np.int32(1)), {}

    def _insert(self, B: int, S: int, T: int) -> Arguments:
        engine, pairs = self.engine, np.zeros(B, np.int32)
        new = engine.empty_cache(engine.config.prefill_rows, T)
        return (engine.empty_cache(B, S), new, pairs, pairs, np.int32(0)), {}

    def _resize(
        self, B: int, S: int, new_B: int, new_S: int, name: str, kind: kv_cache.Kind
    ) -> Program:
        """Return the program that changes the rows and positions of one cache array."""

        def arguments() -> Arguments:
            index = self.engine.put(np.zeros(new_B, np.int32))
            options = {"num_positions": new_S, "kind": kind}
            return (self._rows(name, B, S, kind), index), options

        return Program(cache_ops.resize_layer, arguments, new_S)

    def _gathered(self, name: str, B: int, S: int, kind: kv_cache.Kind) -> Arguments:
        return (self._rows(name, B, S, kind),), {}

    def _rows(self, name: str, B: int, S: int, kind: kv_cache.Kind) -> jax.Array:
        with self.engine.shapes_only():
            shape = getattr(self.engine.empty_cache(B, S), name)[0].shape
        return self.engine.zero_rows(shape, self.engine.dtype, kind.axes)

    def _copy_states(self, B: int, S: int) -> Arguments:
        features_B1SW = self._rows("features", B, S, kv_cache.FEATURES)
        options = {"num_tokens": min(cache_ops.STATE_COPY_TOKENS, S)}
        return (features_B1SW, np.int32(0), np.int32(0)), options

    def _states(self, C: int) -> Arguments:
        with self.engine.shapes_only():
            [features_11SW] = self.engine.empty_cache(1, 1).features
        shape = C, features_11SW.shape[-1]
        return (self.engine.zero_rows(shape, self.engine.dtype, (None, "features")),), {}

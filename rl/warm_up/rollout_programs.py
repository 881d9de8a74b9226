"""The programs that rollouts can reach, each with a maker of its arguments.

B = slots, S = cache positions, M = nodes of a round, T = positions of rows from the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from models import kv_cache, paged_cache, transformer
from rl.engine import cache_ops
from rl.engine.ending import padded_ids
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from rl.speculation.device_drafters import DeviceDrafters
from spec.budget.budget import DraftDecision
from spec.budget.device_gate import DeviceDrafter
from spec.config import SamplingConfig
from spec.draft_cache.rounds import Asked, draft_rounds
from spec.drafter import no_drafts
from spec.nodes import NOT_GIVEN, pack
from spec.sampling import step_key
from spec.verify import chunks_alone, decode_beside_chunks, decode_rounds, settle, verify_round

NodeSizes = Callable[[int], Collection[int]]  # of trees, by slots
Decisions = Callable[[int], Collection[DraftDecision]]  # by slots
Arguments = tuple[tuple, dict[str, Any]]
# Steps that run the whole policy, those that compile longest first.
WHOLE_MODEL = (draft_rounds, verify_round, decode_beside_chunks, chunks_alone, decode_rounds)


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted step with a maker of its arguments (fresh ones: many are donated).

    `num_positions` are those of the cache it makes or works on; 0 where it has none.
    """

    step: Any
    arguments: Callable[[], Arguments]
    num_positions: int = 0


@dataclasses.dataclass(frozen=True)
class Reach:
    """Bounds of the rollouts to come: their most requests, their longest prompt, and what they do.

    Rounds with draft tokens are compiled only where rollouts are `speculative`, or begin with
    cached responses, `reuse`; what moves requests between workers only with `moves`. `nodes`
    returns the numbers of nodes that rounds of a number of slots can have; None allows all. `alone`
    has the decisions for rounds in which only that drafter drafts, on the device.
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
    engine.expect(reach.max_requests, reach.max_prompt_tokens + sampling.longest_new_tokens)
    for B in _slot_sizes(engine, reach.max_requests):
        for S in engine.round_positions(B):
            for M in (B, *engine.config.node_sizes(B)):
                if M == B or reach.nodes is None or M in reach.nodes(B):
                    yield B, M, S


def _slot_sizes(engine: Engine, max_requests: int) -> list[int]:
    """The buckets of slots that a rollout of up to `max_requests` passes through, largest first."""
    sizes = [engine.config.slot_bucket(max_requests)]
    while sizes[-1] > engine.config.slot_bucket(1):
        sizes.append(engine.config.slot_bucket(-(-sizes[-1] // 2)))
    return sizes


def _size(program: Program) -> int:
    """Order programs by their size, the largest first: small ones fill what is left of the time."""
    known = program.step in WHOLE_MODEL
    return WHOLE_MODEL.index(program.step) if known else len(WHOLE_MODEL)


class Pool:
    """The programs of rollouts, by what needs them."""

    def __init__(
        self,
        engine: Engine,
        params: transformer.Params,
        sampling: SamplingConfig,
        reach: Reach,
    ) -> None:
        self.engine, self.params, self.sampling, self.reach = engine, params, sampling, reach
        self.longest_tokens = reach.max_prompt_tokens + sampling.longest_new_tokens
        self.slots = _slot_sizes(engine, reach.max_requests)
        engine.expect(reach.max_requests, self.longest_tokens)
        self.buckets = [(B, S) for B in self.slots for S in engine.round_positions(B)]
        self.positions = sorted({S for _, S in self.buckets})
        # prompts come while rows move, else before the batch shrinks
        self.first_slots = self.slots if reach.moves else self.slots[:1]
        engine.first_slots.update(self.first_slots)
        # the arrays of a cache that programs differ for
        self.kinds = [("keys", kv_cache.KEYS), ("values", kv_cache.VALUES)]
        if engine.feature_layers is not None:
            self.kinds.append(("features", kv_cache.FEATURES))

    # -- programs ----------------------------------------------------------

    def programs(self) -> list[Program]:
        """Return all that rollouts can reach, those that compile longest first."""
        with self.engine.mesh_context():
            programs = [*self.plain(), *self.drafts()]
            if self.reach.moves:
                programs += self.moves()
            programs += self.trees()
            programs += self.drafted_rounds()
            if self.engine.feature_layers is not None:
                programs += self.hidden_states()
        return sorted(programs, key=_size)

    def plain(self) -> Iterator[Program]:
        """Yield what every rollout needs: prompts, plain rounds, and changes of the bucket."""
        for B in self.slots:
            yield Program(cache_ops.make_slots, partial(self._make_slots, B))
            if B in self.first_slots:
                yield Program(cache_ops.join_slots, partial(self._join_slots, B))
        for B, S in self.buckets:
            yield Program(decode_rounds, partial(self.decode_arguments, B, S), S)
            yield Program(settle, partial(self._settle, B, S), S)
            if not self.engine.is_paged:
                yield Program(cache_ops.copy_rows, partial(self._copy, B, S), S)
            if B in self.first_slots:
                yield Program(decode_beside_chunks, partial(self.prompt_arguments, B, S), S)
                sizes = {self.engine.config.prefill_rows}
                if self.reach.reuse:
                    sizes.update(drawing := self.engine.drawing_chunks(B))
                    for T in drawing:
                        yield Program(chunks_alone, partial(self._chunks_alone, B, S, T), S)
                for M in self._nodes_beside_prompts(B):
                    yield Program(verify_round, partial(self._verify, B, M, S, chunks=True), S)
                for T in sizes:
                    yield Program(cache_ops.write_chunks, partial(self._write_chunks, B, S, T), S)
            for name, kind in () if self.engine.is_paged else self.kinds:
                for change in self._changes(B, S):
                    yield self._resize(name, (B, S), change, kind)

        if self.engine.is_paged:
            yield Program(cache_ops.copy_pages, self._copy_pages)

    def moves(self) -> Iterator[Program]:
        """Yield how rows leave for the host and come back, and how a batch grows again."""
        if self.engine.is_paged:
            yield Program(cache_ops.insert_pages, self._insert_pages)
            yield Program(cache_ops.read_pages, self._read_pages)
            if self.engine.spans_processes:
                for name, _ in self.kinds:
                    yield Program(cache_ops.gathered, partial(self._gathered_pages, name))
            return
        for B, S in self.buckets:
            for T in (T for T in self.positions if T <= S):
                yield Program(cache_ops.insert_rows, partial(self._insert, B, S, T))
            more = self.engine.config.slot_bucket(B + 1)
            for name, kind in self.kinds:
                yield self._resize(name, (B, S), (self.engine.config.prefill_rows, S), kind)
                if more > B:
                    yield self._resize(name, (B, S), (more, S), kind)
        if self.engine.spans_processes:
            for S in self.positions:
                for name, kind in self.kinds:
                    yield Program(cache_ops.gathered, partial(self._gathered, name, S, kind), S)

    def hidden_states(self) -> Iterator[Program]:
        """Yield how hidden states leave for the host."""
        if self.engine.is_paged:
            yield Program(cache_ops.states_of_pages, self._states_of_pages)
            if self.engine.spans_processes:
                yield Program(cache_ops.gathered, partial(self._states, self._page_states))
            return
        for B, S in self.buckets:
            yield Program(cache_ops.copy_states, partial(self._copy_states, B, S))
        if self.engine.spans_processes:
            for C in sorted({self._state_tokens(S) for S in self.positions}):
                yield Program(cache_ops.gathered, partial(self._states, C))

    def trees(self) -> Iterator[Program]:
        """Yield the rounds with draft tokens, or with tokens of cached responses."""
        if not self.reach.speculative and not self.reach.reuse:
            return
        for shape in round_buckets(self.engine, self.sampling, self.reach):
            # a rule decides on tokens also where none is a draft token
            if shape[1] > shape[0] or self.reach.reuse:
                yield Program(verify_round, partial(self._verify, *shape), shape[2])

    def drafts(self) -> Iterator[Program]:
        """Yield what drafters on the device run."""
        for name in self.reach.drafters:
            drafter = self._drafter(name)
            for B, S in self.buckets:
                yield from (Program(*program) for program in drafter.programs(B, S))

    def drafted_rounds(self) -> Iterator[Program]:
        """Yield the rounds that draft on the device."""
        for name, decisions in sorted(self.reach.alone.items()):  # the same order everywhere
            drafter = self._drafter(name)
            if drafter.in_rounds() is None:
                continue
            for B, S in self.buckets:
                for decision in decisions(B):
                    yield Program(
                        draft_rounds, partial(self._draft_rounds, drafter, decision, B, S)
                    )

    def _drafter(self, name: str) -> DeviceDrafter:
        spec = RolloutSpec(self.params, self.sampling, self._key())
        return self.reach.drafters[name].drafter_for(self.engine.drafter_context(spec))

    def plain_round(self, B: int) -> Program:
        """Return rounds without draft tokens of so many slots, the longest."""
        S = self.engine.round_positions(B)[-1]
        return Program(decode_rounds, partial(self.decode_arguments, B, S), S)

    def verifying_round(self, B: int, M: int) -> Program:
        """Return the round of so many slots and nodes, the longest."""
        S = self.engine.round_positions(B)[-1]
        return Program(verify_round, partial(self._verify, B, M, S), S)

    # -- their arguments ---------------------------------------------------

    def _changes(self, B: int, S: int) -> Iterator[tuple[int, int]]:
        """Yield the buckets that come next: more positions, and half as many slots."""
        yield from [(B, larger) for larger in self.engine.position_sizes(B) if larger > S][:1]
        half = self.engine.config.slot_bucket(-(-B // 2))
        if half < B:
            yield half, max(S, self.engine.position_sizes(half)[0])

    def _make_slots(self, B: int) -> Arguments:
        ints_BC = np.zeros((B, len(cache_ops.COLUMNS)), np.int32)
        processing_B2 = np.ones((B, 2), np.float32)
        key = self.engine.put(self._key())
        return self.engine.slot_arguments(ints_BC, processing_B2, key), {}

    def _key(self) -> jax.Array:
        return self.engine.made(step_key, 0, 0)

    def at_rest(self, B: int) -> tuple[Any, Any, Any]:
        """Return what rounds take behind a cache, for slots at rest: pending, slots, end tokens."""
        engine = self.engine
        stop_E = engine.put(padded_ids((*engine.model.eos_token_ids, *self.sampling.stop_ids)))
        slots = engine.made(cache_ops.make_slots, *self._make_slots(B)[0])
        return engine.empty_pending(B), slots, stop_E

    def decode_arguments(self, B: int, S: int) -> Arguments:
        """Return the arguments of `decode_rounds` for slots at rest."""
        cache, rest = self.engine.empty_cache(B, S), self.at_rest(B)
        args = self.params, cache, *rest, np.int32(1), np.int32(1)
        return args, self.engine.decode_options(self.sampling.scheme)

    def _join_slots(self, B: int) -> Arguments:
        arguments, none = self._make_slots(B)
        slots = self.engine.made(cache_ops.make_slots, *arguments)
        return (slots, *arguments, self.engine.argument(np.zeros(B, bool))), none

    def _nodes_beside_prompts(self, B: int) -> list[int]:
        """The numbers of nodes of rounds that verify, and compute prompts too."""
        if not self.reach.speculative and not self.reach.reuse:
            return []
        # a rule decides on tokens also where none is a draft token
        return [*([B] if self.reach.reuse else ()), *self.engine.config.sizes_beside_prompts(B)]

    def prompt_arguments(self, B: int, S: int) -> Arguments:
        """Return the arguments of `decode_beside_chunks` for slots at rest."""
        (*args, _, _), _ = self.decode_arguments(B, S)
        engine = self.engine
        chunks_TX = engine.argument(engine.no_chunks(engine.config.prefill_rows))
        return (*args, chunks_TX), engine.prompt_options(self.sampling.scheme)

    def _chunks_alone(self, B: int, S: int, T: int) -> Arguments:
        (params, cache, _, slots, *_), _ = self.decode_arguments(B, S)
        chunks_TX = self.engine.no_chunks(T)
        given_2X = np.full((2, chunks_TX[:, 2:].size), NOT_GIVEN, np.int32)
        tables = self.engine.argument(chunks_TX), self.engine.argument(given_2X)
        return (params, cache, slots, *tables), self.engine.prompt_options(self.sampling.scheme)

    def _write_chunks(self, B: int, S: int, T: int) -> Arguments:
        engine = self.engine
        chunks_TX = engine.argument(engine.no_chunks(T))
        return (engine.empty_cache(B, S), engine.empty_entries(T), chunks_TX), {}

    def _settle(self, B: int, S: int) -> Arguments:
        return (self.engine.empty_cache(B, S), self.engine.empty_pending(B)), {}

    def _verify(self, B: int, M: int, S: int, *, chunks: bool = False) -> Arguments:
        engine = self.engine
        (params, cache, pending, slots, stop_E, _, _), _ = self.decode_arguments(B, S)
        nothing = no_drafts(0, 1)
        nodes_5M = pack(nothing, nothing.count_A, np.zeros(0, np.int32), B, M, 1)
        chunks_TX = None
        if chunks:
            chunks_TX = engine.argument(engine.no_chunks(engine.config.prefill_rows))
        args = params, cache, pending, slots, engine.argument(nodes_5M), stop_E, chunks_TX
        return args, engine.verify_options(self.sampling.scheme, B, M)

    def _draft_rounds(
        self, drafter: DeviceDrafter, decision: DraftDecision, B: int, S: int
    ) -> Arguments:
        (params, cache, pending, slots, stop_E, _, _), _ = self.decode_arguments(B, S)
        given, put = drafter.empty_rounds(B, S), self.engine.argument
        numbers = put(np.ones(4, np.int32)), put(np.ones(B, np.float32))
        asked = Asked(given.constants, given.table_RX, *numbers)
        args = params, cache, pending, slots, stop_E, given.cache, asked
        options = self.engine.draft_options(self.sampling.scheme, B, decision)
        return args, options | {"drafting": given.drafting}

    def _insert(self, B: int, S: int, T: int) -> Arguments:
        engine, pairs = self.engine, np.zeros(B, np.int32)
        new = engine.empty_cache(engine.config.prefill_rows, T)
        return (engine.empty_cache(B, S), new, pairs, pairs, np.int32(0)), {}

    def _copy(self, B: int, S: int) -> Arguments:
        pairs = np.zeros(B, np.int32)
        return (self.engine.empty_cache(B, S), pairs, pairs, np.int32(0)), {}

    # -- of pages ------------------------------------------------------------------------

    def _pages(self) -> paged_cache.PagedCache:
        B, S = self.buckets[0]
        cache = self.engine.empty_cache(B, S)
        assert isinstance(cache, paged_cache.PagedCache)
        return dataclasses.replace(cache, table_BN=None)

    def _some_pages(self) -> Any:
        """Arrays like those that `read_pages` returns."""
        engine, size = self.engine, cache_ops.PAGES_AT_ONCE
        kept = engine.dtype, engine.feature_layers
        T = engine.config.page_tokens
        some = paged_cache.init(engine.model, 1, 1, size, T, *kept, engine.zero_rows)
        return dataclasses.replace(some, table_BN=None)

    def _page_numbers(self, size: int = cache_ops.PAGES_AT_ONCE) -> Any:
        return self.engine.put(np.full(size, -1, np.int32))

    def _copy_pages(self) -> Arguments:
        return (self._pages(), self._page_numbers(), self._page_numbers()), {}

    def _insert_pages(self) -> Arguments:
        return (self._pages(), self._some_pages(), self._page_numbers()), {}

    def _read_pages(self) -> Arguments:
        return (self._pages(), self._page_numbers()), {}

    def _gathered_pages(self, name: str) -> Arguments:
        return (getattr(self._some_pages(), name)[0],), {}

    @property
    def _page_states(self) -> int:
        """The hidden states of one copy that leaves a cache of pages."""
        T = self.engine.config.page_tokens
        return max(1, cache_ops.STATE_COPY_TOKENS // T) * T

    def _states_of_pages(self) -> Arguments:
        [pages_P1TF] = self._pages().features
        count = self._page_states // self.engine.config.page_tokens
        return (pages_P1TF, self._page_numbers(count)), {}

    # -- of rows -------------------------------------------------------------------------

    def _copy_states(self, B: int, S: int) -> Arguments:
        features_B1SW = self._rows("features", B, S, kv_cache.FEATURES)
        return (features_B1SW, np.int32(0), np.int32(0)), {"num_tokens": self._state_tokens(S)}

    def _state_tokens(self, S: int) -> int:
        """The hidden states of one copy that leaves a cache."""
        return min(cache_ops.STATE_COPY_TOKENS, S)

    def _states(self, C: int) -> Arguments:
        with self.engine.shapes_only():
            [features_11SW] = self.engine.empty_cache(1, 1).features
        shape = C, features_11SW.shape[-1]
        return (self.engine.zero_rows(shape, self.engine.dtype, (None, "features")),), {}

    def _gathered(self, name: str, S: int, kind: kv_cache.Kind) -> Arguments:
        return (self._rows(name, self.engine.config.prefill_rows, S, kind),), {}

    def _resize(
        self, name: str, old: tuple[int, int], new: tuple[int, int], kind: kv_cache.Kind
    ) -> Program:
        """One array of a cache changes its (rows, positions)."""

        def arguments() -> Arguments:
            index = self.engine.put(np.zeros(new[0], np.int32))
            return (self._rows(name, *old, kind), index), {"num_positions": new[1], "kind": kind}

        return Program(cache_ops.resize_layer, arguments, new[1])

    def _rows(self, name: str, B: int, S: int, kind: kv_cache.Kind) -> jax.Array:
        with self.engine.shapes_only():
            shape = getattr(self.engine.empty_cache(B, S), name)[0].shape
        return self.engine.zero_rows(shape, self.engine.dtype, kind.axes)

"""The programs that rollouts can reach, each with a maker of its arguments.

B = slots, S = cache positions of a slot, M = nodes of a round, T = chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from reprise.models.attention import kv_cache
from reprise.models.decoder import transformer
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.slot_memory import cache_ops
from reprise.rl.slots.ending import padded_ids
from reprise.rl.speculation.device_drafters import DeviceDrafters
from reprise.spec.budget.budget import DraftDecision
from reprise.spec.config import SamplingConfig
from reprise.spec.draft_cache.drafter import CachingDrafter
from reprise.spec.draft_cache.drafting import draft_rounds
from reprise.spec.drafter import no_drafts
from reprise.spec.verification.nodes import NOT_GIVEN, pack
from reprise.spec.verification.sampling import step_key
from reprise.spec.verification.verify import (
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
    """A jitted step with a maker of its arguments, made for each call since many are donated."""

    step: Any
    arguments: Callable[[], Arguments]


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
        for M in (B, *engine.config.node_sizes(B)):
            if M == B or reach.nodes is None or M in reach.nodes(B):
                yield B, M, engine.num_positions


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
        self.engine = engine
        self.params = params
        self.sampling = sampling
        self.reach = reach
        self.slots = _slot_sizes(engine, reach.max_requests)
        engine.expect(reach.max_requests, reach.max_prompt_tokens + sampling.max_any_new_tokens)
        # with moves, prompts can come at any batch size, else only before the batch shrinks
        self.first_slots = self.slots if reach.moves else self.slots[:1]
        engine.first_slots.update(self.first_slots)

    def programs(self) -> list[Program]:
        """Return the programs of rollouts; small programs are last, to fill the remaining time."""
        with self.engine.mesh_context():
            programs = [*self.plain(), *self._drafts(), *self._of_pages(), *self.trees()]

        def size(program: Program) -> int:
            whole = program.step in WHOLE_MODEL
            return WHOLE_MODEL.index(program.step) if whole else len(WHOLE_MODEL)

        return sorted(programs, key=size)

    def plain(self) -> Iterator[Program]:
        """Yield the programs of prompts and plain rounds."""
        engine = self.engine
        reuse = self.reach.reuse
        for B in self.slots:
            yield Program(cache_ops.make_slots, partial(self._make_slots, B))
            if B in self.first_slots:
                yield Program(cache_ops.join_slots, partial(self._join_slots, B))
        for B in self.slots:
            yield Program(decode_rounds, partial(self.decode_arguments, B))
            yield Program(settle, partial(self._settle, B))
            if B not in self.first_slots:
                continue
            yield Program(decode_beside_chunks, partial(self.prompt_arguments, B))
            prompts = engine.config.prefill_rows, engine.chunk_tokens
            alone = engine.drawing_chunks(B)
            beside = engine.beside_chunks
            drawing = {(T, engine.drawing_tokens) for T in (*alone, *beside)} if reuse else set()
            for T in alone if reuse else ():
                yield Program(chunks_alone, partial(self._chunks_alone, B, T))
            for T in beside if reuse else ():
                yield Program(chunks_beside_roots, partial(self._chunks_beside, B, T))
            if self.reach.speculative or reuse:
                # a rule also decides on tokens in rounds without draft tokens
                beside = engine.config.sizes_beside_prompts(B)
                for M in (B, *beside) if reuse else beside:
                    yield from self._verify_rounds(B, M, chunks=True)
            for T, C in {prompts, *drawing}:
                yield Program(cache_ops.write_chunks, partial(self._write_chunks, B, T, C))

    def trees(self) -> Iterator[Program]:
        """Yield the rounds with draft tokens, or with tokens of cached responses."""
        if self.reach.speculative or self.reach.reuse:
            for B, M, _ in round_buckets(self.engine, self.sampling, self.reach):
                if M > B or self.reach.reuse:  # a rule decides, as above
                    yield from self._verify_rounds(B, M)

    def _verify_rounds(self, B: int, M: int, *, chunks: bool = False) -> Iterator[Program]:
        """Yield the rounds of a size: of any trees, and of chains if that is a separate program."""
        yield Program(verify_round, partial(self._verify, B, M, chunks=chunks))
        if self.engine.has_chains(B, M):
            arguments = partial(self._verify, B, M, chunks=chunks, chains=True)
            yield Program(verify_round, arguments)

    def plain_round(self, B: int) -> Program:
        """Return rounds of `B` slots without draft tokens."""
        return Program(decode_rounds, partial(self.decode_arguments, B))

    def verifying_round(self, B: int, M: int, *, chains: bool = False) -> Program:
        """Return the round of `B` slots and `M` nodes, of any trees or of chains."""
        return Program(verify_round, partial(self._verify, B, M, chains=chains))

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

    def _at_rest(self, B: int) -> tuple:
        """Return weights, cache, pending entries, slots and end tokens of rounds."""
        return self.params, self.engine.empty_cache(B), *self.at_rest(B)

    def _no_chunks(self, T: int, C: int | None = None) -> Any:
        return self.engine.argument(self.engine.no_chunks(T, C))

    def decode_arguments(self, B: int) -> Arguments:
        """Return the arguments of `decode_rounds` for idle slots."""
        options = self.engine.decode_options(self.sampling.scheme)
        return (*self._at_rest(B), np.int32(1), np.int32(1)), options

    def prompt_arguments(self, B: int) -> Arguments:
        """Return the arguments of `decode_beside_chunks` for idle slots."""
        chunks_TX = self._no_chunks(self.engine.config.prefill_rows)
        return (*self._at_rest(B), chunks_TX), self.engine.prompt_options(self.sampling.scheme)

    def _chunks_alone(self, B: int, T: int) -> Arguments:
        params, cache, _, slots, _ = self._at_rest(B)
        options = self.engine.prompt_options(self.sampling.scheme)
        return (params, cache, slots, *self._drawing(T)), options

    def _chunks_beside(self, B: int, T: int) -> Arguments:
        options = self.engine.prompt_options(self.sampling.scheme)
        return (*self._at_rest(B), *self._drawing(T)), options

    def _drawing(self, T: int) -> tuple[Any, Any]:
        """Return tables of chunks that draw, and of the tokens given to a rule."""
        C = self.engine.drawing_tokens
        inputs_2X = np.full((2, T * C), NOT_GIVEN, np.int32)
        return self._no_chunks(T, C), self.engine.argument(inputs_2X)

    def _write_chunks(self, B: int, T: int, C: int) -> Arguments:
        engine = self.engine
        return (engine.empty_cache(B), engine.empty_entries(T, C), self._no_chunks(T, C)), {}

    def _settle(self, B: int) -> Arguments:
        return (self.engine.empty_cache(B), self.engine.empty_pending(B)), {}

    def _verify(self, B: int, M: int, *, chunks: bool = False, chains: bool = False) -> Arguments:
        engine = self.engine
        nothing = no_drafts(0, 1)
        *state, stop_E = self._at_rest(B)
        nodes_5M = pack(nothing, nothing.count_A, np.zeros(0, np.int32), B, M, 1)
        chunks_TX = self._no_chunks(engine.config.prefill_rows) if chunks else None
        options = engine.verify_options(self.sampling.scheme, B, M, chains=chains)
        return (*state, engine.argument(nodes_5M), stop_E, chunks_TX), options

    # -- drafters on the device ----------------------------------------------------------

    def _drafts(self) -> Iterator[Program]:
        """Yield the programs of drafters, and the rounds with a single drafter."""
        spec = RolloutSpec(self.params, self.sampling, self._key())
        context = self.engine.drafter_context(spec)
        drafters = {name: x.drafter_for(context) for name, x in self.reach.drafters.items()}
        for drafter in drafters.values():
            for B in self.slots:
                yield from (Program(*program) for program in drafter.programs(B))
        for name, decisions in sorted(self.reach.alone.items()):  # the same order everywhere
            if drafters[name].in_rounds() is not None:
                for B in self.slots:
                    for decision in decisions(B):
                        arguments = partial(self._draft_rounds, drafters[name], decision, B)
                        yield Program(draft_rounds, arguments)

    def _draft_rounds(self, drafter: CachingDrafter, decision: DraftDecision, B: int) -> Arguments:
        rounds = drafter.empty_rounds(B)
        put = self.engine.argument
        numbers = put(np.ones(4, np.int32)), put(np.ones(B, np.float32))
        drafting = rounds.cache, rounds.constants, rounds.table_RX, *numbers
        options = self.engine.draft_options(self.sampling.scheme, B, decision)
        args = *self._at_rest(B), *drafting
        return args, options | {"drafting": rounds.drafting}

    # -- pages ---------------------------------------------------------------------------

    def _of_pages(self) -> Iterator[Program]:
        """Yield programs that copy pages, also to and from the host."""
        engine = self.engine
        T = self.engine.config.page_tokens
        B = self.slots[0]
        some = cache_ops.PAGES_AT_ONCE

        def pages() -> Any:
            return dataclasses.replace(engine.empty_cache(B), table_BN=None)

        def some_pages() -> Any:
            cache = kv_cache.init(
                engine.model,
                num_slots=1,
                slot_pages=1,
                num_pages=some,
                page_tokens=T,
                dtype=engine.dtype,
                for_cpu=engine.is_cpu,
                feature_layers=engine.feature_layers,
                zeros=engine.zero_pages,
            )
            return dataclasses.replace(cache, table_BN=None)

        def numbers(count: int = some) -> Any:
            return engine.put(np.full(count, -1, np.int32))

        yield Program(cache_ops.copy_pages, lambda: ((pages(), numbers(), numbers()), {}))
        if self.reach.moves:
            yield Program(cache_ops.insert_pages, lambda: ((pages(), some_pages(), numbers()), {}))
            yield Program(cache_ops.read_pages, lambda: ((pages(), numbers()), {}))
            names = ["keys", "values"]
            if engine.feature_layers is not None:
                names.append("features")
            for name in names if engine.spans_processes else ():

                def arrays(name: str = name) -> Arguments:
                    return (getattr(some_pages(), name)[0],), {}

                yield Program(cache_ops.gathered, arrays)
        if engine.feature_layers is not None:
            count = max(1, cache_ops.STATE_COPY_TOKENS // T)  # pages of one copy
            states = cache_ops.states_of_pages
            yield Program(states, lambda: ((pages().features[0], numbers(count)), {}))
            if engine.spans_processes:
                yield Program(cache_ops.gathered, partial(self._states, count * T))

    def _states(self, C: int) -> Arguments:
        with self.engine.shapes_only():
            [features_P1TF] = self.engine.empty_cache(1).features
        shape = C, features_P1TF.shape[-1]
        return (self.engine.zero_pages(shape, self.engine.dtype, (None, "features")),), {}

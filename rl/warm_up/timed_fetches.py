"""Timed fetches of one bucket through the engine, with draft tokens, plain rounds, or passes.

Drafters and budget are as in a run; the texts that drafters read are made up.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import (
    DrafterContext,
    DrafterFactory,
    Drafting,
    RolloutSpec,
    no_drafts,
)
from reprise.rl.records.trajectory import PartialRequest, Request
from reprise.rl.slots.ending import NO_TOKEN, padded_ids
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.device_drafters import DeviceDrafterSource
from reprise.rl.speculation.sources import Speculation
from reprise.spec.budget.budget import Budget, DraftDecision, FixedBudget, Sizes, best
from reprise.spec.budget.config import BANDIT
from reprise.spec.budget.goodput import DEVICE_SOURCES
from reprise.spec.drafter import Acceptance, Drafter, Drafts, LiveSlots
from reprise.spec.drafter import no_drafts as empty_drafts
from reprise.spec.reuse.chunk_price import Pass
from reprise.spec.reuse.rollout_cache import CachedGroup, CachedResponse, RolloutCache
from reprise.spec.round_times import LIVE_PART, RoundTimes
from reprise.spec.verification.nodes import NOT_GIVEN, unpack_draws
from reprise.spec.verification.verify import chunks_alone, chunks_beside_roots

TRIES = 4  # of each kind of fetch, after a try that does not count
MIN_SECONDS = 1e-9


def least(tries: Sequence[tuple[Any, float]]) -> dict[Any, float]:
    """Return the minimum seconds of each kind without its first try, always positive.

    Other processes lengthen tries, and long tries more often; nothing shortens a try.
    """
    by_kind: dict[Any, list[float]] = {}
    for kind, taken_s in tries:
        by_kind.setdefault(kind, []).append(taken_s)
    return {kind: max(min(s[1:]), MIN_SECONDS) for kind, s in by_kind.items()}


class _Forced(Budget):
    """A budget that runs another budget for its cost, but always decides for `num_nodes`.

    With one node per slot, rounds are plain decoding. Trees are filled up, since nodes determine
    the cost of a round.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.num_nodes = 0

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        self._budget.skips(live, num_slots, num_positions)
        return frozenset()

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        self._budget.limits(live, num_slots)
        return np.full(len(live), 2**30 if self.num_nodes > num_slots else 0, np.int32)

    def choose(
        self, live: LiveSlots, drafts: Drafts, sizes: Sizes, num_slots: int, num_positions: int
    ) -> DraftDecision:
        self._budget.choose(live, drafts, sizes, num_slots, num_positions)
        places_N = np.arange(drafts.max_nodes)
        missing_AN = places_N >= drafts.count_A[:, None]  # a chain after the last draft token
        drafts.tokens_AN[missing_AN] = 0
        drafts.parents_AN[:] = np.where(missing_AN, places_N - 1, drafts.parents_AN)
        drafts.prob_AN[missing_AN] = 0.0
        drafts.count_A[:] = drafts.max_nodes
        taken_A = best(drafts, np.ones(len(live)), num_slots, self.num_nodes)
        return DraftDecision(self.num_nodes, taken_A)

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        self._budget.observe(live, drafts, acceptance)


class _NoText(Drafter):
    """A drafter without drafts, used if all drafters are on the device."""

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        return empty_drafts(len(live), max_nodes)


GROUP = 8  # requests with one prompt
CHANGED = 0.1  # share of tokens that differ by response, so that drafters find part of a text


def _texts(num_slots: int, num_tokens: int, vocab_size: int) -> np.ndarray:
    """Return a text of few letters twice for each row, with different changes in each copy."""
    rng = np.random.default_rng(0)
    letters = min(16, vocab_size)
    shape = 2, num_slots, num_tokens
    texts_2BL = np.tile(rng.integers(0, letters, num_tokens), (*shape[:2], 1))
    changed_2BL = rng.random(shape) < CHANGED
    texts_2BL[changed_2BL] = rng.integers(0, letters, int(changed_2BL.sum()))
    return texts_2BL.astype(np.int32)


class TimedFetches:
    """Timed fetches of one bucket through the engine, with B busy slots. A context manager.

    `speculation` of a run sets the drafters and the budget (None for no drafts). Requests have
    made-up texts, whatever the policy draws, and restart before they reach the end of their rows.
    """

    def __init__(
        self,
        engine: Engine,
        spec: RolloutSpec,
        size: tuple[int, int],
        speculation: SpeculationConfig | None,
        live_part: int = LIVE_PART,
    ) -> None:
        B, S = size
        config = engine.config
        self._size = size
        self._spec = spec
        self._clock = engine.clock
        self._fetch_tokens = max(config.rounds_per_fetch, config.max_nodes) + 1
        # a separate engine: rows of `engine` may be in use, and its clock only times fetches
        self._engine = dataclasses.replace(engine, clock=float, lockstep=None)
        self._engine.first_slots = {B}
        self._end = min(S, engine.longest_tokens or S)
        self._start = max(1, min(S // live_part, self._end - 2 * self._fetch_tokens))
        self._texts_2BL = _texts(B, self._end + 1, engine.model.vocab_size)
        prompts = [tuple(self._texts_2BL[0, b, : self._start].tolist()) for b in range(0, B, GROUP)]
        limit = max(1, self._end - self._start)
        self._requests = [
            Request(b, prompts[b // GROUP], b // GROUP, b % GROUP, limit) for b in range(B)
        ]
        self._forced = _Forced(FixedBudget())
        self._lags = True  # drafters have not read the full texts
        ends = (*engine.model.eos_token_ids, *spec.sampling.stop_ids)
        self._stop_E = engine.put(np.full_like(padded_ids(ends), NO_TOKEN))
        self._open = contextlib.ExitStack()
        self._drafts: DrafterFactory = no_drafts
        if speculation is not None:
            self._drafts = self._factory(speculation)

    def _factory(self, config: SpeculationConfig) -> DrafterFactory:
        """Return drafters (on the host) and budget of a run in its second epoch."""
        sources = tuple(s for s in config.sources if s not in DEVICE_SOURCES)
        if not sources or not config.enabled:
            return lambda context: (_NoText(), self._forced)
        name = "goodput" if config.budget == BANDIT else config.budget  # few arms cost like a table
        config = dataclasses.replace(config, sources=sources, budget=name)
        prompts = {f"{r.group_id}": r.prompt_ids for r in self._requests}
        old_BL = self._texts_2BL[1, :, self._start :]
        last = {r.request_id: old_BL[r.request_id] for r in self._requests}
        cache = RolloutCache()
        for key, prompt in prompts.items():
            members = [r for r in self._requests if key == f"{r.group_id}"]
            old = [CachedResponse(r.sample_index, last[r.request_id], 0.0, None) for r in members]
            cache.replace(key, CachedGroup(np.asarray(prompt, np.int32), tuple(old)))
        B, S = self._size
        sizes = (B, *self._engine.config.node_sizes(B))
        times = RoundTimes({(B, M, S): 1.0 for M in sizes})
        speculation = self._open.enter_context(Speculation(config, cache, times=times))
        factory = speculation.drafter_factory(
            list(prompts), list(prompts.values()), last, group_size=GROUP
        )

        def drafting(context: DrafterContext) -> Drafting:
            drafter, budget = factory(context)
            self._forced = _Forced(budget or FixedBudget())
            return drafter, self._forced

        return drafting

    def __enter__(self) -> TimedFetches:
        B = self._size[0]
        own = self._engine
        sampling = self._spec.sampling
        ends = len({*own.model.eos_token_ids, *sampling.stop_ids})
        spec = dataclasses.replace(
            self._spec,
            sampling=dataclasses.replace(sampling, stop_ids=(), stop=(), by_task=()),
            stop_token_ids=tuple(range(-1 - ends, -1)),  # the same number, never drawn
            drafts=self._drafts,
        )
        with self._open:
            self._open.enter_context(own.mesh_context())
            self._open.callback(own.free)
            self._open.enter_context(own.rollout(spec, max_requests=B, max_tokens=self._end))
            self._begin()
            self._open = self._open.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    def _begin(self) -> None:
        """Put all requests into rows, at the start of their responses, with all keys and values."""
        own = self._engine
        rows = self._engine.rows
        own.remove([r.request_id for r in self._requests])
        rows.enter([PartialRequest(r) for r in self._requests], range(len(self._requests)))
        for b in range(len(self._requests)):
            rows.hold(b, self._start)
        rows.changed()
        own.make_room()
        self._lags = True

    def seconds(self, kind: int | Pass) -> float:
        """Return the seconds per round of a fetch with `kind` nodes, or of a pass of chunks."""
        if isinstance(kind, Pass):
            self._begin()
            taken_s = self._pass(kind)
            self._begin()  # the host table does not include the pass
            return taken_s
        table = self._engine.rows.table
        B = self._size[0]
        left_B = np.where(table.busy_B, table.limit_B - table.emitted_B, 0)
        if left_B.min() < 2 * self._fetch_tokens:
            self._begin()
        if kind > B and self._lags:
            self._fetch(kind)
        self._lags = kind <= B
        start_s = self._clock()
        rounds = self._fetch(kind)
        return (self._clock() - start_s) / rounds

    def _fetch(self, num_nodes: int) -> int:
        """Run a fetch, replace its tokens with the texts, and return its number of rounds."""
        own = self._engine
        table = self._engine.rows.table
        self._forced.num_nodes = num_nodes
        if not table.busy_B.any():  # all have finished, in rows of few positions
            self._begin()
        own.step()
        [record] = own.stats.timeline
        own.stats.timeline.clear()
        for b in np.nonzero(table.busy_B)[0].tolist():
            n = int(table.total_tokens_B[b])
            table.tokens_BL[b, self._start : n] = self._texts_2BL[0, b, self._start : n]
        return record.num_rounds

    def _pass(self, one: Pass) -> float:
        """Return the seconds of a pass of chunks, separate or with a round of root nodes."""
        own = self._engine
        rows = self._engine.rows
        options = own.prompt_options(self._spec.sampling.scheme)
        slots = rows.slots(own.put(self._spec.key))
        params = self._spec.params
        parts = [one.num_chunks]
        if not one.is_beside:
            parts = own.pass_parts(one.num_chunks, self._size[0])
        tables = [self._chunks(num_chunks) for num_chunks in parts]
        state = rows.for_round()
        jax.block_until_ready((state, slots))
        start_s = self._clock()
        given = [(own.argument(chunks), own.argument(inputs)) for chunks, inputs in tables]
        if one.is_beside:
            [(chunks, inputs)] = given
            cache, pending = state
            cache, pending, slots, results, entries = chunks_beside_roots(
                params, cache, pending, slots, self._stop_E, chunks, inputs, **options
            )
            rows.stepped(cache, pending, slots)
            calls = [(results, entries)]
        else:
            cache = rows.cache
            calls = own.at_once(
                [
                    partial(chunks_alone, params, cache, slots, chunks, inputs, **options)
                    for chunks, inputs in given
                ]
            )
        for (chunks_TX, _), (_, entries) in zip(tables, calls, strict=True):
            rows.write_chunks(entries, chunks_TX)
        for results, _ in calls:
            unpack_draws(results)
        taken_s = self._clock() - start_s
        jax.block_until_ready(rows.cache)
        return taken_s

    def _chunks(self, num_chunks: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tables of chunks at the start of rows, and of the tokens given to a rule."""
        own = self._engine
        C = self._engine.drawing_tokens
        chunks_TX = own.no_chunks(num_chunks, C)
        chunks_TX[:, 0] = np.arange(num_chunks) % self._size[0]
        chunks_TX[:, 1] = self._start
        return chunks_TX, np.full((2, num_chunks * C), NOT_GIVEN, np.int32)

    def draft_seconds(self, made_by: DeviceDrafterSource) -> dict[int, float]:
        """Return the minimum seconds to draft for all rows, by depth: depth 1 and full depth."""
        self._begin()
        drafter = made_by.drafter_for(self._engine.drafter_context(self._spec))
        live = self._engine.rows.table.live()
        max_tokens = self._engine.config.max_nodes - 1
        tries = []
        for depth in sorted({1, drafter.depth}) * (TRIES + 1):
            drafter.depth = depth
            start_s = self._clock()
            drafter.propose(live, np.full(len(live), max_tokens, np.int32), max_tokens)
            tries.append((depth, self._clock() - start_s))
        return least(tries)

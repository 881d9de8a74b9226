"""Random rollouts on the symbolic device: few pages, chunks, moves, trees. One result is right.

Sizes, requests, drafts and the source of requests follow from a seed.
"""

from __future__ import annotations

import dataclasses
import signal
from typing import NamedTuple

import numpy as np

from reprise.rl.engine.rollout_spec import RolloutSpec, draft_with
from reprise.rl.records.trajectory import FinishReason, PartialRequest, Request
from reprise.rl.slots.config import EngineConfig
from reprise.spec.budget.union import DrafterUnion
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Drafter, no_drafts
from reprise.spec.retrieval.group import GroupDrafter
from reprise.spec.retrieval.suffix_drafter import NgramDrafter
from reprise.spec.verification.sampling import step_key
from tests.support import symbolic_device
from tests.support.drive import RequestSource, drive
from tests.support.symbolic_device import MODEL, VOCAB, Broken, SymbolicEngine

KEY = step_key(0, 0)
HANG_S = 60.0
STOP, VERSION = 3, 5


class KnownTrees(Drafter):
    """Random trees around the right tokens, with wrong siblings, end tokens and all depths."""

    def __init__(self, known, rng):
        self.known, self.rng = known, rng
        self.right = rng.choice([0.6, 0.9, 1.0])

    def propose(self, live, max_nodes_A, max_nodes):
        out = no_drafts(len(live), max_nodes)
        for a, request in enumerate(live.request_ids_A.tolist()):
            known = self.known[request][len(live.response(a)) :]
            edges = self._tree(known, int(self.rng.integers(max_nodes_A[a] + 1)))
            for i, (parent, token) in enumerate(edges):
                out.parents_AN[a, i], out.tokens_AN[a, i] = parent, token
                out.prob_AN[a, i] = 0.9 ** (i + 1)
            out.count_A[a] = len(edges)
        return out

    def _tree(self, known, most):
        edges, depths, rng = [], {-1: 0}, self.rng
        for _ in range(most):
            parent = len(edges) - 1 if rng.random() < 0.6 else int(rng.integers(-1, len(edges)))
            depth = depths[parent]
            is_right = rng.random() < self.right and depth < len(known)
            wrong = STOP if rng.random() < 0.1 else int(rng.integers(VOCAB))
            edge = parent, known[depth] if is_right else wrong
            if edge not in edges:
                depths[len(edges)] = depth + 1
                edges.append(edge)
        return edges

    def finished(self, live): ...


class Chunks(RequestSource):
    """Gives requests a few at a time, in chunks, and back again with keys and values or without."""

    def __init__(self, requests, rng, longest, slots):
        self.rng, self.waiting = rng, [PartialRequest(r) for r in requests]
        self.most_requests = int(rng.choice([2, slots, 2 * slots]))
        self.longest_tokens = longest
        self.kv_tokens = int(rng.choice([2 * longest, 10**6]))
        self.brings_kv, self.stays = rng.choice([0, 0.6, 1]), rng.choice([0, 0.3, 0.8])
        self.is_whole, self.every = rng.choice([0, 0.3, 1]), int(rng.choice([1, 1, 2, 4]))
        self.running = self.calls = self.brought = 0

    def take(self, *, wait):
        self.calls += 1
        if not self.waiting and not self.running:
            return None
        if not wait and self.calls % self.every:
            return []
        most = 1 if self.rng.random() < 0.3 else len(self.waiting)
        count = min(most, len(self.waiting), self.most_requests - self.running)
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        self.running += count
        self.brought += sum(p.kv is not None for p in taken)
        return [dataclasses.replace(p, max_tokens=self._chunk()) for p in taken]

    def _chunk(self):
        return None if self.rng.random() < self.is_whole else int(self.rng.integers(1, 9))

    def chunk_ended(self, request_id, response_tokens):
        return int(self.rng.integers(1, 7)) if self.rng.random() < self.stays else 0

    def park(self, leaving):
        self.running -= len(leaving)
        for p in leaving:
            p = p if self.rng.random() < self.brings_kv else p.without_kv()
            self.waiting.insert(int(self.rng.integers(len(self.waiting) + 1)), p)

    def ended(self, trajectory):
        self.running -= 1


class Counts(NamedTuple):
    """What a rollout did: tokens, requests that were preempted, that came with keys and values."""

    tokens: int
    preemptions: int
    brought: int


def _config(rng, ways, longest):
    T, slots = int(rng.choice([2, 3, 4])), int(rng.choice([2, 3, 4, 6]))
    most = -(-longest // T)
    few = int(rng.choice([0, 1, 1, 2, 3]))  # none: as many as all can need
    return EngineConfig(
        slots=slots,
        min_slots=int(rng.choice([1, slots])),
        rounds_per_fetch=int(rng.choice([1, 2, 5])),
        max_nodes=int(rng.choice([1, 2, 4, 6])),
        prefill_rows=int(rng.choice([1, 2, 3])),
        prefill_chunk_tokens=int(rng.choice([1, 3, 5, 8])),
        page_tokens=T,
        pages=ways * (most + few) if few else 0,
    ).over(ways)


def _requests(rng, longest):
    found = []
    for group in range(int(rng.integers(1, 4))):
        shortest = int(rng.choice([1, longest // 2]))
        prompt = tuple(rng.integers(0, VOCAB, int(rng.integers(shortest, longest))).tolist())
        for sample in range(int(rng.integers(1, 7))):
            limit = int(rng.integers(1, longest - len(prompt) + 1))
            place = group, sample
            found.append(Request(100 * len(found) + 7, prompt, *place, max_new_tokens=limit))
    return [found[i] for i in rng.permutation(len(found))] if rng.random() < 0.7 else found


def _drafter(rng, known):
    kind = rng.choice(["none", "trees", "trees", "texts"])
    if kind == "trees":
        return KnownTrees(known, rng)
    texts = [NgramDrafter(), GroupDrafter()]
    return DrafterUnion(texts, ["own", "group"]) if kind == "texts" else None


def run(seed: int, ways: int) -> Counts:
    """Run one rollout. Raises AssertionError where anything is not as it has to be."""
    rng = np.random.default_rng([seed, ways])
    longest = int(rng.integers(8, 32))
    config, requests = _config(rng, ways, longest), _requests(rng, longest)
    expected = {r.request_id: symbolic_device.response(r, (STOP,)) for r in requests}
    engine = SymbolicEngine(MODEL, config, dtype=np.float32)
    engine.ways = ways
    engine.expect(len(requests), longest)
    drafter = _drafter(rng, {name: tokens for name, (tokens, _) in expected.items()})
    spec = RolloutSpec(
        *(None, SamplingConfig(max_new_tokens=longest), KEY, (STOP,)),
        policy_version=VERSION,
        drafts=draft_with(drafter),
    )
    source, done = Chunks(requests, rng, longest, config.max_slots), []
    with symbolic_device.device(), ends_within(HANG_S):
        if rng.random() < 0.3:
            done = engine.run(spec, requests)
        else:
            drive(engine, spec, source, on_finish=lambda t: (source.ended(t), done.append(t)))
    assert sorted(t.request_id for t in done) == sorted(expected)
    for t in done:
        tokens, logprobs = expected[t.request_id]
        assert t.response_ids.tolist() == tokens, (t.request_id, t.response_ids, tokens)
        np.testing.assert_array_equal(t.logprobs, np.array(logprobs, np.float32))
        np.testing.assert_array_equal(t.emission_logprobs, t.logprobs)
        assert (t.policy_versions == VERSION).all()
        assert t.finish_reason == (FinishReason.STOP if STOP in tokens else FinishReason.LENGTH)
    count = sum(len(tokens) for tokens, _ in expected.values())
    return Counts(count, engine.stats.preemptions, source.brought)


class ends_within:
    """Inside, work that takes longer of the CPU raises `Broken`. On the main thread only."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        self.before = signal.signal(signal.SIGPROF, self._hangs)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)

    def __exit__(self, *error):
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self.before)

    def _hangs(self, *args):
        raise Broken(f"no end within {self.seconds:g} s of the CPU")

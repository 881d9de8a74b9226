"""Pages of a rollout: who gets them where they are few, on a device that computes hashes."""

import dataclasses

import numpy as np
import pytest
from drive import RequestSource, drive

from reprise.rl.engine.rollout_spec import RolloutSpec, draft_with
from reprise.rl.records.trajectory import PartialRequest, Request
from reprise.rl.slot_memory.page_memory import PageMemory
from reprise.rl.slot_memory.slot_cache import SlotCache
from reprise.rl.slots.config import EngineConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.page_table import PageTable
from reprise.spec.verification.sampling import step_key
from tests.support import random_rollouts, symbolic_device
from tests.support.symbolic_device import MODEL, SymbolicEngine

KEY = step_key(0, 0)
CONFIG = EngineConfig(
    slots=4,
    min_slots=4,
    rounds_per_fetch=2,
    max_nodes=1,
    prefill_rows=2,
    prefill_chunk_tokens=8,
    page_tokens=4,
)


class Prompt(tuple):
    """A prompt that counts how often it is hashed."""

    hashed = 0

    def __hash__(self):
        Prompt.hashed += 1
        return super().__hash__()


def engine_of(ways=1, cls=SymbolicEngine, **changes):
    engine = cls(MODEL, dataclasses.replace(CONFIG, **changes), dtype=np.float32)
    engine.ways = ways
    return engine


def rollout(engine, requests, source=None, drafter=None):
    """The responses, which are what they have to be, and none of which hangs."""
    sampling, done = SamplingConfig(max_new_tokens=32), []
    spec = RolloutSpec(None, sampling, KEY, drafts=draft_with(drafter))

    def ended(trajectory):
        done.append(trajectory)
        if source is not None:
            source.ended.append(trajectory.request_id)

    with symbolic_device.device(), random_rollouts.ends_within(20):
        if source is None:
            engine.run(spec, requests, on_finish=ended)
        else:
            drive(engine, spec, source, on_finish=ended)
    found = {t.request_id: t.response_ids.tolist() for t in done}
    assert found == {r.request_id: symbolic_device.response(r)[0] for r in requests}


@pytest.mark.parametrize(("ways", "count"), [(1, 150), (2, 100), (4, 60)])
def test_random_rollouts_have_their_one_result(ways, count):
    """A soak of 20,000 is `make soak`."""
    counts = [random_rollouts.run(seed, ways) for seed in range(count)]
    assert all(sum(of_kind) > 0 for of_kind in zip(*counts, strict=True))


def test_slots_of_two_parts_with_few_pages_do_not_hang():
    """The second part's free row held the prompt, and pages were to come from it alone."""
    prompt = tuple(range(1, 16))
    group = [Request(i, prompt, 0, i, max_new_tokens=n) for i, n in enumerate((5, 3, 5, 1))]
    rollout(engine_of(2, pages=12), group)


class Turns(RequestSource):
    """Brings what each turn `(is_due, requests)` makes of the requests that left, once it is due.

    Requests leave as their chunks end, with keys and values.
    """

    longest_tokens = 40

    def __init__(self, *turns):
        self.turns, self.left, self.ended = list(turns), [], []

    def take(self, *, wait):
        if not self.turns:
            return None
        is_due, requests = self.turns[0]
        if not is_due(self):
            return []
        self.turns.pop(0)
        return requests(self.left)

    def chunk_ended(self, request_id, response_tokens):
        return 0

    def park(self, leaving):
        self.left += [dataclasses.replace(p, max_tokens=None) for p in leaving]


class Watched(SymbolicEngine):
    """An engine that notes the most rows that were busy at once."""

    most_busy = 0

    def _round(self, began_s, num_programs, num_busy, num_waiting):
        self.most_busy = max(self.most_busy, num_busy)
        super()._round(began_s, num_programs, num_busy, num_waiting)


def test_what_comes_back_shares_the_pages_of_its_prompt():
    """One sibling enters the row that holds the prompt, one brings keys and values.

    They need 6 and 8 of 11 pages; they were let in together because they were to share, and did
    not. Now they do.
    """
    prompt = tuple(range(1, 23))
    one, two = (Request(i, prompt, 0, i, max_new_tokens=18 - 16 * i) for i in range(2))
    source = Turns(
        (lambda source: True, lambda left: [PartialRequest(one, max_tokens=5)]),
        (lambda source: source.left, lambda left: [PartialRequest(two), *left]),
    )
    engine = engine_of(cls=Watched, slots=2, min_slots=2, pages=11)
    rollout(engine, [one, two], source)
    assert engine.most_busy == 2 and engine.stats.preemptions == 0


def test_what_waits_for_a_row_is_written_before_others_share_its_pages():
    """A short request ends in a round with drafts; what comes next shares pages there."""
    group = [Request(i, tuple(range(1, 11)), 0, i, max_new_tokens=20) for i in range(2)]
    short = Request(2, (1, 2), 1, 0, max_new_tokens=4)
    source = Turns(
        (lambda source: True, lambda left: [PartialRequest(group[0], max_tokens=1)]),
        (lambda source: source.left, lambda left: list(map(PartialRequest, (short, group[1])))),
        (lambda source: 2 in source.ended, lambda left: left),
    )
    known = {r.request_id: symbolic_device.response(r)[0] for r in (*group, short)}
    trees = random_rollouts.KnownTrees(known, np.random.default_rng(0))
    engine = engine_of(slots=2, min_slots=2, max_nodes=4)
    rollout(engine, [*group, short], source, trees)


def test_a_round_that_does_nothing_says_who_has_which_pages(monkeypatch):
    """A planted fault: siblings in the other part never get their copies."""
    share = PageMemory._share
    monkeypatch.setattr(
        *(PageMemory, "_share"),
        lambda self, source, row, *more: None if row > 1 else share(self, source, row, *more),
    )
    group = [Request(i, tuple(range(9)), 0, i, max_new_tokens=2) for i in range(4)]
    with pytest.raises(
        AssertionError, match=r"\[6, 5\] of 8 pages of 4 are free.*row 2 \(lacks 8\)"
    ):
        rollout(engine_of(2, pages=16), group)


def _uncounted(share, pages, source, slot, num_tokens):
    copies = share(pages, source, slot, num_tokens)
    if copies is not None:
        pages.users_P[pages.pages_BN[slot, : num_tokens // pages.page_tokens]] = 1
    return copies


FAULTS = {
    "the last page of a prompt is not copied": lambda patch: patch(
        PageTable, "share", lambda do: lambda *given: (found := do(*given)) and found[:-1]
    ),
    "a page is free once the first of its slots leaves": lambda patch: patch(
        PageTable, "share", lambda do: lambda *given: _uncounted(do, *given)
    ),
    "what waits is never written before it is moved": lambda patch: patch(
        SlotCache, "_settled", lambda do: lambda self: (self.for_round(), self.memory)[1]
    ),
    "what the last of them brings is not written": lambda patch: patch(
        *(PageMemory, "insert"),
        lambda do: lambda self, entering: do(self, entering[:-1]),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(monkeypatch, fault):
    def patch(cls, name, of):
        monkeypatch.setattr(cls, name, of(getattr(cls, name)))

    FAULTS[fault](patch)
    with pytest.raises(AssertionError):
        for seed in range(40):
            random_rollouts.run(seed, 1)


def test_rounds_hash_no_prompts():
    """Each prompt is hashed a few times for its requests, however many rounds there are."""
    group = [Prompt((g,) * 9) for g in range(3)]
    requests = [Request(i, group[i % 3], i % 3, i, max_new_tokens=20) for i in range(12)]
    Prompt.hashed = 0
    engine = engine_of(rounds_per_fetch=1)
    rollout(engine, requests)
    assert engine.stats.fetches > 50 and Prompt.hashed < 6 * len(requests)

"""Which requests enter, and which rows are preempted, by hand."""

import dataclasses

import numpy as np
import pytest
from drive import RequestSource, drive
from shapes import PLAIN

from reprise.rl.engine.rollout_spec import RolloutSpec, draft_with
from reprise.rl.records.trajectory import PartialRequest, Prefix, Request
from reprise.rl.slots import admission
from reprise.rl.slots.ending import Endings
from reprise.rl.slots.slot_table import SlotTable
from reprise.spec.budget.budget import FixedBudget, plain
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Drafter, no_drafts
from reprise.spec.verification.sampling import step_key
from tests.support import symbolic_device
from tests.support.symbolic_device import MODEL, SymbolicEngine

LIMIT = 10


def table(*lengths, order=None):
    """Rows with prompts of two tokens and responses of these lengths, of at most LIMIT."""
    rows = SlotTable(len(lengths), 12, Endings(SamplingConfig(max_new_tokens=LIMIT)))
    for row in order or range(len(lengths)):
        if lengths[row] is not None:
            rows.enter(row, PartialRequest(Request(row, (1, 2))))
            rows.total_tokens_B[row] += lengths[row]
    return rows


def chunk(num_tokens=0, max_tokens=None):
    prefix = None
    if num_tokens:
        zeros = np.zeros(num_tokens, np.int32)
        prefix = Prefix(zeros, zeros, zeros, zeros, zeros, 0, None)
    return PartialRequest(Request(9, (1, 2, 3)), prefix, max_tokens=max_tokens)


def test_a_row_needs_what_a_fetch_adds_up_to_its_limit():
    assert admission.needed_B(table(0, 7, None, 10), 4).tolist() == [6, 12, 0, 12]


@pytest.mark.parametrize(
    ("budget", "count"), [(6, 0), (13, 0), (14, 1), (20, 1), (21, 2), (26, 3), (99, 3)]
)
def test_chunks_enter_while_they_fit_beside_what_runs(budget, count):
    """The row needs 2 + 1 + 4; the chunks 3 + 4, 3 + 4, and 3 + 1 + 1 of the last one's limit."""
    waiting = [chunk(), chunk(), chunk(1, max_tokens=1)]
    assert admission.num_fitting(waiting, table(1), 4, budget) == count


@pytest.mark.parametrize(
    ("budget", "rows"), [(30, []), (21, []), (20, [1]), (14, [1]), (13, [1, 2]), (1, [1, 2])]
)
def test_the_newest_rows_are_preempted_until_the_others_fit(budget, rows):
    """Three rows of 2 + 1 + 4 each; row 0 came first, then row 2, then row 1."""
    full = table(1, 1, 1, order=(0, 2, 1))
    assert admission.rows_to_preempt(full, 4, budget) == rows


class Undecided(Drafter):
    """A drafter whose draft tokens are never tried."""

    def __init__(self):
        self.num_ended = self.num_left = 0

    def propose(self, live, max_nodes_A, max_nodes):
        return no_drafts(len(live), max_nodes)

    def finished(self, live):
        self.num_ended += len(live)

    def left(self, live):
        self.num_left += len(live)


class Plain(FixedBudget):
    """A budget that decides for as many plain rounds as there may be."""

    def choose(self, live, drafts, sizes, num_slots, num_positions):
        return plain(num_slots, 99)


@pytest.mark.parametrize("drafter", [None, Undecided()])
def test_rows_stay_within_the_budget_after_every_fetch(drafter):
    """Also where a fetch of plain rounds brings more than a tree's."""
    config = dataclasses.replace(PLAIN, rounds_per_fetch=6, max_nodes=2)
    held = []

    class Watched(SymbolicEngine):
        def _retire_ended(self):
            held.append(int(self._table.total_tokens_B[self._table.busy_B].sum()))
            return super()._retire_ended()

    class OneByOne(RequestSource):
        kv_tokens = 30

        def __init__(self):
            self.waiting = [PartialRequest(Request(i, (1, 2, 3))) for i in range(4)]

        def take(self, *, wait):
            return [self.waiting.pop()] if self.waiting else None

    engine = Watched(MODEL, config, dtype=np.float32)
    sampling = SamplingConfig(max_new_tokens=20)
    spec = RolloutSpec(None, sampling, step_key(0, 0), drafts=draft_with(drafter, Plain()))
    with symbolic_device.device():
        drive(engine, spec, OneByOne())
    assert engine.stats.preemptions > 0
    assert 20 < max(held) <= OneByOne.kv_tokens
    if drafter is not None:
        assert (drafter.num_ended, drafter.num_left) == (4, engine.stats.preemptions)


def test_a_row_is_preempted_in_the_middle_of_its_prompt():
    """Its request begins anew; the tokens are those of a budget that holds all rows."""
    config = dataclasses.replace(PLAIN, prefill_chunk_tokens=2, rounds_per_fetch=1)
    sampling, lacked = SamplingConfig(max_new_tokens=8), []
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 20, n).tolist()) for n in (2, 3, 2, 20)]

    class Watched(SymbolicEngine):
        def make_room(self):
            before = self._table.missing_tokens_B * self._table.busy_B
            super().make_room()
            lacked.extend(before[~self._table.busy_B].tolist())

    class Source(RequestSource):
        def __init__(self, kv_tokens):
            self.kv_tokens = kv_tokens
            self.waiting = [PartialRequest(Request(i, p)) for i, p in enumerate(prompts)]

        def take(self, *, wait):
            waiting, self.waiting = self.waiting, []
            return waiting or None

    def responses(engine, kv_tokens):
        done = {}
        spec = RolloutSpec(None, sampling, step_key(0, 0))
        with symbolic_device.device():
            drive(
                *(engine, spec, Source(kv_tokens)),
                on_finish=lambda t: done.update({t.request_id: t.response_ids.tolist()}),
            )
        return done

    engine = Watched(MODEL, config, dtype=np.float32)
    want = responses(engine, 1000)
    assert not any(lacked) and len(want) == 4
    assert responses(engine, 36) == want
    assert 0 < max(lacked) < 19

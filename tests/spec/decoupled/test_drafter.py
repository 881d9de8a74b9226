"""The verifying worker's part: what is told and when, and what comes of what is sent."""

import dataclasses

import numpy as np
import pytest
from live_by_hand import live_texts

from reprise.spec.config import SamplingConfig
from reprise.spec.decoupled.drafter import DecoupledDrafter, OnePlan
from reprise.spec.decoupled.messages import Block, DraftPlan
from reprise.spec.drafter import Acceptance, Source, no_drafts

PLAN = DraftPlan(4)


class FakeLink:
    def __init__(self):
        self.generation, self.told, self.closed, self.waits = 0, [], [], []
        self.sent, self.sent_while_waiting, self.calls = [], [], 0

    def send(self, commits, closed):
        self.calls += 1
        self.told += commits
        self.closed += closed

    def take(self):
        blocks, self.sent = self.sent, []
        return blocks

    def wait(self, timeout_s):
        self.waits.append(timeout_s)
        self.sent, self.sent_while_waiting = self.sent_while_waiting, []


class NotedPlans(OnePlan):
    def __init__(self, *options):
        super().__init__(*options)
        self.heard, self.forgotten, self.own = [], [], {}

    def plan(self, request_id, batch):
        return self.own.get(request_id, super().plan(request_id, batch))

    def observed(self, live, accepted_A, seen_A):
        ids = live.request_ids_A.tolist()
        self.heard.append([*zip(ids, accepted_A.tolist(), seen_A.tolist(), strict=True)])

    def forget(self, request_ids):
        self.forgotten += request_ids


def made(num_links=1, deadline_s=0.0):
    links, plans = [FakeLink() for _ in range(num_links)], NotedPlans(PLAN, deadline_s)
    return DecoupledDrafter(links, plans, SamplingConfig(temperature=0.5)), *links


def proposed(drafter, live, most=8):
    drafts = drafter.propose(live, np.full(len(live), most), 8)
    return [drafts.tokens_AN[a, : drafts.count_A[a]].tolist() for a in range(len(live))]


def chain(base, *tokens, request=0, round=1):
    n = len(tokens)
    prob = 0.5 ** np.arange(1, n + 1, dtype=np.float32)
    parents = np.arange(-1, n - 1, dtype=np.int32)
    return Block(request, round, base, np.array(tokens, np.int32), parents, prob)


def told(link):
    """(request, round, first, tokens) of what the link was told since the last call."""
    found = [(c.request_id, c.round, c.first, c.tokens.tolist()) for c in link.told]
    link.told = []
    return found


# --- what is told ---------------------------------------------------------------------------


def test_first_the_whole_text_and_then_what_is_new():
    drafter, link = made()
    assert proposed(drafter, live_texts([1, 2, 3])) == [[]]
    (commit,) = link.told
    assert (commit.request_id, commit.round, commit.first) == (0, 1, 0)
    assert commit.tokens.tolist() == [1, 2, 3] and commit.total_tokens == 3
    assert (commit.prompt_tokens, commit.remaining_tokens, commit.plan) == (2, 20, PLAN)
    assert commit.processing == (0.5, 0.0, 1.0) and commit.chain.tolist() == []
    told(link)
    proposed(drafter, live_texts([1, 2, 3, 4, 5]))
    assert told(link) == [(0, 2, 3, [4, 5])]


def test_nothing_is_told_twice():
    drafter, link = made()
    live = live_texts([1, 2, 3])
    proposed(drafter, live), proposed(drafter, live)
    drafter.committed(live)
    assert told(link) == [(0, 1, 0, [1, 2, 3])] and link.calls == 1


def test_what_is_told_is_not_the_engines_own_table():
    drafter, link = made()
    live = live_texts([1, 2, 3])
    proposed(drafter, live)
    live.tokens_BL[:] = 0
    assert told(link) == [(0, 1, 0, [1, 2, 3])]


def test_rounds_without_a_draft_are_told_of():
    drafter, link = made()
    drafter.committed(live_texts([1, 2, 3]))
    drafter.committed(live_texts([1, 2, 3, 4]))
    assert [len(c.chain) for c in link.told] == [0, 0]
    assert told(link) == [(0, 1, 0, [1, 2, 3]), (0, 2, 3, [4])]


def test_the_chain_is_what_is_verified():
    drafter, link = made()
    proposed(drafter, live_texts([1, 2, 3]))
    link.sent = [chain(3, 4, 5, 6, 7, 8)]
    assert proposed(drafter, live_texts([1, 2, 3, 4]), most=3) == [[5, 6, 7]]
    assert link.told[-1].chain.tolist() == [5, 6, 7]


def test_of_a_tree_the_chain_is_the_likeliest_path():
    drafter, link = made()
    proposed(drafter, live_texts([1, 2, 3]))
    tree = [[4, 5, 6, 7, 8], [-1, -1, 1, 0, 3]], [0.5, 0.4, 0.3, 0.2, 0.1]
    columns = *(np.array(x, np.int32) for x in tree[0]), np.array(tree[1], np.float32)
    link.sent = [Block(0, 1, 3, *columns)]
    assert proposed(drafter, live_texts([1, 2, 3])) == [[4, 5, 6, 7, 8]]
    proposed(drafter, live_texts([1, 2, 3, 5]))  # which has told nothing of that tree
    link.sent = [Block(0, 2, 4, *columns)]
    proposed(drafter, live_texts([1, 2, 3, 5, 4]))
    assert link.told[-1].chain.tolist() == [7, 8]


def test_requests_are_told_of_to_one_link_each():
    drafter, even, odd = made(2)
    live = live_texts([1, 2, 3], [1, 2, 4], [1, 2, 5])
    proposed(drafter, live)
    assert [c.request_id for c in even.told] == [0, 2] and [c.request_id for c in odd.told] == [1]
    drafter.finished(live.take(np.array([1, 2])))
    assert (even.closed, odd.closed) == ([2], [1])


def test_processing_and_plans_are_those_of_each_request():
    drafter, link = made()
    drafter._plans.own[1] = DraftPlan(2, False)
    processing = np.array([[1, 0, 1], [0.25, 5, 0.5]], np.float32)
    live = dataclasses.replace(live_texts([1, 2], [1, 2]), processing_A3=processing)
    proposed(drafter, live)
    assert [c.processing for c in link.told] == [(1.0, 0.0, 1.0), (0.25, 5.0, 0.5)]
    assert [c.plan for c in link.told] == [PLAN, DraftPlan(2, False)]


def test_a_link_of_a_new_generation_is_told_anew():
    drafter, even, odd = made(2)
    live = live_texts([1, 2, 3], [1, 2, 4])
    proposed(drafter, live)
    told(even), told(odd)
    even.generation = 1
    proposed(drafter, live)
    assert told(even) == [(0, 2, 0, [1, 2, 3])] and told(odd) == []
    proposed(drafter, live_texts([1, 2, 3, 4], [1, 2, 4]))
    assert told(even) == [(0, 3, 3, [4])]


def test_who_leaves_is_told_of_once():
    drafter, link = made()
    live = live_texts([1, 2, 3], [1, 2, 4])
    proposed(drafter, live.take(np.array([0])))
    drafter.finished(live)
    assert link.closed == [0], "the other one was never told of"
    drafter.left(live)
    assert link.closed == [0] and drafter._plans.forgotten == [0, 1, 0, 1]
    # where it comes back it is new
    told(link)
    proposed(drafter, live.take(np.array([0])))
    assert told(link) == [(0, 1, 0, [1, 2, 3])]


# --- waiting --------------------------------------------------------------------------------


def test_a_plan_limits_the_draft_tokens_of_a_round():
    """Of a chain of two and a second choice beside each the likeliest; others have them all."""
    drafter, link = made()
    drafter._plans.own = {1: DraftPlan(4, max_nodes=2), 2: DraftPlan(0, max_nodes=0)}
    live = live_texts([1, 2, 3], [1, 2, 3], [1, 2, 3])
    tokens, parents = np.array([7, 8, 9], np.int32), np.array([-1, 0, -1], np.int32)
    prob = np.array([0.5, 0.25, 0.125], np.float32)
    link.sent = [Block(r, 1, 3, tokens, parents, prob) for r in range(3)]
    assert proposed(drafter, live) == [[7, 8, 9], [7, 8], []]


def test_a_round_waits_where_most_requests_lack_what_is_on_its_way():
    drafter, link = made(deadline_s=0.5)
    one, two = live_texts([1, 2, 3], [1, 2, 3]), live_texts([1, 2, 3, 4], [1, 2, 3, 4])
    assert proposed(drafter, one) == [[], []] and link.waits == [], "nobody was told of yet"
    link.sent_while_waiting = [chain(3, 4, 5)]
    assert proposed(drafter, two) == [[5], []] and link.waits == [0.5]
    # one of two lacks its block still: that is most
    proposed(drafter, two)
    assert len(link.waits) == 2
    link.sent = [chain(4, 6, round=2, request=1)]
    assert proposed(drafter, two) == [[5], [6]] and len(link.waits) == 2


def test_few_that_lack_a_block_keep_nobody_waiting():
    drafter, link = made(deadline_s=0.5)
    live = live_texts(*[[1, 2, 3]] * 3)
    proposed(drafter, live)
    link.sent = [chain(3, 4, request=0), chain(3, 4, request=1)]
    assert proposed(drafter, live) == [[4], [4], []] and link.waits == []


def test_a_block_that_has_come_and_was_wrong_is_not_waited_for():
    drafter, link = made(deadline_s=0.5)
    proposed(drafter, live_texts([1, 2, 3]))
    link.sent = [chain(3, 9)]
    assert proposed(drafter, live_texts([1, 2, 3, 4])) == [[]] and link.waits == []


def test_all_links_together_take_no_longer_than_patience():
    drafter, *links = made(4, deadline_s=0.5)
    live = live_texts(*[[1, 2, 3]] * 4)
    proposed(drafter, live), proposed(drafter, live)
    assert sum(s for link in links for s in link.waits) == pytest.approx(0.5)


# --- what is learnt -------------------------------------------------------------------------


def masks(*rows):
    return np.array([[x == "x" for x in row] for row in rows])


def test_plans_hear_what_was_accepted_and_of_how_many_it_is_known():
    drafter, link = made()
    live = live_texts([1, 2], [1, 2], [1, 2])
    proposed(drafter, live)
    link.sent = [chain(2, 4, 5, 6, request=r) for r in range(2)]
    drafts = drafter.propose(live, np.full(3, 8), 8)
    accepted = masks("xx......", "........", "........")
    observed = masks("xxx.....", "xxx.....", "........")
    drafter.observe(drafts, Acceptance(True, accepted, observed))
    # behind a wrong one nothing is known
    assert drafter._plans.heard == [[(0, 2, 3), (1, 0, 1), (2, 0, 0)]]


def test_only_its_own_part_of_a_union_counts():
    drafter, _ = made()
    live = live_texts([1, 2])
    proposed(drafter, live)
    merged = no_drafts(1, 4)
    merged.count_A[:] = 3
    merged.sources_AN[0] = [Source.MODEL, Source.OWN, Source.MODEL, Source.MODEL]
    drafter.observe(merged, Acceptance(True, masks("xx.."), masks("xxx.")))
    assert drafter._plans.heard == [[(0, 1, 2)]]

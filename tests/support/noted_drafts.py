"""What a rollout drafted, told by the drafter that it had."""

import collections

import numpy as np

from reprise.spec.budget import goodput
from reprise.spec.budget.goodput import Goodput
from reprise.spec.drafter import Drafter, Source


class Noted(Drafter):
    """Drafts as another drafter does, and counts the trees that were verified."""

    def __init__(self, drafter):
        self.drafter, self.trees = drafter, collections.Counter()
        self.finished, self.in_rounds = drafter.finished, drafter.in_rounds

    def propose(self, live, max_nodes_A, max_nodes):
        return self.drafter.propose(live, max_nodes_A, max_nodes)

    def observe(self, drafts, acceptance):
        columns = drafts.tokens_AN, drafts.parents_AN, acceptance.observed_AN.sum(axis=1)
        for tokens_N, parents_N, n in zip(*columns, strict=True):
            if n:
                self.trees[(*tokens_N[:n].tolist(), *parents_N[:n].tolist())] += 1


class Asked(Drafter):
    """Drafts as another drafter does; fails if it is told of what it was not asked for."""

    def __init__(self, drafter):
        self.drafter, self.proposed, self.told = drafter, None, 0
        self.committed, self.finished, self.left = drafter.committed, drafter.finished, drafter.left

    def propose(self, live, max_nodes_A, max_nodes):
        assert len(live) and (max_nodes_A > 0).all()
        drafts = self.drafter.propose(live, max_nodes_A, max_nodes)
        self.proposed = drafts.tokens_AN.copy()
        return drafts

    def observe(self, drafts, acceptance):
        assert self.proposed is not None, "told of a round in which it was not asked"
        assert np.array_equal(drafts.tokens_AN, self.proposed), "told of others' drafts"
        assert len(acceptance.accepted_AN) == len(self.proposed)
        assert not (drafts.sources_AN == Source.CACHED).any()
        self.drafter.observe(drafts, acceptance)
        self.proposed, self.told = None, self.told + 1


class NotedGoodput(Goodput):
    """Decides as `Goodput` does, and counts its decisions for rounds that draft on the device."""

    num_unseen = 0

    def choose_on_device(self, live, max_tokens, sizes, num_slots):
        decision = super().choose_on_device(live, max_tokens, sizes, num_slots)
        self.num_unseen += decision is not None
        return decision


def share_of_same(one, other):
    """The share of two counts' trees that both have."""
    return (one & other).total() / max(one.total(), other.total())


def drafts_at_any_gain(monkeypatch):
    """Have `Goodput` draft wherever a round promises any more tokens a second than a plain one."""
    monkeypatch.setattr(goodput, "BETTER", 1.0)

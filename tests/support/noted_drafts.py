"""What a rollout drafted, told by the drafter that it had."""

import collections

from spec.budget.goodput import Goodput
from spec.drafter import Drafter


class Noted(Drafter):
    """Drafts as another drafter does, and counts the trees that were verified."""

    def __init__(self, drafter):
        self.drafter, self.trees = drafter, collections.Counter()
        self.propose, self.finished = drafter.propose, drafter.finished
        self.in_rounds = drafter.in_rounds

    def observe(self, drafts, acceptance):
        columns = drafts.tokens_AN, drafts.parents_AN, acceptance.observed_AN.sum(axis=1)
        for tokens_N, parents_N, n in zip(*columns, strict=True):
            if n:
                self.trees[(*tokens_N[:n].tolist(), *parents_N[:n].tolist())] += 1


class NotedGoodput(Goodput):
    """Decides as `Goodput` does, and counts its decisions for rounds that draft on the device."""

    num_unseen = 0

    def unseen(self, live, most_tokens, sizes, num_slots):
        decision = super().unseen(live, most_tokens, sizes, num_slots)
        self.num_unseen += decision is not None
        return decision


def share_of_same(one, other):
    """The share of two counts' trees that both have."""
    return (one & other).total() / max(one.total(), other.total())

"""Drafters for the parity tests: all-knowing, wrong, adversarial, deep and bushy.

Those that know the answer are given it (`Golden.beyond` by request id). None is a
real drafter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from drafts_by_hand import NO_DRAFT, Draft, chain, stack
from parity_model import MODEL

from reprise.rl.records.trajectory import Origin
from reprise.spec.drafter import Drafter, LiveSlots

V = MODEL.vocab_size


def origins_if_all_accepted(num_tokens, max_nodes):
    """Rounds of `max_nodes` tokens, the last of each a bonus, and a last round of the rest.

    Nothing is drafted for a request that may have one token more.
    """
    origins = []
    while num_tokens > 0:
        emitted = min(max_nodes, num_tokens)
        origins += [Origin.ACCEPTED] * (emitted - 1) + [Origin.BONUS]
        num_tokens -= emitted
    return origins


def drafted(trajectory):
    """The origins of its tokens, without those of rounds that drafted nothing for it.

    So are rounds beside chunks of prompts, and that of a request that may have one token more.
    """
    return [o for o in trajectory.origins.tolist() if o != Origin.PLAIN]


class View(NamedTuple):
    """A live request, as the drafters below want it."""

    request_id: int
    response_ids: list[int]


class Knowing(Drafter):
    """Base: knows every request's tokens; counts calls and who finished."""

    def __init__(self, golden, seed: int = 0) -> None:
        self.golden, self.rng = golden, np.random.default_rng(seed)
        self.finished_ids: list[int] = []

    def propose(self, live, max_nodes_A, max_nodes):
        views = [View(int(r), live.response(a).tolist()) for a, r in enumerate(live.request_ids_A)]
        return stack([self.draft(view, max_nodes) for view in views], max_nodes)

    def finished(self, live: LiveSlots) -> None:
        self.finished_ids += live.request_ids_A.tolist()

    def coming(self, view: View) -> list[int]:
        """The tokens that plain decoding would give next, beyond the end too."""
        beyond = self.golden[view.request_id].beyond
        assert tuple(view.response_ids) == beyond[: len(view.response_ids)]
        return list(beyond[len(view.response_ids) :])

    def draft(self, view: View, max_nodes: int) -> Draft:
        raise NotImplementedError


class Oracle(Knowing):
    """The right chain, up to the end of the response and no further."""

    def draft(self, view, max_nodes):
        left = len(self.golden[view.request_id].response_ids) - len(view.response_ids)
        return chain(self.coming(view)[: min(left, max_nodes)])


class Overrunning(Knowing):
    """The right chain, always as long as may be: past end tokens and past the limit."""

    def draft(self, view, max_nodes):
        tokens = self.coming(view)[:max_nodes]
        return chain(tokens + [0] * (max_nodes - len(tokens)))


class TooLong(Knowing):
    """Twice as many nodes as it may."""

    def draft(self, view, max_nodes):
        tokens = self.coming(view)[: 2 * max_nodes]
        return chain(tokens + [0] * (2 * max_nodes - len(tokens)))


class Wrong(Knowing):
    """A chain of which the first token is wrong, and the others would be right."""

    def draft(self, view, max_nodes):
        first, *rest = self.coming(view)[:max_nodes]
        return chain([(first + 1) % V, *rest])


class Bushy(Knowing):
    """The right path among wrong branches, each as long as the right one.

    A level is: wrong child, right child, wrong child, of the right node above; the
    first wrong child carries on with the right tokens. The last nodes fill the tree.
    """

    def draft(self, view, max_nodes):
        tokens, parents = [], []
        above, decoy = -1, -1
        for right in self.coming(view):
            level = [(above, (right + 1) % V), (above, right), (above, (right + 2) % V)]
            if decoy >= 0:
                level.insert(0, (decoy, right))
            if len(tokens) + len(level) > max_nodes:
                break
            decoy = len(tokens)  # of this level's first node
            above = len(tokens) + level.index((above, right))
            for parent, token in level:
                parents.append(parent)
                tokens.append(token)
        taken = {t for p, t in zip(parents, tokens, strict=True) if p == -1}
        filler = [t for t in range(V) if t not in taken][: max_nodes - len(tokens)]
        return Draft(tokens + filler, parents + [-1] * len(filler))


class HalfRight(Knowing):
    """Chains with a token wrong here and there, drafts in two rounds of three only."""

    def draft(self, view, max_nodes):
        if self.rng.random() < 1 / 3:
            return NO_DRAFT
        tokens = self.coming(view)[: self.rng.integers(1, max_nodes + 1)]
        return chain([t if self.rng.random() < 0.8 else (t + 1) % V for t in tokens])


class RandomTrees(Knowing):
    """Any tree at all, at times with a right token; its tokens come from a few, to collide."""

    def draft(self, view, max_nodes):
        coming = self.coming(view)
        pool = [*coming[:4], *self.rng.integers(0, V, 3).tolist()]
        tokens, parents, seen = [], [], set()
        for _ in range(self.rng.integers(0, max_nodes + 1)):
            parent = int(self.rng.integers(-1, len(tokens)))
            token = int(self.rng.choice(pool))
            if (parent, token) not in seen:
                seen.add((parent, token))
                tokens.append(token)
                parents.append(parent)
        return Draft(tokens, parents)

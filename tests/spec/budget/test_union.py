"""Unions of draft trees by hand, and against a plain dictionary of paths."""

import numpy as np
import pytest
from drafts_by_hand import drafts

from reprise.spec.budget.union import RETRY_ROUNDS, DrafterUnion, merge
from reprise.spec.drafter import Drafter, Drafts, LiveSlots, Source, plain_acceptance


def paths(tree: Drafts, a: int) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    for i in range(tree.count_A[a]):
        above = () if tree.parents_AN[a, i] < 0 else found[tree.parents_AN[a, i]]
        found.append((*above, int(tree.tokens_AN[a, i])))
    assert len(set(found)) == len(found)
    return {p: float(tree.prob_AN[a, i]) for i, p in enumerate(found)}


@pytest.mark.parametrize("seed", range(50))
def test_against_a_dictionary(seed):
    rng = np.random.default_rng(seed)

    def tree():
        nodes, seen = [], set()
        for _ in range(rng.integers(0, 7)):
            parent = int(rng.integers(-1, len(nodes)))
            token = int(rng.integers(0, 3))
            if (parent, token) not in seen:
                seen.add((parent, token))
                above = 1.0 if parent < 0 else nodes[parent][2]
                nodes.append((parent, token, float(np.float32(above * rng.choice([0.5, 1.0])))))
        order = sorted(range(len(nodes)), key=lambda i: -nodes[i][2])  # parents first
        place = {-1: -1} | {i: n for n, i in enumerate(order)}
        return [(place[nodes[i][0]], *nodes[i][1:]) for i in order]

    many = [drafts(tree(), tree()) for _ in range(3)]
    most = rng.integers(0, 7, 2)
    got = merge(many, most)
    for a in range(2):
        want: dict[tuple[int, ...], float] = {}
        for d in many:
            for path, prob in paths(d, a).items():
                want[path] = max(want.get(path, 0.0), prob)
        kept = paths(got, a)
        assert len(kept) == min(most[a], len(want), 6)
        assert all(want[p] == c for p, c in kept.items())
        left = [c for p, c in want.items() if p not in kept]
        assert not left or not kept or min(kept.values()) >= max(left)
        assert list(kept.values()) == sorted(kept.values(), reverse=True)


class One(Drafter):
    """Gives the same tree each time."""

    def __init__(self, tree, source=Source.OTHER):
        self.tree, self.source, self.asked, self.told = tree, source, 0, []

    def propose(self, live, max_nodes_A, max_nodes):
        self.asked += 1
        return drafts(self.tree, source=self.source)

    def committed(self, live):
        self.told.append("committed")

    def finished(self, live):
        self.told.append("finished")

    def left(self, live):
        self.told.append("left")


def test_union_asks_all_and_tells_all():
    parts = [One([(-1, 4, 0.5)]), One([(-1, 9, 0.75)])]
    ids = np.array([1])
    live = LiveSlots(ids, ids, ids, ids, ids, ids, np.zeros((2, 2), np.int32))
    got = DrafterUnion(parts).propose(live, np.array([5]), 6)
    assert paths(got, 0) == {(9,): 0.75, (4,): 0.5}
    union = DrafterUnion(parts, ["one", "other"])
    union.skipped = frozenset({"other"})
    union.propose(live, np.array([5]), 6)
    for tell in (union.committed, union.left, union.finished):
        tell(live)
    assert [p.asked for p in parts] == [2, 1]
    assert [p.told for p in parts] == [["committed", "left", "finished"]] * 2


def test_a_source_that_brings_nothing_is_asked_more_rarely():
    good, bad = One([(-1, 4, 0.5)], Source.GROUP), One([(-1, 9, 0.75)], Source.OWN)
    union, ids = DrafterUnion([good, bad]), np.array([1])
    live = LiveSlots(ids, ids, ids, ids, ids, ids, np.zeros((2, 2), np.int32))
    for _ in range(2 * RETRY_ROUNDS):
        drafts = union.propose(live, np.array([5]), 6)
        union.observe(drafts, plain_acceptance(drafts, np.array([[4]]), np.array([1])))
    assert good.asked == 2 * RETRY_ROUNDS
    assert bad.asked == 3  # the first time, and whenever all are asked
    for _ in range(6 * RETRY_ROUNDS):  # none brings anything: all are asked
        drafts = union.propose(live, np.array([5]), 6)
        union.observe(drafts, plain_acceptance(drafts, np.array([[7]]), np.array([1])))
    before = good.asked, bad.asked
    union.propose(live, np.array([5]), 6)
    assert (good.asked, bad.asked) == (before[0] + 1, before[1] + 1)

"""Drafts of copies: who drafts for whom, and what is known of whoever is further."""

import numpy as np
import pytest
from fake_ahead import CountsOn
from hypothesis import given
from hypothesis import strategies as st
from live_by_hand import live_texts

from reprise.sched.request import COPIES, copy_of
from reprise.spec.decoupled.copies import SURE, CopiesDrafter, Progress
from reprise.spec.drafter import Acceptance, LiveSlots, Source


def array(*tokens):
    return np.array(tokens, np.int32)


def texts(**rows):
    """Live requests: `a0=[…]` is request 0, `b1=[…]` the second copy of request 1."""
    names = [int(name[1]) + COPIES * "abcd".index(name[0]) for name in rows]
    live = live_texts(*rows.values())
    columns = {f: getattr(live, f) for f in LiveSlots.__dataclass_fields__}
    return LiveSlots(**columns | {"request_ids_A": np.array(names, np.int64)})


class Noted(CountsOn):
    """Counts on from another number than others do, and notes what it is told."""

    def __init__(self, of=Source.OTHER):
        super().__init__()
        self.of, self.told, self.skips = of, [], []

    def propose(self, live, max_nodes_A, max_nodes):
        self.skips.append(self.skipped)
        drafts = super().propose(live, max_nodes_A, max_nodes)
        drafts.sources_AN[:] = self.of
        return drafts

    def observe(self, drafts, acceptance):
        self.told.append(("observe", drafts.tokens_AN.tolist(), acceptance))

    def committed(self, live):
        self.told.append(("committed", live.request_ids_A.tolist()))

    def finished(self, live):
        self.told.append(("finished", live.request_ids_A.tolist()))

    def left(self, live):
        self.told.append(("left", live.request_ids_A.tolist()))


def made(num_methods=2):
    usual, methods = Noted(Source.MODEL), [Noted(Source.OWN), Noted(Source.GROUP)][:num_methods]
    return CopiesDrafter(usual, methods, copy_of, Progress()), usual, *methods


def proposed(drafter, live, most=4):
    return drafter.propose(live, np.full(len(live), most), most)


def tokens(drafts, a=0):
    return drafts.tokens_AN[a, : drafts.count_A[a]].tolist()


# --- progress -------------------------------------------------------------------------------


def test_the_furthest_is_known_of_whoever_is_watched():
    progress = Progress()
    assert progress.ahead_of(3, array(1, 2)).tolist() == [] and not progress.is_watched(3)
    progress.watch(3)
    assert progress.is_watched(3)
    assert progress.ahead_of(3, array(1, 2)).tolist() == []
    assert progress.ahead_of(3, array(1)).tolist() == [2]
    assert progress.ahead_of(3, array(1, 2, 3)).tolist() == []
    progress.watch(3)  # which forgets nothing
    assert progress.ahead_of(3, array()).tolist() == [1, 2, 3]
    progress.forget(3), progress.forget(3)
    assert not progress.is_watched(3) and progress.ahead_of(3, array(1)).tolist() == []


def test_progress_is_not_the_engines_own_table():
    progress, row = Progress(), array(1, 2, 3)
    progress.watch(0)
    progress.ahead_of(0, row)
    row[:] = 9
    assert progress.ahead_of(0, array(1)).tolist() == [2, 3]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=20))
def test_nobody_is_told_what_is_not_there(calls):
    """Responses are beginnings of one: the answer is what the furthest has behind."""
    whole, progress, furthest = np.arange(9, dtype=np.int32), Progress(), dict.fromkeys(range(2), 0)
    for request_id in furthest:
        progress.watch(request_id)
    for request_id, n in calls:
        got = progress.ahead_of(request_id, whole[:n]).tolist()
        far = furthest.get(request_id, 0)
        assert got == (whole[n:far].tolist() if request_id in furthest else [])
        if request_id in furthest:
            furthest[request_id] = max(far, min(n, 9))


# --- drafts ---------------------------------------------------------------------------------


def test_without_copies_the_usual_drafter_drafts_for_all():
    drafter, usual, own, group = made()
    drafts = proposed(drafter, texts(a0=[1, 2, 5], a1=[1, 2, 7]))
    assert [tokens(drafts, a) for a in (0, 1)] == [[6, 7, 8, 9], [8, 9, 10, 11]]
    assert drafts.sources_AN[0].tolist() == [Source.MODEL] * 4
    assert len(usual.asked) == 1 and not own.asked and not group.asked
    assert drafter.in_rounds() is None
    assert not drafter._progress.is_watched(0), "nobody needs what they have"


def test_each_copy_has_a_method_of_its_own():
    drafter, usual, own, group = made()
    drafts = proposed(drafter, texts(c3=[1, 2, 5], a0=[1, 2, 5], b1=[1, 2, 5], c2=[1, 2, 7]))
    assert [r % COPIES for r, *_ in group.asked[0]] == [3, 2]
    assert [r % COPIES for r, *_ in own.asked[0]] == [1] and usual.asked[0][0][0] == 0
    sources = Source.GROUP, Source.MODEL, Source.OWN, Source.GROUP
    assert [x[0] for x in drafts.sources_AN.tolist()] == list(sources)
    assert tokens(drafts, 3) == [8, 9, 10, 11]


def test_more_copies_than_methods_share_the_last():
    drafter, _, own = made(1)
    proposed(drafter, texts(d0=[1, 2, 5]))
    assert len(own.asked) == 1


def test_whoever_is_behind_drafts_what_the_other_has():
    drafter, usual, own, _ = made()
    further = texts(b0=[1, 2, 5, 60, 70, 80])
    proposed(drafter, further)
    drafts = proposed(drafter, texts(a0=[1, 2, 5], a1=[1, 2, 5]))
    assert tokens(drafts) == [60, 70, 80] and drafts.parents_AN[0, :3].tolist() == [-1, 0, 1]
    assert drafts.prob_AN[0, :3].tolist() == pytest.approx([SURE, SURE**2, SURE**3])
    assert drafts.sources_AN[0, :3].tolist() == [Source.COPY] * 3
    assert tokens(drafts, 1) == [6, 7, 8, 9] and [r for r, *_ in usual.asked[0]] == [1]
    # and the other way
    proposed(drafter, texts(a0=[1, 2, 5, 60, 70, 80, 90]))
    assert tokens(proposed(drafter, further)) == [90] and len(own.asked) == 1


def test_what_a_copy_has_is_cut_to_what_is_asked():
    drafter, *_ = made()
    proposed(drafter, texts(b0=[1, 2, 5, 60, 70, 80]))
    behind = texts(a0=[1, 2, 5])
    assert tokens(proposed(drafter, behind, most=2)) == [60, 70]
    drafts = drafter.propose(behind, np.array([1]), 4)
    assert tokens(drafts) == [60]


def test_skipped_drafters_are_skipped_by_the_usual_one_only():
    drafter, usual, own, _ = made()
    drafter.skipped = frozenset({"model"})
    proposed(drafter, texts(a0=[1, 2, 5], b1=[1, 2, 5]))
    assert usual.skips == [{"model"}] and own.skips == [frozenset()]


# --- what is told ---------------------------------------------------------------------------


def test_each_learns_of_its_own_drafts():
    drafter, usual, own, group = made()
    drafts = proposed(drafter, texts(a0=[1, 2, 5], b1=[1, 2, 7], a2=[1, 2, 9]))
    accepted = np.arange(12).reshape(3, 4) % 5 == 0
    drafter.observe(drafts, Acceptance(True, accepted, ~accepted))
    ((kind, of_usual, acceptance),) = usual.told
    assert kind == "observe" and of_usual == drafts.tokens_AN[[0, 2]].tolist()
    assert acceptance.accepted_AN.tolist() == accepted[[0, 2]].tolist()
    assert acceptance.observed_AN.tolist() == (~accepted)[[0, 2]].tolist()
    assert own.told[0][1] == drafts.tokens_AN[[1]].tolist() and group.told == []


def test_nobody_learns_of_what_a_copy_had():
    drafter, usual, own, _ = made()
    proposed(drafter, texts(b0=[1, 2, 5, 6]))
    drafts = proposed(drafter, texts(a0=[1, 2, 5]))
    drafter.observe(drafts, Acceptance(True, drafts.tokens_AN > 0, drafts.tokens_AN > 0))
    assert usual.told == own.told == []


@pytest.mark.parametrize("kind", ["committed", "finished", "left"])
def test_each_is_told_of_its_own_requests(kind):
    drafter, usual, own, group = made()
    getattr(drafter, kind)(texts(a0=[1, 2, 5], b1=[1, 2, 7], a2=[1, 2, 9], c0=[1, 2]))
    assert usual.told == [(kind, [0, 2])] and own.told == [(kind, [1 + COPIES])]
    assert group.told == [(kind, [2 * COPIES])]


def test_who_has_ended_is_watched_no_more_and_who_has_left_is():
    drafter, usual, *_ = made()
    live = texts(b0=[1, 2, 5, 6])
    proposed(drafter, live)
    drafter.left(live)
    assert tokens(proposed(drafter, texts(a0=[1, 2, 5]))) == [6]
    drafter.finished(live)
    assert tokens(proposed(drafter, texts(a0=[1, 2, 5]))) == [6, 7, 8, 9], "by the usual drafter"
    assert len(usual.asked) == 1

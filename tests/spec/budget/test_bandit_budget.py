"""The bandit as a budget: its arms, what it asks for, and what it is told."""

import numpy as np
import pytest
from drafts_by_hand import NO_DRAFT, chain, stack
from live_by_hand import live_slots

from reprise.spec.budget import bandit as bandit_module
from reprise.spec.budget.bandit import PLAIN, BanditBudget, make_bandit, node_counts, strategies
from reprise.spec.budget.config import TunerConfig
from reprise.spec.budget.union import DrafterUnion
from reprise.spec.drafter import Acceptance, Drafter, Source, no_drafts
from reprise.spec.round_times import RoundTimes


@pytest.fixture(autouse=True)
def exploits(monkeypatch):
    """No arm is chosen at random."""
    monkeypatch.setattr(bandit_module, "EPSILON", 0.0)


CONFIG = TunerConfig(thresholds=(1, 5), verify_tokens=(3, 1), depths=(2, 4))
DEEPEST = {"learned": 4, "model": 4}
TIMES = RoundTimes(
    {(4, 4 * n, 64): 1.0 + 0.25 * (n - 1) for n in (1, 2, 4)},
    {"learned": {(4, 1, 64): 0.2, (4, 5, 64): 1.0}, "model": {(4, 1, 64): 0.5, (4, 5, 64): 2.5}},
)


def names(config, sources):
    return [s.name for s in strategies(config, sources, top_k=3, deepest=DEEPEST)]


def test_arms_are_every_drafter_alone_the_found_ones_and_all():
    assert names(CONFIG, ("history", "own", "learned")) == [
        "plain",
        *(
            f"{name} × {n}"
            for n in (3, 1)
            for name in (
                "history",
                "own",
                "learned depth 2",
                "learned depth 4",
                "history+own",
                "history+own+learned depth 2",
                "history+own+learned depth 4",
            )
        ),
    ]
    assert names(CONFIG, ("own",)) == ["plain", "own × 3", "own × 1"]
    assert [s.depth for s in strategies(CONFIG, ("learned",), 3, DEEPEST)] == [0, 2, 4, 2, 4]


def test_arms_are_as_deep_as_their_drafters_get():
    arms = strategies(CONFIG, ("learned", "model"), 3, {"learned": 4, "model": 3})
    assert [(s.sources, s.depth) for s in arms if s.verify_tokens == 3] == [
        (("learned",), 2),
        (("learned",), 4),
        (("model",), 2),
        (("learned", "model"), 2),
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"thresholds": (2, 5)},
        {"thresholds": (1,)},
        {"thresholds": (1, 1)},
        {"thresholds": (1, 9, 5)},
        {"thresholds": (1, 5, 9, 20)},
        {"verify_tokens": (3, 7)},
        {"verify_tokens": ()},
        {"depths": ()},
        {"depths": (2, 2)},
    ],
)
def test_impossible_tuner_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        TunerConfig(**{"thresholds": (1, 5), "verify_tokens": (3, 1)} | wrong)


class Silent(Drafter):
    def propose(self, live, max_nodes_A, max_nodes):
        return no_drafts(len(live), max_nodes)

    def finished(self, live):
        pass


def tuned(sources=("history", "own")):
    union = DrafterUnion([Silent() for _ in sources], names=sources)
    bandit = make_bandit(CONFIG, sources, 3, DEEPEST, seed=0)
    return BanditBudget(bandit, TIMES, union, DEEPEST, is_copy=lambda r: r >= 100), bandit


def play(budget, right, num_requests=3):
    """One round: what is skipped, how much is asked for, and `right` draft tokens of each stand."""
    live = live_slots(num_requests)
    skipped = budget.skips(live, 4, 64)
    limits = budget.limits(live, 4)
    if not limits.any():
        return skipped, 0
    found = stack([chain(range(int(limits[0])))] * num_requests, 3)
    decision = budget.choose(live, found, [8, 16], 4, 64)
    accepted_AN = np.zeros(found.tokens_AN.shape, bool)
    accepted_AN[:, : min(right, int(limits[0]))] = True
    budget.observe(live, found, Acceptance(True, accepted_AN, accepted_AN))
    return skipped, decision.num_nodes


def test_untried_arms_come_first_then_the_best():
    budget, bandit = tuned()
    seen = [play(budget, right=3) for _ in range(7)]
    assert seen[0] == (frozenset({"history", "own"}), 0)  # plain
    assert seen[1] == (frozenset({"own"}), 16)
    assert seen[2] == (frozenset({"history"}), 16)
    assert seen[3] == (frozenset(), 16)
    # four tokens of three requests in 1.75 seconds; three arms are alike: the first of them
    assert seen[4] == seen[5] == seen[6] == seen[1]
    plain, history, *_ = bandit.candidates(3)
    assert plain == PLAIN
    assert bandit.median_reward(plain, 3) == pytest.approx(3 / 1.0)
    assert bandit.median_reward(history, 3) == pytest.approx(4 * 3 / 1.75)


def test_drafts_that_are_never_accepted_leave_plain_decoding():
    budget, _ = tuned()
    for _ in range(5):
        play(budget, right=0)
    assert play(budget, right=0) == (frozenset({"history", "own"}), 0)


def test_the_learned_drafters_seconds_count():
    budget, bandit = tuned(("learned",))
    for _ in range(3):
        play(budget, right=2)
    _, shallow, deep = bandit.candidates(3)
    assert (shallow.depth, deep.depth) == (2, 4)
    assert bandit.median_reward(shallow, 3) == pytest.approx(3 * 3 / (1.75 + 0.4))
    assert bandit.median_reward(deep, 3) == pytest.approx(3 * 3 / (1.75 + 0.8))


def test_a_draft_model_has_depths_and_seconds_of_its_own():
    budget, bandit = tuned(("learned", "model"))
    for _ in range(7):
        play(budget, right=2)
    arms = bandit.candidates(3)
    assert [(s.sources, s.depth, s.top_k) for s in arms[3:]] == [
        (("model",), 2, 0),
        (("model",), 4, 0),
        (("learned", "model"), 2, 3),
        (("learned", "model"), 4, 3),
    ]
    seconds = [9 / bandit.median_reward(s, 3) - 1.75 for s in arms[3:]]
    assert seconds == pytest.approx([1.0, 2.0, 1.4, 2.8])
    assert [budget._union.named(name).depth for name in ("learned", "model")] == [4, 4]


def test_a_round_of_more_requests_is_of_another_range():
    budget, bandit = tuned()
    play(budget, right=1, num_requests=6)
    assert play(budget, right=1, num_requests=6)[1] == 8
    assert bandit.best(2) is None


def test_of_each_range_one_size_is_needed():
    config = TunerConfig(thresholds=(1, 5, 17), verify_tokens=(7, 3))
    assert [node_counts(config, slots) for slots in (4, 8, 16, 32)] == [{32}, {32}, {64}, set()]
    assert node_counts(config, 6) == {48, 24}  # 4 to 6 requests


def test_a_batch_counts_as_more_than_half_of_its_slots():
    """One request in a bucket of 16 is a round of the range of 9: what is compiled for it."""
    config = TunerConfig(thresholds=(1, 5), verify_tokens=(3, 1))
    union = DrafterUnion([Silent()], names=("own",))
    times = RoundTimes({(16, 16 * n, 64): 1.0 for n in (1, 2, 4)})
    budget = BanditBudget(make_bandit(config, ("own",), 0, {}, 0), times, union)
    live = live_slots(1)
    budget.skips(live, 16, 64)
    budget.skips(live, 16, 64)
    assert budget.limits(live, 16).tolist() == [1]


def test_a_round_without_room_for_all_takes_the_likeliest():
    budget, _ = tuned(("own",))
    live = live_slots(3)
    for _ in range(2):  # plain decoding is the first arm
        budget.skips(live, 4, 64)
    found = stack([chain(range(3))] * 3, 3)
    decision = budget.choose(live, found, [6, 8], 4, 64)
    assert decision.num_nodes == 8 and decision.taken_A.sum() == 4


def cached_beside(found):
    """The first request's draft is its cached response."""
    found.sources_AN[0], found.prob_AN[0] = Source.CACHED, 0.95 ** np.arange(1, 4)
    return found


def test_no_arm_is_paid_for_rounds_in_which_cached_responses_go_on():
    budget, bandit = tuned(("own",))
    live = live_slots(3)
    play(budget, right=0)  # plain decoding
    before = bandit.state()
    budget.skips(live, 4, 64)
    found = cached_beside(stack([chain(range(3))] * 3, 3))
    decision = budget.choose(live, found, [8, 16], 4, 64)
    others = np.array([1, 2])  # as it is told
    accepted = Acceptance(True, np.ones((2, 3), bool), np.ones((2, 3), bool))
    budget.observe(live.take(others), found.take(others), accepted)
    assert decision.num_nodes == 16 and bandit.state()["windows"] == before["windows"]
    play(budget, right=1)
    assert bandit.median_reward(bandit.candidates(3)[1], 3) == pytest.approx(2 * 3 / 1.75)


@pytest.mark.parametrize(("kept", "num_nodes"), [(0.95, 16), (0.1, 4)])
def test_cached_responses_go_on_where_plain_decoding_is_chosen_if_that_pays(kept, num_nodes):
    budget, _ = tuned(("own",))
    live = live_slots(3)
    budget.skips(live, 4, 64)
    assert not budget.limits(live, 4).any()  # plain decoding is the first arm
    found = cached_beside(stack([chain(range(3)), NO_DRAFT, NO_DRAFT], 3))
    found.prob_AN[0] = kept ** np.arange(1, 4)  # of three requests, in 1.75 plain rounds
    assert budget.choose(live, found, [8, 16], 4, 64).num_nodes == num_nodes


def test_what_drafting_workers_send_is_an_arm_without_depths():
    arms = strategies(CONFIG, ("own", "model", "learned"), 3, {"learned": 4})
    assert [s.name for s in arms if s.verify_tokens == 1] == [
        "own × 1",
        "model × 1",
        "learned depth 2 × 1",
        "learned depth 4 × 1",
        "own+model × 1",
        "own+model+learned depth 2 × 1",
        "own+model+learned depth 4 × 1",
    ]


def test_drafts_of_drafting_workers_take_no_seconds_of_the_round():
    union = DrafterUnion([Silent()], names=("model",))
    bandit = make_bandit(CONFIG, ("model",), 0, {}, seed=0)
    budget = BanditBudget(bandit, TIMES, union)  # which have some for a draft model of its own
    for _ in range(2):
        play(budget, right=1)
    assert bandit.median_reward(bandit.candidates(3)[1], 3) == pytest.approx(2 * 3 / 1.75)


def test_nothing_is_learnt_of_copies_nor_of_what_a_copy_had():
    budget, bandit = tuned(("own",))
    play(budget, right=0)
    live = live_slots(3)
    live.request_ids_A[2] = 100  # a copy
    budget.skips(live, 4, 64)
    found = stack([chain(range(3))] * 3, 3)
    found.sources_AN[1] = Source.COPY
    budget.choose(live, found, [8, 16], 4, 64)
    accepted = np.array([[True, False, False], [True] * 3, [True] * 3])
    budget.observe(live, found, Acceptance(True, accepted, accepted))
    arm = bandit.candidates(3)[1]
    assert bandit.median_reward(arm, 3) == pytest.approx(2 * 3 / 1.75)
    others = np.array([1, 2])
    budget.observe(
        live.take(others), found.take(others), Acceptance(True, accepted[1:], accepted[1:])
    )
    assert len(bandit._rewards[0, arm.name]) == 1

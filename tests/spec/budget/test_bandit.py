"""BEG-MAB: a trace by hand, exploration, changes, what it comes to, and a checkpoint in between."""

import json

import numpy as np
import pytest

from reprise.rl.checkpoint import contents
from reprise.spec.budget import bandit as bandit_module
from reprise.spec.budget.bandit import BegMab, Strategy
from reprise.spec.budget.config import TunerConfig


def strategy(name, verify_tokens):
    return Strategy(name, ("eagle",) if verify_tokens else (), 4, 2, verify_tokens)


DEEP, WIDE, FLAT, PLAIN = (
    strategy(*a) for a in (("deep", 64), ("wide", 64), ("flat", 16), ("plain", 0))
)
ALL = (DEEP, FLAT, WIDE, PLAIN)


def bandit(strategies=ALL, seed=0, thresholds=(1, 9, 33)):
    sizes = tuple(sorted({s.verify_tokens for s in strategies} - {0}, reverse=True))
    return BegMab(strategies, TunerConfig(thresholds, sizes), seed)


@pytest.fixture
def rule(monkeypatch):
    """Sets ε, and the rewards of an arm that count."""

    def changed(epsilon=bandit_module.EPSILON, window=bandit_module.WINDOW):
        monkeypatch.setattr(bandit_module, "EPSILON", epsilon)
        monkeypatch.setattr(bandit_module, "WINDOW", window)

    return changed


def reward(mab, strategy, value, batch_size):
    """A round of one second, or a little more, that is worth `value` tokens a second."""
    mab.record(strategy, batch_size / value, [0] * batch_size, batch_size)


def names(strategies):
    return [s.name for s in strategies]


def test_a_trace_by_hand(rule):
    """ε = 0, w = 3, batches of 2: r = (Σ accepted + 2) / elapsed."""
    rule(epsilon=0.0, window=3)
    mab = bandit((DEEP, FLAT, WIDE), thresholds=(1, 9))
    assert mab.best(2) is None
    assert mab.select(2) == DEEP
    mab.record(DEEP, 0.5, [3, 1], 2)  # r = (4 + 2) / 0.5 = 12
    assert mab.median_reward(DEEP, 2) == 12
    assert mab.best(2) == DEEP
    assert mab.select(2) == WIDE  # untried
    mab.record(WIDE, 0.25, [0, 1], 2)  # r = 12
    assert mab.select(2) == DEEP  # the first of equals
    mab.record(DEEP, 1.0, [2, 2], 2)  # r = 6: median 9
    assert mab.median_reward(DEEP, 2) == 9 and mab.select(2) == WIDE
    mab.record(WIDE, 0.5, [0, 0], 2)  # r = 4: median 8
    assert mab.median_reward(WIDE, 2) == 8 and mab.select(2) == DEEP
    mab.record(DEEP, 1.0, [1, 1], 2)  # r = 4; 12, 6, 4: median 6
    assert mab.select(2) == WIDE
    for _ in range(2):
        mab.record(WIDE, 1.0, np.array([1, 2]), 2)  # r = 5: the window is 4, 5, 5
    assert mab.median_reward(WIDE, 2) == 5 and mab.select(2) == DEEP
    assert mab.select(20) == FLAT and mab.median_reward(FLAT, 20) is None


def test_plain_decoding_everywhere(rule):
    """Besides the group of each range; with a threshold more it has the last range alone."""
    rule(epsilon=0.0)
    mab = bandit(thresholds=(1, 9))
    assert names(mab.candidates(1)) == ["deep", "wide", "plain"]
    assert names(mab.candidates(9)) == names(mab.candidates(999)) == ["flat", "plain"]
    mab = bandit()
    assert names(mab.candidates(1)) == ["deep", "wide", "plain"]
    assert names(mab.candidates(32)) == ["flat", "plain"]
    assert names(mab.candidates(33)) == ["plain"]
    for _ in range(2):
        assert mab.select(99) == PLAIN
    assert mab.state()["draws"] == 0, "where there is one candidate nothing is drawn"
    # what it brings with many requests says nothing of few
    mab = bandit(thresholds=(1, 9))
    for batch_size, best in ((4, DEEP), (16, PLAIN)):
        for s in mab.candidates(batch_size):
            reward(mab, s, 100 if s == best else 50, batch_size)
    assert (mab.select(4), mab.select(16)) == (DEEP, PLAIN)
    mab = bandit(thresholds=(1, 9))
    mab.record(PLAIN, 1.0, [], 16)
    assert mab.median_reward(PLAIN, 16) == 16, "a token each"


@pytest.mark.statistical
def test_the_bandit_explores_at_its_rate(rule):
    """Of 4000 draws with ε = 0.2 each of three arms but the best comes 4000 · 0.05 times.

    Within z = 5.2 standard deviations each: false alarm rate 6e-7.
    """
    arms = [strategy(str(i), 8) for i in range(4)]
    rule(epsilon=0.2)
    mab = bandit(arms, thresholds=(1,), seed=3)
    for arm in arms:
        reward(mab, arm, 100 if arm.name == "2" else 10, 4)
    chosen = [mab.select(4).name for _ in range(4000)]
    for name in "013":
        assert abs(chosen.count(name) - 200) < 5.2 * (4000 * 0.05 * 0.95) ** 0.5
    assert mab.state()["draws"] == 4000


def play(mab, rates, rounds, rng, batch_size=4):
    """`rounds` rounds; noise is log-normal. Gives the names chosen."""
    chosen = []
    for _ in range(rounds):
        arm = mab.select(batch_size)
        reward(mab, arm, rates[arm.name] * np.exp(rng.normal(0, 0.05)), batch_size)
        chosen.append(arm.name)
    return chosen


def test_the_bandit_follows_a_change_of_rewards(rule):
    """The best arm becomes the worst: half a window later it is left, and found again later."""
    rule(window=8)
    mab = bandit([DEEP, WIDE], thresholds=(1,), seed=1)
    rng = np.random.default_rng(0)
    assert play(mab, {"deep": 100, "wide": 80}, 100, rng).count("deep") > 80
    chosen = play(mab, {"deep": 40, "wide": 80}, 100, rng)
    assert chosen[:4].count("deep") >= 3 and chosen[10:].count("wide") > 75
    assert mab.best(4) == WIDE
    play(mab, {"deep": 100, "wide": 80}, 300, rng)
    assert mab.best(4) == DEEP


def test_a_checkpoint_changes_nothing(tmp_path, rule):
    rule(epsilon=0.4, window=4)
    mab = bandit(seed=5)
    rng = np.random.default_rng(0)
    rates = {"deep": 100, "wide": 90, "flat": 50, "plain": 70}
    for batch_size in (2, 16, 40):
        play(mab, rates, 30, rng, batch_size)
    state = mab.state()
    assert json.loads(json.dumps(state)) == state
    contents.write_host(tmp_path, contents.encode_host({"bandit": state}))
    other = bandit(seed=6)
    play(other, rates, 5, rng)  # is gone afterwards
    other.load_state(contents.read_host(tmp_path)["bandit"])
    assert other.state() == state
    both = [
        [play(m, rates, 50, np.random.default_rng(1), batch_size) for batch_size in (2, 16, 40)]
        for m in (mab, other)
    ]
    assert both[0] == both[1] and mab.state() == other.state() != state


def test_strategies_that_a_checkpoint_has_not_are_untried_and_others_are_forgotten():
    before, after = bandit((DEEP, FLAT, PLAIN)), bandit((WIDE, FLAT, PLAIN))
    for of_before, batch_size in ((DEEP, 2), (FLAT, 16), (PLAIN, 40)):
        reward(before, of_before, 7, batch_size)
    after.load_state(before.state())
    found = [(s.name, after.median_reward(s, n)) for n in (2, 16, 40) for s in after.candidates(n)]
    found = [(name, value) for name, value in found if value]
    assert found == [("flat", 7), ("plain", 7)]


def test_choices_are_counted_until_they_are_taken_and_rewards_are_of_all_ranges(rule):
    rule(epsilon=0.0)
    mab = bandit()
    for batch_size, value in ((2, 5), (2, 7), (16, 3)):
        reward(mab, mab.select(batch_size), value, batch_size)
    assert mab.take_chosen() == {"deep": 1, "wide": 1, "flat": 1} and not mab.take_chosen()
    assert mab.rewards() == {"deep": [5], "wide": [7], "flat": [3]}

"""The gap of the bandit's choice, without a clock."""

import numpy as np
import pytest

from benchmarks.drafter.tuner import tuner_gap
from spec.budget.bandit import BanditConfig, Strategy


def strategy(name, verify_tokens=4):
    return Strategy(name, ("learned",) if verify_tokens else (), 4, 2, verify_tokens)


SLOW, FAST, SMALL = strategy("slow"), strategy("fast"), strategy("small", 2)
ALWAYS = BanditConfig((1,), epsilon=0.1, window=8)


def gap(round_s, accept_lens, config=ALWAYS, batch_size=3, **more):
    return tuner_gap(
        round_s, accept_lens, config, batch_size, **{"rounds": 40, "seeds": 20, **more}
    )


def test_rounds_that_never_vary_leave_no_gap():
    # 3 requests: (1 + 1) · 3 / 0.5 = 12 tokens a second against (3 + 1) · 3 / 0.8 = 15
    found = gap({SLOW: [0.5], FAST: [0.8]}, {SLOW: [1], FAST: [3]})
    assert found == {"tuner_gap": 0.0, "tuner_gap_p95": 0.0, "tuner_found_best": 1.0}


def test_a_median_that_misses_what_is_rare_leaves_its_gap():
    # one request; 30 draft tokens every tenth round are 4 tokens a round, 2 draft tokens always are
    # 3
    rare = {SLOW: [0] * 9 + [30], FAST: [2]}
    found = gap({SLOW: [1.0], FAST: [1.0]}, rare, batch_size=1, rounds=300)
    assert found["tuner_gap"] == found["tuner_gap_p95"] == pytest.approx(1 - 3 / 4)
    assert found["tuner_found_best"] == 0


def test_the_best_counts_though_it_may_not_be_chosen():
    # from 3 requests on only SMALL: (1 + 1) / 1 against (3 + 1) / 1
    config = BanditConfig((1, 3))
    round_s, accept_lens = {FAST: [1.0], SMALL: [1.0]}, {FAST: [3], SMALL: [1]}
    assert gap(round_s, accept_lens, config, batch_size=2)["tuner_gap"] == 0
    found = gap(round_s, accept_lens, config, batch_size=3)
    assert found["tuner_gap"] == pytest.approx(0.5)


def test_a_few_rounds_of_noise_leave_more_of_a_gap_than_many():
    """Fixed seeds: no probability of a false alarm."""
    rng = np.random.default_rng(0)
    round_s = {s: rng.lognormal(0, 0.3, 50) for s in (SLOW, FAST)}
    accept_lens = {SLOW: rng.poisson(2, 99), FAST: rng.poisson(3, 99)}
    config = BanditConfig((1,), epsilon=0.2, window=32)
    found = [gap(round_s, accept_lens, config, batch_size=2, rounds=n, seeds=60) for n in (2, 300)]
    assert found[1]["tuner_found_best"] > found[0]["tuner_found_best"]
    assert found[1]["tuner_gap"] == 0 < found[0]["tuner_gap_p95"] < 0.5
    # the same again, whatever was drawn in between
    assert found[0] == gap(round_s, accept_lens, config, batch_size=2, rounds=2, seeds=60)


def test_missing_measurements_are_named():
    for round_s, accept_lens in (
        ({SLOW: [], FAST: [1.0]}, {SLOW: [1], FAST: [1]}),
        ({SLOW: [1.0], FAST: [1.0]}, {FAST: [1]}),
    ):
        with pytest.raises(ValueError, match=r"got none for \['slow'\]"):
            gap(round_s, accept_lens)

"""The parts of the figures by hand, without a clock."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from benchmarks.drafter import parts
from models import transformer
from models.config import ModelConfig
from spec.budget.bandit import Strategy
from spec.budget.config import BanditConfig
from spec.eagle import model as eagle
from spec.eagle.batch import HiddenStates

MODEL = ModelConfig("qwen3", 20, 8, 1, 2, 1, 4, 8, qk_norm=True, max_positions=64)


def sequence(prompt_tokens, response_tokens, width=8):
    num_tokens = prompt_tokens + response_tokens
    states = np.ones((num_tokens - 1, width), np.float32)
    return HiddenStates(np.full(num_tokens, 3, np.int32), prompt_tokens, states, 0)


def sequences(*response_tokens, prompt_tokens=6):
    return [sequence(prompt_tokens, n) for n in response_tokens]


def entries(batches):
    return sum(int(b.counts_BT.sum()) for b in batches)


# -- turns and ratios


def test_every_turn_begins_with_another_arm():
    order = []

    def arm(name):
        order.append(name)
        return float(len(order))

    found = parts.in_turns({n: lambda n=n: arm(n) for n in "abc"}, 4)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert found == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}


def test_a_ratio_is_the_median_of_the_turns():
    # of the medians it would be 6 / 3, and a slow turn of both arms would count
    assert parts.ratio([6, 2, 90], [2, 4, 3]) == 3


# -- packing


def test_padded_rows_are_as_long_as_the_longest_of_their_own_batch():
    batches = parts.padded_batches(sequences(4, 20, 3, 60, 10), 2)
    assert [b.tokens_BT.shape for b in batches] == [(2, 32), (2, 96), (2, 32)]
    assert entries(batches) == 4 + 20 + 3 + 60 + 10
    # not sorted: each batch has the sequences as they came
    assert [b.sequence_BT.sum(axis=1).tolist() for b in batches] == [[10, 26], [9, 66], [16, 0]]


def test_packed_batches_are_as_many_with_fewer_rows():
    made = sequences(4, 20, 3, 60, 10, 9, 8, 7)
    padded = parts.padded_batches(made, 4)
    packed = parts.packed_batches(made, 4, 96)
    # 121 response tokens and 8 prompts of 6 are 169: two rows of 96
    assert [b.tokens_BT.shape for b in packed] == [(1, 96), (1, 96)]
    assert len(padded) == len(packed)
    assert entries(packed) == entries(padded) == 121


def test_the_same_work_on_both_sides_or_no_figure(monkeypatch):
    shape = eagle.config_for(MODEL)
    frozen = eagle.frozen(transformer.init(MODEL, jax.random.key(0)), None)
    made = sequences(4, 20, 3, 7)
    row = parts.compare_packing(shape, frozen, made, 2, 32, 2)
    assert (row["packed"]["entries"], row["padded"]["entries"]) == (34, 34)
    assert row["packed"]["shapes"] == ["1x32", "1x32"]
    assert row["padded"]["shapes"] == ["2x32", "2x32"]
    assert row["packed"]["filled"] == round((34 + 4 * 6) / 64, 3)
    assert row["padded"]["filled"] == round((34 + 4 * 6) / 128, 3)
    assert [len(found) for found in row["seconds"].values()] == [2, 2]
    assert (row["sequences"], row["mean_tokens"], row["longest_tokens"]) == (4, 14.5, 26)

    packed_batches = parts.packed_batches
    with monkeypatch.context() as patch:
        patch.setattr(parts, "packed_batches", lambda found, *a: packed_batches(found[1:], *a))
        with pytest.raises(AssertionError, match="the same work"):
            parts.compare_packing(shape, frozen, made, 2, 32, 1)


def test_long_tailed_lengths():
    prompts = [4, 9, 6, 5] * 250
    made = parts.long_tailed([sequence(p, 7) for p in prompts], 0.5, 300, seed=3)
    assert [s.prompt_tokens for s in made] == prompts
    lengths = np.array([len(s.tokens_T) for s in made])
    responses = lengths - np.array(prompts)
    assert responses.max() == 300 - 9 and lengths.max() <= 300
    # one seed, so no probability: 1000 draws' spread is within 0.04 of theirs, were it not for
    # floors
    assert abs(parts.response_spread(made) - 0.5) < 0.04
    assert np.mean(responses) > 1.05 * np.median(responses)
    assert all(s.hidden_TW.shape == (len(s.tokens_T) - 1, 8) for s in made)
    again = parts.long_tailed([sequence(p, 7) for p in prompts], 0.5, 300, seed=4)
    assert [len(s.tokens_T) for s in again] != lengths.tolist()


def test_spread_of_lengths():
    made = sequences(round(math.e**2), round(math.e**6))
    assert parts.response_spread(made) == pytest.approx(2, abs=0.03)


def test_the_policys_own_responses_are_caught_whole():
    model = dataclasses.replace(MODEL, eos_token_ids=(1,), max_positions=16)
    params = transformer.init(model, jax.random.key(0))
    rows = [{"prompt_ids": [4, 5, 6]}, {"prompt_ids": [7, 8]}]
    found = parts.responses_with_states(model, params, rows, 3)
    starts = sorted(s.tokens_T[: s.prompt_tokens].tolist() for s in found)
    assert starts == [[4, 5, 6]] * 3 + [[7, 8]] * 3
    for s in found:
        assert s.hidden_TW.shape == (len(s.tokens_T) - 1, 8)
        ended = s.tokens_T[-1] == 1
        assert ended or len(s.tokens_T) - s.prompt_tokens == 16 - 3


# -- the tuner


def strategy(name, verify_tokens=4):
    return Strategy(name, ("learned",) if verify_tokens else (), 4, 2, verify_tokens)


SLOW, FAST, SMALL = strategy("slow"), strategy("fast"), strategy("small", 2)
ALWAYS = BanditConfig((1,), epsilon=0.1, window=8)


def gap(round_s, accept_lens, config=ALWAYS, batch_size=3, **more):
    return parts.tuner_gap(
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

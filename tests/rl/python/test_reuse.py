"""Reuse in custom loops: samples that start from the last response to their prompt."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from reprise.rl.python import api
from reprise.spec.config import SamplingConfig
from tests.rl.python.test_api import LORA, ONE, PROMPTS, open_policy, tokens, train

REUSE = (ONE, "Engine.max_nodes=4", "Reuse.fresh_share=0.0")
LENIENT = (*REUSE, "Reuse.mode='lenient:1'")


def samples_of(groups):
    return [sample for group in groups for sample in group]


def assert_scored_now(policy, samples):
    """The log-probs of all tokens, kept ones included, are the current policy's."""
    found = policy.forward([api.Datum.of(sample) for sample in samples])
    for sample, logprobs in zip(samples, found, strict=True):
        before = len(sample.prompt_ids) - 1
        np.testing.assert_allclose(logprobs[before:], sample.logprobs, atol=1e-5)


def test_the_first_responses_are_those_without_reuse(tiny):
    policy = open_policy(tiny, *LENIENT)
    first = policy.sample(PROMPTS, 3, seed=0)
    assert tokens(first) == tokens(open_policy(tiny).sample(PROMPTS, 3, seed=0))
    assert not any(sample.is_reused.any() for sample in samples_of(first))


def test_later_weights_keep_a_part_of_the_last_responses(tiny):
    policy = open_policy(tiny, *LENIENT)
    before = samples_of(policy.sample(PROMPTS, 8, seed=0))
    train(policy, 1)
    after = samples_of(policy.sample(PROMPTS, 8, seed=1))
    kept = [int(sample.is_reused.sum()) for sample in after]
    for old, new, n in zip(before, after, kept, strict=True):
        assert new.is_reused[:n].all() and new.token_ids[:n] == old.token_ids[:n]
    assert 0 < sum(kept) < sum(len(sample.token_ids) for sample in after)
    assert_scored_now(policy, after)


def test_whole_responses_are_kept_once_and_of_earlier_weights_alone(tiny):
    policy = open_policy(tiny, *REUSE, "Reuse.mode='full'")
    before = policy.sample(PROMPTS, 4, seed=0)
    again = policy.sample(PROMPTS, 4, seed=1)  # the same weights
    assert tokens(again) != tokens(before)
    assert not any(sample.is_reused.any() for sample in samples_of(again))
    train(policy, 1)
    after = policy.sample([PROMPTS[0], *PROMPTS], 4, seed=2)
    assert tokens(after)[0] == tokens(again)[0] and tokens(after)[2] == tokens(again)[1]
    assert tokens(after)[1] != tokens(again)[0], "a prompt that comes twice is answered anew"
    assert all(sample.is_reused.all() for sample in samples_of([after[0], after[2]]))
    assert not any(sample.is_reused.any() for sample in after[1])
    assert_scored_now(policy, samples_of(after))


def test_plain_samples_and_other_samplings_reuse_nothing(tiny):
    policy = open_policy(tiny, *REUSE, "Reuse.mode='full'")
    first = policy.sample(PROMPTS, 4, seed=0)
    train(policy, 1)
    colder = dataclasses.replace(policy.config.sampling, temperature=0.5)
    for options in ({"drafts": False}, {"sampling": colder}):
        some = policy.sample(PROMPTS, 4, seed=1, **options)
        assert not any(sample.is_reused.any() for sample in samples_of(some)), options
    assert tokens(policy.sample(PROMPTS, 4, seed=2)) == tokens(first), "which stay the last ones"


def test_responses_that_are_missing_are_named(tiny, capsys):
    policy = open_policy(tiny, *LENIENT)
    policy.sample(PROMPTS, 2, seed=0)
    train(policy, 1)
    assert not capsys.readouterr().err
    policy.sample(PROMPTS, 4, seed=1)
    lines = capsys.readouterr().err.splitlines()
    text = "has 2 cached responses where 4 are asked for: the others are generated afresh"
    assert lines == [f"warning: {prompt!r} {text}" for prompt in PROMPTS]


def test_greedy_responses_stay_those_of_the_weights(tiny):
    greedy = SamplingConfig(temperature=0.0, max_new_tokens=12)
    policy = open_policy(tiny, *LENIENT)
    plain = open_policy(tiny)
    policy.sample(PROMPTS, 1, greedy)
    train(policy, 2)
    train(plain, 2)
    assert tokens(policy.sample(PROMPTS, 1, greedy)) == tokens(plain.sample(PROMPTS, 1, greedy))


def test_coupled_samples_are_those_of_the_same_noise(tiny):
    """`repeated_noise` has the noise of `coupled`, and keeps nothing."""
    draw = "Sampling.draw='gumbel_blocks'"
    coupled = open_policy(tiny, *REUSE, "Reuse.mode='coupled'", draw)
    repeated = open_policy(tiny, *REUSE, "Reuse.mode='repeated_noise'", draw)
    kept = 0
    for _ in range(3):
        found = coupled.sample(PROMPTS, 4)
        assert tokens(found) == tokens(repeated.sample(PROMPTS, 4))
        kept += sum(int(sample.is_drafted.sum()) for sample in samples_of(found))
        train(coupled, 1)
        train(repeated, 1)
    assert kept > 0
    with pytest.raises(ValueError, match="names the noise .*, got the seed 3; fix: leave it out"):
        coupled.sample(PROMPTS, seed=3)


@pytest.mark.parametrize("mode", ["lenient:1", "coupled"])
def test_a_saved_state_goes_on_with_its_responses(tiny, tmp_path, mode):
    settings = *REUSE, f"Reuse.mode='{mode}'", "Sampling.draw='gumbel_blocks'"
    whole = open_policy(tiny, *settings)
    whole.sample(PROMPTS[1:], 4)
    whole.sample(PROMPTS, 4)
    train(whole, 1)
    whole.save_state(tmp_path / "state")
    again = open_policy(tiny, *settings)
    again.sample(["7="], 4)  # forgotten
    again.load_state(tmp_path / "state")
    wanted = whole.sample(PROMPTS, 4)
    found = again.sample(PROMPTS, 4)
    assert tokens(found) == tokens(wanted)
    for one, other in zip(samples_of(found), samples_of(wanted), strict=True):
        np.testing.assert_array_equal(one.is_reused, other.is_reused)
    assert any((sample.is_reused | sample.is_drafted).any() for sample in samples_of(found))


def test_what_cannot_work_is_refused(tiny):
    with pytest.raises(ValueError, match="Reuse.schedule=.*only rl.train knows .* its updates"):
        open_policy(tiny, *LENIENT, "Reuse.schedule='clip_fraction:0.1'")
    policy = open_policy(tiny, *LENIENT, *LORA)
    with pytest.raises(ValueError, match="must not reuse those of another adapter; fix: a Policy"):
        policy.with_new_adapter()

"""An episode is one datum: its ids, weights, log-probs and advantages are those of its turns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reprise.models.text import tokenizer
from reprise.rl.python.episode import Episode
from reprise.rl.python.sampler import Sample
from reprise.spec.config import SamplingConfig

POLICY = Path(__file__).parents[3] / "policies" / "tiny"
PLAIN = SamplingConfig()


@pytest.fixture(scope="module")
def rules():
    return tokenizer.load(POLICY)


def sample(episode: Episode, ids: list[int], logprobs: list[float], sampling=PLAIN) -> Sample:
    numbers = np.array(logprobs, np.float32)
    drafted = np.zeros(len(ids), bool)
    return Sample(
        prompt_ids=tuple(episode.tokens),
        token_ids=ids,
        logprobs=numbers,
        text="",
        is_truncated=False,
        sampling=sampling,
        version=0,
        is_drafted=drafted,
        is_reused=drafted,
    )


def test_a_datum_has_the_turns_of_an_episode(rules):
    episode = Episode(rules, [5, 6])
    episode.add(sample(episode, [7, 8], [-1.0, -2.0]))
    episode.add_tokens([9])
    episode.add(sample(episode, [10], [-3.0]))
    episode.add_tokens([11])  # after the last turn: nothing to learn
    datum = episode.datum([0.5, -0.25])
    assert datum.tokens == [5, 6, 7, 8, 9]
    assert datum.targets == [6, 7, 8, 9, 10]
    assert datum.weights.tolist() == [0, 1, 1, 0, 1]
    assert datum.logprobs.tolist() == [0, -1, -2, 0, -3]
    assert datum.advantages.tolist() == [0, 0.5, 0.5, 0, -0.25]
    assert datum.sampling == PLAIN
    assert episode.datum(2.0).advantages.tolist() == [0, 2, 2, 0, 2]


def test_turns_of_several_distributions_leave_the_sampling_open(rules):
    episode = Episode(rules, [5])
    episode.add(sample(episode, [7], [-1.0]))
    episode.add(sample(episode, [8], [-1.0], SamplingConfig(temperature=0.5)))
    assert episode.datum(1.0).sampling is None


def test_texts_are_encoded_without_special_tokens(rules):
    episode = Episode(rules, "57 + 68 =")
    assert episode.tokens == rules.encode_prompt("57 + 68 =")
    episode.add_text(" again")
    assert episode.tokens == rules.encode_prompt("57 + 68 =") + rules.encode(" again")


def test_wrong_use_is_one_sentence(rules):
    episode = Episode(rules, [5, 6])
    with pytest.raises(ValueError, match="a turn of the policy, got none"):
        episode.datum(1.0)
    other = Episode(rules, [5, 9])
    with pytest.raises(ValueError, match=r"fix: sample\(\[episode.tokens\]\)"):
        episode.add(sample(other, [7], [-1.0]))
    episode.add(sample(episode, [7], [-1.0]))
    with pytest.raises(ValueError, match="one for each of 1 turns"):
        episode.datum([1.0, 2.0])

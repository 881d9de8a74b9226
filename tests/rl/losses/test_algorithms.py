"""What each name stands for, what may be changed of it, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reprise.rl.gin.loader import ConfigError, dump, load
from reprise.rl.losses.advantages import response_advantages
from reprise.rl.losses.algorithms import ALGORITHMS, Algorithm, AlgorithmConfig, CriticConfig
from reprise.rl.settings.config import TrainConfig

PAPERS = {
    "grpo": ("group", "std", "clipped", "token", 0.2, 0.2),
    "dr_grpo": ("group", "none", "clipped", "constant", 0.2, 0.2),
    "dapo": ("group", "std", "clipped", "token", 0.2, 0.28),
    "gspo": ("group", "std", "sequence_clipped", "sequence", 3e-4, 4e-4),
    "cispo": ("group", "std", "clipped_weight", "token", 1.0, 3.0),
    "gdpo": ("group_by_reward", "batch", "clipped", "token", 0.2, 0.2),
    "rloo": ("leave_one_out", "none", "reinforce", "sequence_sum", 1.0, math.inf),
    "ppo": ("gae", "batch", "clipped", "token", 0.2, 0.2),
}


@pytest.mark.parametrize("name", PAPERS)
def test_a_name_alone_is_its_paper(name):
    a = AlgorithmConfig(name=name).resolved
    assert a == ALGORITHMS[name]
    got = (a.advantages, a.advantage_normalisation, a.policy_loss, a.aggregation)
    assert (*got, a.clip_low, a.clip_high) == PAPERS[name]
    assert (a.max_extra_phases is not None) == (name == "dapo")
    assert a.needs_critic == (name == "ppo")
    assert AlgorithmConfig(name=name).overlong_tokens(20480) == (4096 if name == "dapo" else 0)


def test_fields_that_are_set_stand():
    config = AlgorithmConfig(
        name="dapo",
        clip_low=0.1,
        clip_high=0.0,
        advantage_normalisation="none",
        aggregation="sequence",
        max_extra_phases=0,
        overlong_buffer_tokens=0,
        correction="token_tis:2",
    )
    assert config.resolved == Algorithm(
        ALGORITHMS["dapo"].source,
        advantage_normalisation="none",
        aggregation="sequence",
        clip_low=0.1,
        clip_high=0.0,
        max_extra_phases=0,
        overlong_fraction=0.2,
        old_logprobs="recomputed",
    )
    assert config.overlong_tokens(20480) == 0


def test_the_default_is_grpo_as_it_always_was():
    assert AlgorithmConfig().resolved == Algorithm(
        "arXiv 2402.03300", "group", "std", "clipped", "token", 0.2, 0.2, None, 0.0, "rollout"
    )
    assert AlgorithmConfig().kl_coefficient == 0 and AlgorithmConfig().importance is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "gpro"}, "name must be one of grpo, .*, got 'gpro'"),
        ({"aggregation": "mean"}, "aggregation must be one of .*, got 'mean'"),
        ({"name": "rloo", "clip_low": 0.2}, "clip_low has no meaning for rloo.*leave it out"),
        ({"name": "rloo", "clip_high": 0.2}, "clip_high has no meaning for rloo"),
        ({"max_extra_phases": 2}, 'max_extra_phases.*grpo has not, got 2.*name = "dapo"'),
        ({"name": "dapo", "max_extra_phases": -1}, "max_extra_phases must be 0 or more, got -1"),
        ({"clip_low": 1.1}, r"clip_low must be in \[0, 1\]"),
        ({"clip_high": math.nan}, "clip_high must be 0 or more, got nan"),
        ({"kl_coefficient": -1.0}, "kl_coefficient must be 0 or positive"),
        ({"kl_estimator": "k1"}, '"k1" in the loss has an expected gradient of 0.*"k2" .the grad'),
        ({"kl_in_reward": True}, "kl_in_reward = True needs a kl_coefficient above 0"),
        (
            {"kl_in_reward": True, "kl_coefficient": 0.1, "kl_estimator": "k2"},
            "kl_in_reward = True subtracts k1, got kl_estimator = 'k2'",
        ),
        *(
            (
                {"name": name, "kl_in_reward": True, "kl_coefficient": 0.1},
                "kl_coefficient drops out",
            )
            for name in ("grpo", "dapo", "gspo")
        ),
        (
            {"name": "gdpo", "kl_in_reward": True, "kl_coefficient": 0.1},
            "group_by_reward compares each reward apart",
        ),
        ({"entropy_coefficient": -0.1}, "entropy_coefficient must be 0 or positive"),
        ({"name": "gdpo", "advantage_normalisation": "std"}, "of gdpo must be batch or none"),
        ({"overlong_buffer_tokens": -1}, "overlong_buffer_tokens must be 0 or more"),
        ({"advantage_normalisation": "batch"}, "of grpo must be std or none, got 'batch'"),
        ({"name": "ppo", "advantage_normalisation": "std"}, "of ppo must be batch or none"),
        ({"name": "rloo", "advantage_normalisation": "std"}, "of rloo must be none"),
        (
            {"correction": "token_tis:2", "old_logprobs": "emission"},
            "correction = 'token_tis:2'.*got old_logprobs = 'emission'.*leave old_logprobs out",
        ),
    ],
)
def test_what_contradicts_the_name_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig(**settings)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "rloo"])
def test_the_size_of_a_kl_in_the_reward_is_the_coefficients(name):
    """Of rewards that are equal; with the group's std the coefficient would drop out."""
    other = "none" if ALGORITHMS[name].advantage_normalisation == "std" else None
    config = AlgorithmConfig(
        name, kl_in_reward=True, kl_coefficient=0.1, advantage_normalisation=other
    )
    kl, algorithm = np.array([1.2, -0.4, 0.3, 2.1]), config.resolved
    large, small = (
        response_advantages(
            list(1 - beta * kl), [0] * 4, algorithm.advantages, algorithm.advantage_normalisation
        )
        for beta in (config.kl_coefficient, config.kl_coefficient / 100)
    )
    assert np.any(large) and large == pytest.approx(100 * small, rel=1e-3)


@pytest.mark.parametrize(
    "bad", [{"learning_rate": -1.0}, {"gamma": 1.1}, {"gae_lambda": -0.1}, {"value_clip": 0.0}]
)
def test_bad_settings_of_the_critic_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        CriticConfig(**bad)


def test_what_is_not_set_is_written_down_as_such_and_read_again(tmp_path):
    text = 'Algorithm.name = "gspo"\nAlgorithm.clip_high = 5e-4\nTask.specs = ("jsonl:x",)\n'
    (tmp_path / "a.gin").write_text(text)
    config = load(TrainConfig, [tmp_path / "a.gin"])
    (tmp_path / "b.gin").write_text(dump(config))
    assert load(TrainConfig, [tmp_path / "b.gin"]) == config
    assert config.algorithm.resolved.clip_low == 3e-4
    with pytest.raises(ConfigError, match="Algorithm.name.*Did you mean dapo"):
        load(TrainConfig, [tmp_path / "a.gin"], ["Algorithm.name='dapoo'"])

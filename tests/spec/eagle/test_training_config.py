"""Settings of a drafter's training: the variants' numbers, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest

from spec.eagle.config import DrafterTrainingConfig

VARIANTS = ("eagle", "hass", "eagle3")


def test_variants_have_their_papers_numbers():
    numbers = {v: dataclasses.astuple(DrafterTrainingConfig(v).resolved)[1:] for v in VARIANTS}
    assert numbers == {
        "eagle": (1.0, 0.1, 1, 1.0),
        "hass": (1.0, 0.1, 3, 1.0),
        "eagle3": (0.0, 1.0, 7, 0.8),
    }
    assert [DrafterTrainingConfig(v).design for v in VARIANTS] == ["eagle", "eagle", "eagle3"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "medusa"}, "variant must be one of"),
        ({"objective": "kl"}, "objective must be one of"),
        ({"variant": "eagle3", "feature_weight": 0.5}, "feature_weight 0 or None"),
        ({"feature_weight": -1.0}, "feature_weight and token_weight >= 0"),
        ({"feature_weight": 0.0, "token_weight": 0.0}, "not both 0"),
        ({"token_weight": math.nan}, "feature_weight and token_weight"),
        ({"unroll_steps": 0}, "unroll_steps >= 1"),
        ({"unroll_decay": 0.0}, "positive unroll_decay"),
        ({"chunk_tokens": 0}, "chunk_tokens >= 1"),
        ({"warmup_steps": -1}, "warmup_steps >= 0"),
        ({"learning_rate": -1e-3}, "learning_rate of 0 or above"),
        ({"clip_norm": 0.0}, "positive clip_norm"),
        ({"b2": 1.0}, "b1 and b2 in"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DrafterTrainingConfig(**settings)


def test_eagle3_may_name_its_missing_feature_loss():
    assert DrafterTrainingConfig("eagle3", feature_weight=0.0).resolved.feature_weight == 0

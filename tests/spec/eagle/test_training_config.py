"""Settings of a drafter's training: the variants' numbers, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import typing

import pytest

from spec.eagle.config import DrafterTrainingConfig, Variant

VARIANTS = typing.get_args(Variant)


def test_variants_have_their_papers_numbers():
    numbers = {v: dataclasses.astuple(DrafterTrainingConfig(v).terms)[1:] for v in VARIANTS}
    assert numbers == {
        "eagle": ("eagle", 1.0, 0.1, 1, 1.0),
        "hass": ("eagle", 1.0, 0.1, 3, 1.0),
        "eagle3": ("eagle3", 0.0, 1.0, 7, 0.8),
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "medusa"}, "variant must be one of"),
        ({"chunk_tokens": 0}, "chunk_tokens >= 1"),
        ({"warmup_steps": -1}, "warmup_steps >= 0"),
        ({"learning_rate": -1e-3}, "learning_rate of 0 or above"),
        ({"learning_rate": math.nan}, "learning_rate of 0 or above"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DrafterTrainingConfig(**settings)

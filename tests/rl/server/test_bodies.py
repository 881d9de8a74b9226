"""One reader of numbers: what no field can hold is a ValueError with the field's name."""

from __future__ import annotations

import math

import pytest

from reprise.rl.server import bodies

HUGE = 10**400


@pytest.mark.parametrize("value", [HUGE, -HUGE, math.nan, math.inf, -1, 8, "1", True, None, [], {}])
@pytest.mark.parametrize("kind", [int, float])
def test_what_is_no_number_within_bounds_is_refused(value, kind):
    with pytest.raises(ValueError, match="^n: expected "):
        bodies.number({"n": value}, "n", low=0, high=7, kind=kind)


def test_numbers_within_bounds():
    assert bodies.number({"n": 7}, "n", high=7) == 7
    assert bodies.number({"n": None}, "n", None) is None
    found = bodies.number({"n": 1}, "n", kind=float)
    assert found == 1.0 and type(found) is float
    with pytest.raises(ValueError, match="expected the field 'n'"):
        bodies.number({}, "n")
    with pytest.raises(ValueError, match="n: expected int, got 1.0"):
        bodies.number({"n": 1.0}, "n")


@pytest.mark.parametrize("value", [HUGE, -HUGE, 2**1100, math.nan, math.inf, 1e300])
@pytest.mark.parametrize(
    "name", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"]
)
def test_settings_of_adam_fit_float32(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected "):
        bodies.parse_adam({"adam_params": {name: value}})


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", HUGE), ("temperature", -1), ("temperature", 1e300), ("top_p", HUGE)]
    + [("top_p", 1.5), ("top_k", 2**31), ("top_k", HUGE), ("top_k", -2), ("max_tokens", HUGE)],
)
def test_settings_of_samples_have_bounds(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected "):
        bodies.parse_sampling({name: value}, 1, 64)


def test_a_time_to_live_ends_before_the_calendar_does():
    assert bodies.ttl_s({}) is None
    assert bodies.ttl_s({"ttl_seconds": bodies.MAX_TTL_S}) == bodies.MAX_TTL_S
    for value in (bodies.MAX_TTL_S + 1, 2**60, HUGE, -1):
        with pytest.raises(ValueError, match="ttl_seconds: expected 0 to"):
            bodies.ttl_s({"ttl_seconds": value})


def test_metadata_has_a_bound():
    assert bodies.texts({"user_metadata": {"a": 1}}) == {"a": "1"}
    for metadata in ({"a": "x" * 2**14}, {str(i): "" for i in range(5000)}):
        with pytest.raises(ValueError, match="user_metadata: expected 16,384 bytes at most"):
            bodies.texts({"user_metadata": metadata})

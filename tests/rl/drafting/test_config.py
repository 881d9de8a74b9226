"""Settings of drafting workers that say nothing sensible."""

from __future__ import annotations

import pytest

from rl.drafting.config import DraftingConfig, methods_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ahead": "telepathy"}, "expected ahead of free_running, enumeration, got 'telepathy'"),
        ({"window": 0}, "window must be 1 … 32, got 0"),
        ({"window": 33}, "window must be 1 … 32, got 33"),
        ({"fan_out": 0}, "fan_out must be at least 1, got 0"),
        ({"workers": -1}, "workers must be 0 or more, got -1"),
        ({"reconfigure_tokens": -1}, "reconfigure_tokens must be 0 or more, got -1"),
        ({"requests_per_helper": -2}, "requests_per_helper must be 0 or more, got -2"),
        ({"methods": ()}, r"expected different methods of drafting of model, .*, got \(\)"),
        ({"methods": ("own", "own")}, "different methods of drafting of .*, got .'own', 'own'"),
        ({"methods": tuple("abcdefgh")}, "expected different methods of drafting of model"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DraftingConfig(**settings)


def test_what_settings_ask_for():
    assert not DraftingConfig().drafts_apart and not DraftingConfig().helps
    assert DraftingConfig(workers=None).drafts_apart
    assert DraftingConfig(workers=2, window=32).drafts_apart
    assert DraftingConfig(requests_per_helper=1).helps


def test_methods_are_the_draft_models():
    assert methods_of(1) == ("model",) and methods_of(3) == ("model", "model2", "model3")

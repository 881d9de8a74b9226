"""Settings of drafting workers that say nothing sensible."""

from __future__ import annotations

import pytest

from rl.drafting.config import DraftingConfig, source_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ahead": "telepathy"}, "expected ahead of free_running, enumeration, got 'telepathy'"),
        ({"drafter": "last"}, "expected a drafter of model, learned, own, got 'last'"),
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


@pytest.mark.parametrize(
    ("settings", "goes_on"),
    [
        ({"ahead": "free_running"}, True),
        ({"ahead": "enumeration"}, False),
        ({"drafter": "learned", "ahead": "free_running"}, False),
        ({"drafter": "own"}, False),
    ],
)
def test_only_a_draft_model_goes_on_from_draft_tokens(settings, goes_on):
    config = DraftingConfig(**settings)
    assert config.goes_on(config.drafter) == goes_on


def test_methods_are_the_drafter_every_draft_model_and_the_ladder():
    config = DraftingConfig(ladder=("own",), ahead="free_running")
    assert config.sources == ("model", "own")
    assert config.methods_of(3) == ("model", "model2", "model3", "own")
    assert [source_of(m) for m in config.methods_of(2)] == ["model", "model", "own"]
    assert config.goes_on("model2") and not config.goes_on("own")
    assert DraftingConfig(drafter="own").methods_of(1) == ("own",)
    for ladder in (("model",), ("own", "own"), ("telepathy",)):
        with pytest.raises(ValueError, match="expected a ladder of"):
            DraftingConfig(ladder=ladder)

"""Counts of draws that change: none where nothing moves, and most where everything does."""

import dataclasses

import pytest

from benchmarks import draws
from reprise.models.config import num_params


def test_draws_change_as_far_as_logits_move(monkeypatch):
    monkeypatch.setattr(draws, "MODEL", dataclasses.replace(draws.MODEL, vocab_size=256))
    monkeypatch.setattr(draws, "AT_ONCE", 16)
    found = draws.changes(64, (0.0, 0.3, 20.0), (16, 64))
    names = "gumbel", "gumbel_blocks_16", "cdf_16", "gumbel_blocks_64", "cdf_64"
    assert set(found) == set(names)
    for share in found.values():
        assert share["0.0"] == 0 and 0 < share["0.3"] < share["20.0"] and share["20.0"] > 0.5


def test_the_shape_is_that_of_smollm2():
    assert num_params(draws.MODEL) == pytest.approx(134.5e6, rel=1e-3)

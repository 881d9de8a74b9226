"""A draft model as a run's drafter: the same tokens, and folders that do not fit are refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from loop_runs import assert_same_run, finish, texts

from policies.make.characters import save_character_tokenizer
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.rl.gin.loader import load
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from reprise.rl.speculation import device_drafters
from reprise.rl.speculation.config import DraftModelConfig
from reprise.rl.speculation.device_drafters import DraftModel
from tests.support import tiny_run

DRAFTS = ("Speculation.budget='fixed:3'", "Engine.max_nodes=4", "DraftModel.max_depth=3")


def asks(folder, *sources):
    return f"Speculation.sources={(*sources, 'model')!r}", f"DraftModel.directory={str(folder)!r}"


def save_model(folder, characters=tiny_run.CHARACTERS, **changes):
    model = dataclasses.replace(tiny_run.MODEL, **changes)
    hf.save_pretrained(folder, model, transformer.init(model, jax.random.key(5), jnp.float32))
    save_character_tokenizer(folder, characters)
    return folder


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    return finish(tiny, tmp_path_factory.mktemp("plain"), "Run.steps=2")


@pytest.mark.parity
def test_the_policys_beginnings_draft_what_it_draws(tiny, tmp_path, plain):
    """The folder that the run starts from is its draft model; its draws are the policy's."""
    settings = (*DRAFTS, *asks(tiny.parent / "policy"), "DraftModel.proposal='shared_noise'")
    got = finish(tiny, tmp_path, *settings, "Run.steps=2")
    assert_same_run(got, plain)
    # of 8 tokens three in four are draft tokens; in the first step they come from the policy itself
    assert got.rows[0]["spec/model/speculated_fraction"] > 0.5


@pytest.mark.parity
def test_another_model_drafts_beside_siblings(tiny, tmp_path, plain, monkeypatch):
    monkeypatch.setattr(device_drafters, "MIN_PROB", 0.0)
    other = save_model(tmp_path / "other", d_model=8, num_kv_heads=1)
    settings = (*DRAFTS, *asks(other, "group", "own"))
    got = finish(tiny, tmp_path / "run", *settings, "Run.steps=2")
    assert texts(got) == texts(plain)
    assert got.rows[0]["spec/model/speculated_fraction"] < 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 25}, "expected the policy's vocabulary of 24, got 25"),
        ({"characters": "0123456789+=xyz"}, "expected the policy's tokenizer"),
        ({"max_positions": 12}, "has 12 positions.*make 16"),
    ],
)
def test_a_model_that_does_not_fit_stops_before_any_device(tiny, tmp_path, changes, message):
    folder = save_model(tmp_path / "other", **changes)
    with pytest.raises(ValueError, match=message):
        open_inputs(load(TrainConfig, [tiny], [*DRAFTS, *asks(folder)]))


def test_each_of_several_models_is_read_and_has_to_fit(tiny, tmp_path):
    first, second = (save_model(tmp_path / name, d_model=d) for name, d in (("a", 8), ("b", 16)))
    config = DraftModelConfig(str(first), (str(second),))
    found = DraftModel.load(config)
    assert [m.model.d_model for m in found.models] == [8, 16]
    assert [m.config.directory for m in found.models] == [str(first), str(second)]
    wide = save_model(tmp_path / "wide", vocab_size=25)
    settings = (*DRAFTS, *asks(first), "Sched.workers=2", "Drafting.workers=1")
    with pytest.raises(ValueError, match="wide: expected the policy's vocabulary of 24, got 25"):
        open_inputs(
            load(TrainConfig, [tiny], [*settings, f"DraftModel.directories=({str(wide)!r},)"])
        )


def test_so_does_none(tiny):
    with pytest.raises(ValueError, match="DraftModel.directory is not set"):
        open_inputs(load(TrainConfig, [tiny], [*DRAFTS, "Speculation.sources=('model',)"]))


def test_so_do_depths_beyond_it(tiny):
    tuner = ("Speculation.budget='bandit'", "Tuner.thresholds=(1, 5)", "Tuner.verify_tokens=(3, 1)")
    settings = (*DRAFTS, *asks(tiny.parent / "policy"), *tuner, "Tuner.depths=(4, 5)")
    with pytest.raises(ValueError, match=r"DraftModel.max_depth=3, got \(4, 5\)"):
        open_inputs(load(TrainConfig, [tiny], settings))


def test_unknown_ways_to_draft_are_refused():
    with pytest.raises(ValueError, match="proposal must be likeliest or shared_noise"):
        DraftModelConfig(proposal="best")

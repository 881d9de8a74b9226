"""Training with several rollout workers: the same rewards and tokens as with one engine."""

from __future__ import annotations

import json

import jax
import pytest
from loop_runs import compilations, finish, learnt

WORKERS = ("Sched.workers=2", "Sched.chunk_tokens=3", "Engine.slots=4", "Engine.min_slots=4")
DRAFTS = ("Speculation.budget='fixed:1'",)
COUPLED = ("Reuse.mode='coupled'", "Sampling.draw='gumbel'")


def texts(done):
    return [json.loads(line)["completion"] for line in done.samples.splitlines()]


def assert_same_run(one, several):
    assert texts(one) == texts(several)
    for ours, theirs in zip(one.rows, several.rows, strict=True):
        assert learnt(ours) == pytest.approx(learnt(theirs), rel=1e-3, abs=1e-5)


@pytest.fixture(scope="module")
def compiled(tiny, tmp_path_factory):
    """A run with drafts and reuse from empty caches, and what it compiled before and after."""
    more = (*DRAFTS, *COUPLED, *WORKERS, "Engine.min_slots=2", "Run.steps=5")
    return compilations(tiny, tmp_path_factory.mktemp("several"), *more)


def test_nothing_compiles_after_warm_up(compiled):
    _, before, after = compiled
    assert len(before) > 10
    assert after == []


@pytest.mark.parity
def test_workers_with_drafts_and_reuse_change_no_reward_and_no_token(tiny, compiled, tmp_path):
    """An epoch is three steps: with reuse, the last two have something to start from."""
    several = compiled[0]
    assert_same_run(finish(tiny, tmp_path, *DRAFTS, *COUPLED, "Run.steps=5"), several)
    assert several.rows[-1]["spec/reused_fraction"] > 0
    assert max(row.get("spec/tokens_per_round", 0.0) for row in several.rows) > 1


@pytest.fixture(scope="module")
def one_engine(tiny, tmp_path_factory):
    return finish(tiny, tmp_path_factory.mktemp("one"))


@pytest.mark.parity
@pytest.mark.parametrize("policy", ["seer", "group_fifo"])
def test_workers_change_no_reward_and_no_token(tiny, one_engine, tmp_path, policy):
    assert_same_run(one_engine, finish(tiny, tmp_path, *WORKERS, f"Sched.policy='{policy}'"))


@pytest.mark.skipif(jax.device_count() != 8, reason="needs 8 (virtual) devices")
@pytest.mark.parametrize(
    "more",
    [("Mesh.fsdp=8",), ("Mesh.fsdp=2", "Sched.mode='pipeline'")],
    ids=["shared devices", "devices apart"],
)
def test_workers_beside_a_trainer_on_several_devices(tiny, tmp_path, more):
    """Its mesh is not theirs: what they answer is what one device would."""
    once = (*WORKERS, *more, "Run.steps=1")
    wide = finish(tiny, tmp_path / "wide", *once)
    narrow = finish(tiny, tmp_path / "narrow", *once, "Mesh.fsdp=1")
    assert texts(wide) == texts(narrow)
    assert wide.rows[0]["loss"] == pytest.approx(narrow.rows[0]["loss"], rel=1e-3, abs=1e-5)

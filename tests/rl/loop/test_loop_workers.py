"""Training with several rollout workers: the same rewards and tokens as with one engine."""

from __future__ import annotations

import json

import jax
import pytest
from loop_runs import compilations, finish, learnt

WORKERS = ("Sched.workers=2", "Sched.chunk_tokens=3", "Engine.slots=4", "Engine.min_slots=4")
DRAFTS = ("Speculation.budget='fixed:3'", "Engine.max_nodes=4")
COUPLED = ("Reuse.mode='coupled'", "Sampling.draw='gumbel'")


def texts(done):
    return [json.loads(line)["completion"] for line in done.samples.splitlines()]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("policy", "more"),
    [("seer", ()), ("group_fifo", ()), ("seer", (*DRAFTS, *COUPLED, "Run.steps=5"))],
    ids=["seer", "group_fifo", "drafts and reuse"],
)
def test_workers_change_no_reward_and_no_token(tiny, tmp_path, policy, more):
    """An epoch is three steps: with reuse, the last two have something to start from."""
    one = finish(tiny, tmp_path / "one", *more)
    several = finish(tiny, tmp_path / "several", *more, *WORKERS, f"Sched.policy='{policy}'")
    assert texts(one) == texts(several)
    for ours, theirs in zip(one.rows, several.rows, strict=True):
        assert learnt(ours) == pytest.approx(learnt(theirs), rel=1e-3, abs=1e-5)
    if more:
        assert several.rows[-1]["spec/reused_fraction"] > 0
        drafted = [row.get("spec/tokens_per_round", 0.0) for row in several.rows]
        assert max(drafted) > 1


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


def test_nothing_compiles_after_warm_up(tiny, tmp_path, monkeypatch):
    settings = (*WORKERS, *DRAFTS, *COUPLED, "Engine.min_slots=2", "Run.steps=5")
    _, before, after = compilations(tiny, tmp_path, monkeypatch, *settings)
    assert len(before) > 10
    assert after == []

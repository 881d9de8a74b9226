"""Training with several rollout workers: the same rewards and tokens as with one engine."""

from __future__ import annotations

import jax
import pytest
from loop_runs import assert_same_run, finish, texts

WORKERS = ("Sched.workers=2", "Sched.chunk_tokens=3", "Engine.slots=4", "Engine.min_slots=4")


@pytest.mark.parity
def test_workers_change_no_reward_and_no_token(tiny, tmp_path):
    one = finish(tiny, tmp_path / "one")
    assert_same_run(one, finish(tiny, tmp_path / "two", *WORKERS, "Sched.policy='seer'"))


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

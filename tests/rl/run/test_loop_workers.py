"""Training with several rollout workers: the same rewards and tokens as with one engine."""

from __future__ import annotations

import jax
import pytest
from loop_runs import assert_same_run, few_devices, finish, texts
from run_settings import PIPELINE, SETTINGS


@pytest.fixture
def narrow(tiny, tmp_path):
    """Runs on one device, as on a user's CPU."""

    def run(*settings):
        with few_devices():
            return finish(tiny, tmp_path / "narrow", *settings)

    return run


@pytest.mark.parity
def test_workers_change_no_reward_and_no_token(tiny, narrow, tmp_path):
    one = finish(tiny, tmp_path / "one")
    assert_same_run(one, narrow(*PIPELINE, "Sched.mode='sync'", "Sched.policy='seer'"))


@pytest.mark.skipif(jax.device_count() != 8, reason="needs 8 (virtual) devices")
@pytest.mark.parametrize(
    "more",
    [("Mesh.fsdp=8", "Sched.mode='sync'"), ("Mesh.fsdp=2", "Sched.workers=1")],
    ids=["shared devices", "devices apart"],
)
def test_workers_beside_a_trainer_on_several_devices(tiny, narrow, tmp_path, more):
    """Its mesh is not theirs: what they answer is what one device would."""
    settings = (*SETTINGS, *PIPELINE, *more, "Run.steps=1")
    one = narrow(*settings, "Mesh.fsdp=1")
    wide = finish(tiny, tmp_path / "wide", *settings)
    assert texts(wide) == texts(one)
    assert wide.rows[0]["loss"] == pytest.approx(one.rows[0]["loss"], rel=1e-3, abs=1e-5)

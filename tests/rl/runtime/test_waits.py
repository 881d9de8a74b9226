"""Every wait of a run has an end, and what is waited for is named."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import planted_hangs as hangs
import pytest
from planted_hangs import PLANTED, StandIn, plant
from whole_steps import whole_steps

from rl import setup as run_setup
from rl.checkpoint import checkpointer
from rl.runtime.waits import Deadline, Hang
from rl.speculation import sources
from rl.workers import driver
from tests.support import tiny_run


@pytest.mark.fault
@pytest.mark.parametrize("wait", PLANTED)
def test_a_hang_is_ended_and_named(wait):
    said, named = plant(wait)
    assert named in said


@pytest.mark.fault
def test_an_abandoned_rollout_does_not_wait_for_a_hanging_worker(monkeypatch):
    """It waits for less than a hang's limit: somebody has asked for the end."""
    monkeypatch.setattr(driver, "LEAVING_S", 0.2)
    monkeypatch.setattr(hangs, "LIMIT_S", 60.0)
    never, begun = threading.Event(), time.monotonic()
    team = hangs.team_of([StandIn("rounds", never)])
    with pytest.raises(KeyboardInterrupt):
        with team.session(team.make_scheduler(), 4, 8) as left:
            hangs.submit(left, jax.random.key(0))
            raise KeyboardInterrupt
    assert time.monotonic() - begun < 20
    never.set()


def test_a_worker_without_requests_is_ended_by_close():
    """Nobody watches it, and it does not count as one that hangs."""
    team = hangs.team_of([StandIn("nowhere", threading.Event())])
    with team.session(team.make_scheduler(), 4, 8) as idle:
        until = time.monotonic() + 3 * hangs.LIMIT_S
        while time.monotonic() < until:
            assert idle.next_result(0.05) is None
        assert idle._thread.is_alive()
    assert not idle._thread.is_alive()


@pytest.mark.fault
def test_a_save_waits_while_another_makes_progress(tmp_path, monkeypatch):
    heartbeat, beats = [], iter(range(8))
    other = SimpleNamespace(directory="there", _progress=lambda: next(beats, None))
    monkeypatch.setattr(checkpointer, "_writer", other)
    deadline = Deadline(0.2, lambda: heartbeat.append(1))
    with checkpointer.Checkpointer(tmp_path, deadline=deadline) as saver, checkpointer._writing:
        with pytest.raises(Hang, match="waits for a save in there: no sign of life for"):
            saver.save(1, {"x": jnp.zeros(2)})
    assert len(heartbeat) >= 8


@pytest.mark.fault
def test_an_index_that_hangs_ends_the_run_with_the_last_whole_step_saved(
    tiny, tmp_path, monkeypatch
):
    never, build, begun = threading.Event(), sources.build_index, []

    class Impatient:
        """A short deadline for the index that hangs alone: others take as long as they take."""

        heartbeat = Deadline().heartbeat
        hang_limit_s = property(lambda self: 0.3 if len(begun) == 2 else 60.0)

    def impatient(*args, **options):
        return sources.Speculation(*args, **options | {"deadline": Impatient()})

    def hanging(*args):
        if threading.current_thread() is not threading.main_thread():
            begun.append(args)
            if len(begun) == 2:  # in the second step, for the third
                never.wait(60)
        return build(*args)

    monkeypatch.setattr(sources, "build_index", hanging)
    monkeypatch.setattr(run_setup, "Speculation", impatient)
    settings = ("Speculation.budget='fixed:1'", "Speculation.sources=('history',)")
    with pytest.raises(Hang, match="waits for the index of the prompts' history"):
        tiny_run.train(tiny, tmp_path, *settings, "Checkpoint.every_steps=0")
    assert whole_steps(tmp_path / "checkpoints")[0] == 2
    never.set()

"""Trainer processes of actors: how they stop, and what the loss of one ends."""

import os
import signal

import fake_trainers
import pytest
from processes import runs
from thread_actors import SETTINGS, ThreadRoom

from reprise.rl.cluster.actors import Actor
from reprise.rl.run import ray_trainers
from reprise.rl.run.ray_trainers import Start, StoppedAtOnce, run_trainers
from reprise.rl.runtime.waits import ProgramLost

LIMIT_S = 60.0


class Played:
    """Two trainers that do as `play` says; `lines` are their number, kind and text."""

    def __init__(self, play, directory="."):
        self.room, self.lines = ThreadRoom(), []
        target = f"{ray_trainers.__name__}:Trainer"
        self.actors = [
            Actor(
                *(f"trainer process {i} of 2", target, (fake_trainers.COMMAND,), SETTINGS),
                *(self.room, i),
                restarts=False,
            )
            for i in range(2)
        ]
        self._start = Start(play, False, directory, "", 0, "127.0.0.1:1")

    def run(self, num_stops=lambda played: 0):
        return run_trainers(
            *(self.actors, self._start, "127.0.0.1", LIMIT_S),
            lambda *line: self.lines.append(line),
            lambda: num_stops(self),
        )

    @property
    def processes(self):
        return [self.room.started[i][0].host._object._process for i in range(2)]

    def assert_ended(self):
        assert not any(runs(process.pid) for process in self.processes)


def test_at_the_second_stop_they_are_ended_at_once():
    played = Played("goes on")
    with pytest.raises(StoppedAtOnce):
        played.run(lambda played: 2 * any("only" in text for *_, text in played.lines))
    played.assert_ended()


@pytest.mark.fault
def test_one_whose_actor_dies_ends_all():
    def kill(played):
        if any("only" in text for *_, text in played.lines):
            played.room.started[0][0].kill()
        return 0

    played = Played("goes on")
    with pytest.raises(ProgramLost, match=r"^trainer process 0 of 2 \(.*\) is lost: killed$"):
        played.run(kill)
    assert not runs(played.processes[1].pid)
    played.processes[0].kill()  # by itself it would end with its actor


@pytest.mark.fault
def test_one_that_runs_on_after_another_has_failed_is_named(monkeypatch):
    monkeypatch.setattr(ray_trainers, "LEAVING_S", 0.5 - LIMIT_S)
    played = Played("one fails")
    with pytest.raises(ProgramLost, match=r"^trainer process 0 of 2 is lost: it has not ended"):
        played.run()
    played.assert_ended()


def test_a_folder_that_a_host_does_not_have_is_a_sentence(tmp_path):
    match = r"^trainer process 0 of 2 does not start: expected the folder .*absent"
    with pytest.raises(ProgramLost, match=match):
        Played("ends", directory=str(tmp_path / "absent")).run()


def test_a_process_stops_once_its_actor_is_gone():
    from reprise.rl.run.launch import _stop_at_end

    came, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    try:
        reader, writer = os.pipe()
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            _stop_at_end(stream)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came

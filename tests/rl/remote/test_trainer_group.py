"""Trainer processes behind links: what they say, how they stop, and what the loss of one ends."""

import contextlib
import os
import signal

import fake_trainers
import pytest
from processes import runs
from remote_workers import ThreadChannel

from rl.remote import trainer_group
from rl.remote.link import Link
from rl.remote.messages import CODEC as OF_WORKERS
from rl.remote.messages import Failed, Ping
from rl.remote.trainer_group import Shared, StoppedAtOnce, TrainerGroup
from rl.remote.trainer_messages import CODEC, Address, Where
from rl.remote.trainer_program import TrainerProgram
from rl.runtime.waits import ProgramLost

DEADLINE_S = 20.0


class Played:
    """A group of two that does as `play` says, and what it said."""

    def __init__(self, play, deadline_s=DEADLINE_S, directory="."):
        self.programs = [TrainerProgram("127.0.0.1", fake_trainers.COMMAND) for _ in range(2)]
        self.channels = [ThreadChannel(program.answer) for program in self.programs]
        self.said, self.deadline_s = [], deadline_s
        self._shared = Shared(play, False, directory, "127.0.0.1:1")

    @contextlib.contextmanager
    def started(self):
        links = [
            Link(f"program {i}", c, self.deadline_s, CODEC) for i, c in enumerate(self.channels)
        ]
        show = lambda i, line: self.said.append((i, line))  # noqa: E731
        with TrainerGroup(links, self.deadline_s, show) as group:
            group.start(self._shared, loopback=True, start_s=DEADLINE_S)
            yield group

    def asked(self, times):
        """As often as that, once both are ready."""
        return lambda: times * (sum(line.text == "ready" for _, line in self.said) == 2)

    @property
    def pids(self):
        return [program._process.pid for program in self.programs]


def test_all_that_they_say_is_heard_before_their_end():
    played = Played("ends")
    with played.started() as group:
        assert group.follow(lambda: 0) == 0
    assert group.first_to_fail is None
    for i in range(2):
        texts = {line.text: line.is_error for number, line in played.said if number == i}
        [address] = [t for t in texts if t.startswith(f"number {i} at 127.0.0.1:")]
        assert texts == {
            address: False,
            "error: all say so": True,
            f"only {i} says so": True,
        }
    assert len({t.text.partition(" at ")[2] for _, t in played.said if " at " in t.text}) == 1


@pytest.mark.parametrize(("play", "status"), [("stops", 75), ("stops at the start", 128 + 15)])
def test_they_are_asked_to_stop_together(play, status):
    played = Played(play)
    with played.started() as group:
        assert group.follow(played.asked(1)) == status


def test_asked_twice_they_are_ended_at_once():
    played = Played("goes on")
    with pytest.raises(StoppedAtOnce), played.started() as group:
        group.follow(lambda: 2)
    assert not any(runs(pid) for pid in played.pids)


@pytest.mark.fault
def test_one_that_is_killed_ends_all():
    played = Played("one is killed")
    with (
        pytest.raises(ProgramLost, match=r"^trainer process 1 of 2 is lost: killed by SIGKILL$"),
        played.started() as group,
    ):
        group.follow(lambda: 0)
    assert not any(runs(pid) for pid in played.pids)


@pytest.mark.fault
def test_so_does_one_whose_program_is_lost_or_silent():
    lost = Played("goes on")
    with (
        pytest.raises(ProgramLost, match=r"^trainer process 0 of 2 is lost: killed$"),
        lost.started() as group,
    ):
        lost.channels[0].kill()
        group.follow(lambda: 0)
    silent = Played("goes on", deadline_s=2.0)
    with (
        pytest.raises(ProgramLost, match=r"^trainer process 1 of 2 is lost: no answer for \d"),
        silent.started() as group,
    ):
        silent.channels[1].stopped = True
        group.follow(lambda: 0)
    for played in (lost, silent):
        played.programs[0]._process.kill()  # that of a program that cannot be reached goes on
        played.programs[1]._process.kill()


@pytest.mark.fault
def test_one_that_goes_on_after_another_has_failed_is_named(monkeypatch):
    monkeypatch.setattr(trainer_group, "LEAVING_S", 0.0)
    played = Played("one fails", deadline_s=2.0)
    with (
        pytest.raises(ProgramLost, match=r"^trainer process 0 of 2 is lost: it has not ended 2\."),
        played.started() as group,
    ):
        group.follow(lambda: 0)
    assert group.first_to_fail == 1
    assert not any(runs(pid) for pid in played.pids)


def test_a_folder_that_a_host_has_not_is_a_sentence(tmp_path):
    played = Played("ends", directory=str(tmp_path / "absent"))
    with (
        pytest.raises(
            ProgramLost,
            match=r"trainer process 0 of 2 does not start: .*expected the folder .*absent",
        ),
        played.started(),
    ):
        pass


def test_a_program_answers_its_own_messages_alone():
    program = TrainerProgram("127.0.0.1", fake_trainers.COMMAND)
    for message in (b"", OF_WORKERS.encode(Ping())):
        assert isinstance(CODEC.decode(program.answer(message)), Failed)
    found = CODEC.decode(program.answer(CODEC.encode(Where(loopback=False))))
    assert isinstance(found, Address) and found.address.startswith("127.0.0.1:")


def test_a_process_stops_once_its_program_is_gone():
    from rl.loop.trainer_process import _stop_at_end

    heard, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    try:
        reader, writer = os.pipe()
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            _stop_at_end(stream)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard

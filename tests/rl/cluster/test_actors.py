"""Actors are lost with their programs, start again, and are given up; without Ray and with it."""

import dataclasses
import math
import queue
import threading
import time
from concurrent.futures import Future

import pytest
from thread_actors import SETTINGS, ThreadRoom
from waiting import wait_until

from reprise.rl.cluster import actors
from reprise.rl.cluster.actors import Actor
from reprise.rl.runtime.waits import ProgramLost

LIMIT_S = 60


class Adder:
    """The object of an actor."""

    def __init__(self, first):
        if first is None:
            raise ValueError("expected a number")
        self._sum, self.go = first, threading.Event()

    def add(self, number):
        self._sum += number
        return self._sum

    def fail(self):
        raise KeyError("wrong")

    def wait(self):
        assert self.go.wait(LIMIT_S)
        return "waited"

    def close(self):
        self.go.set()


def actor(room, first=1, settings=SETTINGS, **options):
    return Actor("adder 0", f"{__name__}:Adder", (first,), settings, room, 0, **options)


def test_calls_return_results_and_errors_of_the_method():
    adder = actor(ThreadRoom())
    first = [adder.call("add", i) for i in (1, 2)]  # they wait for its start
    assert sorted(f.result(LIMIT_S) for f in first) in ([2, 4], [3, 4])
    with pytest.raises(KeyError, match="wrong"):
        adder.call("fail").result(LIMIT_S)
    assert adder.call("add", 0).result(LIMIT_S) == 4
    adder.close()
    with pytest.raises(ProgramLost, match=r"^adder 0 \(.*\) is lost: the run has ended$"):
        adder.call("wait").result(LIMIT_S)


@pytest.mark.fault
def test_a_killed_program_fails_its_calls_and_starts_again():
    room, said = ThreadRoom(), []
    adder = actor(room, settings=dataclasses.replace(SETTINGS, say=said.append))
    assert adder.call("add", 5).result(LIMIT_S) == 6
    waiting, room.hold[0] = adder.call("wait"), threading.Event()
    room.started[0][0].kill()
    with pytest.raises(
        ProgramLost, match=rf"^adder 0 \(.*, process {adder.pid}\) is lost: killed$"
    ):
        waiting.result(LIMIT_S)
    assert not adder.is_there
    later = adder.call("add", 1)
    room.hold[0].set()  # the program that takes its place comes late
    assert later.result(LIMIT_S) == 2 and adder.num_starts == 2
    assert said == [f"{waiting.exception()}; it is started again"]
    adder.close()


@pytest.mark.fault
def test_a_late_call_is_a_loss_and_losses_without_work_are_bounded():
    def stop(index, handle):
        handle.submit = lambda member, *args, true=handle.submit: (
            true("call", "wait") if member == "call" else true(member, *args)
        )

    said, room = [], ThreadRoom(stop)
    adder = actor(room, settings=dataclasses.replace(SETTINGS, say=said.append))
    for _ in range(actors.MAX_STARTS):
        late = adder.call("add", 1, limit_s=0.1)
        with pytest.raises(ProgramLost, match=r"no answer to add within 0\.1 s") as lost:
            late.result(LIMIT_S)
        assert lost.value.silent
    assert "it is given up: it was lost 3 times" in said[-1]
    assert isinstance(adder.call("add", 1).exception(LIMIT_S), ProgramLost)
    assert len(room.started[0]) == actors.MAX_STARTS


@pytest.mark.fault
def test_answers_that_have_come_are_not_late():
    """The run was busy, or stopped, for longer than a call may take."""
    room, answers = ThreadRoom(), queue.SimpleQueue()
    room.hold[0] = threading.Event()
    adder = actor(room, settings=dataclasses.replace(SETTINGS, deadline_s=1e6))

    def ask_and_be_busy(_):
        for _ in range(3):
            answers.put(adder.call("add", 1, limit_s=0.0))
        wait_until(lambda: adder._done.qsize() == 3)
        time.sleep(2 * actors.WATCH_S)  # deadlines are looked at again

    adder.call("add", 1).add_done_callback(ask_and_be_busy)
    room.hold[0].set()
    assert [answers.get(timeout=LIMIT_S).result(LIMIT_S) for _ in range(3)]
    assert adder.num_starts == 1
    adder.close()


@pytest.mark.fault
def test_a_program_without_heartbeats_is_lost():
    def mute(index, handle):
        handle.submit = lambda member, *args, true=handle.submit: (
            Future() if member == "ping" else true(member, *args)
        )

    adder = actor(ThreadRoom(mute), settings=dataclasses.replace(SETTINGS, deadline_s=0.1))
    with pytest.raises(ProgramLost, match=r"no answer to a heartbeat within 0\.1 s"):
        adder.call("wait", limit_s=math.inf).result(LIMIT_S)
    adder.close()


@pytest.mark.fault
def test_an_actor_that_does_not_restart_is_given_up_at_its_loss():
    room = ThreadRoom()
    adder = actor(room, restarts=False)
    assert adder.call("add", 5).result(LIMIT_S) == 6
    room.started[0][0].kill()
    assert isinstance(adder.call("add", 1).exception(LIMIT_S), ProgramLost)
    assert isinstance(adder.call("add", 1).exception(LIMIT_S), ProgramLost)
    assert len(room.started[0]) == 1


def test_other_code_and_constructors_that_fail_are_sentences_at_the_start():
    def other(index, handle):
        handle.host.identity = lambda files: ({"code of Reprise": "other"}, "far", 12)

    code = r"adder 0 \(far, process 12\) does not start: expected the same code of Reprise .* other"
    with pytest.raises(ProgramLost, match=code):
        actor(ThreadRoom(other)).call("add", 1).result(LIMIT_S)
    with pytest.raises(ProgramLost, match="does not start: expected a number"):
        actor(ThreadRoom(), first=None).call("add", 1).result(LIMIT_S)

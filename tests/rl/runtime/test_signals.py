"""Signals and silence, seen by a thread of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from waiting import wait_until

from reprise.rl.runtime import progress, signals
from reprise.rl.runtime.signals import EXPORTING, SAVING, Limits, Stopped, Watch
from reprise.rl.runtime.waits import Deadline, Hang, code_line, result_of

TINY = Limits(hang_s=30.0, compile_s=30.0, stop_s=30.0)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """The last message is not lost on a busy machine."""
    monkeypatch.setattr(signals, "SPEAKING_S", 30.0)


class Ended:
    """Stands for the end of the process: with which status, and what was said."""

    def __init__(self):
        self.status, self.said, self.happened = None, [], threading.Event()

    def __call__(self, status):
        self.status = status
        self.happened.set()


def watching(limits=TINY, step=3, clock=time.monotonic):
    ended = Ended()
    standing = (step, f"step {step} stands") if step else (0, "nothing to save")
    watch = Watch(limits, standing=lambda: standing, say=ended.said.append, clock=clock, end=ended)
    return watch, ended


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(("step", "status"), [(0, None), (3, 75)])
def test_while_it_compiles_a_run_is_stopped_at_once(number, step, status):
    watch, ended = watching(step=step)
    hung_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, perhaps around the tests
    try:
        with watch:
            send(number)
            assert ended.happened.wait(20)
    finally:
        signal.signal(signal.SIGHUP, hung_up)
    words = "step 3 stands" if step else "nothing to save"
    assert ended.said == [f"stopped before step {step + 1}; {words}"]
    assert ended.status == (status or 128 + number)


def test_a_running_step_is_told_and_then_left_in_time():
    watch, ended = watching()
    with watch:
        watch.at("rollout")
        watch.check()
        send(signal.SIGTERM)
        wait_until(lambda: ended.said)
        with pytest.raises(Stopped):
            watch.check()
        send(signal.SIGTERM)  # once more changes nothing
        time.sleep(0.3)
    assert ended.said == ["stopping: saving the last whole step..."] and ended.status is None
    assert watch.exit_status == 75


def test_a_step_that_is_not_left_in_time_is_ended():
    now_s = [0.0]
    watch, ended = watching(Limits(hang_s=1e6, stop_s=30.0), clock=lambda: now_s[0])
    with watch:
        watch.at("update")
        send(signal.SIGTERM)
        wait_until(lambda: ended.said)
        now_s[0] += 30.0
        assert not ended.happened.wait(0.3)
        now_s[0] += 0.5
        assert ended.happened.wait(20)
    assert ended.status == 75
    words = "stopped at update, which did not come to an end in 30.5 s; step 3 stands"
    assert ended.said[-1] == words


@pytest.mark.parametrize("part", [SAVING, EXPORTING])
def test_saving_may_take_longer(part):
    watch, ended = watching(Limits(hang_s=30.0, stop_s=0.2))
    with watch:
        watch.at(part)
        send(signal.SIGTERM)
        wait_until(lambda: ended.said)
        time.sleep(0.6)
        assert not ended.happened.is_set()
        if part == SAVING:  # and the next part has its time from then on
            watch.at("rollout")
            with pytest.raises(Stopped):
                watch.check()
            assert ended.happened.wait(20)


@pytest.mark.parametrize(
    ("whole_step", "saved", "said"),
    [
        (3, 3, ["stopped at once; step 3 stands"]),
        (
            *(5, 3),
            [
                "still saving: Ctrl-C once more loses 2 whole steps",
                "stopped at once; 2 whole steps lost; step 3 stands",
            ],
        ),
        (
            *(1, 0),
            [
                "still saving: Ctrl-C once more loses 1 whole step",
                "stopped at once; 1 whole step lost; nothing is saved",
            ],
        ),
    ],
)
def test_a_second_ctrl_c_ends_at_once_unless_whole_steps_would_be_lost(whole_step, saved, said):
    now_s = [0.0]
    watch, ended = watching(step=saved, clock=lambda: now_s[0])
    with watch:
        watch.at(SAVING)
        watch.whole_step = whole_step
        for number in range(1 + len(said)):
            send(signal.SIGINT)
            wait_until(lambda: len(ended.said) > number)  # noqa: B023
            now_s[0] += 1.0
        assert ended.happened.wait(20)
    assert ended.said[1:] == said


def test_one_ctrl_c_may_come_twice():
    """A launcher passes on the signal that the terminal has sent to its children as well."""
    watch, ended = watching(clock=lambda: 0.0)
    with watch:
        watch.at(SAVING)
        send(signal.SIGTERM)
        wait_until(lambda: ended.said)
        for _ in range(2):
            send(signal.SIGINT)
        time.sleep(0.3)
    assert len(ended.said) == 1 and not ended.happened.is_set()


def test_a_hangup_is_left_to_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with watching()[0]:
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_gone_ends_no_run():
    stream = open("/dev/full", "w")  # refuses every write
    with contextlib.suppress(OSError), stream:
        progress.Progress(stream).message("still there?")


def test_ctrl_c_before_there_is_a_run_is_one_line():
    """The package handles it before any other module of a command is imported."""
    code = (
        "import os, signal, sys; sys.argv = ['-m']; sys.orig_argv = ['python', '-m', 'rl.report'];"
        "import reprise.rl; os.kill(os.getpid(), signal.SIGINT); print('still here')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


@pytest.mark.fault
@pytest.mark.parametrize(
    "part", ["starting", "rollout", "wait", "reward", "update", "checkpoint", EXPORTING]
)
def test_a_main_thread_that_hangs_is_named_and_ended(part):
    now_s = [0.0]
    watch, ended = watching(Limits(hang_s=0.1, compile_s=0.1), clock=lambda: now_s[0])
    with watch:
        watch.at(part)
        for _ in range(4):  # signs of life beat the deadline
            now_s[0] += 0.09
            time.sleep(0.03)  # the watching thread looks
            watch.check()
        assert not ended.happened.is_set()
        now_s[0] += 0.2  # as in a device call that never comes back
        assert ended.happened.wait(20)
    assert ended.status == 1
    assert f"from the main thread at {part} (tests/rl/runtime/test_signals.py:" in ended.said[-1]


def test_a_terminal_that_hangs_does_not_keep_a_process(monkeypatch):
    monkeypatch.setattr(signals, "SPEAKING_S", 0.2)
    ended, never = Ended(), threading.Event()
    with Watch(say=lambda text: never.wait(60), end=ended):
        send(signal.SIGTERM)
        assert ended.happened.wait(20)
    never.set()


def test_signal_handlers_are_restored():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(n) for n in numbers]
    with watching()[0]:
        pass
    assert [signal.getsignal(n) for n in numbers] == before


@pytest.mark.fault
def test_a_wait_without_progress_is_a_hang_and_one_with_progress_is_none():
    from concurrent.futures import Future

    heartbeat, beats = [], iter(range(8))
    deadline, began_s = Deadline(0.2, lambda: heartbeat.append(1)), time.monotonic()
    with pytest.raises(Hang, match="MainThread waits for a copy: no sign of life for"):
        result_of(Future(), "a copy", deadline, lambda: next(beats, None))
    assert len(heartbeat) == 8 and time.monotonic() - began_s > 0.5
    done: Future[int] = Future()
    done.set_result(5)
    assert result_of(done, "a number", Deadline(0.0)) == 5


def test_the_code_line_of_a_thread():
    assert code_line(threading.get_ident()).startswith("rl/runtime/waits.py:")
    assert code_line(-1) == "it has ended"


def test_a_live_display_is_closed_before_the_last_message():
    ended, happened = Ended(), []
    watch = Watch(
        say=lambda text: happened.append("words"),
        close=lambda: happened.append("cleared"),
        end=ended,
    )
    with watch:
        send(signal.SIGINT)
        assert ended.happened.wait(20)
    assert happened == ["cleared", "words"]

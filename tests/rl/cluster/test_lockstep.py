"""Processes that launch different programs are named, played over a store in memory."""

from __future__ import annotations

import threading

from reprise.rl.cluster import lockstep
from reprise.rl.cluster.lockstep import LockstepWatch
from reprise.rl.cluster.processes import ALONE, Processes
from tests.support.stores import MemoryStore, play

ROUNDS = [f"round {i}" for i in range(50)]
OTHER = [*ROUNDS[:30], "another", *ROUNDS[31:]]


def launch(watch: LockstepWatch, launches: list[str]) -> None:
    digest = 0
    for what in launches:
        digest = hash((digest, what)) % 2**32
        watch.launched(digest, what)


def lines_of(*launches: list[str]) -> list[str | None]:
    """Return what each process finds, as they compare in turn after all of their launches."""
    store, watches = MemoryStore(), list[LockstepWatch]()
    for index, own in enumerate(launches):
        processes = Processes(index, len(launches), store, 60.0)
        watches.append(LockstepWatch(processes, lambda line: None))
        launch(watches[-1], own)
    for watch in watches:
        watch._compare()
    return [watch._compare() for watch in watches]


def test_those_in_lockstep_say_nothing_however_far_apart():
    assert lines_of(ROUNDS, ROUNDS[:20], ROUNDS) == [None] * 3


def test_the_first_launch_that_differs_is_named_in_all_processes():
    line = "process 2 diverged in launch 31: another; process 0: round 30"
    assert lines_of(ROUNDS, ROUNDS, OTHER) == [line] * 3


def test_only_the_last_launches_are_remembered(monkeypatch):
    monkeypatch.setattr(lockstep, "KEPT", 16)
    monkeypatch.setattr(lockstep, "SHOWN", 8)
    line = "process 1 diverged in launch 43: round 42; process 0: the same with other contents"
    assert lines_of(ROUNDS, ["another", *ROUNDS[1:]]) == [line] * 2


def test_a_thread_compares_while_processes_run():
    def work(p: Processes) -> list[str]:
        lines, came = list[str](), threading.Event()
        differs = lambda line: (lines.append(line), came.set())  # noqa: E731
        with LockstepWatch(p, differs, beat_s=0.01) as watch:
            launch(watch, OTHER if p.index else ROUNDS)
            assert came.wait(60)
        p.barrier("the end")
        return lines

    line = "process 1 diverged in launch 31: another; process 0: round 30"
    assert play(2, work) == [[line]] * 2


def test_alone_nothing_is_watched_or_kept():
    with LockstepWatch(ALONE, print) as watch:
        watch.launched(1, "a round")
    assert not watch._launches and not watch._thread.is_alive()

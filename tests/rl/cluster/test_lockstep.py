"""Processes that launch different programs are named, played by threads over a store in memory."""

from __future__ import annotations

import threading

from rl.cluster import lockstep
from rl.cluster.lockstep import LockstepWatch
from rl.cluster.processes import ALONE, Processes
from tests.support.stores import play


def lines_of(count: int, launches: list[list[str]], differing: int) -> list[list[str]]:
    """Return what each process's watch says; `differing` of them are waited for."""

    def work(p: Processes) -> list[str]:
        lines, heard = list[str](), threading.Event()

        def differs(line: str) -> None:
            lines.append(line)
            heard.set()

        with LockstepWatch(p, differs, beat_s=0.01) as watch:
            digest = 0
            for what in launches[p.index]:
                digest = hash((digest, what)) % 2**32
                watch.launched(digest, what)
            if differing:
                assert heard.wait(20)
        p.barrier("the end")
        return lines

    found = play(count, work)
    assert not any(isinstance(lines, Exception) for lines in found), found
    return found  # type: ignore[return-value]


def test_those_in_lockstep_say_nothing_however_far_apart():
    rounds = [f"round {i}" for i in range(50)]
    assert lines_of(3, [rounds, rounds[:20], rounds], 0) == [[], [], []]


def test_the_first_launch_that_differs_is_named_in_all_processes():
    rounds = [f"round {i}" for i in range(50)]
    other = [*rounds[:30], "another", *rounds[31:]]
    line = "process 2 diverged in launch 31: another; process 0: round 30"
    assert lines_of(3, [rounds, rounds, other], 3) == [[line]] * 3


def test_only_the_last_launches_are_remembered(monkeypatch):
    monkeypatch.setattr(lockstep, "KEPT", 16)
    monkeypatch.setattr(lockstep, "SHOWN", 8)
    rounds = [f"round {i}" for i in range(50)]
    [[line], _] = lines_of(2, [rounds, ["another", *rounds[1:]]], 2)
    assert (
        line == "process 1 diverged in launch 43: round 42; process 0: the same with other contents"
    )


def test_alone_nothing_is_watched_or_kept():
    with LockstepWatch(ALONE, print) as watch:
        watch.launched(1, "a round")
    assert not watch._launches and not watch._thread.is_alive()

"""Agreement between processes, played by threads over a store in memory."""

from __future__ import annotations

import threading

import pytest

from reprise.rl.cluster.processes import ALONE, Diverged, Processes, ProcessLost, difference
from tests.support.stores import MemoryStore, play


def test_gather_returns_all_values_in_the_order_of_processes() -> None:
    def work(p: Processes) -> list[list[bytes]]:
        return [p.gather(f"point {i}", b"%d of %d" % (i, p.index)) for i in range(5)]

    found = play(3, work)
    assert found == [[[b"%d of %d" % (i, j) for j in range(3)] for i in range(5)]] * 3


def test_gather_keeps_two_values_a_process_and_no_more() -> None:
    store = MemoryStore()

    def work(p: Processes) -> int:
        for i in range(50):
            p.gather(f"point {i}", b"x" * 100)
        return 0

    assert play(3, work, store=store) == [0] * 3
    assert len(store.values) == 3


def test_values_may_hold_any_bytes() -> None:
    value = b"\0\xff\0point\0"
    assert play(2, lambda p: p.gather("point", value)) == [[value, value]] * 2


def test_processes_at_different_points_are_told_apart() -> None:
    first, second = play(2, lambda p: p.gather(f"step {p.index}", b""))
    assert isinstance(first, Diverged) and isinstance(second, Diverged)
    assert "process 1 is at 'step 1' where process 0 is at 'step 0'" in str(first)


def test_a_process_that_does_not_come_is_named_within_the_deadline() -> None:
    def work(p: Processes) -> list[bytes]:
        return p.gather("handshake", b"") if p.index == 0 else []

    first, _ = play(2, work, deadline_s=0.2)
    assert isinstance(first, ProcessLost)
    assert "process 1 did not come to 'handshake'" in str(first)


def test_any_from_first_and_barrier() -> None:
    def work(p: Processes) -> tuple[bool, bool, bytes]:
        p.barrier("here")
        flags = p.any("stop", p.index == 1), p.any("stop", False)
        return *flags, p.from_first("table", lambda: b"of %d" % p.index)

    assert play(3, work) == [(True, False, b"of 0")] * 3


def test_alone_everything_is_trivial() -> None:
    with ALONE as p:
        assert p.gather("x", b"1") == [b"1"] and p.gather_large("x", b"1") == [b"1"]
        assert not p.any("x", False) and p.any("x", True)
        assert p.from_first("x", lambda: b"2") == b"2"
        p.agree("x", {"a": "1"})
        p.barrier("x")
        p.fail("x")


def test_equal_digests_agree_and_others_are_named() -> None:
    def work(p: Processes) -> None:
        p.agree("step 1", {"request 1": "aa", "request 2": "bb"})
        p.agree("step 2", {"request 1": "aa", "request 2": "cc" if p.index == 2 else "bb"})

    for error in play(3, work):
        assert isinstance(error, Diverged)
        assert str(error) == (
            "step 2: process 2 differs in 1 of 2: request 2: cc there, bb on process 0"
        )


def test_another_order_is_a_difference() -> None:
    tables = [[("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")], [("a", "1")]]
    assert difference(tables) == (
        "process 1 has b in place 0 where process 0 has a; "
        "process 2 has nothing in place 1 where process 0 has b"
    )


class Clock:
    """Seconds that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Turns:
    """In place of the end of a watch: each wait for it takes the next turn, until none is left.

    A turn is seconds that pass, or none, and whether the other process sends a heartbeat then.
    """

    def __init__(self, other: Processes, clock: Clock, *turns: tuple[float, bool]) -> None:
        self.other, self.clock, self.turns = other, clock, list(turns)

    def wait(self, limit_s: float) -> bool:
        assert 0 < limit_s <= 4.0, "a beat, or LEAVING_S"
        if not self.turns:
            return True
        seconds, beats = self.turns.pop(0)
        self.clock.now_s += seconds
        if beats:
            self.other._beat()
        return False


def watched(*turns: tuple[float, bool]) -> tuple[Processes, list[str]]:
    """Return process 0, which has watched process 1, and why its run was ended for it."""
    store, clock, ended = MemoryStore(), Clock(), list[str]()
    watching = Processes(0, 2, store, 10.0, clock=clock)
    watching.end = ended.append
    watching._over = Turns(Processes(1, 2, store, 10.0), clock, *turns)  # type: ignore[assignment]
    watching._watch()
    return watching, ended


def test_a_process_without_signs_of_life_is_lost() -> None:
    watching, ended = watched((1, True), (6, False), (6, False))
    with pytest.raises(ProcessLost, match=r"process 1 is lost: no sign of life for 12\.0 s"):
        watching.gather("step 1", b"")
    assert not ended, "the main thread left by itself"


def test_a_main_thread_that_does_not_leave_is_ended() -> None:
    """As in a collective that does not end."""
    _, ended = watched((1, True), (12, False), (0, False))
    assert ended == ["process 1 is lost: no sign of life for 12.0 s"]


def test_a_failure_is_told_to_the_others() -> None:
    def work(p: Processes) -> None:
        with p:
            if p.index == 1:
                p.fail("the disk is full")
                raise OSError
            p.gather("step 1", b"")

    first, _, third = play(3, work)
    assert isinstance(first, ProcessLost) and isinstance(third, ProcessLost)
    assert str(first) == str(third) == "process 1 failed: the disk is full"


def test_a_request_to_stop_is_told_to_the_others() -> None:
    def work(p: Processes) -> bool:
        with p:
            if p.index == 0:
                p.request_stop()
            for _ in range(6000):
                if p.any("asked", p.stop_requested):
                    return True
                threading.Event().wait(0.02)
        return False

    assert play(2, work) == [True, True]


def test_waiting_lasts_as_long_as_the_other_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the deadline, for it gives signs of life."""
    watching, _ = watched(*[(6, True)] * 4)
    monkeypatch.setattr("reprise.rl.cluster.processes.POLL_S", 0.001)
    other, waited = Processes(1, 2, watching.store, 10.0), list[float]()
    watching._thread = threading.current_thread()  # during the run

    def waiting() -> None:
        waited.append(6.0)
        watching._clock.now_s += 6.0  # type: ignore[attr-defined]
        if len(waited) == 3:
            other.store.set("reprise/gather/1/1", b"step 1\0x")

    assert watching.gather("step 1", b"", waiting) == [b"", b"x"] and len(waited) == 3


def test_a_process_that_has_left_is_not_waited_for() -> None:
    def work(p: Processes) -> list[bytes]:
        with p:
            found = p.gather("step 1", b"")
            if p.index == 0:
                found = p.gather("step 2", b"")  # where the other never comes
        return found

    first, second = play(2, work)
    assert isinstance(first, ProcessLost) and second == [b"", b""]
    assert str(first) == "process 1 has left the run, and did not come to 'step 2'"


def test_the_loss_of_the_store_is_the_loss_of_process_0() -> None:
    store = MemoryStore()
    other = Processes(1, 2, store, 1.0)
    store.broken = True
    with pytest.raises(ProcessLost, match="process 0, which holds the run together"):
        with other:
            other.gather("step 1", b"")


def test_a_lost_process_0_ends_the_others_without_its_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reprise.rl.cluster.processes.LEAVING_S", 0.01)
    store, ended = MemoryStore(), list[str]()
    other = Processes(1, 2, store, 1.0)
    other.end = ended.append
    other.lose_first()
    other.lose_first()
    other.depart()
    assert len(ended) == 1 and ended[0].startswith("process 0, which holds the run together, is")
    assert not store.values, "a call may not return"

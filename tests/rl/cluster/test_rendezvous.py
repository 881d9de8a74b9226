"""Processes that meet before jax, played by threads; and those that do not."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from processes import free_port

from reprise.rl.cluster import join
from reprise.rl.cluster.config import ClusterConfig
from reprise.rl.cluster.join import meet


def config(process: int, count: int, port: int, deadline_s: float = 60.0) -> ClusterConfig:
    return ClusterConfig("spmd", f"127.0.0.1:{port}", count, process, deadline_s=deadline_s)


def met(*settings: ClusterConfig) -> list[str]:
    """The error of each of the processes: "" if there is none."""

    def one(config: ClusterConfig) -> str:
        try:
            meet(config)
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(settings)) as threads:
        return list(threads.map(one, settings))


def test_processes_meet_in_any_order() -> None:
    port = free_port()
    assert met(*(config(i, 4, port) for i in (2, 0, 3, 1))) == [""] * 4


def test_the_address_is_free_for_jax_before_anyone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that reached the rendezvous instead of jax's service would never register."""
    port = free_port()
    send = join._send
    answers: list[str] = []

    def sent(peer: socket.socket, message: list[Any]) -> None:
        if len(message) == 2:  # the outcome, from process 0
            with contextlib.closing(socket.socket()) as early:
                refused = early.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
                answers.append("refused" if refused else "accepted")
        send(peer, message)

    monkeypatch.setattr(join, "_send", sent)
    assert met(config(0, 3, port), config(1, 3, port), config(2, 3, port)) == [""] * 3
    assert answers == ["refused", "refused"]


class TwoComers:
    """Process 0's listener: its time is up after two programs have come."""

    def __init__(self, listener: socket.socket) -> None:
        self.accept, self.left = listener.accept, 2

    def settimeout(self, seconds: float) -> None:
        assert 0 < seconds <= 60.0
        self.left -= 1
        if self.left < 0:
            raise TimeoutError


def test_the_absent_are_named_to_all_who_came(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = join._listen

    @contextlib.contextmanager
    def listening(config: ClusterConfig) -> Iterator[TwoComers]:
        with listen(config) as listener:
            yield TwoComers(listener)

    monkeypatch.setattr(join, "_listen", listening)
    port = free_port()
    found = met(*(config(i, 5, port) for i in (0, 2, 3)))
    assert found[0] == found[1] == found[2]
    assert "got 3 within Cluster.deadline_s=60 s: process 1, 4 did not come" in found[0]


def test_two_of_one_number_are_told() -> None:
    port = free_port()
    found = met(*(config(i, 3, port) for i in (0, 1, 1)))
    assert "got two with 1: give each its own" in found[0]
    assert found[0] in found[1:]


def test_another_number_of_processes_is_told() -> None:
    port = free_port()
    found = met(config(0, 2, port), config(1, 3, port))
    assert found[0] == found[1]
    assert "got 3 in process 1 and 2 in process 0" in found[0]


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        [found] = met(config(0, 2, taken.getsockname()[1], 1.0))
    assert "process 0 cannot listen there" in found and "is the port taken" in found


def test_an_address_without_a_process_is_named_within_the_deadline() -> None:
    [found] = met(config(1, 2, free_port(), 1.0))
    assert "did not answer within Cluster.deadline_s=1 s" in found


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0\n", b"[]\n", b'{"form": 1}\n', b"x" * 2**19])
def test_another_program_at_the_address_is_named(answer: bytes) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def serve() -> None:
            guest, _ = other.accept()
            with guest, contextlib.suppress(ConnectionError):
                guest.sendall(answer)
                guest.recv(2**16)
                if answer:
                    guest.recv(1)  # until the guest hangs up, or at once
                else:
                    threading.Event().wait(3)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        [found] = met(config(1, 2, other.getsockname()[1], 1.0))
    assert "is no process 0 of this run" in found and "another program's" in found


def test_strangers_are_not_listened_to() -> None:
    port = free_port()

    def stranger(hello: bytes) -> None:
        while not first.done():  # until process 0 listens
            try:
                with socket.create_connection(("127.0.0.1", port), 60.0) as peer:
                    return peer.sendall(hello)
            except OSError:
                threading.Event().wait(0.02)

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(met, config(0, 2, port))
        for hello in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", b"{}\n", b'["another", 1, 2]\n'):
            stranger(hello)
        assert met(config(1, 2, port)) == [""]
        assert first.result() == [""]

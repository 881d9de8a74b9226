"""The relay to process 0: bytes pass, and its loss is seen here while jax's connection stays."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from reprise.rl.cluster.relay import Relay

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its sockets are Linux's")
LIMIT_S = 60.0


@pytest.fixture
def first() -> Iterator[socket.socket]:
    """The listener of process 0."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        yield listener


def client_of(relay: Relay) -> socket.socket:
    """Return the connection that jax would have."""
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(LIMIT_S)
    client.connect("\0" + relay.here.removeprefix("unix-abstract:"))
    return client


def loss_of(relay: Relay) -> threading.Event:
    lost = threading.Event()
    relay.watch(lost.set)
    return lost


def test_bytes_pass_and_a_closed_connection_is_a_loss(first: socket.socket) -> None:
    with Relay(first.getsockname(), LIMIT_S) as relay:
        client, lost = client_of(relay), loss_of(relay)
        peer, _ = first.accept()
    with client:
        with peer:
            client.sendall(b"question")
            assert peer.recv(100) == b"question"
            peer.sendall(b"answer")
            assert client.recv(100) == b"answer" and not lost.is_set()
        assert lost.wait(LIMIT_S)
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.recv(1)  # jax would abort at its end


def test_a_process_0_that_sends_nothing_is_lost(first: socket.socket) -> None:
    with Relay(first.getsockname(), 0.05) as relay, client_of(relay):
        assert loss_of(relay).wait(LIMIT_S)


def test_silence_before_processes_have_met_is_no_loss(first: socket.socket) -> None:
    deadline_s = 0.05
    with Relay(first.getsockname(), deadline_s) as relay, client_of(relay) as client:
        peer, _ = first.accept()
        with peer:
            time.sleep(3 * deadline_s)
            client.sendall(b"late")
            assert peer.recv(100) == b"late" and not relay._lost.is_set()
            assert loss_of(relay).wait(LIMIT_S), "from then on it is"


def test_a_process_0_that_does_not_listen_yet_is_not_lost(first: socket.socket) -> None:
    address = first.getsockname()
    first.close()
    with Relay(address, LIMIT_S) as relay, client_of(relay) as client:
        assert client.recv(1) == b"", "jax connects once more"
        assert not loss_of(relay).is_set()


def test_strangers_are_not_let_in_and_are_no_loss(first: socket.socket) -> None:
    """The socket has no permissions, and /proc/net/unix shows its name to all."""

    def visit(relay: Relay) -> None:
        name = "\\x00" + relay.here.removeprefix("unix-abstract:")
        code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect('{name}'); "
        code += "s.settimeout(60); assert s.recv(1) == b''"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)

    with Relay(first.getsockname(), LIMIT_S) as relay:
        visit(relay)
        client, lost = client_of(relay), loss_of(relay)
        peer, _ = first.accept()
        with client, peer:
            visit(relay)
            with client_of(relay) as second:
                assert second.recv(1) == b"", "jax has one connection"
            client.sendall(b"question")
            assert peer.recv(100) == b"question" and not lost.wait(0.1)
            first.settimeout(0.05)
            with pytest.raises(TimeoutError):
                first.accept()

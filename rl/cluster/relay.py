"""A relay between the jax client in this process and process 0, which runs the jax service.

jax aborts a process, with pages of stack, as soon as its connection to process 0 closes. So jax
connects to a socket of this process, which forwards bytes, and stays open once process 0 is lost.
`rl.cluster.processes` then stops the run with one line, as for the loss of any other process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

CHUNK_BYTES = 2**16
_CREDENTIALS = struct.Struct("3i")  # process, user and group of a peer on Linux


class Relay:
    """A context manager that lets jax connect to `here`, an abstract socket, which only Linux has.

    Abstract sockets have no permissions. So the relay takes one connection, of this process, which
    outlives the context, and closes other connections. Process 0 is lost once it closes its end, or
    sends nothing for `deadline_s` after `watch`, since it answers each heartbeat. Before `watch`,
    this process may be busy with its imports, and sends nothing itself.
    """

    def __init__(self, address: tuple[str, int], deadline_s: float) -> None:
        self._address = address
        self._deadline_s = deadline_s
        self._lost = threading.Event()
        self._watched = threading.Event()
        self._clients = list[socket.socket]()  # held here to stay open
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("")  # Linux picks a name without a file, which bypasses proxies
        self.here = "unix-abstract:" + self._listener.getsockname()[1:].decode()

    def __enter__(self) -> Self:
        self._listener.listen()
        _start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()

    def watch(self, lost: Callable[[], object]) -> None:
        """Call `lost` in a thread once process 0 is lost."""

        def wait() -> None:
            self._lost.wait()
            lost()

        self._watched.set()
        _start(wait)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # until the listener is closed
            while True:
                client, _ = self._listener.accept()
                if self._clients or not _is_own(client):
                    client.close()
                    continue
                try:
                    first = socket.create_connection(self._address, self._deadline_s)
                except OSError:  # process 0 does not listen yet: jax tries again
                    client.close()
                    continue
                first.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._clients.append(client)
                _start(self._forward, client, first)
                _start(self._forward, first, client)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := self._received(source):
                target.sendall(data)
        self._lost.set()

    def _received(self, source: socket.socket) -> bytes:
        """Return the next bytes, empty at the end. Raises TimeoutError after a watched silence."""
        while True:
            watched = self._watched.is_set()
            try:
                return source.recv(CHUNK_BYTES)
            except TimeoutError:
                if watched:  # during the whole timeout
                    raise


def _is_own(client: socket.socket) -> bool:
    """Return whether a connection comes from this process, which has the jax client."""
    peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(peer)
    return (pid, uid) == (os.getpid(), os.geteuid())


def _start(target: Callable[..., object], *args: object) -> None:
    threading.Thread(target=target, args=args, name="relay", daemon=True).start()

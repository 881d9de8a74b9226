"""The server's HTTP layer with a policy that does nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn

from reprise.rl.batches.data import Output
from reprise.rl.http.connections import configured
from reprise.rl.server.app import make_app
from reprise.rl.server.records import Records
from reprise.rl.server.service import Served
from tests.support.served import in_thread

NAME = "idle"


@dataclasses.dataclass(frozen=True)
class Sampler:
    version: int = 0

    def forward(self, data: Any) -> list[np.ndarray]:
        return [np.zeros(len(data[0]), np.float32)]


class Policy:
    """A policy without weights, whose checkpoints are files of zeros."""

    model = SimpleNamespace(lora=SimpleNamespace(rank=8))
    config = SimpleNamespace(longest_tokens=64)
    version = 0

    def __init__(self, checkpoint_bytes: int = 1) -> None:
        self._checkpoint_bytes = checkpoint_bytes

    def with_new_adapter(self, *_: Any) -> Policy:
        return self

    def with_adapter(self, folder: Path) -> Policy:
        (folder / "weights").read_bytes()
        return self

    def load_state(self, folder: Path, **_: Any) -> None:
        self.with_adapter(folder)

    def forward_backward(self, data: Any, *_: Any) -> Output:
        return Output(0.0, [np.zeros(len(datum), np.float32) for datum in data])

    evaluate = forward_backward

    def optim_step(self, adam: Any) -> float:
        return 1.0

    def save_state(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        file = os.open(folder / "weights", os.O_WRONLY | os.O_CREAT)
        try:
            if os.write(file, bytes(self._checkpoint_bytes)) < self._checkpoint_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)

    export_adapter = save_state

    def sampler(self) -> Any:
        return Sampler()


class Stream:
    """A stream whose requests end in the next step, without samples."""

    def __init__(self) -> None:
        self._waiting: list[Any] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Any, on_finish: Any, on_tokens: Any) -> None:
        self._waiting.append(on_finish)

    def step(self) -> None:
        waiting, self._waiting = self._waiting, []
        for on_finish in waiting:
            on_finish([])

    def close(self) -> None:
        """There is nothing to close."""


def application(folder: Path, checkpoint_bytes: int = 1, **options: Any) -> Any:
    served: Any = Served(Policy(checkpoint_bytes), NAME, "none")  # type: ignore[arg-type]
    stream: Any = Stream()
    return make_app(served, stream, Records(folder), **options)


@contextlib.contextmanager
def idle_server(folder: Path, **options: Any) -> Iterator[tuple[Any, str]]:
    """Serve in a thread; yields the application and its address."""
    app = application(folder, **options)
    with in_thread(app) as address:
        yield app, address


def serve_on(sock: socket.socket, folder: Path, checkpoint_bytes: int) -> None:
    """Serve until a signal."""
    uvicorn.Server(configured(application(folder, checkpoint_bytes))).run(sockets=[sock])


def limit_disk(folder: Path, room_bytes: int) -> None:
    """Let this process's `os.write` find a disk with so much room for the files of a folder.

    As on a full disk, a write that has no room for all of its bytes writes the first ones.
    """
    write, mutex = os.write, threading.Lock()

    def used() -> int:
        total = 0
        for where, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # another thread has just deleted it
                    total += os.stat(os.path.join(where, name)).st_size
        return total

    def limited(file: int, data: Any) -> int:
        if not os.readlink(f"/proc/self/fd/{file}").startswith(f"{folder}/"):
            return write(file, data)
        with mutex:
            room = room_bytes - used()
            if room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(file, bytes(data)[:room])

    os.write = limited

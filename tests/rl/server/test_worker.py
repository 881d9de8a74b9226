"""The worker compiles before its first operation; a stop, or a failure, does not wait for that."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from reprise.rl.server.worker import Worker

DEADLINE_S = 30


class FakeStream:
    """A stream whose warm-up compiles programs until it may end."""

    has_work = False

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.may_end = threading.Event()
        self.compiles = threading.Event()
        self.is_closed = threading.Event()
        self.is_warm = False

    def warm_up(self, on_compiled) -> None:
        done = 0
        while not self.may_end.wait(0.01):
            on_compiled(min(done, 5), 6)
            self.compiles.set()
            done += 1
        if self.error is not None:
            raise self.error
        self.is_warm = True

    def close(self) -> None:
        self.is_closed.set()


async def first_result(worker: Worker, stream: FakeStream) -> dict[str, bool]:
    """Return the result of an operation that is queued while programs compile."""
    answered = asyncio.get_running_loop().create_future()
    worker.do(lambda: {"was warm": stream.is_warm}, answered.set_result)
    await asyncio.sleep(0.05)
    assert not answered.done()
    stream.may_end.set()
    return await asyncio.wait_for(answered, DEADLINE_S)


@pytest.mark.parametrize("error", [None, RuntimeError("no room for programs")])
def test_operations_wait_for_compilation_and_survive_its_failure(error, capsys):
    stream = FakeStream(error)

    async def run() -> dict[str, bool]:
        worker = Worker(stream, asyncio.get_running_loop(), Path(), warms_up=True)
        try:
            return await first_result(worker, stream)
        finally:
            worker.close()

    assert asyncio.run(run()) == {"was warm": error is None}
    printed = capsys.readouterr().err
    assert ("warning: warm-up failed" in printed) == (error is not None)


def test_a_stop_ends_compilation():
    stream = FakeStream()

    async def run() -> None:
        worker = Worker(stream, asyncio.get_running_loop(), Path(), warms_up=True)
        assert stream.compiles.wait(DEADLINE_S)
        worker.close()  # does not wait for a program that compiles

    asyncio.run(run())
    assert stream.is_closed.wait(DEADLINE_S) and not stream.is_warm


class Requests(FakeStream):
    """A stream that notes its requests, and shows a token of each in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[object] = []
        self.dropped: list[object] = []
        self.shown = None

    @property
    def has_work(self) -> bool:
        return len(self.added) > len(self.dropped)

    def add(self, request, on_finish, on_tokens=None) -> None:
        self.added.append(request)
        self.shown = on_tokens

    def drop(self, request) -> None:
        self.dropped.append(request)

    def step(self) -> None:
        self.shown(0, [7], [-1.0])


def test_a_request_shows_its_tokens_until_it_is_dropped():
    """Then it has no result, and a second drop does nothing."""
    stream = Requests()
    results: list[object] = []

    async def run() -> None:
        seen = asyncio.Event()
        worker = Worker(stream, asyncio.get_running_loop(), Path())
        try:
            drop = worker.sample(
                lambda: "request", lambda samples: {}, results.append, lambda *_: seen.set()
            )
            await asyncio.wait_for(seen.wait(), DEADLINE_S)
            drop()
            drop()
            while not stream.dropped:
                await asyncio.sleep(0.001)
        finally:
            worker.close()

    asyncio.run(run())
    assert stream.added == stream.dropped == ["request"] and not results

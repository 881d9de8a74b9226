"""The compute thread: compilation, then training operations in order, and rounds in between."""

from __future__ import annotations

import asyncio
import collections
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reprise.rl.http.account import Busy
from reprise.rl.python.sampler import Sample
from reprise.rl.python.stream import OnTokens, SampleRequest, Stream
from reprise.rl.runtime.progress import progress, say
from reprise.rl.server.records import no_space

Result = bytes | dict[str, Any]  # a message, or a JSON object
OnResult = Callable[[Result], None]


class _Closed(Exception):
    """The server stops while programs compile."""


class Worker:
    """A thread that runs operations and the stream, and delivers results in the event loop.

    If `warms_up`, the thread first compiles the sampling programs. Requests wait.
    """

    def __init__(
        self,
        stream: Stream,
        loop: asyncio.AbstractEventLoop,
        folder: Path,
        *,
        warms_up: bool = False,
    ) -> None:
        self._stream = stream
        self._loop = loop
        self._folder = folder
        self._jobs = collections.deque[Callable[[], None]]()
        self._sampling: dict[object, OnResult] = {}  # requests in the stream
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_compiling = warms_up
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def do(self, operation: Callable[[], Result], on_result: OnResult) -> None:
        """Queue an operation; an error is delivered as its result."""

        self._put(lambda: self._deliver(on_result, self._result(operation)))

    def sample(
        self,
        request: Callable[[], SampleRequest],
        finish: Callable[[list[Sample]], Result],
        on_result: OnResult,
        on_tokens: OnTokens | None = None,
    ) -> Callable[[], None]:
        """Queue a request for samples; `finish` converts the samples to a result.

        `on_tokens` is called in the event loop with tokens of unfinished responses. Return a
        function that drops the request, which then has no result unless it already has one.
        """
        key = object()
        sent = list[SampleRequest]()

        def done(samples: list[Sample] | Exception) -> None:
            del self._sampling[key]
            if isinstance(samples, Exception):
                return self._deliver(on_result, self._failure(samples))
            self._deliver(on_result, self._result(lambda: finish(samples)))

        def shown(index: int, tokens: list[int], logprobs: list[float]) -> None:
            assert on_tokens is not None
            self._loop.call_soon_threadsafe(on_tokens, index, tokens, logprobs)

        def job() -> None:
            try:
                sent.append(request())
                self._stream.add(sent[0], done, None if on_tokens is None else shown)
            except Exception as error:
                self._deliver(on_result, self._failure(error))
            else:
                self._sampling[key] = on_result

        def drop() -> None:
            if self._sampling.pop(key, None) is not None:
                self._stream.drop(sent[0])

        self._put(job)
        return lambda: self._put(drop)

    def close(self) -> None:
        """Stop after the current operation, or during compilation, which leaves nothing to save."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if not self._is_compiling:
            self._thread.join()

    def _put(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def _run(self) -> None:
        if self._is_compiling:
            self._warm_up()
            self._is_compiling = False
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._is_closed:
                    break
                job = self._jobs.popleft() if self._jobs else None
            if job is not None:
                job()
            if self._stream.has_work:
                self._step()
        self._stream.close()

    def _warm_up(self) -> None:
        with progress() as show:

            def on_compiled(done: int, total: int) -> None:
                if self._is_closed:
                    raise _Closed
                show.compiling("samples", done, total)

            try:
                self._stream.warm_up(on_compiled)
            except _Closed:
                return
            except Exception as error:
                say("".join(traceback.format_exception(error)), sys.stderr)
                show.message("warning: warm-up failed: programs compile at their first use")

    def _has_work(self) -> bool:
        return bool(self._jobs) or self._stream.has_work or self._is_closed

    def _step(self) -> None:
        try:
            self._stream.step()
        except Exception as error:
            result = self._failure(error)
            for on_result in self._sampling.values():
                self._deliver(on_result, result)
            self._sampling.clear()

    def _deliver(self, on_result: OnResult, result: Result) -> None:
        self._loop.call_soon_threadsafe(on_result, result)

    def _result(self, operation: Callable[[], Result]) -> Result:
        """Return the result of an operation, or its error as a result."""
        try:
            return operation()
        except Exception as error:
            return self._failure(error)

    def _failure(self, error: Exception) -> dict[str, Any]:
        """Return an error as clients see it: the text of an expected error, else only the type."""
        if isinstance(error, ValueError):
            return {"error": str(error), "category": "user"}
        if text := no_space(error, self._folder) or (str(error) if isinstance(error, Busy) else ""):
            return {"error": text, "category": "server"}
        say("".join(traceback.format_exception(error)), sys.stderr)
        return {"error": f"{type(error).__name__} in the server: see its log", "category": "server"}

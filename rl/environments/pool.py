"""The environments of a run: calls of episodes, each in its process, as futures.

If an environment raises, hangs, dies or returns nonsense, only its episode fails, and its process
is killed. A dead server is replaced, and costs the open episodes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from reprise.rl.data.tasks import Example
from reprise.rl.environments.config import EnvironmentConfig, validate
from reprise.rl.environments.server import (
    EnvironmentServer,
    EnvironmentServerError,
    EpisodeFailed,
    EpisodeProcess,
    ServerLost,
)

STARTUP_S = 120.0  # of the server, imports included
MAX_ATTEMPTS = 3  # a server that dies before an episode is opened is not its fault
MAX_RESTARTS = 20  # of the server in a run: a file that kills it would do so forever


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """The answer of an environment to one call.

    messages: in the form of chat templates; empty if the episode is done.
    text: to append to the last message of the prompt; only `reset` has it.
    reward: of the turn, if the environment has given one.
    rewards: of the episode by name, once it is done or scored; the name "" is the reward of an
      environment with one reward. Values that are None do not apply.
    """

    messages: Sequence[Mapping[str, str]] = ()
    text: str = ""
    done: bool = False
    reward: float | None = None
    rewards: Mapping[str, float | None] | None = None
    num_calls: int = 0
    num_failed_calls: int = 0
    seconds: float = 0.0


class Environments:
    """The environment server of a run, and a thread for each call. Use as a context manager."""

    def __init__(
        self, config: EnvironmentConfig, num_live: int, startup_s: float = STARTUP_S
    ) -> None:
        """Raise the errors of `validate(config)` before any process is started.

        At most `num_live` episodes are open at a time.
        """
        validate(config)
        self.config = config
        self._startup_s = startup_s
        self._lock = threading.Lock()
        self._server: EnvironmentServer | None = None
        self._processes: dict[int, EpisodeProcess] = {}
        self._threads = ThreadPoolExecutor(num_live, thread_name_prefix="environment")
        self._num_restarts = 0
        self._is_closed = False
        self._error: EnvironmentServerError | None = None
        self.tools: Sequence[Mapping[str, Any]] = ()  # as JSON schemas

    def __enter__(self) -> Self:
        """Start the server, and read the tools of an environment. Raises EnvironmentServerError."""
        try:
            self._server = self._started()
            self.tools = self._tools_of(self._server)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def reset(self, episode: int, row: Mapping[str, Any], seeds: Sequence[int]) -> Future[Answer]:
        """Open the environment of an episode, and reset it with a row.

        `seeds` are of random numbers in `reset` and after it. The future raises EpisodeFailed,
        EnvironmentServerError if no environment can be opened any more, or TypeError for a row that
        is not JSON.
        """
        return self._threads.submit(self._reset, episode, dict(row), list(seeds))

    def step(self, episode: int, text: str) -> Future[Answer]:
        """Call an environment with the text of a turn; the future raises EpisodeFailed."""
        return self._threads.submit(self._call, episode, {"op": "step", "text": text})

    def score(self, episode: int) -> Future[Answer]:
        """Get the reward of an episode that a limit stops; the future raises EpisodeFailed."""
        return self._threads.submit(self._call, episode, {"op": "score"})

    def end(self, episode: int) -> None:
        """Close the environment of an episode, without waiting; ignore unknown episodes."""
        with self._lock:
            process = self._processes.pop(episode, None)
            if process is not None and not self._is_closed:
                self._threads.submit(process.close)

    def end_all(self) -> None:
        """Close all open environments, as after a step that was abandoned."""
        for episode in list(self._processes):
            self.end(episode)

    def close(self) -> None:
        """Kill the server and all environments; calls that run raise EpisodeFailed."""
        with self._lock:
            self._is_closed = True
            self._processes.clear()
            server = self._server
        if server is not None:
            server.dispose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- in the thread of a call ------------------------------------------------------------

    def _reset(self, episode: int, row: dict[str, Any], seeds: list[int]) -> Answer:
        process = self._open()
        with self._lock:
            if self._is_closed:
                raise EpisodeFailed("died", "the environments were closed")
            assert episode not in self._processes, "an episode is reset once"
            self._processes[episode] = process
        return self._call(episode, {"op": "reset", "row": row, "seeds": seeds})

    def _call(self, episode: int, body: Mapping[str, Any]) -> Answer:
        with self._lock:
            process = self._processes.get(episode)
        if process is None:
            raise EpisodeFailed("died", "its environment is closed")
        start_s = time.monotonic()
        try:
            answer = process.call(body, self.config.deadline_s)
            return read_answer(answer, time.monotonic() - start_s)
        except BaseException:
            self.end(episode)
            raise

    def _open(self) -> EpisodeProcess:
        for _ in range(MAX_ATTEMPTS):
            server = self._present()
            try:
                return server.open()
            except ServerLost:
                continue
        raise self._fail(
            f"the environment server ended {MAX_ATTEMPTS} times before an episode was opened"
        )

    def _present(self) -> EnvironmentServer:
        """Return the server, replaced if it is lost. Raises EnvironmentServerError."""
        with self._lock:
            if self._error is not None:
                raise self._error
            server = self._server
            if self._is_closed or server is None:
                raise EpisodeFailed("died", "the environments were closed")
            if not server.is_lost:
                return server
            self._num_restarts += 1
            if self._num_restarts > MAX_RESTARTS:
                self._error = EnvironmentServerError(
                    f"the environment server has ended {self._num_restarts} times in this run"
                )
                raise self._error
            server.dispose()
            try:
                self._server = self._started()
            except EnvironmentServerError as error:
                self._error = error
                raise
            return self._server

    def _started(self) -> EnvironmentServer:
        server = EnvironmentServer(self.config, self._startup_s)
        try:
            server.wait_ready()
        except BaseException:
            server.dispose()
            raise
        return server

    def _tools_of(self, server: EnvironmentServer) -> list[dict[str, Any]]:
        factory = self.config.factory
        try:
            process = server.open()
        except ServerLost as lost:
            raise EnvironmentServerError(f"{factory}: its server ended: {lost}") from lost
        try:
            found = process.call({"op": "describe", "seeds": [0, 0]}, self._startup_s)
        except EpisodeFailed as failed:
            raise EnvironmentServerError(
                f"Environment.factory: {factory} cannot be used: {failed}"
            ) from failed
        finally:
            process.close()
        return list(found["tools"])

    def _fail(self, text: str) -> EnvironmentServerError:
        """Keep the first error, which all later episodes raise."""
        with self._lock:
            self._error = self._error or EnvironmentServerError(text)
            return self._error


def read_answer(answer: Mapping[str, Any], seconds: float) -> Answer:
    """Return the answer of a process. Raises EpisodeFailed if its form is another."""
    try:
        return Answer(
            messages=tuple(dict(message) for message in answer.get("messages", ())),
            text=str(answer.get("text", "")),
            done=bool(answer.get("done", "rewards" in answer)),
            reward=answer.get("reward"),
            rewards=answer.get("rewards"),
            num_calls=int(answer.get("calls", 0)),
            num_failed_calls=int(answer.get("failed_calls", 0)),
            seconds=seconds,
        )
    except (TypeError, ValueError) as error:
        raise EpisodeFailed("protocol", f"an answer in another form: {error}") from None


def row_of(example: Example) -> dict[str, Any]:
    """Return the columns of an example, as `reset` gets them."""
    return {
        **example.columns,
        "prompt": example.prompt,
        "answer": example.answer,
        "task": example.task,
    }


def seeds_of(noise: str, group_id: int, sample_index: int) -> list[int]:
    """Return the seeds of an episode: of `reset`, the same for a group, and of the calls after it.

    `noise` names the noise of the rollout. Seeds are in 0 … 2⁶³ − 1.
    """
    group = f"{noise} {group_id}"
    return [_hashed(group), _hashed(f"{group} {sample_index}")]


def _hashed(text: str) -> int:
    digest = hashlib.sha256(f"reprise environment {text}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

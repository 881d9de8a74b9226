"""A scorer: a program that has reward workers, and scores the responses that messages bring.

    run's program → scorer    Meet, Open, Give, Poll
    scorer → run's program    Met, Done, Scored, Failed: one answer to each

What the functions said of a response goes back; the run's program makes a score of it, and counts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

import numpy as np

from rl.data.tasks import Example
from rl.remote import service
from rl.remote.messages import Done
from rl.remote.records import expect
from rl.remote.service import Met, ServiceProgram
from rl.remote.wire import Codec, WireError
from rl.rewards.config import BUILT_IN, RewardConfig, split_user_function, validate
from rl.rewards.pool import RewardPool
from rl.rewards.scores import Outcomes, ScoreJob, example_json

MOST_WAIT_S = 60.0  # of a Poll
KINDS = ("raised", "deadline", "died", "not_a_list", "length", "not_a_number", "not_finite",
         "protocol")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Meet:
    """The first words. The scorer ends itself when nobody has spoken to it for `silence_s`."""

    identity: Mapping[str, str]
    silence_s: float
    reward: RewardConfig


@dataclasses.dataclass(frozen=True)
class Open:
    """Start the reward workers, which open these tasks; done once they are there."""

    tasks: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Response:
    """A `rl.rewards.scores.ScoreJob`; `prompt` and `columns` are JSON."""

    number: int
    example_id: str
    prompt: str
    answer: str | None
    columns: str
    task: str
    spec: str
    completion: str
    completion_ids: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Give:
    """Responses to be scored, in this order."""

    responses: tuple[Response, ...]


@dataclasses.dataclass(frozen=True)
class Poll:
    """Asks for what has been scored; answered when something has, or after `wait_s`."""

    wait_s: float


@dataclasses.dataclass(frozen=True)
class Said:
    """A function's words on a response: a value, None, or a failure."""

    value: float | None
    kind: str | None
    message: str | None


@dataclasses.dataclass(frozen=True)
class Scored:
    """The words of all functions on responses, by number, since the last Poll.

    `broken`: why no response can be scored here any more.
    """

    said: Mapping[int, tuple[Said, ...]]
    broken: str | None


def _check_response(record: Response) -> None:
    prompt, columns = json.loads(record.prompt), json.loads(record.columns)
    text = type(prompt) is str
    messages = type(prompt) is list and all(
        type(m) is dict and all(type(x) is str for x in m.values()) for m in prompt
    )
    expect(text or messages, "a prompt of text, or messages of text")
    expect(type(columns) is dict, "columns by name")
    expect(bool((record.completion_ids >= 0).all()), "token ids of 0 or more")


def _check_said(record: Said) -> None:
    number = record.value is None or math.isfinite(record.value)
    whole = (record.kind is None) == (record.message is None)
    expect(number and whole, "a finite value or none, and a failure's kind with its message")
    expect(record.kind is None or record.kind in KINDS, f"a failure of {', '.join(KINDS)}")
    expect(record.kind is None or record.value is None, "a value or a failure")


CODEC = Codec(
    (Meet, Open, Give, Poll, Scored, *service.ANSWERS),
    {Response: {"completion_ids": ("int64", 1)}},
    {Response: _check_response, Said: _check_said},
)


def file_identity(reward: RewardConfig) -> dict[str, str]:
    """Return digests of the files of reward functions, which must be the same on all hosts."""
    files = {f: split_user_function(f)[0] for f in reward.functions if f not in BUILT_IN}
    return {
        f"file of {function}": hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for function, path in files.items()
    }


def response_of(number: int, job: ScoreJob) -> Response:
    """Return a job as it is sent. Raises TypeError for columns that are not JSON."""
    example = job.example
    prompt, columns = (example_json(example, x) for x in (example.prompt, dict(example.columns)))
    return Response(
        *(number, example.example_id, prompt, example.answer, columns, example.task, example.spec),
        job.completion,
        np.asarray(job.completion_ids, np.int64),
    )


def job_of(response: Response) -> ScoreJob:
    """Return the job that was sent."""
    prompt = json.loads(response.prompt)
    example = Example(
        response.example_id,
        prompt if type(prompt) is str else tuple(prompt),
        response.answer,
        json.loads(response.columns),
        response.task,
        response.spec,
    )
    return ScoreJob(example, response.completion, tuple(response.completion_ids.tolist()))


class ScoringProgram(ServiceProgram):
    """Answers messages; `config_text` is the configuration of the run that it was started for."""

    def __init__(self, config_text: str, leave: Callable[[str], None] | None = None) -> None:
        super().__init__(CODEC, config_text, leave)
        self._reward: RewardConfig | None = None
        self._pool: RewardPool | None = None
        self._changed = threading.Condition()
        self._said: dict[int, Outcomes] = {}
        self._broken: str | None = None
        self.answers = {
            Meet: self._meet,
            Open: self._open,
            Give: self._give,
            Poll: self._poll,
        }

    def close(self) -> None:
        """End the reward workers."""
        if self._pool is not None:
            self._pool.close()

    def _meet(self, asked: Meet) -> Met:
        validate(asked.reward)  # whose files may not be on this host
        met = self.meet(asked.identity, asked.silence_s, file_identity(asked.reward))
        self._reward = asked.reward
        return met

    def _open(self, asked: Open) -> Done:
        with self._changed:
            if self._reward is None or self._pool is not None:
                raise WireError("expected Open once, after Meet")
            self._pool = RewardPool(self._reward, asked.tasks)
        self._pool.start()
        self._pool.wait_started()
        return Done()

    def _give(self, asked: Give) -> Done:
        if self._pool is None:
            raise WireError("expected Open first")
        for response in asked.responses:
            scored = self._pool.outcomes(job_of(response))
            scored.add_done_callback(partial(self._came, response.number))
        return Done()

    def _came(self, number: int, scored: Future[Outcomes]) -> None:
        if scored.cancelled():  # the pool was closed
            return
        with self._changed:
            error = scored.exception()
            if error is None:
                self._said[number] = scored.result()
            else:
                self._broken = self._broken or f"{str(error)[:2000]}"
            self._changed.notify_all()

    def _poll(self, asked: Poll) -> Scored:
        wait_s = min(max(asked.wait_s, 0.0), MOST_WAIT_S)
        with self._changed:
            self._changed.wait_for(lambda: bool(self._said or self._broken), wait_s)
            said, self._said = self._said, {}
            return Scored({n: _said(x) for n, x in said.items()}, self._broken)


def _said(outcomes: Outcomes) -> tuple[Said, ...]:
    return tuple(Said(value, kind, message) for value, kind, message in outcomes)

"""Responses of a rollout: scored as they finish, and exchanged between the processes of a run.

    requests of the step, the same on all → one part answered and scored → gathered → compared

If each process has an engine (`Cluster.rollouts = "local"`), it answers the groups g with g mod
processes = its number. If one engine spans all processes, each process has all responses and scores
the same groups as with a local engine. With rollout workers on Ray, process 0 answers and scores
everything. Afterwards all processes have the same trajectories, scores and texts in the same order;
a digest of each request verifies this.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import io
import itertools
import os
import pickle
import platform
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.cluster.processes import ALONE, Diverged, Processes
from reprise.rl.data.tasks import Example
from reprise.rl.engine.engine import OnRound, RolloutEngine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.losses.advantages import informative_groups
from reprise.rl.records.stats import CachedCounts, EngineStats, PoolCounts, RoundRecord, joined
from reprise.rl.records.trajectory import FinishReason, NonFiniteLogits, Request, Trajectory
from reprise.rl.records.worker_record import WorkerEvent, WorkerPart, moved
from reprise.rl.rewards.process import RewardWorkerError
from reprise.rl.rewards.scores import Rewards, Score, ScoreJob
from reprise.rl.runtime.signals import Stopped
from reprise.rl.runtime.waits import Hang
from reprise.rl.workers.messages import WorkerError
from reprise.spec.config import SamplingConfig

UNSCORED = Score({}, None)
TOKEN_FIELDS = "response_ids", "logprobs", "emission_logprobs", "policy_versions", "origins"
AGREE_EVERY_FETCHES = 32  # how often one engine over all processes agrees on a stop
# all processes exit together after these errors: the last whole step can still be saved
AGREED = (Stopped, RewardWorkerError, WorkerError, NonFiniteLogits, Hang)


class PeerFailed(RuntimeError):
    """Another process of the run failed in its part of a step, so this process exits too."""


Scored = tuple[Trajectory, Score, str]  # a response with its score, and its text


@dataclasses.dataclass(frozen=True, eq=False)
class Responses:
    """Scored responses in the order of (group, sample), with their texts."""

    trajectories: list[Trajectory]
    scores: list[Score]
    texts: list[str]
    stats: EngineStats

    def __add__(self, more: Responses) -> Responses:
        """Return these responses, then `more` with later groups."""
        return Responses(
            self.trajectories + more.trajectories,
            self.scores + more.scores,
            self.texts + more.texts,
            joined([self.stats, more.stats]),
        )

    @property
    def rows(self) -> list[Scored]:
        return list(zip(self.trajectories, self.scores, self.texts, strict=True))

    @property
    def informative(self) -> set[int]:
        """Return the groups with rewards that are not all equal, ignoring failed rewards."""
        rewards = scored_rewards(self.trajectories, self.scores)
        return informative_groups(rewards, [t.group_id for t in self.trajectories])


def in_order(rows: Iterable[Scored], stats: EngineStats) -> Responses:
    """Return scored responses in the order of (group, sample)."""
    ordered = sorted(rows, key=lambda row: (row[0].group_id, row[0].sample_index))
    return Responses(
        [t for t, _, _ in ordered],
        [score for _, score, _ in ordered],
        [text for _, _, text in ordered],
        stats,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The outcome of a rollout on one process; a stop leaves neither responses nor an error.

    `began_s` is by the clock of that process.
    """

    began_s: float
    responses: Responses | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """The partition of the requests of a rollout between processes.

    With `splits` each process answers its part; otherwise one engine spans all processes, and each
    process has all responses. `is_central`: process 0 has all workers, in other programs, and
    answers all requests.
    """

    processes: Processes
    splits: bool = True
    is_central: bool = False
    _rounds: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def scores(self, group_id: int) -> bool:
        """Return whether this process scores the responses of a group."""
        if self.is_central:
            return self.processes.is_first
        return group_id % self.processes.count == self.processes.index

    @property
    def scores_any(self) -> bool:
        """True if this process ever scores a response."""
        return self.processes.is_first or not self.is_central

    def answers(self, group_id: int) -> bool:
        """Return whether this process generates the responses of a group."""
        return not self.splits or self.scores(group_id)

    def agrees_now(self) -> bool:
        """Return whether to agree on a stop now: True on one call in AGREE_EVERY_FETCHES."""
        return next(self._rounds) % AGREE_EVERY_FETCHES == 0

    def max_groups(self, num_groups: int) -> int:
        """Return the maximum number of groups, out of `num_groups`, that one process answers."""
        spread = self.splits and not self.is_central
        return -(-num_groups // self.processes.count) if spread else num_groups

    def exchange(
        self,
        what: str,
        requests: Sequence[Request],
        answer: Callable[[], Responses],
        waiting: Callable[[], object] = lambda: None,
        *,
        may_go_on: Collection[int] = (),
    ) -> Responses:
        """Return the responses to all requests; `answer` returns the responses of this process.

        Requests with ids in `may_go_on` may still be unanswered. An error of AGREED is raised again
        here, and as PeerFailed or Stopped in the other processes. Raises Diverged unless all
        processes have the same requests and responses.
        """
        if self.processes.alone:
            return answer()
        start_s = time.perf_counter()
        error = None
        own = None
        part = Part(start_s)
        try:
            own = answer()
        except AGREED as raised:
            error = raised
            if not isinstance(raised, Stopped):
                part = Part(start_s, error=str(raised))
        else:
            self._name_workers(own.stats, own.trajectories)
            part = Part(start_s, self._scored(own))
        values = self.processes.gather_large(what, pickle.dumps(part), waiting)
        if error is not None:
            raise error
        parts = [read_part(value) for value in values]
        for index, part in enumerate(parts):
            if part.error is not None:
                raise PeerFailed(f"process {index} failed: {part.error}")
        if any(part.responses is None for part in parts):
            raise Stopped
        assert own is not None
        result = self._merged(own, [_by_clock(p, start_s) for p in parts])
        self._compare(what, requests, result, may_go_on)
        return result

    def _name_workers(self, stats: EngineStats, done: Sequence[Trajectory]) -> None:
        """Name the workers of this process; a single engine counts as one worker."""
        if self.is_central:
            return
        me = f"process {self.processes.index}" if self.splits else "all processes"
        place = f"{platform.node()}, process {os.getpid()}"
        if stats.timeline and not stats.parts:
            version = max((int(t.policy_versions.max(initial=0)) for t in done), default=0)
            spans = tuple((r.began_s, r.ended_s) for r in stats.timeline)
            stats.parts = [WorkerPart(me, place, version, spans)]
            return
        stats.parts = [dataclasses.replace(p, name=f"{me}, {p.name}") for p in stats.parts]
        stats.events = [dataclasses.replace(e, name=f"{me}, {e.name}") for e in stats.events]

    def _scored(self, own: Responses) -> Responses:
        """Return the responses that this process has scored."""
        return in_order((row for row in own.rows if self.scores(row[0].group_id)), own.stats)

    def _merged(self, own: Responses, parts: Sequence[Responses]) -> Responses:
        rows = [row for part in parts for row in part.rows]
        if self.splits:
            return in_order(rows, joined([part.stats for part in parts]))
        # each process compares the responses of its engine
        mine = {t.request_id: t for t in own.trajectories}
        own_rows = [
            (dataclasses.replace(mine[t.request_id], reward=t.reward), score, text)
            for t, score, text in rows
        ]
        return in_order(own_rows, own.stats)

    def _compare(
        self,
        what: str,
        requests: Sequence[Request],
        found: Responses,
        may_go_on: Collection[int],
    ) -> None:
        """Raise Diverged unless all processes have the same requests and responses in order."""
        prompts = {r.request_id: np.asarray(r.prompt_ids, np.int32) for r in requests}
        answered = {t.request_id for t in found.trajectories}
        wanted = prompts.keys() - (set(may_go_on) - answered)
        if len(found.trajectories) != len(wanted) or answered != wanted:
            raise Diverged(
                f"{what}: expected {len(wanted)} responses, one to each request of process "
                f"{self.processes.index}, got {len(found.trajectories)}"
            )
        self.processes.agree(
            what,
            {
                f"request {t.request_id}": digest(prompts[t.request_id], t, score)
                for t, score in zip(found.trajectories, found.scores, strict=True)
            },
        )


WHOLE = Partition(ALONE)


class Scorer:
    """A callback that sends each finished response to the reward workers; `examples` are by group.

    With Reward.per = "group" it sends a group once all of its `group_size` responses have finished,
    in the order of their samples. It skips the groups that another process scores.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rewards: Rewards,
        check: Callable[[], None],
        group_size: int,
        partition: Partition = WHOLE,
    ) -> None:
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._check = check
        self._partition = partition
        self._group_size = group_size if rewards.config.per == "group" else 1
        self.examples: dict[int, Example] = {}
        self._ended: dict[int, list[Trajectory]] = {}  # of unfinished groups
        # by request: the scores of its job, its place in the job, and its text
        self._waiting: dict[int, tuple[Future[list[Score]], int, str]] = {}

    def __call__(self, t: Trajectory) -> None:
        if not self._partition.scores(t.group_id):
            return
        ended = self._ended.setdefault(t.group_id, [])
        ended.append(t)
        if len(ended) < self._group_size:
            return
        ended.sort(key=lambda t: t.sample_index)
        ids = [tuple(t.response_ids.tolist()) for t in ended]
        texts = [self._tokenizer.decode(tokens) for tokens in ids]
        example = self.examples[t.group_id]
        jobs = [ScoreJob(example, *pair) for pair in zip(texts, ids, strict=True)]
        scores = self._rewards.submit_group(jobs)
        for place, (one, text) in enumerate(zip(ended, texts, strict=True)):
            self._waiting[one.request_id] = scores, place, text
        del self._ended[t.group_id]

    def run(
        self,
        engine: RolloutEngine,
        spec: RolloutSpec,
        requests: Sequence[Request],
        on_round: OnRound | None,
        what: str,
    ) -> tuple[list[Trajectory], EngineStats]:
        """Return the responses to the requests of a process, if any, and the counts of the engine.

        `what` names the rollout in errors.
        """
        if not requests:
            return [], EngineStats()
        try:
            return self._drawn(engine, spec, requests, on_round), engine.stats
        except NonFiniteLogits as error:
            raise NonFiniteLogits(f"{what}: {error}") from None

    def _drawn(
        self,
        engine: RolloutEngine,
        spec: RolloutSpec,
        requests: Sequence[Request],
        on_round: OnRound | None,
    ) -> list[Trajectory]:
        """Return the responses; each is scored once it finishes."""
        return engine.run(spec, requests, on_finish=self, on_round=on_round)

    def waits_for(self, group_id: int) -> bool:
        """Return whether finished responses of a group wait for the rest of the group."""
        return self._group_size > 1 and group_id in self._ended

    def _result(self, t: Trajectory) -> tuple[Score, str]:
        """Wait for the score of a response, calling `check`; return the score and the text."""
        if not self._partition.scores(t.group_id):
            return UNSCORED, ""
        scores, place, text = self._waiting.pop(t.request_id)
        return self._rewards.result(scores, self._check)[place], text

    def responses(self, done: Iterable[Trajectory], stats: EngineStats) -> Responses:
        """Return the responses with their scores and texts, by group and sample."""
        ordered = sorted(done, key=lambda t: (t.group_id, t.sample_index))
        scored = [self._result(t) for t in ordered]
        pairs = zip(ordered, scored, strict=True)
        rewarded = [dataclasses.replace(t, reward=score.total) for t, (score, _) in pairs]
        return Responses(rewarded, [s for s, _ in scored], [x for _, x in scored], stats)

    def forget(self, *, before: int) -> None:
        """Forget the examples of groups below `before`."""
        self.examples = {g: example for g, example in self.examples.items() if g >= before}


def scored_rewards(
    trajectories: Sequence[Trajectory], scores: Sequence[Score]
) -> list[float | None]:
    """Return the rewards of responses, with None where scoring failed."""
    pairs = zip(trajectories, scores, strict=True)
    return [t.reward if score.failure is None else None for t, score in pairs]


def without_failed_groups(
    trajectories: Sequence[Trajectory], scores: Sequence[Score], group_ids: Sequence[int]
) -> list[Trajectory]:
    """Return the responses, with None as the failed rewards of groups that otherwise agree.

    Thus no group differs only because a reward failed.
    """
    rewards = scored_rewards(trajectories, scores)
    differ = informative_groups(rewards, group_ids)
    return [
        t if group in differ else dataclasses.replace(t, reward=reward)
        for t, reward, group in zip(trajectories, rewards, group_ids, strict=True)
    ]


def failures_text(scores: Sequence[Score]) -> str:
    """Return the number of samples that could not be scored, and why; empty without failures.

    The text is one line, even if the message of a reward quotes the response.
    """
    kinds: dict[str, list[str]] = {}
    for failure in (score.failure for score in scores):
        if failure is not None:
            line = " ".join(failure.split())
            kinds.setdefault(line.split(": ")[0], []).append(line)
    return "; ".join(f"{len(k)} of {len(scores)} samples: {k[0]}" for k in kinds.values())


_CLASSES = (
    *(Part, Responses, Trajectory, FinishReason, SamplingConfig, Score, EngineStats),
    *(CachedCounts, PoolCounts, RoundRecord, WorkerPart, WorkerEvent, collections.Counter),
    *(np.ndarray, np.dtype),
)
_KNOWN = {(kind.__module__, kind.__qualname__) for kind in _CLASSES} | {
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
}


class _PartReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"expected parts of responses, got {module}.{name}")
        return super().find_class(module, name)


def read_part(value: bytes) -> Part:
    """Return the part that another process pickled, without calling any other class or function."""
    part = _PartReader(io.BytesIO(value)).load()
    if not isinstance(part, Part):
        raise pickle.UnpicklingError(f"expected a part of responses, got {type(part).__name__}")
    return part


def digest(prompt_ids: np.ndarray, t: Trajectory, score: Score) -> str:
    """Return a digest of the parts of a response that training learns from."""
    result = hashlib.sha256(repr((t.request_id, t.group_id, t.sample_index, score.total)).encode())
    result.update(prompt_ids.tobytes())
    for name in TOKEN_FIELDS:
        result.update(getattr(t, name).tobytes())
    return result.hexdigest()[:16]


def _by_clock(part: Part, began_s: float) -> Responses:
    """Return the responses of a part, with times moved to the clock of this process.

    `began_s` is the start of the rollout on this process.
    """
    assert part.responses is not None
    stats = part.responses.stats
    by_s = began_s - part.began_s
    stats = dataclasses.replace(
        stats,
        timeline=[r.moved(by_s) for r in stats.timeline],
        parts=[moved(p, by_s) for p in stats.parts],
        events=[dataclasses.replace(e, at_s=e.at_s + by_s) for e in stats.events],
    )
    return dataclasses.replace(part.responses, stats=stats)

"""Responses between the processes of a run: who answers, and how all get all of them.

    requests of the step, the same on all → one part answered and scored → gathered → compared

If each process has an engine (`Cluster.rollouts = "local"`) it answers the groups g with g mod
processes = its number. If one engine spans all processes, each of them has all responses, and
scores those groups. With rollout workers on Ray process 0 answers and scores all. Afterwards all
have the same trajectories, scores and texts, in the same order; a digest of each request shows it.
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
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from rl.cluster.processes import ALONE, Diverged, Processes
from rl.engine.stats import CachedCounts, EngineStats, RoundRecord, joined
from rl.engine.worker_record import WorkerEvent, WorkerPart, moved
from rl.rewards.process import RewardWorkerError
from rl.rewards.scores import Score
from rl.runtime.signals import Stopped
from rl.runtime.waits import Hang
from rl.trajectory import FinishReason, Request, Trajectory
from rl.workers.results import WorkerError
from spec.config import SamplingConfig

UNSCORED = Score({}, None)
TOKEN_FIELDS = "response_ids", "logprobs", "emission_logprobs", "policy_versions", "origins"
AGREE_EVERY_FETCHES = 32  # on a stop, in rollouts of one engine over all processes
# all processes end alike after these: the last whole step can still be saved
AGREED = (Stopped, RewardWorkerError, WorkerError, Hang)


class PeerFailed(RuntimeError):
    """Another process of the run failed in its part of a step; this one ends as well."""


@dataclasses.dataclass(frozen=True, eq=False)
class Responses:
    """Scored responses in the order of (group, sample), with their texts."""

    trajectories: list[Trajectory]
    scores: list[Score]
    texts: list[str]
    stats: EngineStats


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One process's outcome of a rollout; without responses or an error it was stopped.

    `began_s` is by the clock of that process.
    """

    began_s: float
    responses: Responses | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Shares:
    """The partition of a rollout's requests between processes.

    `splits`: each process answers one part; else all answer all, with one engine. With `by_first`
    process 0, which has the workers in other programs, answers all.
    """

    processes: Processes
    splits: bool = True
    by_first: bool = False
    _rounds: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def scores(self, group_id: int) -> bool:
        """Return whether this process scores the responses of a group."""
        if self.by_first:
            return self.processes.is_first
        return group_id % self.processes.count == self.processes.index

    @property
    def scores_any(self) -> bool:
        """True if this process ever scores a response."""
        return self.processes.is_first or not self.by_first

    def answers(self, group_id: int) -> bool:
        """Return whether this process generates the responses of a group."""
        return not self.splits or self.scores(group_id)

    def agrees_now(self) -> bool:
        """Return whether it is time to agree on a stop: true every so many calls."""
        return next(self._rounds) % AGREE_EVERY_FETCHES == 0

    def most_groups(self, num_groups: int) -> int:
        """Return how many of so many groups a process answers at most."""
        spread = self.splits and not self.by_first
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
        """Return the responses to all requests; `answer` returns this process's.

        Requests whose ids `may_go_on` need not be answered yet. An error of AGREED is raised again
        here, and in the others as PeerFailed or Stopped. Raises Diverged unless all processes have
        the same.
        """
        if self.processes.alone:
            return answer()
        began_s, error, own = time.perf_counter(), None, None
        part = Part(began_s)
        try:
            own = answer()
        except AGREED as raised:
            error = raised
            if not isinstance(raised, Stopped):
                part = Part(began_s, error=str(raised))
        else:
            self._name_workers(own.stats, own.trajectories)
            part = Part(began_s, self._scored(own))
        given = self.processes.gather_large(what, pickle.dumps(part), waiting)
        if error is not None:
            raise error
        parts = [read_part(value) for value in given]
        for index, part in enumerate(parts):
            if part.error is not None:
                raise PeerFailed(f"process {index} failed: {part.error}")
        if any(part.responses is None for part in parts):
            raise Stopped
        assert own is not None
        found = self._merged(own, [_by_clock(p, began_s) for p in parts])
        self._compare(what, requests, found, may_go_on)
        return found

    def _name_workers(self, stats: EngineStats, done: Sequence[Trajectory]) -> None:
        """Tell this process's workers from those of others; an engine alone is one."""
        if self.by_first:
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
        """Return the part of the responses that this process has scored."""
        keep = [i for i, t in enumerate(own.trajectories) if self.scores(t.group_id)]
        return Responses(
            [own.trajectories[i] for i in keep],
            [own.scores[i] for i in keep],
            [own.texts[i] for i in keep],
            own.stats,
        )

    def _merged(self, own: Responses, parts: Sequence[Responses]) -> Responses:
        rows = [
            row
            for part in parts
            for row in zip(part.trajectories, part.scores, part.texts, strict=True)
        ]
        rows.sort(key=lambda row: (row[0].group_id, row[0].sample_index))
        trajectories = [t for t, _, _ in rows]
        stats = joined([part.stats for part in parts]) if self.splits else own.stats
        if not self.splits:  # what this process has generated itself is what is compared
            mine = {t.request_id: t for t in own.trajectories}
            trajectories = [
                dataclasses.replace(mine[t.request_id], reward=t.reward) for t in trajectories
            ]
        return Responses(trajectories, [s for _, s, _ in rows], [x for _, _, x in rows], stats)

    def _compare(
        self,
        what: str,
        requests: Sequence[Request],
        found: Responses,
        may_go_on: Collection[int],
    ) -> None:
        """Raise Diverged unless all processes asked the same, in one order, and have the same."""
        prompts = {r.request_id: np.asarray(r.prompt_ids, np.int32) for r in requests}
        answered = {t.request_id for t in found.trajectories}
        asked = prompts.keys() - (set(may_go_on) - answered)
        if len(found.trajectories) != len(asked) or answered != asked:
            raise Diverged(
                f"{what}: expected {len(asked)} responses, one to each request of process "
                f"{self.processes.index}, got {len(found.trajectories)}"
            )
        self.processes.agree(
            what,
            {
                f"request {t.request_id}": digest(prompts[t.request_id], t, score)
                for t, score in zip(found.trajectories, found.scores, strict=True)
            },
        )


WHOLE = Shares(ALONE)

_CLASSES = (
    *(Part, Responses, Trajectory, FinishReason, SamplingConfig, Score, EngineStats),
    *(CachedCounts, RoundRecord, WorkerPart, WorkerEvent, collections.Counter),
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
    """Return the part that another process pickled; no other class or function is called."""
    part = _PartReader(io.BytesIO(value)).load()
    if not isinstance(part, Part):
        raise pickle.UnpicklingError(f"expected a part of responses, got {type(part).__name__}")
    return part


def digest(prompt_ids: np.ndarray, t: Trajectory, score: Score) -> str:
    """Return a digest of what training learns from a response."""
    found = hashlib.sha256(repr((t.request_id, t.group_id, t.sample_index, score.total)).encode())
    found.update(prompt_ids.tobytes())
    for name in TOKEN_FIELDS:
        found.update(getattr(t, name).tobytes())
    return found.hexdigest()[:16]


def _by_clock(part: Part, began_s: float) -> Responses:
    """Return a part's responses by the clock on which the rollout began at `began_s`."""
    assert part.responses is not None
    stats, by_s = part.responses.stats, began_s - part.began_s
    stats = dataclasses.replace(
        stats,
        timeline=[r.moved(by_s) for r in stats.timeline],
        parts=[moved(p, by_s) for p in stats.parts],
        events=[dataclasses.replace(e, at_s=e.at_s + by_s) for e in stats.events],
    )
    return dataclasses.replace(part.responses, stats=stats)

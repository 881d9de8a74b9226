"""Responses between the processes of a run: who answers what, and how all come to have it all.

    requests of the step, the same on all → own ones answered and scored → gathered → compared

Where each process has an engine of its own (`Cluster.rollouts = "local"`) it answers the groups g
with g mod processes = its number. Where one engine spans all processes each of them has all
responses, and scores those groups. Afterwards all have the same trajectories, scores and texts, in
the same order; a digest of each request shows it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rl.cluster.processes import ALONE, Diverged, Processes
from rl.engine.stats import CachedCounts, EngineStats, RoundRecord, joined
from rl.engine.worker_record import (
    MOST_SPANS_EACH,
    MOST_TEXT,
    WorkerPart,
    events_of,
    merged,
    moved,
    parts_of,
)
from rl.rewards.pool import Score
from rl.rewards.process import RewardWorkerError
from rl.runtime.signals import Stopped
from rl.runtime.waits import Hang
from rl.trajectory import FinishReason, Request, Trajectory
from rl.workers.coordinator import WorkerError

UNSCORED = Score({}, None)
AGREE_EVERY_FETCHES = 32  # on a stop, in rollouts of one engine over all processes
DONE, STOPPED, FAILED = "done", "stopped", "failed"
# of these all processes hear, and all end alike: the last whole step can still be saved
AGREED = (Stopped, RewardWorkerError, WorkerError, Hang)
_OF_TOKENS = ("response_ids", "logprobs", "policy_versions", "origins", "emission_logprobs")
_SECONDS = [f.name for f in dataclasses.fields(RoundRecord) if f.name.endswith("_s")]
_OF_REQUESTS = [f.name for f in dataclasses.fields(RoundRecord) if f.name.endswith("_A")]
_COUNTS = [
    f.name for f in dataclasses.fields(RoundRecord) if f.name not in (*_SECONDS, *_OF_REQUESTS)
]


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
class Shares:
    """The way in which the requests of a rollout are shared out between processes.

    `splits`: each process answers its own share; else all answer all, with one engine.
    """

    processes: Processes
    splits: bool = True
    _rounds: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def scores(self, group_id: int) -> bool:
        """Return whether this process scores the responses of a group."""
        return group_id % self.processes.count == self.processes.index

    def answers(self, group_id: int) -> bool:
        """Return whether this process generates the responses of a group."""
        return not self.splits or self.scores(group_id)

    def agrees_now(self) -> bool:
        """Return whether it is time to agree on a stop: true every so many calls."""
        return next(self._rounds) % AGREE_EVERY_FETCHES == 0

    def most_groups(self, num_groups: int) -> int:
        """Return how many of so many groups a process answers at most."""
        return -(-num_groups // self.processes.count) if self.splits else num_groups

    def exchange(
        self,
        what: str,
        requests: Sequence[Request],
        answer: Callable[[], Responses],
        waiting: Callable[[], object] = lambda: None,
    ) -> Responses:
        """Return the responses to all requests, of which `answer` gives this process's.

        What `answer` raises of AGREED is raised here, on the others as PeerFailed or Stopped.
        Raises Diverged where processes do not have the same.
        """
        if self.processes.alone:
            return answer()
        told, error, own, began_s = DONE, None, None, time.perf_counter()
        try:
            own = answer()
        except AGREED as raised:
            told, error = STOPPED if isinstance(raised, Stopped) else FAILED, raised
        if own is not None:
            self._name_workers(own.stats, own.trajectories)
        head = {"told": told, "error": None if told != FAILED else str(error), "began_s": began_s}
        body = b"" if own is None else encode(self._scored(own))
        given = self.processes.gather_large(what, json.dumps(head).encode() + b"\n" + body, waiting)
        if error is not None:
            raise error
        parts = []
        for index, value in enumerate(given):
            first, _, rest = value.partition(b"\n")
            head = json.loads(first)
            if head["told"] == FAILED:
                raise PeerFailed(f"process {index} failed: {head['error']}")
            parts.append((head, rest))
        if any(head["told"] == STOPPED for head, _ in parts):
            raise Stopped
        assert own is not None
        found = self._merged(
            own, [_by_clock(decode(x, requests), began_s - head["began_s"]) for head, x in parts]
        )
        self._compare(what, requests, found)
        return found

    def _name_workers(self, stats: EngineStats, done: Sequence[Trajectory]) -> None:
        """Tell this process's workers from those of others; an engine alone is one."""
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

    def _compare(self, what: str, requests: Sequence[Request], found: Responses) -> None:
        """Raise Diverged unless all processes asked the same, in one order, and have the same."""
        prompts = {r.request_id: np.asarray(r.prompt_ids, np.int32) for r in requests}
        if len(found.trajectories) != len(requests):
            raise Diverged(
                f"{what}: expected {len(requests)} responses, one to each request of process "
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


def _by_clock(found: Responses, later_s: float) -> Responses:
    """Return responses with the times of workers by a clock that is so much later."""
    stats = found.stats
    stats.parts = [moved(part, later_s) for part in stats.parts]
    stats.events = [dataclasses.replace(e, at_s=e.at_s + later_s) for e in stats.events]
    return found


def digest(prompt_ids: np.ndarray, t: Trajectory, score: Score) -> str:
    """Return a digest of what training learns from a response."""
    found = hashlib.sha256(repr((t.request_id, t.group_id, t.sample_index, score.total)).encode())
    found.update(prompt_ids.tobytes())
    for name in _OF_TOKENS:
        found.update(getattr(t, name).tobytes())
    return found.hexdigest()[:16]


def encode(own: Responses) -> bytes:
    """Return responses as bytes: columns of plain numbers and text, nothing that is executed.

    Prompts and sampling are the requests', which all processes have.
    """
    ts, rounds = own.trajectories, own.stats.timeline
    columns: dict[str, np.ndarray] = {
        "request_ids": np.array([t.request_id for t in ts], np.int64),
        "group_ids": np.array([t.group_id for t in ts], np.int64),
        "num_tokens": np.array([t.num_tokens for t in ts], np.int64),
        "seconds": np.array([[getattr(r, n) for n in _SECONDS] for r in rounds], np.float64),
        "counts": np.array([[getattr(r, n) for n in _COUNTS] for r in rounds], np.int64),
        "num_requests": np.array([len(r.request_ids_A) for r in rounds], np.int64),
    }
    for name in _OF_TOKENS:
        columns[name] = np.concatenate([getattr(t, name) for t in ts]) if ts else np.empty(0)
    for name in _OF_REQUESTS:
        parts = [np.asarray(getattr(r, name), np.int64) for r in rounds]
        columns[name] = np.concatenate(parts) if parts else np.empty(0, np.int64)
    stats = own.stats
    columns["drafted_by_source"] = stats.drafted_by_source
    columns["accepted_by_source"] = stats.accepted_by_source
    text = {
        "finish_reasons": [str(t.finish_reason) for t in ts],
        "scores": [[dict(s.values), s.total, s.failure] for s in own.scores],
        "texts": own.texts,
        "totals": [stats.fetches, stats.tokens, stats.prefilled_tokens, stats.preemptions],
        "cached": list(dataclasses.astuple(stats.cached)),
        "rounds": [[*bucket, count] for bucket, count in stats.rounds.items()],
        "parts": [
            dataclasses.asdict(p) | {"busy_s": merged(p.busy_s, MOST_SPANS_EACH)}
            for p in stats.parts
        ],
        "events": [dataclasses.asdict(e) | {"why": e.why[:MOST_TEXT]} for e in stats.events],
    }
    columns["text"] = np.frombuffer(json.dumps(text).encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, **columns)  # type: ignore[arg-type]
    return out.getvalue()


def decode(value: bytes, requests: Sequence[Request]) -> Responses:
    """Return what `encode` made, to these requests."""
    asked = {r.request_id: r for r in requests}
    with np.load(io.BytesIO(value), allow_pickle=False) as archive:
        columns = {name: archive[name] for name in archive.files}
    text = json.loads(columns["text"].tobytes())
    ends = np.cumsum(columns["num_tokens"])
    per_token = [np.split(columns[name], ends[:-1]) for name in _OF_TOKENS] if len(ends) else []
    scores = [Score(values, total, failure) for values, total, failure in text["scores"]]
    trajectories = []
    for i, request_id in enumerate(columns["request_ids"].tolist()):
        request = asked.get(request_id)
        if request is None:
            raise Diverged(f"a response came to request {request_id}, which this process has not")
        trajectories.append(
            Trajectory(
                request_id,
                int(columns["group_ids"][i]),
                request.sample_index,
                np.asarray(request.prompt_ids, np.int32),
                finish_reason=FinishReason(text["finish_reasons"][i]),
                reward=scores[i].total,
                sampling=request.sampling,
                **{name: parts[i] for name, parts in zip(_OF_TOKENS, per_token, strict=True)},
            )
        )
    return Responses(trajectories, scores, text["texts"], _stats(columns, text))


def _stats(columns: dict[str, np.ndarray], text: dict[str, Any]) -> EngineStats:
    fetches, tokens, prefilled, preemptions = text["totals"]
    stats = EngineStats(fetches, tokens, prefilled, preemptions, CachedCounts(*text["cached"]))
    stats.drafted_by_source = columns["drafted_by_source"]
    stats.accepted_by_source = columns["accepted_by_source"]
    stats.rounds.update({(B, M, S): count for B, M, S, count in text["rounds"]})
    stats.parts, stats.events = list(parts_of(text["parts"])), list(events_of(text["events"]))
    ends = np.cumsum(columns["num_requests"])[:-1]
    of_requests = {name: np.split(columns[name], ends) for name in _OF_REQUESTS}
    for i in range(len(columns["num_requests"])):
        row: dict[str, Any] = dict(zip(_SECONDS, columns["seconds"][i].tolist(), strict=True))
        row |= dict(zip(_COUNTS, columns["counts"][i].tolist(), strict=True))
        row |= {name: parts[i] for name, parts in of_requests.items()}
        stats.timeline.append(RoundRecord(**row))
    return stats

"""The episodes of a step on one engine: turns of the policy share rounds while environments work.

    Episodes (sched) ── Draw ──→ engine: a request with all tokens so far ──→ Trajectory ─→ Drawn
        │                                                                                    │
        └── Reset, Step, GetReward → Environments: processes → Answer, as ids → Observed ──────┘

Rows of finished turns retain their keys and values (`RolloutSpec.keeps_responses`), so that the
next turn of an episode computes its new tokens only.
"""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from reprise.rl.data.tasks import Example
from reprise.rl.engine.engine import Engine, OnRound
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.environments.pool import Answer, Environments, row_of
from reprise.rl.environments.rendering import TurnRenderer
from reprise.rl.environments.server import EpisodeFailed
from reprise.rl.environments.transcript import Transcript
from reprise.rl.records.trajectory import (
    FinishReason,
    PartialRequest,
    Request,
    Trajectory,
    check_finite,
)
from reprise.rl.rewards.config import ENVIRONMENT
from reprise.rl.rewards.scores import Score
from reprise.sched.episodes import (
    TRUNCATED,
    Action,
    Draw,
    Drawn,
    End,
    Ended,
    EpisodeLimits,
    Episodes,
    EpisodeSpec,
    Failed,
    GetReward,
    Observed,
    Reset,
    Step,
    request_of,
    turn_of,
)

PlayedEpisode = tuple[Trajectory, Score]
POLL_S = 0.05  # between calls of `on_round` while all episodes wait for their environments


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeJob:
    """An episode to play: the request of its first turn, its example, and the seeds of `reset`.

    The prompt of the request is the prompt of the example, and is used if `reset` fails.
    """

    request: Request
    example: Example
    seeds: Sequence[int]


@dataclasses.dataclass(eq=False)
class _Play:
    """An episode in progress."""

    job: EpisodeJob
    transcript: Transcript
    rewards: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    num_calls: int = 0
    num_failed_calls: int = 0
    seconds: float = 0.0
    failure: str | None = None


class EpisodeRollout:
    """Plays episodes on an engine; `on_failure` is `Environment.on_failure`.

    Call `run` in the thread of rollouts (`Engine.do`).
    """

    def __init__(
        self,
        engine: Engine,
        environments: Environments,
        renderer: TurnRenderer,
        limits: EpisodeLimits,
        on_failure: Literal["zero", "skip"] = "skip",
    ) -> None:
        self._engine = engine
        self._environments = environments
        self._renderer = renderer
        self._limits = limits
        self._on_failure = on_failure
        self._answers = queue.SimpleQueue[tuple[int, int, Future[Answer]]]()
        self._plays: dict[int, _Play] = {}
        self._done: dict[int, PlayedEpisode] = {}
        self._episodes = Episodes(limits)

    def run(
        self,
        spec: RolloutSpec,
        jobs: Sequence[EpisodeJob],
        *,
        on_round: OnRound | None = None,
    ) -> list[PlayedEpisode]:
        """Play all episodes to their end; return them, with scores, in the order of the jobs.

        `on_round` is called after every fetch, and while environments work; it may raise, which
        stops the rollout and closes all environments. Raises EnvironmentServerError if environments
        can no longer be opened, and NonFiniteLogits as `Engine.run`.
        """
        if not jobs:
            return []
        self._plays = {
            job.request.request_id: _Play(job, Transcript(job.request.prompt_ids)) for job in jobs
        }
        self._done = {}
        self._answers = queue.SimpleQueue()
        self._episodes = Episodes(self._limits)
        specs = [
            EpisodeSpec(job.request.request_id, job.request.limit(spec.sampling)) for job in jobs
        ]
        spec = dataclasses.replace(spec, keeps_responses=True)
        sizes: dict[str, Any] = {
            "max_requests": min(len(jobs), self._limits.max_live),
            "max_tokens": self._limits.max_prompt_tokens + self._limits.max_tokens,
        }
        try:
            with self._engine.rollout(spec, **sizes):
                self._act(self._episodes.submit(specs), spec)
                while not self._episodes.is_finished:
                    self._round(spec)
                    if on_round is not None:
                        on_round(len(self._done), self._engine.stats.tokens)
        finally:
            self._environments.end_all()
        return [self._done[job.request.request_id] for job in jobs]

    def _round(self, spec: RolloutSpec) -> None:
        """Handle the answers of environments; run one fetch if the policy has turns to draw."""
        for episode_id, call, future in self._new_answers(may_wait=not self._engine.has_work):
            self._act(self._answered(episode_id, call, future), spec)
        if not self._engine.has_work:
            return
        for event in self._engine.step():
            assert isinstance(event, Trajectory), "whole requests have no chunks"
            check_finite(event)
            self._act(self._drawn(event), spec)

    def _new_answers(self, *, may_wait: bool) -> list[tuple[int, int, Future[Answer]]]:
        """Return the answers so far; wait for the first if the engine has no work."""
        answers = []
        try:
            if may_wait:
                answers.append(self._answers.get(timeout=POLL_S))
            while True:
                answers.append(self._answers.get_nowait())
        except queue.Empty:
            return answers

    def _act(self, actions: Sequence[Action], spec: RolloutSpec) -> None:
        environments = self._environments
        requests = list[Request]()
        for action in actions:
            episode_id = action.episode_id
            play = self._plays[episode_id]
            match action:
                case Reset(call=call):
                    row = row_of(play.job.example)
                    self._await(
                        episode_id, call, environments.reset(episode_id, row, play.job.seeds)
                    )
                case Step(call=call):
                    text = play.transcript.last_turn()
                    self._await(episode_id, call, environments.step(episode_id, text))
                case GetReward(call=call):
                    self._await(episode_id, call, environments.score(episode_id))
                case Draw():
                    request = dataclasses.replace(
                        play.job.request,
                        request_id=action.request_id,
                        prompt_ids=play.transcript.tokens,
                        max_new_tokens=action.max_new_tokens,
                    )
                    requests.append(request)
                case Ended(end=end, failure=failure):
                    environments.end(episode_id)
                    last = max(self._episodes.states[episode_id].turns - 1, 0)
                    self._engine.expire([request_of(episode_id, last)])
                    self._done[episode_id] = self._ended(play, end, failure)
        if requests:
            self._engine.check(requests, spec.sampling)
            self._engine.add([PartialRequest(request) for request in requests])

    def _await(self, episode_id: int, call: int, future: Future[Answer]) -> None:
        """Queue the answer to a call once it is there."""

        def queued(done: Future[Answer]) -> None:
            self._answers.put((episode_id, call, done))

        future.add_done_callback(queued)

    # -- events --------------------------------------------------------------------------

    def _drawn(self, t: Trajectory) -> list[Action]:
        episode_id, turn = turn_of(t.request_id)
        play = self._plays[episode_id]
        ids = t.response_ids.tolist()
        play.transcript.add_turn(t, self._renderer.tokenizer.decode(ids))
        return self._episodes.handle(Drawn(episode_id, turn, t.num_tokens, t.truncated))

    def _answered(self, episode_id: int, call: int, future: Future[Answer]) -> list[Action]:
        play = self._plays[episode_id]
        try:
            answer = future.result()
            ids = self._ids_of(play, call, answer)
        except EpisodeFailed as failed:
            play.failure = f"{ENVIRONMENT}/{failed.kind}: {failed.message}"
            return self._episodes.handle(Failed(episode_id, call, failed.kind))
        play.seconds += answer.seconds
        play.num_calls += answer.num_calls
        play.num_failed_calls += answer.num_failed_calls
        if answer.rewards is not None:
            play.rewards = answer.rewards
        if answer.reward is not None and play.transcript.turn_rewards:
            play.transcript.turn_rewards[-1] = answer.reward
        actions = self._episodes.handle(Observed(episode_id, call, len(ids), answer.done))
        if any(isinstance(a, Draw) and a.episode_id == episode_id for a in actions):
            if call == 0:
                play.transcript = Transcript(ids)
            else:
                play.transcript.insert(ids, answer.messages)
        return actions

    def _ids_of(self, play: _Play, call: int, answer: Answer) -> Sequence[int]:
        """Return the tokens of an answer. Raises EpisodeFailed for messages that have none."""
        example = play.job.example
        try:
            if call == 0:
                return self._renderer.prompt(example, answer.messages, answer.text)
            if answer.done:
                return ()
            last_ids = play.transcript.last_turn_ids
            uses_template = self._renderer.uses_template(example)
            return self._renderer.after(last_ids, answer.messages, uses_template=uses_template)
        except ValueError as error:
            raise EpisodeFailed("answer", f"its messages have no tokens: {error}") from error

    def _ended(self, play: _Play, end: End, failure: str | None) -> PlayedEpisode:
        request = play.job.request
        text = play.failure or (failure and f"{ENVIRONMENT}/{failure}: the episode cannot start")
        if failure is None:
            total = total_reward(play.rewards, play.transcript.turn_rewards)
            score = Score({ENVIRONMENT: total}, total)
        else:
            total = 0.0 if self._on_failure == "zero" else None
            score = Score({ENVIRONMENT: None}, total, text)
        reason = FinishReason.LENGTH if end in TRUNCATED else FinishReason.STOP
        episode = dataclasses.replace(
            play.transcript.episode(end.value, play.rewards),
            num_calls=play.num_calls,
            num_failed_calls=play.num_failed_calls,
            seconds=play.seconds,
            failure=failure,
        )
        return play.transcript.trajectory(request, reason, episode), score


def total_reward(
    rewards: Mapping[str, float | None], turn_rewards: Sequence[float | None]
) -> float | None:
    """Return the reward of an episode: the sum of its rewards that apply and of its turn rewards.

    None if it has neither.
    """
    known = [x for x in (*rewards.values(), *turn_rewards) if x is not None]
    return sum(known) if known else None

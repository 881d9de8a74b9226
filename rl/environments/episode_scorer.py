"""Episodes as the scored responses of a rollout, in training and evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.data.tasks import Example, TaskConfig
from reprise.rl.engine.engine import OnRound, RolloutEngine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.environments.config import EnvironmentConfig
from reprise.rl.environments.episode_rollout import EpisodeJob, EpisodeRollout
from reprise.rl.environments.opened import OpenEnvironments, opened
from reprise.rl.environments.pool import seeds_of
from reprise.rl.exchange.responses import Scorer
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.rl.rewards.scores import Score
from reprise.sched.episodes import EpisodeLimits


class EpisodeScorer(Scorer):
    """A scorer that plays an episode for each request; its environment gives the score."""

    def __init__(
        self, environments: OpenEnvironments, max_prompt_tokens: int, *given: Any, **options: Any
    ) -> None:
        """`given` and `options` are of `Scorer`."""
        super().__init__(*given, **options)
        self._environments = environments
        self._max_prompt_tokens = max_prompt_tokens
        self._scores: dict[int, Score] = {}

    def _drawn(
        self,
        engine: RolloutEngine,
        spec: RolloutSpec,
        requests: Sequence[Request],
        on_round: OnRound | None,
    ) -> list[Trajectory]:
        """Play the episodes on one engine. Raises as `EpisodeRollout.run`."""
        [one] = engine.engines
        config = self._environments.config
        key_data = engine.do(lambda: np.asarray(jax.random.key_data(spec.key)))
        noise = "-".join(map(str, key_data.tolist()))
        jobs = [
            EpisodeJob(r, self.examples[r.group_id], seeds_of(noise, r.group_id, r.sample_index))
            for r in requests
        ]
        limits = EpisodeLimits(
            max_turns=config.max_turns,
            max_environment_tokens=config.max_environment_tokens,
            max_prompt_tokens=self._max_prompt_tokens,
            max_tokens=config.episode_tokens(max(r.limit(spec.sampling) for r in requests)),
            max_live=self._environments.num_live,
        )
        rollout = EpisodeRollout(
            one, self._environments.calls, self._environments.turns, limits, config.on_failure
        )
        played = engine.do(partial(rollout.run, spec, jobs, on_round=on_round))
        self._scores |= {t.request_id: score for t, score in played}
        return [t for t, _ in played]

    def _result(self, t: Trajectory) -> tuple[Score, str]:
        """Return the score of an episode, and its text after the prompt."""
        assert t.episode is not None, "every response is an episode"
        return self._scores.pop(t.request_id), self._tokenizer.decode(t.episode.tokens.tolist())


@contextlib.contextmanager
def open_scorer(
    config: EnvironmentConfig,
    task: TaskConfig,
    tokenizer: Tokenizer,
    example: Example,
    *,
    rows: int,
    max_prompt_tokens: int,
) -> Iterator[Callable[..., EpisodeScorer]]:
    """Open environments as `opened`; return the class of their scorers, called as `Scorer`."""
    with opened(config, task, tokenizer, example, rows) as environments:
        yield partial(EpisodeScorer, environments, max_prompt_tokens)

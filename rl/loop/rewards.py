"""The scoring of a run: reward workers of its own program, or scorers on Ray."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from rl.cluster.config import ClusterConfig
from rl.config.loader import dump
from rl.loop.experiment import TrainConfig
from rl.remote.scorers import Scorers
from rl.remote.service import ServiceDeadlines
from rl.rewards.pool import RewardPool
from rl.rewards.scores import Rewards

SILENCE = 5  # deadlines that nobody speaks to a scorer for, until it ends by itself


@contextlib.contextmanager
def open_rewards(
    config: TrainConfig, tasks: Sequence[str], say: Callable[[str], None]
) -> Iterator[Rewards]:
    """Start them without waiting (`wait_started` does), and end them at the end.

    Scorers are actors: Ray must be there (`rl.loop.ray_workers.open_workers`).
    """
    with contextlib.ExitStack() as stack:
        rewards: Rewards
        if config.cluster.scorers:
            rewards = _scorers(config, tasks, say, stack)
        else:
            rewards = RewardPool(config.reward, tasks)
        stack.callback(rewards.close)
        rewards.start()  # their processes start while training is traced
        yield rewards


def _scorers(
    config: TrainConfig,
    tasks: Sequence[str],
    say: Callable[[str], None],
    stack: contextlib.ExitStack,
) -> Scorers:
    from rl.ray_roles.services import ScorerActors

    text = dump(dataclasses.replace(config, cluster=ClusterConfig()))
    limit_s, count = config.cluster.deadline_s, config.cluster.scorers
    actors = ScorerActors(text, count, config.reward.workers, start_s=2 * limit_s)
    stack.callback(actors.close)
    deadlines = ServiceDeadlines(limit_s, 2 * limit_s, SILENCE * limit_s)
    return Scorers(config.reward, tasks, count, actors.connect, text, deadlines, say)

"""The history workers of a run, on Ray."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from rl.cluster.config import ClusterConfig
from rl.config.loader import dump
from rl.loop.experiment import TrainConfig
from rl.loop.rewards import SILENCE
from rl.remote.history_workers import HistoryWorkers
from rl.remote.service import ServiceDeadlines
from spec.reuse.rollout_cache import RolloutCache


@contextlib.contextmanager
def open_history(
    config: TrainConfig, cache: RolloutCache, say: Callable[[str], None]
) -> Iterator[HistoryWorkers | None]:
    """Start them, if the run has any, and end them at the end; Ray must be there.

    Raises ProgramLost where one cannot serve.
    """
    source, count = config.speculation.history_source, config.cluster.history_workers
    if source is None or not count:
        yield None
        return
    from rl.ray_roles.services import HistoryActors

    text = dump(dataclasses.replace(config, cluster=ClusterConfig()))
    limit_s = config.cluster.deadline_s
    with contextlib.ExitStack() as stack:
        actors = HistoryActors(text, count, start_s=2 * limit_s)
        stack.callback(actors.close)
        deadlines = ServiceDeadlines(limit_s, 2 * limit_s, SILENCE * limit_s)
        workers = HistoryWorkers(source, cache, count, actors.connect, text, deadlines, say)
        stack.callback(workers.close)
        workers.start()
        yield workers

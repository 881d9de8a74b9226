"""The history workers of a run, on Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rl.cluster.actors import ActorSettings
from rl.loop.experiment import TrainConfig
from rl.speculation.history_workers import HistoryWorkers
from rl.speculation.sources import history_rule
from spec.reuse.rollout_cache import RolloutCache


@contextlib.contextmanager
def open_history(
    config: TrainConfig, cache: RolloutCache, say: Callable[[str], None]
) -> Iterator[HistoryWorkers | None]:
    """Start them, if the run has any, and end them at the end; Ray must be there.

    Raises ProgramLost if one cannot serve.
    """
    count, limit_s = config.cluster.history_workers, config.cluster.deadline_s
    if config.speculation.history_source is None or not count:
        yield None
        return
    from rl.cluster.ray_session import reserve

    settings = ActorSettings({}, limit_s, 2 * limit_s, say)
    with reserve(count, f"Cluster.history_workers={count}", 2 * limit_s) as room:
        rule = history_rule(config.speculation)
        with contextlib.closing(HistoryWorkers(rule, cache, count, room, settings)) as workers:
            workers.wait_started()
            yield workers

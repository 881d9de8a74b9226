"""The drafting workers of a run: engines of its own program, or actors on Ray."""

from __future__ import annotations

from collections.abc import Callable

import jax

from rl.drafting.config import methods_of
from rl.drafting.plans import Planner
from rl.drafting.workers import DraftingWorkers
from rl.engine.engine import RolloutEngine
from rl.loop.experiment import TrainConfig
from rl.speculation.sources import Speculation
from rl.workers.multi_engine import Helpers, MultiEngine
from spec.budget.config import MODEL


def make_planner(config: TrainConfig) -> Planner:
    """Return the planner of a run's drafting workers."""
    settings, sched, max_nodes = config.drafting, config.sched, config.engine.max_nodes - 1
    methods = methods_of(len(config.draft_model.each))
    window = settings.window or min(max_nodes, config.draft_model.max_depth)
    requests = min(config.rollout.num_requests, sched.workers * config.engine.max_slots)
    return Planner(settings, sched.workers, requests, window, methods)


def take_workers(
    config: TrainConfig,
    engine: RolloutEngine,
    speculation: Speculation,
    clock: Callable[[], float],
    report: Callable[[str], None],
) -> DraftingWorkers | None:
    """Take the drafting workers from the engine's, and have idle ones help; None without either.

    On Ray they are actors (`open_actors`). Raises ValueError if there are more than devices.
    """
    settings = config.drafting
    if config.cluster.kind == "ray" or not isinstance(engine, MultiEngine):
        return None
    if not (settings.drafts_apart or settings.helps):
        return None
    num_devices = len(jax.local_devices())
    if (count := settings.workers or 1) > num_devices:
        raise ValueError(
            "expected at most as many drafting workers as devices, got "
            f"Drafting.workers={count} and {num_devices}: lower it, or on a CPU set XLA_FLAGS="
            f"--xla_force_host_platform_device_count={count}"
        )
    planner = make_planner(config)
    drafting = DraftingWorkers(
        speculation.drafters,
        planner,
        config.longest_tokens,
        report=report,
        clock=clock,
        hang_limit_s=config.run.hang_limit_s,
    )
    if settings.workers:
        drafting.take(engine.engines, settings.workers)
        speculation.apart = {MODEL: drafting}
    if settings.helps:
        have_idle_help(engine, speculation, planner)
    return drafting


def have_idle_help(engine: MultiEngine, speculation: Speculation, planner: Planner) -> None:
    """Have workers without requests answer others' last ones again if the planner agrees."""
    settings = planner.config
    speculation.methods_of_copies = settings.methods
    size = len(settings.methods), settings.requests_per_helper
    engine.helpers = Helpers(*size, planner.worth, lambda: planner.observed.acceptance())

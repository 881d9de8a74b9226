"""The drafting workers of a run: engines of its own program, or programs on Ray."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from rl.drafting.config import methods_of
from rl.drafting.plans import Planner
from rl.drafting.workers import DraftingWorkers
from rl.engine.engine import RolloutEngine
from rl.loop.experiment import Inputs, TrainConfig
from rl.remote.drafting_messages import Meet
from rl.remote.drafting_workers import Connect, DraftingPrograms
from rl.remote.service import ServiceDeadlines, service_identity
from rl.speculation.sources import Speculation
from rl.workers.multi_engine import Helpers, MultiEngine
from spec.budget.config import MODEL


def make_planner(config: TrainConfig) -> Planner:
    """Return the planner of a run's drafting workers."""
    settings, sched, most = config.drafting, config.sched, config.engine.max_nodes - 1
    methods = methods_of(len(config.draft_model.each))
    longest = min(most, config.draft_model.max_depth)
    requests = min(config.rollout.num_requests, sched.workers * config.engine.max_slots)
    return Planner(settings, sched.workers, requests, settings.window or longest, methods)


def take_workers(
    config: TrainConfig,
    engine: RolloutEngine,
    speculation: Speculation,
    clock: Callable[[], float],
    told: Callable[[str], None],
) -> DraftingWorkers | None:
    """Take the drafting workers from the engine's, and have idle ones help; None without either.

    On Ray drafting workers are programs (`open_programs`). Raises ValueError where they are more
    than the devices.
    """
    settings = config.drafting
    if config.cluster.kind == "ray" or not isinstance(engine, MultiEngine):
        return None
    if not (settings.drafts_apart or settings.helps):
        return None
    num_devices = len(jax.local_devices())
    if (asked := settings.workers or 1) > num_devices:
        raise ValueError(
            "expected at most as many drafting workers as devices, got "
            f"Drafting.workers={asked} and {num_devices}: lower it, or on a CPU set XLA_FLAGS="
            f"--xla_force_host_platform_device_count={asked}"
        )
    planner, drafters = make_planner(config), speculation.drafters
    limit_s, longest = config.run.hang_limit_s, config.longest_tokens
    options: dict[str, Any] = {"clock": clock, "told": told, "hang_limit_s": limit_s}
    drafting = DraftingWorkers(drafters, planner, longest, **options)
    if settings.workers:
        drafting.take(engine.engines, settings.workers)
        speculation.apart = {MODEL: drafting}
    if settings.helps:
        have_idle_help(engine, speculation, planner)
    return drafting


def have_idle_help(engine: MultiEngine, speculation: Speculation, planner: Planner) -> None:
    """Have workers without requests answer others' last ones again, where the planner sees fit."""
    settings = planner.config
    speculation.methods_of_copies = settings.methods
    size = len(settings.methods), settings.requests_per_helper
    engine.helpers = Helpers(*size, planner.worth, lambda: planner.observed.acceptance())


@contextlib.contextmanager
def open_programs(
    config: TrainConfig,
    inputs: Inputs,
    dtype: np.dtype,
    config_text: str,
    connect: Connect,
    deadlines: ServiceDeadlines,
    say: Callable[[str], None],
) -> Iterator[DraftingPrograms | None]:
    """Start the drafting programs of a run, if it has any; end them at the end.

    Nothing waits for them: `DraftingPrograms.wait_started` does. `connect` starts a program in the
    place of a worker, by its number among all workers.
    """
    count, first = config.drafting.workers, config.num_verifying
    if not count:
        yield None
        return
    planner = make_planner(config)
    planner.drafting_workers = count
    limit_s = config.run.compile_limit_s
    meet = _meet(config, inputs, dtype, config_text, planner, deadlines.silence_s)
    places: Connect = lambda number, name: connect(first + number, name)  # noqa: E731
    with DraftingPrograms(planner, meet, places, deadlines, limit_s, say) as programs:
        yield programs


def _meet(
    config: TrainConfig,
    inputs: Inputs,
    dtype: np.dtype,
    config_text: str,
    planner: Planner,
    silence_s: float,
) -> Meet:
    """Return what a drafting program is told first."""
    folder, devices = config.draft_model_folder, config.sched.devices_per_worker
    assert folder is not None, "drafting workers draft with a draft model"
    sharing = min(planner.drafting_workers, config.num_verifying)
    return Meet(
        service_identity(config_text, folder),
        silence_s,
        inputs.model,
        config.engine,
        np.dtype(dtype).name,
        devices,
        dataclasses.replace(config.draft_model, directory=str(folder)),
        config.drafting,
        planner.most_window,
        rows=-(-planner.num_requests // (sharing * devices)),
        longest_tokens=config.longest_tokens,
        sampling=config.sampling,
        hang_limit_s=config.run.hang_limit_s,
    )

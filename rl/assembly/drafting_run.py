"""Drafting workers of a run: engines in this program, or Ray actors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import jax

from reprise.rl.assembly.listeners import StepListener
from reprise.rl.cluster.actors import Actor, ActorSettings, Starts
from reprise.rl.cluster.join import DRAFT_MODEL
from reprise.rl.drafting.config import methods_of
from reprise.rl.drafting.plans import Planner
from reprise.rl.drafting.workers import (
    CONCURRENCY,
    DraftingActors,
    DraftingSettings,
    DraftingWorkers,
)
from reprise.rl.engine.engine import RolloutEngine
from reprise.rl.records.stats import EngineStats
from reprise.rl.sessions.multi_engine import Helpers, MultiEngine
from reprise.rl.settings.config import TrainConfig
from reprise.rl.speculation.device_drafters import DeviceDrafters
from reprise.rl.workers.engines import EngineSettings


def make_planner(config: TrainConfig) -> Planner:
    """Return the planner of drafting workers for a run."""
    settings = config.drafting
    sched = config.sched
    max_nodes = config.engine.max_nodes - 1
    methods = methods_of(len(config.draft_model.each))
    window = settings.window or min(max_nodes, config.draft_model.max_depth)
    requests = min(config.rollout.num_requests, sched.workers * config.engine.max_slots)
    return Planner(settings, sched.workers, requests, window, methods)


def take_workers(
    config: TrainConfig,
    engine: RolloutEngine,
    drafters: DeviceDrafters,
    clock: Callable[[], float],
    report: Callable[[str], None],
) -> DraftingWorkers:
    """Assign workers of `engine` to drafting, and enable helping by idle workers.

    Raises ValueError if there are more drafting workers than devices.
    """
    settings = config.drafting
    assert isinstance(engine, MultiEngine), "drafting workers draft for others"
    num_devices = len(jax.local_devices())
    if (count := settings.workers or 1) > num_devices:
        raise ValueError(
            "expected at most as many drafting workers as devices, got "
            f"Drafting.workers={count} and {num_devices}: lower it, or on a CPU set XLA_FLAGS="
            f"--xla_force_host_platform_device_count={count}"
        )
    planner = make_planner(config)
    drafting = DraftingWorkers(
        drafters,
        planner,
        config.longest_tokens,
        report=report,
        clock=clock,
        hang_limit_s=config.run.hang_limit_s,
    )
    if settings.workers:
        drafting.take(engine.engines, settings.workers)
    if settings.helps:
        have_idle_help(engine, planner)
    return drafting


class DraftingListener(StepListener):
    """A listener that reports the activity of drafting workers in a step."""

    def __init__(self, workers: DraftingWorkers) -> None:
        self._workers = workers

    def metrics(self, stats: EngineStats) -> dict[str, float]:
        newest = max((part.version for part in stats.parts), default=0)
        stats.parts = [*stats.parts, *self._workers.parts(newest)]
        return self._workers.metrics()


def have_idle_help(engine: MultiEngine, planner: Planner) -> None:
    """Let idle workers run copies of straggling requests if the planner finds that worthwhile."""
    settings = planner.config
    engine.helpers = Helpers(
        num_methods=len(settings.methods),
        requests_each=settings.requests_per_helper,
        worth=planner.worth,
        acceptance=lambda: planner.observed.acceptance(),
    )


@contextlib.contextmanager
def open_actors(
    config: TrainConfig, engine: EngineSettings, report: Callable[[str], None]
) -> Iterator[DraftingActors | None]:
    """Start the Ray drafting workers of a run, or yield None without any; stop them on exit.

    Each device has an actor. This does not wait for the actors (see `DraftingActors.wait_ready`).
    """
    if not config.drafting.workers:
        yield None
        return
    from reprise.rl.cluster.ray_session import reserve

    count = config.drafting.workers * config.sched.devices_per_worker
    start_s = 2 * config.cluster.deadline_s
    wanted = f"Drafting.workers={config.drafting.workers}"
    with reserve(count, wanted, start_s, devices=1) as room:
        with drafting_actors(config, engine, room, report) as actors:
            yield actors


def drafting_actors(
    config: TrainConfig,
    engine: EngineSettings,
    room: Starts,
    report: Callable[[str], None],
) -> DraftingActors:
    """Return the drafting workers of a run, which start in the reservation `room`."""
    folder = config.draft_model_folder
    deadline_s = config.cluster.deadline_s
    assert folder is not None and config.drafting.workers, "they draft with a draft model"
    planner = make_planner(config)
    planner.drafting_workers = config.drafting.workers
    count = config.drafting.workers * config.sched.devices_per_worker
    settings = DraftingSettings(
        policy=engine.model,
        engine=engine.config,
        dtype=engine.dtype,
        model=dataclasses.replace(config.draft_model, directory=str(folder)),
        drafting=config.drafting,
        max_window=planner.max_window,
        num_rows=-(-planner.num_requests // min(count, config.num_verifying)),
        longest_tokens=config.longest_tokens,
        sampling=config.sampling,
    )
    files = {DRAFT_MODEL: str(folder)}
    of_actors = ActorSettings(files, deadline_s, 2 * deadline_s, report)

    def start(number: int) -> Actor:
        return Actor(
            f"drafting worker {number}",
            "reprise.rl.drafting.workers:DraftingActor",
            (settings,),
            of_actors,
            room,
            number,
            concurrency=CONCURRENCY,
            make_s=config.run.compile_limit_s,
        )

    return DraftingActors(planner, count, start, hang_limit_s=deadline_s)

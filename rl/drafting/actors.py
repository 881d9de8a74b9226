"""Drafting workers as actors of Ray, which verifying workers of other programs call.

    the run's program   DraftingActors: starts them, watches them, starts lost ones again
    a verifying worker  RemoteDrafts.use(DraftsApart) at the start of each rollout → links

A lost worker's links are lost until the rollout ends.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import cast

from models.config import ModelConfig
from rl.cluster.actors import Actor, Handle
from rl.drafting.config import DraftingConfig
from rl.drafting.plans import MeasuredSeconds, Planner
from rl.drafting.worker import Answer, Draft, DraftingLink, DraftingWorker, Peer, Rollout
from rl.drafting.workers import drafting_engine, share
from rl.engine.config import EngineConfig
from rl.engine.engine import Engine
from rl.engine.rollout_spec import DrafterContext
from rl.runtime.parallel_compile import keep_programs
from rl.speculation.config import DraftModelConfig
from rl.speculation.device_drafters import DrafterSource
from rl.speculation.draft_model import DraftModel
from sched.simulator.measured_costs import MeasuredCosts
from spec.budget.config import MODEL
from spec.config import SamplingConfig
from spec.decoupled.drafter import DecoupledDrafter, OnePlan
from spec.decoupled.messages import DraftPlan
from spec.round_times import RoundTimes

BEAT_S = 2.0  # between two calls by which a hang or a loss is noticed
CONCURRENCY = 64  # links that may wait for one another's steps
NO_MOVES = {1: (0.0, 0.0)}  # seconds of moves between workers: no window depends on them


@dataclasses.dataclass(frozen=True)
class DraftingSettings:
    """All that an actor needs to draft on one device, for requests of `num_rows` at once."""

    policy: ModelConfig
    engine: EngineConfig
    dtype: str
    model: DraftModelConfig
    drafting: DraftingConfig
    max_window: int
    num_rows: int
    longest_tokens: int
    sampling: SamplingConfig


class DraftingActor(DraftingWorker):
    """A drafting worker in a program of its own, compiled, with the draft model of its folder."""

    def __init__(self, settings: DraftingSettings) -> None:
        keep_programs()
        window = settings.max_window
        engine = Engine(settings.policy, settings.engine, dtype=settings.dtype)
        engine = drafting_engine(engine, settings.num_rows, settings.longest_tokens, window)
        models = DraftModel.load(settings.model).models
        super().__init__(engine, models, settings.drafting, window)
        self.prepare(settings.sampling)
        self._draft_s = self.draft_seconds(settings.sampling)[MODEL]

    def get_draft_s(self) -> float:
        """Return the measured seconds of a draft token for all requests."""
        return self._draft_s

    def count_steps(self) -> int:
        """Return how many steps there were, once the present one has ended."""
        with self._stepping:
            return self.num_steps


@dataclasses.dataclass(frozen=True, eq=False)
class DraftsApart:
    """The drafting workers of one verifying worker, and the sizes that its `Planner` needs.

    `places` are their programs by number, `draft_s` is that of `MeasuredSeconds`.
    """

    places: Mapping[int, Handle]
    config: DraftingConfig
    num_workers: int
    num_requests: int
    max_window: int
    draft_s: float


class DraftingActors:
    """The drafting workers of a run in programs of their own; a context manager, which ends them.

    `start` starts an actor of `DraftingActor` by its number. A step may take `hang_limit_s`.
    """

    def __init__(
        self, planner: Planner, count: int, start: Callable[[int], Actor], *, hang_limit_s: float
    ) -> None:
        self.planner, self.draft_s = planner, 0.0
        self._count, self._start, self._hang_limit_s = count, start, hang_limit_s
        self.actors, self._over = list[Actor](), threading.Event()

    def __enter__(self) -> DraftingActors:
        """Start all; they compile, and nothing waits for them."""
        self.actors = [self._start(number) for number in range(self._count)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for actor in self.actors:
            actor.close()

    def wait_ready(self) -> None:
        """Return once all have compiled. Raises ProgramLost if one cannot draft."""
        answers = [actor.call("get_draft_s", is_work=False) for actor in self.actors]
        self.draft_s = max(answer.result() for answer in answers)
        threading.Thread(target=self._watch, name="drafting workers", daemon=True).start()

    def apart(self, verifying: int) -> DraftsApart:
        """Return the present drafting workers of a verifying worker, by its number."""
        planner = self.planner
        count = planner.num_workers - planner.drafting_workers
        numbers = share(range(self._count), verifying % count, count)
        handles = {k: self.actors[k].handle for k in numbers if self.actors[k].is_there}
        places = {k: handle for k, handle in handles.items() if handle is not None}
        sizes = planner.num_workers, planner.num_requests, planner.max_window
        return DraftsApart(places, planner.config, *sizes, self.draft_s)

    def _watch(self) -> None:
        """Call all in turn, so that one whose step hangs is lost, and starts again."""
        beats = [Future[int]() for _ in self.actors]
        for beat in beats:
            beat.set_result(0)
        while not self._over.wait(BEAT_S):
            for k, actor in enumerate(self.actors):
                if beats[k].done():
                    has_worked = beats[k].exception() is None and beats[k].result() > 0
                    limit_s = self._hang_limit_s
                    beats[k] = actor.call("count_steps", limit_s=limit_s, is_work=has_worked)


class RemoteDrafts(DrafterSource):
    """The drafters of a verifying worker whose drafting workers are actors; it is kept for the run.

    Its planner learns acceptance from all its rollouts. `report` is called with a line about each
    failure. Before `use` the drafters get no drafts: they serve to compile what they do on the
    host.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._planner: Planner | None = None
        self._peers = list[Peer]()

    def use(self, apart: DraftsApart, times: RoundTimes | None) -> None:
        """Begin a rollout; `times` are the seconds of this worker's rounds, if it has any."""
        if self._planner is None:
            sizes = apart.num_workers, apart.num_requests, apart.max_window
            self._planner = Planner(apart.config, *sizes)
            self._planner.drafting_workers = apart.config.workers or 0
        if times is not None:
            costs = MeasuredCosts(times.rounds, NO_MOVES)
            self._planner.seconds = MeasuredSeconds.of(costs, times, draft_s=apart.draft_s)
        self._peers = [
            Peer(f"drafting worker {number}", _calls(handle), self._report)
            for number, handle in apart.places.items()
        ]

    def drafter_for(self, context: DrafterContext) -> DecoupledDrafter:
        spec = context.spec
        rollout = Rollout.of(MODEL, spec.key, spec.sampling)
        peers = self._peers or [Peer("no drafting worker", None, self._report)]
        links = [DraftingLink(peer, rollout) for peer in peers]
        plans = OnePlan(DraftPlan(1)) if self._planner is None else self._planner.plans()
        return DecoupledDrafter(links, plans, spec.sampling)


def _calls(handle: Handle) -> Draft:
    return lambda *args: cast(Answer, handle.submit("call", "draft", *args).result())

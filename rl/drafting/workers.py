"""The drafting workers of a run: engines that draft for those that verify.

A rollout's drafters on verifying workers get links to all drafting workers; what these draft with
is made in their threads, on their devices, once a rollout. A worker that raises, or hangs for
`hang_limit_s` with something to do, is replaced: requests are told anew, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, MutableSequence, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from rl.drafting.ahead_maker import (
    AheadMaker,
    DraftedRollout,
    draft_seconds,
    drafting_engines,
    make_ahead,
    of_each_device,
)
from rl.drafting.plans import Planner
from rl.drafting.threads import DraftingThreads
from rl.drafting.worker import DraftingWorker, WorkerLink
from rl.engine.engine import Engine
from rl.engine.rollout_spec import DrafterContext
from rl.runtime.waits import HANG_LIMIT_S
from rl.speculation.device_drafters import DeviceDrafters
from rl.speculation.draft_model import DraftModel
from spec.budget.config import MODEL
from spec.decoupled.ahead import DraftingAhead
from spec.decoupled.drafter import DecoupledDrafter
from spec.drafter import Program, Source

T = TypeVar("T")


class DraftingWorkers:
    """Drafting workers on engines of a run, which share the requests of all verifying workers.

    There are none until `take`. A context manager: the threads end on exit. `told` is called with a
    line about each loss. `longest_tokens` are those of prompt and response.
    """

    def __init__(
        self,
        drafters: DeviceDrafters,
        planner: Planner,
        longest_tokens: int,
        *,
        clock: Callable[[], float],
        told: Callable[[str], None],
        hang_limit_s: float = HANG_LIMIT_S,
    ) -> None:
        self.planner, self.longest_tokens = planner, longest_tokens
        self._drafters = drafters
        self._maker: AheadMaker | None = None
        if planner.config.drafts_apart:
            self._maker = make_ahead(planner.config, drafters, planner.most_window)
        self._clock, self._said = clock, (clock(), 0, 0.0)  # when metrics were asked for last
        self._options: dict[str, Any] = {"clock": clock, "told": told, "hang_limit_s": hang_limit_s}
        self._engines: list[Engine] = []
        self._verifying: list[int] = []  # numbers of the engines that verify
        self._threads = DraftingThreads((), Source.OTHER, **self._options)

    @property
    def maker(self) -> AheadMaker:
        assert self._maker is not None, "workers draft for others"
        return self._maker

    @property
    def workers(self) -> list[DraftingWorker]:
        return self._threads.workers

    def take(self, engines: MutableSequence[Engine], count: int) -> None:
        """Take the last `count` engines from those that verify, and start drafting on them."""
        assert not self.workers and 0 < count < len(engines), "once, and some are left"
        taken = [engines.pop() for _ in range(count)][::-1]
        singles = [one for engine in taken for one in of_each_device(engine)]
        rows = -(-self.planner.num_requests // min(len(singles), len(engines)))
        sizes = rows, self.longest_tokens, self.planner.most_window
        self._engines = drafting_engines(singles, *sizes)
        self._verifying = [engine.number for engine in engines]
        self.planner.drafting_workers = count
        self._threads = DraftingThreads(self._engines, self.maker.source, **self._options)

    def __enter__(self) -> DraftingWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()

    def drafter_for(self, context: DrafterContext) -> DecoupledDrafter:
        """Return the drafter of one verifying worker for one rollout."""
        look, maker = self._threads.look, self.maker
        # and not all of the weights: words are kept for a while
        noise = DraftedRollout(context.spec.key, context.spec.sampling, maker.shared(context))
        key = np.asarray(jax.random.key_data(noise.key)).tobytes()
        rollout: Hashable = key, noise.sampling

        def make(engine: Engine) -> DraftingAhead:
            return maker.ahead(engine, noise)

        place, count = self._verifying.index(context.runner.number), len(self._verifying)
        drafting = share(self.workers, place, count)
        links = [WorkerLink(worker, rollout, make, look) for worker in drafting]
        plans, states = self.planner.plans(), maker.states(context)
        return DecoupledDrafter(links, plans, noise.sampling, states)

    def programs(self, rollout: DraftedRollout) -> Iterator[tuple[Engine, list[Program]]]:
        """Yield what drafting workers run, with the engine that it is for."""
        for engine in self._engines:
            yield engine, self.maker.programs(engine, rollout)

    def draft_seconds(self, rollout: DraftedRollout) -> float:
        """Measure the seconds of a draft token for all requests of a drafting worker; 0 without."""
        if not self._engines:
            return 0.0
        given = self._engines[0], rollout, self.planner.most_window
        return draft_seconds(self.maker, *given, self._clock)

    def model_seconds(self) -> float:
        """Measure the seconds of putting the draft model on another worker (model scale).

        None are needed where no copy is drafted for by it.
        """
        model = self._drafters.get(MODEL)
        if not isinstance(model, DraftModel) or MODEL not in self.planner.config.methods:
            return 0.0
        return model.seconds_to_place(self._clock)

    def metrics(self) -> dict[str, float]:
        """Return what the workers have done since the last call; nothing where there are none."""
        if not self.workers:
            return {}
        now_s, steps = self._clock(), sum(w.steps for w in self.workers)
        busy_s = sum(w.busy_s for w in self.workers)
        (then_s, steps_then, busy_then_s), self._said = self._said, (now_s, steps, busy_s)
        share = (busy_s - busy_then_s) / max((now_s - then_s) * len(self.workers), 1e-9)
        observed = self.planner.observed
        return {
            "drafting/steps": float(steps - steps_then),
            "drafting/busy_fraction": share,
            "drafting/accept_probability": observed.p,
            "drafting/rounds_with_draft": observed.hits,
        }


def share(drafting: Sequence[T], place: int, count: int) -> Sequence[T]:
    """Return who drafts for the verifying worker at a place among `count`.

    Some that are its own, or one that it has in common with others.
    """
    return drafting[place::count] or [drafting[place % len(drafting)]]

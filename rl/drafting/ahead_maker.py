"""Makes the drafters that draft ahead of verifying workers, for engines of drafting workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from rl.drafting.config import DraftingConfig
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from rl.speculation.draft_model import DraftModel
from spec.buckets import bucket
from spec.config import SamplingConfig
from spec.decoupled.ahead import DraftingAhead, Enumerating, FreeRunning
from spec.decoupled.messages import Commit, DraftPlan
from spec.draft_model.drafter import AheadDraftModel, EnumeratingDraftModel
from spec.drafter import Program

REPEATS = 3  # of what is timed
LEAST_SECONDS = 1e-7


class DraftedRollout(NamedTuple):
    """The part of a rollout that drafting workers need: the key of its noise, and its sampling."""

    key: jax.Array
    sampling: SamplingConfig


@dataclasses.dataclass(frozen=True, eq=False)
class ModelAhead:
    """Makes a draft model's drafters by `config.ahead`; no window is above `most_window`."""

    model: DraftModel
    config: DraftingConfig
    most_window: int

    def ahead(self, engine: Engine, rollout: DraftedRollout) -> DraftingAhead:
        """Return the drafter of one rollout on a drafting worker."""
        drafter = self._drafter(engine, rollout)
        if isinstance(drafter, EnumeratingDraftModel):
            window, fan_out = self.most_window, self.config.fan_out
            return Enumerating(drafter, *_size(engine), most_window=window, fan_out=fan_out)
        return FreeRunning(drafter, *_size(engine))

    def programs(self, engine: Engine, rollout: DraftedRollout) -> list[Program]:
        """Return the programs of a drafting worker's engine."""
        rows, found = engine.config.max_slots, list[Program]()
        with engine.mesh_context():
            for S in engine.position_sizes(rows):
                drafter = self._drafter(engine, rollout)
                if isinstance(drafter, EnumeratingDraftModel):
                    found += drafter.enumerating(rows, S, self.most_window, self.config.fan_out)
                else:
                    found += drafter.programs(rows, S)
        return found

    def _drafter(self, engine: Engine, rollout: DraftedRollout) -> AheadDraftModel:
        spec = RolloutSpec((), rollout.sampling, rollout.key)  # type: ignore[arg-type]
        kind = EnumeratingDraftModel if self.config.ahead == "enumeration" else AheadDraftModel
        context = engine.drafter_context(spec)  # it reads no weights of the policy
        return self.model.made(kind, context, self.most_window)


def draft_seconds(
    maker: ModelAhead,
    engine: Engine,
    rollout: DraftedRollout,
    most_window: int,
    clock: Callable[[], float],
) -> float:
    """Measure the seconds of a draft token for all requests of a drafting worker.

    Those of a whole block by its window: rows at rest take as long as others.
    """
    rows, prompt = engine.config.max_slots, np.zeros(1, np.int32)
    plan, none = DraftPlan(most_window), np.zeros(0, np.int32)
    with engine.mesh_context():
        ahead = maker.ahead(engine, rollout)
        tries = []
        for n in range(REPEATS + 1):
            said = n, prompt, 1, 2 * most_window, none, plan, (1.0, 0.0, 1.0)
            ahead.hear([Commit(r, 1 + n, *said) for r in range(rows)], ())
            began_s = clock()
            ahead.step()
            tries.append(clock() - began_s)
    return max(float(np.median(tries[1:])), LEAST_SECONDS) / most_window


def _size(engine: Engine) -> tuple[int, int]:
    return engine.config.max_slots, engine.longest_tokens


def drafting_engines(
    engines: Sequence[Engine], num_rows: int, longest_tokens: int, most_window: int
) -> list[Engine]:
    """Return engines on the same devices whose caches hold every request that is drafted for.

    One bucket of rows, so that nothing compiles as requests come and go. `longest_tokens` are those
    of prompt and response.
    """
    rows, made = bucket(num_rows, 1), []
    for engine in engines:
        config = dataclasses.replace(engine.config, slots=rows, min_slots=rows)
        drafting = dataclasses.replace(engine, config=config, feature_layers=None)
        drafting.expect(rows, longest_tokens + 2 * most_window)
        made.append(drafting)
    return made


def of_each_device(engine: Engine) -> list[Engine]:
    """Return an engine for each device of one: a drafter is small."""
    if engine.mesh is None:
        return [engine]
    devices = engine.mesh.devices.flat
    return [dataclasses.replace(engine, mesh=None, device=device) for device in devices]

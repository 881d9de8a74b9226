"""Makes the drafters that draft ahead of verifying workers, for engines of drafting workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import jax
import numpy as np

from rl.drafting.config import DraftingConfig
from rl.engine.engine import Engine
from rl.engine.rollout_spec import DrafterContext, RolloutSpec
from rl.speculation.device_drafters import DeviceDrafters
from rl.speculation.draft_model import DraftModel
from rl.speculation.learned_drafter import LearnedDrafter
from spec.buckets import bucket
from spec.budget.config import OWN
from spec.config import SamplingConfig
from spec.decoupled.ahead import DraftingAhead, Enumerating, FreeRunning, LearnedTrees, Trees
from spec.decoupled.messages import Commit, DraftPlan
from spec.decoupled.states import StateReader, StateRows, reading_programs
from spec.draft_model.drafter import AheadDraftModel, EnumeratingDraftModel
from spec.drafter import Program, Source
from spec.eagle.drafter import EagleDrafter
from spec.eagle.model import SharedParams
from spec.retrieval.ngram import NgramDrafter

REPEATS = 3  # of what is timed
LEAST_SECONDS = 1e-7


class DraftedRollout(NamedTuple):
    """A rollout as drafting workers know it: the key of its noise, and its sampling.

    `shared` are the parts of its policy that a learned drafter uses.
    """

    key: jax.Array
    sampling: SamplingConfig
    shared: SharedParams | None = None


class AheadMaker(Protocol):
    """Makes one rollout's part of a drafting worker, by one source of `Speculation`."""

    source: ClassVar[Source]

    def shared(self, context: DrafterContext) -> SharedParams | None:
        """Return what drafting workers need of the policy of a verifying worker's rollout."""
        return None

    def states(self, context: DrafterContext) -> StateReader | None:
        """Return what reads the policy's hidden states, if they are needed."""
        return None

    def reading(self, engine: Engine, sizes: Iterable[tuple[int, int]]) -> Iterator[Program]:
        """Yield what that runs on a verifying worker with caches of these slots and positions."""
        yield from ()

    def ahead(self, engine: Engine, rollout: DraftedRollout) -> DraftingAhead:
        """Return what drafts for one rollout on a drafting worker."""
        ...

    def programs(self, engine: Engine, rollout: DraftedRollout) -> list[Program]:
        """Return what a drafting worker runs on its engine."""
        ...


def make_ahead(config: DraftingConfig, drafters: DeviceDrafters, most_window: int) -> AheadMaker:
    """Return the maker for `config.drafter`; no window has more than `most_window` draft tokens."""
    if config.drafter == OWN:
        return OwnAhead()
    drafter = drafters[config.drafter]
    if isinstance(drafter, LearnedDrafter):
        return LearnedAhead(drafter, most_window)
    assert isinstance(drafter, DraftModel), "the other one on devices"
    return ModelAhead(drafter, config, most_window)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelAhead(AheadMaker):
    """`config.ahead`, of a draft model."""

    model: DraftModel
    config: DraftingConfig
    most_window: int
    source: ClassVar[Source] = Source.MODEL

    def ahead(self, engine: Engine, rollout: DraftedRollout) -> DraftingAhead:
        drafter = self._drafter(engine, rollout)
        if isinstance(drafter, EnumeratingDraftModel):
            window, fan_out = self.most_window, self.config.fan_out
            return Enumerating(drafter, *_size(engine), most_window=window, fan_out=fan_out)
        return FreeRunning(drafter, *_size(engine))

    def programs(self, engine: Engine, rollout: DraftedRollout) -> list[Program]:
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


@dataclasses.dataclass(frozen=True, eq=False)
class LearnedAhead(AheadMaker):
    """Trees of a learned drafter, by its newest weights and the states of verifying workers."""

    learned: LearnedDrafter
    most_window: int
    source: ClassVar[Source] = Source.LEARNED

    def shared(self, context: DrafterContext) -> SharedParams:
        return self.learned.shared(context)

    def states(self, context: DrafterContext) -> StateReader:
        return StateReader(context.states.array, context.runner)

    def reading(self, engine: Engine, sizes: Iterable[tuple[int, int]]) -> Iterator[Program]:
        for size in sizes:
            yield from reading_programs(engine, partial(engine.empty_states, *size))

    def ahead(self, engine: Engine, rollout: DraftedRollout) -> DraftingAhead:
        states, size = self._states(engine), _size(engine)
        drafter = self._drafter(engine, rollout, states)
        return LearnedTrees(drafter, states, *size, most_nodes=_tree_nodes(engine))

    def programs(self, engine: Engine, rollout: DraftedRollout) -> list[Program]:
        rows, states = engine.config.max_slots, self._states(engine)
        with engine.mesh_context():
            found = [*states.programs()]
            drafter = self._drafter(engine, rollout, states)
            for S in engine.position_sizes(rows):
                found += drafter.programs(rows, S)
        return found

    def _states(self, engine: Engine) -> StateRows:
        return StateRows(engine, engine.config.max_slots, self.learned.config.hidden_width)

    def _drafter(self, engine: Engine, rollout: DraftedRollout, states: StateRows) -> EagleDrafter:
        shared = jax.tree.map(engine.put, rollout.shared)
        given = engine, shared, rollout.sampling, rollout.key, states
        depth = 2 * self.most_window + 1  # a window and a token are being verified
        nodes = _tree_nodes(engine)
        return self.learned.made(*given, max_depth=depth, num_draft_tokens=nodes)


class OwnAhead(AheadMaker):
    """Trees of n-grams of each request's own text; nothing runs on the device."""

    source: ClassVar[Source] = Source.OWN

    def ahead(self, engine: Engine, rollout: DraftedRollout) -> DraftingAhead:
        return Trees(NgramDrafter(), *_size(engine), most_nodes=_tree_nodes(engine))

    def programs(self, engine: Engine, rollout: DraftedRollout) -> list[Program]:
        return []


def draft_seconds(
    maker: AheadMaker,
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


def _tree_nodes(engine: Engine) -> int:
    """Return the draft tokens of a block: those that are being verified, and as many behind."""
    return 2 * engine.config.max_nodes


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

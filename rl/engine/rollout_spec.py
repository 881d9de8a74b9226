"""A rollout to run: the policy and sampling of all its requests, and its drafters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from reprise.models.paged_cache import Cache
from reprise.models.token_bytes import TokenBytes
from reprise.models.transformer import Params
from reprise.rl.engine.ending import Endings, padded_ids
from reprise.rl.engine.model_runner import ModelRunner
from reprise.rl.records.trajectory import Request
from reprise.spec.budget.budget import Budget
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Drafter
from reprise.spec.eagle.training_data import HiddenStateSink
from reprise.spec.reuse.agreement import FIRST_RATE
from reprise.spec.reuse.prefix_rule import PrefixRule
from reprise.spec.round_times import RoundTimes


@dataclasses.dataclass(frozen=True, eq=False)
class DrafterContext:
    """The worker that a drafter is made for: devices, rollout, hidden states of its cache."""

    runner: ModelRunner
    spec: RolloutSpec
    states: CachedStates


@dataclasses.dataclass(frozen=True, eq=False)
class CachedStates:
    """The hidden states that a cache of a worker holds; `empty` ones compile programs."""

    runner: ModelRunner
    cache: Callable[[], Cache]

    def array(self) -> Any:
        return self.cache().states

    def empty(self, num_slots: int, num_positions: int) -> Any:
        return self.runner.empty_states(num_slots, num_positions)


Drafting = tuple[Drafter | None, Budget | None]
DrafterFactory = Callable[[DrafterContext], Drafting]  # called once for each worker and rollout


def no_drafts(context: DrafterContext) -> Drafting:
    """Decode plainly."""
    return None, None


def draft_with(drafter: Drafter | None, budget: Budget | None = None) -> DrafterFactory:
    """Return a factory for a rollout of one engine: it has this drafter and this budget."""
    return lambda context: (drafter, budget)


@dataclasses.dataclass(frozen=True, eq=False)
class RolloutSpec:
    """The policy, the sampling and the noise of all requests of a rollout, and how they draft.

    `words` is the text of tokens, for stop strings. `drafts` makes each worker's drafter and
    budget; without a budget all draft tokens are verified. `rule` decides how much of cached
    responses is kept (None: none); with `begun`, requests may have early tokens, expected to
    miss at `early_miss_rate`. `times`, measured seconds of rounds, choose between verifying
    these in chunks (None: always), as nodes, or by decoding. `sink` receives
    responses with hidden states. With `keeps_responses` a prompt may continue an earlier request's
    tokens in its row, as the turns of a dialogue do.
    """

    params: Params
    sampling: SamplingConfig
    key: jax.Array
    stop_token_ids: Sequence[int] = ()
    policy_version: int = 0
    drafts: DrafterFactory = no_drafts
    rule: PrefixRule | None = None
    sink: HiddenStateSink | None = None
    words: TokenBytes | None = None
    begun: bool = False
    early_miss_rate: float = FIRST_RATE
    keeps_responses: bool = False
    times: RoundTimes | None = None

    @functools.cached_property
    def stop_ids(self) -> np.ndarray:
        """The end tokens of all requests on the device; int32 [E]."""
        return padded_ids((*self.stop_token_ids, *self.sampling.stop_ids))

    def endings(self, requests: Sequence[Request] = ()) -> Endings:
        """Return where responses end. Raises ValueError for stop strings without `words`."""
        endings = Endings(self.sampling, self.stop_token_ids, self.words)
        for request in requests:
            endings.check(request.sampling)
        return endings

"""The specification of a rollout: policy, sampling and drafters of its requests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from reprise.models.attention.kv_cache import KVCache
from reprise.models.decoder.transformer import Params
from reprise.models.text.token_bytes import TokenBytes
from reprise.rl.records.trajectory import Request
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.slots.ending import Endings, padded_ids
from reprise.spec.budget.budget import Budget
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Drafter
from reprise.spec.eagle_training.training_data import HiddenStateSink
from reprise.spec.reuse.agreement import FIRST_RATE
from reprise.spec.reuse.prefix_rule import PrefixRule
from reprise.spec.round_times import RoundTimes


@dataclasses.dataclass(frozen=True, eq=False)
class DrafterContext:
    """The context of a drafter: devices of its worker, rollout, hidden states of the cache."""

    runner: ModelRunner
    spec: RolloutSpec
    states: CachedStates


@dataclasses.dataclass(frozen=True, eq=False)
class CachedStates:
    """The hidden states in the cache of a worker; `empty` states are for compiling programs."""

    runner: ModelRunner
    cache: Callable[[], KVCache]

    def array(self) -> Any:
        return self.cache().states

    def empty(self, num_slots: int) -> Any:
        return self.runner.empty_states(num_slots)


Drafting = tuple[Drafter | None, Budget | None]
DrafterFactory = Callable[[DrafterContext], Drafting]  # called once for each worker and rollout


def no_drafts(context: DrafterContext) -> Drafting:
    """Return neither drafter nor budget, for plain decoding."""
    return None, None


def draft_with(drafter: Drafter | None, budget: Budget | None = None) -> DrafterFactory:
    """Return a factory of this drafter and this budget, for a rollout of one engine."""
    return lambda context: (drafter, budget)


@dataclasses.dataclass(frozen=True, eq=False)
class RolloutSpec:
    """The policy, the sampling and the noise of all requests of a rollout, and how they draft.

    `words` is the text of tokens, for stop strings. `drafts` makes the drafter and the budget of a
    worker; without a budget all draft tokens are verified. `rule` decides how much of cached
    responses is kept (without a rule, nothing); `begun` allows requests to have early tokens, which
    are expected to miss at `early_miss_rate`. `times`, measured seconds of rounds, select whether
    cached and early tokens are verified in chunks (None: always), as nodes, or by decoding. `sink`
    receives responses with hidden states. With `keeps_responses` a prompt may continue the tokens
    of an earlier request in its row, as the turns of a dialogue do.
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
        """The end tokens that all requests share, for the device; int32 [E]."""
        return padded_ids((*self.stop_token_ids, *self.sampling.stop_ids))

    def endings(self, requests: Sequence[Request] = ()) -> Endings:
        """Return the stop rules of responses. Raises ValueError for strings without `words`."""
        endings = Endings(self.sampling, self.stop_token_ids, self.words)
        for request in requests:
            endings.check(request.sampling)
        return endings

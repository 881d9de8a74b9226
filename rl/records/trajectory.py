"""Requests and trajectories: the plain host-side records of a rollout.

A trajectory is a function of (policy, step key, request, sampling) only.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from reprise.models.attention.entries import Entries
from reprise.models.config import ModelConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.reuse.rollout_cache import CachedResponse

if TYPE_CHECKING:
    from reprise.rl.records.episode import Episode

Prompt = tuple[int, ...]  # token ids


class Origin(enum.IntEnum):
    """The source of a response token."""

    PLAIN = 0  # drawn at the root of a tree without drafts
    ACCEPTED = 1  # a draft that equalled the draw
    BONUS = 2  # the draw at the last accepted node of a tree with drafts
    REUSED = 3  # taken over from an earlier rollout


class FinishReason(enum.StrEnum):
    STOP = "stop"  # the last response id is an end token, or completes a stop string
    LENGTH = "length"  # max_new_tokens reached: truncated
    NOT_FINITE = "not_finite"  # the log-probability of the last response id is not finite


class NonFiniteLogits(RuntimeError):
    """The logits of a response are not finite, so no token can be drawn from them."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One response to be generated.

    `request_id` modulo 2³¹ selects the noise; ids are unique within a call. If `sampling` is None,
    the sampling of the rollout applies; the scheme of draws is the same for all requests of a
    rollout. `cached` is an earlier response to the same prompt; its prefix may be reused.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    group_id: int = 0
    sample_index: int = 0
    max_new_tokens: int | None = None
    cached: CachedResponse | None = None
    sampling: SamplingConfig | None = None
    begun: tuple[int, ...] = ()  # tokens drawn with the same noise and older weights
    adapter: int = 0  # index of its adapter in the rollout, modulo their number
    seed: int | None = None  # of its noise, as `step_key(seed, 0)`; None: the key of the rollout

    def limit(self, sampling: SamplingConfig) -> int:
        """Return the maximum length of the response, in a rollout with this sampling."""
        return self.max_new_tokens or (self.sampling or sampling).max_new_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """One finished response, with the data that training needs.

    `response_ids` int32 [n] include the end token. `logprobs` float32 [n] are of the processed
    distribution (after temperature, top-k and top-p) in the pass that emitted or verified the
    token. `emission_logprobs` are under the policy that drew the token, with version
    `policy_versions` int32 [n]. `origins` uint8 [n] hold `Origin` values. An `episode` has
    the tokens of all turns of the policy, in order, and no token of its environment.
    """

    request_id: int
    group_id: int
    sample_index: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    logprobs: np.ndarray
    policy_versions: np.ndarray
    origins: np.ndarray
    finish_reason: FinishReason
    reward: float | None = None
    sampling: SamplingConfig | None = None
    emission_logprobs: np.ndarray = dataclasses.field(kw_only=True)
    episode: Episode | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.response_ids)

    @property
    def longest_turn_tokens(self) -> int:
        """The length of the response, or of the longest turn of an episode."""
        return self.num_tokens if self.episode is None else self.episode.longest_turn_tokens

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The response tokens that a request starts with; arrays as in `Trajectory`.

    `finish_reason` is set if these tokens complete the response.
    """

    response_ids: np.ndarray
    logprobs: np.ndarray
    emission_logprobs: np.ndarray
    policy_versions: np.ndarray
    origins: np.ndarray
    reused_tokens: int
    finish_reason: FinishReason | None


@dataclasses.dataclass(frozen=True, eq=False)
class HostKv:
    """Cache entries for all tokens of a request but the last, by position: host arrays."""

    entries: Entries

    @property
    def num_tokens(self) -> int:
        return len(self.entries.values[0])

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.entries))


@dataclasses.dataclass(frozen=True, eq=False)
class PartialRequest:
    """A request with its response so far, which its row may extend by `max_tokens` tokens.

    If `max_tokens` is None, the row may finish the response. Without `kv`, the keys and values are
    recomputed.
    """

    request: Request
    prefix: Prefix | None = None
    kv: HostKv | None = None
    max_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """The length of the response so far."""
        return 0 if self.prefix is None else len(self.prefix.response_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt and of the response so far."""
        if self.prefix is None:
            return self.request.prompt_ids
        return (*self.request.prompt_ids, *self.prefix.response_ids.tolist())

    def without_kv(self) -> PartialRequest:
        """Return this request without its keys and values, which are then recomputed."""
        return self if self.kv is None else dataclasses.replace(self, kv=None)


def of_prefix(request: Request, prefix: Prefix) -> Trajectory:
    """Return the trajectory of a request that its prefix completes."""
    assert prefix.finish_reason is not None, "the response has not ended"
    return Trajectory(
        request_id=request.request_id,
        group_id=request.group_id,
        sample_index=request.sample_index,
        prompt_ids=np.asarray(request.prompt_ids, np.int32),
        response_ids=prefix.response_ids,
        logprobs=prefix.logprobs,
        policy_versions=prefix.policy_versions,
        origins=prefix.origins,
        finish_reason=prefix.finish_reason,
        sampling=request.sampling,
        emission_logprobs=prefix.emission_logprobs,
    )


def check_finite(t: Trajectory) -> None:
    """Raise NonFiniteLogits if the response stopped because its logits are not finite."""
    if t.finish_reason is FinishReason.NOT_FINITE:
        raise NonFiniteLogits(
            f"request {t.request_id} (group {t.group_id}, sample {t.sample_index}): the policy's "
            f"logits after {t.num_tokens - 1} tokens of its response are not finite, so that no "
            "token can be drawn; fix: look at the policy's weights (a lower learning rate often "
            "helps)"
        )


def longest_tokens(requests: Sequence[Request], sampling: SamplingConfig) -> int:
    """Return the maximum length of the longest request of a rollout: prompt and response tokens."""
    return max([len(r.prompt_ids) + r.limit(sampling) for r in requests], default=0)


def check_requests(
    model: ModelConfig, requests: Sequence[Request], sampling: SamplingConfig
) -> None:
    """Raise ValueError for requests that cannot run in a rollout with this sampling."""
    samplings = {sampling, *(r.sampling for r in requests if r.sampling is not None)}
    if outside := [i for s in samplings for i in s.stop_ids if i >= model.vocab_size]:
        raise ValueError(
            f"Sampling.stop_ids: expected ids of the policy's vocabulary of {model.vocab_size}, "
            f"got {outside[0]}"
        )
    seen: set[int] = set()
    for request in requests:
        name = f"request {request.request_id}"
        if request.request_id in seen:
            raise ValueError(f"{name} comes twice: ids name the noise and must be unique in a call")
        seen.add(request.request_id)
        if not 0 <= request.request_id < 2**62:
            raise ValueError(f"{name}: ids must be in 0 … 2⁶²−1")
        if not request.prompt_ids:
            raise ValueError(f"{name} has an empty prompt: expected at least one token")
        low = min(request.prompt_ids)
        high = max(request.prompt_ids)
        if low < 0 or high >= model.vocab_size:
            raise ValueError(
                f"{name} has the token {low if low < 0 else high}, outside the policy's vocabulary "
                f"of {model.vocab_size}: is the tokenizer the policy's own?"
            )
        if request.max_new_tokens is not None and request.max_new_tokens < 1:
            raise ValueError(
                f"{name} has max_new_tokens={request.max_new_tokens}: expected at least 1"
            )
        if request.sampling is not None and request.sampling.scheme != sampling.scheme:
            raise ValueError(
                f"{name} has draw={request.sampling.scheme!r}: expected that of the rollout, "
                f"{sampling.scheme!r}, in its sampling"
            )
        limit = request.limit(sampling)
        needed = len(request.prompt_ids) + limit
        if needed > model.max_positions:
            raise ValueError(
                f"{name} needs {needed} positions ({len(request.prompt_ids)} of prompt and "
                f"{limit} new), the policy has {model.max_positions}: shorten the prompt or lower "
                "Sampling.max_new_tokens"
            )

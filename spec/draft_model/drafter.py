"""Drafts from a smaller model with the policy tokenizer and a separate cache.

Each round runs the tokens that the cache lacks through the model, then drafts a chain from the last
token of every request. This takes one short pass, one pass per draft token and one fetch. Cache
entries of accepted draft tokens stay; every pass overwrites rejected entries before it attends to
them. P = rows of one pass, C = tokens of a chunk, W = tokens of the first pass of a chain, K =
draft tokens of a chain. Source: the draft model of SpecActor and others; draws with shared noise
are ours.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.attention.kv_cache import KVCache
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.sharding import constrain
from reprise.spec.config import ChainConfig, Proposal, SamplingConfig
from reprise.spec.draft_cache.cache import DraftCache, PassSizes, Runner
from reprise.spec.draft_cache.drafter import CachingDrafter
from reprise.spec.draft_cache.drafting import (
    DraftTrees,
    Inputs,
    RoundResult,
    RowEnds,
    unpack_chunks,
)
from reprise.spec.drafter import (
    PRIOR_DRAFTS,
    PRIOR_PROB,
    LiveSlots,
    RoundsDrafter,
    Source,
)
from reprise.spec.verification import sampling
from reprise.spec.verification.sampling import Processing

MISSING_TOKENS = 2  # the last draft token, which a chain does not run, and the draw after it

# weights, least probability, rollout key, and probabilities of draws with shared noise by depth
Constants = tuple[transformer.Params, jax.Array, jax.Array, jax.Array]
State = tuple[KVCache, tuple[()]]


@dataclasses.dataclass(frozen=True)
class ChainDrafting:
    """`Drafting` of chains; device rounds need windows of at least `MISSING_TOKENS` tokens.

    Without a `scheme`, draft tokens are the likeliest tokens, with model probabilities. With a
    `scheme`, draft tokens are draws with the request noise at their positions, with the
    probabilities in the constants.
    """

    config: ModelConfig
    scheme: sampling.Draw | None
    first_token: ClassVar[int] = 0
    apart: ClassVar[bool] = False

    def catch_up(self, given: Inputs, cache: KVCache, table_PX: jax.Array) -> KVCache:
        (params, *_), _ = given
        row_P, _, start_P, tokens_PC = unpack_chunks(table_PX)
        table_PN = jnp.take(cache.table_BN, row_P, axis=0, mode="fill", fill_value=-1)
        some = dataclasses.replace(cache, table_BN=table_PN, anywhere=True)
        _, some = run_tokens(self.config, params, some, tokens_PC, start_P)
        return dataclasses.replace(some, table_BN=cache.table_BN, anywhere=False)

    def begin(self, given: Inputs, cache: KVCache, ends: RowEnds) -> State:
        return cache, ()

    def draft(
        self, constants: Constants, state: State, ends: RowEnds, depth: jax.Array, max_tokens: int
    ) -> tuple[KVCache, DraftTrees]:
        params, min_prob, key, mean_prob_K = constants
        ends = dataclasses.replace(
            ends, max_B=jnp.minimum(ends.max_B, jnp.minimum(depth, max_tokens))
        )
        cache, tokens_RX, prob_RX = _chains(self, params, state[0], ends, min_prob, key, max_tokens)
        parents_RX = jnp.broadcast_to(jnp.arange(max_tokens, dtype=jnp.int32) - 1, tokens_RX.shape)
        if self.scheme is not None:
            prob_X = jnp.take(mean_prob_K, jnp.arange(max_tokens), mode="clip")
            prob_RX = jnp.broadcast_to(prob_X, prob_RX.shape)
        likely_R = jnp.sum(prob_RX >= min_prob, axis=1, dtype=jnp.int32)
        count_R = jnp.minimum(ends.max_B, likely_R)
        return cache, DraftTrees(tokens_RX, parents_RX, prob_RX, count_R)

    def absorb(self, constants: Constants, state: State, result: RoundResult) -> State:
        return state


def _chains(
    drafting: ChainDrafting,
    params: transformer.Params,
    cache: KVCache,
    ends: RowEnds,
    min_prob: jax.Array,
    key: jax.Array,
    max_tokens: int,
) -> tuple[KVCache, jax.Array, jax.Array]:
    """Return the cache, and tokens and probabilities [B, K] of chains of up to `max_tokens`.

    The first pass computes the last W of the `total` tokens of a row; earlier entries must be
    known. Each further pass computes the last draft token. All chains stop together, once each has
    `max_B` draft tokens or a probability below `min_prob`; the rest is 0. Rows are not written
    beyond `max_B` draft tokens. Requires `total_B + max_B <= S`.
    """
    config = drafting.config
    scheme = drafting.scheme
    K = max_tokens
    S = cache.num_positions
    total_B = ends.total_B
    max_B = ends.max_B
    B = len(total_B)
    keys_B = sampling.request_keys(key, ends.request_id_B)
    first_B = ends.starts(0, S)
    hidden_BWD, cache = run_tokens(config, params, cache, ends.tokens_BW, first_B)
    last_B11 = jnp.maximum(total_B - first_B - 1, 0)[:, None, None]
    hidden_B1D = jnp.take_along_axis(hidden_BWD, last_B11, axis=1)

    def draft_token(k: jax.Array, hidden_B1D: jax.Array, drawn: tuple) -> tuple:
        tokens_BK, prob_BK, prob_B = drawn
        logits_B1V = transformer.head(config, params, hidden_B1D)
        logits_B1V = constrain(logits_B1V, "batch", None, "vocab")
        keys_B1 = sampling.position_keys(keys_B, (ends.emitted_B + k)[:, None])
        token_B1, logprob_B1 = _draw(logits_B1V, keys_B1, ends.processing, scheme)
        prob_B = prob_B * jnp.exp(logprob_B1[:, 0])
        tokens_BK = jax.lax.dynamic_update_slice(tokens_BK, token_B1, (0, k))
        prob_BK = jax.lax.dynamic_update_slice(prob_BK, prob_B[:, None], (0, k))
        return tokens_BK, prob_BK, prob_B

    def more(carry: tuple) -> jax.Array:
        k, _, (_, _, prob_B) = carry
        return jnp.any((k < max_B) & (prob_B >= min_prob))

    def step(carry: tuple) -> tuple:
        k, cache, drawn = carry
        token_B1 = jax.lax.dynamic_slice_in_dim(drawn[0], k - 1, 1, axis=1)
        at_B = jnp.where(k < max_B, total_B + k - 1, S)  # S: not written
        hidden_B1D, cache = run_tokens(config, params, cache, token_B1, at_B)
        return k + 1, cache, draft_token(k, hidden_B1D, drawn)

    none = jnp.zeros((B, K), jnp.int32), jnp.zeros((B, K)), jnp.ones(B)
    start = jnp.int32(1), cache, draft_token(jnp.int32(0), hidden_B1D, none)
    _, cache, (tokens_BK, prob_BK, _) = jax.lax.while_loop(more, step, start)
    return cache, tokens_BK, prob_BK


def run_tokens(
    config: ModelConfig,
    params: transformer.Params,
    cache: KVCache,
    tokens_BC: jax.Array,
    start_B: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """Run tokens at positions `start` … of their rows through the model, with causal attention."""
    positions_BC = start_B[:, None] + jnp.arange(tokens_BC.shape[1])
    return transformer.hidden_with_cache(config, params, cache, tokens_BC, positions_BC, start_B)[
        :2
    ]


def _draw(
    logits_B1V: jax.Array, keys_B1: jax.Array, processing: Processing, scheme: sampling.Draw | None
) -> tuple[jax.Array, jax.Array]:
    """Return tokens and their log-probabilities, both [B, 1]."""
    temperature_B1, top_k_B1, top_p_B1 = processing.broadcast(keys_B1.shape)
    if scheme is not None:
        cut_B1V = sampling.processed_logits(logits_B1V, temperature_B1, top_k_B1, top_p_B1)
        return sampling.draw(cut_B1V, keys_B1, temperature_B1, scheme)
    scale_B1 = jnp.where(temperature_B1 <= 0, 1.0, temperature_B1)
    logits_B1V = logits_B1V.astype(jnp.float32) / scale_B1[:, :, None]
    token_B1 = jnp.argmax(logits_B1V, axis=-1).astype(jnp.int32)
    total_B1 = jax.nn.logsumexp(logits_B1V, axis=-1)
    return token_B1, jnp.max(logits_B1V, axis=-1) - total_B1


class DraftModelDrafter(CachingDrafter):
    """A drafter of chains: the `likeliest` tokens of a draft model, or its draws (`shared_noise`).

    Shared noise is the noise of the policy at each position: a draft token is accepted if both
    distributions map the noise to the same token. The probability of a `likeliest` draft token is
    the product of model probabilities at the sampling temperature. With shared noise, it is the
    product of the mean acceptance rates observed at each depth. `model` has the vocabulary of the
    runner model; `params` are on the runner devices.
    """

    source = Source.MODEL
    missing_tokens = MISSING_TOKENS

    def __init__(
        self,
        model: ModelConfig,
        params: transformer.Params,
        config: ChainConfig | None = None,
        *,
        runner: Runner,
        sampling: SamplingConfig,
        key: jax.Array,
        proposal: Proposal = "likeliest",
    ) -> None:
        self.config = config or ChainConfig()
        self.depth = self.max_tokens = self.config.max_draft_tokens
        self._params = params
        self._sampling = sampling
        self._key = key
        self._proposal = proposal
        # `reach` cuts chains with shared noise, since the model does not know their probabilities
        self._min_prob = self.config.min_prob if proposal == "likeliest" else 0.0
        drafting = ChainDrafting(model, sampling.scheme if proposal == "shared_noise" else None)
        self._held = DraftCache(model, _passes(self.config), drafting, runner)
        self._drafting = drafting
        self._argument = runner.argument
        self._accepted_K = np.zeros(self.config.max_draft_tokens, np.int64)
        self._observed_K = np.zeros(self.config.max_draft_tokens, np.int64)

    def constants(self) -> Any:
        return self._params, np.float32(self._min_prob), self._key, self._mean_prob()

    def note_drafts(
        self, live: LiveSlots, rows_A: np.ndarray, tokens_AX: np.ndarray, count_A: np.ndarray
    ) -> None:
        self._held.rows.drafted(rows_A, tokens_AX, count_A)

    def in_rounds(self) -> RoundsDrafter | None:
        return self if self._held.passes.window_tokens >= MISSING_TOKENS else None

    # -- probabilities ---------------------------------------------------------------------

    def observe_chains(self, acceptance_A2: np.ndarray) -> None:
        """Count, by depth, chains accepted up to there, and chains with the next token accepted."""
        depth_K = np.arange(len(self._accepted_K))
        accepted_A1 = acceptance_A2[:, :1]
        seen_A1 = acceptance_A2[:, 1:]
        self._accepted_K += (depth_K < accepted_A1).sum(axis=0)
        self._observed_K += ((depth_K <= accepted_A1) & (depth_K < seen_A1)).sum(axis=0)

    def _mean_prob(self) -> np.ndarray:
        rate_K = (self._accepted_K + PRIOR_DRAFTS * PRIOR_PROB) / (self._observed_K + PRIOR_DRAFTS)
        return np.cumprod(rate_K).astype(np.float32)

    def reach(self) -> int:
        """Return the number of draft tokens worth drafting, at least 1 to keep observing."""
        if self._proposal == "likeliest":
            return self.depth
        return max(1, int((self._mean_prob()[: self.depth] >= self.config.min_prob).sum()))


def _passes(config: ChainConfig) -> PassSizes:
    """Return pass sizes with chunk widths that grow by a factor of 4, all above the window."""
    widths = [config.chunk_tokens]
    width = config.chunk_tokens // 4
    while width > config.window_tokens:
        widths.append(width)
        width //= 4
    return PassSizes(config.window_tokens, tuple(widths[::-1]), config.pass_tokens)

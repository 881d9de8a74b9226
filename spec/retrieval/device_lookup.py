"""Several rounds in one device call: each looks its draft tokens up in texts that the device holds.

A drafter on the host costs a transfer and a call a round. Here the host sends texts (last
epoch's responses, siblings) once; each round finds where a request's last tokens occur in
its text and drafts what followed there. Draft tokens are chains, and cruder than those of the
suffix index; `spec.verify` makes them exact all the same. L = tokens of a text, K = tokens
of a context, R = rounds of a call, N = nodes of a round, X = R · N.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from models import transformer
from models.config import ModelConfig
from models.kv_cache import KVCache
from spec import sampling
from spec.tails import moved_on
from spec.tree import PADDING, DraftTree
from spec.verify import Slots, verify

CONTEXT_TOKENS = 8
NO_TOKEN = -2  # in a context that is shorter: equals nothing, not even PADDING
LEAST_MATCH = 2  # tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Texts:
    """What B slots look their draft tokens up in.

    `text_BL` has PADDING between and behind its pieces, `context_BK` a request's last
    tokens, `next_B` the place of the token that is expected next, L where none is.
    """

    text_BL: jax.Array
    context_BK: jax.Array
    next_B: jax.Array


def find(texts: Texts) -> jax.Array:
    """Where in its text each request's next token is expected; L where nothing fits; [B].

    The longest suffix of the context wins, the first place among equals. A place that
    goes on from the round before counts as one and a half tokens more: after a token that
    was replaced the text often goes on as if it had not been.
    """
    L, K = texts.text_BL.shape[1], texts.context_BK.shape[1]
    same_BL = jnp.ones(texts.text_BL.shape, bool)
    length_BL = jnp.zeros(texts.text_BL.shape, jnp.int32)
    for j in range(min(K, L)):
        shifted_BL = jnp.pad(texts.text_BL, ((0, 0), (j, 0)), constant_values=PADDING)[:, :L]
        same_BL &= shifted_BL == texts.context_BK[:, K - 1 - j, None]
        length_BL += same_BL
    follows_BL = jnp.arange(L) == texts.next_B[:, None] - 1
    has_next_BL = jnp.pad(texts.text_BL[:, 1:], ((0, 0), (0, 1)), constant_values=PADDING) >= 0
    fits_BL = has_next_BL & ((length_BL >= LEAST_MATCH) | follows_BL)
    score_BL = jnp.where(fits_BL, 2 * length_BL + 3 * follows_BL, 0)
    best_B = jnp.argmax(score_BL, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(fits_BL, axis=1), best_B + 1, L)


def chains(text_BL: jax.Array, start_B: jax.Array, num_nodes: int) -> DraftTree:
    """A chain a slot: the text from `start` on, up to the end of its piece."""
    B, L = text_BL.shape
    N = num_nodes
    at_BN = start_B[:, None] + jnp.arange(N - 1)
    draft_BN = jnp.take_along_axis(text_BL, jnp.minimum(at_BN, L - 1), axis=1)
    # a draft token behind a gap is no child of the gap: nothing equals PADDING
    draft_BN = jnp.where(at_BN < L, draft_BN, PADDING)
    tokens_BN = jnp.concatenate([jnp.zeros((B, 1), jnp.int32), draft_BN], axis=1)
    return DraftTree(tokens_BN, jnp.broadcast_to(jnp.arange(-1, N - 1, dtype=jnp.int32), (B, N)))


def _advance(texts: Texts, start_B: jax.Array, tokens_BN: jax.Array, count_B: jax.Array) -> Texts:
    context_BK = moved_on(texts.context_BK, tokens_BN, count_B)
    L = texts.text_BL.shape[1]
    return Texts(texts.text_BL, context_BK, jnp.where(start_B < L, start_B + count_B, L))


@partial(
    jax.jit,
    static_argnames=("config", "scheme", "num_nodes", "max_rounds"),
    donate_argnames=("cache", "slots"),
)
def lookup_rounds(
    params: transformer.Params,
    cache: KVCache,
    slots: Slots,
    stop_E: jax.Array,
    texts: Texts,
    num_rounds: jax.Array,
    stop_after: jax.Array,
    *,
    config: ModelConfig,
    scheme: sampling.Draw,
    num_nodes: int,
    max_rounds: int,
) -> tuple[KVCache, Slots, jax.Array]:
    """Up to `num_rounds` rounds over chains of `num_nodes`, between two fetches.

    Ends early as `decode_rounds` does. Requires room for N entries behind each active
    slot at every round. Returns cache, slots, and packed what was emitted: int32 [B,
    2 X + 2 R] of tokens, bits of log-probs, tokens a round, draft tokens a round.
    """
    B, N, R = slots.active.shape[0], num_nodes, max_rounds
    active_before = jnp.sum(slots.active)

    def more(carry: tuple) -> jax.Array:
        r, _, slots, *_ = carry
        left = jnp.sum(slots.active)
        return (r < num_rounds) & (left > 0) & (active_before - left < stop_after)

    def put(row_X: jax.Array, new_N: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(row_X, new_N, (at,))

    def step(carry: tuple) -> tuple:
        r, cache, slots, texts, tokens_BX, logprobs_BX, total_B, counts_BR, tried_BR = carry
        start_B = find(texts)
        tree = chains(texts.text_BL, start_B, N)
        tried_B = jnp.where(slots.active, jnp.sum(tree.tokens_BN[:, 1:] >= 0, axis=1), 0)
        cache, slots, out = verify(config, params, cache, slots, tree, stop_E, scheme, chains=True)
        return (
            r + 1,
            cache,
            slots,
            _advance(texts, start_B, out.tokens_BN, out.count_B),
            jax.vmap(put)(tokens_BX, out.tokens_BN, total_B),
            jax.vmap(put)(logprobs_BX, out.logprobs_BN, total_B),
            total_B + out.count_B,
            jax.lax.dynamic_update_slice(counts_BR, out.count_B[:, None], (0, r)),
            jax.lax.dynamic_update_slice(tried_BR, tried_B.astype(jnp.int32)[:, None], (0, r)),
        )

    none_BX, none_BR = jnp.zeros((B, R * N), jnp.int32), jnp.zeros((B, R), jnp.int32)
    start = (
        jnp.int32(0),
        cache,
        slots,
        texts,
        none_BX,
        none_BX.astype(jnp.float32),
        jnp.zeros(B, jnp.int32),
        none_BR,
        none_BR,
    )
    _, cache, slots, _, tokens_BX, logprobs_BX, _, counts_BR, tried_BR = jax.lax.while_loop(
        more, step, start
    )
    bits_BX = jax.lax.bitcast_convert_type(logprobs_BX, jnp.int32)
    packed = jnp.concatenate([tokens_BX, bits_BX, counts_BR, tried_BR], axis=1)
    return cache, slots, packed


@dataclasses.dataclass(frozen=True, eq=False)
class LookupOutcome:
    """How looked-up draft tokens of A requests fared, by their place in the chain.

    In `reached_AJ` rounds the draft tokens before place j were right, in `accepted_AJ` of these the
    one at j too. `tried` counts draft tokens.
    """

    tried: int
    reached_AJ: np.ndarray
    accepted_AJ: np.ndarray

    @property
    def rounds(self) -> int:
        return int(self.reached_AJ[:, 0].sum())

    @property
    def accepted(self) -> int:
        return int(self.accepted_AJ.sum())


def judge(counts_AR: np.ndarray, tried_AR: np.ndarray, num_nodes: int) -> LookupOutcome:
    """What `unpack` says of these requests' draft tokens."""
    longer_AN = (counts_AR[:, :, None] > np.arange(num_nodes)).sum(axis=1)
    return LookupOutcome(int(tried_AR.sum()), longer_AN[:, :-1], longer_AN[:, 1:])


def unpack(
    packed: jax.Array, max_rounds: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tokens_BX, logprobs_BX, counts_BR, tried_BR) on the host: waits for the device."""
    packed_BY = np.asarray(packed)
    R = max_rounds
    X = packed_BY.shape[1] // 2 - R
    logprobs_BX = packed_BY[:, X : 2 * X].view(np.float32)
    return packed_BY[:, :X], logprobs_BX, packed_BY[:, 2 * X : -R], packed_BY[:, -R:]

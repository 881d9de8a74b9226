"""A draft model one round ahead of verification, with drafts for each outcome of a chain.

While a chain of k draft tokens is verified, its first 0 … k tokens may be accepted, and a policy
token follows. For each case, the draft model guesses the `fan_out` likeliest next tokens and drafts
a chain after each guess (as in the decoupled drafts of SGLang and in SSD, arXiv 2603.03251). With
shared noise, the draw of the draft model is the first guess, unless it has just been rejected.

B = rows of the cache, K = draft tokens of a chain, Z = K + 1 cases, F = guesses of a case, E = Z ·
F branches, W = tokens of the first pass, X = columns of the branches' nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.attention.attention import attend_both
from reprise.models.attention.entries import KEY_AXIS, VALUE_AXIS, pin
from reprise.models.attention.kv_cache import KVCache, pinned
from reprise.models.decoder import transformer
from reprise.models.decoder.layers import rope_turns
from reprise.models.sharding import replicated
from reprise.spec.draft_cache.drafting import Inputs, RowEnds, unpack_ends
from reprise.spec.draft_model.drafter import ChainDrafting, DraftModelDrafter, run_tokens
from reprise.spec.drafter import Arguments, LiveSlots, Program
from reprise.spec.verification import sampling


@dataclasses.dataclass(frozen=True)
class Enumeration:
    """The static arguments: how a draft model draws, its longest chain, and guesses per case."""

    drafting: ChainDrafting
    window: int
    fan_out: int

    @property
    def num_branches(self) -> int:
        return (self.window + 1) * self.fan_out


@partial(jax.jit, static_argnames="enumeration", donate_argnames="cache")
def enumerate_cases(
    given: Inputs,
    cache: KVCache,
    table_RX: jax.Array,
    chain_RK: jax.Array,
    depth: jax.Array,
    *,
    enumeration: Enumeration,
) -> tuple[KVCache, jax.Array]:
    """Draft after every case of the row chains; return the cache, and int32 [R, Z, F, 2 + 2 K].

    `chain_RK` holds draft tokens, then −1. A branch holds a guess, a chain of `depth` tokens after
    it, a second choice for each chain token, and the bits of the guess probability.
    """
    (params, _, key, _), _ = given
    ends = unpack_ends(table_RX)
    K = enumeration.window
    cases = _Cases(enumeration, params, ends, chain_RK, key)
    hidden_RZD, cache = cases.first_pass(cache)
    guess_RZF, prob_RZF = cases.guesses(hidden_RZD)
    R, Z, F = guess_RZF.shape
    chains_RE2K = cases.chains(cache, guess_RZF.reshape(R, Z * F), depth)
    bits_RZF1 = jax.lax.bitcast_convert_type(prob_RZF, jnp.int32)[..., None]
    parts = guess_RZF[..., None], chains_RE2K.reshape(R, Z, F, 2 * K), bits_RZF1
    return pinned(cache), replicated(jnp.concatenate(parts, axis=-1))


def unpack(packed: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens_RZFN, second_RZFK, prob_RZF): guesses with chains, and second choices."""
    array = np.asarray(packed)
    N = array.shape[-1] // 2
    tokens_RZFN, second_RZFK, bits_RZF1 = np.split(array, (N, 2 * N - 1), axis=-1)
    return tokens_RZFN, second_RZFK, np.ascontiguousarray(bits_RZF1[..., 0]).view(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class _Cases:
    """The constants of one call."""

    enumeration: Enumeration
    params: Any
    ends: RowEnds
    chain_RK: jax.Array
    key: jax.Array

    def first_pass(self, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Run missing tokens and chains; return hidden states from the root on, [R, Z, D]."""
        ends = self.ends
        W = self.ends.tokens_BW.shape[1]
        K = self.enumeration.window
        start_R = ends.starts(0, cache.num_positions)
        own_R1 = jnp.minimum(ends.total_B, W)[:, None]  # tokens before the chain
        at_RX = jnp.arange(W + K) - own_R1
        behind_RX = jnp.take_along_axis(self.chain_RK, jnp.clip(at_RX, 0, K - 1), axis=1)
        tokens_RX = jnp.pad(ends.tokens_BW, ((0, 0), (0, K)))
        tokens_RX = jnp.where(at_RX < 0, tokens_RX, behind_RX)
        config = self.enumeration.drafting.config
        hidden_RXD, cache = run_tokens(config, self.params, cache, tokens_RX, start_R)
        of_case_RZ1 = (own_R1 - 1 + jnp.arange(K + 1))[..., None]
        return jnp.take_along_axis(hidden_RXD, of_case_RZ1, axis=1), cache

    def guesses(self, hidden_RZD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the likeliest tokens of each case, and their probabilities; [R, Z, F]."""
        F = self.enumeration.fan_out
        scheme = self.enumeration.drafting.scheme
        logits_RZV = transformer.head(self.enumeration.drafting.config, self.params, hidden_RZD)
        processing = self.ends.processing
        temperature_RZ, top_k_RZ, top_p_RZ = processing.broadcast(hidden_RZD.shape[:2])
        cut_RZV = sampling.processed_logits(logits_RZV, temperature_RZ, top_k_RZ, top_p_RZ)
        rejected_RZ = jnp.pad(self.chain_RK, ((0, 0), (0, 1)), constant_values=-1)
        is_rejected_RZV = rejected_RZ[..., None] == jnp.arange(logits_RZV.shape[-1])
        logprob_RZV = jax.nn.log_softmax(jnp.where(is_rejected_RZV, sampling.LEAST, cut_RZV))
        ranked_RZV = logprob_RZV
        if scheme is not None:
            keys_RZ = self._noise(jnp.arange(hidden_RZD.shape[1])[None])
            ranked_RZV = sampling.rank_draws(cut_RZV, keys_RZ, temperature_RZ, scheme)
        ranked_RZV = jnp.where(is_rejected_RZV, -jnp.inf, ranked_RZV)
        _, guess_RZF = jax.lax.top_k(ranked_RZV, F)
        prob_RZF = jnp.exp(jnp.take_along_axis(logprob_RZV, guess_RZF, axis=-1))
        return guess_RZF.astype(jnp.int32), prob_RZF

    def chains(self, cache: KVCache, guess_RE: jax.Array, depth: jax.Array) -> jax.Array:
        """Return `depth` tokens after each guess, and second choices, then 0; [R, E, 2, K]."""
        R, E = guess_RE.shape
        K = self.enumeration.window
        X = self.enumeration.window * E
        model = self.enumeration.drafting.config
        shape = R, model.num_kv_heads, model.head_dim, X
        keys = pin(jnp.zeros(shape, cache.keys[0].dtype))
        values = pin(jnp.zeros((*shape[:2], X, shape[2]), cache.values[0].dtype))
        columns = tuple((keys, values) for _ in range(model.num_layers))

        def level(carry: Any) -> Any:
            j, token_RE, columns, out_RE2K = carry
            hidden_RED, columns = self._level(held, columns, token_RE, j)
            best_RE2 = self._best_two(hidden_RED, j)
            out_RE2K = jax.lax.dynamic_update_slice(out_RE2K, best_RE2[..., None], (0, 0, 0, j))
            return j + 1, best_RE2[..., 0], columns, out_RE2K

        # nodes of a row see different numbers of its positions: one copy of its pages, in order
        held = tuple(cache.layer(i).whole_slots() for i in range(model.num_layers))
        start = jnp.int32(0), guess_RE, columns, jnp.zeros((R, E, 2, K), jnp.int32)
        going = lambda carry: carry[0] < jnp.minimum(depth, K)  # noqa: E731
        return jax.lax.while_loop(going, level, start)[3]

    @property
    def _case_E(self) -> np.ndarray:
        """The number of chain tokens that each branch assumes accepted."""
        return np.arange(self.enumeration.num_branches) // self.enumeration.fan_out

    def _level(
        self, held: Any, columns: Any, token_RE: jax.Array, j: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Run one node per branch, j tokens after its guess; return hidden states and columns."""
        config = self.enumeration.drafting.config
        E = token_RE.shape[1]
        total_R1 = self.ends.total_B[:, None]
        rope = rope_turns(config, total_R1 + self._case_E + j)
        seen_RES = jnp.arange(held[0][0].shape[-1]) < (total_R1 + self._case_E)[..., None]
        column_X = np.arange(columns[0][0].shape[-1])
        own_EX = (column_X % E == np.arange(E)[:, None]) & (column_X // E <= j)
        own_REX = jnp.broadcast_to(own_EX, (len(token_RE), *own_EX.shape))
        x_RED = transformer.embed(self.params.embedding_VD, token_RE)
        new = []

        def look(
            cached: tuple[jax.Array, jax.Array], beside: tuple[jax.Array, jax.Array]
        ) -> transformer.Attend:
            def attend(q_REHh: jax.Array, k_REKh: jax.Array, v_REKh: jax.Array) -> jax.Array:
                k_RKhE = k_REKh.transpose(0, 2, 3, 1)
                v_RKEh = v_REKh.transpose(0, 2, 1, 3)
                put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=j * E)
                keys = pin(put(beside[0], k_RKhE.astype(beside[0].dtype), axis=KEY_AXIS))
                values = put(beside[1], v_RKEh.astype(beside[1].dtype), axis=VALUE_AXIS)
                new.append((keys, pin(values)))
                return attend_both(q_REHh, (*cached, seen_RES), (*new[-1], own_REX))

            return attend

        for i, layer in enumerate(self.params.layers):
            attend = look(held[i], columns[i])
            x_RED = transformer.block(config, layer, x_RED, rope, attend)
        hidden_RED = transformer.rms_norm(x_RED, self.params.final_norm_D, config.norm_eps)
        return hidden_RED, tuple(new)

    def _best_two(self, hidden_RED: jax.Array, j: jax.Array) -> jax.Array:
        """Return the next token of each branch and the second choice for it, [R, E, 2]."""
        drafting = self.enumeration.drafting
        logits_REV = transformer.head(drafting.config, self.params, hidden_RED)
        if (scheme := drafting.scheme) is not None:
            processing = self.ends.processing
            temperature_RE, top_k_RE, top_p_RE = processing.broadcast(logits_REV.shape[:2])
            cut_REV = sampling.processed_logits(logits_REV, temperature_RE, top_k_RE, top_p_RE)
            keys_RE = self._noise(self._case_E[None] + 1 + j)
            logits_REV = sampling.rank_draws(cut_REV, keys_RE, temperature_RE, scheme)
        return jax.lax.top_k(logits_REV, 2)[1].astype(jnp.int32)

    def _noise(self, ahead_1N: jax.Array) -> jax.Array:
        """Return the noise keys of positions `ahead` of the end of each response, [R, N]."""
        keys_R = sampling.request_keys(self.key, self.ends.request_id_B)
        return sampling.position_keys(keys_R, self.ends.emitted_B[:, None] + ahead_1N)


class AheadDraftModel(DraftModelDrafter):
    """A draft model of a drafting worker, for texts that end with unverified draft tokens."""

    def note_drafts(
        self, live: LiveSlots, rows_A: np.ndarray, tokens_AX: np.ndarray, count_A: np.ndarray
    ) -> None:
        super().note_drafts(live, rows_A, tokens_AX, count_A)
        self._held.rows.drafted_B[rows_A] = 0


class EnumeratingDraftModel(AheadDraftModel):
    """A draft model that drafts for each case of the chains under verification."""

    def outcomes(
        self, live: LiveSlots, chain_AK: np.ndarray, depth: int, fan_out: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (tokens_AZFN, second_AZFK, prob_AZF): drafts for each outcome of each chain.

        After i accepted tokens there are F guesses with probabilities. Each guess has a chain of
        `depth` tokens with second choices; the rest is 0. `chain_AK` is padded with −1.
        """
        held = self._held
        inputs = (self.constants(), self.features())
        A, K = chain_AK.shape
        count_A = (chain_AK >= 0).sum(axis=1)
        rows_A, _ = held.follow(live, live, inputs)
        table_RX = held.ends(live, rows_A, np.ones(A, np.int32), self._sampling)
        chain_RK = np.full((len(held.rows), K), -1, np.int32)
        chain_RK[rows_A] = chain_AK
        enumeration = Enumeration(self._drafting, K, fan_out)
        held.arrays, packed = enumerate_cases(
            inputs,
            held.taken(),
            table_RX,
            self._argument(chain_RK),
            np.int32(depth),
            enumeration=enumeration,
        )
        self.note_drafts(live, rows_A, chain_AK, count_A.astype(np.int32))
        tokens_RZFN, second_RZFK, prob_RZF = unpack(packed)
        return tokens_RZFN[rows_A], second_RZFK[rows_A], prob_RZF[rows_A]

    def enumerating(self, num_slots: int, window: int, fan_out: int) -> Iterator[Program]:
        """Yield the jitted steps of `outcomes` in this bucket, and factories of their arguments."""
        held = self._held

        def given() -> Inputs:
            return self.constants(), ()

        def cases() -> Arguments:
            chain_RK = self._argument(np.full((num_slots, window), -1, np.int32))
            ends = held.empty_ends(num_slots)
            args = given(), held.empty(num_slots), ends, chain_RK, np.int32(1)
            return args, {"enumeration": Enumeration(self._drafting, window, fan_out)}

        yield enumerate_cases, cases
        yield from held.programs(num_slots, given)

"""The same texts through every pass of a policy, and the bits that each finds.

A text is a prompt and a response, all of whose tokens are given. After each of them but the last, a
pass draws by all schemes, takes the log-probability of the next one, and sums the bits of the
hidden state and of the logits, as integers: any other bit is another sum, but for one in 2³².
Positions take turns: no cut, top-k, top-p. Where the next token is cut, the `cdf` draw's is taken.

Shape suffixes: N positions of all texts, X positions of a pass, B slots, W nodes of a slot,
C tokens of a chunk, S tokens of a text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.attention import kv_cache
from reprise.models.attention.attention import Chunks
from reprise.models.attention.entries import Pending
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.decoder.row_attention import segment_tokens
from reprise.models.decoder.transformer import Params
from reprise.models.sharding import ways_in_use
from reprise.rl.records import packing
from reprise.spec.config import DRAWS
from reprise.spec.verification import nodes as packed_nodes
from reprise.spec.verification import sampling

COUNTS = (*(f"tokens_{draw}" for draw in DRAWS), "logprobs", "hidden", "logits")
TOP_K, TOP_P = 20, 0.9
UNUSED_PAGES = 3  # of each part of the devices; an odd number of pages is not split
WAITS = 0.2  # of slots in a round of decoding: their positions come apart


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    group_id: int
    prompt: np.ndarray
    response: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.response])


class Found(NamedTuple):
    """What a pass finds after each token; int32 but for the log-probability. [N]."""

    cdf: Any
    gumbel: Any
    gumbel_blocks: Any
    logprob: Any
    hidden_bits: Any
    logit_bits: Any


class Places(NamedTuple):
    """The group and position of tokens, and the tokens after them; int32 [X]."""

    group: np.ndarray
    position: np.ndarray
    following: np.ndarray


def random_texts(
    vocab_size: int,
    num_groups: int,
    group_size: int,
    rng: np.random.Generator,
    prompt_tokens: tuple[int, int] = (3, 40),
    response_tokens: tuple[int, int] = (1, 70),
) -> list[Text]:
    """Return texts of random tokens and lengths; a group's share its prompt."""

    def some(bounds: tuple[int, int]) -> np.ndarray:
        return rng.integers(0, vocab_size, rng.integers(*bounds)).astype(np.int32)

    prompts = [some(prompt_tokens) for _ in range(num_groups)]
    return [
        Text(g, p, some(response_tokens)) for g, p in enumerate(prompts) for _ in range(group_size)
    ]


def _bits(x_X: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x_X.astype(jnp.float32), jnp.int32)
    return jnp.sum(bits * (2 * jnp.arange(x_X.shape[-1], dtype=jnp.int32) + 1), axis=-1)


def _found(
    config: ModelConfig, params: Params, hidden_XD: jax.Array, places: Places, is_training: bool
) -> Found:
    logits_XV = transformer.head(config, params, hidden_XD)
    one_X = jnp.ones(len(hidden_XD))
    cut_X = places.position % 3
    top_k_X = jnp.where(cut_X == 1, TOP_K, 0)
    top_p_X = jnp.where(cut_X == 2, TOP_P, one_X)
    keys_B = sampling.request_keys(sampling.step_key(0, 0), places.group)
    keys_X = sampling.position_keys(keys_B, places.position[:, None])[:, 0]
    processed_XV = sampling.processed_logits(logits_XV, one_X, top_k_X, top_p_X)
    mass = sampling.masses(processed_XV)
    draws: dict[str, jax.Array] = {
        scheme: sampling.draw(processed_XV, keys_X, one_X, scheme, mass)[0] for scheme in DRAWS
    }
    next_logit_X = jnp.take_along_axis(processed_XV, places.following[:, None], axis=1)[:, 0]
    tokens_X = jnp.where(next_logit_X > -jnp.inf, places.following, draws["cdf"])
    if is_training:
        logprob_X, _ = sampling.log_probs(logits_XV, tokens_X, one_X, top_k_X, top_p_X)
    else:
        logprob_X, _ = sampling.given_log_probs(logits_XV, processed_XV, mass, tokens_X, one_X)
    return Found(
        **draws,
        logprob=logprob_X,
        hidden_bits=_bits(hidden_XD),
        logit_bits=_bits(logits_XV),
    )


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _decode(
    config: ModelConfig, params: Params, cache: Any, tokens_B: jax.Array, places: Places
) -> tuple[Found, Any]:
    at = tokens_B[:, None], places.position[:, None], places.position
    hidden_B1D, cache, _ = transformer.hidden_with_cache(config, params, cache, *at)
    return _found(config, params, hidden_B1D[:, 0], places, False), cache


@partial(jax.jit, static_argnames=("config", "max_nodes"), donate_argnames="cache")
def _verify(
    config: ModelConfig,
    params: Params,
    cache: Any,
    nodes: packed_nodes.Nodes,
    places: Places,
    start_B: jax.Array,
    is_written_X: jax.Array,
    max_nodes: int,
) -> tuple[Found, Any]:
    """Compute nodes and chunks, and write the entries that are accepted."""
    trees = packed_nodes.trees(nodes, len(start_B), max_nodes)
    M, row_X = len(nodes.tokens_M), nodes.slots_M
    given = nodes.tokens_M, places.position[:M], start_B, trees, nodes.chunks
    hidden_XD, entries = transformer.hidden_of_nodes(config, params, cache, *given)
    if nodes.chunks is not None:
        row_X = jnp.concatenate([row_X, nodes.chunks.slot_X])
    order_X, count = jnp.argsort(~is_written_X), jnp.sum(is_written_X, dtype=jnp.int32)
    arrays = entries.keys, entries.values, entries.features
    pending = Pending(*arrays, row_X, places.position, order_X, count)
    return _found(config, params, hidden_XD, places, False), cache.written(pending)


@partial(jax.jit, static_argnames="config")
def _train(
    config: ModelConfig, params: Params, tokens_BT: jax.Array, packed: Any, places: Places
) -> Found:
    hidden_BTD = transformer.hidden(config, params, tokens_BT, packed)
    hidden_XD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    return _found(config, params, hidden_XD, places, True)


class Passes:
    """A policy's passes over texts, with a cache of pages in a random order.

    Pages have `page_tokens` positions (0: as many as the longest text needs), laid out `for_cpu`
    or for accelerators (None: as the device needs). Each pass returns its findings in the order of
    texts and positions.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        texts: Sequence[Text],
        page_tokens: int = 0,
        *,
        for_cpu: bool | None = None,
    ) -> None:
        self.config, self.params, self.texts = config, params, texts
        self.page_tokens = page_tokens
        self.for_cpu = jax.default_backend() == "cpu" if for_cpu is None else for_cpu
        self.end_B = np.array([len(t.tokens) - 1 for t in texts], np.int32)
        self.first_B = np.cumsum(self.end_B) - self.end_B
        self.rng = np.random.default_rng(0)

    def decoded(self, num_slots: int) -> Found:
        """Plain decoding of so many slots, a part of the texts at a time, or some of them twice."""
        taken = _Taken(int(self.end_B.sum()))
        for first in range(0, len(self.texts), num_slots):
            text_B = (first + np.arange(num_slots)) % len(self.texts)
            cache, at_B = self._cache(num_slots), np.zeros(num_slots, np.int32)
            while (at_B < self.end_B[text_B]).any():
                places = self._places(text_B, at_B)
                given = self._tokens(text_B, places.position), places
                found, cache = _decode(self.config, self.params, cache, *given)
                goes_B = self.rng.random(num_slots) >= WAITS
                is_new_B = goes_B & (at_B < self.end_B[text_B])
                taken.put(found, is_new_B, (self.first_B[text_B] + at_B)[is_new_B])
                at_B = at_B + goes_B.astype(np.int32)
        return taken.found

    def verified(self, num_nodes: int) -> Found:
        """Random trees of every text, with its true tokens on one path, which is accepted."""
        B, W = len(self.texts), num_nodes
        cache, at_B, taken = self._cache(B), np.zeros(B, np.int32), _Taken(int(self.end_B.sum()))
        slots = np.repeat(np.arange(B, dtype=np.int32), W)
        while (at_B < self.end_B).any():
            at_B = np.minimum(at_B, self.end_B - 1)
            trees = [self._tree(b, int(at_B[b]), W) for b in range(B)]
            columns = (np.concatenate(x) for x in zip(*trees, strict=True))
            tokens, parents, position, is_true = columns
            parents = np.where(parents < 0, -1, parents + slots * W).astype(np.int32)
            nodes = packed_nodes.Nodes(tokens, slots, parents)
            given = nodes, self._places(slots, position), at_B, is_true
            found, cache = _verify(self.config, self.params, cache, *given, max_nodes=W)
            taken.put(found, is_true, (self.first_B[slots] + position)[is_true])
            at_B = at_B + is_true.reshape(B, W).sum(axis=1, dtype=np.int32)
        return taken.found

    def _tree(self, b: int, start: int, num_nodes: int) -> tuple[np.ndarray, ...]:
        """Return tokens, parents, positions, and which nodes are the text's own."""
        true = self.texts[b].tokens[start : self.end_B[b]]
        depth = int(self.rng.integers(1, min(num_nodes, len(true)) + 1))
        is_true = np.zeros(num_nodes, bool)
        is_true[[0, *self.rng.permutation(np.arange(1, num_nodes))[: depth - 1]]] = True
        tokens = self.rng.integers(0, self.config.vocab_size, num_nodes).astype(np.int32)
        tokens[is_true] = true[:depth]
        parents, position, last = np.full(num_nodes, -1), np.full(num_nodes, start), 0
        for w in range(1, num_nodes):
            parents[w] = last if is_true[w] else self.rng.integers(0, w)
            position[w] = position[parents[w]] + 1
            last = w if is_true[w] else last
        return tokens, parents, position, is_true

    def chunked(self, num_tokens: int, num_chunks: int) -> Found:
        """Known tokens by chunks, up to so many of a text in a round, beside its root."""
        B, C = len(self.texts), num_tokens
        cache, at_B, taken = self._cache(B), np.zeros(B, np.int32), _Taken(int(self.end_B.sum()))
        nodes = packed_nodes.roots(jnp.zeros(B, jnp.int32))
        while (at_B < self.end_B).any():
            table, first_B, last_B = np.zeros((B * num_chunks, 2 + C), np.int32), at_B, at_B.copy()
            table[:, 0], rows = -1, iter(table)
            for _ in range(num_chunks):
                for b in np.flatnonzero(last_B < self.end_B):
                    tokens = self.texts[b].tokens[last_B[b] : last_B[b] + C]
                    next(rows)[: 2 + len(tokens)] = [b, last_B[b], *tokens]
                    last_B[b] += C
            chunks = Chunks.of_table(jnp.asarray(table), are_apart=num_chunks == 1)
            slot_X = np.concatenate([np.arange(B), np.repeat(table[:, 0], C)])
            position_X = np.concatenate([first_B, np.asarray(chunks.positions_TC).reshape(-1)])
            is_new_X = (slot_X >= 0) & (position_X < self.end_B[slot_X])
            is_new_X[:B] = False
            places = self._places(slot_X, position_X)
            given = dataclasses.replace(nodes, chunks=chunks), places, first_B, is_new_X
            found, cache = _verify(self.config, self.params, cache, *given, max_nodes=1)
            taken.put(found, is_new_X, (self.first_B[slot_X] + position_X)[is_new_X])
            at_B = last_B
        return taken.found

    def trained(self, row_tokens: int) -> Found:
        """Packed rows, as the trainer's; prompts are shared."""
        pairs = enumerate(self.texts)
        responses = [packing.Response(str(i), t.group_id, t.prompt, t.response) for i, t in pairs]
        shape = packing.Shape(2, row_tokens, 32, block=segment_tokens())
        taken = _Taken(int(self.end_B.sum()))
        for rows in packing.plan(responses, shape):
            out = packing.lay_out(responses, rows, shape)
            text_X, position_X = np.zeros((2, out.tokens_BT.size), np.int32)
            parts = []
            for i, start, first in zip(out.order, out.starts, out.prompt_starts, strict=True):
                prompt = shape.prompt_places(responses[i], first, start)
                response = len(self.texts[i].response)
                row_S = np.concatenate([prompt, start + np.arange(response)])
                text_X[row_S], position_X[row_S] = i, np.arange(self.end_B[i])
                parts.append((row_S, self.first_B[i] + np.arange(self.end_B[i])))
            places = self._places(text_X, position_X)
            given = out.tokens_BT, out.packing, places
            found = jax.device_get(_train(self.config, self.params, *given))
            for row_S, at_S in parts:
                taken.put(found, row_S, at_S)
        return taken.found

    def _tokens(self, text_X: np.ndarray, position_X: np.ndarray) -> np.ndarray:
        pairs = zip(text_X, position_X, strict=True)
        return np.array([self.texts[i].tokens[at] for i, at in pairs], np.int32)

    def _places(self, text_X: np.ndarray, position_X: np.ndarray) -> Places:
        """Return places; those after a text's are its last one."""
        position_X = np.minimum(position_X, self.end_B[text_X] - 1).astype(np.int32)
        group_X = np.array([self.texts[i].group_id for i in text_X], np.int32)
        return Places(group_X, position_X, self._tokens(text_X, position_X + 1))

    def _cache(self, num_slots: int) -> Any:
        """Return a cache whose entries are NaN, which no sum may hold."""
        size, dtype = int(self.end_B.max()) + 64, self.params.final_norm_D.dtype

        def nan(shape: tuple[int, ...], dtype: Any, _: Any) -> jax.Array:
            return jnp.full(shape, 0 if dtype == jnp.int32 else jnp.nan, dtype)

        page_tokens = self.page_tokens or size
        slot_pages = -(-size // page_tokens)
        ways = ways_in_use("batch")
        if num_slots % ways:
            ways = 1
        used = num_slots // ways * slot_pages
        each = used + (UNUSED_PAGES if self.page_tokens else 0)
        parts = [part * each + self.rng.permutation(each)[:used] for part in range(ways)]
        table_BN = np.concatenate(parts).reshape(num_slots, slot_pages).astype(np.int32)
        cache = kv_cache.init(
            self.config,
            num_slots=num_slots,
            slot_pages=slot_pages,
            num_pages=ways * each,
            page_tokens=page_tokens,
            dtype=dtype,
            for_cpu=self.for_cpu,
            zeros=nan,
        )
        return dataclasses.replace(cache, table_BN=jnp.asarray(table_BN))


class _Taken:
    """Findings of the positions of all texts."""

    def __init__(self, num_positions: int) -> None:
        whole = np.zeros(num_positions, np.int32)
        floats = np.full(num_positions, np.nan, np.float32)
        self.found = Found(
            cdf=whole.copy(),
            gumbel=whole.copy(),
            gumbel_blocks=whole.copy(),
            logprob=floats,
            hidden_bits=whole.copy(),
            logit_bits=whole.copy(),
        )

    def put(self, found: Found, rows: np.ndarray, at: np.ndarray) -> None:
        for here, new in zip(self.found, jax.device_get(found), strict=True):
            here[at] = new[rows]


def differences(one: Found, other: Found) -> dict[str, Any]:
    """Return how many positions differ, and how far log-probabilities are apart at most."""
    pairs = zip(one, other, strict=True)
    differ = {n: int((a != b).sum()) for n, (a, b) in zip(COUNTS, pairs, strict=True)}
    apart = np.abs(one.logprob - other.logprob).max(initial=0.0)
    return {"positions": len(one.cdf), **differ, "max_logprob_difference": float(apart)}

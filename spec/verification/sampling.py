"""The sampler: token(r, t) = draw(processed_logits(r, t), noise(r, t)).

The noise depends only on the identity of the request and the position of the token in its response.
So a rollout is a function of its seed, however it was batched, split or drafted, if its logits are;
docs/architecture.md, Exactness, names the devices that compute the same bits in all passes. All
arithmetic here is float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from reprise.models.decoder.layers import PRODUCT_AXES, sum_in_order
from reprise.models.sharding import constrain, ways_in_use
from reprise.spec.config import Draw, SamplingConfig
from reprise.spec.verification import draw_schemes

KEY_IMPL = "threefry2x32"  # named, so that a new default in jax changes no rollout
NOISE_NAMES = 2**31  # number of noise names of requests
Axes = tuple[str, str]  # logical names of the first axis of logits, and of the vocabulary axis
ROLLOUT_AXES: Axes = PRODUCT_AXES
WHOLE_MASS = 2**30  # mass of the most likely token if masses are whole numbers
NORMALIZER = "normalizer"  # name of the sums that gradients of `log_probs` need
LEAST = jnp.finfo(jnp.float32).min / 2  # logit of an impossible token


@struct.dataclass
class Processing:
    """Traced temperature (float32), top-k (int32), top-p (float32): scalars or leading axes."""

    temperature: Any
    top_k: Any
    top_p: Any

    @classmethod
    def of(cls, sampling: SamplingConfig) -> Processing:
        """Return the scalars of a configuration."""
        return cls(
            np.float32(sampling.temperature), np.int32(sampling.top_k), np.float32(sampling.top_p)
        )

    @classmethod
    def filled(cls, sampling: SamplingConfig, shape: tuple[int, ...]) -> Processing:
        """Return host arrays of a shape, filled with the settings of a configuration."""
        one = cls.of(sampling)
        return cls(*(np.full(shape, x) for x in (one.temperature, one.top_k, one.top_p)))

    def put(self, where: Any, sampling: SamplingConfig) -> None:
        """Write the settings of a configuration into the flattened host arrays at `where`."""
        one = Processing.of(sampling)
        for name, array in vars(self).items():
            array.reshape(-1)[where] = getattr(one, name)

    def broadcast(self, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (temperature, top_k, top_p), broadcast to a shape that starts with their axes."""

        def one(x: Any) -> jax.Array:
            x = jnp.asarray(x)
            return jnp.broadcast_to(x.reshape(x.shape + (1,) * (len(shape) - x.ndim)), shape)

        return one(self.temperature), one(self.top_k), one(self.top_p)


def step_key(seed: int, step: int) -> jax.Array:
    """Return the key of one rollout: fold_in(key(seed), step)."""
    return jax.random.fold_in(jax.random.key(seed, impl=KEY_IMPL), step)


def noise_names(request_ids: np.ndarray) -> np.ndarray:
    """Return the noise names of requests, ids modulo 2³¹; live requests may share a name."""
    return request_ids % NOISE_NAMES


def request_keys(key: jax.Array, names_B: jax.Array) -> jax.Array:
    """Return fold_in(step_key, name) for the `noise_names` of requests; a key array [B]."""
    return jax.vmap(lambda r: jax.random.fold_in(key, r))(names_B)


def position_keys(keys_B: jax.Array, positions_BN: jax.Array) -> jax.Array:
    """Return fold_in(request_key, t) for every node; a key array [B, N]."""
    return jax.vmap(lambda k, ts: jax.vmap(lambda t: jax.random.fold_in(k, t))(ts))(
        keys_B, positions_BN
    )


def _flipped(bits: jax.Array) -> jax.Array:
    """Map the bits of float32 numbers to int32 of the same order, or such integers back to bits."""
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _threshold(values_V: jax.Array, is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the largest x with `is_enough(values ≥ x)`, by 32 bisections of float32."""

    def ordered(x: jax.Array) -> jax.Array:
        x = jnp.where(x == 0, 0.0, x)  # −0 is 0
        return _flipped(jax.lax.bitcast_convert_type(x, jnp.int32))

    order_V = ordered(values_V)
    low = ordered(jnp.min(values_V, axis=-1))  # always enough
    high = ordered(jnp.max(values_V, axis=-1))

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        # the upper middle of two int32 without overflow
        middle = (low | high) - ((low ^ high) >> 1)
        ok = is_enough(order_V >= middle[..., None])
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return jax.lax.bitcast_convert_type(_flipped(low), jnp.float32)


def _apart(x: jax.Array) -> jax.Array:
    """Return x through a select, which keeps XLA from fusing across it.

    On CPUs some programs compute a reduction and the elementwise operations before it in a library;
    its exp and log have other bits than XLA's.
    """
    return jnp.where(x == x, x, jnp.nan)


def _whole_masses(logits_V: jax.Array) -> jax.Array:
    """Return e^(logit − top) as whole numbers of 2⁻³⁰; uint32 [..., V]."""
    top = _apart(jnp.max(logits_V, axis=-1))
    mass_V = jnp.exp(logits_V - top[..., None])
    return jnp.round(mass_V * np.float32(WHOLE_MASS)).astype(jnp.uint32)


def _whole_sum(mass_V: jax.Array) -> jax.Array:
    """Return the sum of whole masses, rounded to float32 only at the end; [...].

    Neither the order of the terms nor the mesh changes the sum: three words of 10 bits are summed
    separately, in one pass, and none overflows for V < 2²².
    """
    words = mass_V >> 20, (mass_V >> 10) & 1023, mass_V & 1023

    def add(one: tuple, other: tuple) -> tuple:
        return tuple(a + b for a, b in zip(one, other, strict=True))

    zeros = (np.uint32(0),) * len(words)
    sums = jax.lax.reduce(words, zeros, add, dimensions=(mass_V.ndim - 1,))
    high, middle, low = (x.astype(jnp.float32) for x in sums)
    return high * np.float32(2**20) + middle * np.float32(2**10) + low  # products are exact


def processed_logits(
    logits_V: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array | None = None,
    top_p: jax.Array | None = None,
) -> jax.Array:
    """Return logits after temperature, then top-k, then top-p; float32, −inf where cut.

    `logits_V` is [..., V]; the parameters have the leading shape and are traced, so that changing
    them compiles nothing. top-p keeps the smallest set of most likely tokens with a mass (after
    top-k) of at least p. Without them, nothing is cut. Rows of temperature 0 keep their unscaled
    logits.
    """
    greedy = temperature <= 0
    scale = jnp.where(greedy, 1.0, temperature)
    logits_V = logits_V.astype(jnp.float32) / scale[..., None]
    if top_k is None or top_p is None:
        return logits_V

    def least_k() -> jax.Array:
        def is_enough(kept_V: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(kept_V, 1.0, 0.0), axis=-1) >= top_k.astype(jnp.float32)

        return _threshold(logits_V, is_enough)

    cut_k = _where_any((top_k > 0) & ~greedy, least_k)

    def least_p() -> jax.Array:
        left_V = _without(logits_V, cut_k)
        mass_V = _whole_masses(left_V)
        enough = top_p * _whole_sum(mass_V)

        def is_enough(kept_V: jax.Array) -> jax.Array:
            return _whole_sum(jnp.where(kept_V, mass_V, 0)) >= enough

        return _threshold(left_V, is_enough)

    return _without(logits_V, jnp.maximum(cut_k, _where_any((top_p < 1) & ~greedy, least_p)))


def _where_any(cuts: jax.Array, least: Callable[[], jax.Array]) -> jax.Array:
    """Return `least()` for the rows that are cut, −inf for the others.

    The conditional returns no logits: XLA for GPUs would gather them on every device.
    """
    nothing = jnp.full(cuts.shape, -jnp.inf)
    return jax.lax.cond(jnp.any(cuts), lambda: jnp.where(cuts, least(), nothing), lambda: nothing)


def _without(logits_V: jax.Array, least: jax.Array) -> jax.Array:
    return jnp.where(logits_V < least[..., None], -jnp.inf, logits_V)


def block_tokens(vocab_size: int) -> int:
    """Return the number of tokens in a block, W: a power of two of about √V."""
    return 2 ** math.ceil(math.log2(vocab_size) / 2)


def _blocks(mass_V: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """Return masses in blocks, [..., C', W], and the mass of each, [..., C], by `sum_in_order`.

    The C blocks hold the vocabulary, however it is split; C' − C more blocks are padding.
    """
    V = mass_V.shape[-1]
    W = block_tokens(V)
    rows_axis, vocab_axis = axes
    # equal block counts for all parts of the vocabulary; else every device would gather it whole
    over = -V % (W * ways_in_use(vocab_axis))
    mass_CW = jnp.pad(mass_V, [(0, 0)] * (mass_V.ndim - 1) + [(0, over)])
    mass_CW = mass_CW.reshape(*mass_V.shape[:-1], -1, W)
    rows = (rows_axis, *[None] * mass_V.ndim)[: mass_V.ndim - 1]
    mass_CW = constrain(mass_CW, *rows, vocab_axis, None)
    # gather, then cut: XLA fails to partition the reverse order if the cut splits a part
    mass_C = constrain(sum_in_order(mass_CW), *rows, None)
    return mass_CW, mass_C[..., : -(-V // W)]


class Masses(NamedTuple):
    """e^(logit − top) in `_blocks`, [..., C', W] and [..., C], the top and log Σ of all, [...]."""

    of_tokens_CW: jax.Array
    of_blocks_C: jax.Array
    top: jax.Array
    log_total: jax.Array


def masses(logits_V: jax.Array, axes: Axes = ROLLOUT_AXES) -> Masses:
    """Return the masses of processed logits [..., V]."""
    top = jnp.max(logits_V, axis=-1)
    mass_CW, mass_C = _blocks(jnp.exp(logits_V - top[..., None]), axes)
    return Masses(mass_CW, mass_C, top, jnp.log(sum_in_order(mass_C)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _normalizer(logits_V: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """Return `Masses.top` and `log_total`; `log_total` gets the derivative of their sum."""
    top = jnp.max(logits_V, axis=-1)
    return top, jnp.log(_sum_of_blocks(jnp.exp(logits_V - top[..., None]), axes))


def _sum_of_blocks(mass_V: jax.Array, axes: Axes) -> jax.Array:
    """Return Σ as `masses` adds; the barrier keeps XLA for GPUs from reading the logits twice."""
    _, mass_C = _blocks(mass_V, axes)
    return sum_in_order(jax.lax.optimization_barrier(mass_C))


@_normalizer.defjvp
def _(axes: Axes, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    (logits_V,) = primals
    (tangent_V,) = tangents
    top, log_total = _normalizer(logits_V, axes)
    total = checkpoint_name(top + log_total, NORMALIZER)
    prob_V = jnp.exp(logits_V - total[..., None])
    return (top, log_total), (jnp.zeros_like(top), jnp.sum(prob_V * tangent_V, axis=-1))


def rank_draws(
    logits_V: jax.Array, keys: jax.Array, temperature: jax.Array, scheme: Draw
) -> jax.Array:
    """Return scores [..., V]: highest for the draw, then for draws of similar distributions."""
    greedy = temperature[..., None] <= 0
    if scheme == "gumbel":
        return jnp.where(greedy, logits_V, draw_schemes.noisy(logits_V, keys))
    mass = masses(logits_V)
    score_V = logits_V
    if scheme == "gumbel_blocks":
        score_V = draw_schemes.ranked_blocks(logits_V, mass.of_tokens_CW, mass.of_blocks_C, keys)
        score_V = jnp.where(greedy, logits_V, score_V)
    drawn, _ = draw(logits_V, keys, temperature, scheme, mass)
    return jnp.where(jnp.arange(logits_V.shape[-1]) == drawn[..., None], jnp.inf, score_V)


def draw(
    logits_V: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    scheme: Draw,
    mass: Masses | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draw tokens from processed logits [..., V], one key per row; return their log-probs too.

    Rows of temperature 0 take the argmax (the first of equal logits). Log-probabilities are of the
    processed distribution; at temperature 0, of the unscaled distribution. `mass` holds the masses
    of the logits.
    """
    mass = mass or masses(logits_V)
    if scheme == "gumbel":
        tokens = jnp.argmax(draw_schemes.noisy(logits_V, keys), axis=-1).astype(jnp.int32)
    else:
        draw_token = draw_schemes.cdf if scheme == "cdf" else draw_schemes.gumbel_blocks
        tokens = draw_token(mass.of_tokens_CW, mass.of_blocks_C, keys)
    greedy = temperature <= 0
    tokens = jax.lax.cond(
        jnp.any(greedy),
        lambda: jnp.where(greedy, jnp.argmax(logits_V, axis=-1).astype(jnp.int32), tokens),
        lambda: tokens,
    )
    picked = jnp.take_along_axis(logits_V, tokens[..., None], axis=-1)[..., 0]
    return tokens, picked - mass.top - mass.log_total


def log_probs(
    logits_V: jax.Array,
    tokens: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array | None = None,
    top_p: jax.Array | None = None,
    axes: Axes = ROLLOUT_AXES,
) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of given tokens, and the entropy, of the processed distribution.

    For training; the log-probability has the same bits as in `draw`. A given token that top-k or
    top-p would cut now is put back into its row, so that its log-probability and gradient stay
    finite. `logits_V` is [..., V], the rest [...]; `axes` are the logical names of its first axis
    and of V.
    """
    raw_V = logits_V.astype(jnp.float32) / jnp.where(temperature <= 0, 1.0, temperature)[..., None]
    given_V = jnp.arange(raw_V.shape[-1]) == tokens[..., None]
    kept_V = raw_V
    if top_k is not None and top_p is not None:
        cut_V = jax.lax.stop_gradient(processed_logits(logits_V, temperature, top_k, top_p))
        kept_V = jnp.where((cut_V > -jnp.inf) | given_V, raw_V, -jnp.inf)
    top, log_total = _normalizer(kept_V, axes)
    # zeros that depend on the tokens: a loop over tokens would keep an array of constant zeros
    zeros_1 = (tokens * 0).astype(jnp.float32)[..., None]
    raw = checkpoint_name(jnp.sum(jnp.where(given_V, raw_V, zeros_1), axis=-1), NORMALIZER)
    token_logprob = _apart(raw) - top - log_total  # the sum is not fused with `log_total`
    return token_logprob, _entropy(kept_V, top, log_total, axes)


def _entropy(logits_V: jax.Array, top: jax.Array, log_total: jax.Array, axes: Axes) -> jax.Array:
    """Return −Σ p log p = log Σ m − Σ m (logit − top) / Σ m, m = e^(logit − top); [...].

    It sums in the order of `masses`, so that XLA computes both in one pass.
    """
    less_V = logits_V - top[..., None]
    terms_V = jnp.exp(less_V) * jnp.maximum(less_V, LEAST)  # 0 for −∞
    return log_total - _sum_of_blocks(terms_V, axes) * jnp.exp(-log_total)


def given_log_probs(
    logits_V: jax.Array | None,
    processed_V: jax.Array,
    mass: Masses,
    tokens: jax.Array,
    temperature: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of given tokens, as `log_probs`, and whether they can be drawn.

    `processed_V` are the processed `logits_V`, and `mass` their masses. A token that was cut is put
    back into its row; `logits_V` is None if nothing is cut. Returns (float32 [...], bool [...]).
    """

    def of_tokens(x_V: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x_V, tokens[..., None], axis=-1)[..., 0]

    processed = of_tokens(processed_V)
    possible = processed > -jnp.inf
    raw = processed
    if logits_V is not None:
        raw = of_tokens(logits_V.astype(jnp.float32)) / jnp.where(
            temperature <= 0, 1.0, temperature
        )
    put_back = raw - jnp.logaddexp(mass.top + mass.log_total, raw)
    return jnp.where(possible, raw - mass.top - mass.log_total, put_back), possible

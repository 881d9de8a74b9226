"""Draws from a large vocabulary, by scheme: the price of noise, and draws that an update changes.

`prices`: seconds of the random numbers and searches of a draw over the seconds of a policy's
products with the same rows, in turns. Masses and log-probabilities, which every scheme needs, are
not among them. The shape is SmolLM2-135M's: 8 rows are a round of 8 slots, 128 a pass of chunks.
Medians of ratios, and the least seconds of each: a draw by blocks takes a tenth of a millisecond,
in which a busy machine shows.

`changes`: the share of draws that differ under the same noise after logits have moved by normal
numbers of a deviation. Rows of logits are peaked: some tokens at random places hold most of the
mass. `gumbel_blocks` and `cdf` are drawn with blocks of several sizes; `block_tokens` is theirs in
the sampler.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment
from benchmarks.rounds import products
from benchmarks.turns import in_turns
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.decoder.layers import sum_in_order
from reprise.spec.verification import draw_schemes, sampling

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=49_152,
    d_model=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    d_ff=1536,
    tied_embeddings=True,
)
PEAKS = 12  # likely tokens of a row
AT_ONCE = 32  # rows


def peaked_logits(num_rows: int, vocab_size: int, rng: np.random.Generator) -> np.ndarray:
    """Return rows as of a language model: `PEAKS` tokens of each stand out; float32 [R, V]."""
    logits_RV = 2 * rng.standard_normal((num_rows, vocab_size), np.float32)
    height_RP = 12 + 2 * rng.gumbel(size=(num_rows, 1)) + 2 * rng.standard_normal((num_rows, PEAKS))
    places_RP = rng.integers(0, vocab_size, (num_rows, PEAKS))
    np.put_along_axis(logits_RV, places_RP, height_RP.astype(np.float32), axis=1)
    return logits_RV


@jax.jit
def gumbel(logits_RV: jax.Array, keys_R: jax.Array) -> jax.Array:
    return jnp.argmax(draw_schemes.noisy(logits_RV, keys_R), axis=-1)


cdf = jax.jit(draw_schemes.cdf)
gumbel_blocks = jax.jit(draw_schemes.gumbel_blocks)


def prices(num_rows: int, repeats: int) -> dict[str, Any]:
    """Return seconds of noise over seconds of products, by scheme."""
    params = transformer.init(MODEL, jax.random.key(0))
    rng = np.random.default_rng(0)
    logits_RV = jnp.asarray(peaked_logits(num_rows, MODEL.vocab_size, rng))
    x_R1D = jnp.asarray(rng.standard_normal((num_rows, 1, MODEL.d_model), np.float32))
    keys_R = jax.random.split(sampling.step_key(0, 0), num_rows)
    mass = jax.block_until_ready(jax.jit(sampling.masses)(logits_RV))

    def seconds(run: Callable[..., jax.Array], *given: Any) -> float:
        start_s = time.perf_counter()
        jax.block_until_ready(run(*given))
        return time.perf_counter() - start_s

    taken = in_turns(
        {
            "products": partial(seconds, products, MODEL, params, x_R1D),
            "cdf": partial(seconds, cdf, mass.of_tokens_CW, mass.of_blocks_C, keys_R),
            "gumbel": partial(seconds, gumbel, logits_RV, keys_R),
            "gumbel_blocks": partial(
                seconds, gumbel_blocks, mass.of_tokens_CW, mass.of_blocks_C, keys_R
            ),
        },
        repeats,
    )
    products_T = taken.pop("products")
    found = {"rows": num_rows, "products_ms": 1e3 * float(np.median(products_T))}
    for name, seconds_T in taken.items():
        found[f"{name}_over_products"] = float(np.median(seconds_T / products_T))
        found[f"{name}_over_products_least"] = float(seconds_T.min() / products_T.min())
    return found


@partial(jax.jit, static_argnames="sizes")
def drawn(logits_MRV: jax.Array, keys_R: jax.Array, sizes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Return the draws of each moved distribution with the same noise, by scheme; [M, R]."""
    keys_MR = jnp.broadcast_to(keys_R, logits_MRV.shape[:2])
    of = {"gumbel": gumbel(logits_MRV, keys_MR)}
    mass_MRV = jnp.exp(logits_MRV - jnp.max(logits_MRV, axis=-1, keepdims=True))
    for W in sizes:
        mass_MRCW = mass_MRV.reshape(*mass_MRV.shape[:2], -1, W)
        mass_MRC = sum_in_order(mass_MRCW)
        of[f"gumbel_blocks_{W}"] = gumbel_blocks(mass_MRCW, mass_MRC, keys_MR)
        of[f"cdf_{W}"] = cdf(mass_MRCW, mass_MRC, keys_MR)
    return of


def changes(num_rows: int, moves: tuple[float, ...], sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return the share of draws that differ, by scheme and deviation of the logits' moves."""
    rng = np.random.default_rng(0)
    found = dict[str, list[np.ndarray]]()
    for first in range(0, num_rows, AT_ONCE):
        logits_RV = peaked_logits(AT_ONCE, MODEL.vocab_size, rng)
        moved = [m * rng.standard_normal(logits_RV.shape, np.float32) for m in moves]
        logits_MRV = np.stack([logits_RV, *(logits_RV + by_RV for by_RV in moved)])
        keys_R = jax.random.split(sampling.step_key(0, first), AT_ONCE)
        for name, tokens_MR in drawn(logits_MRV, keys_R, sizes=sizes).items():
            differ_RM = np.asarray(tokens_MR[1:] != tokens_MR[0]).T
            found.setdefault(name, []).append(differ_RM)
    share = {name: np.concatenate(parts).mean(axis=0) for name, parts in found.items()}
    return {
        name: dict(zip(map(str, moves), map(float, x), strict=True)) for name, x in share.items()
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    V = MODEL.vocab_size
    return {
        "vocab_size": V,
        "block_tokens": sampling.block_tokens(V),
        "prices": [prices(rows, arguments.repeats) for rows in arguments.rows],
        "draws": -(-arguments.draws // AT_ONCE) * AT_ONCE,
        "changes": changes(arguments.draws, tuple(arguments.moves), tuple(arguments.blocks)),
    }


if __name__ == "__main__":
    environment.run(
        __doc__,
        measure,
        rows=(8, 128),
        repeats=7,
        draws=4096,
        moves=(0.02, 0.1, 0.3),
        blocks=(16, 64, 256, 1024, 4096),
    )

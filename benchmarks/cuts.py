"""Cuts by top-k and top-p, by the sampler and by the trainer, on one device and on meshes of two.

The same logits go through the draw of a round and through the log-probabilities of training. Rows
take turns: no cut; top-k of logits with many ties; a common top-p; and an edge, a top-p that the
most likely tokens' mass meets within rounding, so that sums in another order keep one token more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.config import MeshConfig
from reprise.models.layout import logits_axes
from reprise.models.sharding import constrain, make_mesh, replicated, sizes_in_use
from reprise.spec.verification import sampling
from reprise.spec.verification.sampling import Processing

MESHES = {
    "one device": None,
    "fsdp=2": MeshConfig(data=1, fsdp=2),
    "tensor=2": MeshConfig(data=1, tensor=2),
}
LOGITS_AT_ONCE = 2**23
TRAINING_ROWS = 2  # of a micro-batch


class Rows(NamedTuple):
    """Logits, float32 [R, V], and what cuts each row, [R]."""

    logits_RV: np.ndarray
    processing: Processing


def random_rows(num_rows: int, vocab_size: int, rng: np.random.Generator) -> Rows:
    """Return rows of every kind; their number is even."""
    logits_RV = 2 * rng.standard_normal((num_rows, vocab_size), np.float32)
    kind_R = np.arange(num_rows) % 4
    ties = kind_R == 1
    logits_RV[ties] = np.round(logits_RV[ties])
    top_p_R = np.ones(num_rows, np.float32)
    top_p_R[kind_R == 2] = rng.choice([0.7, 0.9, 0.95], (kind_R == 2).sum())
    edges = kind_R == 3
    descending = -np.sort(-logits_RV[edges], axis=1).astype(np.float64)
    share = np.cumsum(np.exp(descending - descending[:, :1]), axis=1)
    share /= share[:, -1:]
    likeliest = rng.integers(1, vocab_size // 2, len(share))
    top_p_R[edges] = share[np.arange(len(share)), likeliest]
    top_k_R = np.where(ties, 40, 0).astype(np.int32)
    return Rows(logits_RV, Processing(np.ones(num_rows, np.float32), top_k_R, top_p_R))


@jax.jit
def drawn(rows: Rows, keys_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return tokens and their log-probabilities, as a round does."""
    temperature_R, *cuts_R = rows.processing.broadcast(keys_R.shape)
    logits_RV = constrain(rows.logits_RV, *sampling.ROLLOUT_AXES)
    processed_RV = sampling.processed_logits(logits_RV, temperature_R, *cuts_R)
    return replicated(sampling.draw(processed_RV, keys_R, temperature_R, "cdf"))


@jax.jit
def trained(rows: Rows, tokens_R: jax.Array) -> jax.Array:
    """Return log-probabilities of tokens, as an update does; they have gradients."""
    vocab_size = rows.logits_RV.shape[1]
    axes = logits_axes(sizes_in_use(), vocab_size)

    def in_batch(x: jax.Array) -> jax.Array:
        return x.reshape(TRAINING_ROWS, -1, *x.shape[1:])

    def total(logits_BCV: jax.Array) -> tuple[jax.Array, jax.Array]:
        temperature, top_k, top_p = map(in_batch, rows.processing.broadcast(tokens_R.shape))
        logprobs_BC, _ = sampling.log_probs(
            logits_BCV, in_batch(tokens_R), temperature, top_k, top_p, axes
        )
        return jnp.sum(logprobs_BC), logprobs_BC

    logits_BCV = constrain(in_batch(rows.logits_RV), axes[0], None, axes[1])
    _, logprobs_BC = jax.grad(total, has_aux=True)(logits_BCV)
    return replicated(logprobs_BC.reshape(-1))


def differences(rows: Rows) -> Iterator[dict[str, Any]]:
    """Yield, for each mesh and function, how many rows differ from draws on one device."""
    keys_R = jax.random.split(sampling.step_key(0, 0), len(rows.logits_RV))
    tokens_R = want_R = np.zeros(0)
    for name, config in MESHES.items():
        mesh = None if config is None else make_mesh(config, jax.devices()[:2])
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            here_R, sampled_R = map(np.asarray, drawn(rows, keys_R))
            if mesh is None:
                tokens_R, want_R = here_R, sampled_R
            trained_R = np.asarray(trained(rows, tokens_R))
        for function, found_R in (("sampler", sampled_R), ("trainer", trained_R)):
            yield {
                "devices": name,
                "function": function,
                "rows": len(want_R),
                "tokens": int((here_R != tokens_R).sum()) if function == "sampler" else 0,
                "logprobs": int((found_R != want_R).sum()),
                "max_logprob_difference": float(np.abs(found_R - want_R).max()),
            }


def totals(num_rows: int, vocab_size: int) -> list[dict[str, Any]]:
    """Return the differences of at least so many rows, summed by mesh and function."""
    rng, sums = np.random.default_rng(0), dict[tuple[str, str], dict[str, Any]]()
    at_once = min(4096, LOGITS_AT_ONCE // vocab_size // 2 * 2, -(-num_rows // 4) * 4)
    for _ in range(-(-num_rows // at_once)):
        for row in differences(random_rows(at_once, vocab_size, rng)):
            of = sums.setdefault(
                (row["devices"], row["function"]),
                {"vocab_size": vocab_size} | row | dict.fromkeys(_COUNTS, 0) | {_FARTHEST: 0.0},
            )
            of |= {name: of[name] + row[name] for name in _COUNTS}
            of[_FARTHEST] = max(of[_FARTHEST], row[_FARTHEST])
    return list(sums.values())


_COUNTS, _FARTHEST = ("rows", "tokens", "logprobs"), "max_logprob_difference"

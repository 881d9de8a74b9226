"""Make a weaker policy by adding noise to the weights: a student that its original can teach.

    python -m policies.make.weaken policies/countdown --noise 0.35 --output downloads/countdown_weak

Each matrix gets normal noise of `noise` times its root mean square, as a coarse quantisation would
add; vectors stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp

from reprise.models.config import Params
from reprise.models.formats import hf
from reprise.models.text import tokenizer


def weakened(params: Params, noise: float, seed: int) -> Params:
    """Return the weights with noise in every matrix."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def one(weight: jax.Array, key: jax.Array) -> jax.Array:
        if weight.ndim < 2:
            return weight
        size = noise * jnp.sqrt(jnp.mean(weight * weight))
        return weight + size * jax.random.normal(key, weight.shape, weight.dtype)

    noisy = [one(weight, key) for weight, key in zip(leaves, keys, strict=True)]
    return tree.unflatten(noisy)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m policies.make.weaken", description=__doc__)
    parser.add_argument("policy", type=Path)
    parser.add_argument("--noise", type=float, default=0.35)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    model, params = hf.load_pretrained(arguments.policy, dtype=jnp.float32)
    hf.save_pretrained(arguments.output, model, weakened(params, arguments.noise, arguments.seed))
    tokenizer.copy_files(arguments.policy, arguments.output)


if __name__ == "__main__":
    main()

"""200 real updates of the shipped policy at a rate of RL, published and fetched bit by bit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from weights_by_hand import Pair, same_bits

from benchmarks.workloads import BASE_POLICY, questions
from models import hf, transformer

VERSIONS = 200
LENGTH, ROWS = 32, 1
OPTIMIZER = optax.adamw(1e-6, weight_decay=0.0)


@partial(jax.jit, static_argnames="model", donate_argnames=("params", "state"))
def step(model, params, state, tokens_BT):
    """One AdamW step of next-token prediction, and what workers get of it."""

    def loss(params):
        logits_BTV = transformer.logits(model, params, tokens_BT[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT[:, 1:]).mean()

    updates, state = OPTIMIZER.update(jax.grad(loss)(params), state, params)
    params = optax.apply_updates(params, updates)
    return params, state, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def rows():
    """Questions with their answers, cut or repeated to one length."""
    asked = questions(40)
    found = [np.resize([*q["prompt_ids"], *q["answer_ids"], 1], LENGTH + 1) for q in asked]
    return np.array(found, np.int32)


def test_two_hundred_versions_without_an_error():
    model, params = hf.load_pretrained(BASE_POLICY, dtype=jnp.float32)
    state, tokens = OPTIMIZER.init(params), rows()
    pair = worker = None
    full_bytes, shares, changed = 0, [], 0
    for version in range(VERSIONS):
        batch = tokens[np.arange(version, version + ROWS) % len(tokens)]
        params, state, published = step(model, params, state, batch)
        if pair is None:
            pair = Pair(published)
            worker = pair.subscriber()
            full_bytes = sum(x.nbytes for x in jax.tree.leaves(published))
        pair.publish(version, published)
        if version % 7 == 5:
            continue  # this one is slow now and then, and gets two deltas at once
        before = pair.publisher.held_bytes
        got = pair.update(worker)
        assert same_bits(got, published), f"version {version}"
        assert before < 1.5 * full_bytes
        if version:
            shares.append(pair.carrier.seen[-1] / full_bytes)
            changed += shares[-1] > 0
    assert changed == len(shares), "expected every update to change some weights"
    assert max(shares) < 0.05 and sum(pair.carrier.seen) < full_bytes * (1 + 0.05 * VERSIONS)

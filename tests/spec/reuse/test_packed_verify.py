"""The packed pass gives at every position what each response gives on its own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import tiny_run
from models import transformer
from rl import packing
from rl.packing import Response, Shape
from spec import sampling
from spec.config import SamplingConfig
from spec.reuse.packed_verify import PackedResponses, unpack, verify_packed
from spec.sampling import step_key

MODEL = dataclasses.replace(tiny_run.MODEL, num_layers=2)
PARAMS = jax.tree.map(lambda x: 4 * x, transformer.init(MODEL, jax.random.key(0)))
KEY, TEMPERATURES = step_key(0, 3), np.float32([0.8, 1.0, 1.3, 0.6, 0.9])  # of the responses
SHAPE = Shape(2, 24, 48)
RESPONSES = [
    Response("", group, np.array(prompt), np.array(tokens))
    for group, prompt, tokens in (
        (0, [5, 6, 7], [2, 3, 4, 1]),
        (0, [5, 6, 7], [8, 2]),
        (1, [9], [10, 11, 12]),
        (0, [5, 6, 7], [2, 3, 9, 9, 9]),
        (1, [9], [10, 11, 13, 14, 15, 16, 17, 18, 19]),
    )
]
[ROWS] = packing.plan(RESPONSES, SHAPE)
LAYOUT = packing.lay_out(RESPONSES, ROWS, SHAPE)

HIDDEN = jax.jit(transformer.hidden_and_cache, static_argnums=(0, 4))


def batch(branch_RT=LAYOUT.packing.branch_BT):
    ids_X, at_X = np.zeros((2, LAYOUT.tokens_BT.size), np.int32)
    for i, start in zip(LAYOUT.order, LAYOUT.starts, strict=True):
        n = len(RESPONSES[i].tokens)
        ids_X[start : start + n], at_X[start : start + n] = i, np.arange(n)
    packed = dataclasses.replace(LAYOUT.packing, branch_BT=branch_RT)
    names = ids_X.reshape(LAYOUT.tokens_BT.shape), at_X.reshape(LAYOUT.tokens_BT.shape)
    processing = sampling.Processing.filled(SamplingConfig(), LAYOUT.tokens_BT.shape)
    for i, start in zip(LAYOUT.order, LAYOUT.starts, strict=True):
        cool = SamplingConfig(temperature=float(TEMPERATURES[i]))
        processing.put(slice(start, start + len(RESPONSES[i].tokens)), cool)
    return PackedResponses(LAYOUT.tokens_BT, LAYOUT.targets_BT, packed, *names, processing)


def run(given=None, chunk_tokens=48):
    cache, found = verify_packed(
        PARAMS,
        jax.tree.map(jnp.asarray, given or batch()),
        KEY,
        config=MODEL,
        scheme="gumbel",
        chunk_tokens=chunk_tokens,
        dtype=np.dtype("float32"),
    )
    return cache, unpack(found)


@jax.jit
def _alone(tokens_RT, targets_RT, at_RT):
    """Rows of one sequence each: log-probs of what comes next, and the draws there."""
    logits_RTV = transformer.logits(MODEL, PARAMS, tokens_RT)
    logits_RTV = logits_RTV / TEMPERATURES[:, None, None]
    logprobs_RTV = jax.nn.log_softmax(logits_RTV)
    requests_R = sampling.request_keys(KEY, jnp.arange(len(RESPONSES)))
    keys_RT = sampling.position_keys(requests_R, at_RT)
    warm_RT = jnp.broadcast_to(TEMPERATURES[:, None], tokens_RT.shape)
    drawn_RT, _ = sampling.draw(logits_RTV, keys_RT, warm_RT, "gumbel")
    return jnp.take_along_axis(logprobs_RTV, targets_RT[..., None], 2)[..., 0], drawn_RT


@pytest.fixture(scope="module")
def alone():
    """By response: (log-probs of its tokens, the draws there) in a sequence of its own."""
    T = 12
    tokens_RT, targets_RT, at_RT = np.zeros((3, len(RESPONSES), T), np.int32)
    for row, (r, tokens_T) in enumerate(zip(RESPONSES, tokens_RT, strict=True)):
        whole, first = np.concatenate([r.prompt_ids, r.tokens]), len(r.prompt_ids) - 1
        tokens_T[: len(whole)], targets_RT[row, : len(whole) - 1] = whole, whole[1:]
        at_RT[row] = np.maximum(np.arange(T) - first, 0)
    logprobs_RT, drawn_RT = map(np.asarray, _alone(tokens_RT, targets_RT, at_RT))
    places = [slice(len(r.prompt_ids) - 1, None) for r in RESPONSES]
    ends = [len(r.tokens) for r in RESPONSES]
    return [
        (logprobs_RT[i, place][:end], drawn_RT[i, place][:end])
        for i, (place, end) in enumerate(zip(places, ends, strict=True))
    ]


def largest_error(found, alone):
    """Of log-probs, over all responses."""
    errors = []
    for i, start in zip(LAYOUT.order.tolist(), LAYOUT.starts.tolist(), strict=True):
        want, _ = alone[i]
        errors.append(np.abs(found[2][start : start + len(want)] - want).max())
    return max(errors)


@pytest.mark.parametrize("chunk_tokens", [48, 12])  # all logits at once, and a part at a time
def test_every_response_is_verified_as_if_it_were_alone(alone, chunk_tokens):
    _, found = run(chunk_tokens=chunk_tokens)
    assert largest_error(found, alone) < 1e-4
    for i, start in zip(LAYOUT.order.tolist(), LAYOUT.starts.tolist(), strict=True):
        _, drawn = alone[i]
        assert found[0][start : start + len(drawn)].tolist() == drawn.tolist()


def test_keys_and_values_lie_where_the_layout_says():
    cache, _ = run()
    r, shared = RESPONSES[3], len(RESPONSES[3].prompt_ids) - 1
    [e] = np.flatnonzero(LAYOUT.order == 3)
    at = np.concatenate(
        [
            LAYOUT.prompt_starts[e] + np.arange(shared),
            LAYOUT.starts[e] + np.arange(len(r.tokens)),
        ]
    )
    shape = Shape(1, 12, 1)
    one = packing.lay_out([r], packing.plan([r], shape)[0], shape)
    _, single = HIDDEN(MODEL, PARAMS, one.tokens_BT, one.packing, np.dtype("float32"))
    n = len(at)
    for got, want in zip(cache.keys, single.keys, strict=True):
        np.testing.assert_allclose(np.asarray(got)[0][..., at], want[0][..., :n], atol=1e-4)
    for got, want in zip(cache.values, single.values, strict=True):
        np.testing.assert_allclose(np.asarray(got)[0][:, at], want[0][:, :n], atol=1e-4)


def test_a_planted_fault_siblings_that_see_one_another_would_be_found(alone):
    together = np.minimum(LAYOUT.packing.branch_BT, 1)
    _, found = run(batch(together))
    assert largest_error(found, alone) > 1e-2

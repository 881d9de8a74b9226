"""The unrolled pass against drafting entry by entry; losses by hand, vocabularies, chunks."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafters_by_hand import as_float64, drafted, drafter, hidden_states, packed
from hypothesis import given
from hypothesis import strategies as st
from programs import largest_array

from reprise.models.config import ModelConfig
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.model import SharedParams
from reprise.spec.eagle_training import training
from reprise.spec.eagle_training.training import unrolled_outputs

# D = V = 2 with the identity as head: states are logits. Norm eps 0.
TINY = ModelConfig("llama", 2, 2, 1, 1, 1, 2, 2, norm_eps=0.0)
LOG3 = math.log(3)


def identity(num_ids=2, width=2):
    return SharedParams(jnp.zeros((num_ids, width)), jnp.eye(width, num_ids))


def sums(config, params, frozen, *arrays, temperature=1.0, **settings):
    settings = {"chunk_tokens": 64} | settings
    arrays = [jnp.asarray(x) for x in arrays]
    got = jax.jit(
        lambda *arrays: training.token_sums(
            config, params, frozen, *arrays, jnp.float32(temperature), **settings
        )
    )(*arrays)
    return {name: np.asarray(x) for name, x in got.items()}


def tiny(outputs, targets, tokens, counts=None, frozen=None, **settings):
    """Sums with the design whose outputs go to the head as they are; [J, T, D], [T, D], [T]."""
    outputs = np.asarray(outputs, np.float32)[:, None]
    J, _, T, _ = outputs.shape
    counts = np.ones((J, T), bool) if counts is None else np.asarray(counts, bool)
    config = eagle.config_for(TINY)
    targets, tokens = np.asarray(targets, np.float32)[None], np.asarray(tokens, np.int32)[None]
    params = eagle.init(config, jax.random.key(0))
    arrays = outputs, targets, tokens, counts[:, None]
    return sums(config, params, frozen or identity(), *arrays, **settings)


def test_only_what_counts_is_summed_of_each_step():
    outputs = [[[LOG3, 0], [0, 0], [5, 0]], [[0, LOG3], [0, 0], [5, 0]]]
    counts = [[1, 1, 0], [0, 1, 0]]
    got = tiny(outputs, [[0, 0]] * 3, [0, 1, 0], counts)
    assert got["loss"] == pytest.approx([-0.5 * math.log(3 / 16) + math.log(2), math.log(2)])
    assert got["top1"].tolist() == [1, 0]  # of equal probabilities the first token is the draft
    assert got["top3"].tolist() == [2, 1]
    assert got["agreement"] == pytest.approx([1.75, 1])


def test_temperature_zero_is_one():
    def loss(temperature):
        return tiny([[[LOG3, 0.2]]], [[0.3, 0]], [0], temperature=temperature)["loss"].item()

    assert loss(0.0) == loss(1.0) != loss(0.9)


ranks = st.lists(st.integers(0, 4), min_size=5, max_size=5)  # ties are likely


@given(ranks, st.integers(0, 4))
def test_hits_are_those_of_a_stable_sort(logits, token):
    log_q = np.asarray(logits, np.float32)
    got = training._hits(jnp.array(log_q), jnp.array(log_q), jnp.array(token))
    order = np.argsort(-log_q, kind="stable").tolist()
    assert got["top1"] == (order[0] == token)
    assert got["top3"] == (token in order[:3])


def five_tokens(draft_ids):
    """Five tokens of which `draft_ids` may be drafted; a token's logit is its own dimension."""
    policy = ModelConfig("llama", 5, 5, 1, 1, 1, 2, 2)
    config = eagle.config_for(policy, draft_vocab_size=len(draft_ids))
    head = np.eye(5, dtype=np.float32)[draft_ids]
    frozen = SharedParams(jnp.zeros((5, 5)), jnp.asarray(head), jnp.asarray(draft_ids, jnp.int32))
    return config, eagle.init(config, jax.random.key(0)), frozen


def test_a_token_outside_the_draft_vocabulary_is_a_miss():
    """The draft token is token 4, by column 1; token 0 and 3 have no column."""
    outputs = np.zeros((1, 1, 4, 5), np.float32)
    outputs[..., 4] = 1.0
    tokens = np.array([[4, 1, 0, 3]])
    arrays = outputs, outputs[0], tokens, np.ones((1, 1, 4), bool)
    got = sums(*five_tokens([1, 4]), *arrays)
    assert got["top1"] == [1] and got["top3"] == [2]


def test_the_draft_vocabulary_is_not_the_policys():
    """Without the map a token would be taken for a column."""
    config, params, frozen = five_tokens([1, 4])
    outputs = np.zeros((1, 1, 1, 5), np.float32)
    outputs[..., 1] = 1.0  # column 0, which is token 1
    arrays = outputs, outputs[0], np.array([[0]]), np.ones((1, 1, 1), bool)
    assert sums(config, params, frozen, *arrays)["top1"] == [0]
    planted = dataclasses.replace(frozen, draft_ids_U=None)
    assert sums(config, params, planted, *arrays)["top1"] == [1]


def test_chunks_change_neither_sums_nor_gradients():
    config, params, frozen = drafter("eagle3", draft_vocab_size=6)
    rng = np.random.default_rng(0)
    J, B, T, D = 3, 2, 7, config.layer.d_model
    outputs, targets = rng.normal(size=(J, B, T, D)), rng.normal(size=(B, T, D))
    tokens, counts = rng.integers(0, 13, (B, T)), rng.random((J, B, T)) < 0.7

    def of(outputs, chunk_tokens):
        got = training.token_sums(
            config,
            params,
            frozen,
            *(outputs, jnp.asarray(targets, jnp.float32), jnp.asarray(tokens), jnp.asarray(counts)),
            jnp.float32(0.7),
            chunk_tokens=chunk_tokens,
        )
        return jnp.sum(got["loss"] * jnp.array([1.0, 2.0, 3.0])), got

    of = jax.jit(jax.value_and_grad(of, has_aux=True), static_argnames="chunk_tokens")
    (_, whole), whole_slope = of(jnp.asarray(outputs, jnp.float32), chunk_tokens=100)
    assert np.abs(whole_slope).max() > 0.01
    for chunk_tokens in (1, 6):  # a column, and of seven columns three, three and one
        (_, got), slope = of(jnp.asarray(outputs, jnp.float32), chunk_tokens=chunk_tokens)
        for name, x in got.items():
            np.testing.assert_allclose(x, whole[name], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(slope, whole_slope, atol=1e-6)


def test_logits_of_all_entries_are_never_in_memory_at_once():
    V, T = 1000, 128
    config = eagle.config_for(ModelConfig("llama", V, 4, 1, 1, 1, 4, 4))
    params = eagle.init(config, jax.random.key(0))
    frozen = SharedParams(jnp.zeros((V, 4)), jnp.ones((V, 4)))
    rest = jnp.zeros((1, T, 4)), jnp.zeros((1, T), int), jnp.ones((2, 1, T), bool)

    def largest(chunk_tokens):
        def loss(outputs):
            arrays = outputs, *rest, jnp.float32(1)
            got = training.token_sums(config, params, frozen, *arrays, chunk_tokens=chunk_tokens)
            return got["loss"].sum()

        return largest_array(jax.make_jaxpr(jax.grad(loss))(jnp.zeros((2, 1, T, 4))).jaxpr)

    assert largest(64) == 64 * V
    assert largest(128) == 128 * V  # the check can fail


STEPS = 4
OUTPUTS = jax.jit(unrolled_outputs, static_argnames=("config", "num_steps"))


def unrolled(config, params, frozen, batch, num_steps=STEPS):
    return np.asarray(OUTPUTS(config, params, frozen.embedding_VD, batch, num_steps))


def differences(got_JT, start, sequence, wanted, num_steps=STEPS):
    """The largest distance from the reference of each step, of a sequence that starts there."""
    far = np.zeros(num_steps)
    for (j, t), o in wanted.items():
        far[j] = np.maximum(far[j], np.abs(got_JT[j, start + t] - o).max())
    assert np.isfinite(far).all()
    per_step = [len(sequence.tokens_T) - 1 - j for j in range(num_steps)]
    assert len(wanted) == sum(per_step)  # every draft of every entry was compared
    return far


@pytest.mark.parametrize(("design", "bias"), [("eagle", True), ("eagle3", False)])
def test_every_step_is_what_drafting_gives(design, bias):
    config, params, frozen = drafter(design, fc_bias=bias)
    rows = [
        [hidden_states(config, 9), hidden_states(config, 6)],
        [hidden_states(config, 11, seed=1)],
    ]
    got = unrolled(config, params, frozen, packed(rows, 17))
    exact, embedding = as_float64(params), np.asarray(frozen.embedding_VD, np.float64)
    for b, row in enumerate(rows):
        start = 0
        for sequence in row:
            wanted = drafted(config, exact, embedding, sequence, STEPS)
            assert differences(got[:, b], start, sequence, wanted).max() < 2e-5
            start += len(sequence.tokens_T)


def test_a_wrong_pairing_is_seen_at_every_step():
    """Planted: f_t with x_t."""
    config, params, frozen = drafter("eagle")
    sequence = hidden_states(config, 9)
    batch = packed([[sequence]], 9)
    fault = dataclasses.replace(batch, tokens_BT=np.roll(batch.tokens_BT, 1, axis=1))
    got = unrolled(config, params, frozen, fault)
    embedding = np.asarray(frozen.embedding_VD, np.float64)
    wanted = drafted(config, as_float64(params), embedding, sequence, STEPS)
    assert differences(got[:, 0], 0, sequence, wanted).min() > 1e-2


def test_blocks_of_a_long_row_change_nothing():
    config, params, frozen = drafter("eagle")
    rows = [
        [hidden_states(config, 150), hidden_states(config, 100)],
        [hidden_states(config, 255, seed=3)],
    ]
    in_blocks = unrolled(config, params, frozen, packed(rows, 256))
    at_once = unrolled(config, params, frozen, packed(rows, 257))  # is not a multiple of 4
    real = packed(rows, 256)
    drafts_JBT = (real.sequence_BT > 0) & (real.positions_BT >= np.arange(STEPS)[:, None, None])
    np.testing.assert_allclose(in_blocks[drafts_JBT], at_once[:, :, :256][drafts_JBT], atol=2e-5)


def test_later_entries_are_not_seen():
    """Entry t of step j depends on all states up to t − j and on no other."""
    config, params, frozen = drafter("eagle3")
    s = hidden_states(config, 9)
    batch = packed([[s]], 9)

    def of_states(states):
        changed = dataclasses.replace(batch, hidden_BTW=states)
        return unrolled_outputs(config, params, frozen.embedding_VD, changed, STEPS)[:, 0].sum(-1)

    slope = jax.jit(jax.jacrev(of_states))(batch.hidden_BTW)
    slope_JTS = np.abs(slope[:, :, 0]).sum(-1)
    t, state = np.arange(8)[:, None], np.arange(9)[None]
    for j in range(STEPS):
        seen = (state <= t - j) & (t >= j)
        drafts = np.broadcast_to(t >= j, seen.shape)
        assert (slope_JTS[j, :8][seen] > 1e-6).all()
        assert (slope_JTS[j, :8][drafts & ~seen] == 0).all()


def test_half_precision_stays_near():
    config, params, frozen = drafter("eagle3")
    batch = packed([[hidden_states(config, 9)]], 9)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    got = OUTPUTS(config, half, frozen.embedding_VD, batch, 2)
    assert got.dtype == jnp.bfloat16
    whole = unrolled(config, params, frozen, batch, 2)
    far = np.abs(np.asarray(got, np.float32) - whole)[:, :, 1:8].max()
    assert 0 < far < 0.05 * np.abs(whole).max()


def largest_kept(num_tokens):
    """Elements of the largest array that the forward pass keeps for the backward one."""
    config, params, frozen = drafter("eagle3")
    batch = packed([[hidden_states(config, 60)]], num_tokens)

    def backward(params):
        def forward(params):
            return unrolled_outputs(config, params, frozen.embedding_VD, batch, 3)

        return jax.vjp(forward, params)[1]

    return max(x.size for x in jax.tree.leaves(jax.eval_shape(backward, params)))


def test_scores_are_not_kept_for_the_backward_pass(monkeypatch):
    assert largest_kept(512) == 2 * largest_kept(256)
    monkeypatch.setattr(training, "_attend", training._attend.__wrapped__)
    assert largest_kept(512) > 3 * largest_kept(256)  # planted: all of them

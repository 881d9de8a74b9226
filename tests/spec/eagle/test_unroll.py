"""The unrolled pass: equal to drafting entry by entry, in packed rows as alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafters_by_hand import DESIGNS, as_float64, drafted, drafter, hidden_states, packed

from spec.eagle import unroll as drafter_unroll
from spec.eagle.unroll import unrolled_outputs

STEPS = 4
OUTPUTS = jax.jit(unrolled_outputs, static_argnames=("config", "num_steps"))


def outputs(config, params, frozen, batch, num_steps=STEPS):
    return np.asarray(OUTPUTS(config, params, frozen.embedding_VD, batch, num_steps))


def differences(got_JT, start, sequence, wanted, num_steps=STEPS):
    """The largest distance from the reference of each step, of a sequence that starts there."""
    far = np.zeros(num_steps)
    for (j, t), o in wanted.items():
        far[j] = max(far[j], np.abs(got_JT[j, start + t] - o).max())
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
    got = outputs(config, params, frozen, packed(rows, 17))
    exact, embedding = as_float64(params), np.asarray(frozen.embedding_VD, np.float64)
    for b, row in enumerate(rows):
        start = 0
        for sequence in row:
            wanted = drafted(config, exact, embedding, sequence, STEPS)
            assert differences(got[:, b], start, sequence, wanted).max() < 2e-5
            start += len(sequence.tokens_T)


def same_token(batch):
    """Planted: f_t with x_t."""
    return dataclasses.replace(batch, tokens_BT=np.roll(batch.tokens_BT, 1, axis=1))


def next_state(batch):
    """Planted: f_{t+1} with x_{t+1}."""
    return dataclasses.replace(batch, hidden_BTW=np.roll(batch.hidden_BTW, -1, axis=1))


def later_position(batch):
    """Planted: keys turned by one position too many for the tokens behind the third."""
    return dataclasses.replace(batch, positions_BT=batch.positions_BT + (batch.positions_BT > 2))


@pytest.mark.parametrize("fault", [same_token, next_state, later_position])
@pytest.mark.parametrize("design", DESIGNS)
def test_a_wrong_pairing_is_seen_at_every_step(design, fault):
    config, params, frozen = drafter(design)
    sequence = hidden_states(config, 9)
    got = outputs(config, params, frozen, fault(packed([[sequence]], 9)))
    embedding = np.asarray(frozen.embedding_VD, np.float64)
    wanted = drafted(config, as_float64(params), embedding, sequence, STEPS)
    assert differences(got[:, 0], 0, sequence, wanted).min() > 1e-2


def alone_and_packed(design, batch_of=lambda batch: batch):
    """For each sequence its outputs alone and in one row with the others, where they are drafts."""
    config, params, frozen = drafter(design)
    sequences = [hidden_states(config, n) for n in (7, 5, 8)]
    got = outputs(config, params, frozen, batch_of(packed([sequences], 24)))[:, 0]
    pairs, start = [], 0
    for s in sequences:
        n = len(s.tokens_T)
        [alone] = outputs(config, params, frozen, packed([[s]], 24)).swapaxes(0, 1)
        drafts = np.arange(n - 1) >= np.arange(STEPS)[:, None]
        pairs.append((alone[:, : n - 1][drafts], got[:, start : start + n - 1][drafts]))
        start += n
    return pairs


@pytest.mark.parametrize("design", DESIGNS)
def test_neighbours_in_a_row_change_nothing(design):
    for alone, with_others in alone_and_packed(design):
        np.testing.assert_allclose(with_others, alone, atol=1e-5)


@pytest.mark.parametrize("design", DESIGNS)
def test_neighbours_that_are_not_kept_apart_are_seen(design):
    def merged(batch):
        return dataclasses.replace(batch, sequence_BT=np.ones_like(batch.sequence_BT))

    (first, *rest) = alone_and_packed(design, merged)
    np.testing.assert_allclose(first[1], first[0], atol=1e-5)  # nothing stands before it
    assert all(np.abs(alone - leaking).max() > 1e-2 for alone, leaking in rest)


@pytest.mark.parametrize("design", DESIGNS)
def test_blocks_of_a_long_row_change_nothing(design):
    config, params, frozen = drafter(design)
    rows = [
        [hidden_states(config, 150), hidden_states(config, 100)],
        [hidden_states(config, 255, seed=3)],
    ]
    in_blocks = outputs(config, params, frozen, packed(rows, 256))
    at_once = outputs(config, params, frozen, packed(rows, 257))  # is not a multiple of 4
    real = packed(rows, 256)
    drafts_JBT = (real.sequence_BT > 0) & (real.positions_BT >= np.arange(STEPS)[:, None, None])
    np.testing.assert_allclose(in_blocks[drafts_JBT], at_once[:, :, :256][drafts_JBT], atol=2e-5)


@pytest.mark.parametrize("design", DESIGNS)
def test_later_entries_are_not_seen(design):
    """Entry t of step j depends on all states up to t − j and on no other."""
    config, params, frozen = drafter(design)
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


@pytest.mark.parametrize("design", DESIGNS)
def test_half_precision_stays_near(design):
    config, params, frozen = drafter(design)
    batch = packed([[hidden_states(config, 9)]], 9)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    got = OUTPUTS(config, half, frozen.embedding_VD, batch, 2)
    assert got.dtype == jnp.bfloat16
    whole = outputs(config, params, frozen, batch, 2)
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
    monkeypatch.setattr(drafter_unroll, "_attend", drafter_unroll._attend.__wrapped__)
    assert largest_kept(512) > 3 * largest_kept(256)  # planted: all of them

"""Logits to tokens: cuts, draws and keys against plain numpy, and their laws by G-test."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reprise.spec.config import DRAWS, SamplingConfig
from reprise.spec.verification import sampling

PROCESSED = jax.jit(sampling.processed_logits)
LOG_PROBS = jax.jit(sampling.log_probs)
DRAW = jax.jit(sampling.draw, static_argnums=3)


def row_keys(num_rows, seed=0):
    return jax.random.split(jax.random.key(seed, impl=sampling.KEY_IMPL), num_rows)


def softmax64(x_V):
    x_V = np.asarray(x_V, np.float64)
    with np.errstate(under="ignore"):
        e_V = np.exp(x_V - x_V.max(-1, keepdims=True))
    return e_V / e_V.sum(-1, keepdims=True)


def kept_by_sorting(logits_V, temperature, top_k, top_p):
    """What the docstring of `processed_logits` promises, by sorting one row."""
    x_V = logits_V.astype(np.float32) / np.float32(temperature)
    keep_V = np.ones(len(x_V), bool)
    if 0 < top_k < len(x_V):
        keep_V &= x_V >= np.sort(x_V)[::-1][top_k - 1]  # ties at the threshold stay
    if top_p < 1:
        mass_V = softmax64(np.where(keep_V, x_V, -np.inf))
        order = np.argsort(-x_V, kind="stable")
        enough = np.searchsorted(np.cumsum(mass_V[order]), top_p)
        keep_V &= x_V >= x_V[order[min(enough, len(x_V) - 1)]]
    return keep_V


def kinds_of_rows(rng, num_rows, V):
    """Rows of normal, peaked, tied, flat and partly forbidden logits."""
    x_RV = rng.standard_normal((num_rows, V)).astype(np.float32)
    x_RV[0::6] *= 10
    x_RV[1::6] = np.round(x_RV[1::6])  # many ties
    x_RV[2::6] = 1.5
    x_RV[3::6, : V // 2] = -1e30
    x_RV[4::6, V // 3 :] = -np.inf
    return x_RV


@pytest.mark.parametrize("V", [5, 67])
def test_cuts_equal_those_by_sorting(V):
    rng = np.random.default_rng(V)
    R = 240
    logits_RV = kinds_of_rows(rng, R, V)
    temperature = rng.choice([0.25, 0.7, 1.0, 2.0], R).astype(np.float32)
    top_k = rng.choice([0, 1, 2, 3, V - 1, V, V + 9], R).astype(np.int32)
    top_p = rng.choice([0.05, 0.33, 0.7, 0.9, 1.0], R).astype(np.float32)
    got_RV = np.asarray(PROCESSED(logits_RV, temperature, top_k, top_p))
    for r in range(R):
        want_V = kept_by_sorting(logits_RV[r], temperature[r], top_k[r], float(top_p[r]))
        scaled_V = logits_RV[r] / temperature[r]
        want_V = np.where(want_V, scaled_V, -np.inf)
        np.testing.assert_allclose(got_RV[r], want_V, rtol=1e-6, err_msg=f"row {r}")


def test_programs_without_cuts_have_the_bits_of_rows_that_are_not_cut():
    rng = np.random.default_rng(0)
    R, V = 60, 67
    logits_RV = kinds_of_rows(rng, R, V)
    temperature_R = rng.choice(np.array([0.0, 0.7, 1.0], np.float32), R)
    off = np.zeros(R, np.int32), np.ones(R, np.float32)
    want = PROCESSED(logits_RV, temperature_R, *off)
    np.testing.assert_array_equal(PROCESSED(logits_RV, temperature_R), want)
    tokens_R = rng.integers(0, V, R)
    logprobs_R, entropy_R = LOG_PROBS(logits_RV, tokens_R, temperature_R)
    want_logprobs_R, want_entropy_R = LOG_PROBS(logits_RV, tokens_R, temperature_R, *off)
    np.testing.assert_array_equal(logprobs_R, want_logprobs_R)
    np.testing.assert_allclose(entropy_R, want_entropy_R, rtol=4e-6)  # a metric, in any order


def test_greedy_rows_are_neither_cut_nor_scaled():
    logits_RV = np.random.default_rng(0).standard_normal((3, 9)).astype(np.float32)
    got = PROCESSED(logits_RV, np.zeros(3, np.float32), np.full(3, 2), np.full(3, 0.1, np.float32))
    np.testing.assert_array_equal(got, logits_RV)
    tokens, logprobs = DRAW(got, row_keys(3), np.zeros(3, np.float32), "cdf")
    np.testing.assert_array_equal(tokens, logits_RV.argmax(-1))
    np.testing.assert_allclose(logprobs, np.log(softmax64(logits_RV)).max(-1), atol=1e-6)


def test_greedy_takes_the_first_of_equals():
    logits = np.asarray([[0, 2, 2, 1]], np.float32)
    for scheme in DRAWS:
        tokens, _ = DRAW(logits, row_keys(1), np.zeros(1, np.float32), scheme)
        assert tokens.tolist() == [1]


@pytest.mark.parametrize("scheme", DRAWS)
def test_recorded_log_probability_is_that_of_scoring(scheme):
    rng = np.random.default_rng(4)
    R, V = 300, 50
    logits_RV = kinds_of_rows(rng, R, V)
    temperature = rng.choice([0.0, 0.7, 1.0], R).astype(np.float32)
    top_k = rng.choice([0, 5], R).astype(np.int32)
    top_p = rng.choice([0.9, 1.0], R).astype(np.float32)
    cut_RV = PROCESSED(logits_RV, temperature, top_k, top_p)
    tokens, logprobs = DRAW(cut_RV, row_keys(R), temperature, scheme)
    scored, entropy = LOG_PROBS(logits_RV, tokens, temperature, top_k, top_p)
    np.testing.assert_allclose(scored, logprobs, atol=1e-5)
    mass_RV = softmax64(cut_RV)
    with np.errstate(divide="ignore", invalid="ignore"):
        want = -np.where(mass_RV > 0, mass_RV * np.log(mass_RV), 0).sum(-1)
    np.testing.assert_allclose(entropy, want, atol=1e-5)
    np.testing.assert_allclose(logprobs, np.log(mass_RV[np.arange(R), tokens]), atol=1e-5)


@pytest.mark.parametrize("scheme", DRAWS)
@pytest.mark.parametrize("V", [99, 700])
def test_draws_recorded_values_and_the_trainer_share_their_bits(V, scheme):
    """Whatever the number of rows, and whichever of the three functions computes them."""
    R = 64
    logits_RV = (3 * np.random.default_rng(V).standard_normal((R, V))).astype(np.float32)
    rest = np.ones(R, np.float32), np.zeros(R, np.int32), np.ones(R, np.float32)
    tokens, logprobs = DRAW(logits_RV, row_keys(R), rest[0], scheme)
    given = jax.jit(lambda x, *rest: sampling.given_log_probs(x, x, sampling.masses(x), *rest))
    for n in (1, 3, R):
        few = tuple(x[:n] for x in (logits_RV, *rest))
        drawn, found = DRAW(few[0], row_keys(R)[:n], few[1], scheme)
        assert drawn.tolist() == tokens[:n].tolist()
        np.testing.assert_array_equal(found, logprobs[:n])
        np.testing.assert_array_equal(LOG_PROBS(few[0], drawn, *few[1:])[0], logprobs[:n])
        np.testing.assert_array_equal(given(few[0], drawn, few[1])[0], logprobs[:n])


def test_given_tokens_have_the_same_bits_without_logits_if_nothing_is_cut():
    rng = np.random.default_rng(6)
    R, V = 64, 99
    logits_RV = (3 * rng.standard_normal((R, V))).astype(np.float32)
    tokens_R = rng.integers(0, V, R).astype(np.int32)
    logits_RV[:9, 5] = -np.inf
    tokens_R[:9] = 5
    temperature_R = rng.choice([0.0, 0.7, 1.3], R).astype(np.float32)

    @functools.partial(jax.jit, static_argnames="with_logits")
    def given(logits_RV, tokens_R, temperature_R, with_logits):
        processed_RV = sampling.processed_logits(logits_RV, temperature_R)
        mass = sampling.masses(processed_RV)
        raw_RV = logits_RV if with_logits else None
        return sampling.given_log_probs(raw_RV, processed_RV, mass, tokens_R, temperature_R)

    want, found = (given(logits_RV, tokens_R, temperature_R, some) for some in (True, False))
    for one, other in zip(want, found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not found[1][:9].any() and found[1][9:].all()


def test_gradient_of_log_probs_is_that_of_the_softmax():
    logits_RV = np.random.default_rng(5).standard_normal((3, 50)).astype(np.float32)
    tokens, (one, zero) = np.asarray([0, 7, 49]), (np.ones(3, np.float32), np.zeros(3, np.int32))
    found = jax.grad(lambda x: LOG_PROBS(x, tokens, one, zero, one)[0].sum())(logits_RV)
    np.testing.assert_allclose(found, np.eye(50)[tokens] - softmax64(logits_RV), atol=1e-6)


def test_gradient_of_a_cut_token_is_finite():
    logits = jnp.asarray([[3.0, 2.0, -30.0, 0.5]])
    one, k = jnp.ones(1), jnp.ones(1, jnp.int32)

    def loss(x):
        logprob, entropy = sampling.log_probs(x, jnp.asarray([2]), one, k, one)
        return logprob.sum() + entropy.sum()

    gradient = jax.jit(jax.grad(loss))(logits)
    assert np.isfinite(gradient).all()
    assert gradient[0, 2] > 0
    assert gradient[0, 1] == 0  # cut, and not given


# -- keys ------------------------------------------------------------------


def test_keys_are_the_folds_of_the_contract():
    key = sampling.step_key(7, 11)
    base = jax.random.fold_in(jax.random.key(7, impl="threefry2x32"), 11)
    assert jax.random.key_data(key).tolist() == jax.random.key_data(base).tolist()
    keys_BN = sampling.position_keys(
        sampling.request_keys(key, jnp.asarray([3, 900])), jnp.asarray([[0, 1, 1], [5, 6, 7]])
    )
    for b, request in enumerate((3, 900)):
        for n, t in enumerate(((0, 1, 1), (5, 6, 7))[b]):
            want = jax.random.fold_in(jax.random.fold_in(key, request), t)
            got = jax.random.key_data(keys_BN[b, n]).tolist()
            assert got == jax.random.key_data(want).tolist()


def test_gumbel_draw_is_the_argmax_of_noisy_logits():
    logits_RV = np.random.default_rng(0).standard_normal((20, 9)).astype(np.float32)
    keys = row_keys(20)
    noise_RV = np.stack([jax.random.gumbel(k, (9,), jnp.float32, mode="high") for k in keys])
    tokens, _ = DRAW(logits_RV, keys, np.ones(20, np.float32), "gumbel")
    np.testing.assert_array_equal(tokens, (logits_RV + noise_RV).argmax(-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e-36}, "0 .greedy. or at least 0.0001, got 1e-36"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"draw": "nucleus"}, "draw"),
    ],
)
def test_values_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SamplingConfig(), **change)


KINDS_OF_BROKEN = {
    "all nan": lambda x_V: (slice(None), np.nan),
    "the least is nan": lambda x_V: (np.argmin(x_V), np.nan),
    "the highest is nan": lambda x_V: (np.argmax(x_V), np.nan),
    "one is +inf": lambda x_V: (np.argmin(x_V), np.inf),
    "two are +inf": lambda x_V: (slice(3, 5), np.inf),
    "all +inf": lambda x_V: (slice(None), np.inf),
    "all -inf": lambda x_V: (slice(None), -np.inf),
}


@functools.partial(jax.jit, static_argnums=3)
def drawn_and_given(logits_BV, temperature_B, cuts, scheme):
    """Drawn tokens, their log-probs, and the log-probs of a given token."""
    processed_BV = sampling.processed_logits(logits_BV, temperature_B, *cuts)
    mass, keys = sampling.masses(processed_BV), row_keys(len(logits_BV))
    tokens_B, logprobs_B = sampling.draw(processed_BV, keys, temperature_B, scheme, mass)
    given_B = jnp.full_like(tokens_B, 7)
    given = sampling.given_log_probs(logits_BV, processed_BV, mass, given_B, temperature_B)
    return tokens_B, logprobs_B, given[0]


@pytest.mark.parametrize("scheme", DRAWS)
def test_logits_that_are_not_finite_show_in_the_log_probability_of_any_draw(scheme):
    """Whatever is cut, and of tokens that are given too: it is all that the engine looks at."""
    settings = [(t, k, p) for t in (0.0, 1.0) for k in (0, 1, 5) for p in (1.0, 0.5)]
    temperature_B, top_k_B, top_p_B = (np.array(x) for x in zip(*settings, strict=True))
    cuts = top_k_B.astype(np.int32), top_p_B.astype(np.float32)
    good_BV = np.random.default_rng(0).normal(size=(len(settings), 33)).astype(np.float32)
    given = temperature_B.astype(np.float32), cuts, scheme
    _, *logprobs = drawn_and_given(good_BV, *given)
    assert np.isfinite(logprobs).all()
    for kind, change in KINDS_OF_BROKEN.items():
        bad_BV = good_BV.copy()
        for logits_V in bad_BV:
            at, value = change(logits_V)
            logits_V[at] = value
        tokens_B, *logprobs = drawn_and_given(bad_BV, *given)
        assert not np.isfinite(logprobs).any(), kind
        assert np.min(tokens_B) >= 0 and np.max(tokens_B) < 33, kind

"""Draws by each scheme: their laws by enumeration and by G-test, their noise, and draws that stay.

False alarms of G-tests are 1e-6. Seeds are fixed, so that a pass stays a pass.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from reprise.models.config import MeshConfig
from reprise.models.sharding import constrain, make_mesh
from reprise.spec.config import DRAWS
from reprise.spec.verification import draw_schemes, sampling

FALSE_ALARM = 1e-6
BLOCKS = jax.jit(functools.partial(sampling._blocks, axes=sampling.ROLLOUT_AXES))
DRAW = jax.jit(sampling.draw, static_argnums=3)
RANK = jax.jit(sampling.rank_draws, static_argnums=3)
COLLECTIVE = re.compile(r" = \(?(\S+) (?:all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(")


def row_keys(num_rows, seed=0):
    return jax.random.split(sampling.step_key(seed, 0), num_rows)


def softmax64(x_V):
    x_V = np.asarray(x_V, np.float64)
    with np.errstate(under="ignore"):
        e_V = np.exp(x_V - x_V.max(-1, keepdims=True))
    return e_V / e_V.sum(-1, keepdims=True)


def g_test_fails(counts_N, law_N):
    """Whether the G-test rejects, or a cell of probability 0 was seen."""
    if counts_N[law_N == 0].any():
        return True
    expected_N = law_N * counts_N.sum()
    is_small_N = expected_N < 5
    observed = np.append(counts_N[~is_small_N], counts_N[is_small_N].sum())
    expected = np.append(expected_N[~is_small_N], expected_N[is_small_N].sum())
    seen = observed > 0
    statistic = 2 * (observed[seen] * np.log(observed[seen] / expected[seen])).sum()
    return statistic > chi2.isf(FALSE_ALARM, np.count_nonzero(expected) - 1)


def one_noise_for_both_levels(mass_CW, mass_C, keys):
    """The fault: places inside a block have the noise of blocks."""
    C, W = mass_C.shape[-1], mass_CW.shape[-1]
    wait_X = draw_schemes.exponentials(keys, max(C, W))
    return wait_X[..., :C], wait_X[..., :W]


# -- cdf -------------------------------------------------------------------


@pytest.fixture
def draw_at(monkeypatch):
    """`cdf` at chosen uniforms, [R, 2] or one for both searches, instead of a key's."""
    monkeypatch.setattr(draw_schemes, "uniforms", lambda uniforms: uniforms)

    @jax.jit
    def step(mass_RV, u_R2):
        return draw_schemes.cdf(*sampling._blocks(mass_RV, sampling.ROLLOUT_AXES), u_R2)

    def draw(mass_RV, u_RU):
        u_RU = np.asarray(u_RU, np.float32).reshape(len(mass_RV), -1)
        return np.asarray(step(mass_RV, np.broadcast_to(u_RU, (len(mass_RV), 2))))

    return draw


@pytest.mark.parametrize("V", [1, 5, 64, 67, 300])
def test_cdf_draw_inverts_the_distribution_of_blocks_and_that_inside(draw_at, V):
    rng = np.random.default_rng(V)
    R, W = 400, sampling.block_tokens(V)
    mass_RV = softmax64(3 * rng.standard_normal((R, V))).astype(np.float32)
    u_R2 = rng.random((R, 2)).astype(np.float32)
    mass_RCW = np.pad(mass_RV.astype(np.float64), ((0, 0), (0, -V % W))).reshape(R, -1, W)

    def invert(mass_RN, u_R):
        upto_RN = np.cumsum(mass_RN, axis=-1) / mass_RN.sum(-1, keepdims=True)
        # nearer to a boundary float32 may round either way
        return (upto_RN <= u_R[:, None]).sum(-1), np.abs(upto_RN - u_R[:, None]).min(-1) > 1e-6

    block_R, clear_of_blocks_R = invert(mass_RCW.sum(-1), u_R2[:, 0])
    inside_R, clear_inside_R = invert(mass_RCW[np.arange(R), block_R], u_R2[:, 1])
    clear_R = clear_of_blocks_R & clear_inside_R
    assert clear_R.mean() > 0.99
    want_R = block_R * W + inside_R
    np.testing.assert_array_equal(draw_at(mass_RV, u_R2)[clear_R], want_R[clear_R])


def test_rare_tokens_behind_all_others_are_drawn_at_their_rates(draw_at):
    """A last block of 32 tokens of 2e-8 each, where float32 tells uniforms 6e-8 apart."""
    V, W, rare = 1024, 32, 2e-8
    mass_V = np.zeros(V, np.float32)
    mass_V[0], mass_V[-W:] = 1.0, rare
    least = np.float32(2**-24)  # between two uniforms above one half
    first_U = 1 - least * np.arange(1, 41, dtype=np.float32)
    tokens_U = draw_at(np.broadcast_to(mass_V, (40, V)), np.stack([first_U, first_U], axis=1))
    in_block_U = tokens_U >= V - W
    assert in_block_U.sum() * least == pytest.approx(W * rare, rel=0.2)
    # inside it each of its tokens has the same share of the second uniform
    inside_K = (np.arange(8 * W, dtype=np.float32) + 0.5) / (8 * W)
    u_K2 = np.stack([np.full_like(inside_K, first_U[in_block_U][0]), inside_K], axis=1)
    tokens_K = draw_at(np.broadcast_to(mass_V, (8 * W, V)), u_K2)
    assert np.bincount(tokens_K - (V - W), minlength=W).tolist() == [8] * W


def test_uniforms_are_below_one_and_fine_near_zero():
    bits = np.asarray([0, 1, 2**31, 2**32 - 1], np.uint32)
    original = jax.random.bits
    try:
        jax.random.bits = lambda key, shape, dtype: jnp.stack([key, 0 * key])
        u_42 = np.asarray(draw_schemes.uniforms(jnp.asarray(bits)))
    finally:
        jax.random.bits = original
    want_4 = np.asarray([0, 2**-32, 0.5, 1 - 2**-24], np.float32)
    np.testing.assert_array_equal(u_42, np.stack([want_4, np.zeros(4)], axis=1))


def test_mass_zero_is_passed_over_where_the_running_sum_moves():
    """A parallel scan rounds each entry on its own: by an ulp up or down where the mass is 0."""
    ulp = 2**-23
    mass_RN = np.asarray([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0.5, 0, 0.5, 0]])
    upto_RN = np.asarray(
        [
            [0.5, 1, 1 + ulp, 1 + ulp],  # target between 1 and its neighbour: no mass there
            [0.5, 1, 1 - ulp, 1],
            [0, ulp, 1, 1],
            [0.5, 0.5 + ulp, 1, 1],
        ]
    )
    target_R = np.asarray([1, 1 - ulp / 2, 0, 0.5])
    float32 = (x.astype(np.float32) for x in (mass_RN, upto_RN, target_R))
    assert jax.jit(draw_schemes._first_above)(*float32).tolist() == [1, 1, 2, 2]


def test_boundaries_of_a_large_vocabulary(draw_at):
    rng = np.random.default_rng(0)
    R, V = 8, 151_936
    mass_RV = np.exp(2 * rng.standard_normal((R, V))).astype(np.float32)
    mass_RV[rng.random((R, V)) > 0.0005] = 0
    W = sampling.block_tokens(V)
    upto_RCW = np.cumsum(
        np.pad(mass_RV.astype(np.float64), ((0, 0), (0, -V % W))).reshape(R, -1, W), axis=-1
    )
    upto_RC = np.cumsum(upto_RCW[..., -1], axis=-1)
    positive = [np.flatnonzero(row) for row in mass_RV]
    rows = np.arange(R)
    for trial in range(12):
        at_R = np.asarray([rng.choice(p) for p in positive])
        block_R, inside_R = at_R // W, at_R % W
        of_block_R = upto_RC[rows, block_R] / upto_RC[:, -1]
        of_token_R = upto_RCW[rows, block_R, inside_R] / upto_RCW[rows, block_R, -1]
        u_R2 = np.stack([of_block_R, of_token_R], axis=1).astype(np.float32)
        for _ in range(trial % 6):
            u_R2 = np.nextafter(u_R2, np.float32(trial % 2))
        tokens_R = draw_at(mass_RV, np.minimum(u_R2, np.float32(1 - 2**-24)))
        assert (tokens_R < V).all()
        assert (mass_RV[rows, tokens_R] > 0).all()


def test_uniforms_of_requests_and_positions_are_independent():
    """Correlation of neighbours among 128 × 128 uniforms; false alarm 1e-6 each (4.9 σ)."""
    keys_B = sampling.request_keys(sampling.step_key(0, 0), jnp.arange(128))
    positions_BN = jnp.broadcast_to(jnp.arange(128), (128, 128))
    u_BN2 = np.asarray(jax.jit(draw_schemes.uniforms)(sampling.position_keys(keys_B, positions_BN)))
    z_BN2 = (u_BN2 - 0.5) * math.sqrt(12)
    assert abs((z_BN2[..., 0] * z_BN2[..., 1]).sum()) / 128 < 4.9  # the two of a key
    u_BN, z_BN = u_BN2[..., 0], z_BN2[..., 0]
    assert len(np.unique(u_BN)) > 16_370  # 16,384 of 2³² values: about 0.03 collide
    for a, b in ((z_BN[:, 1:], z_BN[:, :-1]), (z_BN[1:], z_BN[:-1]), (z_BN, z_BN.T)):
        off = a.size if a.shape != z_BN.shape else a.size - 128
        moment = (
            (a * b).sum() if a.shape != z_BN.shape else (a * b).sum() - (z_BN.diagonal() ** 2).sum()
        )
        assert abs(moment) / math.sqrt(off) < 4.9 * 1.5  # the last sum counts each pair twice
    assert abs(z_BN.mean()) * 128 < 4.9


# -- gumbel_blocks ---------------------------------------------------------


LAWS = {
    "four tokens": (0.4, 0.1, 0.3, 0.2),
    "a padded block": (0.05, 0.9, 0.05),
    "cut tokens": (0.0, 0.7, 0.3, 0.0),
    "a cut block": (0.25, 0.75, 0.0, 0.0),
}
QUANTILES = 512


def enumerated(mass_V, races=None):
    """Return how often each token is drawn over all pairs of quantiles of the two levels' noise.

    Between two exponentials their ratio decides, and P(ratio ≤ r) = r / (1 + r).
    """
    quantile_Q = (np.arange(QUANTILES) + 0.5) / QUANTILES
    ratio_Q = quantile_Q / (1 - quantile_Q)
    of_blocks, of_places = (x.reshape(-1) for x in np.meshgrid(ratio_Q, ratio_Q))
    wait_R4 = np.stack([of_blocks, 0 * of_blocks + 1, of_places, 0 * of_places + 1], axis=1)
    blocks = BLOCKS(np.broadcast_to(np.float32(mass_V), (QUANTILES**2, len(mass_V))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw_schemes, "exponentials", lambda wait_RX, count: wait_RX[:, :count])
        if races is not None:
            patch.setattr(draw_schemes, "_races", races)
        draw = jax.jit(lambda *given: draw_schemes.gumbel_blocks(*given))
        tokens_R = np.asarray(draw(*blocks, wait_R4.astype(np.float32)))
    return np.bincount(tokens_R, minlength=len(mass_V)) / QUANTILES**2


@pytest.mark.parametrize("law", LAWS)
def test_two_levels_have_the_law_by_enumeration(law):
    mass_V = np.asarray(LAWS[law])
    share_V = enumerated(mass_V)
    assert share_V.sum() == pytest.approx(1)
    np.testing.assert_allclose(share_V, mass_V, atol=2 / QUANTILES)
    assert not share_V[mass_V == 0].any()


def test_enumeration_finds_one_noise_for_both_levels():
    share_V = enumerated(LAWS["four tokens"], one_noise_for_both_levels)
    assert np.abs(share_V - LAWS["four tokens"]).max() > 0.05


def test_exponentials_are_those_of_their_words():
    """Each word once: with uniform words they are exponential, up to the float32 of 1 − u."""
    words_R = np.r_[0, 1, 2, 2**31, 2**32 - 2**9, 2**32 - 1, 2 ** np.arange(31)].astype(np.uint32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "bits", lambda key, shape, dtype: key[None])
        wait_R = np.asarray(draw_schemes.exponentials(jnp.asarray(words_R), 1))[:, 0]
    u_R = (words_R.astype(np.float64) + 0.5) / 2**32
    np.testing.assert_allclose(-np.expm1(-wait_R.astype(np.float64)), u_R, rtol=5e-7)
    assert 0 < wait_R.min() < 2**-32 and np.isfinite(wait_R).all()


def test_mass_zero_never_wins_whatever_the_noise():
    """Where tokens that can be drawn have the longest waits, and the others the shortest."""
    R, V = 64, 40
    C, W = 5, sampling.block_tokens(V)
    rng = np.random.default_rng(0)
    mass_RV = np.where(rng.random((R, V)) < 0.1, rng.random((R, V)), 0).astype(np.float32)
    mass_RV[np.arange(R), rng.integers(0, V, R)] = 1
    mass_RCW, mass_RC = BLOCKS(mass_RV)
    longest, shortest = np.float32(24 * math.log(2)), np.float32(2**-33)
    wait_RC = np.where(mass_RC > 0, longest, shortest)
    for block in range(C):
        wait_RW = np.where(mass_RCW[:, block] > 0, longest, shortest)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draw_schemes, "exponentials", lambda wait_RX, count: wait_RX)
            wait_RX = np.concatenate([wait_RC, wait_RW], axis=1)
            tokens_R = np.asarray(draw_schemes.gumbel_blocks(mass_RCW, mass_RC, wait_RX))
        at_R = tokens_R // W == block
        assert at_R.any()
        assert (mass_RV[np.arange(R), tokens_R] > 0)[at_R].all()


def counts_of(law_V, num_draws=2**17):
    blocks = BLOCKS(law_V.astype(np.float32)[None])
    draw = jax.jit(lambda *given: draw_schemes.gumbel_blocks(*given))
    given = (jnp.broadcast_to(x, (num_draws, *x.shape[1:])) for x in blocks)
    return np.bincount(np.asarray(draw(*given, row_keys(num_draws))), minlength=len(law_V))


@pytest.fixture
def law_67():
    """Blocks of 16, of which the last has 13 tokens of padding; some tokens are cut."""
    rng = np.random.default_rng(0)
    law_V = softmax64(2 * rng.standard_normal(67))
    law_V[rng.permutation(67)[:20]] = 0
    law_V[16:32] = 0
    return law_V / law_V.sum()


@pytest.mark.statistical
def test_two_levels_have_the_law_of_many_keys(law_67, monkeypatch):
    assert not g_test_fails(counts_of(law_67), law_67)
    assert g_test_fails(counts_of(law_67), 0.98 * law_67 + 0.02 * law_67[::-1])
    monkeypatch.setattr(draw_schemes, "_races", one_noise_for_both_levels)
    assert g_test_fails(counts_of(law_67), law_67)


def pairs_fail(of_first, of_second, cells):
    """Whether pairs are other than independent and uniform."""
    counts = np.bincount((of_first * cells + of_second).reshape(-1), minlength=cells**2)
    return g_test_fails(counts, np.full(cells**2, 1 / cells**2))


@pytest.mark.statistical
def test_noise_of_levels_positions_and_requests_is_independent(monkeypatch):
    """16 equal tokens in 4 blocks; pairs do not overlap."""
    B = N = 256
    blocks = BLOCKS(np.full((B, N, 16), 1 / 16, np.float32))
    keys_B = sampling.request_keys(sampling.step_key(0, 0), jnp.arange(B))

    def tokens(step_N):
        draw = jax.jit(lambda *given: draw_schemes.gumbel_blocks(*given))
        positions_BN = jnp.broadcast_to(jnp.arange(N) // step_N, (B, N))
        return np.asarray(draw(*blocks, sampling.position_keys(keys_B, positions_BN)))

    tokens_BN = tokens(1)
    assert not pairs_fail(tokens_BN // 4, tokens_BN % 4, 4)
    assert not pairs_fail(tokens_BN[:, ::2], tokens_BN[:, 1::2], 16)
    assert not pairs_fail(tokens_BN[::2], tokens_BN[1::2], 16)
    again_BN = tokens(2)  # noise of positions that repeats
    assert pairs_fail(again_BN[:, ::2], again_BN[:, 1::2], 16)
    monkeypatch.setattr(draw_schemes, "_races", one_noise_for_both_levels)
    tokens_BN = tokens(1)
    assert pairs_fail(tokens_BN // 4, tokens_BN % 4, 4)


# -- draws that stay, and their ranks --------------------------------------


@functools.cache
def moved_rows():
    """Peaked logits, the same after a small move, and keys."""
    rng = np.random.default_rng(0)
    logits_RV = 2 * rng.standard_normal((4096, 256), np.float32)
    moved_RV = logits_RV + 0.2 * rng.standard_normal(logits_RV.shape, np.float32)
    return logits_RV, moved_RV, row_keys(len(logits_RV))


def drawn(logits_RV, keys_R, scheme):
    one_R = np.ones(len(logits_RV), np.float32)
    return np.asarray(DRAW(logits_RV, keys_R, one_R, scheme)[0])


def test_most_draws_stay_when_logits_move_a_little():
    logits_RV, moved_RV, keys_R = moved_rows()
    change = {
        scheme: (drawn(logits_RV, keys_R, scheme) != drawn(moved_RV, keys_R, scheme)).mean()
        for scheme in DRAWS
    }
    assert change["gumbel_blocks"] < 0.6 * change["cdf"], change
    assert change["gumbel_blocks"] < 1.5 * change["gumbel"], change


@pytest.mark.parametrize("scheme", DRAWS)
def test_ranks_begin_with_the_draw(scheme):
    logits_RV, _, keys_R = moved_rows()
    temperature_R = np.where(np.arange(len(logits_RV)) % 4 == 0, 0, 1).astype(np.float32)
    score_RV = np.asarray(RANK(logits_RV, keys_R, temperature_R, scheme))
    want_R = np.where(temperature_R == 0, logits_RV.argmax(-1), drawn(logits_RV, keys_R, scheme))
    np.testing.assert_array_equal(score_RV.argmax(-1), want_R)


@pytest.mark.parametrize("scheme", ["gumbel", "gumbel_blocks"])
def test_the_next_ranks_are_draws_of_a_similar_distribution(scheme):
    """Where the draw changes: more often than the likeliest tokens are."""
    logits_RV, moved_RV, keys_R = moved_rows()
    one_R = np.ones(len(logits_RV), np.float32)
    score_RV = np.array(
        jax.jit(sampling.rank_draws, static_argnums=3)(logits_RV, keys_R, one_R, scheme)
    )
    before_R, after_R = drawn(logits_RV, keys_R, scheme), drawn(moved_RV, keys_R, scheme)
    differ_R = before_R != after_R

    def found(score_RV):
        score_RV = score_RV.copy()
        score_RV[np.arange(len(score_RV)), before_R] = -np.inf
        next_R2 = np.argsort(-score_RV, axis=-1)[:, :2]
        return (next_R2 == after_R[:, None]).any(-1)[differ_R].mean()

    assert differ_R.sum() > 100
    assert found(score_RV) > 0.7 > 1.5 * found(logits_RV), (found(score_RV), found(logits_RV))


def test_ranks_of_tokens_that_are_cut_are_last():
    logits_RV, _, keys_R = moved_rows()
    cut_RV = np.where(logits_RV < 3, -np.inf, logits_RV)[:64]
    cut_RV[:, 7] = 1.0
    one_R = np.ones(64, np.float32)
    score_RV = np.asarray(sampling.rank_draws(cut_RV, keys_R[:64], one_R, "gumbel_blocks"))
    assert not np.isnan(score_RV).any()
    np.testing.assert_array_equal(score_RV == -np.inf, cut_RV == -np.inf)


# -- meshes and devices ----------------------------------------------------


@functools.partial(jax.jit, static_argnames=("scheme", "number"))
def drawn_when_split(logits_RV, keys_R, scheme, number):
    """`number` is that of the mesh, for each of which it is traced."""
    logits_RV = constrain(logits_RV, *sampling.ROLLOUT_AXES)
    return sampling.draw(logits_RV, keys_R, jnp.ones(len(logits_RV)), scheme)


needs_devices = pytest.mark.skipif(jax.device_count() != 8, reason="needs 8 (virtual) devices")


@needs_devices
@pytest.mark.parametrize("scheme", ["cdf", "gumbel_blocks"])
@pytest.mark.parametrize("V", [99, 1000])
def test_a_split_vocabulary_draws_the_same_tokens_with_the_same_bits(V, scheme):
    """7 and 32 blocks on 2, 4 and 8 devices: some have blocks of padding."""
    logits_RV = 2 * np.random.default_rng(V).standard_normal((64, V), np.float32)
    logits_RV[::2] = np.where(logits_RV[::2] < 1, -np.inf, logits_RV[::2])
    given = logits_RV, row_keys(64)
    want = jax.device_get(drawn_when_split(*given, scheme=scheme, number=1))
    for tensor in (2, 4, 8):
        with jax.set_mesh(make_mesh(MeshConfig(data=8 // tensor, tensor=tensor), jax.devices())):
            got = jax.device_get(drawn_when_split(*given, scheme=scheme, number=tensor))
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])


@needs_devices
def test_a_split_vocabulary_is_not_gathered():
    """Of 135 blocks of 256 tokens masses are, and one block's tokens."""
    V, mesh = 34_560, make_mesh(MeshConfig(data=2, tensor=4), jax.devices())
    given = jax.ShapeDtypeStruct((2, V), np.float32), row_keys(2)
    with jax.set_mesh(mesh):
        step = drawn_when_split.lower(*given, scheme="gumbel_blocks", number=0)
    shapes = COLLECTIVE.findall(step.compile().as_text())
    sizes = [
        math.prod(int(n) for n in dims.split(",") if n)
        for dims in re.findall(r"\[([\d,]*)\]", " ".join(shapes))
    ]
    assert 135 <= max(sizes) <= 2 * 256, shapes


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_have_no_loop_and_no_condition(platform):
    shapes = [jax.ShapeDtypeStruct(size, np.float32) for size in ((8, 192, 256), (8, 192))]
    step = jax.jit(draw_schemes.gumbel_blocks)
    text = jax.export.export(step, platforms=[platform])(*shapes, row_keys(8)).mlir_module()
    assert "stablehlo.divide" in text
    assert not re.findall(r"stablehlo\.(?:while|case|if)", text)

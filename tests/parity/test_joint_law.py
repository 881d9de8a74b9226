"""The joint law of three tokens of a 5-token vocabulary equals exact enumeration.

The verification kernel itself, 40 × 256 requests: G-test over the 125 sequences,
false-alarm rate 1e-6 by chi-square (cells that expect fewer than 5 are pooled).
Seeds are fixed, so that a pass stays a pass. Planted faults must fail the same test.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_cache import dense_cache
from drafts_by_hand import Draft, chain
from parity_model import make_params
from scipy.stats import chi2

from reprise.models.attention import kv_cache
from reprise.models.attention.entries import no_pending
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.spec.config import DRAWS
from reprise.spec.drafter import PADDING
from reprise.spec.verification import sampling, verify
from reprise.spec.verification.nodes import Nodes, by_slot
from reprise.spec.verification.verify import Slots

pytestmark = [pytest.mark.parity, pytest.mark.statistical]

FALSE_ALARM = 1e-6
V, LENGTH, FIRST = 5, 3, 2  # vocabulary, response tokens, the prompt's one token
B, BATCHES = 256, 40
NODES, POSITIONS = 8, 12
TEMPERATURE, TOP_K = 0.8, 4
MODEL = ModelConfig(
    architecture="llama",
    vocab_size=V,
    d_model=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ff=16,
)


@pytest.fixture(scope="module")
def params():
    return make_params(MODEL, scale=1.5, seed=3)


@pytest.fixture(scope="module")
def law(params):
    return law_of(params)


@pytest.fixture(scope="module")
def kernel():
    """For tests that plant nothing: compiled once."""
    return fresh_kernel()


@pytest.fixture(scope="module")
def plain(params, kernel):
    """`plain(scheme, seed)`: what is sampled without drafts."""

    @functools.cache
    def run(scheme, seed):
        return sample(params, kernel, seed, scheme)

    return run


def law_of(params):
    """Probability of each of the 125 sequences, [5, 5, 5]: products of whole-sequence passes."""
    sequences = np.asarray(list(itertools.product(range(V), repeat=LENGTH)))
    tokens = np.concatenate([np.full((len(sequences), 1), FIRST), sequences[:, :-1]], axis=1)
    logits = np.asarray(jax.jit(transformer.logits, static_argnums=0)(MODEL, params, tokens), float)
    logits /= TEMPERATURE
    logits[logits < np.sort(logits, axis=-1)[..., V - TOP_K, None]] = -np.inf
    mass = np.exp(logits)
    mass /= mass.sum(-1, keepdims=True)
    return np.take_along_axis(mass, sequences[..., None], axis=-1)[..., 0].prod(-1)


def g_test_fails(tokens_RT, law_C):
    """Whether the G-test rejects, or a sequence of probability 0 was seen."""
    cells = tokens_RT @ V ** np.arange(LENGTH)[::-1]
    counts_C = np.bincount(cells, minlength=V**LENGTH)
    if counts_C[law_C == 0].any():
        return True
    expected_C = law_C * counts_C.sum()
    small_C = expected_C < 5
    observed = np.append(counts_C[~small_C], counts_C[small_C].sum())
    expected = np.append(expected_C[~small_C], expected_C[small_C].sum())
    seen = observed > 0
    statistic = 2 * (observed[seen] * np.log(observed[seen] / expected[seen])).sum()
    return statistic > chi2.isf(FALSE_ALARM, np.count_nonzero(expected) - 1)


def fresh_kernel():
    """`verify.verify` of the moment, compiled afresh: a planted fault is inside."""

    def kernel(params, cache, pending, slots, nodes_3M, scheme):
        stop_E = jnp.full(1, -1, jnp.int32)
        nodes = Nodes(*nodes_3M)
        draws = verify.Draws(scheme)
        return verify.verify(MODEL, params, cache, pending, slots, nodes, stop_E, draws, NODES)

    return jax.jit(kernel, static_argnames="scheme", donate_argnums=(1, 2, 3))


@pytest.fixture
def fresh_layer(monkeypatch):
    """Layers that are traced anew, with what is planted into their attention."""
    step = transformer._nodes_layer.__wrapped__
    layer = jax.jit(lambda *arguments: step(*arguments), static_argnums=0)
    monkeypatch.setattr(transformer, "_nodes_layer", layer)


def start_slots(key, first_id):
    fill = jnp.ones(B, jnp.int32)
    return Slots(
        last_token=fill * FIRST,
        length=fill * 0,
        emitted=fill * 0,
        limit=fill * LENGTH,
        active=fill > 0,
        adapter=fill * 0,
        keys=sampling.request_keys(key, first_id + jnp.arange(B)),
        processing=sampling.Processing(fill * jnp.float32(TEMPERATURE), fill * TOP_K, fill * 1.0),
    )


ROOTS_3B = np.stack([np.zeros(B), np.arange(B), np.full(B, -1)]).astype(np.int32)


def packed(tokens_BN, parents_BN):
    """Trees of equal size as the nodes of a round; a parent is a place in its own tree."""
    slots_BN = np.repeat(np.arange(B)[:, None], NODES, axis=1)
    parents_BN = np.where(parents_BN < 0, -1, parents_BN + NODES * slots_BN)
    return np.stack([tokens_BN, slots_BN, parents_BN]).reshape(3, -1).astype(np.int32)


def sample(params, kernel, seed, scheme, propose=None, batches=BATCHES):
    """Three tokens of `batches` × 256 requests; `propose(batch, round)` gives trees of NODES."""
    rows = []
    for batch in range(batches):
        slots = start_slots(sampling.step_key(seed, 0), batch * B)
        cache = dense_cache(MODEL, B, POSITIONS)
        pending = no_pending(MODEL, B * NODES, jnp.float32)
        tokens_BT, emitted_B = np.zeros((B, LENGTH), np.int64), np.zeros(B, int)
        for turn in range(LENGTH):
            nodes_3M = ROOTS_3B if propose is None else packed(*propose(batch, turn))
            cache, pending, slots, out = kernel(params, cache, pending, slots, nodes_3M, scheme)
            found = (np.asarray(x) for x in (out.tokens_M, out.logprobs_M, out.emitted_M))
            got_BN, _, count_B, _ = by_slot(*found, nodes_3M[1], B)
            for j in range(min(got_BN.shape[1], LENGTH)):
                at = np.flatnonzero((count_B > j) & (emitted_B + j < LENGTH))
                tokens_BT[at, emitted_B[at] + j] = got_BN[at, j]
            emitted_B += count_B
        assert not np.asarray(slots.active).any()
        rows.append(tokens_BT)
    return np.concatenate(rows)


def random_trees(seed):
    """Trees of up to 7 draft tokens over all five tokens, bushes of all five children among
    them.
    """
    rng = np.random.default_rng(seed)
    drafts = [Draft([0, 1, 2, 3, 4, 0, 1], [-1, -1, -1, -1, -1, 2, 2]), chain([0] * 7), chain([])]
    while len(drafts) < 64:
        edges = []
        for _ in range(rng.integers(1, NODES)):
            edge = (int(rng.integers(-1, len(edges))), int(rng.integers(V)))
            edges += [edge] if edge not in edges else []
        drafts.append(Draft([t for _, t in edges], [p for p, _ in edges]))
    size = len(drafts), NODES
    tokens_RN, parents_RN = np.full(size, PADDING, np.int32), np.zeros(size, np.int32)
    parents_RN[:, 0] = -1
    for r, draft in enumerate(drafts):
        there = slice(1, 1 + len(draft.tokens))
        tokens_RN[r, there] = draft.tokens[: NODES - 1]
        parents_RN[r, there] = np.asarray(draft.parents[: NODES - 1], np.int32) + 1

    def propose(batch, turn):
        pick_B = np.random.default_rng((seed, batch, turn)).integers(0, len(drafts), B)
        return tokens_RN[pick_B], parents_RN[pick_B]

    return propose


def drafts_from_the_answer(answers_RT):
    """The right chain where the first token will be even, a wrong one where it will be odd.

    Drafts that depend on the draw are what breaks a rule with acceptance coins.
    """

    def propose(batch, turn):
        answer_BT = answers_RT[batch * B : (batch + 1) * B]
        wrong_BT = (answer_BT + 1) % V
        tokens_BN = np.full((B, NODES), -1, np.int32)
        # slots that accepted everything have ended: after round 0 only wrong drafts are left
        right_B = (answer_BT[:, 0] % 2 == 0)[:, None] & (turn == 0)
        tokens_BN[:, 1 : 1 + LENGTH] = np.where(right_B, answer_BT, wrong_BT)
        parents_N = np.asarray([-1, 0, 1, 2] + [0] * (NODES - 4), np.int32)
        return tokens_BN, np.broadcast_to(parents_N, (B, NODES)).copy()

    return propose


def test_the_law_is_worth_testing(law):
    assert law.sum() == pytest.approx(1)
    assert (law == 0).sum() >= 25  # top-k cuts whole branches
    assert np.count_nonzero(law * B * BATCHES >= 5) > 40


@pytest.mark.parametrize("scheme", DRAWS)
def test_plain_decoding_and_any_drafts_have_the_exact_law(params, law, kernel, plain, scheme):
    plain_RT = plain(scheme, 1)
    assert not g_test_fails(plain_RT, law)
    assert not g_test_fails(sample(params, kernel, 2, scheme, random_trees(0)), law)
    drafted_RT = sample(params, kernel, 1, scheme, drafts_from_the_answer(plain_RT))
    np.testing.assert_array_equal(drafted_RT, plain_RT)


@pytest.mark.parametrize("scheme", ["gumbel", "gumbel_blocks"])
def test_another_policy_with_the_same_noise_has_its_own_exact_law(law, kernel, plain, scheme):
    """Last epoch's noise and responses, as drafts, say nothing of what this policy may give."""
    moved = make_params(MODEL, scale=1.4, seed=4)
    past_RT = plain(scheme, 1)
    drafts = drafts_from_the_answer(past_RT)
    now_RT = sample(moved, kernel, 1, scheme, drafts)
    assert not g_test_fails(now_RT, law_of(moved))
    assert g_test_fails(now_RT, law)
    # coupled: the two agree more often than two rollouts with noise of their own
    other_RT = sample(moved, kernel, 2, scheme)
    assert (now_RT[:, 0] == past_RT[:, 0]).mean() > (other_RT[:, 0] == past_RT[:, 0]).mean() + 0.1


def test_a_policy_that_was_chosen_by_looking_at_the_noise_has_not(law, plain):
    """The caveat of noise that repeats: here the noise of a request decides who answers it."""
    past_RT, fresh_RT = plain("cdf", 1), plain("cdf", 2)
    likeliest = np.bincount(past_RT[:, 0]).argmax()
    chosen_RT = np.where((past_RT[:, 0] == likeliest)[:, None], past_RT, fresh_RT)
    assert g_test_fails(chosen_RT, law)


def test_the_test_has_power(law, plain):
    """A law that is off by a tenth in one of its conditionals is rejected."""
    wrong = law.reshape(V, V, V).copy()
    wrong = 0.9 * wrong + 0.1 * wrong[:, :, ::-1]
    assert g_test_fails(plain("cdf", 1), wrong.reshape(-1))


def test_planted_noise_reused_between_positions(params, law, monkeypatch):
    original = sampling.position_keys
    monkeypatch.setattr(sampling, "position_keys", lambda k, t_BN: original(k, t_BN * 0))
    assert g_test_fails(sample(params, fresh_kernel(), 1, "cdf"), law)


def test_planted_children_that_need_not_be_right(params, law, monkeypatch):
    original = verify.walk

    def walk(nodes, trees, drawn_M, room_B, stop_E):
        right_M = original(nodes, trees, drawn_M, room_B, stop_E)
        above_M = right_M[jnp.maximum(nodes.parents_M, 0)] & (nodes.parents_M >= 0)
        return right_M | (above_M & (nodes.tokens_M >= 0))

    monkeypatch.setattr(verify, "walk", walk)
    assert g_test_fails(sample(params, fresh_kernel(), 1, "cdf", random_trees(0), batches=32), law)


def test_planted_entries_that_are_not_written(params, law, monkeypatch):
    monkeypatch.setattr(kv_cache.KVCache, "written", lambda cache, pending: cache)
    assert g_test_fails(sample(params, fresh_kernel(), 1, "cdf", random_trees(0), batches=32), law)


def test_planted_nodes_that_see_all_nodes_before_them(params, law, monkeypatch, fresh_layer):
    original = transformer.attend_nodes

    def attend(*arguments):
        *arrays, trees = arguments
        if trees is not None:
            before_M = jnp.where(trees.place_M > 0, jnp.arange(len(trees.row_M)) - 1, -1)
            trees = dataclasses.replace(trees, parent_M=before_M)
        return original(*arrays, trees)

    monkeypatch.setattr(transformer, "attend_nodes", attend)
    assert g_test_fails(sample(params, fresh_kernel(), 1, "cdf", random_trees(0), batches=32), law)

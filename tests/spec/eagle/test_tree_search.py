"""Trees by the jitted search equal a search that is written out, path by path."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_cache import dense_cache, own_pages

from reprise.models.attention import kv_cache
from reprise.models.attention.attention import attend, causal_mask
from reprise.models.attention.kv_cache import PagedStates
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.spec.draft_cache import drafting
from reprise.spec.draft_cache.drafting import END_COLUMNS
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import EagleConfig
from reprise.spec.eagle.drafter import TreeDrafting
from reprise.spec.eagle.model import DeviceWeights
from reprise.spec.eagle.tree_search import Search
from reprise.spec.verification import sampling

POLICY = ModelConfig(
    "qwen3", 23, 16, 4, 4, 2, 8, 24, qk_norm=True, tied_embeddings=True, max_positions=64
)
S, B = 24, 3
LENGTH_B = np.array([5, 9, 20])
IDS = np.array([1, 2, 4, 5, 7, 8, 9, 11, 12, 17, 20, 21], np.int32)


def make(design: str, ids: np.ndarray | None, seed: int = 0, head_dim: int = 8):
    model = dataclasses.replace(POLICY, head_dim=head_dim)
    config = eagle.config_for(model, design, draft_vocab_size=0 if ids is None else len(ids))
    policy = transformer.init(model, jax.random.key(seed))
    params = eagle.init(config, jax.random.key(seed + 1))
    frozen = eagle.frozen(policy, None if ids is None else jnp.asarray(ids))
    # logits far apart, so that no order hangs on rounding
    frozen = eagle.SharedParams(frozen.embedding_VD * 20, frozen.head_UD * 20, frozen.draft_ids_U)
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(B, 1, S, config.hidden_width)).astype(np.float32)
    tokens = rng.integers(0, POLICY.vocab_size, (B, S + 1)).astype(np.int32)
    return config, params, frozen, hidden, tokens


MOST = 26  # entries of a path


@partial(jax.jit, static_argnames="config")
def all_outputs(config: EagleConfig, params, embedding_VD, g_TD, next_T):
    def look(q, k, v):
        return attend(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), causal_mask(MOST))

    positions_1T = jnp.arange(MOST)[None]
    return eagle.layer_outputs(
        config, params, embedding_VD, next_T[None], g_TD[None], positions_1T, look
    )[0]


def path_output(config: EagleConfig, params, frozen, hidden_SW, tokens, length: int, path):
    """o of the last entry of a path of draft tokens, recomputed token by token."""
    D = config.layer.d_model
    g_TD, next_T = np.zeros((MOST, D), np.float32), np.zeros(MOST, np.int32)
    g_TD[:length] = eagle.features(config, params, jnp.asarray(hidden_SW[:length]))
    next_T[:length] = tokens[1 : length + 1]
    out_TD = g_TD
    for n, draft in enumerate([None, *path]):
        if draft is not None:
            g_TD[length + n - 1], next_T[length + n - 1] = out_TD[length + n - 2], draft
        out_TD = all_outputs(config, params, frozen.embedding_VD, g_TD, next_T)
    return out_TD[length + len(path) - 1]


def written_out(config, params, frozen, hidden_SW, tokens, length, ids, *, K, depth, M):
    """(token, parent, probability) of the best M candidates, parents numbered as they come."""
    candidates: list[tuple[float, int, tuple[int, ...]]] = []  # sum, parent, path

    def children(path, total, parent):
        out = path_output(config, params, frozen, hidden_SW, tokens, length, path)
        logprob = jax.nn.log_softmax(eagle.logits(config, params, frozen.head_UD, out))
        best = np.argsort(-np.asarray(logprob), kind="stable")[:K]
        found = []
        for at in best.tolist():
            token = at if ids is None else int(ids[at])
            found.append((total + float(logprob[at]), parent, (*path, token)))
        return found

    beams = [(0.0, -1, ())]
    for _ in range(depth):
        new = []
        for total, parent, path in beams:
            new += children(path, total, parent)
        first = len(candidates)
        candidates += new
        order = sorted(range(len(new)), key=lambda i: (-new[i][0], i))[:K]
        beams = [(new[i][0], first + i, new[i][2]) for i in order]
    order = sorted(range(len(candidates)), key=lambda i: (-candidates[i][0], i))[:M]
    rank = {i: r for r, i in enumerate(order)}
    return [
        (candidates[i][2][-1], rank.get(candidates[i][1], -1), np.exp(candidates[i][0]))
        for i in order
    ]


def ends(tokens, length_B, window_tokens, temperature=1.0, emitted_B=0, most_B=1):
    """A table for drafts from the ends of rows with so many entries; row b is in slot b."""
    W, total_B = window_tokens, np.asarray(length_B) + 1
    table_BX = np.zeros((B, W + len(END_COLUMNS)), np.int32)
    for b, start in enumerate(np.maximum(total_B - W, 1)):
        table_BX[b, :W] = np.pad(tokens[b], (0, W))[start : start + W]
    heat = np.float32([temperature, 0, 1]).view(np.int32)
    columns = np.arange(B), total_B, emitted_B, np.arange(B), most_B, *heat
    for x, values in enumerate(columns):
        table_BX[:, W + x] = values
    return table_BX


def chunks(tokens, first_P, width, rows_P=range(B)):
    """A table of chunks, row b of slot b."""
    found = [[b, b, t, *tokens[b, t : t + width]] for b, t in zip(rows_P, first_P, strict=True)]
    return np.array(found, np.int32)


def empty(config):
    return dense_cache(config.layer, B, S)


def inputs(params, frozen, hidden):
    """Weights, the key of the noise, and the hidden states of the policy in one page a slot."""
    constants = DeviceWeights(params, frozen), sampling.step_key(0, 0)
    return constants, (PagedStates(jnp.asarray(hidden), own_pages(B)),)


def drafted(config, params, frozen, hidden, tokens, ids, *, K, depth, M, temperature=1.0, **more):
    search = TreeDrafting(Search(config, K, max_depth=4, **more))
    given = inputs(params, frozen, hidden)
    cache, C, W = empty(config), 8, 4
    for first in range(1, int(LENGTH_B.max()), C):  # all but the window of the last entries
        first_P = np.full(B, min(first, S + 1 - C))
        cache = drafting.catch_up(given, cache, chunks(tokens, first_P, C), drafting=search)
    table_BX = ends(tokens, LENGTH_B, W, temperature, emitted_B=np.arange(B))
    args = given, cache, table_BX, jnp.int32(depth)
    return drafting.unpack(drafting.draft(*args, drafting=search, max_tokens=M)[1])


@pytest.mark.parametrize(
    ("design", "ids", "K", "depth", "M", "head_dim"),
    [
        ("eagle", None, 3, 3, 12, 8),
        ("eagle3", IDS, 3, 3, 12, 8),
        ("eagle", None, 2, 1, 5, 8),
        ("eagle", None, 2, 4, 5, 8),
        ("eagle", None, 3, 4, 12, 16),  # that the kernel of CPUs takes
    ],
)
def test_trees_are_those_of_a_search_that_is_written_out(
    design, ids, K, depth, M, head_dim
) -> None:
    setup = make(design, ids, head_dim=head_dim)
    tokens_BM, parents_BM, prob_BM, count_B = drafted(*setup, ids, K=K, depth=depth, M=M)
    config, params, frozen, hidden, tokens = setup
    for b in range(B):
        want = written_out(
            config, params, frozen, hidden[b, 0], tokens[b], LENGTH_B[b], ids, K=K, depth=depth, M=M
        )
        n = count_B[b]
        assert n == len(want)
        assert list(zip(tokens_BM[b, :n], parents_BM[b, :n], strict=True)) == [w[:2] for w in want]
        np.testing.assert_allclose(prob_BM[b, :n], [w[2] for w in want], rtol=2e-3)


@pytest.mark.parametrize(("scheme", "ids"), [("cdf", IDS), ("gumbel_blocks", None)])
def test_drafts_of_shared_noise_are_drawn_with_the_noise_of_their_positions(scheme, ids) -> None:
    config, params, frozen, hidden, tokens = make("eagle", ids, seed=3)
    keys = sampling.request_keys(sampling.step_key(0, 0), jnp.arange(B))
    options = {"temperature": 0.7, "shared_noise": True, "scheme": scheme}
    # a head that leaves something to probability
    frozen = eagle.SharedParams(frozen.embedding_VD, frozen.head_UD / 40, frozen.draft_ids_U)
    tokens_BM, parents_BM, _, count_B = drafted(
        config, params, frozen, hidden, tokens, ids, K=1, depth=3, M=3, **options
    )
    for b in range(B):
        path: list[int] = []
        for level in range(3):
            out = path_output(config, params, frozen, hidden[b, 0], tokens[b], LENGTH_B[b], path)
            logits_U = eagle.logits(config, params, frozen.head_UD, out)
            logits_V = jnp.full(POLICY.vocab_size, -jnp.inf)
            logits_V = logits_V.at[jnp.arange(len(logits_U)) if ids is None else ids].set(logits_U)
            drawn, _ = sampling.draw(
                logits_V[None] / 0.7,
                sampling.position_keys(keys[b : b + 1], jnp.array([[b + level]]))[0],
                jnp.array([0.7]),
                scheme,
            )
            path.append(int(drawn[0]))
        assert tokens_BM[b].tolist() == path and parents_BM[b].tolist() == [-1, 0, 1]
        assert count_B[b] == 3


def test_a_deeper_search_compiles_nothing() -> None:
    setup = make("eagle", None)
    drafted(*setup, None, K=2, depth=2, M=6)
    before = drafting.draft._cache_size()
    drafted(*setup, None, K=2, depth=4, M=6)
    assert drafting.draft._cache_size() == before


def test_rows_at_rest_are_written_nowhere() -> None:
    """And what others draft is as it was."""
    config, params, frozen, hidden, tokens = make("eagle", None)
    depth, C = 3, 4
    search = TreeDrafting(Search(config, 2, depth))
    given = inputs(params, frozen, hidden)
    rng = np.random.default_rng(0)
    held = kv_cache.map_arrays(
        lambda x, _: rng.normal(size=x.shape).astype(np.float32), empty(config)
    )

    def changed(cache):
        pairs = zip((*cache.keys, *cache.values), (*held.keys, *held.values), (3, 2), strict=True)
        differ = [np.moveaxis(np.asarray(new) != was, axis, 1) for new, was, axis in pairs]
        return np.stack([x.reshape(B, S, -1).any(axis=2) for x in differ])

    def draft(most_B):
        table_BX = ends(tokens, np.where(most_B, LENGTH_B, -1), C, most_B=most_B)
        state = given, jax.tree.map(jnp.array, held), table_BX, jnp.int32(depth)
        return drafting.draft(*state, drafting=search, max_tokens=5)

    rest = 0  # the first row's angles choose a branch for all
    cache, packed = draft(np.arange(B) != rest)
    at_S = np.arange(S)
    window_BS = (at_S >= LENGTH_B[:, None] - C) & (at_S < LENGTH_B[:, None])
    window_BS[rest] = False
    np.testing.assert_array_equal(changed(cache), np.stack([window_BS, window_BS]))
    alone = draft(np.ones(B))[1]
    np.testing.assert_array_equal(np.delete(packed, rest, 0), np.delete(alone, rest, 0))


def test_chunks_are_written_where_they_belong_and_padding_nowhere() -> None:
    """Several of one row in one pass, and one that ends with the row."""
    config, params, frozen, hidden, tokens = make("eagle", None)
    search, C = TreeDrafting(Search(config, 2, 3)), 4
    given = inputs(params, frozen, hidden)
    table_PX = chunks(tokens, (5, 9, S + 1 - C, 1), C, rows_P=(1, 1, 2, 0))
    table_PX[-1, 0] = B
    cache = drafting.catch_up(given, empty(config), table_PX, drafting=search)
    whole = empty(config)
    for first in range(1, S + 1, C):
        table_BX = chunks(tokens, np.full(B, first), C)
        whole = drafting.catch_up(given, whole, table_BX, drafting=search)
    written = np.zeros((B, S), bool)
    written[1, 4:12] = written[2, S - C :] = True
    pairs = (*cache.keys, *cache.values), (*whole.keys, *whole.values)
    for got, want, axis in zip(*pairs, (3, 2), strict=True):
        got, want = (np.moveaxis(np.asarray(x), axis, 1) for x in (got, want))
        assert (want != 0).any(axis=(2, 3)).all()
        want = np.where(written[:, :, None, None], want, 0)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

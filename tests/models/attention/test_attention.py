"""Attention of packed nodes and chunks against the whole sequence that each token ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafts_by_hand import Draft, stack
from flax import struct

from reprise.models.attention.attention import Chunks, attend_chunks, attend_nodes, finite_values
from reprise.models.attention.kv_cache import Pages
from reprise.spec.verification import nodes as packed_nodes

H, K, h, S = 4, 2, 8, 12
T = 4  # positions of a page
ATTEND = jax.jit(attend_nodes)


@struct.dataclass
class PortablePages(Pages):
    """Pages without a kernel."""

    def of_new(self, q_XHh, k_XKh, v_XKh, after, portable):
        return portable()


def one_page(keys_BKhS, values_BKSh):
    """One page for each slot, by the kernel of CPUs."""
    return Pages(keys_BKhS, values_BKSh, np.arange(3, dtype=np.int32)[:, None], for_cpu=True)


def pages(keys_BKhS, values_BKSh, for_cpu=True):
    """The same positions in pages, which lie in any order among pages of others."""
    B, N = len(values_BKSh), -(-S // T)
    table_BN = np.random.default_rng(1).permutation(B * N + 3)[: B * N].reshape(B, N)

    def cut(rows_BKSh):
        padded = np.pad(rows_BKSh, ((0, 0), (0, 0), (0, N * T - S), (0, 0)))
        by_page = padded.reshape(B, K, N, T, h).swapaxes(1, 2).reshape(B * N, K, T, h)
        found = np.full((B * N + 3, K, T, h), 1e3, np.float32)
        found[table_BN.reshape(-1)] = by_page
        return found

    keys_PKTh = cut(keys_BKhS.swapaxes(2, 3))
    keys = keys_PKTh.swapaxes(2, 3) if for_cpu else keys_PKTh
    return Pages(keys, cut(values_BKSh), table_BN.astype(np.int32), for_cpu=for_cpu)


def portable(keys_BKhS, values_BKSh):
    """The pages of a CPU without its kernel."""
    return PortablePages(**vars(pages(keys_BKhS, values_BKSh)))


def of_accelerator(keys_BKhS, values_BKSh):
    """The pages of an accelerator, whose keys are not transposed, without its kernel."""
    return PortablePages(**vars(pages(keys_BKhS, values_BKSh, for_cpu=False)))


LAYOUTS = pytest.mark.parametrize("cached", [one_page, pages, portable, of_accelerator])


def one_by_one(q, k, v, keys, values, lengths, slots, parents):
    """softmax(q·k/√h)·v of each node over its row's live positions and its path, in float64."""
    out = []
    for m in range(len(q)):
        path, n = [], m
        while n >= 0:
            path.append(n)
            n = parents[n]
        b, length = slots[m], lengths[slots[m]]
        k_TKh = np.concatenate([keys[b, :, :, :length].transpose(2, 0, 1), k[path[::-1]]])
        v_TKh = np.concatenate([values[b, :, :length].transpose(1, 0, 2), v[path[::-1]]])
        k_THh, v_THh = (np.repeat(x, H // K, axis=1).astype(float) for x in (k_TKh, v_TKh))
        scores_HT = np.einsum("hd,thd->ht", q[m].astype(float), k_THh) / np.sqrt(h)
        weights_HT = np.exp(scores_HT - scores_HT.max(1, keepdims=True))
        weights_HT /= weights_HT.sum(1, keepdims=True)
        out.append(np.einsum("ht,thd->hd", weights_HT, v_THh))
    return np.stack(out)


def inputs(num_nodes, lengths, scale=1.0):
    rng = np.random.default_rng(0)
    B = len(lengths)

    def normal(*shape):
        return (scale * rng.normal(size=shape)).astype(np.float32)

    new = normal(num_nodes, H, h), normal(num_nodes, K, h), normal(num_nodes, K, h)
    return *new, normal(B, K, h, S), normal(B, K, S, h), np.asarray(lengths, np.int32)


TREE = Draft([1, 2, 3, 4, 5], [-1, -1, 0, 2, 1])
DRAFTS = [
    [TREE, Draft([], []), TREE],
    [Draft(range(9), range(-1, 8)), Draft([1], [-1]), Draft([], [])],
]


LENGTHS = pytest.mark.parametrize(
    ("lengths", "scale"), [((0, 3, S), 1.0), ((S, 1, 7), 10.0)], ids=["", "sharp"]
)


@LENGTHS
@pytest.mark.parametrize("drafts", DRAFTS, ids=["trees", "one long chain"])
@pytest.mark.parametrize("num_nodes", [13, 24])
@LAYOUTS
def test_nodes_attend_to_their_row_and_their_path(cached, drafts, num_nodes, lengths, scale):
    found = stack(drafts, 9)
    packed = packed_nodes.pack(found, found.count_A, np.arange(3), 3, num_nodes, 12)
    _, slots_M, parents_M = packed[:3]
    arrays = inputs(num_nodes, lengths, scale)
    trees = packed_nodes.trees(packed_nodes.Nodes(*map(jnp.asarray, packed[:3])), 3, max_nodes=12)
    *new, keys, values, length_B = arrays
    got = ATTEND(*new, cached(keys, values), length_B, trees)
    real = slots_M < 3
    q, k, v, *rest = arrays
    want = one_by_one(q[real], k, v, *rest, slots_M, parents_M)
    np.testing.assert_allclose(np.asarray(got)[real], want, atol=1e-5 * scale**2)
    assert np.isfinite(got).all()  # of padding too


@pytest.mark.parametrize("lengths", [(0, 3, S), (S, 1, 7)])
@LAYOUTS
def test_a_node_a_row_attends_to_its_row_and_itself(cached, lengths):
    arrays = inputs(3, lengths)
    *new, keys, values, length_B = arrays
    got = ATTEND(*new, cached(keys, values), length_B, None)
    want = one_by_one(*arrays, np.arange(3), np.full(3, -1))
    np.testing.assert_allclose(got, want, atol=1e-5)


@LENGTHS
@LAYOUTS
def test_chunks_attend_to_their_row_and_to_their_tokens_so_far(cached, lengths, scale):
    C, slot_T = 4, np.array([2, 0, -1])  # the last is padding
    *new, keys, values, length_B = inputs(3 * C, lengths, scale)
    chunks = Chunks(slot_T, length_B[slot_T], np.zeros((3, C), np.int32))
    got = jax.jit(attend_chunks)(
        *(x.reshape(3, C, *x.shape[1:]) for x in new), cached(keys, values), chunks
    )
    parents_X = np.where(np.arange(2 * C) % C == 0, -1, np.arange(2 * C) - 1)
    q_XHh, k_XKh, v_XKh = (x[: 2 * C] for x in new)
    where = np.repeat(slot_T[:2], C), parents_X
    want = one_by_one(q_XHh, k_XKh, v_XKh, keys, values, length_B, *where)
    np.testing.assert_allclose(got[:2].reshape(want.shape), want, atol=1e-5 * scale**2)
    assert np.isfinite(got).all()


@LAYOUTS
def test_chunks_of_a_row_see_those_before_them(cached):
    """Whatever their order; the last of row 1 begins three tokens before the one before it ends."""
    C, slot_T, start_T = 4, np.array([1, 0, 1, 1, -1]), np.array([7, 3, 3, 8, 0])
    *new, keys, values, _ = inputs(5 * C, (3, 3, 0), 1.0)
    chunks = Chunks(slot_T, start_T, np.zeros((5, C), np.int32))
    new = [np.array(x).reshape(5, C, *x.shape[1:]) for x in new]
    for x in new[1:]:
        x[3, :3] = x[0, 1:]  # the same tokens
    got = jax.jit(attend_chunks)(*new, cached(keys, values), chunks)
    path = [(2, c) for c in range(C)] + [(0, c) for c in range(C)] + [(3, 3)]
    q_XHh, k_XKh, v_XKh = (np.stack([x[at] for at in path]) for x in new)
    want = one_by_one(
        *(q_XHh, k_XKh, v_XKh, keys, values, np.array([3, 3, 0])),
        *(np.ones(9, int), np.arange(-1, 8)),
    )
    np.testing.assert_allclose(np.stack([got[at] for at in path]), want, atol=1e-5)
    alone = jax.jit(attend_chunks)(
        *(x[1:2] for x in new),
        cached(keys, values),
        Chunks(slot_T[1:2], start_T[1:2], np.zeros((1, C))),
    )
    np.testing.assert_allclose(got[1], alone[0], atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@LAYOUTS
def test_numbers_of_others_that_are_not_finite_change_no_bit(cached, bad):
    """Entries behind the length, of other rows, and new tokens of other rows; own ones do count."""
    C = 3
    lengths = (3, 7, 2)
    slot_T = np.array([0, 1, 2])
    *new, keys, values, length_B = inputs(9, lengths)
    packed = packed_nodes.pack(
        stack([Draft([1, 2], [-1, 0])] * 3, 9), np.full(3, 2), np.arange(3), 3, 9, 12
    )
    trees = packed_nodes.trees(packed_nodes.Nodes(*map(jnp.asarray, packed[:3])), 3, max_nodes=12)
    chunks = Chunks(slot_T, length_B, np.zeros((3, C), np.int32))

    def attended(*arrays):
        # arrays of one kind, so that both calls run the same program
        k_XKh, v_XKh, keys, values = map(jnp.asarray, arrays)
        held = cached(keys, values)
        of_chunks = [x.reshape(3, C, *x.shape[1:]) for x in (new[0], k_XKh, v_XKh)]
        return (
            np.asarray(ATTEND(new[0], k_XKh, v_XKh, held, length_B, trees)).reshape(3, -1),
            np.asarray(ATTEND(new[0][::3], k_XKh[::3], v_XKh[::3], held, length_B, None)),
            np.asarray(jax.jit(attend_chunks)(*of_chunks, held, chunks)).reshape(3, -1),
        )

    given = *new[1:], keys, values
    wanted = attended(*given)
    k_XKh, v_XKh, keys, values = map(np.copy, given)
    for row, length in ((0, 3), (2, 2)):  # entries of a broken row that was here before
        keys[row, :, :, length:], values[row, :, length:] = np.nan, 0
    k_XKh[3:6] = v_XKh[3:6] = bad  # a row whose adapter is broken
    keys[1], values[1] = np.nan, 0
    k_XKh, v_XKh = finite_values(k_XKh, v_XKh)
    assert np.isfinite(v_XKh).all()
    for found, want in zip(attended(k_XKh, v_XKh, keys, values), wanted, strict=True):
        np.testing.assert_array_equal(found[[0, 2]], want[[0, 2]])
        assert not np.isfinite(found[1]).any()
    v_XKh = np.copy(given[1])
    v_XKh[3, 0, 0] = bad  # one number of the row itself
    for found in attended(*finite_values(given[0], v_XKh), *given[2:]):
        assert not np.isfinite(found[1]).all() and np.isfinite(found[[0, 2]]).all()

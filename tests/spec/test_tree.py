"""Draft trees by hand: closure, depth, packing and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec.tree import NO_DRAFT, PADDING, Draft, ancestors, chain, depths, pack, roots

ANCESTORS = jax.jit(ancestors)

#        0
#      / | \
#     1  2  5
#     |  |
#     3  4
#     |
#     6
PARENTS = [-1, 0, 0, 1, 2, 0, 3]
REACH = [
    [1, 0, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0, 0],
    [1, 1, 0, 1, 0, 0, 0],
    [1, 0, 1, 0, 1, 0, 0],
    [1, 0, 0, 0, 0, 1, 0],
    [1, 1, 0, 1, 0, 0, 1],
]


def test_ancestors_and_depths_by_hand():
    chain_parents = [-1, 0, 1, 2, 3, 4, 5]
    reach = ANCESTORS(jnp.asarray([PARENTS, chain_parents]))
    np.testing.assert_array_equal(reach[0], np.asarray(REACH, bool))
    np.testing.assert_array_equal(reach[1], np.tril(np.ones((7, 7), bool)))
    np.testing.assert_array_equal(depths(reach), [[0, 1, 1, 2, 2, 1, 3], range(7)])


@pytest.mark.parametrize("N", [1, 2, 3, 8, 9, 33])
def test_ancestors_of_random_trees(N):
    rng = np.random.default_rng(N)
    parents_BN = np.asarray([[-1] + [rng.integers(0, i) for i in range(1, N)] for _ in range(3)])
    want = np.zeros((3, N, N), bool)
    for b in range(3):
        for i in range(N):
            j = i
            while j >= 0:
                want[b, i, j] = True
                j = parents_BN[b, j]
    np.testing.assert_array_equal(ANCESTORS(jnp.asarray(parents_BN)), want)


def test_roots_are_trees_of_one_node():
    tree = roots(jnp.asarray([4, 9]))
    np.testing.assert_array_equal(tree.tokens_BN, [[4], [9]])
    np.testing.assert_array_equal(tree.parents_BN, [[-1], [-1]])


def test_pack_by_hand():
    drafts = [chain([7, 8, 9]), NO_DRAFT, Draft([5, 6, 5], [-1, -1, 1])]
    tokens_BN, parents_BN = pack(drafts, 5)
    P = PADDING
    np.testing.assert_array_equal(tokens_BN, [[0, 7, 8, 9, P], [0, P, P, P, P], [0, 5, 6, 5, P]])
    np.testing.assert_array_equal(
        parents_BN, [[-1, 0, 1, 2, 0], [-1, 0, 0, 0, 0], [-1, 0, 0, 2, 0]]
    )
    assert tokens_BN.dtype == parents_BN.dtype == np.int32


def test_pack_cuts_what_is_longer():
    tokens_BN, parents_BN = pack([chain([7, 8, 9]), Draft([1, 2, 3], [-1, -1, 0])], 3)
    np.testing.assert_array_equal(tokens_BN, [[0, 7, 8], [0, 1, 2]])
    np.testing.assert_array_equal(parents_BN, [[-1, 0, 1], [-1, 0, 0]])
    tokens_BN, parents_BN = pack([chain([7])], 1)
    assert (tokens_BN.tolist(), parents_BN.tolist()) == ([[0]], [[-1]])


def test_a_fault_behind_the_cut_is_not_looked_at():
    pack([Draft([7, 8, 8], [-1, 0, 9])], 3)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([1, 2], [-1, 1]), r"node 1 of slot 1 .*parent 1.*−1 … 0"),
        (Draft([1], [-2]), "node 0 of slot 1 .*parent -2"),
        (Draft([1], [0]), "node 0 of slot 1 .*parent 0"),
        (Draft([3, -1], [-1, 0]), "node 1 of slot 1 .*token -1"),
        (Draft([4, 4], [-1, -1]), "slot 1 .*siblings"),
        (Draft([4, 5, 5], [-1, 0, 0]), "siblings"),
    ],
)
def test_pack_refuses_what_is_no_tree(draft, message):
    with pytest.raises(ValueError, match=message):
        pack([NO_DRAFT, draft], 4)


def test_cousins_may_share_a_token():
    pack([Draft([4, 5, 6, 6], [-1, -1, 0, 1])], 5)

"""Draft trees by hand: closure, depth, packing and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec.tree import ancestors, depths, roots

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

"""Packed nodes by hand: packing, ancestors, tiles; and their bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafts_by_hand import Draft, chain, stack

from reprise.spec.drafter import PADDING
from reprise.spec.verification import nodes
from reprise.spec.verification.nodes import Nodes

BRANCHING = Draft([10, 20, 11, 21, 22], [-1, -1, 0, 1, 1])


def test_packing_by_hand():
    """Slots 0 and 2 have drafts, slot 1 rests; of the chain's three tokens two are taken."""
    drafts = stack([chain([7, 8, 9]), BRANCHING], 5)
    got = nodes.pack(drafts, np.array([2, 5]), np.array([2, 0]), 3, 12, 6)
    want = [
        [0, 10, 20, 11, 21, 22, 0, 0, 7, 8, PADDING, PADDING],
        [0, 0, 0, 0, 0, 0, 1, 2, 2, 2, 3, 3],
        [-1, 0, 0, 1, 2, 2, -1, -1, 7, 8, -1, -1],
    ]
    np.testing.assert_array_equal(got[:3], want)
    assert (got[3] == nodes.NOT_GIVEN).all()
    got[3:, 4] = 9, np.array(-1.5, np.float32).view(np.int32)
    given = nodes.unpack(jnp.asarray(got))
    assert (int(given.given_M[4]), float(given.min_logprob_M[4])) == (9, -1.5)


@pytest.mark.parametrize(("num_nodes", "max_nodes"), [(4, 9), (8, 3)])
def test_more_than_a_round_or_a_tree_of_it_holds_is_refused(num_nodes, max_nodes):
    drafts = stack([chain([7, 8, 9])], 3)
    sizes = np.array([0]), 2
    with pytest.raises(ValueError, match="the budget took 3 draft tokens, 3 of one request: exp"):
        nodes.pack(drafts, np.array([3]), *sizes, num_nodes, max_nodes)
    nodes.pack(drafts, np.array([2]), *sizes, num_nodes, max_nodes)


@pytest.mark.parametrize("parent", [1, 2, 7, -2])
def test_a_parent_that_does_not_come_before_is_named(parent):
    drafts = stack([chain([5]), chain([7, 8, 9])], 3)
    drafts.parents_AN[1, 1] = parent
    with pytest.raises(ValueError, match=f"token 1 of live request 1 is 8 behind parent {parent}"):
        nodes.pack(drafts, drafts.count_A, np.array([0, 1]), 2, 8, 4)


@pytest.mark.parametrize("twin", range(1, 5))
def test_siblings_with_one_token_are_refused_wherever_they_are(twin):
    """Tokens may repeat elsewhere in a tree, and behind what is taken of it."""
    tokens, parents = [4, 5, 4, 6, 5], [-1, -1, 0, -1, 0]
    drafts = stack([Draft(tokens, parents)], 6)
    nodes.pack(drafts, drafts.count_A, np.array([0]), 1, 8, 8)
    drafts.tokens_AN[0, 5], drafts.parents_AN[0, 5] = tokens[twin], parents[twin]
    nodes.pack(drafts, drafts.count_A, np.array([0]), 1, 8, 8)
    with pytest.raises(ValueError, match=r"draft token 5 .* siblings that differ"):
        nodes.pack(drafts, drafts.count_A + 1, np.array([0]), 1, 8, 8)


PATHS = jax.jit(nodes._paths)


@pytest.mark.parametrize("kind", ["tree", "chain"])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 9, 33])
def test_paths_of_trees(size, kind):
    rng = np.random.default_rng(size)
    parents = [-1] + [int(rng.integers(-1, i)) for i in range(1, size)]
    if kind == "chain":
        parents = list(range(-1, size - 1))
    want = np.zeros((size, size), bool)
    for i in range(size):
        j = i
        while j >= 0:
            want[i, j] = True
            j = parents[j]
    np.testing.assert_array_equal(PATHS(jnp.asarray([parents]))[0], want)


def test_chains_are_told_from_trees():
    drafts = stack([chain([7, 8]), BRANCHING, chain([])], 5)
    rows_A = np.arange(3)
    for taken, are_chains in (([2, 2, 0], False), ([2, 1, 0], True), ([0, 0, 0], True)):
        table_5M = nodes.pack(drafts, np.array(taken), rows_A, 3, 12, 6)
        assert nodes.are_chains(table_5M[2]) == are_chains, taken


OF_TREES = jax.jit(nodes.of_trees, static_argnums=3)


@pytest.mark.parametrize("count_B", [(1, 4, 2), (4, 1, 4), (1, 1, 1)])
def test_trees_on_the_device_are_packed_as_the_host_would(count_B):
    drafts = stack([chain([7, 8, 9]), chain([4]), Draft([1, 2, 3], [-1, -1, 1])], 3)
    taken_A = np.minimum(np.array(count_B) - 1, drafts.count_A)
    want = nodes.pack(drafts, taken_A, np.arange(3), 3, 9, 4)
    tokens_BN = jnp.pad(drafts.tokens_AN, ((0, 0), (1, 0)))
    parents_BN = jnp.pad(drafts.parents_AN + 1, ((0, 0), (1, 0)), constant_values=-1)
    got, place_BN = OF_TREES(tokens_BN, parents_BN, jnp.asarray(taken_A + 1), 9)
    np.testing.assert_array_equal(jnp.stack(jax.tree.leaves(got)), want[:3])
    inside_BN = np.arange(4) <= taken_A[:, None]
    assert ((np.asarray(place_BN) < 9) == inside_BN).all()
    np.testing.assert_array_equal(
        got.tokens_M[place_BN[inside_BN]], np.asarray(tokens_BN)[inside_BN]
    )


@pytest.mark.parametrize("num_nodes", [9, 12])
def test_where_nodes_lie_by_hand(num_nodes):
    drafts = stack([chain([7, 8]), BRANCHING], 5)
    table = nodes.pack(drafts, np.array([1, 5]), np.array([2, 0]), 3, num_nodes, 6)
    found = nodes.trees(Nodes(*map(jnp.asarray, table[:3])), 3, max_nodes=6)
    assert found.first_B.tolist() == [0, 6, 7]
    assert found.place_M[:9].tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 1]
    branching = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0]]
    branching += [[1, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 0], [1, 0, 1, 0, 0, 1]]
    np.testing.assert_array_equal(found.path_BWW[0], np.asarray(branching, bool))
    np.testing.assert_array_equal(found.path_BWW[2, :2, :2], np.tril(np.ones((2, 2), bool)))

"""The walk and the node mask by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import transformer
from models.config import ModelConfig
from models.kv_cache import KVCache
from spec.config import SamplingConfig
from spec.drafter import plant, stack
from spec.sampling import Processing
from spec.tree import PADDING, Draft, DraftTree, ancestors, chain
from spec.verify import (
    Emitted,
    Slots,
    _advance,
    decode_rounds,
    node_mask,
    verify_round,
    walk,
)

N = 6
WALK = jax.jit(walk)
MASK = jax.jit(node_mask, static_argnums=2)
EOS = 99
BRANCHING = Draft([10, 20, 11, 21, 22], [-1, -1, 0, 1, 1])  # nodes 1 … 5


def walked(draft, drawn, room=100, stop=(EOS,)):
    """Path and count of one slot: `drawn[i]` is the draw at node i."""
    tokens_BN, parents_BN = plant(stack([draft], N), np.arange(1), 1, N)
    drawn_BN = np.asarray([list(drawn) + [0] * (N - len(drawn))], np.int32)
    tree = DraftTree(jnp.asarray(tokens_BN), jnp.asarray(parents_BN))
    stop_E = np.asarray((*stop, *[-1] * (2 - len(stop))), np.int32)
    path_BN, count_B = WALK(tree, drawn_BN, np.asarray([room], np.int32), stop_E)
    assert not np.asarray(path_BN)[0, int(count_B[0]) :].any()
    return path_BN[0, : int(count_B[0])].tolist()


@pytest.mark.parametrize(
    ("name", "draft", "drawn", "path"),
    [
        ("no child", Draft([], []), [5], [0]),
        ("no child equals the draw", chain([1, 2, 3]), [9, 2, 3, 4], [0]),
        ("the whole chain", chain([1, 2, 3]), [1, 2, 3, 4], [0, 1, 2, 3]),
        ("a chain that is wrong in the middle", chain([1, 2, 3]), [1, 7, 3, 4], [0, 1]),
        ("first branch", BRANCHING, [10, 11, 0, 77], [0, 1, 3]),
        ("second branch", BRANCHING, [20, 11, 22, 0, 0, 77], [0, 2, 5]),
        ("a cousin's token is no child", BRANCHING, [10, 21], [0, 1]),
        ("a node of another branch is not entered", BRANCHING, [20, 11, 11], [0, 2]),
        ("an end token, though drafted", chain([EOS, 2]), [EOS, 2, 3], [0]),
        ("an end token inside the run", chain([1, EOS, 3]), [1, EOS, 3, 4], [0, 1]),
        ("an end token as the bonus", chain([1]), [1, EOS], [0, 1]),
    ],
)
def test_walk_by_hand(name, draft, drawn, path):
    assert walked(draft, drawn) == path, name


def test_walk_ends_at_the_limit():
    full = [1, 2, 3, 4]
    assert walked(chain([1, 2, 3]), full, room=3) == [0, 1, 2]
    assert walked(chain([1, 2, 3]), full, room=1) == [0]
    assert walked(chain([1, 2, 3]), full, room=0) == []


def test_any_of_several_end_tokens_ends():
    assert walked(chain([1, 2, 3]), [1, 2, 3], stop=(EOS, 2)) == [0, 1]
    assert walked(chain([1, 2, 3]), [1, 2, 3, 4], stop=()) == [0, 1, 2, 3]


def test_padding_is_never_accepted():
    # a draw cannot be PADDING; its nodes hang from the root, as every real token shows
    for token in range(5):
        assert walked(chain([7]), [token] * N) == [0]
    tokens_BN, _ = plant(stack([chain([7])], N), np.arange(1), 1, N)
    assert (tokens_BN[0, 2:] == PADDING).all()


def test_a_walk_through_every_node():
    assert walked(chain(range(1, N)), [*range(1, N), 50]) == list(range(N))


def test_rows_walk_on_their_own():
    drafts = stack([chain([1, 2]), chain([5]), BRANCHING], N)
    tokens_BN, parents_BN = plant(drafts, np.arange(3), 3, N)
    drawn_BN = np.asarray([[1, 2, 3, 0, 0, 0], [6, 0, 0, 0, 0, 0], [20, 0, 21, 0, 8, 0]], np.int32)
    tree = DraftTree(jnp.asarray(tokens_BN), jnp.asarray(parents_BN))
    stop_E = np.asarray([EOS, -1], np.int32)
    path_BN, count_B = WALK(tree, drawn_BN, np.asarray([9, 9, 9], np.int32), stop_E)
    np.testing.assert_array_equal(count_B, [3, 1, 3])
    np.testing.assert_array_equal(path_BN, [[0, 1, 2, 0, 0, 0], [0] * 6, [0, 2, 4, 0, 0, 0]])


def test_trees_of_one_node():
    tree = DraftTree(jnp.asarray([[3], [4]]), jnp.asarray([[-1], [-1]]))
    path_BN, count_B = walk(tree, jnp.asarray([[5], [6]]), jnp.asarray([2, 0]), jnp.asarray([EOS]))
    np.testing.assert_array_equal(path_BN, [[0], [0]])
    np.testing.assert_array_equal(count_B, [1, 0])


def test_node_mask_by_hand():
    reach = ancestors(jnp.asarray([[-1, 0, 0, 1], [-1, 0, 1, 2]]))
    mask = MASK(jnp.asarray([2, 0]), reach, 7)
    want_branching = [  # two committed positions, then the nodes at 2 … 5; 6 is dead
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0],
        [1, 1, 1, 1, 0, 1, 0],
    ]
    want_chain = [  # nothing committed
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
    ]
    np.testing.assert_array_equal(mask, np.asarray([want_branching, want_chain], bool))


def test_node_mask_of_one_node_and_at_the_end_of_the_cache():
    one = ancestors(jnp.asarray([[-1], [-1]]))
    mask = MASK(jnp.asarray([0, 3]), one, 4)
    np.testing.assert_array_equal(mask, np.asarray([[[1, 0, 0, 0]], [[1, 1, 1, 1]]], bool))
    two = ancestors(jnp.asarray([[-1, 0]]))
    mask = MASK(jnp.asarray([2]), two, 4)
    np.testing.assert_array_equal(mask, np.asarray([[[1, 1, 1, 0], [1, 1, 1, 1]]], bool))


def make_slots(B, **columns):
    base = {
        "last_token": np.full(B, 7, np.int32),
        "length": np.full(B, 4, np.int32),
        "emitted": np.full(B, 2, np.int32),
        "limit": np.full(B, 5, np.int32),
        "active": np.ones(B, bool),
        "keys": jax.random.split(jax.random.key(0), B),
        "processing": Processing.of(SamplingConfig()),
    }
    return Slots(**jax.tree.map(jnp.asarray, base | columns))


def test_commit_of_a_round():
    #            goes on      ends at limit  end token      rests
    tokens_BN = [[1, 2, 0], [1, 2, 3], [1, EOS, 0], [8, 8, 8]]
    emitted = Emitted(
        jnp.asarray(tokens_BN, jnp.int32), jnp.zeros((4, 3)), jnp.asarray([2, 3, 2, 0], jnp.int32)
    )
    slots = make_slots(4, active=np.asarray([True, True, True, False]))
    after = jax.jit(_advance)(slots, emitted, jnp.asarray([EOS]))
    np.testing.assert_array_equal(after.last_token, [2, 3, EOS, 7])
    np.testing.assert_array_equal(after.length, [6, 7, 6, 4])
    np.testing.assert_array_equal(after.emitted, [4, 5, 4, 2])
    np.testing.assert_array_equal(after.active, [True, False, False, False])


TINY = ModelConfig("llama", 20, 16, 1, 2, 1, 8, 16, max_positions=64)
S = 16


def full_cache(B):
    """A cache with hidden states, all of it live."""
    rng = np.random.default_rng(0)

    def rows(*shape):
        return (jnp.asarray(rng.normal(size=(B, 1, *shape)), jnp.float32),)

    return KVCache(rows(8, S), rows(S, 8), rows(S, 16))


def rounds(kind, params, cache, slots):
    stop_E = np.asarray([-1], np.int32)
    static = {"config": TINY, "scheme": "cdf"}
    counts = np.int32(3), np.int32(99)
    B, num_nodes = len(slots.length), 4
    if kind == "trees":
        parents_BN = np.tile(np.asarray([-1, 0, 0, 1], np.int32), (B, 1))
        tree = DraftTree(np.ones((B, num_nodes), np.int32), parents_BN)
        return verify_round(params, cache, slots, tree, stop_E, **static)[0]
    return decode_rounds(params, cache, slots, stop_E, *counts, **static, max_rounds=3)[0]


@pytest.mark.parametrize("kind", ["plain", "trees"])
def test_rows_at_rest_are_written_nowhere(kind):
    """Wherever they end, and where rounds go on after a row has come to rest."""
    params = transformer.init(TINY, jax.random.key(0))
    length_B = np.asarray([0, 3, S - 3, S - 1, S, 4, S - 1], np.int32)
    active_B = np.asarray([0, 0, 0, 0, 0, 1, 1], bool)
    limit_B = np.asarray([5, 5, 5, 5, 5, 9, 1], np.int32)
    if kind != "plain":  # trees need their room in active rows
        active_B[-1] = False
    before = full_cache(len(length_B))
    want = jax.tree.map(np.asarray, before)
    slots = make_slots(
        len(length_B), length=length_B, active=active_B, limit=limit_B, emitted=limit_B * 0
    )
    after = rounds(kind, params, before, slots)
    for got, old in zip(jax.tree.leaves(after), jax.tree.leaves(want), strict=True):
        changed_B = (np.asarray(got) != old).reshape(len(old), -1).any(axis=1)
        np.testing.assert_array_equal(changed_B, active_B)
    if kind == "plain":  # the last row was active for one round, at its last position
        np.testing.assert_array_equal(after.values[0][-1, :, : S - 1], want.values[0][-1, :, :-1])

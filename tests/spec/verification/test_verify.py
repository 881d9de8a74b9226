"""The walk by hand, and what a round does to slots, to the cache and to what waits for it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_cache import dense_cache
from drafts_by_hand import Draft, chain, stack
from shapes import TINY

from reprise.models.attention import kv_cache
from reprise.models.attention.entries import Entries, no_pending
from reprise.models.decoder import transformer
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import no_drafts
from reprise.spec.verification import nodes as packed_nodes
from reprise.spec.verification.nodes import Nodes
from reprise.spec.verification.sampling import Processing
from reprise.spec.verification.verify import (
    Draws,
    Slots,
    decode_beside_chunks,
    decode_rounds,
    settle,
    verify_round,
    walk,
)

N = 6
EOS = 99
BRANCHING = Draft([10, 20, 11, 21, 22], [-1, -1, 0, 1, 1])  # nodes 1 … 5


@jax.jit
def emitted(nodes_5M, drawn_M, room_B, stop_E):
    nodes = Nodes(*nodes_5M[:3])
    return walk(nodes, packed_nodes.trees(nodes, len(room_B), N), drawn_M, room_B, stop_E)


def walked(draft, drawn, room=100, stop=(EOS,)):
    """The emitted nodes of one slot: `drawn[i]` is the draw at node i."""
    drafts = stack([draft], N)
    nodes_5M = packed_nodes.pack(drafts, drafts.count_A, np.arange(1), 1, N, N)
    drawn_M = np.asarray([*drawn, *[0] * (N - len(drawn))], np.int32)
    stop_E = np.asarray((*stop, *[-1] * (2 - len(stop))), np.int32)
    return np.nonzero(np.asarray(emitted(nodes_5M, drawn_M, np.full(1, room), stop_E)))[0].tolist()


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


def make_slots(B, **columns):
    base = {
        "last_token": np.full(B, 7, np.int32),
        "length": np.full(B, 4, np.int32),
        "emitted": np.full(B, 2, np.int32),
        "limit": np.full(B, 5, np.int32),
        "active": np.ones(B, bool),
        "adapter": np.zeros(B, np.int32),
        "keys": jax.random.split(jax.random.key(0), B),
        "processing": Processing.filled(SamplingConfig(), (B,)),
    }
    return Slots(**jax.tree.map(jnp.asarray, base | columns))


S = 16
M = 4  # nodes a slot, in rounds of trees


def full_cache(B):
    """A cache with hidden states, all of it live."""
    rng = np.random.default_rng(0)

    def numbers(array, _):
        return jnp.asarray(rng.normal(size=array.shape), jnp.float32)

    return kv_cache.map_arrays(numbers, dense_cache(TINY, B, S, feature_layers=()))


def arrays(cache):
    return [*cache.keys, *cache.values, *cache.features]


def rounds(kind, params, cache, slots):
    """Rounds, and the write of what they leave."""
    stop_E = np.asarray([-1], np.int32)
    static = {"config": TINY, "draws": Draws("cdf")}
    counts = np.int32(3), np.int32(99)
    B = len(slots.length)
    pending = no_pending(TINY, M * B, jnp.float32, ())
    if kind == "trees":
        drafts = stack([Draft([1, 2, 3], [-1, -1, 0])] * B, 3)
        nodes_5M = packed_nodes.pack(drafts, drafts.count_A, np.arange(B), B, M * B, M)
        cache, pending, *_ = verify_round(
            params, cache, pending, slots, nodes_5M, stop_E, None, **static, max_nodes=M
        )
    else:
        cache, pending, *_ = decode_rounds(
            params, cache, pending, slots, stop_E, *counts, **static, max_rounds=3
        )
    return settle(cache, pending)[0]


@pytest.mark.parametrize("kind", ["plain", "trees"])
def test_rows_at_rest_are_written_nowhere(kind):
    """Wherever they end, and where rounds go on after a row has come to rest."""
    params = transformer.init(TINY, jax.random.key(0))
    length_B = np.asarray([0, 3, S - 3, S - 1, S, 4, S - 1], np.int32)
    active_B = np.asarray([0, 0, 0, 0, 0, 1, 1], bool)
    limit_B = np.asarray([5, 5, 5, 5, 5, 9, 1], np.int32)
    before = full_cache(len(length_B))
    want = jax.tree.map(np.asarray, before)
    slots = make_slots(
        len(length_B), length=length_B, active=active_B, limit=limit_B, emitted=limit_B * 0
    )
    after = rounds(kind, params, before, slots)
    for got, old in zip(arrays(after), arrays(want), strict=True):
        changed_B = (np.asarray(got) != old).reshape(len(old), -1).any(axis=1)
        np.testing.assert_array_equal(changed_B, active_B)
    # the last row was active for one token, at its last position
    np.testing.assert_array_equal(after.values[0][-1, :, : S - 1], want.values[0][-1, :, :-1])


def test_only_accepted_entries_are_written_each_once_at_its_position():
    """Of a tree whose second branch is right: root, node 2 and node 5, at 4, 5 and 6."""
    cache = full_cache(2)
    want = jax.tree.map(np.array, cache)
    pending = no_pending(TINY, 12, jnp.float32, ())
    entries = Entries(
        tuple(jnp.arange(12.0)[:, None, None] + jnp.zeros((12, 1, 8)) for _ in range(1)),
        tuple(-jnp.arange(12.0)[:, None, None] + jnp.zeros((12, 1, 8)) for _ in range(1)),
        (jnp.arange(12.0)[:, None] + jnp.zeros((12, 16)),),
    )
    rows = jnp.asarray([0] * 6 + [1] * 6)
    positions = jnp.asarray([4, 5, 5, 6, 6, 6] * 2)
    accepted = jnp.asarray([1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0], bool)
    pending = pending.replaced(entries, rows, positions, accepted)
    cache, pending = settle(cache, pending)
    want.values[0][0, 0, 4:7] = -np.asarray([0, 2, 5])[:, None]
    want.values[0][1, 0, 4] = -6
    want.keys[0][0, 0, :, 4:7] = np.asarray([0, 2, 5])
    want.keys[0][1, 0, :, 4] = 6
    want.features[0][0, 0, 4:7] = np.asarray([0, 2, 5])[:, None]
    want.features[0][1, 0, 4] = 6
    jax.tree.map(np.testing.assert_array_equal, cache, want)
    assert int(pending.count) == 0
    again, _ = settle(cache, pending)  # nothing waits any more
    jax.tree.map(np.testing.assert_array_equal, again, want)


def test_more_entries_than_are_written_at_a_time_are_all_written():
    """The first and the last of three nodes of each row, to positions 4 and 5."""
    B = kv_cache.CPU_WRITES * 3 // 4
    number_M = jnp.arange(3.0 * B)
    entries = Entries(
        (number_M[:, None, None] + jnp.zeros((3 * B, 1, 8)),),
        (-number_M[:, None, None] + jnp.zeros((3 * B, 1, 8)),),
        (number_M[:, None] + jnp.zeros((3 * B, 16)),),
    )
    cache, pending = full_cache(B), no_pending(TINY, 5 * B, jnp.float32, ())
    want = jax.tree.map(np.array, cache)
    positions_M, accepted_M = jnp.asarray([4, 5, 5] * B), jnp.asarray([True, False, True] * B)
    pending = pending.replaced(entries, jnp.repeat(jnp.arange(B), 3), positions_M, accepted_M)
    cache, _ = settle(cache, pending)
    theirs_B2 = np.asarray(number_M).reshape(B, 3)[:, ::2]
    want.keys[0][:, 0, :, 4:6] = theirs_B2[:, None]
    want.values[0][:, 0, 4:6] = -theirs_B2[..., None]
    want.features[0][:, 0, 4:6] = theirs_B2[..., None]
    jax.tree.map(np.testing.assert_array_equal, cache, want)


def test_a_round_of_roots_alone_equals_one_with_padding():
    """The same draws, log-probs and entries, by the plain path and by that of trees."""
    params = transformer.init(TINY, jax.random.key(0))
    stop_E, static = np.asarray([-1], np.int32), {"config": TINY, "draws": Draws("cdf")}
    nothing, found = no_drafts(0, 1), []
    for num_nodes in (3, 12):
        slots = make_slots(3, length=np.asarray([0, 4, S - 1]))
        pending = no_pending(TINY, 12, jnp.float32, ())
        nodes_5M = packed_nodes.pack(nothing, nothing.count_A, np.zeros(0, int), 3, num_nodes, 4)
        state = full_cache(3), pending, slots
        cache, pending, slots, drawn_3M, _ = verify_round(
            params, *state, nodes_5M, stop_E, None, **static, max_nodes=M
        )
        cache, _ = settle(cache, pending)
        tokens, bits, got = np.asarray(drawn_3M)
        np.testing.assert_array_equal(got, [1, 1, 1] + [0] * (num_nodes - 3))
        slots = dataclasses.replace(slots, keys=None)
        found.append((tokens[:3], bits[:3].view(np.float32), cache, slots))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *found)


@pytest.mark.parametrize("features", [True, False])
def test_chunks_beside_a_plain_round_change_none_of_it(features):
    """Neither of its draws nor of what it writes; and rows that lack tokens are not written.

    Up to rounding: XLA compiles the two programs' products alike on some CPUs only.
    """
    model = dataclasses.replace(TINY, num_layers=2)
    params, B, rng = transformer.init(model, jax.random.key(0)), 3, np.random.default_rng(1)
    static = {"config": model, "draws": Draws("cdf")}
    stop_E, active_B = np.asarray([-1], np.int32), np.asarray([True, True, False])
    chunks_TX = np.asarray([[2, 0, *rng.integers(0, 20, 5)], [-1, *[0] * 6]], np.int32)
    layers = (0,) if features else None
    empty = dense_cache(model, B, S, feature_layers=layers)
    random = kv_cache.map_arrays(lambda x, _: rng.normal(size=x.shape).astype(np.float32), empty)
    found, written = [], []
    for step in (decode_rounds, decode_beside_chunks):
        cache = jax.tree.map(jnp.array, random)
        slots = make_slots(B, length=np.asarray([4, 7, 5]), active=active_B)
        state = cache, no_pending(model, 12, jnp.float32, layers), slots, stop_E
        if step is decode_rounds:
            options = static | {"max_rounds": 1}
            cache, _, slots, drawn = step(params, *state, np.int32(1), np.int32(9), **options)
        else:
            cache, _, slots, drawn, entries = step(params, *state, chunks_TX, **static)
        tokens_B, bits_B, got_B = np.asarray(drawn).reshape(3, B)[:, :2].copy()
        slots = dataclasses.replace(slots, keys=None)
        found.append((tokens_B, got_B, slots))
        written.append((cache, bits_B.view(np.float32)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *written)
    jax.tree.map(np.testing.assert_array_equal, *found)
    rest = jax.tree.map(lambda x: np.asarray(x)[2], (written[1][0], random))
    jax.tree.map(np.testing.assert_array_equal, *rest)
    assert [k.shape for k in entries.keys] == [(10, 1, 8)] * 2
    assert len(entries.features) == int(features)


def test_what_waits_is_written_before_a_round_with_chunks():
    params, static = (
        transformer.init(TINY, jax.random.key(0)),
        {"config": TINY, "draws": Draws("cdf")},
    )
    entries = Entries((jnp.ones((2, 1, 8)),), (jnp.ones((2, 1, 8)),), (jnp.ones((2, 16)),))
    pending = no_pending(TINY, 4, jnp.float32, ())
    pending = pending.replaced(
        entries, jnp.arange(2), jnp.asarray([3, 3]), jnp.asarray([True, False])
    )
    slots = make_slots(2, length=np.asarray([4, 4]))
    state = full_cache(2), pending, slots, np.asarray([-1], np.int32)
    cache, pending, *_ = decode_beside_chunks(
        params, *state, np.asarray([[-1, 0, 0, 0]], np.int32), **static
    )
    assert int(pending.count) == 0
    assert (np.asarray(cache.values[0])[0, :, 3] == 1).all()
    assert (np.asarray(cache.values[0])[1, :, 3] != 1).all()

"""The checks of this folder find faults: each one is planted, and must be caught.

A fault is a changed function inside the real kernel, compiled afresh; the same
checks as in the other tests then look at what the engine gives. Each compiles a
policy of one layer, or of two where a fault shows in what the second makes of it,
and rounds of one size.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollouts
from parity_chunks import CONFIG, SEEDS, Chunks, in_chunks, make_requests
from parity_drafters import Bushy, Overrunning, RandomTrees
from parity_model import (
    MODEL,
    ONE_SIZE,
    SAMPLINGS,
    STEP_KEY,
    STOP,
    TOLERANCE,
    differences,
    misscored,
    naive_rollout,
)
from shapes import one_size

from reprise.models.attention import attention, kv_cache
from reprise.models.attention.entries import Pending
from reprise.models.decoder import transformer
from reprise.models.kernels.cpu import page_attention_cpu
from reprise.rl.engine import rounds
from reprise.rl.engine.engine import Engine
from reprise.rl.slot_memory import cache_ops, slot_cache
from reprise.spec.verification import sampling, verify

pytestmark = pytest.mark.parity


def no_size(*_):
    """The answer of a kernel that takes none."""
    return "no size is taken"


MODELS = {n: dataclasses.replace(MODEL, num_layers=n) for n in (1, 2)}  # by layers


@pytest.fixture(scope="module")
def first(params):
    """`first(n)`: weights of the first layers."""
    return lambda n: dataclasses.replace(params, layers=params.layers[:n])


@pytest.fixture(scope="module")
def golden(first, requests):
    """`golden(name)`: what the requests must give under a sampling, by request id."""

    @functools.cache
    def of(name, layers=1):
        return naive_rollout(MODELS[layers], first(layers), requests, SAMPLINGS[name])

    return of


@pytest.fixture(scope="module")
def rollout(first, requests):
    """`rollout(name, …)`: trajectories of a new engine under a sampling."""

    def run(name, config=ONE_SIZE, layers=1, **options):
        given = first(layers), requests, SAMPLINGS[name], STEP_KEY, STOP
        return rollouts.run(Engine(MODELS[layers], config), *given, **options)

    return run


@pytest.fixture
def plant(monkeypatch, golden):
    """`plant(module, name, fault)`: put a fault in, and let the engine compile its steps anew."""
    golden("cool")  # before any fault: the reference draws with the same functions

    def fresh(step, **options):
        def anew(*args, **kwargs):  # another function: jax keeps what it traced by function
            return step.__wrapped__(*args, **kwargs)

        static = ("config", "draws", "max_rounds", "max_nodes", "num_paths")
        return jax.jit(anew, static_argnames=static, **options)

    def put(module, name, fault):
        monkeypatch.setattr(module, name, fault)
        for layer in ("_nodes_layer", "_cached_layer"):
            anew = fresh(getattr(transformer, layer), static_argnums=0)
            monkeypatch.setattr(transformer, layer, anew)
        settle = fresh(verify.settle, donate_argnums=(0, 1))
        for caller in (verify, slot_cache):
            monkeypatch.setattr(caller, "settle", settle)
        for step in (verify.verify_round, verify.decode_beside_chunks, verify.decode_rounds):
            anew = fresh(step, donate_argnums=(1, 2, 3))
            monkeypatch.setattr(rounds, step.__name__, anew)

    return put


def bushy(golden, rollout):
    return rollout("cool", drafter=Bushy(golden("cool")))


@pytest.fixture(autouse=True)
def drafters_that_go_on(monkeypatch):
    """After a fault tokens differ: drafters then draft from what they know all the same."""

    def coming(self, view):
        beyond = self.golden[view.request_id].beyond
        return list(beyond[len(view.response_ids) :])

    monkeypatch.setattr("parity_drafters.Knowing.coming", coming)


def test_nothing_planted_nothing_found(golden, rollout, plant):
    plant(verify, "walk", verify.walk)
    assert not differences(golden("cool"), bushy(golden, rollout))


def test_noise_reused_between_positions(golden, rollout, plant):
    original = sampling.position_keys
    plant(sampling, "position_keys", lambda keys, t_BN: original(keys, jnp.zeros_like(t_BN)))
    assert differences(golden("cool"), rollout("cool"))


def test_noise_reused_between_the_nodes_of_a_tree(golden, rollout, plant):
    original = sampling.position_keys

    def keys_of_roots(keys_M, t_M1):
        return original(keys_M, jnp.minimum(t_M1, jnp.min(t_M1)))

    plant(sampling, "position_keys", keys_of_roots)
    assert differences(golden("cool"), bushy(golden, rollout))


def test_noise_of_the_node_instead_of_the_position(golden, rollout, plant):
    original = sampling.position_keys

    def keys_of_nodes(keys_M, t_M1):
        return original(keys_M, t_M1 + jnp.arange(len(t_M1))[:, None] // len(t_M1[:4]))

    plant(sampling, "position_keys", keys_of_nodes)
    assert differences(golden("cool"), bushy(golden, rollout))


def with_the_node_before(path_BWW):
    """One bit too many: the node before, where it is of the same slot and no ancestor."""
    return path_BWW | jnp.eye(path_BWW.shape[1], k=-1, dtype=bool)


def alone(path_BWW):
    return path_BWW & jnp.eye(path_BWW.shape[1], dtype=bool)


@pytest.mark.parametrize("wrong", [with_the_node_before, jnp.ones_like, alone])
def test_nodes_that_see_others_than_their_ancestors(golden, rollout, plant, wrong):
    plant(page_attention_cpu, "takes", no_size)
    plant_trees(plant, lambda trees: {"path_BWW": wrong(trees.path_BWW)})
    assert differences(golden("cool"), bushy(golden, rollout))


def after_the_node_before(trees):
    return jnp.where(trees.place_M > 0, jnp.arange(len(trees.row_M)) - 1, -1)


def after_no_node(trees):
    return jnp.full_like(trees.parent_M, -1)


@pytest.mark.parametrize("wrong", [after_the_node_before, after_no_node])
def test_nodes_that_follow_another_than_their_parent(golden, rollout, plant, wrong):
    plant_trees(plant, lambda trees: {"parent_M": wrong(trees)})
    assert differences(golden("cool"), bushy(golden, rollout))


def plant_trees(plant, wrong):
    original = transformer.attend_nodes

    def attend(*arguments):
        *arrays, trees = arguments
        if trees is not None:
            trees = dataclasses.replace(trees, **wrong(trees))
        return original(*arrays, trees)

    plant(transformer, "attend_nodes", attend)


def test_softmaxes_joined_without_their_maxima(golden, rollout, plant):
    plant(page_attention_cpu, "takes", no_size)

    def joined(one, other):
        return (one.out + other.out) / (one.total + other.total)

    plant(attention, "joined", joined)
    assert differences(golden("cool"), bushy(golden, rollout))


def test_entries_that_are_never_written(golden, rollout, plant):
    plant(kv_cache.KVCache, "written", lambda cache, pending: cache)
    assert differences(golden("cool"), bushy(golden, rollout))


def moved(pending, places):
    return dataclasses.replace(pending, position_P=pending.position_P + places)


def test_entries_written_one_too_far(golden, rollout, plant):
    original = kv_cache.KVCache.written
    plant(kv_cache.KVCache, "written", lambda cache, pending: original(cache, moved(pending, 1)))
    assert differences(golden("cool"), bushy(golden, rollout))


def test_entries_written_twice(golden, rollout, plant):
    """Again behind their place, where another accepted one of the round may lie."""
    original = kv_cache.KVCache.written

    def write(cache, pending):
        return original(original(cache, pending), moved(pending, 1))

    plant(kv_cache.KVCache, "written", write)
    assert differences(golden("cool"), bushy(golden, rollout))


def test_entries_of_the_next_node(golden, rollout, plant):
    original = Pending.replaced

    def replaced(self, entries, row_M, position_M, accepted_M):
        entries = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), entries)
        return original(self, entries, row_M, position_M, accepted_M)

    plant(Pending, "replaced", replaced)
    assert differences(golden("cool"), bushy(golden, rollout))


def test_children_that_need_not_be_right(golden, rollout, plant):
    """A node is emitted where its parent is, whatever its own token."""
    original = verify.walk

    def walk(nodes, trees, drawn_M, room_B, stop_E):
        right_M = original(nodes, trees, drawn_M, room_B, stop_E)
        above_M = right_M[jnp.maximum(nodes.parents_M, 0)] & (nodes.parents_M >= 0)
        return right_M | (above_M & (nodes.tokens_M >= 0))

    plant(verify, "walk", walk)
    with pytest.raises(AssertionError, match="went on behind an end"):
        rollout("plain", drafter=Bushy(golden("plain")))


def test_temperature_missing_from_the_recorded_log_probability(golden, rollout, first, plant):
    original = sampling.draw

    def draw(logits_V, keys, temperature, *rest):
        tokens, _ = original(logits_V, keys, temperature, *rest)
        logprob_V = jax.nn.log_softmax(logits_V * temperature[..., None])
        return tokens, jnp.take_along_axis(logprob_V, tokens[..., None], axis=-1)[..., 0]

    plant(sampling, "draw", draw)
    got = rollout("cool")
    assert differences(golden("cool"), got)
    worst = misscored(first(1), got, SAMPLINGS["cool"], MODELS[1])
    assert max(worst.values()) > 10 * TOLERANCE


def test_end_tokens_that_do_not_end_the_walk(golden, rollout, plant):
    original = verify.walk

    def walk(nodes, trees, drawn_M, room_B, stop_E):
        return original(nodes, trees, drawn_M, room_B, stop_E * 0 - 1)

    plant(verify, "walk", walk)
    with pytest.raises(AssertionError, match="went on behind an end"):
        rollout("plain", drafter=Overrunning(golden("plain")))


def test_end_tokens_that_do_not_end_the_slot(rollout, plant):
    original = verify._advance
    plant(verify, "_advance", lambda slots, n, last, stop: original(slots, n, last, stop * 0 - 1))
    with pytest.raises(AssertionError, match="went on behind an end"):
        rollout("plain")


def test_a_limit_that_is_not_kept(golden, rollout, plant):
    original = verify.walk

    def walk(nodes, trees, drawn_M, room_B, stop_E):
        return original(nodes, trees, drawn_M, room_B * 9, stop_E)

    plant(verify, "walk", walk)
    assert differences(golden("plain"), rollout("plain", drafter=Overrunning(golden("plain"))))


def test_prompts_that_are_not_copied(golden, rollout, monkeypatch):
    monkeypatch.setattr(cache_ops, "copy_pages", lambda cache, *_: cache)
    assert differences(golden("plain"), rollout("plain"))


def what_waits_again(plant):
    """What waits of a row whose chunk has ended is written again, one place before."""
    original = kv_cache.KVCache.written

    def write(cache, pending):
        everything = dataclasses.replace(
            moved(pending, -1), count=jnp.int32(len(pending.order_P) // 2)
        )
        return original(original(cache, everything), pending)

    plant(kv_cache.KVCache, "written", write)


def at_the_beginning(plant):
    """Layers of plain rounds write the entries of rows at rest too."""
    original = kv_cache.places_of_windows

    def places(start_B, num_tokens):
        return original(jnp.where(start_B < Chunks.longest_tokens, start_B, 0), num_tokens)

    plant(kv_cache, "places_of_windows", places)


@pytest.mark.parametrize("fault", [what_waits_again, at_the_beginning])
def test_rows_at_rest_that_are_written_to(first, plant, fault):
    requests = make_requests()
    want = naive_rollout(MODELS[1], first(1), requests, SAMPLINGS["plain"])
    fault(plant)
    drafts = {"drafter": RandomTrees(want)} if fault is what_waits_again else {}

    def found(seed):
        given = engine, first(1), "plain", requests, seed
        return differences(want, in_chunks(*given, **drafts)[0])

    engine = Engine(MODELS[1], one_size(CONFIG))
    assert any(found(seed) for seed in SEEDS)


def test_chunks_that_see_the_token_behind(golden, rollout, plant):
    def seen(chunks):
        behind_XX = jnp.tril(jnp.ones((chunks.tokens_TC.size,) * 2, bool), k=1)
        return behind_XX & (chunks.slot_X[:, None] == chunks.slot_X)

    plant(page_attention_cpu, "takes", no_size)
    plant(attention.Chunks, "mask_XX", property(seen))
    assert differences(golden("plain", 2), rollout("plain", layers=2))


def test_chunks_that_do_not_see_those_before_them(golden, rollout, plant):
    original = attention.Chunks.mask_XX.fget

    def seen(chunks):
        C = chunks.tokens_TC.shape[1]
        chunk_X = jnp.repeat(jnp.arange(len(chunks.slot_T)), C)
        return original(chunks) & (chunk_X[:, None] == chunk_X)

    plant(page_attention_cpu, "takes", no_size)
    plant(attention.Chunks, "mask_XX", property(seen))
    assert differences(golden("plain", 2), rollout("plain", layers=2))


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_tokens_of_chunks_that_follow_none(golden, rollout, plant, num_tokens):
    """Of all chunks' tokens the first of every `num_tokens`."""
    original = attention.Chunks.parent_X.fget

    def parents(chunks):
        x_X = jnp.arange(chunks.tokens_TC.size)
        return jnp.where(x_X % num_tokens == 0, -1, original(chunks))

    plant(attention.Chunks, "parent_X", property(parents))
    config = dataclasses.replace(ONE_SIZE, prefill_rows=2, prefill_chunk_tokens=4)
    assert differences(golden("plain", 2), rollout("plain", config, 2))


@pytest.mark.parametrize("places", [-1, 1])
def test_chunks_that_see_a_position_too_few_or_too_many(golden, rollout, plant, places):
    original = transformer.attend_chunks

    def attend(*arguments):
        *arrays, chunks = arguments
        return original(*arrays, dataclasses.replace(chunks, start_T=chunks.start_T + places))

    plant(transformer, "attend_chunks", attend)
    # prompts in several rounds
    config = dataclasses.replace(ONE_SIZE, prefill_rows=2, prefill_chunk_tokens=4)
    assert differences(golden("plain", 2), rollout("plain", config, 2))


@pytest.mark.parametrize(("row", "place"), [(1, 0), (0, 1)], ids=["row", "place"])
def test_chunks_that_are_written_beside_their_place(golden, rollout, monkeypatch, row, place):
    original = cache_ops.write_chunks

    def write(cache, entries, chunks_TX):
        moved_TX = np.array(chunks_TX)
        moved_TX[:, 0] = (moved_TX[:, 0] + row) % cache.num_slots
        moved_TX[:, 1] += place
        return original(cache, entries, moved_TX)

    monkeypatch.setattr(cache_ops, "write_chunks", write)
    assert differences(golden("plain"), rollout("plain"))

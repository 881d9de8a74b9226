"""The checks of this folder find faults: each one is planted, and must be caught.

A fault is a changed function inside the real kernel, compiled afresh; the same
checks as in the other tests then look at what the engine gives.
"""

import jax
import jax.numpy as jnp
import pytest
from parity_chunks import CONFIG, SEEDS, in_chunks, make_requests
from parity_drafters import Bushy, Overrunning, RandomTrees
from parity_model import MODEL, SAMPLINGS, TOLERANCE, differences, misscored, naive_rollout

import rl.engine.engine
from models import kv_cache, transformer
from rl.engine import cache_ops
from rl.engine.engine import Engine
from spec import sampling, verify

pytestmark = pytest.mark.parity


@pytest.fixture
def plant(monkeypatch, golden):
    """`plant(module, name, fault)`: put a fault in, and let the engine compile its steps anew."""
    golden("cool")  # before any fault: the reference draws with the same functions

    def fresh(step):
        def anew(*args, **kwargs):  # another function: jax keeps what it traced by function
            return step.__wrapped__(*args, **kwargs)

        return jax.jit(
            anew,
            static_argnames=("config", "scheme", "max_rounds"),
            donate_argnums=(1, 2),
        )

    def put(module, name, fault):
        monkeypatch.setattr(module, name, fault)
        monkeypatch.setattr(rl.engine.engine, "verify_round", fresh(verify.verify_round))
        monkeypatch.setattr(rl.engine.engine, "decode_rounds", fresh(verify.decode_rounds))

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
    plant(sampling, "position_keys", lambda k, t_BN: original(k, t_BN * 0 + t_BN[:, :1]))
    assert differences(golden("cool"), bushy(golden, rollout))


def test_nodes_that_see_other_branches(golden, rollout, plant):
    original = verify.node_mask

    def mask(length_B, reach_BNN, num_positions):
        return original(length_B, jnp.ones_like(reach_BNN), num_positions)

    plant(verify, "node_mask", mask)
    assert differences(golden("cool"), bushy(golden, rollout))


def test_nodes_that_do_not_see_their_ancestors(golden, rollout, plant):
    original = verify.node_mask

    def mask(length_B, reach_BNN, num_positions):
        own_BNN = jnp.broadcast_to(jnp.eye(reach_BNN.shape[1], dtype=bool), reach_BNN.shape)
        return original(length_B, own_BNN, num_positions)

    plant(verify, "node_mask", mask)
    assert differences(golden("cool"), bushy(golden, rollout))


def test_stale_cache_without_compaction(golden, rollout, plant):
    plant(kv_cache, "compact", lambda cache, start_B, path_BN: cache)
    assert differences(golden("cool"), bushy(golden, rollout))


def test_stale_cache_written_at_the_wrong_start(golden, rollout, plant):
    original = kv_cache.compact
    plant(kv_cache, "compact", lambda cache, start_B, path: original(cache, start_B + 1, path))
    assert differences(golden("cool"), bushy(golden, rollout))


def test_a_child_counted_twice(golden, rollout, plant):
    original = verify.walk

    def walk(tree, drawn_BN, room_B, stop_E):
        """The first accepted node's draw is emitted twice."""
        path_BN, count_B = original(tree, drawn_BN, room_B, stop_E)
        twice_BN = jnp.concatenate([path_BN[:, :1], path_BN[:, :-1]], axis=1)
        again_B = count_B > 1
        count_B = jnp.minimum(jnp.where(again_B, count_B + 1, count_B), room_B)
        return jnp.where(again_B[:, None], twice_BN, path_BN), count_B

    plant(verify, "walk", walk)
    assert differences(golden("cool"), bushy(golden, rollout))


def test_temperature_missing_from_the_recorded_log_probability(golden, rollout, params, plant):
    original = sampling.draw

    def draw(logits_V, keys, temperature, scheme):
        tokens, _ = original(logits_V, keys, temperature, scheme)
        logprob_V = jax.nn.log_softmax(logits_V * temperature[..., None])
        return tokens, jnp.take_along_axis(logprob_V, tokens[..., None], axis=-1)[..., 0]

    plant(sampling, "draw", draw)
    got = rollout("cool")
    assert differences(golden("cool"), got)
    assert max(misscored(params, got, SAMPLINGS["cool"]).values()) > 10 * TOLERANCE


def test_end_tokens_that_do_not_end_the_walk(golden, rollout, plant):
    original = verify.walk
    plant(verify, "walk", lambda tree, drawn, room, stop: original(tree, drawn, room, stop * 0 - 1))
    with pytest.raises(AssertionError, match="went on behind an end"):
        rollout("plain", drafter=Overrunning(golden("plain")))


def test_end_tokens_that_do_not_end_the_slot(rollout, plant):
    original = verify._advance
    plant(verify, "_advance", lambda slots, out, stop: original(slots, out, stop * 0 - 1))
    with pytest.raises(AssertionError, match="went on behind an end"):
        rollout("plain")


def test_a_limit_that_is_not_kept(golden, rollout, plant):
    original = verify.walk
    plant(verify, "walk", lambda tree, drawn, room, stop: original(tree, drawn, room * 9, stop))
    assert differences(golden("plain"), rollout("plain", drafter=Overrunning(golden("plain"))))


def test_prompts_that_are_not_copied(golden, rollout, monkeypatch):
    monkeypatch.setattr(cache_ops, "copy_rows", lambda cache, *_: cache)
    assert differences(golden("plain"), rollout("plain"))


def test_prompts_of_the_wrong_row(golden, rollout, monkeypatch):
    original = cache_ops.insert_rows

    def insert(cache, new, source, target, count):
        return original(cache, new, source[::-1].copy(), target, count)

    monkeypatch.setattr(cache_ops, "insert_rows", insert)
    assert differences(golden("plain"), rollout("plain"))


@pytest.mark.parametrize("kind", ["plain", "trees"])
def test_rows_at_rest_that_are_written_to(params, plant, kind):
    """Windows that do not fit are moved to the row's end, as `dynamic_update_slice` does."""
    requests = make_requests()
    want = naive_rollout(MODEL, params, requests, SAMPLINGS["plain"])
    forward, compact = transformer.hidden_with_cache, kv_cache.compact

    def inside(cache, start_B, num_nodes):
        return jnp.minimum(start_B, cache.num_positions - num_nodes)

    def hidden(config, params, cache, tokens_BN, positions_BN, start_B, mask_BNS):
        start_B = inside(cache, start_B, tokens_BN.shape[1])
        return forward(config, params, cache, tokens_BN, positions_BN, start_B, mask_BNS)

    plant(transformer, "hidden_with_cache", hidden)
    plant(
        kv_cache,
        "compact",
        lambda cache, start_B, path_BN: compact(
            cache, inside(cache, start_B, path_BN.shape[1]), path_BN
        ),
    )

    def found(seed):
        options = {
            "plain": {},
            "trees": {"drafter": RandomTrees(want)},
        }[kind]
        return differences(want, in_chunks(engine, params, "plain", requests, seed, **options)[0])

    engine = Engine(MODEL, CONFIG)
    assert any(found(seed) for seed in SEEDS)

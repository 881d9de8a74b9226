"""A publisher's offers, the versions that it keeps, and that it waits for no subscriber."""

import gc
import json
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from weights_by_hand import Pair, same_bits

from rl.weights.errors import CarrierError
from rl.weights.offers import VersionId

NUM = 40_000  # elements of `big`: 80 kB
FULL_BYTES = 2 * NUM + 4 * 3 + 4


def weights(version):
    """A policy of three arrays, one of which does not change; each version moves a percent."""
    rng = np.random.default_rng(0)
    big = rng.integers(0x3000, 0x4000, NUM).astype(np.uint16)
    for v in range(version):
        big[np.random.default_rng(v + 1).random(NUM) < 0.01] += 1
    return {
        "big": jnp.asarray(big.view(jnp.bfloat16)),
        "fixed": jnp.arange(3, dtype=jnp.float32),
        "none": jnp.zeros((0, 4)),
        "scalar": jnp.float32(version),
    }


def kinds(pair):
    """For each offer: whether it starts with a full copy, and its number of deltas."""
    bodies = [json.loads(text.partition("\n")[2]) for text in pair.offers if text]
    return [(b["base"] is None, len(b["links"]) - (b["base"] is None)) for b in bodies]


@pytest.fixture
def pair():
    return Pair(weights(0))


def test_a_full_copy_then_deltas_then_nothing(pair):
    worker = pair.subscriber()
    for version in range(3):
        pair.publish(version, weights(version))
        assert same_bits(pair.update(worker), weights(version))
        assert worker.version == version == pair.publisher.newest
    assert pair.offer(worker) is None
    assert kinds(pair) == [(True, 0), (False, 1), (False, 1)]
    assert max(pair.carrier.seen[1:]) < 0.03 * FULL_BYTES


def test_a_slow_one_gets_all_deltas_and_a_late_one_a_full_copy(pair):
    slow = pair.subscriber()
    pair.publish(0, weights(0))
    pair.update(slow, "slow")
    for version in range(1, 4):
        pair.publish(version, weights(version))
    late = pair.subscriber()
    assert same_bits(pair.update(slow, "slow"), weights(3))
    assert same_bits(pair.update(late, "late"), weights(3))
    assert kinds(pair) == [(True, 0), (False, 3), (True, 0)]


def test_a_version_of_another_run_gets_a_full_copy(pair):
    pair.publish(0, weights(0))
    pair.publish(1, weights(1))
    pair.publisher.offer("other", VersionId(0, "0" * 64), 0.0)
    pair.offers.append(pair.publisher.offer("other", VersionId(0, "0" * 64), 0.0))
    assert kinds(pair) == [(True, 0)]


def test_versions_grow(pair):
    pair.publish(3, weights(0))
    for version in (3, 2):
        with pytest.raises(ValueError, match=f"above 3, the newest, got {version}"):
            pair.publish(version, weights(1))
    with pytest.raises(ValueError, match="expected weights to be published"):
        Pair(weights(0)).publisher.offer("worker", None, 0.0)


def test_deltas_are_bounded_in_number_and_bytes(pair):
    worker = pair.subscriber()
    pair.publish(0, weights(0))
    pair.update(worker)
    for version in range(1, 12):
        pair.publish(version, weights(version))
    pair.update(worker)
    assert kinds(pair)[-1] == (True, 0)  # 8 are kept, 11 would be needed
    assert FULL_BYTES < pair.publisher.held_bytes < 1.2 * FULL_BYTES

    none = Pair(weights(0), max_delta_bytes=0)
    for version in range(3):
        none.publish(version, weights(version))
    assert none.publisher.held_bytes == FULL_BYTES


def test_an_update_that_changes_everything_is_a_full_copy(pair):
    worker = pair.subscriber()
    pair.publish(0, weights(0))
    pair.update(worker)
    other = weights(0) | {"big": -3.7 * weights(0)["big"]}
    pair.publish(1, other)
    assert same_bits(pair.update(worker), other)
    assert kinds(pair) == [(True, 0), (True, 0)]
    assert pair.publisher.held_bytes == FULL_BYTES


def test_what_was_published_may_be_donated(pair):
    """The publisher has copies: what happens to the arrays afterwards is nobody's concern."""
    params = weights(0)
    pair.publish(0, params)
    params["big"].delete()
    assert same_bits(pair.update(pair.subscriber()), weights(0))


def test_readers_of_an_older_copy_share_it_and_go_on_by_deltas(pair):
    """However many read slowly, there are two full copies at most."""
    pair.publish(0, weights(0))
    asleep = pair.publisher.offer("asleep", None, 0.0)
    copies = []
    for version in range(1, 6):
        pair.publish(version, weights(version))
        offer = pair.offer(worker := pair.subscriber(), f"joins at {version}")
        assert same_bits(worker.swap(worker.stage(offer)), weights(version))  # not released
        copies.append(pair.publisher.held_bytes)
    assert kinds(pair) == [(True, n) for n in range(1, 6)]
    assert max(copies) < 2.2 * FULL_BYTES
    assert asleep is not None
    pair.now_s = 1000.0  # all leases are over
    pair.publish(6, weights(6))
    assert pair.publisher.held_bytes < 1.2 * FULL_BYTES
    assert pair.carrier.num_bytes < 0.2 * FULL_BYTES  # deltas that were read; no full copy


def test_a_reader_of_an_older_version_continues_by_deltas(pair):
    pair.publish(0, weights(0))
    worker = pair.subscriber()
    offer = pair.offer(worker)
    for version in range(1, 8):
        pair.publish(version, weights(version))
    assert same_bits(worker.swap(worker.stage(offer)), weights(0))
    assert same_bits(pair.update(worker), weights(7))
    assert kinds(pair) == [(True, 0), (False, 7)]


def test_a_dropped_payload_needs_another_offer(pair):
    pair.publish(0, weights(0))
    worker = pair.subscriber()
    offer = pair.publisher.offer("worker", None, 0.0)
    pair.publisher.release("worker")  # lost
    pair.publish(1, weights(1))
    with pytest.raises(CarrierError, match="expected the weights of this offer with it, got none"):
        worker.stage(offer)
    assert worker.version is None and same_bits(pair.update(worker), weights(1))


def test_three_hundred_versions_leave_nothing_behind():
    """Arrays that were published, staged and given up are gone, and so are payloads."""
    pair = Pair(weights(0), kept_deltas=3)
    worker, stays = pair.subscriber(), []
    for version in range(300):
        pair.publish(version, weights(version % 40))
        if version % 50 == 49:
            pair.publisher.offer("dies", None, pair.now_s)
        params = pair.update(worker)
        if version in (10, 200):
            stays.append(weakref.ref(params["big"]))
            stays.append(weakref.ref(pair.publisher._newest.pieces[0].bytes_n.base))
        pair.now_s += 10.0
        assert pair.carrier.num_bytes <= 2.5 * FULL_BYTES
        assert pair.publisher.held_bytes <= 2.5 * FULL_BYTES
    del params
    gc.collect()
    assert len(stays) == 4 and [ref() for ref in stays] == [None] * 4
    pair.publisher.close()
    assert pair.carrier.num_bytes == 0

"""Weights by version: deltas and whole copies give the same bits."""

import dataclasses

import jax
import numpy as np
import pytest
from ray_workers_in_threads import Store

from reprise.rl.weights.versions import DamagedWeights, Published, WeightCopy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class Tree:
    a: np.ndarray
    b: np.ndarray


def tree(seed, changed=0):
    rng = np.random.default_rng(seed)
    params = Tree(rng.normal(size=(64, 32)).astype(np.float32), np.arange(7, dtype=np.uint16))
    params.a.reshape(-1)[:changed] += 1
    return params


class Counting(Store):
    def __init__(self):
        super().__init__()
        self.fetched = []

    def fetch(self, references, limit_s=0.0):
        self.fetched += references
        return super().fetch(references, limit_s)


def test_a_worker_fetches_what_changed_and_gets_the_same_bits():
    store = Counting()
    published, copy = Published(store.share), WeightCopy(store.fetch)
    versions = [tree(0, changed) for changed in range(4)]
    offers = [published.publish(params) for params in versions]
    assert published.publish(versions[3]) is offers[3] is published.newest
    for i in (0, 1, 3):
        arrays = copy.take(offers[i])
        for got, wanted in zip(arrays, jax.tree.leaves(versions[i]), strict=True):
            assert got.tobytes() == wanted.tobytes()
    deltas = [reference for _, reference in offers[3].deltas]
    assert store.fetched == [offers[0].whole, *deltas]  # the whole copy once
    assert copy.take(offers[3]) is copy.take(offers[3])
    # an older version is fetched whole, and is no base of what follows
    assert copy.take(offers[1])[0].tobytes() == versions[1].a.tobytes()
    assert store.fetched[-1] == offers[1].whole
    later = published.publish(tree(0, 5))
    copy.take(later)
    assert store.fetched[-1] == later.deltas[-1][1]


def test_the_same_weights_are_published_once():
    """An evaluation between two steps has a tree of its own."""
    store = Store()
    published = Published(store.share)
    offer = published.publish(tree(0))
    assert published.publish(tree(0)) is offer and len(store) == 1


def test_weights_that_changed_throughout_have_no_delta():
    published = Published(Store().share)
    published.publish(tree(0))
    assert published.publish(tree(1)).deltas == ()


def test_published_weights_do_not_change_with_the_buffers():
    store = Store()
    published, params = Published(store.share), tree(0)
    offer = published.publish(params)
    wanted = params.a.tobytes()
    params.a[:] = 0
    assert WeightCopy(store_fetch(store)).take(offer)[0].tobytes() == wanted


def store_fetch(store):
    return lambda references: store.fetch(references, 0.0)


@pytest.mark.fault
@pytest.mark.parametrize("part", ["delta", "whole"])
def test_damaged_weights_are_fetched_whole_or_refused(part):
    store = Store()
    published, copy = Published(store.share), WeightCopy(store_fetch(store))
    copy.take(published.publish(tree(0)))
    offer = published.publish(changed := tree(0, 3))
    [(_, reference)] = offer.deltas
    store[reference] = [np.empty(0, np.uint8)] * 2  # leads nowhere
    if part == "delta":
        assert copy.take(offer)[0].tobytes() == changed.a.tobytes()
        return
    store[offer.whole] = jax.tree.leaves(tree(2))
    with pytest.raises(DamagedWeights, match="version 2: expected the SHA-256"):
        copy.take(offer)

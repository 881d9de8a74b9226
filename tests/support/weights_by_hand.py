"""A store in memory, and a publisher with a subscriber of it, for tests of rl.weights."""

import itertools

import jax
import numpy as np

from rl.weights.config import WeightsConfig
from rl.weights.errors import CarrierError
from rl.weights.object_store import ObjectStoreCarrier
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber


class MemoryStore:
    """Bytes by key; `now` counts, `seen` are the sizes of all that was ever put."""

    def __init__(self):
        self.data = {}
        self.seen = []
        self._keys = itertools.count()

    def put(self, data):
        key = str(next(self._keys))
        self.data[key] = data
        self.seen.append(len(data))
        return key

    def get(self, key, timeout_s):
        if key not in self.data:
            raise CarrierError(f"expected {key}, found none")
        return self.data[key]

    def delete(self, key):
        del self.data[key]

    @property
    def num_bytes(self):
        return sum(map(len, self.data.values()))


class Pair:
    """A publisher and subscribers by name, all in this process and through one store."""

    def __init__(self, params, carrier=None, **settings):
        settings = {"transport": "object_store", "part_mib": 1, **settings}
        self.store = MemoryStore()
        self.carrier = carrier or ObjectStoreCarrier(self.store)
        self.publisher = Publisher(WeightsConfig(**settings), self.carrier)
        self.params, self.now_s = params, 0.0
        self.offers = []

    def subscriber(self, name="worker", change=lambda text: text):
        def ask(source, have):
            self.offers.append(self.publisher.offer(name, have, self.now_s))
            return change(self.offers[-1])

        return Subscriber(self.params, self.carrier, ask, deadline_s=5.0)

    def publish(self, version, params):
        self.publisher.publish(version, params, self.now_s)

    def update(self, subscriber, name="worker"):
        """Fetch, swap, and tell the publisher; returns the weights."""
        staged = subscriber.fetch()
        assert staged is not None
        params = subscriber.swap(staged)
        self.publisher.taken(name, subscriber.have())
        return params


def same_bits(a, b):
    """True if two trees are equal in every bit and type."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    return all(
        x.dtype == y.dtype
        and x.shape == y.shape
        and np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))
        for x, y in ((np.atleast_1d(x), np.atleast_1d(y)) for x, y in pairs)
    )

"""A publisher with subscribers of it in one process, for tests of rl.weights."""

import jax
import numpy as np

from rl.remote.weights import MessageCarrier
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber


class MemoryCarrier(MessageCarrier):
    """Both ends at once: `data` are the payloads, `seen` the bytes of all that were ever held."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def hold(self, payload):
        self.seen.append(sum(b.size for b in payload))
        return super().hold(payload)

    @property
    def data(self):
        return self._payloads

    @property
    def num_bytes(self):
        return sum(b.size for payload in self.data.values() for b in payload)


class Pair:
    """A publisher and its subscribers by name."""

    def __init__(self, params, **settings):
        self.carrier = MemoryCarrier()
        self.publisher = Publisher(self.carrier, **settings)
        self.params, self.now_s = params, 0.0
        self.offers = []

    def subscriber(self):
        return Subscriber(self.params, self.carrier)

    def publish(self, version, params):
        self.publisher.publish(version, params, self.now_s)

    def offer(self, subscriber, name="worker"):
        self.offers.append(self.publisher.offer(name, subscriber.have(), self.now_s))
        return self.offers[-1]

    def update(self, subscriber, name="worker"):
        """Offer, stage, swap and release; returns the weights."""
        params = subscriber.swap(subscriber.stage(self.offer(subscriber, name)))
        self.publisher.release(name)
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

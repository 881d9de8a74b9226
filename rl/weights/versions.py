"""Versions of the weights in Ray's store: the newest version whole, and deltas from older versions.

    run      Published.publish(params) → Offer: references to the whole copy and to deltas
    worker   WeightCopy.take(offer)   → arrays: its copy with deltas, else the whole copy

The SHA-256 of the result is compared with the offer before any device receives the weights.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from reprise.rl.weights import delta

MAX_DELTAS = 8
MAX_DELTA_SHARE = 0.9  # of the bytes of a whole copy; larger deltas only cost time
MAX_KNOWN = 2  # versions recognized by their arrays, with whole copies in the store


class DamagedWeights(ValueError):
    """Received weights do not match the published weights."""


@dataclasses.dataclass(frozen=True, eq=False)
class Offer:
    """A version: a reference to its arrays, and a chain of (base version, delta reference)."""

    version: int
    sha256: str
    whole: Any
    deltas: tuple[tuple[int, Any], ...]


class Published:
    """The published weights of a run; thread-safe. `share` puts a value into the store."""

    def __init__(self, share: Callable[[Any], Any]) -> None:
        self._share = share
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._known: collections.deque[tuple[weakref.ref[Any], Offer]]
        self._known = collections.deque(maxlen=MAX_KNOWN)
        self._arrays: list[np.ndarray] = []  # of the newest version
        self.newest: Offer | None = None

    def publish(self, params: Any) -> Offer:
        """Return the offer of a tree of arrays; the same arrays keep their version."""
        with self._lock:
            for known, offer in self._known:
                if known() is params:
                    return offer
            # copied, since the buffers of `params` may be donated to an update
            arrays = [np.array(x) for x in jax.device_get(jax.tree.leaves(params))]
            sha256 = digest(arrays)
            newest = self.newest
            if newest is None or newest.sha256 != sha256:
                deltas = () if newest is None else tuple(self._deltas(newest, arrays))
                newest = Offer(next(self._numbers), sha256, self._share(arrays), deltas)
                self.newest = newest
                self._arrays = arrays
            self._known.append((weakref.ref(params), newest))
            return newest

    def _deltas(self, last: Offer, arrays: Sequence[np.ndarray]) -> list[tuple[int, Any]]:
        """Return the chain of deltas to new arrays; empty if a whole copy is hardly larger."""
        if [(x.shape, x.dtype) for x in arrays] != [(x.shape, x.dtype) for x in self._arrays]:
            return []
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            encoded = delta.encode_all(list(zip(self._arrays, arrays, strict=True)), pool.map)
        if sum(x.size for x in encoded) > MAX_DELTA_SHARE * sum(x.nbytes for x in arrays):
            return []
        return [*last.deltas[1 - MAX_DELTAS :], (last.version, self._share(encoded))]


class WeightCopy:
    """The newest weights that a worker has; `fetch` returns the values of references."""

    def __init__(self, fetch: Callable[[Sequence[Any]], list[Any]]) -> None:
        self._fetch = fetch
        self._version = 0
        self._arrays: list[np.ndarray] = []

    def take(self, offer: Offer) -> list[np.ndarray]:
        """Return the arrays of an offer. Raises DamagedWeights if their SHA-256 is wrong.

        An older version than the present copy is fetched whole, and does not replace the copy.
        """
        if offer.version == self._version:
            return self._arrays
        arrays = self._updated(offer)
        if arrays is None or digest(arrays) != offer.sha256:
            [arrays] = self._fetch([offer.whole])
            if (digest_here := digest(arrays)) != offer.sha256:
                raise DamagedWeights(
                    f"weights of version {offer.version}: expected the SHA-256 "
                    f"{offer.sha256[:16]}…, got {digest_here[:16]}…"
                )
        if offer.version > self._version:
            self._version = offer.version
            self._arrays = arrays
        return arrays

    def _updated(self, offer: Offer) -> list[np.ndarray] | None:
        """Return a copy with the deltas applied; None if no delta starts at this version."""
        bases = [base for base, _ in offer.deltas]
        if self._version not in bases:
            return None
        chain = [reference for _, reference in offer.deltas[bases.index(self._version) :]]
        arrays = [np.array(x) for x in self._arrays]
        for encoded in self._fetch(chain):
            for array, changes in zip(arrays, encoded, strict=True):
                delta.apply(array, changes)
        return arrays


def digest(arrays: Sequence[np.ndarray]) -> str:
    """Return the SHA-256 of the concatenated bytes of arrays."""
    sha256 = hashlib.sha256()
    for array in arrays:
        sha256.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return sha256.hexdigest()

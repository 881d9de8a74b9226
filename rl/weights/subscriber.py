"""The worker's end: an offered version is staged beside the one in use, checked, then swapped in.

The subscriber keeps the weights in use in host memory, as read-only arrays, so that deltas have a
base that no device has touched. Every array's checksum is compared before any array is put on a
device. A failure changes nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from rl.weights import delta
from rl.weights.errors import DamagedWeights
from rl.weights.interface import Carrier
from rl.weights.offers import Expected, Offer, VersionId, check_cover, parse
from rl.weights.pieces import Piece, PieceInfo, assemble, empty_aligned, names_of, runner, sha256


@dataclasses.dataclass(frozen=True, eq=False)
class Staged:
    """Checked weights that are not in use yet: on the devices, and by name in host memory."""

    id: VersionId
    params: Any
    host: Mapping[str, np.ndarray]


class Subscriber:
    """Receives the weights of one policy.

    `expected` is a tree of `jax.ShapeDtypeStruct` (or arrays); their shardings, if any, are those
    of staged weights. One thread stages and swaps.
    """

    def __init__(self, expected: Any, carrier: Carrier) -> None:
        self._carrier = carrier
        leaves, self._tree = jax.tree.flatten(expected)
        self._names = names_of(expected)
        self._shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
        self._expected = {
            name: Expected(tuple(leaf.shape), str(np.dtype(leaf.dtype)))
            for name, leaf in zip(self._names, leaves, strict=True)
        }
        self._pool: Executor = ThreadPoolExecutor(
            min(16, os.cpu_count() or 1), thread_name_prefix="weights"
        )
        self._in_use: Staged | None = None

    @property
    def version(self) -> int | None:
        """The version in use."""
        return self._in_use.id.version if self._in_use else None

    def have(self) -> VersionId | None:
        """Return the version in use and its fingerprint, the base of deltas."""
        return self._in_use.id if self._in_use else None

    def stage(self, text: str) -> Staged:
        """Return the offered weights, checked and on the devices, beside those in use.

        Raises DamagedWeights for an invalid offer or payload, CarrierError if a payload is gone.
        """
        offer = parse(text, self._expected)
        check_cover(offer.pieces, self._expected)
        pieces = self._pieces(offer)
        host = assemble(pieces, {name: e.shape for name, e in self._expected.items()})
        whole = jax.tree.unflatten(self._tree, [host[name] for name in self._names])
        return Staged(offer.to, self._on_devices(whole), host)

    def swap(self, staged: Staged) -> Any:
        """Make staged weights those in use and return them: call it between two rounds."""
        self._in_use = dataclasses.replace(staged, params=None)
        return staged.params

    def _pieces(self, offer: Offer) -> list[Piece]:
        """Receive the pieces and compare their checksums."""
        if offer.base is not None and offer.base != self.have():
            raise DamagedWeights(
                f"expected deltas from version {self.version}, which is in use, got some from "
                f"version {offer.base.version}: ask for a full copy"
            )
        received = [self._carrier.receive(x.where, x.sizes) for x in offer.links]
        run = runner(self._pool, sum(info.num_bytes for info in offer.pieces))
        if offer.base is None:
            bases, *received = received
            if not received:
                return list(run(_checked, offer.pieces, bases))
        else:
            bases = [self._in_use_bytes(info) for info in offer.pieces]
        deltas = zip(*received, strict=True) if received else ((),) * len(bases)
        return list(run(_updated, offer.pieces, bases, deltas))

    def _in_use_bytes(self, info: PieceInfo) -> np.ndarray:
        """Return the bytes of a piece of the weights in use; a whole array is not copied."""
        assert self._in_use
        part = np.ascontiguousarray(self._in_use.host[info.name][info.region])
        return part.reshape(-1).view(np.uint8)

    def _on_devices(self, host: Any) -> Any:
        placed = [_put(x, s) for x, s in zip(jax.tree.leaves(host), self._shardings, strict=True)]
        return jax.block_until_ready(jax.tree.unflatten(self._tree, placed))


def _updated(info: PieceInfo, base_n: np.ndarray, deltas: Sequence[np.ndarray]) -> Piece:
    """Return a piece: a copy of the base with deltas written over it."""
    bytes_n = empty_aligned(info.num_bytes)
    bytes_n[:] = base_n
    itemsize = np.dtype(info.dtype).itemsize
    for encoded in deltas:
        try:
            delta.apply(bytes_n.view(f"u{itemsize}"), encoded)
        except delta.DamagedDelta as error:
            raise DamagedWeights(f"{info.name}: {error}") from error
    return _checked(info, bytes_n)


def _checked(info: PieceInfo, bytes_n: np.ndarray) -> Piece:
    found = sha256(bytes_n)
    if found != info.sha256:
        raise DamagedWeights(
            f"{info.name} at {list(info.start)}: expected the SHA-256 {info.sha256[:16]}…, "
            f"got {found[:16]}…: ask for a full copy"
        )
    if bytes_n.ctypes.data % np.dtype(info.dtype).itemsize:  # a slice of a message
        bytes_n = np.array(bytes_n)
    return Piece(info, bytes_n)


def _put(array: np.ndarray, sharding: Any) -> jax.Array:
    if sharding is None:
        return jax.device_put(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

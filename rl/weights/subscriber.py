"""The worker's end: what is offered is staged beside the weights in use, checked, then swapped in.

The subscriber keeps the weights in use in host memory, as arrays that nobody writes to, so that
deltas have a base that no device has touched. Every array's checksum is compared before anything
is put on a device. What fails leaves everything as it was.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from rl.weights import delta
from rl.weights.errors import CarrierError, DamagedWeights
from rl.weights.interface import Carrier, Staged
from rl.weights.offers import Expected, Offer, VersionId, check_cover, parse
from rl.weights.pieces import Piece, PieceInfo, assemble, empty_aligned, names_of, runner, sha256

Ask = Callable[[int, VersionId | None], str | None]  # source, what is there → text of an offer


class Subscriber:
    """Receives the weights of one policy.

    `expected` is a tree of `jax.ShapeDtypeStruct` (or arrays); where they have shardings the staged
    weights are laid out so, each process of a mesh its own part; `place` may do it instead, given
    the tree in host memory, or leave it there. `ask` brings the question to a source's publisher
    (`Publisher.offer`) and the answer back. One thread fetches and swaps.
    """

    def __init__(
        self,
        expected: Any,
        carrier: Carrier,
        ask: Ask,
        deadline_s: float,
        *,
        sources: int = 1,
        place: Callable[[Any], Any] | None = None,
    ) -> None:
        self._carrier, self._deadline_s = carrier, deadline_s
        self._ask, self._sources = ask, sources
        self._place = place
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
        return self._in_use.version if self._in_use else None

    def have(self, source: int = 0) -> VersionId | None:
        """Return what to tell a source that is asked for an offer."""
        ids = self._in_use.ids if self._in_use else ()
        return ids[source] if source < len(ids) else None

    def fetch(self) -> Staged | None:
        """Ask every source for an offer and stage them; None where the newest is in use.

        What cannot be made from the weights in use is asked for as a full copy, once.
        """
        sources = range(self._sources)
        offers = [self._ask(source, self.have(source)) for source in sources]
        if all(offer is None for offer in offers):
            return None
        try:
            return self.stage(offers)
        except DamagedWeights:
            if self._in_use is None:
                raise
        return self.stage([self._ask(source, None) for source in sources])

    def stage(self, texts: Sequence[str | None]) -> Staged:
        """Return the offered weights, checked and on the devices, beside those in use.

        Raises DamagedWeights for what is not as it must be, CarrierError for what does not come.
        """
        if not texts or None in texts:
            raise CarrierError("expected an offer of every source, got some without: ask again")
        offers = [parse(text, self._expected) for text in texts if text is not None]
        offers.sort(key=lambda offer: offer.source)
        check_cover(offers, self._expected)
        pieces = [piece for offer in offers for piece in self._pieces(offer)]
        host = assemble(pieces, {name: e.shape for name, e in self._expected.items()})
        ids = tuple(offer.to for offer in offers)
        whole = jax.tree.unflatten(self._tree, [host[name] for name in self._names])
        params = self._on_devices(whole) if self._place is None else self._place(whole)
        return Staged(offers[0].to.version, params, host, ids)

    def swap(self, staged: Staged) -> Any:
        """Make staged weights those in use and return them: call it between two rounds."""
        self._in_use = dataclasses.replace(staged, params=None)
        return staged.params

    def close(self) -> None:
        """End the threads; nothing can be staged any more."""
        self._pool.shutdown()

    def _pieces(self, offer: Offer) -> list[Piece]:
        """Receive one source's pieces and compare their checksums."""
        if offer.base is not None and offer.base != self.have(offer.source):
            raise DamagedWeights(
                f"expected deltas from version {self.version}, which is in use, got some from "
                f"version {offer.base.version}: ask for a full copy"
            )
        received = [
            self._carrier.receive(x.where, x.sizes, offer.part_bytes, self._deadline_s)
            for x in offer.links
        ]
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
        """Return the bytes of a piece of the weights in use; not copied where it is a whole one."""
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
    if bytes_n.ctypes.data % np.dtype(info.dtype).itemsize:  # a slice of a part
        bytes_n = np.array(bytes_n)
    return Piece(info, bytes_n)


def _put(array: np.ndarray, sharding: Any) -> jax.Array:
    if sharding is None:
        return jax.device_put(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

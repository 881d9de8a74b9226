"""The trainer's end: the newest weights whole, and the last versions as deltas.

`publish` waits for no subscriber. A subscriber is offered the deltas since its version if all are
kept and clearly smaller than a full copy, else a full copy. While an older full copy is being read,
other subscribers without a base receive it too, with the deltas since then: there are never more
than two full copies, however slow subscribers are. Host memory holds the newest version, the last
deltas within both bounds, an older full copy that is being read, and during `publish` the version
that is being made.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np

from rl.weights import delta
from rl.weights.interface import Carrier, Payload
from rl.weights.offers import Link, Offer, VersionId
from rl.weights.pieces import Piece, PieceInfo, fingerprint, pieces_of, runner

KEPT_DELTAS = 8
MAX_DELTA_BYTES = 2**30
LEASE_S = 120.0  # an offered full copy is kept this long for its subscriber
_MAX_SHARE = 0.9  # of a full copy's bytes; with more, deltas only cost time


class _Kept:
    """A payload, given to the carrier when it is first offered."""

    def __init__(self, payload: Payload, carrier: Carrier) -> None:
        self.sizes = tuple(b.size for b in payload)
        self.num_bytes = sum(self.sizes)
        self._payload: Payload | None = payload
        self._carrier = carrier
        self._held: Any = None
        self._lock = threading.Lock()

    def link(self) -> Link | None:
        """Return how one subscriber receives it; None if it has been dropped meanwhile."""
        with self._lock:
            if self._payload is None:
                return None
            if self._held is None:
                self._held = self._carrier.hold(self._payload)
            return Link(self.sizes, self._carrier.offer(self._held))

    def drop(self) -> None:
        with self._lock:
            if self._held is not None:
                self._carrier.drop(self._held)
            self._payload = self._held = None


@dataclasses.dataclass(frozen=True, eq=False)
class _Full:
    id: VersionId
    pieces: Sequence[Piece]
    kept: _Kept

    @property
    def infos(self) -> tuple[PieceInfo, ...]:
        return tuple(piece.info for piece in self.pieces)


@dataclasses.dataclass(frozen=True, eq=False)
class _Delta:
    base: VersionId
    kept: _Kept


class Publisher:
    """Publishes versions of the weights.

    `publish` is called from one thread, everything else from any. Time is an argument, in seconds
    of a monotonic clock.
    """

    def __init__(
        self,
        carrier: Carrier,
        *,
        kept_deltas: int = KEPT_DELTAS,
        max_delta_bytes: int = MAX_DELTA_BYTES,
    ) -> None:
        self._carrier = carrier
        self._kept_deltas, self._max_delta_bytes = kept_deltas, max_delta_bytes
        self._lock = threading.Lock()
        self._pool: Executor = ThreadPoolExecutor(
            min(16, os.cpu_count() or 1), thread_name_prefix="weights"
        )
        self._newest: _Full | None = None
        self._older: _Full | None = None  # while it is leased
        self._deltas: deque[_Delta] = deque()
        self._leases: dict[str, tuple[_Full, float]] = {}  # full copy, and until when

    @property
    def newest(self) -> int | None:
        """The newest version."""
        with self._lock:
            return self._newest.id.version if self._newest else None

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and deltas that are kept."""
        with self._lock:
            fulls = [full.kept.num_bytes for full in (self._newest, self._older) if full]
            return sum(fulls) + sum(d.kept.num_bytes for d in self._deltas)

    def publish(self, version: int, params: Any, now_s: float) -> None:
        """Make `params` the newest version; they are copied, and may be donated afterwards.

        Versions grow. Raises ValueError for one that does not.
        """
        last = self._newest
        if last and version <= last.id.version:
            raise ValueError(
                f"expected a version above {last.id.version}, the newest, got {version}"
            )
        pieces = pieces_of(params, self._pool)
        made = VersionId(version, fingerprint([p.info for p in pieces]))
        full = _Full(made, pieces, self._kept([p.bytes_n for p in pieces]))
        link = self._delta(last, full) if last else None
        with self._lock:
            dropped = [*self._add(link), *self._replace(full, now_s)]
        for kept in dropped:
            kept.drop()

    def offer(self, subscriber: str, have: VersionId | None, now_s: float) -> str | None:
        """Return the text of an offer of the newest version; None if the subscriber has it.

        Raises ValueError if nothing has been published yet.
        """
        while True:
            with self._lock:
                newest = self._newest
                if newest is None:
                    raise ValueError("expected weights to be published before they are offered")
                if have == newest.id:
                    return None
                base, kept = self._way(subscriber, have, now_s)
            links = [k.link() for k in kept]
            if None not in links:  # else a newer version was published meanwhile
                return Offer(newest.id, base, newest.infos, tuple(x for x in links if x)).text()

    def release(self, subscriber: str) -> None:
        """End a subscriber's lease: it has the offered version, or is gone."""
        with self._lock:
            self._leases.pop(subscriber, None)

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            fulls = [full for full in (self._newest, self._older) if full]
            kept = [full.kept for full in fulls] + [d.kept for d in self._deltas]
            self._newest = self._older = None
            self._deltas.clear()
            self._leases.clear()
        for one in kept:
            one.drop()
        self._pool.shutdown()

    def _kept(self, payload: Payload) -> _Kept:
        return _Kept(payload, self._carrier)

    def _delta(self, last: _Full, full: _Full) -> _Delta | None:
        """Return the delta between two versions; None if a full copy is hardly larger."""
        places = [[dataclasses.replace(i, sha256="") for i in f.infos] for f in (last, full)]
        if places[0] != places[1] or not self._kept_deltas:
            return None
        pairs = [
            (_words(old), _words(new))
            for old, new in zip(last.pieces, full.pieces, strict=True)
            if old.info != new.info
        ]
        run = runner(self._pool, sum(new.nbytes for _, new in pairs))
        encoded = iter(delta.encode_all(pairs, run))
        payload = [
            np.empty(0, np.uint8) if old.info == new.info else next(encoded)
            for old, new in zip(last.pieces, full.pieces, strict=True)
        ]
        kept = self._kept(payload)
        return _Delta(last.id, kept) if _worth(kept.num_bytes, full) else None

    def _add(self, link: _Delta | None) -> list[_Kept]:
        """Append a delta, or drop all deltas without one; return the dropped payloads."""
        dropped = []
        if link is None:
            dropped = [d.kept for d in self._deltas]
            self._deltas.clear()
        else:
            self._deltas.append(link)
        while self._deltas and (
            len(self._deltas) > self._kept_deltas
            or sum(d.kept.num_bytes for d in self._deltas) > self._max_delta_bytes
        ):
            dropped.append(self._deltas.popleft().kept)
        return dropped

    def _replace(self, full: _Full, now_s: float) -> list[_Kept]:
        """Make a full copy the newest. Of those before, one that is being read may stay."""
        before = [f for f in (self._older, self._newest) if f]
        self._leases = {k: lease for k, lease in self._leases.items() if lease[1] > now_s}
        leased = [f for f in before if any(f is lease[0] for lease in self._leases.values())]
        self._newest = full
        going_on = [f for f in leased if self._chain(f.id) is not None]
        self._older = going_on[0] if going_on else None
        return [f.kept for f in before if f is not self._older]

    def _way(
        self, subscriber: str, have: VersionId | None, now_s: float
    ) -> tuple[VersionId | None, list[_Kept]]:
        """Return the base of an offer, and its payloads."""
        assert self._newest
        self._leases.pop(subscriber, None)
        chain = self._chain(have) if have else None
        if chain is not None:
            return have, [d.kept for d in chain]
        full, chain = self._newest, []
        if self._older and any(lease[0] is self._older for lease in self._leases.values()):
            if (leading_on := self._chain(self._older.id)) is not None:
                full, chain = self._older, leading_on
        self._leases[subscriber] = full, now_s + LEASE_S
        return None, [full.kept, *(d.kept for d in chain)]

    def _chain(self, have: VersionId) -> list[_Delta] | None:
        """Return the deltas from a version to the newest, if they are better than a full copy."""
        assert self._newest
        chain: list[_Delta] = []
        for link in reversed(self._deltas):
            chain.insert(0, link)
            if link.base == have:
                num_bytes = sum(d.kept.num_bytes for d in chain)
                return chain if _worth(num_bytes, self._newest) else None
        return None


def _worth(delta_bytes: int, full: _Full) -> bool:
    return delta_bytes <= _MAX_SHARE * full.kept.num_bytes


def _words(piece: Piece) -> np.ndarray:
    """Return a piece as unsigned numbers of its elements' size."""
    itemsize = np.dtype(piece.info.dtype).itemsize
    return piece.bytes_n.view(f"u{itemsize}")

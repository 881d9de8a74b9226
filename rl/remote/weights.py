"""Weights over links: `rl.weights` decides what a worker is sent, and messages carry it.

A rollout needs one version. The newest one is offered as deltas from what the worker has, or as a
full copy; an older one, which a step that began before the last update still runs with, is sent
whole.
"""

from __future__ import annotations

import collections
import itertools
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from rl.remote.drafter_messages import DrafterWeights, arrays_of
from rl.remote.link import Link, RemoteError
from rl.remote.messages import CODEC, Done, Has, Offered, Weights
from rl.speculation.learned_drafter import LearnedDrafter
from rl.weights.errors import CarrierError, DamagedWeights
from rl.weights.interface import Payload
from rl.weights.offers import VersionId
from rl.weights.publisher import Publisher
from spec.eagle.config import EagleConfig
from spec.eagle.model import EagleParams

MOST_KNOWN = 4  # versions that are told apart by their arrays
MOST_MESSAGES = 2  # that are kept, for workers that are offered the same


class MessageCarrier:
    """Carries payloads in the message that has the offer; each end has one."""

    def __init__(self) -> None:
        self._payloads: dict[str, Payload] = {}
        self._offered = threading.local()

    def hold(self, payload: Payload) -> str:
        key = secrets.token_hex(8)
        self._payloads[key] = payload
        return key

    def offer(self, held: str) -> Any:
        self.offered[held] = self._payloads[held]
        return {"key": held}

    def drop(self, held: str) -> None:
        self._payloads.pop(held, None)

    @property
    def offered(self) -> dict[str, Payload]:
        """The payloads of this thread's offer, which are to be sent with it."""
        if not hasattr(self._offered, "payloads"):
            self._offered.payloads = {}
        found: dict[str, Payload] = self._offered.payloads
        return found

    def came(self, payloads: Mapping[str, Payload]) -> None:
        """Have `receive` find what a message has brought."""
        self._payloads = dict(payloads)

    def receive(self, where: Any, sizes: Sequence[int]) -> list[np.ndarray]:
        key = where.get("key") if type(where) is dict else None
        payload = self._payloads.get(key) if type(key) is str else None
        if payload is None:
            raise CarrierError(f"expected the weights of this offer with it, got none for {key!r}")
        if [x.size for x in payload] != list(sizes) or any(x.dtype != np.uint8 for x in payload):
            raise DamagedWeights("expected the bytes of each piece with an offer, got others")
        return list(payload)


class MessagesOnce:
    """The last messages by what they bring, each encoded once for all workers."""

    def __init__(self, most: int) -> None:
        self._lock = threading.Lock()
        self._kept: collections.deque[tuple[Any, bytes]] = collections.deque(maxlen=most)

    def get(self, key: Any, make: Callable[[], Any]) -> bytes:
        """Return the bytes of a message, which one caller makes while others wait for it."""
        with self._lock:
            for known, message in self._kept:
                if known == key:
                    return message
            message = CODEC.encode(make())
            self._kept.append((key, message))
            return message


class DrafterMessages:
    """The weights of a run's learned drafter, if it has one, as messages."""

    def __init__(self, learned: LearnedDrafter | None) -> None:
        self._learned, self._messages = learned, MessagesOnce(MOST_MESSAGES)

    @property
    def config(self) -> EagleConfig:
        assert self._learned is not None, "there is a drafter that learns"
        return self._learned.config

    @property
    def version(self) -> int | None:
        """The version that rollouts are to draft with; None where nobody has learnt."""
        return None if self._learned is None else self._learned.version

    def drafts(self) -> tuple[int, bytes]:
        """Return the newest version, and its message."""
        assert self._learned is not None, "there is a version"
        version, params = self._learned.newest
        make = partial(_drafter_weights, "drafts", version, params)
        return version, self._messages.get(("drafts", version), make)

    def training(self, step: int, params: EagleParams) -> bytes:
        """Return the message of the weights that a step's gradients are of."""
        make = partial(_drafter_weights, "training", step, params)
        return self._messages.get(("training", step), make)


def _drafter_weights(
    use: Literal["drafts", "training"], version: int, params: EagleParams
) -> DrafterWeights:
    return DrafterWeights(use, version, arrays_of(params))


class PublishedWeights:
    """The weights of a run, for workers in other programs; any thread may call it.

    Weights are known by the arrays that they are: a rollout with the same ones has their version.
    """

    def __init__(self) -> None:
        self._carrier = MessageCarrier()
        self._publisher = Publisher(self._carrier)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._known: collections.deque[tuple[weakref.ref[Any], int]] = collections.deque(
            maxlen=MOST_KNOWN
        )
        self._offers, self._whole = MessagesOnce(MOST_MESSAGES), MessagesOnce(1)

    def publish(self, params: Any) -> int:
        """Return the version of weights, a new one where they have not been seen."""
        with self._lock:
            for known, version in self._known:
                if known() is params:
                    return version
            version = next(self._numbers)
            self._publisher.publish(version, params, time.monotonic())
            self._known.append((weakref.ref(params), version))
            return version

    @property
    def newest(self) -> int | None:
        return self._publisher.newest

    def bring(
        self, link: Link, have: VersionId | None, version: int, params: Any, limit_s: float
    ) -> VersionId | None:
        """Bring a worker to a version; return the newest that it has for deltas.

        Without `params` the newest version will do, whatever was published meanwhile.
        """
        if self._publisher.newest == version or params is None:
            have = self._offer(link, have, limit_s)
            if params is None or (have is not None and have.version == version):
                return have

        def fetched() -> Weights:
            return Weights(version, tuple(map(np.asarray, jax.device_get(jax.tree.leaves(params)))))

        link.ask(self._whole.get(version, fetched), Done, limit_s)
        return have

    def forget(self, name: str) -> None:
        """Note that the worker of a link is gone."""
        self._publisher.release(name)

    def close(self) -> None:
        self._publisher.close()

    def _offer(self, link: Link, have: VersionId | None, limit_s: float) -> VersionId | None:
        """Bring the newest version: what the worker has is no base for it, a full copy is."""
        try:
            return self._offer_from(link, have, limit_s)
        except RemoteError:
            if have is None:
                raise
        return self._offer_from(link, None, limit_s)

    def _offer_from(self, link: Link, have: VersionId | None, limit_s: float) -> VersionId | None:
        self._carrier.offered.clear()
        text = self._publisher.offer(link.name, have, time.monotonic())
        if text is None:
            return have
        payloads = {key: tuple(found) for key, found in self._carrier.offered.items()}
        message = self._offers.get(text, lambda: Offered(text, payloads))
        has = link.ask(message, Has, limit_s)
        self._publisher.release(link.name)
        return VersionId(has.version, has.fingerprint)

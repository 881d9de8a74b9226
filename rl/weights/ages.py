"""The ages of subscribers' weights: how far each is behind."""

from __future__ import annotations

import dataclasses
import threading

from rl.weights.offers import VersionId


@dataclasses.dataclass(frozen=True)
class Age:
    """Versions that the newest is ahead, and seconds since the first of them was published."""

    versions: int
    seconds: float


@dataclasses.dataclass
class _Has:
    version: int
    outdated_since_s: float | None


class Ages:
    """A record of what each subscriber said that it has.

    Time is an argument, in seconds of any one clock.
    """

    def __init__(self, most_versions_behind: int) -> None:
        self._most_versions = most_versions_behind
        self._newest: int | None = None
        self._newest_since_s = 0.0
        self._has: dict[str, _Has] = {}

    def published(self, version: int, now_s: float) -> None:
        self._newest, self._newest_since_s = version, now_s
        for has in self._has.values():
            if has.outdated_since_s is None and has.version < version:
                has.outdated_since_s = now_s

    def taken(self, subscriber: str, version: int) -> None:
        """Note what a subscriber runs from now on.

        Of one that took an older version than the newest, seconds begin with the newest.
        """
        outdated = self._newest is not None and version < self._newest
        self._has[subscriber] = _Has(version, self._newest_since_s if outdated else None)

    def forget(self, subscriber: str) -> None:
        self._has.pop(subscriber, None)

    def of(self, subscriber: str, now_s: float) -> Age | None:
        """Return the age of what a subscriber has, None where it has taken nothing."""
        has = self._has.get(subscriber)
        if has is None or self._newest is None:
            return None
        since_s = has.outdated_since_s
        seconds = 0.0 if since_s is None else now_s - since_s
        return Age(max(0, self._newest - has.version), seconds)

    def all(self, now_s: float) -> dict[str, Age]:
        found = {name: self.of(name, now_s) for name in self._has}
        return {name: age for name, age in found.items() if age is not None}

    def must_fetch(self, subscriber: str, now_s: float) -> bool:
        """Return whether a subscriber is too far behind to start anything."""
        age = self.of(subscriber, now_s)
        return age is None or age.versions > self._most_versions


class AgedPublisher:
    """The part of every publisher that knows how old its subscribers' weights are.

    `_lock` guards its state, the ages among it.
    """

    def __init__(self, most_versions_behind: int) -> None:
        self._lock = threading.Lock()
        self._ages = Ages(most_versions_behind)

    def taken(self, subscriber: str, have: VersionId) -> None:
        """Note what a subscriber runs now."""
        with self._lock:
            self._ages.taken(subscriber, have.version)

    def forget(self, subscriber: str) -> None:
        """Note that a subscriber is gone."""
        with self._lock:
            self._ages.forget(subscriber)

    def ages(self, now_s: float) -> dict[str, Age]:
        """Return how old the weights of each subscriber are."""
        with self._lock:
            return self._ages.all(now_s)

    def must_fetch(self, subscriber: str, now_s: float) -> bool:
        """Return whether a subscriber has nothing, or more than the bound allows to be behind."""
        with self._lock:
            return self._ages.must_fetch(subscriber, now_s)

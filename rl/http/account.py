"""Memory accounting of requests: bodies being read, waiting operations and answers being sent."""

from __future__ import annotations

MAX_BYTES = 2**29
SMALL_BYTES = 2**16  # only requests of up to this size may take the last quarter


class Busy(Exception):
    """The server has no memory left for the request; the client must retry later."""


class Account:
    """An account of bytes in use, at most `max_bytes`. Only for the event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.used = 0

    def take(self, num_bytes: int, held: int = 0) -> None:
        """Take bytes for a request that already holds `held`. Raises Busy without taking bytes."""
        is_small = held + num_bytes <= SMALL_BYTES
        limit = self.max_bytes if is_small else self.max_bytes * 3 // 4
        if self.used + num_bytes > limit:
            raise Busy("the server's memory for requests is full: send the request again later")
        self.used += num_bytes

    def give(self, num_bytes: int) -> None:
        self.used -= num_bytes
        assert self.used >= 0


class Hold:
    """The bytes that one request has taken from an account."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Take bytes for this request. Raises Busy."""
        self._account.take(num_bytes, self.num_bytes)
        self.num_bytes += num_bytes

    def hand_over(self) -> int:
        """Return the number of held bytes, which the caller must give back."""
        num_bytes = self.num_bytes
        self.num_bytes = 0
        return num_bytes

    def release(self) -> None:
        self._account.give(self.hand_over())

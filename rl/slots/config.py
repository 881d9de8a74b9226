"""Settings of a rollout worker on its devices, and the buckets of its shapes."""

from __future__ import annotations

import dataclasses
from typing import Literal, Self

from reprise.rl.gin.values import found_size
from reprise.spec.buckets import bucket, buckets

MAY_BE_ZERO = ("pages", "prefill_chunk_tokens")
CPU_CHUNK_TOKENS = 64  # padding of a longer chunk costs a CPU more than a second round
CHUNK_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of a rollout worker on its devices; no setting changes a token.

    The engine compiles programs for each bucket of slots (`min_slots`, 2 · `min_slots`, … up to
    `slots`) and of nodes; fewer buckets compile faster. The nodes of a round are a root for each
    slot, draft tokens and tokens of cached responses. If pages run out, the newest requests pause
    and are computed again, with the same tokens. "auto" chooses sizes that fit the device memory
    (`rl.preflight.sizes`).
    """

    slots: int | Literal["auto"] = 64
    """The number of requests that run concurrently."""
    min_slots: int = 4
    """The smallest bucket of slots; equal to `slots` compiles one bucket."""
    rounds_per_fetch: int = 16
    """Rounds between two fetches of tokens, while the host has no draft tokens."""
    max_nodes: int = 32
    """The maximum number of nodes of one request in a round."""
    max_round_nodes: int = 1024
    """The maximum number of nodes in a round, never below twice the slots."""
    prefill_rows: int = 4
    """The number of prompt chunks that a round computes."""
    prefill_chunk_tokens: int = 0
    """The tokens of a prompt chunk; 0: 64 on CPUs, else 512."""
    page_tokens: int = 128
    """The positions of a page of the cache."""
    pages: int | Literal["auto"] = 0
    """The number of pages of the cache; 0: as many as all slots can need."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = 0 if field.name in MAY_BE_ZERO else 1
            if isinstance(value, int) and value < low:
                raise ValueError(f"{field.name} must be at least {low}, got {value}")

    @property
    def max_slots(self) -> int:
        """The maximum number of slots. Raises ValueError while `slots` is still "auto"."""
        if isinstance(self.slots, int):
            return self.slots
        return found_size("Engine.slots", self.slots)

    def over(self, batch_ways: int) -> Self:
        """Return settings with slots and `prefill_rows` rounded up to multiples of `batch_ways`."""
        slots, min_slots, rows = (
            _rounded_up(size, batch_ways)
            for size in (self.max_slots, self.min_slots, self.prefill_rows)
        )
        return dataclasses.replace(self, slots=slots, min_slots=min_slots, prefill_rows=rows)

    def slot_pages(self, longest_tokens: int) -> int:
        """Return the maximum number of pages of a slot."""
        return -(-longest_tokens // self.page_tokens)

    def num_pages(self, num_slots: int, longest_tokens: int, batch_ways: int = 1) -> int:
        """Return the number of pages of a cache, split evenly over `batch_ways`.

        Each way has at least one page more than a slot can need, since a shared prompt may end
        inside a page. Raises ValueError if `pages` is too small for that.
        """
        high = self.slot_pages(longest_tokens)
        ways = batch_ways
        pages = self.pages
        if not isinstance(pages, int):
            pages = found_size("Engine.pages", pages)
        if not pages:
            return ways * max(high + 1, -(-num_slots // ways) * high)
        if pages // ways <= high:
            raise ValueError(
                f"expected Engine.pages of at least {ways * (high + 1)}, for a request of "
                f"{longest_tokens} tokens in pages of {self.page_tokens} in each of {ways} part(s) "
                f"of the devices, got {pages}: raise it, or lower Sampling.max_new_tokens"
            )
        return pages // ways * ways

    def chunk_tokens(self, longest_tokens: int, *, is_cpu: bool) -> int:
        """Return the tokens of a chunk, which fits into any slot."""
        chunk_tokens = self.prefill_chunk_tokens
        if not chunk_tokens:
            chunk_tokens = CPU_CHUNK_TOKENS if is_cpu else CHUNK_TOKENS
        return min(chunk_tokens, self.slot_pages(longest_tokens) * self.page_tokens)

    def drawing_chunks(self, num_slots: int, chunk_tokens: int) -> list[int]:
        """Return the chunk counts of passes that draw after each token, smallest first."""
        high = min(self.max_round_nodes // chunk_tokens, num_slots)
        sizes = buckets(high, self.prefill_rows)
        return [size for size in sizes if size <= high] or sizes[:1]

    def slot_bucket(self, num_requests: int) -> int:
        """Return the bucket of slots that holds `num_requests`, or the largest."""
        return bucket(num_requests, self.min_slots, max(self.max_slots, self.min_slots))

    def node_sizes(self, num_slots: int) -> list[int]:
        """Return the node counts of rounds with draft tokens, smallest first."""
        high = num_slots * min(max(self.max_round_nodes // num_slots, 2), self.max_nodes)
        sizes = [m for m in buckets(high, num_slots) if num_slots < m < high]
        return [*sizes, high] if high > num_slots else []

    def sizes_beside_prompts(self, num_slots: int) -> list[int]:
        """Return the node counts of rounds that also compute prompts: four and eight per slot."""
        return self.node_sizes(num_slots)[1:3]

    def most_nodes(self, num_slots: int) -> int:
        """Return the maximum number of nodes of a round."""
        return max(self.node_sizes(num_slots), default=num_slots)


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit

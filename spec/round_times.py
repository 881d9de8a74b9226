"""Measured seconds of rounds by bucket, for budgets, and their correction during a run.

The nodes of a round count all its slots: plain decoding has one node per slot. n = rounds, t =
seconds of the table, m = measured seconds.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

MAX_SECONDS = 1e5  # of a round
# names of tables
ROUND = "packed round"
CHUNKS = "draws in chunks"
DRAFT = "draft "
SHORT = "packed round of short rows"
BESIDE = "draws in chunks with a round"
FETCH = "host of a fetch"
NAMED = ROUND, SHORT, CHUNKS, BESIDE, FETCH
SHORT_PART = 8
LIVE_PART = 2  # 1/8 of the positions are live in short rows, 1/2 in all other tables
CHUNKS_USED = 0.75  # measured with configs/epochs_tiny.gin: the last chunk of a response is cut
NODES_USED = 0.6  # same source: chains are cut, and slots that compute prompts have none
Table = Mapping[tuple[int, int, int], float]


def monotone(seconds: Table) -> dict[tuple[int, int, int], float]:
    """Return the isotonic regression of seconds over the nodes of each (slots, positions)."""
    fitted: dict[tuple[int, int, int], float] = {}
    for slots, positions in {(b, s) for b, _, s in seconds}:
        blocks: list[tuple[list[int], float]] = []  # node counts, and their mean seconds
        for nodes in sorted(n for b, n, s in seconds if (b, s) == (slots, positions)):
            blocks.append(([nodes], seconds[slots, nodes, positions]))
            while len(blocks) > 1 and blocks[-2][1] > blocks[-1][1]:
                (few, few_s), (more, more_s) = blocks[-2:]
                mean_s = (len(few) * few_s + len(more) * more_s) / (len(few) + len(more))
                blocks[-2:] = [(few + more, mean_s)]
        fitted |= {(slots, n, positions): mean_s for block, mean_s in blocks for n in block}
    return fitted


class RoundTimes:
    """Seconds of a round by (slots, nodes, positions), measured on this device and shape.

    Half of the positions are live, in `short_seconds` an eighth: short rows speed up a plain round
    more than a round with draft tokens. `draft_seconds` are the additional seconds of each drafter
    on the device, by (slots, depth, positions); `chunk_seconds` the seconds of passes that draw
    after the tokens of chunks, by (slots, tokens of chunks, positions), and `beside_seconds` the
    seconds of such a pass with a plain round. `fetch_seconds` are the host seconds of a fetch, by
    (slots, 1, positions).
    """

    def __init__(
        self,
        seconds: Table,
        draft_seconds: Mapping[str, Table] | None = None,
        chunk_seconds: Table | None = None,
        *,
        short_seconds: Table | None = None,
        beside_seconds: Table | None = None,
        fetch_seconds: Table | None = None,
    ) -> None:
        self._seconds = dict(seconds)
        self._short = dict(short_seconds or {})
        self._chunks = dict(chunk_seconds or {})
        self._beside = dict(beside_seconds or {})
        self._fetches = dict(fetch_seconds or {})
        self._drafts = {name: dict(table) for name, table in (draft_seconds or {}).items()}

    @property
    def rounds(self) -> Table:
        """The seconds of rounds without drafting on the device."""
        return dict(self._seconds)

    def __call__(
        self, num_slots: int, num_nodes: int, num_positions: int, live_tokens: float | None = None
    ) -> float | None:
        """Return the seconds of a round with a mean of `live_tokens` live positions per row.

        t(short) + (t − t(short)) · (live − S/8) / (S/2 − S/8),  never below t(short)

        Without `live_tokens`, half of the positions are live.
        """
        bucket = num_slots, num_nodes, num_positions
        taken_s = self._seconds.get(bucket)
        short_s = self._short.get(bucket)
        if taken_s is None or short_s is None or live_tokens is None:
            return taken_s
        low = num_positions / SHORT_PART
        high = num_positions / LIVE_PART
        return short_s + max(taken_s - short_s, 0.0) * max(live_tokens - low, 0.0) / (high - low)

    def draft(self, name: str, num_slots: int, depth: int, num_positions: int) -> float:
        """Return drafting seconds, interpolated between measured depths; 0 if unmeasured."""
        table = self._drafts.get(name, {})
        bucket = (num_slots, num_positions)
        at = [(d, taken_s) for (slots, d, s), taken_s in table.items() if (slots, s) == bucket]
        if not at:
            return 0.0
        d0, t0 = min(at)
        d1, t1 = max(at)
        return t0 if d0 == d1 else t0 + (t1 - t0) * (depth - d0) / (d1 - d0)

    def scaled(self, factor: float, rounds: Table) -> RoundTimes:
        """Return `rounds`, with the draft and chunk seconds of this table times a factor.

        Seconds of short rows keep their ratio to the seconds of the round.
        """

        def times_factor(table: Table) -> dict[tuple[int, int, int], float]:
            return {at: factor * s for at, s in table.items()}

        return RoundTimes(
            rounds,
            {name: times_factor(table) for name, table in self._drafts.items()},
            times_factor(self._chunks),
            short_seconds={at: s * rounds[at] / self._seconds[at] for at, s in self._short.items()},
            beside_seconds=times_factor(self._beside),
            fetch_seconds=times_factor(self._fetches),
        )

    def without_drafts(self, name: str) -> RoundTimes:
        """Return this table without the seconds of a drafter."""
        drafts = {n: t for n, t in self._drafts.items() if n != name}
        return RoundTimes(
            self._seconds,
            drafts,
            self._chunks,
            short_seconds=self._short,
            beside_seconds=self._beside,
            fetch_seconds=self._fetches,
        )

    @property
    def chunk_slots(self) -> frozenset[int]:
        """The numbers of slots that passes of chunks are measured with."""
        return frozenset(slots for slots, _, _ in self._chunks)

    def fetch(self, num_slots: int) -> float:
        """Return the host seconds of a fetch; 0 if they are not measured."""
        return max((s for (b, _, _), s in self._fetches.items() if b == num_slots), default=0.0)

    def chunks(
        self, num_slots: int, num_tokens: int, num_positions: int, *, is_beside: bool = False
    ) -> float | None:
        """Return seconds of a pass of chunks at the most measured positions ≤ `num_positions`."""
        table = self._beside if is_beside else self._chunks
        sizes = [s for b, n, s in table if (b, n) == (num_slots, num_tokens) and s <= num_positions]
        return table[num_slots, num_tokens, max(sizes)] if sizes else None

    def chunks_pay(self, num_slots: int, num_positions: int, chunk_tokens: int) -> bool:
        """Return True if a round verifies a known token faster in a chunk than as a node.

            t(tokens of chunks) / (c · tokens of chunks)  <  min over M of t(M nodes) / (n · M)

        c and n are `CHUNKS_USED` and `NODES_USED`, the shares of chunk tokens and nodes that yield
        a token. An unmeasured side counts as slower; chunks win if neither is measured.
        """
        chunks_s = self._chunks.get((num_slots, chunk_tokens, num_positions))
        nodes_s = [
            (self(*bucket) or MAX_SECONDS) / bucket[1]
            for bucket in self._seconds
            if bucket[::2] == (num_slots, num_positions) and bucket[1] > num_slots
        ]
        if chunks_s is None or not nodes_s:
            return not nodes_s
        return chunks_s / chunk_tokens / CHUNKS_USED < min(nodes_s) / NODES_USED

    def draft_depths(self, name: str) -> tuple[int, ...]:
        """Return the measured depths of a drafter, ascending."""
        return tuple(sorted({depth for _, depth, _ in self._drafts.get(name, ())}))

    def rows(self) -> list[list[str | float]]:
        """Return rows of [table, slots, nodes or depth, positions, seconds], for a run folder."""
        own = self._seconds, self._short, self._chunks, self._beside, self._fetches
        tables = dict(zip(NAMED, own, strict=True))
        tables |= {f"{DRAFT}{name}": table for name, table in self._drafts.items()}
        return [[name, *at, t] for name, table in tables.items() for at, t in sorted(table.items())]

    @staticmethod
    def from_rows(rows: Sequence[Sequence[str | float]]) -> RoundTimes:
        """Return the table of `rows`; raise ValueError for impossible counts or seconds."""
        tables: dict[str, dict[tuple[int, int, int], float]] = {name: {} for name in NAMED}
        for name, b, n, s, taken_s in rows:
            if any(type(count) is not int or count < 1 for count in (b, n, s)):
                raise ValueError(f"expected counts of 1 or more, got {[name, b, n, s]}")
            if type(taken_s) is not float or not 0 < taken_s < MAX_SECONDS:
                raise ValueError(f"expected seconds of a round, got {taken_s!r}")
            if name not in NAMED and not str(name).startswith(DRAFT):
                raise ValueError(f"expected {', '.join(NAMED)} or {DRAFT}…, got {name!r}")
            tables.setdefault(str(name), {})[int(b), int(n), int(s)] = float(taken_s)
        named = {name: tables.pop(name) for name in NAMED}
        if extra := sorted(named[SHORT].keys() - named[ROUND].keys()):
            raise ValueError(f"expected short rows of rounds in the table, got {extra[:1]}")
        return RoundTimes(
            named[ROUND],
            {name.removeprefix(DRAFT): table for name, table in tables.items()},
            named[CHUNKS],
            short_seconds=named[SHORT],
            beside_seconds=named[BESIDE],
            fetch_seconds=named[FETCH],
        )


Bucket = tuple[int, int, int]  # slots, nodes, positions
PRIOR_ROUNDS = 32.0  # weight of the table, in rounds
DECAY = 0.7  # factor per step on the weight of earlier rounds
LOSS = 0.01  # share of the seconds in rounds; a step that loses less does not count


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step: in rounds, saved by drafts, and (n, m) of each bucket.

    `has_history` is False if no prompt had responses of an earlier epoch to draft from.
    `reuse_saved_s` are the seconds that cached responses saved; 0 without cached responses.
    """

    rollout_s: float
    saved_s: float
    rounds: Mapping[Bucket, tuple[int, float]]
    has_history: bool
    reuse_saved_s: float = 0.0

    @property
    def loses(self) -> bool:
        return self.saved_s < -LOSS * self.rollout_s

    @property
    def reuse_loses(self) -> bool:
        return self.reuse_saved_s < -LOSS * self.rollout_s


class RunSeconds:
    """Totals of a run; `losing_steps` losing steps in a row turn drafts off (0: never).

    Steps without history are counted separately: drafts that lose in the first epoch start again in
    the second. Reuse is turned off likewise: `lost_reuse` holds the latest losing steps in a row,
    among the steps with reuse.
    """

    def __init__(self, losing_steps: int = 0) -> None:
        self.lost_reuse = collections.deque[StepSeconds](maxlen=losing_steps)
        self.reuse_is_off = False
        self._off = set[bool]()  # `has_history` of the steps that turned drafts off
        self._lost = {x: collections.deque[StepSeconds](maxlen=losing_steps) for x in (False, True)}
        self._rounds: dict[Bucket, tuple[float, float]] = {}  # n and m

    def is_off(self, has_history: bool) -> bool:
        """Return whether drafts are off for steps with, or without, history."""
        return True in self._off or has_history in self._off

    def played(self, step: StepSeconds) -> None:
        """Add the seconds of the next step."""
        lost = self._lost[step.has_history]
        if step.loses:
            lost.append(step)
        else:
            lost.clear()
        if 0 < len(lost) == lost.maxlen:
            self._off.add(step.has_history)
        self._played_reuse(step)
        self._rounds = {b: (DECAY * n, m) for b, (n, m) in self._rounds.items()}
        for bucket, (more, mean_s) in step.rounds.items():
            n, m = self._rounds.get(bucket, (0.0, 0.0))
            self._rounds[bucket] = n + more, (n * m + more * mean_s) / (n + more)

    def _played_reuse(self, step: StepSeconds) -> None:
        lost = self.lost_reuse
        if step.reuse_loses:
            lost.append(step)
        elif step.reuse_saved_s:
            lost.clear()
        self.reuse_is_off |= 0 < len(lost) == lost.maxlen

    def lost(self, has_history: bool) -> tuple[float, float]:
        """Return (seconds lost by drafts, rollout seconds) of the latest losing steps."""
        lost = self._lost[has_history]
        return -sum(s.saved_s for s in lost), sum(s.rollout_s for s in lost)

    def corrected(self, times: RoundTimes) -> RoundTimes:
        """Return the table, corrected by the rounds of this run.

        The seconds of a bucket are

            (prior · k · t + n · m) / (prior + n),   k = Σ n m / Σ n t

        so that unmeasured rounds are slower by the same factor, and never cheaper with more nodes.
        Draft seconds are multiplied by k.
        """
        table = times.rounds
        seen = {b: n_m for b, n_m in self._rounds.items() if b in table}
        if not seen:
            return times
        k = sum(n * m for n, m in seen.values()) / sum(n * table[b] for b, (n, _) in seen.items())
        seconds = dict[Bucket, float]()
        for bucket, t in table.items():
            n, m = seen.get(bucket, (0.0, 0.0))
            seconds[bucket] = (PRIOR_ROUNDS * k * t + n * m) / (PRIOR_ROUNDS + n)
        return times.scaled(k, monotone(seconds))

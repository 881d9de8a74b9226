"""The loop of a worker's thread: requests of a source → `Engine.add` → `Engine.step` → events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rl.engine.engine import ChunkEnd, Engine, Event, OnFinish, OnRound
from rl.engine.rollout_spec import RolloutSpec
from rl.engine.stats import EngineStats
from rl.trajectory import PartialRequest, Trajectory


class RequestSource(Protocol):
    """Sends one engine its requests while a rollout runs, and receives unfinished ones.

    At most `most_requests` run at once, none with more than `longest_tokens` of prompt and
    response together; all that run hold at most `kv_tokens` cache positions.
    """

    most_requests: int
    longest_tokens: int
    kv_tokens: int

    def take(self, *, wait: bool) -> Sequence[PartialRequest] | None:
        """Return the requests to start now; None once no more will come.

        With `wait` nothing else runs: return only with a request, or with None.
        """
        ...

    @property
    def lets_go(self) -> bool:
        """Return True if all requests are to leave now, with the tokens that they have."""
        ...

    def dropped(self) -> Sequence[int]:
        """Return the requests that are to end here without an answer."""
        return ()

    def copies(self) -> Sequence[tuple[int, int]]:
        """Return the requests to copy for another worker, and the copies' numbers."""
        return ()

    def copied(self, number: int, partial: PartialRequest | None) -> None:
        """Receive the copy of a request, with keys and values; None if it does not run here."""
        return

    def chunk_ended(self, request_id: int, response_tokens: int) -> int:
        """Return how many more tokens a request may have in its row; at 0 it leaves the worker."""
        ...

    def park(self, leaving: Sequence[PartialRequest]) -> None:
        """Receive requests that leave, with their keys and values."""
        ...


def drive(
    engine: Engine,
    spec: RolloutSpec,
    source: RequestSource,
    *,
    stats: EngineStats | None = None,
    on_finish: OnFinish = lambda trajectory: None,
    on_round: OnRound = lambda finished, tokens: None,
) -> None:
    """Run the requests of a source to their ends, or until they leave."""
    num_finished = 0
    with engine.rollout(
        spec,
        max_requests=source.most_requests,
        max_tokens=source.longest_tokens,
        kv_tokens=source.kv_tokens,
        stats=stats,
    ):
        while _receive(engine, source) or engine.has_work:
            finished = _deliver(engine, source, engine.step())
            for trajectory in finished:
                on_finish(trajectory)
            num_finished += len(finished)
            on_round(num_finished, engine.stats.tokens)


def _receive(engine: Engine, source: RequestSource) -> bool:
    """Pass the source's commands to the engine; return False once no more requests will come."""
    requests = source.take(wait=not engine.has_work)
    engine.remove(source.dropped())  # first: one of their numbers may be given again
    engine.add(requests or ())
    for request_id, number in source.copies():
        source.copied(number, engine.copy(request_id))
    if source.lets_go:
        leaving = engine.release()
        for left in leaving:
            more = source.chunk_ended(left.request.request_id, left.num_tokens)
            assert not more, "all requests leave"
        source.park(leaving)
    return requests is not None


def _deliver(engine: Engine, source: RequestSource, events: Sequence[Event]) -> list[Trajectory]:
    """Extend the requests whose chunks ended, or send them away; return the finished ones."""
    finished, leaving = list[Trajectory](), list[int]()
    for event in events:
        if not isinstance(event, ChunkEnd):
            finished.append(event)
        elif more := source.chunk_ended(event.request_id, event.response_tokens):
            engine.extend(event.request_id, more)
        else:
            leaving.append(event.request_id)
    for some in engine.take(leaving):
        source.park(some)
    return finished

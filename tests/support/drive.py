"""The loop of a worker's thread: requests of a source → `Engine.add` → `Engine.step` → events."""

from __future__ import annotations

from reprise.rl.engine.engine import ChunkEnd


class RequestSource:
    """Sends one engine its requests while a rollout runs, and receives unfinished ones."""

    most_requests, longest_tokens, kv_tokens = 4, 32, 10**6

    def take(self, *, wait):
        """Return the requests to start now, one at least to `wait` for; None: no more come."""
        raise NotImplementedError

    def chunk_ended(self, request_id, response_tokens):
        """Return how many more tokens a request may have in its row; at 0 it leaves the worker."""
        raise NotImplementedError

    def park(self, leaving):
        """Receive requests that leave, with their keys and values."""
        raise NotImplementedError


def drive(
    engine,
    spec,
    source,
    *,
    stats=None,
    on_finish=lambda trajectory: None,
    on_round=lambda finished, tokens: None,
):
    """Run the requests of a source to their ends, or until they leave."""
    most, num_finished = source.most_requests, 0
    limits = {"max_tokens": source.longest_tokens, "kv_tokens": source.kv_tokens, "stats": stats}
    with engine.rollout(spec, max_requests=most, **limits):
        while (requests := source.take(wait=not engine.has_work)) is not None or engine.has_work:
            engine.add(requests or ())
            leaving = []
            for event in engine.step():
                if not isinstance(event, ChunkEnd):
                    num_finished += 1
                    on_finish(event)
                elif more := source.chunk_ended(event.request_id, event.response_tokens):
                    engine.extend(event.request_id, more)
                else:
                    leaving.append(event.request_id)
            for some in engine.take(leaving):
                source.park(some)
            on_round(num_finished, engine.stats.tokens)

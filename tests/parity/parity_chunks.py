"""Requests whose chunks end at every offset of a page, beside rows at rest.

Few requests run at once, so that nobody waits for a row and rounds go on while rows rest.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import rollouts
from drive import RequestSource
from parity_model import CONFIG as WHOLE
from parity_model import MODEL, SAMPLINGS, STEP_KEY, STOP

from reprise.rl.records.trajectory import PartialRequest, Request

# one size of trees: few programs
CONFIG = dataclasses.replace(
    WHOLE,
    max_nodes=4,
    rounds_per_fetch=6,
    prefill_rows=2,
    prefill_chunk_tokens=7,
)
SEEDS = (1, 7, 9, 10)  # of the source


def make_requests():
    """26 requests, in the order in which they come: each group's first samples before the others.

    The first two have long prompts, which end near the end of a page, and end at once: their rows
    rest until siblings come, while rounds of the others go on beside them.
    """
    rng = np.random.default_rng(4)
    first, later = (30, 31, 1, 5, 8, 3, 6, 7), (12, 18, 22, 26, 32)
    order = [(g, s) for s in (0, 1) for g in range(8)] + [
        (8 + g, s) for g in range(5) for s in (0, 1)
    ]
    prompts = [tuple(rng.integers(0, MODEL.vocab_size, n).tolist()) for n in (*first, *later)]
    return [
        Request(100 * i + 3, prompts[g], g, s, max_new_tokens=1 if g < 2 and not s else None)
        for i, (g, s) in enumerate(order)
    ]


class Chunks(RequestSource):
    """A source of chunks of 1 to 5 tokens, half of those that can end where a page does.

    Requests go on in their row, or leave; some of these come back with their keys and values,
    others without. Half of those with short prompts are never interrupted: rounds go on while
    others rest. What comes comes every third time.
    """

    most_requests, longest_tokens, kv_tokens = CONFIG.slots, 64, 10_000

    def __init__(self, requests, seed):
        self._rng = np.random.default_rng(seed)
        self._waiting = [PartialRequest(r) for r in requests]
        self._prompt_tokens = {r.request_id: len(r.prompt_ids) for r in requests}
        self._whole = {
            r.request_id for r in requests if len(r.prompt_ids) < 9 and self._rng.random() < 0.5
        }
        self._running = self._calls = 0
        self.offsets = set()  # cached positions at which chunks ended

    def take(self, *, wait):
        self._calls += 1
        if not self._waiting and not self._running:
            return None
        if self._calls % 3 != 1 and not wait:
            return []
        count = min(len(self._waiting), self.most_requests - self._running)
        begun, self._waiting = self._waiting[:count], self._waiting[count:]
        self._running += count
        return [dataclasses.replace(p, max_tokens=self._first_length(p)) for p in begun]

    def chunk_ended(self, request_id, response_tokens):
        offset = self._prompt_tokens[request_id] + response_tokens - 1
        self.offsets.add(offset)
        return self._length(offset) if self._rng.random() < 0.6 else 0

    def park(self, leaving):
        self._running -= len(leaving)
        for begun in leaving:
            self._waiting.append(begun if self._rng.random() < 0.6 else begun.without_kv())

    def finished(self, trajectory):
        self._running -= 1

    def _first_length(self, begun):
        if begun.request.request_id in self._whole:
            return None
        return self._length(len(begun.token_ids) - 1)

    def _length(self, offset):
        left = -offset % CONFIG.page_tokens
        if 0 < left <= 5 and self._rng.random() < 0.5:
            return left
        return int(self._rng.integers(1, 6))


def in_chunks(engine, params, name, requests, seed, **options):
    """Trajectories, and the offsets at which chunks ended."""
    source, done = Chunks(requests, seed), []

    def finish(trajectory):
        source.finished(trajectory)
        done.append(trajectory)

    rollouts.run(
        *(engine, params, [], SAMPLINGS[name], STEP_KEY, STOP),
        source=source,
        on_finish=finish,
        **options,
    )
    assert len(done) == len(requests)
    return done, source.offsets

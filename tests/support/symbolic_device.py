"""A device that computes hashes: the engine's host side runs as it is, and nothing is compiled.

An entry of the cache is the hash of its whole context, and its token. A round reads all entries of
a slot and checks each with the one before it, so that a wrong page, position, order or write
is found; what it draws is a hash of context, request and place. `response` is what has to come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np

from reprise.models.attention.kv_cache import KVCache
from reprise.models.config import ModelConfig
from reprise.rl.engine import rounds
from reprise.rl.engine.engine import Engine
from reprise.rl.slot_memory import cache_ops, slot_cache

VOCAB = 23
MODEL = ModelConfig("llama", VOCAB, 8, 1, 1, 1, 4, 8, max_positions=4096)
NOTHING = -1  # which no hash of Python is


class Broken(AssertionError):
    """A slot reads or writes what is not its own."""


def extended(context: int, token: int) -> int:
    return hash((context, int(token)))


def drawn(context: int, request: int, place: int) -> int:
    return hash((context, int(request), int(place))) % VOCAB


def logprob(context: int, token: int) -> np.float32:
    return np.float32(-(hash((context, int(token), 0, 0)) % 1000) / 200)


def response(request, ends=()) -> tuple[list[int], list[np.float32]]:
    """The tokens and log-probabilities of a request, up to one of the tokens `ends`."""
    context, tokens, logprobs = 0, [], []
    for token in request.prompt_ids:
        context = extended(context, token)
    while len(tokens) < request.max_new_tokens and not set(ends) & set(tokens):
        tokens.append(drawn(context, request.request_id, len(tokens)))
        logprobs.append(logprob(context, tokens[-1]))
        context = extended(context, tokens[-1])
    return tokens, logprobs


# -- the cache -------------------------------------------------------------------------


def _place(cache, slot, position):
    """Return the page of a position and its place there; None where it has none."""
    T = cache.page_tokens
    page = int(cache.table_BN[slot, position // T]) if position < cache.num_positions else NOTHING
    return None if page == NOTHING else (page, position % T)


def _context(cache, slot, length):
    """Check the first `length` entries of a slot; return their context."""
    if length and _place(cache, slot, length - 1) is None:
        raise Broken(f"slot {slot} reads position {length - 1}, which it has no page for")
    page_N = cache.table_BN[slot]
    entries = (
        x[0][page_N, 0, :, 0].reshape(-1)[:length].tolist() for x in (cache.keys, cache.values)
    )
    context = 0
    for position, (found, token) in enumerate(zip(*entries, strict=True)):
        context = extended(context, token)
        if found != context:
            what = "nothing was written" if found == NOTHING else "an entry of another context"
            raise Broken(f"slot {slot}, position {position} of {length}: {what}")
    return context


def _write(cache, entries):
    """Write (slot, position, context, token); those without a page are dropped."""
    for slot, position, context, token in entries:
        place = _place(cache, slot, position)
        if place is None:
            continue
        page, offset = place
        part = page * cache.ways // len(cache.values[0])
        if part != slot * cache.ways // len(cache.table_BN):
            raise Broken(f"slot {slot} writes to a page of another part")
        if np.count_nonzero(cache.table_BN == page) > 1:
            raise Broken(f"slot {slot} writes to a page that another one has, too")
        cache.keys[0][page, 0, offset, 0] = context
        cache.values[0][page, 0, offset, 0] = token
    return cache


def _chunk_entries(cache, table_TX):
    """Return the entries of chunks (slot, start, tokens …), each behind what its row has."""
    found, known = [], {}  # the contexts of each row, by position
    for slot, start, *tokens in table_TX.tolist():
        if slot < 0:
            continue
        if slot not in known:
            known[slot] = {start - 1: _context(cache, slot, start)}
        if start - 1 not in known[slot]:
            raise Broken(f"a chunk of slot {slot} begins at {start}, behind a gap")
        context = known[slot][start - 1]
        for position, token in enumerate(tokens, start):
            context = extended(context, token)
            known[slot][position] = context
            found.append((slot, position, context, token))
    return found


# -- rounds ----------------------------------------------------------------------------


def _emit(slots, b, tokens, stop_E):
    slots.last[b], slots.length[b] = tokens[-1], slots.length[b] + len(tokens)
    slots.emitted[b] += len(tokens)
    slots.active[b] = tokens[-1] not in stop_E and slots.emitted[b] < slots.limit[b]


def _decode(cache, slots, stop_E):
    """One token of each slot: tokens, bits of log-probabilities, and whether they count."""
    found_3B = np.zeros((3, len(slots.last)), np.int32)
    for b in np.nonzero(slots.active)[0].tolist():
        last, length = int(slots.last[b]), int(slots.length[b])
        context = extended(_context(cache, b, length), last)
        if _place(cache, b, length) is None:
            raise Broken(f"slot {b} has no page at {length}")
        _write(cache, [(b, length, context, last)])
        token = drawn(context, slots.request_id[b], slots.emitted[b])
        found_3B[:, b] = token, logprob(context, token).view(np.int32), 1
        _emit(slots, b, [token], stop_E)
    return found_3B


def decode_rounds(params, cache, pending, slots, stop_E, most, stop_after, *, max_rounds, **_):
    _write(cache, pending)
    found_3RB = np.zeros((3, max_rounds, len(slots.last)), np.int32)
    began, r = slots.active.sum(), 0
    while r < most and slots.active.any() and began - slots.active.sum() < stop_after:
        found_3RB[:, r] = _decode(cache, slots, stop_E)
        r += 1
    return cache, [], slots, found_3RB


def decode_beside_chunks(params, cache, pending, slots, stop_E, chunks_TX, **_):
    _write(cache, pending)
    entries = _chunk_entries(cache, chunks_TX)
    return cache, [], slots, _decode(cache, slots, stop_E), entries


def verify_round(params, cache, pending, slots, nodes_5M, stop_E, chunks_TX, *, max_nodes, **_):
    """Each slot's tree is walked from its root, along the children that equal what is drawn."""
    _write(cache, pending)
    tokens_M, slots_M, parents_M = nodes_5M[:3].tolist()
    found_3M, left = np.zeros((3, len(tokens_M)), np.int32), []
    for b in np.nonzero(slots.active)[0].tolist():
        nodes = [m for m, slot in enumerate(slots_M) if slot == b]
        if len(nodes) > max_nodes:
            raise Broken(f"slot {b} has more nodes than its tree may have")
        context, token, at, got = (
            _context(cache, b, int(slots.length[b])),
            slots.last[b],
            nodes[0],
            [],
        )
        while at is not None:
            context = extended(context, token)
            left.append((b, int(slots.length[b]) + len(got), context, int(token)))
            token = drawn(context, slots.request_id[b], slots.emitted[b] + len(got))
            found_3M[:, at] = token, logprob(context, token).view(np.int32), 1
            got.append(token)
            has_ended = token in stop_E or slots.emitted[b] + len(got) >= slots.limit[b]
            right = [m for m in nodes if parents_M[m] == at and tokens_M[m] == token]
            at = right[0] if right and not has_ended else None
        _emit(slots, b, got, stop_E)
    entries = None if chunks_TX is None else _chunk_entries(cache, chunks_TX)
    return cache, left, slots, found_3M, entries


def make_slots(columns_BC, processing, key):
    names = cache_ops.COLUMNS
    made = {n: x.copy() for n, x in zip(names, columns_BC.astype(np.int64).T, strict=True)}
    made["active"], made["last"] = made["active"] > 0, made.pop("last_token")
    return types.SimpleNamespace(**made)


def join_slots(slots, columns_BC, processing, key, joins_B):
    for name, made_B in vars(make_slots(columns_BC, processing, key)).items():
        setattr(slots, name, np.where(joins_B, made_B, getattr(slots, name)))
    return slots


# -- entries on their way ---------------------------------------------------------------


def copy_pages(cache, source_X, target_X):
    for [array] in (cache.keys, cache.values):
        array[target_X[target_X >= 0]] = array[source_X[target_X >= 0]].copy()
    return cache


def insert_pages(cache, new, target_X):
    count = int((target_X >= 0).sum())
    for [array], [pages] in ((cache.keys, new.keys), (cache.values, new.values)):
        array[target_X[:count]] = pages[:count]
    return cache


def read_pages(cache, page_X):
    pages = ((x[0][np.maximum(page_X, 0)].copy(),) for x in (cache.keys, cache.values))
    return SymbolicPages(*pages, (), None)


@dataclasses.dataclass(frozen=True)
class SymbolicPages(KVCache):
    ways: int = 1  # the parts that slots and pages have


class SymbolicEngine(Engine):
    """An engine on such a device, or on a mesh of several that share out the slots."""

    ways = 1

    @property
    def batch_ways(self):
        return self.ways

    def put(self, x):
        return x

    def argument(self, x):
        return x

    def put_kv(self, x, kind):
        return x

    def readable(self, x):
        return x

    def empty_cache(self, num_slots):
        size = self.num_pages, 1, self.config.page_tokens, 1
        keys, values = (np.full(size, NOTHING) for _ in range(2))
        table_BN = np.full((num_slots, self.slot_pages), NOTHING)
        return SymbolicPages((keys,), (values,), (), table_BN, ways=self.ways)

    def empty_pending(self, num_slots):
        return []


@contextlib.contextmanager
def device() -> Iterator[None]:
    """Inside, the engine's steps are those of this module."""
    with contextlib.ExitStack() as stack:
        for module, steps in (
            (rounds, (decode_rounds, decode_beside_chunks, verify_round)),
            (cache_ops, (make_slots, join_slots, copy_pages, insert_pages, read_pages)),
        ):
            for step in steps:
                stack.enter_context(patch.object(module, step.__name__, step))
        stack.enter_context(
            patch.object(cache_ops, "write_chunks", lambda cache, new, _: _write(cache, new))
        )
        settled = lambda cache, pending: (_write(cache, pending), [])  # noqa: E731
        stack.enter_context(patch.object(slot_cache, "settle", settled))
        yield

"""Kernels of the suffix forest: suffix automata that grow in one arena of arrays.

A state represents the contexts that end at the same positions in the text of a tree: the suffixes
of its longest context that are longer than all contexts of its link. `COUNT` and the weight in
column `WEIGHT` (float32 bits) are valid for contexts of up to `depth` tokens. The first edge of a
state is inline. The others form a list that starts at `MORE`, and a hash table by (state, token)
finds them in O(1).

Python calls kernels, which numba caches; kernels call parts, which are compiled into the kernels.
S = sequences, T = tokens.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

kernel = numba.njit(cache=True, nogil=True, error_model="numpy")
# Parts own no arrays. With `_nrt`, numba would count references to each array atomically, which
# takes twice as long as everything else.
_PART = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
part = numba.njit(no_cpython_wrapper=True, **_PART)
inlined = numba.njit(no_cpython_wrapper=True, forceinline=True, **_PART)
# numba's cache does not notice changes in other files. A kernel in another file that uses these
# parts takes this number as a default argument, which is part of the kernel signature.
STAMP = zlib.crc32(Path(__file__).read_bytes())

NONE = -1
# Columns of `states` [state, 8] int32. The link of a root and the token of no edge are NONE.
LENGTH, LINK, COUNT, TOKEN, TARGET, MORE, NEXT, WEIGHT = range(8)
# Columns of `edges` [edge, 4] int32.
SOURCE, LABEL, GOAL, NEXT_EDGE = range(4)
# Columns of `sequences` [sequence, 5] int64. LAST: the state of the whole sequence; NODE: the state
# of its last MATCHED = min(tokens, depth) tokens.
TREE, LAST, NODE, MATCHED, SEQUENCE_GENERATION = range(5)
# Columns of `trees` [tree, 4] int64. STATES: the first state, linked by NEXT; GROWN: tokens.
ROOT, STATES, GROWN, TREE_GENERATION = range(4)
# Rows and columns of `pools` [2, 3] int64: records ever taken, the free list, its length.
STATE_POOL, EDGE_POOL = range(2)
TAKEN, FREE, NUM_FREE = range(3)
# Columns of a follower. SEEN: the count of its match at the last `follow`.
FOLLOWER_COLUMNS = 5
AT, MATCH, POSITION, SEEN_GROWN, SEEN = range(FOLLOWER_COLUMNS)

SLOT_MASK = 0xFFFFFFFF  # an id is generation << 32 | row


class Arena(NamedTuple):
    """The arrays of a forest.

    `weights` is `states` as float32; `rates` are the weights of sequences; `table` holds
    hash << 32 | edge + 1, or 0 in empty slots.
    """

    states: np.ndarray
    weights: np.ndarray
    edges: np.ndarray
    table: np.ndarray
    sequences: np.ndarray
    rates: np.ndarray
    trees: np.ndarray
    pools: np.ndarray


# --- pools and edges ----------------------------------------------------------------------


@inlined
def _take(pools, pool, records, next_column):
    """Return a record of the free list, else an unused record; the caller has made room."""
    record = pools[pool, FREE]
    if record >= 0:
        pools[pool, FREE] = records[record, next_column]
        pools[pool, NUM_FREE] -= 1
    else:
        record = pools[pool, TAKEN]
        pools[pool, TAKEN] += 1
    return record


@inlined
def _put_back(pools, pool, records, next_column, record):
    records[record, next_column] = pools[pool, FREE]
    pools[pool, FREE] = record
    pools[pool, NUM_FREE] += 1


@inlined
def _hash(state, token):
    """Return 31 hash bits of (state, token)."""
    x = (np.uint64(state) << np.uint64(32)) | np.uint64(token)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    return np.int64(x >> np.uint64(33))


@inlined
def _edge(a, state, token):
    """Return the listed edge of `state` with `token`, or NONE, by linear probing."""
    mask = a.table.shape[0] - 1
    code = _hash(state, token)
    slot = code & mask
    while a.table[slot] != 0:
        if a.table[slot] >> 32 == code:
            edge = (a.table[slot] & SLOT_MASK) - 1
            if a.edges[edge, SOURCE] == state and a.edges[edge, LABEL] == token:
                return edge
        slot = (slot + 1) & mask
    return NONE


@inlined
def child_of(a, state, token):
    """Return the state that `token` leads to from `state`, or NONE."""
    if a.states[state, TOKEN] == token:
        return np.int64(a.states[state, TARGET])
    if a.states[state, MORE] == NONE:
        return np.int64(NONE)
    edge = _edge(a, state, token)
    return np.int64(NONE) if edge == NONE else np.int64(a.edges[edge, GOAL])


@inlined
def _insert(table, code, edge):
    mask = table.shape[0] - 1
    slot = code & mask
    while table[slot] != 0:
        slot = (slot + 1) & mask
    table[slot] = code << 32 | (edge + 1)


@inlined
def _add_edge(a, state, token, target):
    """Add an edge to `state`, which has no edge with this token."""
    states = a.states
    edges = a.edges
    if states[state, TOKEN] == NONE:
        states[state, TOKEN] = token
        states[state, TARGET] = target
        return
    edge = _take(a.pools, EDGE_POOL, edges, NEXT_EDGE)
    edges[edge, SOURCE] = state
    edges[edge, LABEL] = token
    edges[edge, GOAL] = target
    edges[edge, NEXT_EDGE] = states[state, MORE]
    states[state, MORE] = edge
    _insert(a.table, _hash(state, token), edge)


@inlined
def _redirect(a, state, token, target):
    if a.states[state, TOKEN] == token:
        a.states[state, TARGET] = target
    else:
        a.edges[_edge(a, state, token), GOAL] = target


@part
def _drop_edges(a, state):
    """Free the listed edges of `state`, closing gaps in the table (backward shift)."""
    states = a.states
    edges = a.edges
    table = a.table
    mask = table.shape[0] - 1
    edge = np.int64(states[state, MORE])
    while edge != NONE:
        code = _hash(state, edges[edge, LABEL])
        gap = code & mask
        while table[gap] != (code << 32 | (edge + 1)):
            gap = (gap + 1) & mask
        slot = (gap + 1) & mask
        while table[slot] != 0:
            base = (table[slot] >> 32) & mask
            if ((slot - base) & mask) >= ((slot - gap) & mask):
                table[gap] = table[slot]
                gap = slot
            slot = (slot + 1) & mask
        table[gap] = 0
        following = np.int64(edges[edge, NEXT_EDGE])
        _put_back(a.pools, EDGE_POOL, edges, NEXT_EDGE, edge)
        edge = following


@kernel
def rehash(old, new):
    """Fill the empty table `new` with the entries of `old`."""
    for entry in old:
        if entry != 0:
            _insert(new, entry >> 32, (entry & SLOT_MASK) - 1)


# --- growth -------------------------------------------------------------------------------


@inlined
def _new_state(a, tree, length):
    states = a.states
    state = _take(a.pools, STATE_POOL, states, NEXT)
    states[state, LENGTH] = length
    states[state, COUNT] = 0
    a.weights[state, WEIGHT] = 0.0
    states[state, LINK] = states[state, TOKEN] = states[state, MORE] = NONE
    states[state, NEXT] = a.trees[tree, STATES]
    a.trees[tree, STATES] = state
    return state


@part
def _clone(a, tree, p, token, q):
    """Split the contexts of up to LENGTH(p) + 1 tokens off `q`, and return their state.

    All contexts of `q` have occurred at the same positions so far, so the new state has the same
    count, weight and edges.
    """
    states = a.states
    clone = _new_state(a, tree, states[p, LENGTH] + 1)
    states[clone, LINK], states[clone, COUNT] = states[q, LINK], states[q, COUNT]
    a.weights[clone, WEIGHT] = a.weights[q, WEIGHT]
    states[clone, TOKEN], states[clone, TARGET] = states[q, TOKEN], states[q, TARGET]
    edge = np.int64(states[q, MORE])
    while edge != NONE:
        _add_edge(a, clone, a.edges[edge, LABEL], a.edges[edge, GOAL])
        edge = np.int64(a.edges[edge, NEXT_EDGE])
    states[q, LINK] = clone
    while p != NONE and child_of(a, p, token) == q:
        _redirect(a, p, token, clone)
        p = np.int64(states[p, LINK])
    return clone


@inlined
def _extend(a, tree, last, token):
    """Return the state of a sequence after one more token; `last` is the state before it.

    This is the online suffix automaton (Blumer et al. 1985) for several sequences. An existing
    transition is reused, after a split if its target also represents longer contexts.
    """
    states = a.states
    q = child_of(a, last, token)
    if q != NONE:
        if states[q, LENGTH] == states[last, LENGTH] + 1:
            return q
        return _clone(a, tree, last, token, q)
    state = _new_state(a, tree, states[last, LENGTH] + 1)
    p = last
    while p != NONE:
        q = child_of(a, p, token)
        if q != NONE:
            break
        _add_edge(a, p, token, state)
        p = np.int64(states[p, LINK])
    if p == NONE:
        q = a.trees[tree, ROOT]
    elif states[q, LENGTH] != states[p, LENGTH] + 1:
        q = _clone(a, tree, p, token, q)
    states[state, LINK] = q
    return state


@inlined
def trim(states, node, matched, max_length):
    """Return (state, tokens) of the context cut to its last `max_length` tokens."""
    if matched > max_length:
        matched = max_length
        while states[states[node, LINK], LENGTH] >= max_length:
            node = np.int64(states[node, LINK])
    return node, matched


@inlined
def _mark(states, weights, root, node, weight):
    """Add to the count and weight of all contexts that end here, except the empty context."""
    while node != root:
        states[node, COUNT] += 1
        weights[node, WEIGHT] += weight
        node = np.int64(states[node, LINK])


@part
def _grow(a, depth, sequence, tokens, start, stop):
    """Append `tokens[start:stop]` to a sequence."""
    states = a.states
    weights = a.weights
    trees = a.trees
    tree = a.sequences[sequence, TREE]
    root = trees[tree, ROOT]
    weight = a.rates[sequence]
    last = a.sequences[sequence, LAST]
    node = a.sequences[sequence, NODE]
    matched = a.sequences[sequence, MATCHED]
    for i in range(start, stop):
        token = tokens[i]
        last = _extend(a, tree, last, token)
        if states[states[last, LINK], LENGTH] < depth:
            node = last
            matched = min(np.int64(states[last, LENGTH]), depth)
        else:
            # `last` represents only longer contexts. If a split has left `node` on the longer
            # part, `trim` moves up to the right state.
            node = child_of(a, node, token)
            node, matched = trim(states, node, matched + 1, depth)
        _mark(states, weights, root, node, weight)
    a.sequences[sequence, LAST] = last
    a.sequences[sequence, NODE] = node
    a.sequences[sequence, MATCHED] = matched
    states[root, COUNT] += stop - start
    weights[root, WEIGHT] += weight * (stop - start)
    trees[tree, GROWN] += stop - start


@kernel
def plant(a, tree):
    """Create the root of an empty tree."""
    a.trees[tree, STATES] = NONE
    a.trees[tree, GROWN] = 0
    a.trees[tree, ROOT] = _new_state(a, tree, 0)


@kernel
def append(a, depth, sequences_S, tokens_T, offsets_S):
    """Append `tokens_T[offsets_S[s]:offsets_S[s + 1]]` to sequence s."""
    for s in range(len(sequences_S)):
        _grow(a, depth, sequences_S[s], tokens_T, offsets_S[s], offsets_S[s + 1])


@kernel
def uproot(a, tree):
    """Free all states and edges of a tree; a new generation invalidates the old id."""
    state = a.trees[tree, STATES]
    while state != NONE:
        following = np.int64(a.states[state, NEXT])
        _drop_edges(a, state)
        _put_back(a.pools, STATE_POOL, a.states, NEXT, state)
        state = following
    a.trees[tree, TREE_GENERATION] += 1

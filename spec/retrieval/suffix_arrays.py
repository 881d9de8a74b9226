"""Trees of a suffix forest as arrays, which other programs read but do not extend.

The lists of edges, and the table that finds them, are made anew from the arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from spec.retrieval import suffix_kernels as k
from spec.retrieval.suffix_kernels import Arena

MOST = 2**31 - 1  # states and edges, which int32 numbers
_KEPT = [k.LENGTH, k.LINK, k.COUNT, k.TOKEN, k.TARGET]


@dataclasses.dataclass(frozen=True, eq=False)
class TreeArrays:
    """Trees T one after another, of states S and edges E.

    states_SX: int32 length, link, count, token and target (of the first edge); a root's link and
      an absent edge's token are −1. A tree's root is the first of its states.
    weights_S: float32.
    edges_EX: int32 source, label and goal of the other edges, by source.
    roots_T: int64.
    grown_T: int64 tokens of each tree.
    """

    states_SX: np.ndarray
    weights_S: np.ndarray
    edges_EX: np.ndarray
    roots_T: np.ndarray
    grown_T: np.ndarray
    max_context: int


def take(arena: Arena, rows: Sequence[int], max_context: int) -> TreeArrays:
    """Return all trees of an arena, in whose `rows` they were planted and grown one by one."""
    (num_states, _, free_states), (num_edges, _, free_edges) = arena.pools.tolist()
    assert free_states == free_edges == 0, "trees of which none was uprooted"
    trees = arena.trees[list(rows)]
    edges = arena.edges[:num_edges, [k.SOURCE, k.LABEL, k.GOAL]]
    return TreeArrays(
        arena.states[:num_states, _KEPT],
        arena.weights[:num_states, k.WEIGHT].copy(),
        edges[np.argsort(edges[:, 0], kind="stable")],
        trees[:, k.ROOT].copy(),
        trees[:, k.GROWN].copy(),
        max_context,
    )


def join(parts: Sequence[TreeArrays]) -> tuple[Arena, list[np.ndarray]]:
    """Return an arena with the trees of all parts, which may not grow, and the rows of each part.

    Raises ValueError for more states or edges than int32 numbers.
    """
    num_states, num_edges = (sum(len(getattr(x, n)) for x in parts) for n in _SIZES)
    if max(num_states, num_edges) > MOST:
        raise ValueError(f"expected at most {MOST} states and edges in all")
    states = np.full((max(num_states, 1), 8), k.NONE, np.int32)
    edges = np.full((max(num_edges, 1), 4), k.NONE, np.int32)
    trees = np.zeros((max(sum(len(x.roots_T) for x in parts), 1), 4), np.int64)
    weights = states.view(np.float32)
    rows, s, e, t = [], 0, 0, 0
    for x in parts:
        S, E, T = len(x.states_SX), len(x.edges_EX), len(x.roots_T)
        own = states[s : s + S]
        own[:, _KEPT] = x.states_SX
        for column in (k.LINK, k.TARGET):
            own[:, column] += np.where(own[:, column] >= 0, s, 0).astype(np.int32)
        weights[s : s + S, k.WEIGHT] = x.weights_S
        listed = edges[e : e + E]
        listed[:, [k.SOURCE, k.LABEL, k.GOAL]] = x.edges_EX + np.array([s, 0, s], np.int32)
        source = listed[:, k.SOURCE]
        if E:
            starts = np.r_[True, source[1:] != source[:-1]]
            numbers = np.arange(e, e + E, dtype=np.int32)
            states[source[starts], k.MORE] = numbers[starts]
            listed[:-1, k.NEXT_EDGE] = np.where(starts[1:], k.NONE, numbers[1:])
        trees[t : t + T, k.ROOT], trees[t : t + T, k.GROWN] = x.roots_T + s, x.grown_T
        rows.append(np.arange(t, t + T))
        s, e, t = s + S, e + E, t + T
    table = np.zeros(1 << max(4, (len(edges) * 3 // 2).bit_length()), np.int64)
    arena = Arena(
        states=states,
        weights=weights,
        edges=edges,
        table=table,
        sequences=np.zeros((1, 5), np.int64),
        rates=np.zeros(1, np.float32),
        trees=trees,
        pools=np.array([[num_states, k.NONE, 0], [num_edges, k.NONE, 0]], np.int64),
    )
    k.index_edges(arena, num_edges)
    return arena, rows


_SIZES = ("states_SX", "edges_EX")

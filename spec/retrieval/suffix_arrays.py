"""Trees of a suffix forest as arrays that other programs can check, and read but not extend.

What a query relies on so as to stay within its arrays and to end is checked (`check`); what can be
made of the rest is made here: the lists of edges, and the table that finds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from spec.retrieval import suffix_kernels as k
from spec.retrieval.suffix_kernels import Arena

MOST = 2**31 - 1  # states and edges, which int32 numbers
_KEPT = [k.LENGTH, k.LINK, k.COUNT, k.TOKEN, k.TARGET]
LENGTH, LINK, COUNT, TOKEN, TARGET = range(len(_KEPT))


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


def check(x: TreeArrays, vocab_size: int) -> None:
    """Raise ValueError unless every query of these trees stays within them, and ends.

    Links lead to shorter contexts of the same tree, down to its root; edges to longer ones; counts
    fall along both.
    """
    S = len(x.states_SX)
    shapes = (x.states_SX.shape[1:], x.edges_EX.shape[1:], x.weights_S.shape)
    _expect(shapes == ((len(_KEPT),), (3,), (S,)), "states of 5 numbers and a weight, edges of 3")
    _expect(x.roots_T.shape == x.grown_T.shape == (len(x.roots_T),), "a root and tokens a tree")
    _expect(x.max_context >= 1 and max(S, len(x.edges_EX)) <= MOST, "contexts, and states in int32")
    roots = x.roots_T
    ordered = bool((np.diff(roots) > 0).all()) and (roots[0] == 0 if len(roots) else S == 0)
    _expect(ordered and (not len(roots) or roots[-1] < S), "trees one after another, from 0 on")
    _expect(bool(np.isfinite(x.weights_S).all()), "finite weights")
    _expect(bool((x.grown_T >= 0).all()), "0 tokens of a tree or more")
    if not S:
        return _expect(not len(x.edges_EX), "no edges without states")
    length_S, link_S, count_S, token_S, target_S = x.states_SX.T
    tree_S = np.repeat(np.arange(len(roots)), np.diff([*roots, S]))
    is_root_S = np.zeros(S, bool)
    is_root_S[roots] = True
    _expect(bool((count_S >= 0).all()), "counts of 0 or more")
    _expect(bool((length_S[roots] == 0).all() and (link_S[roots] == k.NONE).all()), "empty roots")
    below = np.nonzero(~is_root_S)[0]
    above = link_S[below]
    _expect(bool(((above >= 0) & (above < S)).all()), "links within the states")
    _expect(bool((tree_S[above] == tree_S[below]).all()), "links within their tree")
    _expect(bool((length_S[above] < length_S[below]).all()), "links to shorter contexts")
    _expect(bool((count_S[above] >= count_S[below]).all()), "shorter contexts at least as often")
    first = np.nonzero(token_S != k.NONE)[0]
    source = np.concatenate([first, x.edges_EX[:, 0]])
    label = np.concatenate([token_S[first], x.edges_EX[:, 1]])
    goal = np.concatenate([target_S[first], x.edges_EX[:, 2]])
    _expect(bool(((source >= 0) & (source < S)).all()), "edges from states")
    _expect(bool(((goal >= 0) & (goal < S)).all()), "edges to states")
    _expect(bool(((label >= 0) & (label < vocab_size)).all()), f"tokens below {vocab_size}")
    _expect(bool((np.diff(x.edges_EX[:, 0]) >= 0).all()), "edges by their source")
    _expect(bool((tree_S[source] == tree_S[goal]).all()), "edges within their tree")
    _expect(bool((length_S[source] < length_S[goal]).all()), "edges to longer contexts")
    counted = count_S[source] > 0
    falls = count_S[goal] <= count_S[source]
    _expect(bool((falls | ~counted).all()), "a context at least as often as with one token more")


def join(parts: Sequence[TreeArrays]) -> tuple[Arena, list[np.ndarray]]:
    """Return an arena with the trees of all parts, which may not grow, and the rows of each part.

    Raises ValueError where there are more states or edges than int32 numbers.
    """
    num_states, num_edges = (sum(len(getattr(x, n)) for x in parts) for n in _SIZES)
    _expect(max(num_states, num_edges) <= MOST, f"at most {MOST} states and edges in all")
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


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"expected {what}")

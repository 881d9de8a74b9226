"""A forest of suffix indexes, which find continuations of a context in the texts of a tree.

forest = SuffixForest()
tree = forest.plant()
sequence = forest.add(tree, [5, 6, 7, 8])
forest.append(sequence, [5, 6])                     # sequences of a tree grow in any order
followers = Followers.of([tree])
forest.follow(followers, tokens_BL, rows_F=[0], lengths_F=[2])
forest.propose(followers, ProposalRule(shortest=1), max_nodes_F=[4], out=no_drafts(1, 4))

A tree is a suffix automaton of all its sequences (a match never spans two sequences). It stores the
number of occurrences of every context, and the sum of their weights; an occurrence has the weight
of its sequence. All trees share one arena, so that one call, which runs without the interpreter
lock, serves many contexts in many trees.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from reprise.spec.drafter import Drafts
from reprise.spec.retrieval import suffix_kernels as kernels
from reprise.spec.retrieval import suffix_queries as queries
from reprise.spec.retrieval.suffix_kernels import Arena
from reprise.spec.retrieval.suffix_queries import Followers, ProposalRule

__all__ = ["Followers", "ProposalRule", "SuffixForest"]

_GROWTH = 1.5  # growth factor of full arrays
_MAX = 2**31 - 1  # row numbers and token counts are int32


class SuffixForest:
    """A thread-safe set of growing automata that count contexts of up to `max_context` tokens."""

    def __init__(self, max_context: int = 32) -> None:
        assert max_context >= 1, max_context
        self.max_context = max_context
        # Children of the longest context must be counted too.
        self._depth = max_context + 1
        self._lock = threading.Lock()
        self._members: dict[int, list[int]] = {}  # tree row → its sequences
        self._free = {"trees": list(range(4)), "sequences": list(range(4))}  # rows
        self._num_tokens = 0
        states = np.empty((16, 8), np.int32)
        self._arena = Arena(
            states=states,
            weights=states.view(np.float32),
            edges=np.empty((8, 4), np.int32),
            table=np.zeros(16, np.int64),
            sequences=np.zeros((4, 5), np.int64),
            rates=np.zeros(4, np.float32),
            trees=np.zeros((4, 4), np.int64),
            pools=np.array([[0, kernels.NONE, 0]] * 2, np.int64),
        )

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in all sequences."""
        return self._num_tokens

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without lock and spare rows; `states` includes `weights`."""
        arena = self._arena
        num_states, num_edges = self._arena.pools[:, kernels.TAKEN].tolist()
        used = {"states": arena.states[:num_states], "edges": arena.edges[:num_edges]}
        arena = arena._replace(**used, weights=arena.weights[:0])
        return {**vars(self), "_arena": arena, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arena = Arena(*(x.copy() for x in state["_arena"]))  # Ray's arrays are read-only
        arena = arena._replace(weights=arena.states.view(np.float32))
        vars(self).update(state, _arena=arena, _lock=threading.Lock())

    # --- trees and sequences --------------------------------------------------------------

    def plant(self) -> int:
        """Create an empty tree and return its id."""
        with self._lock:
            self._make_room(tokens=1)
            row = self._free_row("trees")
            kernels.plant(self._arena, row)
            self._members[row] = []
            return _id(row, self._arena.trees[row, kernels.TREE_GENERATION])

    def uproot(self, tree: int) -> None:
        """Remove a tree and its sequences; their ids become invalid."""
        with self._lock:
            row = self._tree_row(tree)
            members = self._members.pop(row)
            self._num_tokens -= int(self._arena.trees[row, kernels.GROWN])
            kernels.uproot(self._arena, row)
            self._arena.sequences[members, kernels.SEQUENCE_GENERATION] += 1
            self._free["sequences"] += members
            self._free["trees"].append(row)

    def add(self, tree: int, tokens: Any = (), weight: float = 1.0) -> int:
        """Add a sequence to a tree, and return its id; context occurrences in it have `weight`."""
        tokens_T = _writable(np.asarray(tokens, np.int32))
        with self._lock:
            tree_row = self._tree_row(tree)
            row = self._free_row("sequences")
            self._grow_rows("rates", len(self._arena.sequences))
            generation = self._arena.sequences[row, kernels.SEQUENCE_GENERATION] + 1
            root = self._arena.trees[tree_row, kernels.ROOT]
            self._arena.sequences[row] = tree_row, root, root, 0, generation
            self._arena.rates[row] = weight
            self._members[tree_row].append(row)
            if len(tokens_T):
                self._append(np.array([row]), tokens_T, np.array([0, len(tokens_T)]))
            return _id(row, generation)

    def append(self, sequence: int, tokens: Any) -> None:
        """Append tokens to a sequence."""
        self.append_batch([sequence], tokens, [0, len(tokens)])

    def append_batch(self, sequences_S: Any, tokens_T: Any, offsets_S: Any) -> None:
        """Append `tokens_T[offsets_S[s]:offsets_S[s + 1]]` to each sequence s, in order."""
        ids_S = _integers(sequences_S)
        offsets_S = _integers(offsets_S)
        fits = len(offsets_S) == len(ids_S) + 1 and offsets_S[-1] <= len(tokens_T)
        assert fits, f"{len(offsets_S)} offsets of {len(ids_S)} sequences, {len(tokens_T)} tokens"
        with self._lock:
            rows_S = ids_S & kernels.SLOT_MASK
            generations_S = self._arena.sequences[rows_S, kernels.SEQUENCE_GENERATION]
            assert (generations_S == ids_S >> 32).all(), f"a sequence that is not there: {ids_S}"
            self._append(rows_S, _writable(np.asarray(tokens_T, np.int32)), offsets_S)

    # --- queries --------------------------------------------------------------------------

    def follow(
        self,
        followers: Followers,
        tokens_BL: np.ndarray,
        rows_F: Any,
        lengths_F: Any,
        which_F: Any = None,
        longest: int | None = None,
    ) -> None:
        """Bring followers up to date with their contexts and trees.

        Follower `which_F[f]` (default: f) reads `tokens_BL[rows_F[f], :lengths_F[f]]`, int32.
        Tokens read before must not have changed, unless the follower was restarted. The match is
        the longest suffix, of at most `longest` tokens (constant for a follower; default:
        `max_context`), that occurs in the tree of the follower. The cost is O(1) per token,
        amortised, plus O(`longest`) if the match has occurred again.
        """
        longest = self.max_context if longest is None else longest
        which_F = _which(followers, which_F)
        trees_F = followers.trees_F
        state_FX = followers.state_FX
        with self._lock:
            bad = queries.follow(
                self._arena,
                longest,
                which_F,
                trees_F,
                state_FX,
                _writable(tokens_BL),
                _integers(rows_F),
                _integers(lengths_F),
            )
        assert bad == kernels.NONE, f"follower {which_F[bad]}: it, its tree or its text is missing"

    def propose(
        self,
        followers: Followers,
        rule: ProposalRule,
        max_nodes_F: Any,
        out: Drafts,
        which_F: Any = None,
    ) -> None:
        """Write draft tokens of follower `which_F[f]`, likeliest first, into row f of `out`."""
        which_F = _which(followers, which_F)
        max_nodes_F = _integers(max_nodes_F)
        assert len(max_nodes_F) == len(which_F) <= len(out.count_A), "a limit and a row each"
        with self._lock:
            bad = queries.propose(
                self._arena,
                tuple(rule),
                min(rule.context_tokens, self.max_context),
                which_F,
                followers.trees_F,
                followers.state_FX,
                max_nodes_F,
                out,
            )
        assert bad == kernels.NONE, f"follower {which_F[bad]}: it or its tree is missing"

    def draft(
        self,
        followers: Followers,
        rule: ProposalRule,
        texts: tuple[np.ndarray, np.ndarray, np.ndarray],
        max_nodes_F: np.ndarray,
        out: Drafts,
        which_F: np.ndarray,
    ) -> None:
        """Call `follow` with `texts` and `rule.longest`, then `propose`.

        `texts` holds `tokens_BL`, `rows_F` and `lengths_F`.
        """
        tokens_BL, rows_F, lengths_F = texts
        with self._lock:
            bad = queries.draft(
                self._arena,
                tuple(rule),
                min(rule.context_tokens, self.max_context),
                which_F,
                followers.trees_F,
                followers.state_FX,
                _writable(tokens_BL),
                np.array(rows_F, np.int64),
                np.array(lengths_F, np.int64),
                np.array(max_nodes_F, np.int64),
                out,
            )
        assert bad == kernels.NONE, f"follower {which_F[bad]}: it, its tree or its text is missing"

    # --- internal methods; the lock is held -----------------------------------------------

    def _tree_row(self, tree: int) -> int:
        row = tree & kernels.SLOT_MASK
        generations = self._arena.trees[:, kernels.TREE_GENERATION]
        assert row in self._members and generations[row] == tree >> 32, f"there is no tree {tree}"
        return row

    def _append(self, rows_S: np.ndarray, tokens_T: np.ndarray, offsets_S: np.ndarray) -> None:
        added = int(offsets_S[-1] - offsets_S[0])
        self._make_room(added)
        kernels.append(self._arena, self._depth, rows_S, tokens_T, offsets_S)
        self._num_tokens += added

    def _make_room(self, tokens: int) -> None:
        """Make room for the worst case of this number of new tokens.

        An automaton of n tokens in q sequences has at most 2n states, and at most n + 2q edges
        besides the first edge of each state. Each edge outside the tree of longest paths belongs to
        a different suffix, and at most 2q states have no edge.
        """
        live_sequences = len(self._arena.sequences) - len(self._free["sequences"])
        taken, _, num_free = self._arena.pools[kernels.STATE_POOL].tolist()
        states = taken - num_free + 2 * tokens
        edges = self._num_tokens + tokens + 2 * live_sequences
        if max(states, edges) > _MAX:
            raise OverflowError(
                f"a suffix forest numbers at most {_MAX:,} states and edges, got {states:,} and "
                f"{edges:,}: use several forests, or index fewer responses"
            )
        self._grow_rows("states", states)
        self._grow_rows("edges", edges)
        slots = len(self._arena.edges) * 3 // 2  # the table is never more than two thirds full
        if len(self._arena.table) < slots:
            table = np.zeros(1 << (slots - 1).bit_length(), np.int64)
            kernels.rehash(self._arena.table, table)
            self._arena = self._arena._replace(table=table)

    def _free_row(self, name: str) -> int:
        """Take a free row of `trees` or `sequences`, growing the array if it is full."""
        free = self._free[name]
        old = len(getattr(self._arena, name))
        if not free:
            self._grow_rows(name, old + 1)
            free += range(old, len(getattr(self._arena, name)))
        return free.pop()

    def _grow_rows(self, name: str, need: int) -> None:
        old = getattr(self._arena, name)
        if need <= len(old):
            return
        new = np.empty((max(need, int(len(old) * _GROWTH)), *old.shape[1:]), old.dtype)
        new[: len(old)] = old
        if name in ("sequences", "trees"):
            new[len(old) :] = 0
        self._arena = self._arena._replace(**{name: new})
        if name == "states":
            self._arena = self._arena._replace(weights=new.view(np.float32))


def _id(row: int, generation: Any) -> int:
    return int(generation) << 32 | int(row)


def _writable(x: np.ndarray) -> np.ndarray:
    """Return a contiguous, writable array; numba would recompile for other arrays."""
    x = np.ascontiguousarray(x)
    return x if x.flags.writeable else x.copy()


def _integers(values: Any) -> np.ndarray:
    return _writable(np.asarray(values, np.int64).reshape(-1))


def _which(followers: Followers, which_F: Any) -> np.ndarray:
    return np.arange(len(followers.trees_F)) if which_F is None else _integers(which_F)

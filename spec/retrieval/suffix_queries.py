"""Queries of a suffix forest, which follow live contexts and propose next tokens.

F = followers, N = draft tokens, B = rows of text, L = tokens of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from reprise.spec.drafter import Drafts
from reprise.spec.retrieval import suffix_kernels as k
from reprise.spec.retrieval.suffix_kernels import child_of, inlined, kernel, part, trim

# Columns of a draft token in the pool.
_STATE, _MATCHED, _TOKEN, _PARENT = range(4)


class ProposalRule(NamedTuple):
    """A rule that chooses draft tokens.

    The context is the match, cut to its last `longest` tokens, or its longest suffix of at least
    `shortest` tokens that has a continuation. The `max_children` best children of a context, ranked
    by weight or count, then count, then smaller token, are candidates. Candidates are selected by
    probability, the product of count(child) / (count(context) + prior) along the path, down to
    `min_prob`; ties go to the earlier candidate. With one child, drafts are chains.

    Below the first draft token the context is the match and the draft tokens above, cut to the last
    `context_tokens`, `longest` plus `path_tokens`. With `path_tokens` of 0, every draft token
    depends on the last `longest` tokens before it. HistoSpec (RhymeRL, section 5.3):
    `ProposalRule(7, 3, 1, True)`.
    """

    longest: int = 32
    shortest: int = 1
    max_children: int = 1
    by_weight: bool = False
    prior: float = 0.0
    min_prob: float = 0.0
    path_tokens: int = 32

    @property
    def context_tokens(self) -> int:
        """Return the longest context of a draft token, which `max_context` should allow."""
        return self.longest + self.path_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Followers:
    """The states of F live contexts, each in a tree (−1 if unused); the caller owns the arrays."""

    trees_F: np.ndarray
    state_FX: np.ndarray

    @classmethod
    def of(cls, trees_F: Sequence[int] | np.ndarray) -> Followers:
        """Return followers that have read no tokens yet."""
        trees_F = np.array(trees_F, np.int64)
        return cls(trees_F, np.full((len(trees_F), k.FOLLOWER_COLUMNS), k.NONE, np.int64))

    def restart(self, which: Any, trees: Any) -> None:
        """Have followers, one or several, follow other contexts or other trees from now on."""
        self.trees_F[which] = trees
        self.state_FX[which] = k.NONE

    @property
    def matched_F(self) -> np.ndarray:
        """Return the match length of each context at the last `follow`; 0 before the first."""
        return np.maximum(self.state_FX[:, k.MATCH], 0)


class _Pool(NamedTuple):
    """A pool of candidates.

    `order_N` lists the queued entries by probability, worst first and earlier entries last among
    equals, then the unused entries.
    """

    order_N: np.ndarray
    prob_N: np.ndarray
    draft_NX: np.ndarray


@inlined
def _row_of(trees, tree):
    """Return the row of a tree id, or NONE if the tree is gone."""
    row = tree & k.SLOT_MASK
    if tree < 0 or row >= len(trees) or trees[row, k.TREE_GENERATION] != tree >> 32:
        return k.NONE
    return row


@inlined
def _settle(states, node, matched):
    """Return the state of the same context after splits, which may have moved it up the links."""
    while matched > 0 and matched <= states[states[node, k.LINK], k.LENGTH]:
        node = np.int64(states[node, k.LINK])
    return node


@inlined
def _step(a, root, node, matched, token, max_length):
    """Return the longest match after one more token, given the last match; O(1) amortised."""
    if token < 0:
        return root, np.int64(0)
    while True:
        target = child_of(a, node, token)
        if target != k.NONE and a.states[target, k.COUNT] > 0:
            return trim(a.states, target, matched + 1, max_length)
        if node == root:
            return root, np.int64(0)
        node = np.int64(a.states[node, k.LINK])
        matched = np.int64(a.states[node, k.LENGTH])


@part
def _outgrown(a, root, node, matched, follower, last_token):
    """Return whether the match has occurred again, so that a longer match may exist."""
    if matched > 0:
        return a.states[node, k.COUNT] != follower[k.SEEN]
    if last_token < 0:
        return False
    return child_of(a, root, last_token) != k.NONE


@kernel
def follow(
    a, max_length, which_F, ids_F, followers_FX, tokens_BL, rows_F, lengths_F, stamp=k.STAMP
):
    """Advance followers to `tokens_BL[rows_F[f], :lengths_F[f]]`; ids of NONE follow nothing.

    Returns NONE, or the first f with a missing tree or an index out of range.
    """
    B, L = tokens_BL.shape
    for f in range(len(which_F)):
        if not (0 <= which_F[f] < len(ids_F) and 0 <= rows_F[f] < B and 0 <= lengths_F[f] <= L):
            return f
        follower = followers_FX[which_F[f]]
        tree = ids_F[which_F[f]]
        if tree == k.NONE:
            continue
        row = _row_of(a.trees, tree)
        if row == k.NONE:
            return f
        root = a.trees[row, k.ROOT]
        text_L = tokens_BL[rows_F[f]]
        length = lengths_F[f]
        node = follower[k.AT]
        matched = follower[k.MATCH]
        start = follower[k.POSITION]
        restart = start < 0 or start > length or length - start >= max_length
        if not restart and follower[k.SEEN_GROWN] != a.trees[row, k.GROWN]:
            node = _settle(a.states, node, matched)
            last_token = text_L[start - 1] if start > 0 else k.NONE
            restart = matched < max_length and _outgrown(
                a, root, node, matched, follower, last_token
            )
        if restart:
            node = root
            matched = np.int64(0)
            start = max(0, length - max_length)
        for i in range(start, length):
            node, matched = _step(a, root, node, matched, text_L[i], max_length)
        follower[k.AT] = node
        follower[k.MATCH] = matched
        follower[k.POSITION] = length
        follower[k.SEEN_GROWN] = a.trees[row, k.GROWN]
        follower[k.SEEN] = a.states[node, k.COUNT]
    return k.NONE


@inlined
def _before(value, count, token, other_value, other_count, other_token):
    """Return whether a sibling ranks first: larger value, larger count, then smaller token."""
    if value != other_value:
        return value > other_value
    if count != other_count:
        return count > other_count
    return token < other_token


@part
def _next_child(a, by_weight, node, after_value, after_count, after_token):
    """Return (state, value, token) of the next best child with a count; state may be NONE."""
    state = np.int64(k.NONE)
    value = 0.0
    count = np.int64(0)
    token = np.int64(0)
    target = np.int64(a.states[node, k.TARGET])
    label = np.int64(a.states[node, k.TOKEN])
    edge = np.int64(a.states[node, k.MORE])
    while label != k.NONE:
        seen = np.int64(a.states[target, k.COUNT])
        if seen > 0:
            worth = np.float64(a.weights[target, k.WEIGHT]) if by_weight else np.float64(seen)
            if _before(after_value, after_count, after_token, worth, seen, label) and (
                state == k.NONE or _before(worth, seen, label, value, count, token)
            ):
                state = target
                value = worth
                count = seen
                token = label
        if edge == k.NONE:
            break
        target = np.int64(a.edges[edge, k.GOAL])
        label = np.int64(a.edges[edge, k.LABEL])
        edge = np.int64(a.edges[edge, k.NEXT_EDGE])
    return state, value, token


@part
def _enqueue(pool, size, room, prob):
    """Queue a draft token among the best `room`; return (its entry or NONE, the new size)."""
    order_N = pool.order_N
    prob_N = pool.prob_N
    if size == room:
        if prob <= prob_N[order_N[0]]:
            return np.int64(k.NONE), size
        entry = order_N[0]
        i = 0
        while i + 1 < size and prob_N[order_N[i + 1]] < prob:
            order_N[i] = order_N[i + 1]
            i += 1
    else:
        entry = order_N[size]
        i = size
        while i > 0 and prob_N[order_N[i - 1]] >= prob:
            order_N[i] = order_N[i - 1]
            i -= 1
        size += 1
    order_N[i] = entry
    prob_N[entry] = prob
    return entry, size


@part
def _expand(a, rule, max_length, node, matched, prob, parent, pool, size, room):
    """Queue the best children of a context; return (number with a count, the new size)."""
    total = a.states[node, k.COUNT] + rule.prior
    value = np.inf
    count = np.int64(0)
    token = np.int64(0)
    num_children = 0
    # If ranked by count, children come in order of descending probability, so the first `room`
    # are enough.
    while num_children < rule.max_children and (rule.by_weight or num_children < room):
        state, value, token = _next_child(a, rule.by_weight, node, value, count, token)
        if state == k.NONE:
            break
        num_children += 1
        count = np.int64(a.states[state, k.COUNT])
        of_child = prob * (count / total)
        if of_child < rule.min_prob:
            continue
        entry, size = _enqueue(pool, size, room, of_child)
        if entry != k.NONE:
            draft = pool.draft_NX[entry]
            draft[_STATE], draft[_MATCHED] = trim(a.states, state, matched + 1, max_length)
            draft[_TOKEN] = token
            draft[_PARENT] = parent
    return num_children, size


@part
def _draft(a, rule, max_length, root, node, matched, pool, room, out, f):
    """Write row f of `out`, best first, from a context or its longest suffix with children."""
    tokens_N = out.tokens_AN[f]
    parents_N = out.parents_AN[f]
    prob_N = out.prob_AN[f]
    node, matched = trim(a.states, node, matched, rule.longest)
    size = np.int64(0)
    no_parent = np.int64(k.NONE)
    while room > 0 and matched >= rule.shortest:
        num_children, size = _expand(
            a, rule, max_length, node, matched, 1.0, no_parent, pool, size, room
        )
        if num_children > 0 or node == root:
            break
        node = np.int64(a.states[node, k.LINK])
        matched = np.int64(a.states[node, k.LENGTH])
    drafted = np.int64(0)
    while size > 0:
        size -= 1
        entry = pool.order_N[size]
        draft = pool.draft_NX[entry]
        prob = pool.prob_N[entry]
        node = draft[_STATE]
        matched = draft[_MATCHED]
        tokens_N[drafted] = draft[_TOKEN]
        parents_N[drafted] = draft[_PARENT]
        prob_N[drafted] = prob
        drafted += 1
        if drafted < room:
            parent = drafted - 1
            left = room - drafted
            _, size = _expand(a, rule, max_length, node, matched, prob, parent, pool, size, left)
    out.count_A[f] = drafted


@kernel
def propose(a, rule, max_length, which_F, ids_F, followers_FX, max_nodes_F, out, stamp=k.STAMP):
    """Write the draft tokens of each follower; followers that have read nothing get no drafts.

    Returns NONE, or the first f with a missing tree or an index out of range. `rule` and `out` are
    plain tuples, which are faster to pass.
    """
    rule = ProposalRule(*rule)
    drafts = Drafts(*out)
    N = drafts.tokens_AN.shape[1]
    pool = _Pool(np.arange(N), np.empty(N), np.empty((N, 4), np.int64))
    for f in range(len(which_F)):
        if not 0 <= which_F[f] < len(ids_F):
            return f
        drafts.count_A[f] = 0
        follower = followers_FX[which_F[f]]
        tree = ids_F[which_F[f]]
        if tree == k.NONE:
            continue
        row = _row_of(a.trees, tree)
        if row == k.NONE:
            return f
        if follower[k.POSITION] < 0:
            continue
        matched = follower[k.MATCH]
        room = min(np.int64(max_nodes_F[f]), N)
        node = _settle(a.states, follower[k.AT], matched)
        _draft(a, rule, max_length, a.trees[row, k.ROOT], node, matched, pool, room, drafts, f)
    return k.NONE


@kernel
def draft(
    a,
    rule,
    max_length,
    which_F,
    ids_F,
    followers_FX,
    tokens_BL,
    rows_F,
    lengths_F,
    max_nodes_F,
    out,
    stamp=k.STAMP,
):
    """Run `follow` with the `longest` of `rule`, then `propose`, in one kernel call."""
    longest = ProposalRule(*rule).longest
    bad = follow(a, longest, which_F, ids_F, followers_FX, tokens_BL, rows_F, lengths_F)
    if bad != k.NONE:
        return bad
    return propose(a, rule, max_length, which_F, ids_F, followers_FX, max_nodes_F, out)

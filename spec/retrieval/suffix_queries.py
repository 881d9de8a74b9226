"""Kernels that read a suffix forest: look contexts up, follow live ones, propose what comes next.

F = followers, N = draft tokens, B = rows of text, L = tokens of a row.
"""

from __future__ import annotations

import numpy as np

from spec.retrieval import suffix_kernels as k
from spec.retrieval.suffix_kernels import child_of, inlined, kernel, part, trim

# Columns of a draft token in the pool.
_STATE, _MATCHED, _TOKEN, _PARENT = range(4)


@inlined
def _row_of(trees, tree):
    """The row of a tree's id, or NONE where that tree is gone."""
    row = tree & k.SLOT_MASK
    if tree < 0 or row >= len(trees) or trees[row, k.TREE_GENERATION] != tree >> 32:
        return k.NONE
    return row


@inlined
def _settle(states, node, matched):
    """The state of the same context after states were split: it may be a shorter one now."""
    while matched > 0 and matched <= states[states[node, k.LINK], k.LENGTH]:
        node = np.int64(states[node, k.LINK])
    return node


@inlined
def _step(states, edges, table, root, node, matched, token, most):
    """The longest live match after one more token, from that before; O(1) amortised."""
    if token < 0:
        return root, np.int64(0)
    while True:
        target = child_of(states, edges, table, node, token)
        if target != k.NONE and states[target, k.COUNT] > 0:
            return trim(states, target, matched + 1, most)
        if node == root:
            return root, np.int64(0)
        node = np.int64(states[node, k.LINK])
        matched = np.int64(states[node, k.LENGTH])


@kernel
def locate(a, row, tokens_T, stamp=k.STAMP):
    """(state, tokens) of the longest live suffix of `tokens_T`."""
    root = a.trees[row, k.ROOT]
    node, matched = root, np.int64(0)
    for token in tokens_T:
        node, matched = _step(a.states, a.edges, a.table, root, node, matched, token, len(tokens_T))
    return node, matched


@part
def _outgrown(a, root, node, matched, follower, last_token):
    """Whether a tree's growth can have given this context a longer match: only where its present
    match has occurred once more.
    """
    if matched > 0:
        return a.states[node, k.COUNT] != follower[k.SEEN]
    if last_token < 0:
        return False
    return child_of(a.states, a.edges, a.table, root, last_token) != k.NONE


@kernel
def follow(a, most, which_F, ids_F, followers_FX, tokens_BL, rows_F, lengths_F, stamp=k.STAMP):
    """Bring followers up to `tokens_BL[rows_F[f], :lengths_F[f]]`; NONE, or the first f whose
    tree is gone or whose index is out of range. An id of NONE follows nothing.
    """
    B, L = tokens_BL.shape
    for f in range(len(which_F)):
        if not (0 <= which_F[f] < len(ids_F) and 0 <= rows_F[f] < B and 0 <= lengths_F[f] <= L):
            return f
        follower, tree = followers_FX[which_F[f]], ids_F[which_F[f]]
        if tree == k.NONE:
            continue
        row = _row_of(a.trees, tree)
        if row == k.NONE:
            return f
        root, text_L, length = a.trees[row, k.ROOT], tokens_BL[rows_F[f]], lengths_F[f]
        node, matched, start = follower[k.AT], follower[k.MATCH], follower[k.POSITION]
        afresh = start < 0 or start > length or length - start >= most
        afresh = afresh or follower[k.SEEN_SHRUNK] != a.trees[row, k.SHRUNK]
        if not afresh and follower[k.SEEN_GROWN] != a.trees[row, k.GROWN]:
            node = _settle(a.states, node, matched)
            last_token = text_L[start - 1] if start > 0 else k.NONE
            afresh = matched < most and _outgrown(a, root, node, matched, follower, last_token)
        if afresh:
            node, matched, start = root, np.int64(0), max(0, length - most)
        for i in range(start, length):
            node, matched = _step(a.states, a.edges, a.table, root, node, matched, text_L[i], most)
        follower[k.AT], follower[k.MATCH], follower[k.POSITION] = node, matched, length
        follower[k.SEEN_GROWN] = a.trees[row, k.GROWN]
        follower[k.SEEN_SHRUNK] = a.trees[row, k.SHRUNK]
        follower[k.SEEN] = a.states[node, k.COUNT]
    return k.NONE


@inlined
def _before(value, count, token, other_value, other_count, other_token):
    """The order of siblings: larger value, then larger count, then smaller token."""
    if value != other_value:
        return value > other_value
    if count != other_count:
        return count > other_count
    return token < other_token


@part
def _next_child(a, by_weight, node, after_value, after_count, after_token):
    """(state, value, token) of the best live child that comes after the given one; or NONE."""
    state, value, count, token = np.int64(k.NONE), 0.0, np.int64(0), np.int64(0)
    target, label = np.int64(a.states[node, k.TARGET]), np.int64(a.states[node, k.TOKEN])
    edge = np.int64(a.states[node, k.MORE])
    while label != k.NONE:
        seen = np.int64(a.states[target, k.COUNT])
        if seen > 0:
            worth = np.float64(a.weights[target, k.WEIGHT]) if by_weight else np.float64(seen)
            if _before(after_value, after_count, after_token, worth, seen, label) and (
                state == k.NONE or _before(worth, seen, label, value, count, token)
            ):
                state, value, count, token = target, worth, seen, label
        if edge == k.NONE:
            break
        target, label = np.int64(a.edges[edge, k.GOAL]), np.int64(a.edges[edge, k.LABEL])
        edge = np.int64(a.edges[edge, k.NEXT_EDGE])
    return state, value, token


@part
def _enqueue(order_N, prob_N, size, room, prob):
    """Queue a draft token of this probability: (its place in the pool or NONE, the new size).

    `order_N` lists the pool's places: the queued ones by probability, worst first and the
    earlier ones last among equals, then the unused ones. No more than `room` are kept.
    """
    if size == room:
        if prob <= prob_N[order_N[0]]:
            return np.int64(k.NONE), size
        place, i = order_N[0], 0
        while i + 1 < size and prob_N[order_N[i + 1]] < prob:
            order_N[i] = order_N[i + 1]
            i += 1
    else:
        place, i = order_N[size], size
        while i > 0 and prob_N[order_N[i - 1]] >= prob:
            order_N[i] = order_N[i - 1]
            i -= 1
        size += 1
    order_N[i], prob_N[place] = place, prob
    return place, size


@part
def _expand(a, most, rule, node, matched, prob, parent, pool, size, room):
    """Queue the best children of a context: (how many live ones were seen, the new size)."""
    _, _, max_children, by_weight, prior, min_prob = rule
    order_N, prob_N, draft_NX = pool
    total = a.states[node, k.COUNT] + prior
    value, count, token, found = np.inf, np.int64(0), np.int64(0), 0
    # By count, probabilities fall in the order of the children, so that the first `room` are
    # enough.
    while found < max_children and (by_weight or found < room):
        state, value, token = _next_child(a, by_weight, node, value, count, token)
        if state == k.NONE:
            break
        found += 1
        count = np.int64(a.states[state, k.COUNT])
        of_child = prob * (count / total)
        if of_child < min_prob:
            continue
        place, size = _enqueue(order_N, prob_N, size, room, of_child)
        if place != k.NONE:
            draft = draft_NX[place]
            draft[_STATE], draft[_MATCHED] = trim(a.states, state, matched + 1, most)
            draft[_TOKEN], draft[_PARENT] = token, parent
    return found, size


@part
def _draft(a, most, rule, root, node, matched, pool, room, tokens_N, parents_N, prob_out_N):
    """Best-first draft tokens from a context, or from its longest live shorter one; their
    number.
    """
    longest, shortest = rule[0], rule[1]
    order_N, prob_N, draft_NX = pool
    node, matched = trim(a.states, node, matched, longest)
    size, no_parent = np.int64(0), np.int64(k.NONE)
    while room > 0 and matched >= shortest:
        found, size = _expand(a, most, rule, node, matched, 1.0, no_parent, pool, size, room)
        if found > 0 or node == root:
            break
        node = np.int64(a.states[node, k.LINK])
        matched = np.int64(a.states[node, k.LENGTH])
    drafted = np.int64(0)
    while size > 0:
        size -= 1
        place = order_N[size]
        draft, prob = draft_NX[place], prob_N[place]
        node, matched = draft[_STATE], draft[_MATCHED]
        tokens_N[drafted], parents_N[drafted] = draft[_TOKEN], draft[_PARENT]
        prob_out_N[drafted] = prob
        drafted += 1
        if drafted < room:
            _, size = _expand(
                a, most, rule, node, matched, prob, drafted - 1, pool, size, room - drafted
            )
    return drafted


@kernel
def propose(
    a, most, rule, which_F, ids_F, followers_FX, max_nodes_F, tokens_FN, parents_FN, prob_FN,
    count_F, stamp=k.STAMP,
):  # fmt: skip
    """Write each follower's draft tokens; NONE, or the first f whose tree is gone, or that is none.

    `rule` is (longest, shortest, max_children, by_weight, prior, min_prob). A
    follower whose tree has shrunk since it last followed gets no draft token.
    """
    N = tokens_FN.shape[1]
    pool = np.arange(N), np.empty(N), np.empty((N, 4), np.int64)
    for f in range(len(which_F)):
        if not 0 <= which_F[f] < len(ids_F):
            return f
        count_F[f] = 0
        follower, tree = followers_FX[which_F[f]], ids_F[which_F[f]]
        if tree == k.NONE:
            continue
        row = _row_of(a.trees, tree)
        if row == k.NONE:
            return f
        if follower[k.POSITION] < 0 or follower[k.SEEN_SHRUNK] != a.trees[row, k.SHRUNK]:
            continue
        matched, room = follower[k.MATCH], min(np.int64(max_nodes_F[f]), N)
        node = _settle(a.states, follower[k.AT], matched)
        count_F[f] = _draft(
            a, most, rule, a.trees[row, k.ROOT], node, matched, pool, room,
            tokens_FN[f], parents_FN[f], prob_FN[f],
        )  # fmt: skip
    return k.NONE

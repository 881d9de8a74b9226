"""Draft tokens accepted a round, by source and by position in the draft.

Drafts change no token, hence responses are drawn once and replayed: all responses to a question
grow side by side, each drafted from its siblings, its own text, or the last epoch. Each round
accepts a path of a tree of at most `BUDGET_NODES` draft tokens, and one more token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.real_policy.ground import Ground
from reprise.rl.records.trajectory import Trajectory
from reprise.spec.budget.union import DrafterUnion
from reprise.spec.drafter import Drafter, LiveSlots
from reprise.spec.retrieval.group import GroupDrafter
from reprise.spec.retrieval.history import RULE, HistoryDrafter, LastResponseDrafter, build_index
from reprise.spec.retrieval.suffix_drafter import NgramDrafter
from reprise.spec.reuse.rollout_cache import RolloutCache, of_group

BUDGET_NODES, DEPTHS = 16, 8
RATE = 1e-5  # of the update between the epochs
RESAMPLES = 2000

Makers = Mapping[str, Callable[[], Drafter]]


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Texts that share a prompt of `prompt_tokens`; each has the prompt, then its response."""

    texts: list[np.ndarray]
    prompt_tokens: int


def measure(ground: Ground, temperature: float) -> dict[str, Any]:
    """Return a row for each source, with last epoch's responses by the same policy."""
    now, past = ground.responses(temperature=temperature), ground.past(temperature)
    sources = ("own", "group", "first_epoch", "history", "all")
    rows = measure_sources(ground, now, past, sources)
    return {"temperature": temperature, "nodes": BUDGET_NODES, "rows": rows}


def measure_after_update(ground: Ground) -> dict[str, Any]:
    """Return rows for the updated policy; `same_noise`: last epoch's have the same noise."""
    now = ground.responses(rate=RATE)
    same = measure_sources(ground, now, ground.responses(), ("last", "history", "all_with_last"))
    other = measure_sources(ground, now, ground.past(), ("history", "all"))
    return {"update_rate": RATE, "rows": other, "same_noise": same}


def makers(group: Group, past: Sequence[np.ndarray]) -> Makers:
    """Return factories of drafters for a group; last epoch's responses weigh the same."""
    store, prompt = RolloutCache(), group.texts[0][: group.prompt_tokens]
    store.replace("p", of_group(past, [1.0] * len(past)))
    index = build_index(store, {"p": prompt}, RULE)
    parts: dict[str, Callable[[], Drafter]] = {
        "own": NgramDrafter,
        "group": lambda: GroupDrafter(update_tokens=1),
        "history": lambda: HistoryDrafter(index, {0: "p"}),
        "last": lambda: LastResponseDrafter(dict(enumerate(past))),
    }

    def union(*names: str) -> Callable[[], Drafter]:
        return lambda: DrafterUnion([parts[name]() for name in names])

    return parts | {
        "first_epoch": union("group", "own"),
        "all": union("history", "group", "own"),
        "all_with_last": union("last", "history", "group", "own"),
    }


def measure_sources(
    ground: Ground, now: Sequence[Trajectory], past: Sequence[Trajectory], names: Sequence[str]
) -> dict[str, Any]:
    """Return a row for each source: over all questions, and for each set."""
    groups = [as_group(done) for done in ground.by_question(now)]
    before = [[t.response_ids for t in done] for done in ground.by_question(past)]
    drafters = [makers(group, old) for group, old in zip(groups, before, strict=True)]
    sets = [q.of.name for q in ground.questions]
    rows = {}
    for name in names:
        accepted = [
            accepted_tokens(group, made[name]) for group, made in zip(groups, drafters, strict=True)
        ]
        rows[name] = {"all": summary(accepted)}
        for of in dict.fromkeys(sets):
            rows[name][of] = summary([a for a, s in zip(accepted, sets, strict=True) if s == of])
    return rows


def accepted_tokens(group: Group, make: Callable[[], Drafter]) -> np.ndarray:
    """Return the accepted draft tokens of every round of every response to one question."""
    drafter, accepted, A = make(), list[int](), len(group.texts)
    ends_A = np.array([len(t) for t in group.texts], np.int32)
    tokens_BL = np.zeros((A, ends_A.max()), np.int32)
    for a, text in enumerate(group.texts):
        tokens_BL[a, : len(text)] = text
    totals_A = np.full(A, group.prompt_tokens + 1, np.int32)

    def live(rows_A: np.ndarray) -> LiveSlots:
        zeros_A = np.zeros(len(rows_A), np.int64)
        ids = rows_A.astype(np.int32), rows_A.astype(np.int64), zeros_A
        prompts_A, left_A = zeros_A.astype(np.int32) + group.prompt_tokens, ends_A - totals_A
        return LiveSlots(*ids, prompts_A, totals_A[rows_A], left_A[rows_A], tokens_BL)

    while (alive_A := np.flatnonzero(totals_A < ends_A)).size:
        slots = live(alive_A)
        room_A = np.minimum(slots.remaining_tokens_A, BUDGET_NODES).astype(np.int32)
        drafts = drafter.propose(slots, room_A, BUDGET_NODES)
        drafter.committed(slots)
        for i, a in enumerate(alive_A.tolist()):
            n = int(drafts.count_A[i])
            tokens, parents = drafts.tokens_AN[i, :n].tolist(), drafts.parents_AN[i, :n].tolist()
            accepted.append(accepted_by_walk(tokens, parents, group.texts[a][totals_A[a] :]))
            totals_A[a] = min(totals_A[a] + accepted[-1] + 1, ends_A[a])
        if (ended_A := alive_A[totals_A[alive_A] >= ends_A[alive_A]]).size:
            drafter.finished(live(ended_A))
    return np.asarray(accepted, np.int64)


def accepted_by_walk(tokens: Sequence[int], parents: Sequence[int], coming: np.ndarray) -> int:
    """Return how many draft tokens of a tree (parents −1 at its root) equal the coming ones."""
    at, right = -1, 0
    for token in coming.tolist():
        children = (i for i, t in enumerate(tokens) if parents[i] == at and t == token and i > at)
        if (found := next(children, None)) is None:
            break
        at, right = found, right + 1
    return right


def as_group(done: Sequence[Trajectory]) -> Group:
    texts = [np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int32) for t in done]
    return Group(texts, len(done[0].prompt_ids))


def summary(accepted_by_question: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the mean a round; entry d − 1 of `by_depth` is the share of rounds with at least d."""
    joined = np.concatenate(accepted_by_question)
    sums, counts = [a.sum() for a in accepted_by_question], [len(a) for a in accepted_by_question]
    by_depth = [round(float((joined >= d).mean()), 4) for d in range(1, DEPTHS + 1)]
    return ratio(sums, counts) | {"by_depth": by_depth}


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Return Σ above / Σ below and its 95% interval, from resampling the questions."""
    above_Q, below_Q = np.asarray(above, np.float64), np.asarray(below, np.float64)
    if not below_Q.sum():
        return {"value": None, "interval": None, "of": 0}
    picks_RQ = np.random.default_rng(0).integers(len(above_Q), size=(RESAMPLES, len(above_Q)))
    ratios_R = above_Q[picks_RQ].sum(1) / np.maximum(below_Q[picks_RQ].sum(1), 1e-12)
    return {
        "value": round(float(above_Q.sum() / below_Q.sum()), 5),
        "interval": np.percentile(ratios_R, (2.5, 97.5)).round(5).tolist(),
        "of": int(below_Q.sum()),
    }

"""Draft tokens accepted a round, by source and by position in the draft.

Drafts change no token, so that responses which were drawn once are replayed: all responses to a
question grow side by side, each drafted from its siblings, its own text, or the last epoch, and
each round takes what was right of a tree of at most `BUDGET_NODES` draft tokens, and one more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.draft_texts import Group
from benchmarks.drafts import BUDGET_NODES, replay
from benchmarks.real_policy import statistic
from benchmarks.real_policy.ground import Ground
from benchmarks.real_policy.questions import set_names
from rl.trajectory import Trajectory
from spec.budget.union import DrafterUnion
from spec.drafter import Drafter
from spec.retrieval.group import GroupDrafter
from spec.retrieval.history import RULE, HistoryDrafter, build_index
from spec.retrieval.last_response import LastResponseDrafter
from spec.retrieval.ngram import NgramDrafter
from spec.reuse.rollout_cache import RolloutCache, of_group

DEPTHS = 8
RATE = 1e-5  # of the update that lies between the epochs

Makers = Mapping[str, Callable[[], Drafter]]


def measure(ground: Ground, temperature: float) -> dict[str, Any]:
    """Return rows of sources for the policy's responses; its own are those of the last epoch."""
    now, past = ground.responses(temperature=temperature), ground.past(temperature)
    sources = ("own", "group", "first_epoch", "history", "all")
    rows = of_sources(ground, now, past, sources)
    return {"temperature": temperature, "nodes": BUDGET_NODES, "rows": rows}


def measure_after_update(ground: Ground) -> dict[str, Any]:
    """Return rows for responses of the policy after an update; the last epoch is from before it.

    With `same_noise` the last epoch's responses were drawn with the noise of this one.
    """
    now = ground.responses(rate=RATE)
    same = of_sources(ground, now, ground.responses(), ("last", "history", "all_with_last"))
    other = of_sources(ground, now, ground.past(), ("history", "all"))
    return {"update_rate": RATE, "rows": other, "same_noise": same}


def makers(group: Group, past: Sequence[np.ndarray]) -> Makers:
    """Return makers of drafters for a replay of a group, whose last epoch's responses are `past`.

    The past responses weigh the same, whatever their reward was.
    """
    store, prompt = RolloutCache(), group.texts[0][: group.prompt_tokens]
    store.replace("p", of_group(past, [1.0] * len(past)))
    index = build_index(store, {"p": prompt}, RULE)

    def history() -> Drafter:
        return HistoryDrafter(index, {0: "p"})

    def siblings() -> Drafter:
        return GroupDrafter(update_tokens=1)

    def last() -> Drafter:
        return LastResponseDrafter(dict(enumerate(past)))

    def union(*parts: Callable[[], Drafter]) -> Callable[[], Drafter]:
        return lambda: DrafterUnion([make() for make in parts])

    return {
        "own": NgramDrafter,
        "group": siblings,
        "first_epoch": union(siblings, NgramDrafter),
        "history": history,
        "last": last,
        "all": union(history, siblings, NgramDrafter),
        "all_with_last": union(last, history, siblings, NgramDrafter),
    }


def of_sources(
    ground: Ground, now: Sequence[Trajectory], past: Sequence[Trajectory], names: Sequence[str]
) -> dict[str, Any]:
    """Return a row for each source: over all questions, and for each set."""
    groups = [_group(done) for done in ground.by_question(now)]
    before = [[t.response_ids for t in done] for done in ground.by_question(past)]
    made = [makers(group, old) for group, old in zip(groups, before, strict=True)]
    sets = [q.of.name for q in ground.questions]
    rows = {}
    for name in names:
        replay(groups[0], made[0][name])  # compile
        found = [_accepted(group, m[name]) for group, m in zip(groups, made, strict=True)]
        row = {"all": summary(found)}
        for of in set_names(ground.questions):
            row[of] = summary([f for f, s in zip(found, sets, strict=True) if s == of])
        rows[name] = row
    return rows


def _accepted(group: Group, make: Callable[[], Drafter]) -> np.ndarray:
    """Return the accepted draft tokens of every round of every response to one question."""
    accepted: list[int] = []
    replay(group, make, on_lookup=accepted.append)
    return np.asarray(accepted, np.int64)


def summary(accepted_by_question: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the mean a round, and the share of rounds that accepted so many tokens or more.

    Entry d − 1 of `by_depth` is the share of rounds whose draft was right down to depth d.
    """
    joined = np.concatenate(accepted_by_question)
    depths = range(1, DEPTHS + 1)
    mean = statistic.ratio(
        [a.sum() for a in accepted_by_question], [len(a) for a in accepted_by_question]
    )
    return mean | {"by_depth": [round(float((joined >= d).mean()), 4) for d in depths]}


def _group(done: Sequence[Trajectory]) -> Group:
    texts = [np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int32) for t in done]
    return Group(texts, len(done[0].prompt_ids))


def named(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that people read: means over all questions."""
    cases = {f"temperature {found.get('temperature', 1):g}": found["rows"]}
    if "same_noise" in found:
        cases = {"after an update": found["rows"], "and same noise": found["same_noise"]}
    return {
        f"accepted a round, {case}: {source}": row["all"]["value"]
        for case, sources in cases.items()
        for source, row in sources.items()
    }

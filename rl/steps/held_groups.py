"""Groups with a response that continues in the next step (HistoPipe).

Rewards are compared within whole groups, so the finished responses of such a group are held until
the group is whole. It then belongs to the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from reprise.rl.exchange.responses import Responses, Scored, in_order
from reprise.rl.records.trajectory import FinishReason, Trajectory
from reprise.rl.rewards.scores import Score
from reprise.spec.config import SamplingConfig

Held = Mapping[int, list[Scored]]  # finished responses of groups that are not whole, by group


def whole_groups(
    responses: Responses, held: Held, new_groups: Iterable[int], size: int
) -> tuple[Responses, dict[int, list[Scored]]]:
    """Return the responses of whole groups, which have `size`, and the other groups, to be held.

    `responses` are responses of `new_groups`, and of groups `held` so far.
    """
    groups = {group: list(rows) for group, rows in held.items()}
    groups |= {group: [] for group in new_groups}
    for row in responses.rows:
        groups[row[0].group_id].append(row)
    whole = [row for rows in groups.values() if len(rows) == size for row in rows]
    now_held = {group: rows for group, rows in groups.items() if len(rows) < size}
    return in_order(whole, responses.stats), now_held


_ARRAYS = (
    *("prompt_ids", "response_ids", "logprobs", "emission_logprobs", "policy_versions"),
    "origins",
)
_NUMBERS = "request_id", "group_id", "sample_index"


def held_state(held: Held) -> dict[str, Any]:
    """Return the finished responses of held groups, for `load_held`."""
    rows = [
        {name: getattr(t, name) for name in _ARRAYS}
        | {name: int(getattr(t, name)) for name in _NUMBERS}
        | {"finish_reason": str(t.finish_reason), "text": text}
        | {"values": dict(score.values), "total": score.total, "failure": score.failure}
        for scored in held.values()
        for t, score, text in scored
    ]
    return {"groups": list(held), "rows": rows}


def load_held(
    state: Mapping[str, Any], sampling: Callable[[int], SamplingConfig | None]
) -> dict[int, list[Scored]]:
    """Return the groups of `held_state`; `sampling` returns the sampling of a group, or None."""
    held: dict[int, list[Scored]] = {group: [] for group in state["groups"]}
    for row in state["rows"]:
        score = Score(row["values"], row["total"], row["failure"])
        t = Trajectory(
            **{name: row[name] for name in (*_ARRAYS, *_NUMBERS)},
            finish_reason=FinishReason(row["finish_reason"]),
            reward=score.total,
            sampling=sampling(row["group_id"]),
        )
        held[t.group_id].append((t, score, row["text"]))
    return held

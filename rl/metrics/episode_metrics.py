"""Metrics of the episodes of one step."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from reprise.rl.records.episode import Episode
from reprise.sched.episodes import End


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return means over the episodes, shares by end, and failures by kind.

    `perf/environment_s` is the sum of seconds that environments have worked, side by side.
    """
    count = len(episodes)
    turns = sum(episode.num_turns for episode in episodes)
    drawn_tokens = sum(len(episode.drawn) for episode in episodes)
    sums = {
        "episodes/turns": turns,
        "episodes/drawn_tokens": drawn_tokens,
        "episodes/inserted_tokens": sum(episode.num_inserted for episode in episodes),
        "episodes/calls": sum(episode.num_calls for episode in episodes),
        "episodes/failed_calls": sum(episode.num_failed_calls for episode in episodes),
    }
    metrics = {name: total / count for name, total in sums.items()}
    metrics["episodes/tokens_per_turn"] = drawn_tokens / max(turns, 1)
    ends = collections.Counter(episode.end for episode in episodes)
    metrics |= {f"episodes/ends/{end.value}": ends[end.value] / count for end in End}
    kinds = collections.Counter(e.failure for e in episodes if e.failure is not None)
    metrics |= {f"episodes/failures/{kind}": float(n) for kind, n in sorted(kinds.items())}
    metrics["perf/environment_s"] = math.fsum(episode.seconds for episode in episodes)
    return metrics

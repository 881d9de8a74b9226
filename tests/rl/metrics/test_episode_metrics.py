"""Metrics of episodes, against numbers worked out by hand."""

import numpy as np
import pytest

from reprise.rl.metrics.episode_metrics import episode_metrics
from reprise.rl.metrics.writer import deterministic_view
from reprise.rl.records.episode import INSERTED, Episode


def episode(end, num_turns, num_drawn, num_inserted, calls, failed_calls, **fields):
    turns = [*[num_turns - 1] * num_drawn, *[INSERTED] * num_inserted]
    return Episode(
        tokens=np.zeros(len(turns), np.int32),
        turns=np.array(turns, np.int16),
        end=end,
        num_calls=calls,
        num_failed_calls=failed_calls,
        turn_rewards=[None] * num_turns,
        **fields,
    )


def test_means_shares_and_failures():
    metrics = episode_metrics(
        [
            episode("done", 2, 10, 6, 3, 1, seconds=0.5),
            episode("max_turns", 4, 20, 2, 1, 0, seconds=0.25),
            episode("failed", 0, 0, 0, 0, 0, seconds=1.0, failure="raised"),
            episode("failed", 2, 10, 4, 0, 0, failure="raised"),
        ]
    )
    assert metrics == {
        "episodes/turns": 2.0,
        "episodes/drawn_tokens": 10.0,
        "episodes/inserted_tokens": 3.0,
        "episodes/calls": 1.0,
        "episodes/failed_calls": 0.25,
        "episodes/tokens_per_turn": 5.0,
        "episodes/ends/done": 0.25,
        "episodes/ends/length": 0.0,
        "episodes/ends/max_turns": 0.25,
        "episodes/ends/environment_tokens": 0.0,
        "episodes/ends/failed": 0.5,
        "episodes/failures/raised": 2.0,
        "perf/environment_s": pytest.approx(1.75),
    }
    assert metrics.keys() - deterministic_view(metrics).keys() == {"perf/environment_s"}

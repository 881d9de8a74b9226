"""A run whose first rollout waits for a compiler: the wait is no loss by drafts."""

import jax
import pytest

from reprise.models.folder import Folder
from reprise.rl.engine.engine import Engine
from reprise.rl.metrics.run_summary import summary_lines
from reprise.rl.metrics.writer import read_metrics, step_rows
from reprise.rl.records.stats import load_timeline
from reprise.rl.warm_up.step_seconds import SecondsRecord
from tests.support import tiny_run

DRAFTS = 'Speculation.budget="fixed:1"', 'Speculation.sources=("own",)', "Run.steps=1"


def test_programs_that_are_compiled_in_a_rollout_cost_drafts_nothing(tmp_path, monkeypatch):
    """The programs of rounds are lost after the second fetch: the third compiles its own again."""
    config, folder = tiny_run.make_inputs(tmp_path), tmp_path / "run"
    show, step, lost = tiny_run.Recorder(), Engine.step, []

    def cold(self):
        if show.fetches == 2 and not lost:
            lost.append(len(self.stats.timeline))
            jax.clear_caches()
        return step(self)

    monkeypatch.setattr(Engine, "step", cold)
    monkeypatch.setattr("reprise.rl.records.stats.PAUSE", float("inf"))
    tiny_run.train(config, folder, *DRAFTS, show=show)
    _, timeline = load_timeline(folder)
    waited = [r for r in timeline if r.num_compiled]
    assert lost == [2] and timeline[2].num_compiled and len(waited) < len(timeline)
    waited_s = sum(r.ended_s - r.began_s for r in waited)
    others_s = sum(r.ended_s - r.began_s for r in timeline) - waited_s
    [row] = step_rows(read_metrics(folder))
    assert row["spec/disturbed_seconds"] == pytest.approx(waited_s)
    assert abs(row["spec/seconds_saved"]) <= others_s + sum(r.num_rounds for r in timeline)
    [recorded] = SecondsRecord(Folder(folder)).upto(1)
    assert recorded.rollout_s == pytest.approx(others_s)
    # the last line has a share of the seconds that no compiler took
    plain_s = row["time/rollout"] - waited_s + row["spec/seconds_saved"]
    share = abs(row["spec/seconds_saved"]) / plain_s
    assert summary_lines([row])[1].endswith(f"{share:.0%} of plain rollouts")

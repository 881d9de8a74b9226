"""The miniature's figures, by hand: ratios of runs, right draft tokens, the best in hindsight."""

import argparse
import collections
import dataclasses

import numpy as np
import pytest

from benchmarks import countdown
from benchmarks.environment import ROOT
from reprise.rl.ablation.grid import cells
from reprise.rl.gin.loader import dump
from reprise.rl.metrics.writer import MetricsWriter
from reprise.rl.records.stats import RoundRecord
from reprise.spec.budget.budget import DraftDecision
from reprise.spec.drafter import no_drafts
from reprise.spec.round_times import RoundTimes

RIGHT = np.array([7, 8, 9, 1])


def tree():
    """7 → (5, 8 → 9), and 4: three right tokens, the last of them behind a wrong sibling."""
    drafts = no_drafts(1, 6)
    drafts.tokens_AN[0, :5] = [7, 5, 8, 9, 4]
    drafts.parents_AN[0, :5] = [-1, 0, 0, 2, -1]
    drafts.count_A[0] = 5
    return drafts


@pytest.mark.parametrize(("count", "right"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 3), (5, 3)])
def test_right_tokens_are_a_path_that_the_response_took(count, right):
    assert countdown.right_tokens(tree(), 0, RIGHT, count) == right


def test_a_response_that_ends_has_no_right_tokens_behind_its_end():
    assert countdown.right_tokens(tree(), 0, RIGHT[:2], 5) == 2


def plain_fetch(num_rounds, slots=4):
    marks = (0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    ids, none_A = np.array([3]), np.zeros(1, int)
    return RoundRecord(*marks, slots, slots, 64, ids, none_A, np.array([num_rounds]), ids)


def test_the_best_in_hindsight_verifies_right_tokens_alone():
    times = RoundTimes({(4, 4, 64): 1.0, (4, 8, 64): 1.2, (4, 16, 64): 2.0})
    taken = DraftDecision(16, np.array([2]))  # one right, one wrong
    choice = countdown.Choice(np.array([3]), np.array([0]), tree(), taken, (8, 16), (4, 64))
    found = countdown.in_hindsight([choice], [], {3: RIGHT}, times)
    assert found["device_s"] == 2.0
    assert found["best_s"] == pytest.approx(2 * 1.2 / 4), "three right ones fit into eight nodes"
    assert found["unpadded_s"] == pytest.approx(1.1), "of six nodes, between four and eight"
    assert found["right_nodes_s"] == pytest.approx(1.05), "of five"


def test_plain_rounds_count_as_they_are_but_one_that_could_have_had_draft_tokens():
    times = RoundTimes({(4, 4, 64): 1.0, (4, 8, 64): 1.2})
    spell = DraftDecision(4, num_rounds=64)  # of which a fetch runs 16
    choice = countdown.Choice(np.array([3]), np.array([0]), tree(), spell, (8,), (4, 64))
    fetches = [plain_fetch(16), plain_fetch(8)]
    found = countdown.in_hindsight([choice], fetches, {3: RIGHT}, times)
    assert found["device_s"] == found["unpadded_s"] == found["right_nodes_s"] == 24
    assert found["best_s"] == pytest.approx(24 - 1 + 1.2 / 4), "one token of four in a round"
    without = dataclasses.replace(choice, drafts=no_drafts(1, 6))
    assert countdown.in_hindsight([without], fetches, {3: RIGHT}, times)["best_s"] == 24


def test_runs_are_compared_by_epoch():
    names = ("time/rollout", "step_time", "rollout/tail_s", "completions/mean_length")
    counts = {"completions/count": 32, "time/update": 2.0}
    plain = [dict(zip(names, (4.0, 6.0, 2.0, 100), strict=True)) | counts] * 8
    faster = plain[:4] + [dict(zip(names, (4.0, 8.0, 1.0, 200), strict=True)) | counts] * 4
    faster[-1] = faster[-1] | {"spec/tokens_per_round": 3.0, "eval/mean_reward": 0.75}
    found = countdown.against(faster, plain, 4)
    assert [found[f"first/{x}"] for x in ("rollouts", "steps", "tail")] == [1, 1, 0]
    assert [found[f"later/{x}"] for x in ("rollouts", "steps", "tail")] == [2, 1.5, 0.75]
    assert (found["first/updates"], found["later/updates"]) == (1, 2), "a token's"
    assert found["spec/tokens_per_round"] == 3 and found["spec/accept_rate"] is None
    assert found["later/steps_limit"] == 3, "6 s with a rollout of 4 s"
    assert found["later/steps_of_limit"] == 0.5
    assert found["eval_reward"] == 0.75 and found["seconds"] == 8 * 4 + 6 * 4
    pipeline = [{k: x for k, x in row.items() if k != "time/rollout"} for row in faster]
    found = countdown.against(pipeline, plain, 4)
    assert found["later/rollouts"] is None and found["later/steps"] == 1.5


def write_run(cell, response):
    """A run's folder with two questions a step, twice; steps have the length of `response`."""
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.gin").write_text(dump(cell.config))
    names = "time/rollout", "time/update", "rollout/tail_s", "step_time", "entropy"
    figures = dict.fromkeys(names, 1.0) | {"step_time": 2.0}
    lengths = dict.fromkeys(("count", "mean_length", "max_length"), len(response))
    figures |= {f"completions/{name}": n for name, n in lengths.items()}
    with MetricsWriter(cell.folder, cell.config.metrics) as writer:
        writer.write(0, {"eval/mean_reward": 0.5})
        for step in range(1, cell.config.run.steps + 1):
            writer.write(step, figures)
            sample = {"example_id": step % 2, "sample_index": 0, "completion": response}
            writer.write_samples(step, [sample])


def test_every_variant_of_the_grid_is_compared_with_the_plain_run_that_has_its_noise(tmp_path):
    small = "Rollout.prompts_per_step=1", "Run.steps=4", "Metrics.tensorboard=False"
    grid = cells([ROOT / "configs/ablations/countdown.gin"], small, tmp_path)
    for cell in grid:
        noise = "by sample" if cell.config.reuse.couples_noise else "by step"
        noise += ", all repeated" if not cell.config.reuse.renew_groups else ""
        is_other = cell.name.startswith("lenient") or cell.name == "pipeline"
        write_run(cell, "other" if is_other else noise)
    (grid[1].folder / "metrics.jsonl").write_text('{"step": 1}\n')  # stopped
    found = countdown.training(argparse.Namespace(folder=tmp_path))
    assert found["conditions"]["eval_before"] == 0.5
    rows = {row["variant"]: row for row in found["rows"]}
    assert len(rows) == len(grid) - 1 and "drafts" not in rows
    by_baseline = collections.defaultdict(set)
    for name, row in rows.items():
        by_baseline[row["baseline"]].add(name)
    assert by_baseline.pop("plain") >= {"plain", "lenient_e_0_5", "learned", "ahead"}
    assert by_baseline == {
        "plain_noise_by_sample": {"plain_noise_by_sample", "coupled", "all_exact"},
        "plain_noise_by_sample_all_repeated": {
            "plain_noise_by_sample_all_repeated",
            "coupled_all_repeated",
        },
    }
    differ = {name for name, row in rows.items() if row["responses_that_differ"]}
    assert differ == {"lenient_e_0_5", "lenient_e_0_5_all_repeated", "pipeline"}
    assert differ == {name for name, row in rows.items() if not row["is_exact"]}
    assert all(row["responses"] == 4 and row["first/steps"] > 0 for row in rows.values())


def test_the_limit_of_reuse_is_the_price_of_a_generated_token_over_a_verified_one():
    plain, passes = {(4, 4, 64): 0.02, (8, 8, 64): 0.04}, {(4, 64, 64): 0.9, (8, 128, 64): 0.256}
    times = RoundTimes(plain, chunk_seconds=passes)
    found = {"generated_token_ms": 5.0, "verified_token_ms": 2.0, "reuse_limit": 2.5}
    assert countdown.reuse_limit(times) == found
    assert countdown.reuse_limit(RoundTimes(plain)) == {}

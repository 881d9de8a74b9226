"""Results of a grid: the row of a run, spreads over seeds, the table and the figure."""

import math

import pytest

from reprise.rl.ablation.grid import cells
from reprise.rl.ablation.results import COLUMNS, by_variant, figure, markdown, read_cell
from reprise.rl.metrics.writer import MetricsConfig, MetricsWriter


def test_a_row_of_the_table(grid, tmp_path):
    cell = cells([grid], ["Run.steps=6"], tmp_path / "runs")[0]  # 2 prompts a step, of 6
    cell.folder.mkdir(parents=True)
    rows = [
        {
            "step": step,
            "reward": float(step),
            "rollout/generated_tokens": 10,
            "time/rollout": 0.5,
            "spec/cached_seconds": 0.25,
            "spec/reused_fraction": 0.0 if step <= 3 else 0.9,
            "entropy": 0.1 * step,
            "mismatch_kl": math.nan,
        }
        for step in range(1, 7)
    ]
    with MetricsWriter(cell.folder, MetricsConfig(tensorboard=False)) as writer:
        for row in rows:
            writer.write(row["step"], row)
        for step, value in ((3, 0.25), (6, 0.75)):
            passes = {"eval/pass@2": value, "eval/pass@16": value / 2, "eval/one/pass@99": 1.0}
            writer.amend(step, {"eval/mean_reward": value, **passes})
    assert cell.steps_done == 6 and not cell.is_done  # its policy is not written yet
    (cell.folder / "policy").mkdir()
    assert cell.is_done
    got = read_cell(cell, num_examples=6)
    assert list(got) == list(COLUMNS)
    assert (got["name"], got["seed"], got["epochs"]) == ("plain", 0, 2.0)
    assert (got["generated_tokens"], got["rollout_s"], got["verify_s"]) == (60, 3.0, 1.5)
    assert got["final_reward"] == 5.0 and got["reused_fraction"] == 0.9  # of the second epoch
    assert (got["eval_reward"], got["eval_pass"]) == (0.75, 0.375), "the last, of the largest k"
    assert got["entropy"] == pytest.approx(0.35) and math.isnan(got["kl"])


def row(name, seed, tokens, reward):
    numbers = dict.fromkeys(COLUMNS[2:], 1.0)
    return {"name": name, "seed": seed} | numbers | {
        "generated_tokens": tokens, "final_reward": reward, "rollout_s": tokens / 10,
        "kl": math.nan,
    }  # fmt: skip


ROWS = [row("plain", 0, 100.0, 0.5), row("a|b", 0, 40.0, 0.75), row("plain", 1, 100.0, 1.0)]


def test_rows_are_summarised_over_seeds():
    spreads = by_variant(ROWS)
    assert list(spreads) == ["plain", "a|b"]
    assert spreads["plain"]["final_reward"] == (0.75, pytest.approx(0.5 / math.sqrt(2)))
    assert spreads["a|b"]["final_reward"][0] == 0.75
    assert math.isnan(spreads["a|b"]["final_reward"][1])
    assert math.isnan(spreads["plain"]["kl"][0])


def test_the_table_and_the_figure(tmp_path):
    text = markdown(by_variant(ROWS))
    lines = text.splitlines()
    assert len({line.replace("\\|", "").count("|") for line in lines[:4]}) == 1
    assert lines[2].startswith("| plain | 1.00 | 1.00× |") and "0.7500 ± 0.3536" in lines[2]
    assert lines[3].startswith("| a\\|b | 0.40 | 2.50× |")
    curves = {"plain": {1: 0.5, 2: 0.75}, "a|b": {1: 0.5}}
    figure(by_variant(ROWS), curves, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"


def test_async_rollouts_have_no_rollout_seconds_to_compare():
    ahead = row("ahead", 0, 90.0, 0.5) | {"rollout_s": math.nan}
    (line,) = [x for x in markdown(by_variant([*ROWS, ahead])).splitlines() if "ahead" in x]
    assert line.split(" | ")[:3] == ["| ahead", "0.90", ""]
    assert "nan" not in line


def test_columns_without_values_are_left_out():
    bare = [r | {"reused_fraction": math.nan, "verify_s": 0.0, "epochs": 0.01} for r in ROWS]
    text = markdown(by_variant(bare))
    head = text.splitlines()[0]
    assert not any(name in text for name in ("reused_fraction", "verify_s", "epochs", "kl"))
    assert "final_reward" in head and "entropy" in head
    assert "verify_s" in markdown(by_variant(ROWS))

"""Published against simulated: rows, constants, and small experiments in each paper's way."""

from __future__ import annotations

import dataclasses
import json

import pytest

from rl import (
    reproduction_rhymerl,
    reproduction_seer,
    reproduction_specactor,
    reproduction_tlt,
    simulate,
)
from rl.config import load
from rl.reproduction import FOLDER, ReproducedRow, configurations, fitted_constants, lines_of
from rl.simulation_config import PAPERS, GroupedDraftsConfig, SimulateRun, make_cluster
from spec.window import WindowConfig

SHIPPED = dict(configurations())
MODULES = {
    "seer": reproduction_seer,
    "rhymerl": reproduction_rhymerl,
    "specactor": reproduction_specactor,
    "tlt": reproduction_tlt,
}
OF_A_WORKLOAD = {"workload.mean_tokens"}  # may differ between the files of a paper


def test_errors_are_ratios_or_differences():
    ratio = ReproducedRow("p", "w", "r", 2.0, 2.3)
    assert ratio.error == pytest.approx(0.15) and ratio.within
    assert not dataclasses.replace(ratio, simulated=2.5).within
    points = ReproducedRow("p", "w", "r", 0.87, 0.80, 0.1, True)
    assert points.error == pytest.approx(-0.07) and points.within
    least = ReproducedRow("p", "w", "r", None, 2.5, least=2.6)
    assert least.error is None and not least.within
    assert dataclasses.replace(least, simulated=2.7).within


def test_the_table_says_constants_and_why_a_row_is_short():
    short = ReproducedRow("p", "w", "r", 1.0, 2.0, why="the roofline knows no such thing")
    text = "\n".join(lines_of([(short, {"workload.sigma": 0.9})]))
    assert "NO" in text and "workload.sigma 0.9" in text and "knows no such thing" in text
    assert short.as_json({})["why"] and json.dumps(short.as_json({}))


def test_there_is_a_configuration_of_every_paper_and_one_set_of_constants():
    assert {c.simulate.reproduces for c in SHIPPED.values()} == set(PAPERS) == set(MODULES)
    for paper, module in MODULES.items():
        mine = [c for c in SHIPPED.values() if c.simulate.reproduces == paper]
        shared = set(module.FITTED) - OF_A_WORKLOAD
        sets = [fitted_constants(c, sorted(shared)) for c in mine]
        assert all(s == sets[0] for s in sets), paper
        sections = ("efficiency", "grouped_drafts", "training_steps", "specactor", "tree_drafts")
        for section in sections:
            assert len({repr(getattr(c, section)) for c in mine}) == 1, (paper, section)
        assert len({c.simulate.chunk_tokens for c in mine}) == 1


def test_grouped_lanes_bring_the_published_tokens():
    config = GroupedDraftsConfig()
    for lane, tokens in zip(
        reproduction_seer.grouped_lanes(config), config.paths_tokens, strict=True
    ):
        assert 1 + sum(lane.chances) == pytest.approx(tokens)
        assert list(lane.chances) == sorted(lane.chances, reverse=True)


def test_tree_lanes_and_drafting_are_those_of_the_tables():
    config = SHIPPED["tlt"]
    trees, instance = config.tree_drafts, make_cluster(config).instance
    lane = reproduction_tlt.tree_lane(trees)
    assert len(lane.chances) == 64 and 1 + sum(lane.chances) == pytest.approx(8.67)
    assert 1 + sum(lane.chances[:16]) == pytest.approx(8.67 * 3.22 / 3.62)
    draft_s = reproduction_tlt.draft_seconds(trees, instance, 512)
    round_s = instance.round_seconds(1, 512, 65) + draft_s
    assert 8.67 * instance.round_seconds(1, 512) / round_s == pytest.approx(3.62)


def test_the_ladder_picks_the_method_that_serves_the_batch():
    config = SHIPPED["specactor"]
    workload = dataclasses.replace(config.workload, num_groups=16)
    config = dataclasses.replace(config, workload=workload)
    hardware = dataclasses.replace(reproduction_specactor.hardware_of(config), num_devices=20)
    found, trace = reproduction_specactor.ranked(
        hardware, reproduction_specactor.trace_of(config, 0)
    )
    # as good as the larger one, and cheaper; n-grams are right too seldom
    assert next(iter(found.drafters)) == "Qwen2.5-0.5B" and found.drafters["ngram"] is None
    means = dict(zip(found.drafters, trace.acceptance_RM.mean(axis=0), strict=True))
    assert means["ngram"] == pytest.approx(0.2, abs=0.02)
    assert means["Qwen2.5-0.5B"] == pytest.approx(0.82, abs=0.02)


def test_windows_of_history_have_the_published_acceptance():
    config = dataclasses.replace(SHIPPED["rhymerl"].training_steps, found=1.0)
    mean = reproduction_rhymerl.history_windows(config)
    assert (mean.tokens - 1) / mean.guesses == pytest.approx(0.72, abs=1e-4)
    assert mean.guesses < WindowConfig().most_tokens


SMALL = {
    "seer_qwen2_vl": (
        "Workload.num_groups=40",
        "Cluster.workers=2",
        "Simulate.seeds=(0,)",
    ),
    "rhymerl": (
        "Workload.num_groups=16",
        "Cluster.workers=16",
        "TrainingSteps.steps_per_epoch=2",
        "TrainingSteps.epochs=2",
        "Simulate.seeds=(0,)",
    ),
    "specactor": ("Workload.num_groups=16", "SpecActor.devices=20", "Simulate.seeds=(0,)"),
    "tlt": ("Simulate.seeds=(0,)",),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_experiment_has_all_its_rows(name):
    path = FOLDER / f"{name}.gin"
    config = load(SimulateRun, [path], SMALL[name])
    paper = config.simulate.reproduces
    rows = MODULES[paper].rows(config)
    assert len(rows) == {"seer": 6, "rhymerl": 5, "specactor": 5, "tlt": 1}[paper]
    assert all(row.simulated > 0 for row in rows if not row.absolute)


def test_a_file_that_reproduces_prints_its_rows(capsys):
    path = FOLDER / "tlt.gin"
    assert simulate.main([f"--gin_file={path}", "--json", "--gin.Simulate.seeds=(0, 1)"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    row = json.loads(line)
    assert {"paper", "workload", "row", "published", "simulated", "within"} <= row.keys()
    assert row["published"] == 2.44 and row["simulated"] > 1


def test_all_that_is_shipped_is_played_and_printed(capsys, monkeypatch):
    config = load(SimulateRun, [FOLDER / "tlt.gin"], ["Simulate.seeds=(3,)"])
    monkeypatch.setattr(simulate, "configurations", lambda: [("tlt", config)])
    assert simulate.main(["--reproduce"]) == 0
    printed = capsys.readouterr().out
    assert "trees below 32 requests" in printed and "2.44" in printed
    assert "tlt: workload.mean_tokens 4000" in printed


def test_shipped_configurations_are_reproduced_as_they_are(capsys):
    assert simulate.main(["--reproduce", "--gin.Workload.sigma=2.0"]) == 2
    assert "plays the shipped configurations as they are" in capsys.readouterr().err

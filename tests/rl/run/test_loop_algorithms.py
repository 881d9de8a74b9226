"""Each algorithm in the training loop: it learns, and resumes to the bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from loop_runs import assert_same_bits, finish, texts
from run_settings import DAPO, DRAFTS

from reprise.rl.checkpoint import contents
from reprise.rl.data.prompts import DataOrder
from reprise.rl.gin.loader import load
from reprise.rl.losses.algorithms import ALGORITHMS
from reprise.rl.runtime.signals import Stopped
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from tests.support import tiny_run

LEARN = (
    *("Run.steps=24", "Rollout.prompts_per_step=4", "Checkpoint.every_steps=0"),
    *("Optimizer.learning_rate=0.03", "Critic.learning_rate=0.03"),
)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_learns(tiny, name, tmp_path):
    # without dapo's length penalty, which is an aim of its own
    off = "Algorithm.overlong_buffer_tokens=0"
    done = finish(tiny, tmp_path, f"Algorithm.name='{name}'", off, *LEARN)
    rewards = [row["reward"] for row in done.rows]
    # the share of digits is 0.63 at first. Seeded, so never a false alarm on one platform
    assert np.mean(rewards[:4]) < 0.7 and np.mean(rewards[-4:]) > 0.9
    assert ("critic/explained_variance" in done.rows[0]) == (name == "ppo")
    assert ("dynamic_sampling/phases" in done.rows[-1]) == (name == "dapo")


# --- dapo -------------------------------------------------------------------------------

FOUR = (*DAPO, "Run.steps=4")


@pytest.fixture(scope="module")
def dapo(tiny, tmp_path_factory):
    return finish(tiny, tmp_path_factory.mktemp("dapo"), *FOUR, tiny_run.rewarded(tiny, "lucky"))


def test_groups_without_differences_are_replaced_by_further_prompts(tiny, dapo):
    samples = [json.loads(line) for line in dapo.samples.splitlines()]
    numbers = {example.example_id: i for i, example in enumerate(_examples(tiny))}
    phases = [row["dynamic_sampling/phases"] for row in dapo.rows]
    assert 1 in phases and max(phases) == 3, "the seed must give steps of one phase and of three"
    asked = []
    for row in dapo.rows:
        groups = _groups([s for s in samples if s["step"] == row["step"]])
        assert len(groups) == row["dynamic_sampling/generated_groups"]
        differ = [len({s["reward"] for s in group}) > 1 for group in groups]
        assert sum(differ) == row["dynamic_sampling/used_groups"]
        assert row["dynamic_sampling/phases"] == 3 or sum(differ) >= 2
        assert row["batch/samples"] == 4 * sum(differ)
        assert row["reward"] == pytest.approx(np.mean([s["reward"] for g in groups for s in g]))
        for group, use in zip(groups, differ, strict=True):
            assert use or not any(s["advantage"] for s in group)
        # the length penalty may make rewards that differ equal, as of one group of this seed
        assert any(s["advantage"] for group in groups for s in group) == any(differ)
        asked += [numbers[group[0]["example_id"]] for group in groups]
    assert asked == _order(tiny, len(asked)), "no prompt is skipped, none comes before its time"


def test_samples_of_every_phase_have_noise_of_their_own(dapo):
    first = [json.loads(line) for line in dapo.samples.splitlines()]
    found = [s["completion"] for s in first if s["step"] == 1 and len(s["completion"]) > 2]
    assert len(set(found)) == len(found) > 8


def test_drafts_change_no_token_of_any_phase(tiny, dapo, tmp_path):
    done = finish(tiny, tmp_path, *FOUR, tiny_run.rewarded(tiny, "lucky"), *DRAFTS)
    assert texts(done) == texts(dapo)
    # the third step has seen all six prompts: there is history to draft from
    assert max(row.get("spec/history/speculated_fraction", 0.0) for row in done.rows) > 0


@pytest.mark.parametrize("stop_at_fetch", [3, 15])
def test_dapo_stopped_anywhere_and_resumed_gives_the_same_bits(tiny, dapo, tmp_path, stop_at_fetch):
    """The data cursor is in the checkpoint: it does not follow from the step."""
    settings = (*FOUR, tiny_run.rewarded(tiny, "lucky"), "Checkpoint.every_steps=0")
    show = tiny_run.Recorder()
    with pytest.raises(Stopped):
        tiny_run.train(
            tiny,
            tmp_path,
            *settings,
            show=show,
            should_stop=lambda: show.fetches >= stop_at_fetch,
        )
    assert_same_bits(finish(tiny, tmp_path, *settings), dapo)


def test_a_step_whose_groups_are_all_equal_ends_after_the_last_phase(tiny, tmp_path):
    settings = (*FOUR, tiny_run.rewarded(tiny, "equal"), "Run.steps=2")
    done = finish(tiny, tmp_path, *settings)
    for row in done.rows:
        assert row["dynamic_sampling/phases"] == 3
        assert row["dynamic_sampling/generated_groups"] == 6
        assert row["batch/samples"] == row["batch/optimizer_steps"] == 0
    host = contents.read_host(tmp_path / "checkpoints" / "step_00000002" / "host")
    assert host["cursor"] == 12


def test_the_length_penalty_is_in_the_advantages_and_not_in_the_rewards(tiny, tmp_path):
    plain = finish(tiny, tmp_path / "plain", "Run.steps=1")
    six = "Algorithm.overlong_buffer_tokens=6"
    punished = finish(tiny, tmp_path / "punished", "Run.steps=1", six)
    rows = [[json.loads(x) for x in r.samples.splitlines()] for r in (plain, punished)]
    assert [s["reward"] for s in rows[0]] == [s["reward"] for s in rows[1]]
    assert [s["advantage"] for s in rows[0]] != [s["advantage"] for s in rows[1]]
    penalties = [-max(0, s["num_tokens"] - 2) / 6 for s in rows[1]]
    assert punished.rows[0]["reward/overlong_penalty"] == pytest.approx(np.mean(penalties))
    group = np.array([s["reward"] + p for s, p in zip(rows[1], penalties, strict=True)])[:4]
    wanted = (group - group.mean()) / (group.std(ddof=1) + 1e-4)
    assert [s["advantage"] for s in rows[1][:4]] == pytest.approx(wanted.tolist(), rel=1e-5)
    assert punished.rows[0]["reward"] == plain.rows[0]["reward"]


def _groups(samples):
    """Samples of one step by group, in order."""
    return [samples[i : i + 4] for i in range(0, len(samples), 4)]


def _config(tiny):
    return load(TrainConfig, [tiny], [])


def _examples(tiny):
    task = open_inputs(_config(tiny)).task
    return [task[i] for i in range(len(task))]


def _order(tiny, count):
    return DataOrder(len(_examples(tiny)), _config(tiny).run.seed).indices(0, count).tolist()


# --- ppo --------------------------------------------------------------------------------

PPO = ("Algorithm.name='ppo'", "Critic.learning_rate=0.01", "Trainer.minibatches=2")


def test_ppo_stopped_and_resumed_gives_the_same_bits(tiny, tmp_path):
    """Critic and its optimizer state are in the checkpoint."""
    whole = finish(tiny, tmp_path / "whole", *PPO)
    show = tiny_run.Recorder()
    with pytest.raises(Stopped):
        tiny_run.train(
            tiny,
            tmp_path / "stopped",
            *PPO,
            "Checkpoint.every_steps=0",
            show=show,
            should_stop=lambda: show.fetches >= 3,
        )
    assert show.rows, "a step must be behind it"
    assert_same_bits(finish(tiny, tmp_path / "stopped", *PPO), whole)
    paths = {path for path in _saved(tmp_path / "whole") if "critic" in path}
    assert any("head_D" in path for path in paths) and any("opt_state" in path for path in paths)


def _saved(run):
    (newest, *_) = sorted((run / "checkpoints").glob("step_*"), reverse=True)
    return json.loads((newest / "manifest.json").read_text())["extra"]["arrays"]


def test_ppo_takes_groups_of_one_and_its_samples_name_no_advantage(tiny, tmp_path):
    done = finish(tiny, tmp_path, *PPO, "Rollout.group_size=1", "Run.steps=2", "Run.seed=2")
    samples = [json.loads(line) for line in done.samples.splitlines()]
    assert [s["advantage"] for s in samples] == [None] * 4
    assert all(row["critic/value_loss"] > 0 and row["grad_norm"] > 0 for row in done.rows)


# --- all --------------------------------------------------------------------------------


def test_corrections_are_weights_of_the_same_rollouts(tiny, tmp_path):
    """Reused tokens were drawn by an older policy; fresh ones weigh about 1."""
    settings = ("Reuse.mode='full'", "Run.steps=5", "Optimizer.learning_rate=0.1")
    rows = {
        name: finish(
            tiny, tmp_path / name.replace(":", "_"), *settings, f"Algorithm.correction='{name}'"
        ).rows
        for name in ("token_tis:1.05", "sequence_mask:0.9:1.1")
    }
    for name, key in (("token_tis:1.05", "truncated"), ("sequence_mask:0.9:1.1", "masked")):
        cut = [row[f"correction/{key}_fraction"] for row in rows[name]]
        weights = [row["correction/weight_mean"] for row in rows[name]]
        assert cut[0] == 0 and weights[0] == pytest.approx(1, abs=1e-4)
        assert max(cut) > 0 and min(weights) < 0.999

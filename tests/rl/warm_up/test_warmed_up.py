"""Warm-up compiles all that a run needs. Last of its folder: these runs empty jax's caches."""

from __future__ import annotations

import json

import jax
import pytest
from loop_runs import (
    assert_resumes_to_the_bit,
    assert_same_run,
    compiles_nothing_late,
    few_devices,
    finish,
    spare_time,
    stop_after,
    unpriced,
)
from run_settings import BANDIT, DAPO, DRAFTS, LEARNED, TRAINED_AFTER, WORKERS
from whole_steps import whole_steps

from reprise.rl.drafter_training import trainer as drafter_trainer
from reprise.rl.gin.loader import load
from reprise.rl.metrics.writer import step_rows
from reprise.rl.settings.config import TrainConfig
from tests.support.tiny_run import rewarded


@pytest.fixture
def narrow():
    """Workers share one device, as on a user's CPU."""
    with few_devices():
        yield


def assert_lengths_vary(rows):
    rows = step_rows(rows)
    assert len({(r["completions/min_length"], r["completions/max_length"]) for r in rows}) > 1


def evaluated(tiny):
    task = f"Eval.sets=('own=jsonl:{tiny.parent / 'task.jsonl'}',)"
    return task, "Eval.every_steps=3", "Eval.num_prompts=3"


def test_one_engine_with_a_critic_reuse_and_a_task_s_own_sampling(tiny, tmp_path):
    """Its responses have several pages, and resumed it gives the same bits."""
    [task] = load(TrainConfig, [tiny]).task.specs
    by_task = "Sampling.by_task=('t: temperature=0.7, top_k=9, max_new_tokens=20, stop=\"1\"',)"
    more = "Reuse.mode='coupled'", "Algorithm.name='ppo'", "Sampling.max_new_tokens=24"
    more = (*more, "Speculation.losing_steps=0")
    settings = (*more, "Run.steps=6", f"Task.specs=('t={task}',)", by_task)
    with unpriced():
        whole = compiles_nothing_late(tiny, tmp_path / "whole", *settings)
        assert_resumes_to_the_bit(tiny, tmp_path, settings, whole)
    assert_lengths_vary(whole.rows)
    assert max(row["spec/reused_fraction"] for row in whole.rows[1:]) > 0
    # the trainer scores by the task's sampling too
    assert max(row["sampling/sampling_logp_difference/max"] for row in whole.rows) < 1e-4
    samples = [json.loads(line) for line in whole.samples.splitlines()]
    ended = [s["completion"] for s in samples if "1" in s["completion"]]
    assert ended and all(text.index("1") == len(text) - 1 for text in ended)
    assert max(s["num_tokens"] for s in samples) <= 20


def test_a_learned_drafter_in_a_run_that_is_resumed(tiny, tmp_path):
    stop_after(tiny, tmp_path, 2, *TRAINED_AFTER)
    more = "Run.steps=5", "Checkpoint.every_steps=2"
    done = compiles_nothing_late(tiny, tmp_path, *TRAINED_AFTER, *more)
    assert "resuming after step 2" in done.show.messages
    assert_lengths_vary(done.rows[2:])


@pytest.mark.parity
def test_workers_with_every_drafter_and_reuse(tiny, narrow, tmp_path, monkeypatch):
    """They train the drafter in their spare time, and all of it changes no token of one engine."""
    monkeypatch.setattr(drafter_trainer, "SAVE_EVERY_STEPS", 1)
    coupled = ("Reuse.mode='coupled'", "Sampling.draw='gumbel_blocks'", "Run.steps=6")
    drafts = (
        *(*LEARNED, *BANDIT, *WORKERS, "Engine.min_slots=2"),
        "Speculation.sources=('group', 'own', 'learned', 'model')",
        f"DraftModel.directory={str(tiny.parent / 'policy')!r}",
    )
    with spare_time():
        done = compiles_nothing_late(tiny, tmp_path / "workers", *coupled, *drafts)
    assert_lengths_vary(done.rows)
    rows = json.loads((tmp_path / "workers" / "round_times.json").read_text())["rows"]
    assert {"draft learned", "draft model"} < {row[0] for row in rows}
    assert done.rows[-1]["drafter/total_steps"] > 0
    assert whole_steps(tmp_path / "workers" / "drafter")[0] > 0
    assert done.rows[-1]["spec/reused_fraction"] > 0
    assert max(row.get("spec/tokens_per_round", 0.0) for row in done.rows) > 1
    assert_same_run(finish(tiny, tmp_path / "one", *coupled, *WORKERS[2:]), done)


def test_a_pipeline_that_is_evaluated(tiny, narrow, tmp_path):
    sampled = (*evaluated(tiny), "Eval.samples=2", "Eval.temperature=0.7")
    settings = (*WORKERS, "Sched.mode='pipeline'", "Run.steps=4", *sampled)
    done = compiles_nothing_late(tiny, tmp_path, *settings)
    assert_lengths_vary(done.rows)
    assert "eval/mean_reward" in done.rows[-1]


def test_a_step_begun_ahead_with_drafts_further_phases_and_corrections(tiny, narrow, tmp_path):
    """On workers whose batches shrink."""
    drafts = (*DRAFTS, "Speculation.sources=('last', 'history', 'group', 'own')")
    dapo = (*DAPO, "Trainer.minibatches=2", "Run.steps=4", "Engine.min_slots=2")
    more = ("Algorithm.correction='sequence_tis:2'", "Sampling.draw='gumbel_blocks'")
    settings = (*WORKERS, "Sched.mode='ahead'", *drafts, *dapo, *more, rewarded(tiny, "lucky"))
    done = compiles_nothing_late(tiny, tmp_path, *settings)
    assert_lengths_vary(done.rows)
    assert max(r["dynamic_sampling/phases"] for r in done.rows) > 1


@pytest.mark.skipif(jax.device_count() != 8, reason="needs 8 (virtual) devices")
def test_rollouts_of_split_weights(tiny, tmp_path):
    """They have a mesh of their own, on which the weights of each step are laid out anew."""
    split = "Mesh.data=1", "Mesh.fsdp=8", "Trainer.compute_dtype='bfloat16'"
    settings = (*DRAFTS, *split, *evaluated(tiny), "Run.steps=5")
    shards = {"jit(slice)"}  # which Orbax writes
    whole = compiles_nothing_late(tiny, tmp_path / "whole", *settings, but=shards)
    assert_lengths_vary(whole.rows)
    assert_resumes_to_the_bit(tiny, tmp_path, settings, whole)

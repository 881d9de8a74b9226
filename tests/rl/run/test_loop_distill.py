"""Distillation in the training loop: it learns, drafts change no token, it resumes to the bit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import (
    assert_resumes_to_the_bit,
    compiles_nothing_late,
    finish,
    texts,
)
from run_settings import DRAFTS, PIPELINE, SLOTS

from policies.make.characters import save_character_tokenizer
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.rl.commands import train
from tests.support import tiny_run

ALONE = ("Distill.task_weight=0.0", "Distill.coefficient=1.0")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A deeper policy with other weights, which prefers some tokens strongly."""
    folder = tmp_path_factory.mktemp("teacher")
    model = dataclasses.replace(tiny_run.MODEL, num_layers=2)
    params = transformer.init(model, jax.random.key(5), jnp.float32)
    params = dataclasses.replace(params, embedding_VD=4 * params.embedding_VD)
    hf.save_pretrained(folder, model, params)
    save_character_tokenizer(folder, tiny_run.CHARACTERS)
    return f"Distill.teacher='{folder}'"


@pytest.fixture(scope="module")
def whole(tiny, teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return compiles_nothing_late(tiny, folder, teacher, "Run.steps=4", "Checkpoint.every_steps=0")


def test_drafts_change_no_token_and_no_weight(tiny, teacher, whole, tmp_path):
    done = finish(tiny, tmp_path, teacher, "Run.steps=4", *DRAFTS)
    assert texts(done) == texts(whole)
    assert max(row.get("spec/history/speculated_fraction", 0.0) for row in done.rows) > 0
    for ours, theirs in zip(done.rows, whole.rows, strict=True):
        assert ours["distill/reverse_kl"] == theirs["distill/reverse_kl"]
    for ours, theirs in zip(done.leaves, whole.leaves, strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_a_stopped_run_resumes_to_the_bit(tiny, teacher, whole, tmp_path):
    assert_resumes_to_the_bit(tiny, tmp_path, (teacher, "Run.steps=4"), whole)


def test_the_teacher_alone_teaches_whatever_the_rewards_are(tiny, teacher, tmp_path):
    settings = (
        *(teacher, *ALONE, tiny_run.rewarded(tiny, "equal"), "Run.steps=24"),
        *("Rollout.prompts_per_step=6", "Optimizer.learning_rate=0.03"),
    )
    done = finish(tiny, tmp_path, *settings)
    kl = [row["distill/reverse_kl"] for row in done.rows]
    assert np.mean(kl[-4:]) < 0.7 * np.mean(kl[:4])
    assert all(row["frac_reward_zero_std"] == 1 and row["grad_norm"] > 0 for row in done.rows)
    assert all(row["batch/samples"] == 24 for row in done.rows)
    assert not [text for text in done.show.messages if "taught the policy nothing" in text]


def test_a_pipeline_and_a_critic_distil_too(tiny, teacher, tmp_path):
    settings = (teacher, *PIPELINE, *SLOTS, "Algorithm.name='ppo'", "Run.steps=3")
    done = finish(tiny, tmp_path / "one", *settings)
    assert all(np.isfinite(row["distill/reverse_kl"]) for row in done.rows)
    assert "critic/value_loss" in done.rows[0] and done.rows[0]["grad_norm"] > 0


@pytest.mark.parametrize("mode", ["lenient:1.5", "coupled"])
def test_reuse_distils_too(tiny, teacher, tmp_path, mode):
    settings = (teacher, f"Reuse.mode='{mode}'", "Run.steps=4", "Rollout.prompts_per_step=3")
    done = finish(tiny, tmp_path, *settings)
    assert all(np.isfinite(row["distill/reverse_kl"]) for row in done.rows)
    assert max(row["spec/reused_fraction"] for row in done.rows) > 0


def test_another_teacher_is_refused_at_a_resume(tiny, teacher, tmp_path, capsys):
    run = tmp_path / "run"
    own = tmp_path / "teacher"
    one = tiny_run.MODEL
    hf.save_pretrained(own, one, transformer.init(one, jax.random.key(1), jnp.float32))
    save_character_tokenizer(own, tiny_run.CHARACTERS)
    flags = [f"--gin_file={tiny}", f"--gin.Run.directory='{run}'"]
    named = f"--gin.Distill.teacher='{own}'"
    assert train.main([*flags, named, "--gin.Run.steps=1"]) == 0
    more = [*flags, "--gin.Run.steps=2", "--resume"]
    capsys.readouterr()
    assert train.main([*more, f"--gin.{teacher}"]) == 2
    assert "another experiment" in (told := capsys.readouterr().err) and "Distill.teacher" in told
    hf.save_pretrained(own, one, transformer.init(one, jax.random.key(2), jnp.float32))
    assert train.main([*more, named]) == 2
    assert "got other contents of Distill.teacher/model.safetensors" in capsys.readouterr().err

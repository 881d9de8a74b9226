"""Teachers that are refused before any device work, and teachers of another size that fit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from policies.make.characters import save_character_tokenizer
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.rl.gin.loader import load
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from tests.support import tiny_run


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny_run.make_inputs(tmp_path_factory.mktemp("teachers"))


def opened(config, folder, *overrides):
    settings = [f"Distill.teacher='{folder}'", *overrides]
    return open_inputs(load(TrainConfig, [config], settings))


def save(folder, characters=tiny_run.CHARACTERS, **changes):
    model = dataclasses.replace(tiny_run.MODEL, **changes)
    hf.save_pretrained(folder, model, transformer.init(model, jax.random.key(1), jnp.float32))
    save_character_tokenizer(folder, characters)
    return folder


def test_another_size_and_another_padding_fit(config, tmp_path):
    found = opened(config, save(tmp_path, num_layers=2, d_ff=64, vocab_size=32))
    assert (found.teacher.num_layers, found.teacher.vocab_size) == (2, 32)
    assert found.teacher.eos_token_ids == found.model.eos_token_ids
    # the ids without a token are those of its own padding
    assert found.teacher.unused_ids == ((18, 32),) and found.model.unused_ids == ((18, 24),)
    assert {name.partition("/")[0] for name in found.contents} >= {"Distill.teacher"}


@pytest.mark.parametrize("characters", ["0123456789+=abd", "0123456789+=acb"])
def test_another_vocabulary_is_refused(config, tmp_path, characters):
    message = "expected the vocabulary of the policy, got one that differs in .* words, such as '"
    with pytest.raises(ValueError, match=message):
        opened(config, save(tmp_path, characters))


def test_too_few_positions_are_refused(config, tmp_path):
    save(tmp_path, max_positions=12)
    with pytest.raises(ValueError, match="has 12 positions.*make 16: lower one"):
        opened(config, tmp_path)


def test_a_missing_folder_is_refused(config, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        opened(config, tmp_path / "nowhere")


def test_groups_of_one_learn_from_a_teacher_alone(config, tmp_path):
    save(tmp_path)
    one = "Rollout.group_size=1"
    assert opened(config, tmp_path, one, "Distill.task_weight=0.0").teacher is not None
    with pytest.raises(ValueError, match="expected Rollout.group_size of 2 or more"):
        opened(config, tmp_path, one)

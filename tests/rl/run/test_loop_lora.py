"""Low-rank adapters in the loop: training learns, and drafts and modes change no token."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from loop_runs import assert_resumes_to_the_bit, assert_same_run, finish, stop_after, texts
from run_settings import DRAFTS, LEARNED, PIPELINE, SETTINGS, WORKERS
from safetensors.numpy import load_file, save_file

from reprise.models.config import trained_specs
from reprise.models.decoder import lora, transformer
from reprise.models.formats import hf, peft_files
from reprise.rl.assembly import setup
from reprise.rl.cluster.processes import ALONE
from reprise.rl.export import adapter_base, exports
from reprise.rl.gin.loader import load
from reprise.rl.preflight import memory
from reprise.rl.run import run_process
from reprise.rl.run.evaluation import load_checkpoint
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from tests.support import tiny_run

LORA = ("Policy.lora_rank=4", "Policy.lora_alpha=8.0", "Optimizer.learning_rate=0.03")
ALL = ("Policy.lora_targets=('attention', 'mlp', 'head')",)
SOME = (*LORA, *ALL, "Run.steps=5")


@pytest.fixture(scope="module")
def some(tiny, tmp_path_factory):
    return finish(tiny, tmp_path_factory.mktemp("lora"), *SOME)


def test_it_learns(tiny, tmp_path):
    learn = "Run.steps=24", "Rollout.prompts_per_step=4", "Checkpoint.every_steps=0"
    done = finish(tiny, tmp_path, *LORA, *ALL, *learn)
    rewards = [row["reward"] for row in done.rows]
    # the share of digits is 0.63 at first. Seeded, so never a false alarm on one platform
    assert np.mean(rewards[:4]) < 0.7 and np.mean(rewards[-4:]) > 0.85


def test_the_state_is_the_adapter_s(tiny, some):
    inputs = open_inputs(load(TrainConfig, [tiny], SOME))
    sizes = [np.prod(spec.shape) for spec in jax.tree.leaves(trained_specs(inputs.model))]
    assert sorted(x.size for x in some.leaves if x.ndim > 1) == sorted(3 * sizes)


def test_the_sampler_s_policy_is_the_trainer_s(some):
    for row in some.rows:
        assert row["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.parametrize(
    "settings",
    [DRAFTS, LEARNED, WORKERS, (*WORKERS, "Sched.mode='ahead'")],
    ids=["drafts", "learned", "workers", "ahead"],
)
def test_the_tokens_are_those_of_plain_rollouts(tiny, some, tmp_path, one_device, settings):
    assert_same_run(finish(tiny, tmp_path, *SOME, *settings), some)


def test_it_resumes_to_the_bit(tiny, some, tmp_path):
    assert_resumes_to_the_bit(tiny, tmp_path, SOME, some)


def test_a_pipeline_resumes_to_the_bit(tiny, tmp_path, one_device):
    settings = (*LORA, *SETTINGS, *PIPELINE)
    whole = finish(tiny, tmp_path / "whole", *settings)
    stop_after(tiny, tmp_path / "cut", 4, *settings)
    resumed = finish(tiny, tmp_path / "cut", *settings)
    assert texts(resumed) == texts(whole)
    for one, other in zip(resumed.leaves, whole.leaves, strict=True):
        assert one.tobytes() == other.tobytes()


def test_the_reference_is_the_frozen_policy(tiny, tmp_path):
    done = finish(tiny, tmp_path, *SOME, "Algorithm.kl_coefficient=0.1")
    assert done.rows[0]["kl"] == pytest.approx(0, abs=1e-6)  # B starts at 0
    assert done.rows[-1]["kl"] > 1e-4


def test_a_critic_learns_beside_it(tiny, tmp_path):
    ppo = "Algorithm.name='ppo'", "Critic.learning_rate=0.03", "Run.steps=8"
    done = finish(tiny, tmp_path, *LORA, *ALL, *ppo)
    losses = [row["critic/value_loss"] for row in done.rows]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


def test_a_drafter_s_folder_has_the_adapted_head(tiny, tmp_path, one_device):
    settings = (*SOME, *LEARNED)
    done = finish(tiny, tmp_path, *settings)
    config = load(TrainConfig, [tiny], settings)
    inputs = open_inputs(config)
    merged = load_checkpoint(done.folder, inputs).params
    exports.write_drafter(config, inputs, done.folder, tmp_path / "own")
    exports.write_drafter(config, inputs, done.folder, tmp_path / "of_merged", merged)
    for file in sorted((tmp_path / "own").glob("*.safetensors")):
        own, other = load_file(file), load_file(tmp_path / "of_merged" / file.name)
        for name, weight in own.items():
            np.testing.assert_array_equal(weight, other[name])


def test_a_checkpoint_is_loaded_merged(tiny, some):
    inputs = open_inputs(load(TrainConfig, [tiny], SOME))
    loaded = load_checkpoint(some.folder, inputs)
    assert loaded.model.lora is None and loaded.step == 5
    _, base = hf.load_pretrained(inputs.policy)
    tokens_BT = np.arange(8, dtype=np.int32)[None]
    merged = transformer.logits(loaded.model, loaded.params, tokens_BT)
    plain = transformer.logits(loaded.model, base, tokens_BT)
    is_used = np.isfinite(plain)
    assert np.abs(np.asarray(merged - plain)[is_used]).max() > 1e-2
    assert not any(map(lora.is_adapted, jax.tree.leaves(loaded.params, is_leaf=lora.is_adapted)))


def test_memory_of_the_state_is_counted(tiny):
    configs = [load(TrainConfig, [tiny], extra) for extra in ((), LORA)]
    models = [open_inputs(config).model for config in configs]
    alone = {"data": 1, "fsdp": 1, "tensor": 1}
    one = memory.Layout(1, 1, False, alone, alone, 1)
    plain, adapted = (
        memory.held_arrays(config, model, one, is_cpu=True)[memory.TRAINING]
        for config, model in zip(configs, models, strict=True)
    )
    specs = jax.tree.leaves(trained_specs(models[1]))
    assert adapted["master weights"] == 4 * sum(int(np.prod(spec.shape)) for spec in specs)
    assert adapted["frozen weights"] == plain["master weights"]


def test_a_checkpoint_is_not_merged_into_other_weights(tiny, some, tmp_path):
    inputs = open_inputs(load(TrainConfig, [tiny], SOME))
    copied = shutil.copytree(inputs.policy, tmp_path / "policy")
    moved = dataclasses.replace(inputs, policy=copied)
    assert load_checkpoint(some.folder, moved).warnings == ()
    weights = load_file(copied / "model.safetensors")
    save_file(
        {key: x * x.dtype.type(1.5) for key, x in weights.items()}, copied / "model.safetensors"
    )
    with pytest.raises(ValueError, match="model.safetensors has other contents than up to step 5"):
        load_checkpoint(some.folder, moved)


def test_an_end_of_a_run_names_no_folder_of_this_machine_and_checks_its_base(tiny, tmp_path):
    config = load(TrainConfig, [tiny], SOME)
    copied = shutil.copytree(config.policy.directory, tmp_path / "policy")
    policy = dataclasses.replace(config.policy, directory=str(copied))
    config = dataclasses.replace(config, policy=policy)
    inputs = open_inputs(config)
    folder = tmp_path / "run"
    show = tiny_run.Recorder()
    folder.mkdir()
    _, state = setup.make_learner(config, inputs, None)
    process = run_process._RunProcess(config, inputs, folder, None, ALONE)
    assert process._export(state, show) == 0
    files = [file for part in ("policy", "adapter") for file in (folder / part).iterdir()]
    assert {"adapter_config.json", "README.md", "config.json"} <= {file.name for file in files}
    for file in files:
        assert str(tmp_path).encode() not in file.read_bytes(), file
    _, digest = adapter_base.describe_base(copied, inputs.contents)
    assert peft_files.read_base(folder / "adapter") == peft_files.Base("policy", digest)
    weights = load_file(copied / "model.safetensors")
    save_file(
        {name: x * x.dtype.type(1.5) for name, x in weights.items()}, copied / "model.safetensors"
    )
    assert process._export(state, show) != 0  # written over while the run went on
    assert "model.safetensors has other contents" in show.messages[-1]

"""The estimate of a run's memory: sizes of arrays, the layout of devices, and the verdict."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from reprise.models.attention import kv_cache
from reprise.models.config import ModelConfig, num_params
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.rl.gin.loader import load
from reprise.rl.placement.engines import evaluation_engine
from reprise.rl.preflight import memory
from reprise.rl.preflight.memory import ROLLOUTS, TRAINING, Devices
from reprise.rl.settings.config import TrainConfig

MODEL = ModelConfig("qwen3", 512, 64, 2, 4, 2, 16, 128, qk_norm=True, eos_token_ids=(1,))
SETTINGS = (
    "Rollout.max_prompt_tokens=64",
    "Sampling.max_new_tokens=192",
    "Engine.slots=16",
    "Rollout.prompts_per_step=4",
    "Rollout.group_size=4",
    "Speculation.sources=('history',)",
    "Speculation.budget='fixed:7'",
)
WEIGHTS = 4 * num_params(MODEL)
KEYS = "keys and values"
SLOTS, SLOT_PAGES = 16, 2  # of 256 tokens
TABLE = 4 * SLOTS * SLOT_PAGES  # bytes, on every device


def cache_bytes():
    """Of the cache of these settings, with its table."""
    cache = jax.eval_shape(
        lambda: kv_cache.init(
            MODEL, SLOTS, SLOT_PAGES, SLOTS * SLOT_PAGES, 128, jnp.float32, for_cpu=True
        )
    )
    return sum(4 * x.size for x in jax.tree.leaves(cache))


def setting(*overrides):
    return load(TrainConfig, (), [*SETTINGS, *overrides])


def estimated(*overrides, devices=None, model=MODEL):
    return memory.estimate(setting(*overrides), model, devices or Devices())


def parts(*overrides, devices=None, model=MODEL):
    both = estimated(*overrides, devices=devices, model=model).parts
    return both[TRAINING] | both[ROLLOUTS]


def test_arrays_are_counted_exactly():
    found = parts("Algorithm.kl_coefficient=0.1")
    assert found["master weights"] == found["reference policy"] == WEIGHTS
    assert found["gradients"] == WEIGHTS
    steps = 2 * 4  # the schedule counts steps, and so does Adam
    assert found["optimizer's state"] == 2 * WEIGHTS + steps
    halved = parts("Optimizer.first_moment='bfloat16'")
    assert halved["optimizer's state"] == 1.5 * WEIGHTS + steps
    assert found["rollout weights"] == 0, "the master weights serve"
    assert found[KEYS] == cache_bytes()
    critic = parts("Algorithm.name='ppo'")["critic and its optimizer's state"]
    value_head = 4 * MODEL.d_model  # in place of the language head
    values = WEIGHTS - 4 * MODEL.vocab_size * MODEL.d_model + value_head
    assert critic == 3 * values + steps


def test_a_teacher_is_counted_by_its_own_shape(tmp_path):
    deeper = dataclasses.replace(MODEL, num_layers=4)
    hf.save_pretrained(tmp_path, deeper, transformer.init(deeper, jax.random.key(0)))
    found = parts(f"Distill.teacher='{tmp_path}'")
    assert found["teacher"] == 4 * num_params(deeper)
    assert "teacher" not in parts()
    halved = parts(f"Distill.teacher='{tmp_path}'", "Trainer.compute_dtype='bfloat16'")
    assert halved["teacher"] == 2 * num_params(deeper)


def test_a_device_holds_its_shards():
    whole, four = parts(), Devices(4)
    split = parts("Mesh.fsdp=4", devices=four)
    matrices = MODEL.vocab_size * MODEL.d_model * 4
    assert split["master weights"] < whole["master weights"] / 4 + matrices / 4
    pages = whole[KEYS] - TABLE
    assert split[KEYS] == pages / 4 + TABLE
    assert split["rollout weights"] < whole["master weights"] / 2 + matrices / 2, "two heads"
    assert (
        parts("Mesh.fsdp=4", "Mesh.rollout_tensor=1", devices=four)["rollout weights"]
        == (whole["master weights"])
    )
    heads = parts("Mesh.tensor=2", "Mesh.data=2", devices=four)
    assert heads[KEYS] == pages / 4 + TABLE
    assert heads["rollout weights"] == 0, "the master weights serve: they are split alike"
    # three slots do not divide: each of four copies has one, and a page to copy an end of a prompt
    few = "Engine.slots=3", "Engine.min_slots=3", "Mesh.rollout_tensor=1"
    three = parts("Mesh.fsdp=4", *few, devices=four)
    assert three[KEYS] == pages * (SLOT_PAGES + 1) / (SLOTS * SLOT_PAGES) + TABLE / 4


def test_fewer_devices_than_the_mesh_has_count_as_many():
    """A dry run elsewhere: devices are looked at when the run starts."""
    for flags in (
        ("Mesh.fsdp=4",),
        ("Mesh.data=2", "Mesh.tensor=2"),
        ("Mesh.fsdp=4", "Mesh.rollout_tensor=2"),
        ("Sched.workers=2", "Sched.devices_per_worker=2"),
    ):
        assert parts(*flags) == parts(*flags, devices=Devices(4)), flags
    huge = parts("Mesh.data=1000000000", "Mesh.fsdp=1000000000")
    assert 0 < huge["master weights"] <= WEIGHTS


def test_a_run_on_one_of_several_devices_is_that_of_one():
    assert parts("Mesh.data=1", devices=Devices(4)) == parts("Mesh.data=1", devices=Devices(1))


def test_an_engine_in_each_process_reads_the_master_weights():
    found = parts(
        *("Cluster.kind='spmd'", "Cluster.rollouts='local'", "Mesh.data=4"),
        devices=Devices(4, processes=2),
    )
    assert found["rollout weights"] == 0


def test_a_cache_grows_with_its_positions_and_what_it_keeps():
    plain = parts()
    assert parts("Sampling.max_new_tokens=193")[KEYS] > 1.2 * plain[KEYS]
    learned = parts("Speculation.sources=('learned',)")
    assert learned[KEYS] > plain[KEYS], "hidden states are kept"
    pages = plain[KEYS] - TABLE
    assert learned["drafters' keys and values"] == pages // MODEL.num_layers + TABLE
    assert learned["drafters' weights"] > 0
    accelerator = Devices(1, None, is_cpu=False)
    paged = parts("Engine.pages=8", devices=accelerator)
    assert paged[KEYS] < parts(devices=accelerator)[KEYS] < plain[KEYS]


def test_workers_with_devices_of_their_own_are_counted_apart():
    flags = "Sched.mode='pipeline'", "Sched.workers=2"
    shared, split = estimated(*flags), estimated(*flags, devices=Devices(4))
    assert not shared.is_disjoint and split.is_disjoint
    assert shared.parts[ROLLOUTS][KEYS] == 2 * split.parts[ROLLOUTS][KEYS], "both on one device"
    sums = {part: sum(arrays.values()) for part, arrays in split.parts.items()}
    assert split.total_bytes == max(sums.values()) < sum(sums.values())


def test_an_evaluation_beside_the_workers_counts_beyond_gradients():
    beside = "Sched.mode='pipeline'", "Sched.workers=2", "Eval.num_prompts=1000"
    many = estimated(*beside, devices=Devices(3)).parts[TRAINING]  # one of them trains
    name = "evaluations, beyond gradients"
    assert 0 < many[name] + many["gradients"] - cache_bytes() < 0.3 * cache_bytes()
    for fewer in ((*beside[:2], "Eval.num_prompts=0"), (), ("Eval.num_prompts=1000",)):
        assert name not in estimated(*fewer, devices=Devices(4)).parts[TRAINING]
    few = setting("Engine.pages=4000", "Engine.slots=4096")
    assert evaluation_engine(few, 8, 1).pages == 8 * 2 < evaluation_engine(few, 5000, 1).pages
    assert evaluation_engine(setting(), 8, 1) == setting().engine


def test_the_verdict():
    found = estimated()
    total = found.total_bytes
    assert total == sum(sum(arrays.values()) for arrays in found.parts.values())
    assert found.check(Devices()) is None
    assert found.check(Devices(bytes_each=2 * total)) is None
    assert "activations and logits: lower Engine.slots" in found.check(Devices(bytes_each=total))
    with pytest.raises(ValueError, match="alone: lower Engine.slots"):
        found.check(Devices(bytes_each=total - 1))


def test_devices_of_a_cpu_share_what_the_host_has(monkeypatch):
    opened = memory.opened_devices(jax.devices())
    assert opened.count == jax.device_count() and opened.is_cpu
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    host = memory.unopened_devices()
    assert host == dataclasses.replace(host, count=1, is_cpu=True, processes=1)
    assert opened.bytes_each == host.bytes_each // opened.count > 2**20
    assert memory.estimate(setting(), MODEL, opened).check(opened) is None


def test_remat_follows_the_backend():
    trainer = setting("Trainer.remat='auto'").trainer
    assert trainer.remat_policy == "none", "tests run on a CPU"
    assert trainer.remat_on(is_cpu=False) == "layer"
    with pytest.raises(ValueError, match=r"remat: expected .*'layer:N'.*, got 'pairs'; 'auto'"):
        setting("Trainer.remat='pairs'")

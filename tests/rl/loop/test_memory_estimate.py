"""The memory estimate: what it counts, that programs need about as much, and its verdict."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import kv_cache, transformer
from models.config import ModelConfig
from models.params import num_params
from rl.config.loader import load
from rl.learner import micro_batches, trainer
from rl.learner.gradient_accumulation import StepScalars, accumulate, start
from rl.loop import memory_estimate
from rl.loop.experiment import TrainConfig, recipe
from rl.loop.memory_estimate import Devices
from spec import verify
from spec.config import SamplingConfig
from spec.sampling import Processing

FACTOR = 2.0  # between what is estimated of a program and what XLA says of it
MODEL = ModelConfig("qwen3", 512, 64, 2, 4, 2, 16, 128, qk_norm=True, eos_token_ids=(1,))
SETTINGS = (
    "Rollout.max_prompt_tokens=64",
    "Sampling.max_new_tokens=192",
    "Trainer.micro_batch_tokens=1024",
    "Trainer.logprob_chunk_tokens=256",
    "Trainer.remat='none'",
    "Engine.slots=16",
    "Engine.min_positions=256",
    "Engine.max_nodes=8",
    "Rollout.prompts_per_step=4",
    "Rollout.group_size=4",
    "Speculation.sources=('history',)",
    "Speculation.budget='fixed:7'",
)


def setting(*overrides):
    return load(TrainConfig, (), [*SETTINGS, *overrides])


def parts(*overrides, devices=None, model=MODEL):
    return memory_estimate.estimate(setting(*overrides), model, devices or Devices()).parts


def test_arrays_that_exist_for_certain_are_counted_exactly():
    found = parts("Algorithm.kl_coefficient=0.1")
    weights = 4 * num_params(MODEL)
    assert found["master weights"] == found["reference policy"] == weights
    assert found["Adam moments"] == found["gradients"] == 2 * weights
    halved = parts("Optimizer.first_moment='bfloat16'")
    assert halved["Adam moments"] == 1.5 * weights
    added = parts("Trainer.remat='layer'")["gradients"]
    assert added == weights + 2 * (weights // 4), "of two layers, and of the rest"
    assert found["rollout weights"] == 0, "the master weights serve"
    cache = jax.eval_shape(lambda: kv_cache.init(MODEL, 16, 256, jnp.float32))
    assert found["KV cache"] == sum(4 * x.size for x in jax.tree.leaves(cache))
    assert parts("Algorithm.name='ppo'")["critic"] == 4 * weights


def test_a_device_holds_its_shards():
    whole, four = parts(), Devices(4)
    split = parts("Mesh.fsdp=4", devices=four)
    matrices = MODEL.vocab_size * MODEL.d_model * 4
    assert split["master weights"] < whole["master weights"] / 4 + matrices / 4
    assert split["KV cache"] == whole["KV cache"] / 4
    assert split["rollout weights"] < whole["master weights"] / 2 + matrices / 2, "two heads"
    assert (
        parts("Mesh.fsdp=4", "Mesh.rollout_tensor=1", devices=four)["rollout weights"]
        == (whole["master weights"])
    )
    heads = parts("Mesh.tensor=2", "Mesh.data=2", devices=four)
    assert heads["KV cache"] == whole["KV cache"] / 4
    assert heads["rollout weights"] == 0, "the master weights serve: they are split alike"
    # three slots do not divide: each of four copies has one
    few = "Engine.slots=3", "Engine.min_slots=3", "Mesh.rollout_tensor=1"
    three = parts("Mesh.fsdp=4", *few, devices=four)
    assert three["KV cache"] == whole["KV cache"] / 16


def test_each_setting_moves_the_part_it_should():
    plain = parts()
    kept = "activations"
    assert parts("Trainer.remat='layer'")[kept] < plain[kept] / 4
    assert parts("Sampling.max_new_tokens=448")[kept] > 1.2 * plain[kept], "scores are quadratic"
    at_work = "a layer's gradient, or logits"
    assert parts("Trainer.logprob_chunk_tokens=1024")[at_work] > plain[at_work]
    assert parts("Sampling.max_new_tokens=193")["KV cache"] > 1.2 * plain["KV cache"]
    drawn = "a round, or prompts"
    wide = dataclasses.replace(MODEL, vocab_size=8 * MODEL.vocab_size)
    few = "Engine.prefill_rows=1", "Engine.prefill_chunk_tokens=8"  # else prompts need more
    assert parts(*few, model=wide)[drawn] > 3 * parts(*few)[drawn], "logits of every node"
    assert parts()[drawn] > 3 * parts(*few)[drawn], "scores of prompts"
    learned = parts("Speculation.sources=('learned',)")
    assert learned["KV cache"] > plain["KV cache"], "hidden states are kept"


def test_long_rows_take_memory_by_their_length_alone():
    long = dataclasses.replace(MODEL, max_positions=2**15)

    def of(tokens):
        found = parts(f"Sampling.max_new_tokens={tokens - 64}", "Trainer.remat='layer'", model=long)
        return found["activations"]

    assert of(2**14) == 2 * of(2**13) == 4 * of(2**12)
    assert of(1024) > 1.4 * of(512), "shorter ones have a mask, of as many tokens"


def test_remat_follows_the_backend():
    assert setting("Trainer.remat='auto'").trainer.remat_policy == "none", "tests run on a CPU"
    assert parts("Trainer.remat='auto'") == parts()
    accelerator = Devices(1, None, is_cpu=False, shared=False)
    found = parts("Trainer.remat='auto'", devices=accelerator)
    assert found["activations"] < parts()["activations"] / 4
    assert found == parts("Trainer.remat='layer'", devices=accelerator)
    assert parts("Trainer.remat='none'") == parts()


def test_more_layers_apart_keep_less():
    deep = dataclasses.replace(MODEL, num_layers=36)

    def of(remat):
        return parts(f"Trainer.remat={remat!r}", model=deep)["activations"]

    assert of("none") > 3 * of("dots") > 3 * of("layer") > 5 * of("layer:6")
    assert of("layer:6") < min(of("layer:2"), of("layer:18"))
    with pytest.raises(ValueError, match=r"remat: expected .*'layer:N'.*, got 'pairs'; 'auto'"):
        setting("Trainer.remat='pairs'")


def compiled_bytes(lowered):
    found = lowered.compile().memory_analysis()
    if found is None:
        pytest.skip("this backend does not say")
    return found


def within(estimated, needed):
    assert needed / FACTOR <= estimated <= needed * FACTOR, (estimated, needed)


def shapes_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def test_a_micro_batch_needs_what_is_estimated():
    config = setting()
    options = recipe(config, MODEL)
    static = {"network": trainer.POLICY, "recipe": options}
    shape = trainer.batch_shape(options, config.longest_tokens)
    params = jax.eval_shape(lambda: transformer.init(MODEL, jax.random.key(0)))
    total = jax.eval_shape(lambda: start(**static))
    batch = shapes_of(micro_batches.empty(shape))
    one = np.float32(1)
    scalars = StepScalars(one, one, np.bool_(True))
    found = compiled_bytes(accumulate.lower(params, total, batch, scalars, **static))
    parts_of = parts()
    ours = (
        "gradients",
        "activations",
        "a layer's gradient, or logits",
        "loss arrays",
        "compute copies",
    )
    weights = 4 * num_params(MODEL)
    needed = found.temp_size_in_bytes + found.argument_size_in_bytes - weights
    within(sum(parts_of[name] for name in ours), needed)


@pytest.mark.parametrize("vocab_size", [512, 4096])
def test_a_round_needs_what_is_estimated(vocab_size):
    model = dataclasses.replace(MODEL, vocab_size=vocab_size)
    B, M, S = 16, 128, 256
    params = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))
    cache = jax.eval_shape(lambda: kv_cache.init(model, B, S, jnp.float32))
    ints_B, floats_B = (jax.ShapeDtypeStruct((B,), t) for t in (jnp.int32, jnp.float32))
    slots = verify.Slots(
        *(ints_B,) * 4,
        active=jax.ShapeDtypeStruct((B,), jnp.bool_),
        keys=jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B)),
        processing=Processing(floats_B, ints_B, floats_B),
    )
    pending = jax.eval_shape(lambda: kv_cache.no_pending(model, M, jnp.float32))
    nodes_5M = jax.ShapeDtypeStruct((5, M), jnp.int32)
    stop_E = jax.ShapeDtypeStruct((1,), jnp.int32)
    chunks_TX = jax.ShapeDtypeStruct((1, 2 + 32), jnp.int32)
    found = compiled_bytes(
        verify.verify_round.lower(
            *(params, cache, pending, slots, nodes_5M, stop_E, chunks_TX),
            config=model,
            scheme=SamplingConfig().scheme,
            max_nodes=8,
        )
    )
    part = "a round, or prompts"
    config = setting("Engine.prefill_rows=1", "Engine.prefill_chunk_tokens=32")
    estimated = memory_estimate.estimate(config, model, Devices()).parts[part]
    within(estimated, found.temp_size_in_bytes)


def test_the_verdict():
    config = setting()
    found = memory_estimate.estimate(config, MODEL, Devices())
    assert found.certain < found.total

    def said(limit, count=1, shared=False):
        return memory_estimate.verdict(found, Devices(count, limit, shared=shared))

    assert said(None) is None and said(found.total) is None
    assert "may need" in said(found.total - 1)
    assert said(found.total, count=2) is None
    assert "may need" in said(found.total, count=2, shared=True)
    with pytest.raises(ValueError, match="alone: lower Engine.slots"):
        said(found.certain - 1)


def test_the_host_says_what_a_cpu_has():
    there = memory_estimate.devices_of(jax.devices())
    assert there.count == jax.device_count() and there.limit_bytes > 2**20
    assert memory_estimate.verdict(memory_estimate.estimate(setting(), MODEL, there), there) is None

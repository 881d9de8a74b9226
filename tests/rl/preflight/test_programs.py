"""A run as shapes: what stays on a device, its programs, and devices that do not fit."""

import dataclasses
import inspect

import jax
import pytest

from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.rl.gin.loader import load
from reprise.rl.preflight.memory import ROLLOUTS, TRAINING, num_bytes
from reprise.rl.preflight.programs import HELD, RunPrograms
from reprise.rl.settings.config import TrainConfig

MODEL = ModelConfig("qwen3", 64, 16, 2, 4, 2, 8, 32, qk_norm=True, max_positions=256)
FLAGS = (
    *("Engine.slots=8", "Engine.min_slots=8", "Engine.page_tokens=32", "Engine.max_nodes=2"),
    *("Rollout.prompts_per_step=2", "Rollout.group_size=4", "Rollout.max_prompt_tokens=16"),
    *("Sampling.max_new_tokens=48", "Trainer.micro_batch_tokens=128"),
)


def run_of(*flags, devices=4, is_cpu=False, model=MODEL):
    config = load(TrainConfig, [], [*FLAGS, *flags])
    return RunPrograms(config, model, jax.devices()[:devices], is_cpu=is_cpu)


def num_params(model=MODEL):
    D, Q, P, F = model.d_model, 4 * 8, 2 * 8, model.d_ff
    layer = 2 * D + 2 * D * Q + 2 * D * P + 3 * D * F + 2 * 8
    return 2 * model.vocab_size * D + 2 * layer + D


def test_what_stays_is_counted_by_hand():
    held = run_of("Mesh.fsdp=1", "Mesh.data=4", "Algorithm.kl_coefficient=0.1").held
    weights = 4 * num_params()
    assert held[TRAINING] == {
        "master weights": weights,
        "optimizer's state": 2 * weights + 2 * 4,  # the schedule counts steps, and Adam
        "reference policy": weights // 2,
    }
    assert held[ROLLOUTS]["rollout weights"] == weights // 2  # bfloat16
    # 8 slots over 4 devices; keys and values of 2 layers, 2 heads of 8, 64 positions; the table
    assert held[ROLLOUTS]["keys and values"] == 2 * 2 * (2 * 2 * 8 * 64) * 2 + 4 * 8 * 2


def test_a_cpu_computes_in_float32_and_the_master_weights_serve():
    run = run_of(is_cpu=True)
    assert run.config.trainer.compute_dtype == "float32" and run.config.trainer.remat == "none"
    assert run.held[ROLLOUTS]["rollout weights"] == 0
    assert not [one for one in run.all() if one.kind == "weights for rollouts"]
    other = run_of()
    assert other.config.trainer.compute_dtype == "bfloat16"
    assert other.config.trainer.remat == "layer"


def test_programs_are_those_of_training_and_rollouts():
    programs = run_of("Speculation.budget='goodput'").all()
    kinds = {one.kind for one in programs}
    assert {"accumulate", "apply", "inspect", "weights for rollouts"} <= kinds
    assert {"decode_rounds", "decode_beside_chunks", "verify_round", "make_slots"} <= kinds
    whole = [one for one in programs if one.num_tokens]
    assert {one.kind for one in whole} >= {"accumulate", "decode_rounds", "verify_round"}
    [gradient] = [one for one in programs if one.kind == "accumulate"]
    # rows of 64 tokens, at least one for each device
    assert gradient.num_tokens == 4 * 64
    for kind in ("decode_rounds", "accumulate", "apply"):
        one = next(one for one in programs if one.kind == kind)
        given = one.lower().compile().memory_analysis().argument_size_in_bytes
        assert 0 < one.held_bytes <= given


def test_the_pass_of_a_teacher_is_a_program_of_training(tmp_path):
    deeper = dataclasses.replace(MODEL, num_layers=3)
    hf.save_pretrained(tmp_path, deeper, transformer.init(deeper, jax.random.key(0)))
    run = run_of(f"Distill.teacher='{tmp_path}'")
    [one] = [one for one in run.all() if one.kind == "token_logprobs of the teacher"]
    assert one.held_bytes == run.held[TRAINING]["teacher"] > 0
    given = one.lower().compile().memory_analysis().argument_size_in_bytes
    assert one.held_bytes <= given


def test_held_names_are_parameters_of_programs():
    steps = {one.step for one in run_of(*DRAFTERS).of_rollouts()}
    assert HELD <= {name for step in steps for name in inspect.signature(step).parameters}


def test_a_critic_is_trained_too():
    run = run_of("Algorithm.name='ppo'")
    kinds = [one.kind for one in run.all() if one.part == TRAINING]
    assert "accumulate of the critic" in kinds and "token_values" in kinds
    assert run.held[TRAINING]["critic and its optimizer's state"] > 0


def test_workers_have_devices_of_their_own_where_they_run_beside_training():
    run = run_of("Sched.mode='pipeline'", "Sched.workers=2", "Sched.devices_per_worker=1")
    assert run.layout.is_disjoint and run.mesh.size == 2 and run.worker_mesh.size == 1
    shared = run_of("Sched.workers=8", devices=4)
    assert not shared.layout.is_disjoint and shared.layout.workers_each == 2
    alone = run_of("Sched.workers=4", devices=4).held[ROLLOUTS]
    assert shared.held[ROLLOUTS] == {name: 2 * size for name, size in alone.items()}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("Mesh.data=1", "Mesh.fsdp=2"), "does not cover 4 device"),
        (("Sched.workers=3", "Sched.devices_per_worker=2"), "expected 6 devices .* got 4: lower"),
    ],
)
def test_a_mesh_that_does_not_cover_the_target_is_told(flags, said):
    with pytest.raises(ValueError, match=said):
        run_of(*flags)


DRAFTERS = "Speculation.budget='goodput'", "Speculation.sources=('learned',)"


def test_drafters_on_the_device_have_programs_too():
    kinds = {one.kind for one in run_of(*DRAFTERS).all()}
    assert {"draft", "catch_up"} <= kinds


@pytest.mark.parametrize(
    "flags",
    [
        ("Mesh.fsdp=4",),
        ("Mesh.tensor=2", "Mesh.data=2", "Algorithm.name='ppo'"),
        ("Mesh.fsdp=4", "Engine.page_tokens=16"),
        ("Engine.pages=40", *DRAFTERS),
        DRAFTERS,
        ("Sched.mode='pipeline'", "Sched.workers=1", "Sched.devices_per_worker=2"),
    ],
)
def test_what_stays_is_what_programs_are_given(flags):
    """The sizes that no device is opened for are those of the arrays on a mesh."""
    run, largest = run_of(*flags), dict[str, int]()
    for program in run.of_rollouts():
        args, _ = program.arguments()
        given = dict(zip(inspect.signature(program.step).parameters, args, strict=False))
        drafts = program.step.__name__ in ("draft", "catch_up")
        if "given" in given:
            [constants, _] = given["given"]
            given["weights"] = getattr(constants[0], "params", None)
        for name in {"params", "pending", "slots", "cache", "weights"} & given.keys():
            size = num_bytes(given[name])
            name = f"drafter's {name}" if drafts else name
            largest[name] = max(largest.get(name, 0), size)
    held = run.held[ROLLOUTS]
    assert held["rollout weights"] == largest["params"]
    assert held["keys and values"] == largest["cache"]
    assert held["entries that wait to be written"] == largest["pending"]
    assert held["slots"] == largest["slots"]
    assert held.get("drafters' keys and values") == largest.get("drafter's cache")
    assert held.get("drafters' weights") == largest.get("drafter's weights")
    state, training = run.state, run.held[TRAINING]
    assert training["master weights"] == num_bytes(state.params)
    assert training["optimizer's state"] == num_bytes(state.opt_state)
    assert training.get("critic and its optimizer's state", 0) == num_bytes(state.critic)


def test_bytes_of_a_shard():
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.ShapeDtypeStruct((8, 3), "bfloat16", sharding=split)
    assert num_bytes({"a": x, "b": jax.ShapeDtypeStruct((5,), "float32")}) == 2 * 3 * 2 + 20

"""What the processes of tests/parity/test_arrays_of_processes.py do with arrays of one mesh.

The test calls some of it too, with as many devices of its own process.
"""

import contextlib
import dataclasses
import math
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
from shapes import CHAT
from trajectories import some_trajectories

from reprise.models.config import MeshConfig
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.models.sharding import make_mesh, param_shardings
from reprise.rl.checkpoint.checkpointer import Checkpointer, SaveError
from reprise.rl.checkpoint.reader import restore
from reprise.rl.cluster.join import JobStore
from reprise.rl.cluster.processes import ALONE, LARGE_BYTES, Processes, ProcessLost
from reprise.rl.learner import critic, trainer
from reprise.rl.learner.config import OptimizerConfig, TrainerConfig, TrainSpec
from reprise.rl.learner.optimizer import init_state, make_optimizer
from reprise.rl.losses.algorithms import AlgorithmConfig
from reprise.rl.weights.gathering import from_shards, host_copy, local_weights, own_shards
from reprise.spec.config import SamplingConfig

UPDATES = 3
DEADLINE_S, SOON_S = 60.0, 10.0


def recipe_of(algorithm):
    """Settings of updates: PPO with its critic and a reference, or GRPO with neither."""
    kl = 0.05 if algorithm == "ppo" else 0.0
    return TrainSpec(
        CHAT,
        algorithm=AlgorithmConfig(algorithm, kl_coefficient=kl),
        trainer=TrainerConfig(micro_batch_tokens=64, logprob_chunk_tokens=64),
        optimizer=OptimizerConfig(learning_rate=0.02),
        total_steps=100,
    )


def trajectories(step):
    """Four groups of four that share a prompt, with responses and rewards of any kind."""
    rng = np.random.default_rng(step)
    some = some_trajectories(16, step)
    return [dataclasses.replace(t, reward=float(rng.random())) for t in some]


def first_state(mesh, recipe):
    """A policy, its critic if it has one, and a reference, on the mesh that is set."""
    shardings = param_shardings(mesh, transformer.param_specs(CHAT))
    whole = transformer.init(CHAT, jax.random.key(0))
    params = jax.tree.map(
        lambda x, s: jax.make_array_from_process_local_data(s, np.asarray(x), x.shape),
        whole,
        shardings,
    )
    reference = jax.tree.map(jnp.copy, params)
    values = critic.init(params, recipe) if recipe.algorithm.resolved.needs_critic else None
    state = init_state(params, make_optimizer(recipe.optimizer, recipe.total_steps))
    return dataclasses.replace(state, critic=values), reference


def train(algorithm, sizes, devices):
    """Train on a mesh of these sizes; return it, the state, and all metrics."""
    mesh, recipe = make_mesh(MeshConfig(**sizes), devices), recipe_of(algorithm)
    with jax.set_mesh(mesh):
        state, reference = first_state(mesh, recipe)
        shape = trainer.batch_shape(recipe, 16)
        learner = trainer.Learner(recipe, shape, SamplingConfig(), reference=reference)
        metrics = []
        for step in range(UPDATES):
            batch = trajectories(step)
            advantages = np.random.default_rng(step).normal(size=len(batch)).astype(np.float32)
            state, found = trainer.update(state, batch, advantages, step, learner)
            metrics.append([found[name] for name in sorted(found)])
    return mesh, state, np.array(metrics)


def as_many_of_each(sizes):
    """The devices of a mesh of these sizes, as many of each process."""
    count = math.prod(sizes.values()) // jax.process_count()
    by_process = (jax.local_devices(process_index=i) for i in range(jax.process_count()))
    return [device for its in by_process for device in its[:count]]


def numbers(tree):
    """All numbers of arrays, wherever they lie, in one array."""
    return np.concatenate(
        [np.ravel(x).astype(np.float64) for x in jax.tree.leaves(host_copy(tree))]
    )


def template(mesh):
    """The shapes of a state without a critic, on the shardings that it has on `mesh`."""
    with jax.set_mesh(mesh):
        fresh, _ = first_state(mesh, recipe_of("grpo"))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh
    )


def joined(place):
    """The processes of this job, as the code under test is given them."""
    return Processes(place.index, place.count, JobStore(), DEADLINE_S) if place.count > 1 else ALONE


def train_and_save(place, runs, save=None, others=(), policy=None):
    """Train on each mesh; save the last state, restore what others hold, share a policy out."""
    found, processes = {}, joined(place)
    with processes:
        large = [bytes([index]) * (LARGE_BYTES + index) for index in range(place.count)]
        assert processes.gather_large("large", large[place.index]) == large
        for name, (algorithm, sizes) in runs.items():
            mesh, state, metrics = train(algorithm, sizes, as_many_of_each(sizes))
            found |= {f"{name}: state": numbers(state), f"{name}: metrics": metrics}
        if save:
            with Checkpointer(save, processes=processes) as saver:
                saver.save(UPDATES, state, {"cursor": [7, 8]})
            own = {"x": jnp.full(4, 1.0 + place.index), "step": jnp.asarray(place.index)}
            with Checkpointer(f"{save}-own", processes=processes) as saver:
                saver.save(1, own)
                found["of process 0"] = numbers(saver.restore(own).arrays)
        for folder in others:
            again = restore(folder, template(mesh), processes=processes)
            assert again.host == {"cursor": [7, 8]} and again.step == UPDATES
            assert jax.tree.map(lambda x: x.sharding, again.arrays) == jax.tree.map(
                lambda x: x.sharding, state
            )
            found[folder] = numbers(again.arrays)
    shared = share_weights(policy) if policy else {}
    return found | {f"shared: {name}": x for name, x in shared.items()}


def share_weights(policy):
    """Lay a policy out on meshes over all devices, and give each process its own of it."""
    found = {}
    for sizes in ({"data": 4}, {"data": 1, "fsdp": 4}, {"data": 2, "tensor": 2}):
        mesh = make_mesh(MeshConfig(**sizes), jax.devices())
        model, params = hf.load_pretrained(policy, mesh, dtype=np.float32)
        here, name = jax.local_devices(), str(sizes)
        kept = host_copy(params, keep=jax.process_index() == 0)
        found[f"{name} on the disk"] = [x is not None for x in jax.tree.leaves(kept)]
        shards = own_shards(params)
        kept_bytes = sum(x.nbytes for x in jax.tree.leaves(shards))
        whole_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
        assert kept_bytes < whole_bytes if "fsdp" in sizes else kept_bytes == whole_bytes
        back = from_shards(shards, params)
        assert all(
            jax.tree.leaves(jax.tree.map(lambda x, y: x.sharding == y.sharding, back, params))
        )
        found[f"{name} from shards"] = numbers(back).astype(np.float32)
        split = make_mesh(MeshConfig(data=1, tensor=2), here)
        places = {"device": here[1], "mesh": split}
        if "tensor" in sizes:
            places["turned"] = make_mesh(MeshConfig(data=1, tensor=2), here[::-1])
        for kind, where in places.items():
            dtype = jnp.bfloat16 if kind == "device" else jnp.float32
            own = local_weights(params, model, where, dtype)
            leaves = jax.tree.leaves(own)
            assert all(x.is_fully_addressable and x.dtype == dtype for x in leaves)
            if kind == "device":
                assert all(x.devices() == {here[1]} for x in leaves)
            else:
                wanted = param_shardings(where, transformer.param_specs(model))
                assert jax.tree.map(lambda x: x.sharding, own) == wanted
            found[f"{name} {kind}"] = np.concatenate(
                [np.ravel(np.asarray(x)).astype(np.float32) for x in leaves]
            )
    return found


def fail_to_save(place, folder):
    """Save; fail in one process, in the foreground and in the background; then lose it."""
    processes, told = joined(place), []
    mesh = make_mesh(MeshConfig(data=1, fsdp=place.count), jax.devices())
    state = jax.make_array_from_process_local_data(
        jax.NamedSharding(mesh, jax.P("fsdp")), np.arange(8.0, dtype=np.float32), (8,)
    )
    with contextlib.suppress(ProcessLost), processes:
        saver = Checkpointer(folder, processes=processes)
        saver.save(1, {"x": state}, {"step": 1})
        saver.wait()
        wrong = {"x": np.zeros(3)} if place.index == 1 else {"x": state}
        told.append(words(lambda: saver.save(2, wrong)))
        written = saver._orbax.wait_until_finished

        def refuse():
            written()
            raise OSError(28, "No space left on device")

        if place.index == 1:
            saver._orbax.wait_until_finished = refuse
        saver.save(3, {"x": state})
        told.append(words(saver.wait))
        saver._orbax.wait_until_finished = written
        saver.save(4, {"x": state}, {"step": 4})
        saver.wait()
        if place.index == 1:
            saver._orbax.wait_until_finished = lambda: os.kill(os.getpid(), signal.SIGKILL)
        processes._deadline_s = SOON_S  # until here, nobody is lost by a busy machine
        saver.save(5, {"x": state}, {"step": 5})
        told.append(words(saver.wait))
    return {"told": told}


def words(work):
    """What an error says; nothing where there is none."""
    try:
        work()
    except (SaveError, ProcessLost, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""

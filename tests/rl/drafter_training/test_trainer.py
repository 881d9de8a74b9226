"""A drafter's training in units: the same state whichever workers do them, and after stops."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_drafter import DRAFTER, bits, context_at, filled_buffer, make_engine, make_trainer
from whole_steps import whole_steps

from reprise.models.config import MeshConfig
from reprise.models.sharding import make_mesh
from reprise.rl.checkpoint import checkpointer
from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.checkpoint.config import CheckpointConfig
from reprise.rl.drafter_training import trainer as trainer_module
from reprise.rl.drafter_training.trainer import BufferSink
from reprise.spec.eagle.config import DataBufferConfig
from reprise.spec.eagle_training import training as drafter_training
from reprise.spec.eagle_training.training_data import DataBuffer, RequestSample


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Every second step swaps weights, and saves."""
    monkeypatch.setattr(trainer_module, "SWAP_EVERY_STEPS", 2)
    monkeypatch.setattr(trainer_module, "SAVE_EVERY_STEPS", 2)


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def four_steps(engine):
    """The state after four steps on one engine."""
    trainer = make_trainer()
    assert trainer.run_steps(4, context_at(trainer, engine)) == 4
    return trainer


def test_steps_learn(four_steps):
    rows = four_steps.take_history()
    assert len(rows) == 4 and not any(row["skipped"] for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert four_steps.take_history() == []


def test_rows_are_taken_under_the_lock_that_updates_add_them_under():
    trainer = make_trainer()
    lock, held = trainer._lock, []

    class Lock:
        def __enter__(self):
            lock.acquire()

        def __exit__(self, *_):
            held.append(trainer.history)
            lock.release()

    trainer.history = [{"loss": 1.0}]
    trainer._lock = Lock()
    assert trainer.take_history() == [{"loss": 1.0}]
    assert held == [[]]  # it was swapped while the lock was held


def test_an_empty_buffer_leaves_nothing_to_do(engine):
    trainer = make_trainer(DataBuffer(DataBufferConfig()))
    context = context_at(trainer, engine)
    assert trainer.work(context, leads=True) is None and trainer.run_steps(3, context) == 0


def test_a_step_is_its_micro_batches_and_one_update(engine):
    trainer = make_trainer()
    context = context_at(trainer, engine)
    kinds = [trainer.work(context, leads=True) for _ in range(2 * (DRAFTER.micro_batches + 1))]
    one = ["gradient"] * DRAFTER.micro_batches + ["update"]
    assert kinds == one * 2 and trainer.step == 2


def test_a_member_computes_gradients_and_leaves_the_update_to_the_leader(engine, four_steps):
    trainer = make_trainer()
    context = context_at(trainer, engine)
    for _ in range(4):
        while trainer.work(context, leads=False):
            pass
        assert trainer.work(context, leads=True) == "update"
    assert bits(trainer.state) == bits(four_steps.state)


def test_a_step_has_one_update_though_two_lead(engine, four_steps, monkeypatch):
    """A worker and who trains after a rollout: the second would donate what the first has made."""
    trainer = make_trainer()
    context, update, others = context_at(trainer, engine), trainer._update, []

    def once_somebody_else_has_asked(runner, now):
        if len(others) < 4:
            others.append(trainer.work(context, leads=True))
        update(runner, now)

    monkeypatch.setattr(trainer, "_update", once_somebody_else_has_asked)
    for step in range(1, 5):
        while trainer.work(context, leads=True) != "update":
            pass
        assert trainer.step == step
    assert others == [None] * 4
    assert bits(trainer.state) == bits(four_steps.state)


def test_an_update_that_fails_is_left_to_others(engine, monkeypatch):
    trainer, moved = make_trainer(), trainer_module._moved
    context = context_at(trainer, engine)
    while trainer.work(context, leads=False):
        pass
    monkeypatch.setattr(trainer_module, "_moved", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.work(context, leads=True)
    monkeypatch.setattr(trainer_module, "_moved", moved)
    assert trainer.work(context, leads=True) == "update" and trainer.step == 1


def test_work_on_several_devices_is_that_on_one(four_steps):
    """Three engines take turns, one of them on another device; so does the lead."""
    trainer = make_trainer()
    engines = [make_engine(), make_engine(device=jax.devices()[1]), make_engine()]
    contexts, turn = [context_at(trainer, e) for e in engines], 0
    while trainer.step < 4:
        context = contexts[turn % 3]
        with context.runner.mesh_context():
            assert trainer.work(context, leads=True) is not None
        turn += 1
    for ours, theirs in zip(
        jax.tree.leaves(trainer.state), jax.tree.leaves(four_steps.state), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_worker_that_fails_leaves_its_micro_batch_to_others(engine, four_steps, monkeypatch):
    trainer, gradients = make_trainer(), drafter_training.gradients
    context, fails = context_at(trainer, engine), random.Random(0)

    def sometimes(*args, **options):
        if fails.random() < 0.4:
            raise RuntimeError("out of memory")
        return gradients(*args, **options)

    monkeypatch.setattr(drafter_training, "gradients", sometimes)
    failed = 0
    while trainer.step < 4:
        try:
            trainer.work(context, leads=True)
        except RuntimeError:
            failed += 1
    assert failed > 2
    for ours, theirs in zip(
        jax.tree.leaves(trainer.state), jax.tree.leaves(four_steps.state), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_saved_and_loaded_in_the_middle_of_a_step_goes_on_with_the_same_bits(
    engine, four_steps, tmp_path
):
    """The current step is recomputed, from the same state and buffer."""
    with Checkpointer(tmp_path, CheckpointConfig(keep=1)) as checkpoints:
        first = make_trainer(checkpoints=checkpoints)
        context = context_at(first, engine)
        first.run_steps(2, context)  # the second step saves
        first.work(context, leads=True)
        checkpoints.wait()
        buffer, second = DataBuffer(DataBufferConfig()), make_trainer()
        buffer.load_state(first.buffer.state())
        restored = checkpoints.restore(second.state)
    second.buffer = buffer
    second.load(restored.arrays, restored.step)
    assert (second.step, restored.host) == (2, {"step": 2})
    second.run_steps(2, context_at(second, engine))
    assert bits(second.state) == bits(four_steps.state)


def test_weights_are_swapped_every_few_steps_into_buffers_of_their_own(engine):
    trainer = make_trainer()
    context, learned = context_at(trainer, engine), trainer.learned
    trainer.run_steps(1, context)
    assert learned.version == 0
    trainer.run_steps(1, context)
    assert learned.version == 1
    swapped = bits(learned.drafter.params)
    assert swapped == bits(trainer.state.params)
    trainer.run_steps(1, context)  # donates what it had
    assert bits(learned.drafter.params) == swapped != bits(trainer.state.params)


def test_a_save_is_left_out_while_another_directory_is_written(engine, tmp_path):
    """A look and the taking of the turn are one step: nobody waits with the state locked."""
    with Checkpointer(tmp_path, CheckpointConfig(keep=1)) as checkpoints:
        trainer = make_trainer(checkpoints=checkpoints)
        with checkpointer._writing:  # the run's own checkpoint
            trainer.run_steps(2, context_at(trainer, engine))
        assert whole_steps(checkpoints) == []
        trainer.save()
        assert whole_steps(checkpoints) == [2]


def test_after_a_warm_up_nothing_compiles(engine):
    from loop_runs import counted_compilations

    trainer = make_trainer()
    context = context_at(trainer, engine)
    before = bits(trainer.state)
    trainer.warm_up(context)
    assert bits(trainer.state) == before
    with counted_compilations() as found:
        trainer.run_steps(3, context)
        trainer.publish()
    assert found == []


@pytest.mark.parametrize("comes", ["made", "loaded"])
def test_a_state_that_lies_on_all_devices_is_trained_on_those_of_a_worker(
    engine, four_steps, comes
):
    """As where a run's mesh has all devices, and its workers one each."""
    mesh = make_mesh(MeshConfig(fsdp=4), jax.devices()[:4])
    with jax.set_mesh(mesh):
        trainer = make_trainer()
        whole = NamedSharding(mesh, PartitionSpec())
        state = jax.device_put(trainer.state, whole)
        if comes == "loaded":
            trainer.load(state, 0)
        else:
            trainer.state = state
    context = context_at(trainer, engine)
    trainer.warm_up(context)
    assert trainer.run_steps(4, context) == 4
    assert bits(trainer.state) == bits(four_steps.state)


def test_the_catcher_names_the_step():
    buffer = filled_buffer(step=4)
    sink = BufferSink(buffer, 5)
    assert sink.wants(0, 10) and not BufferSink(buffer, 2).wants(0, 10)
    sample = RequestSample(seed=0, step=5, share=0.5)
    sampled = BufferSink(buffer, 5, sample)
    wanted = [sampled.wants(r, 10) for r in range(20)]
    assert wanted == [r in sample for r in range(20)] and set(wanted) == {True, False}
    [one, *_] = buffer.sample(10, 4, np.random.default_rng(0))
    sink.add(one)
    assert set(buffer.state()["steps"]) == {4, 5}

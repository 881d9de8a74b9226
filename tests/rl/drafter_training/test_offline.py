"""Training on a trace: passes over the states, memory, and the lower loss."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from reprise.models.decoder import transformer
from reprise.rl.assembly.drafter_run import first_drafter
from reprise.rl.drafter_training import offline as offline_drafter
from reprise.rl.drafter_training.config import DrafterConfig
from reprise.rl.drafter_training.offline import OfflineConfig, OfflineTraining, hidden_of, num_bytes
from reprise.rl.records.packing import Response
from reprise.spec.eagle.config import DataBufferConfig, DrafterTrainingConfig
from reprise.spec.eagle_training import training as drafter_training
from reprise.spec.eagle_training.training_data import pack
from tests.support import tiny_run

MODEL = tiny_run.MODEL
TRAINING = DrafterTrainingConfig(learning_rate=0.01, warmup_steps=1)
OPTIONS = DrafterConfig(micro_batches=2, batch_rows=1, row_tokens=32)


def responses():
    """Counting up, modulo 10, from ten prompts of two tokens; 8 to 17 tokens each."""
    found = []
    for i in range(10):
        tokens = 3 + (i + np.arange(8 + i)) % 10
        tokens = tokens.astype(np.int32)
        found.append(Response(str(i), i, tokens[:2], tokens[2:]))
    return found


@pytest.fixture(scope="module")
def params():
    return transformer.init(MODEL, jax.random.key(0))


def offline(params, max_bytes=2**20, **options):
    config = OfflineConfig(OPTIONS, TRAINING, DataBufferConfig(max_bytes=max_bytes))
    start = first_drafter(OPTIONS, TRAINING, MODEL, 0, ())
    settings = {"seed": 0, "temperature": 1.0, "dtype": np.float32} | options
    return OfflineTraining(config, MODEL, params, start, **settings)


def never():
    return False


@pytest.fixture
def computed(monkeypatch):
    """The sequences that hidden states were computed of, a list each time."""
    times = []

    def counting(some, **rest):
        times.append([r.name for r in some])
        return hidden_of(some, **rest)

    monkeypatch.setattr(offline_drafter, "hidden_of", counting)
    return times


def bits(drafter):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(drafter.params)]


def test_states_that_fit_are_computed_once_and_the_drafter_learns(params, computed):
    training, rows = offline(params), []
    before = training.evaluate(responses())
    assert training.train(responses(), 30, never, lambda step, row: rows.append((step, row))) == 30
    assert [step for step, _ in rows] == list(range(1, 31))
    assert len(computed) == 2  # for judging, and for training
    losses = [row["loss"] for _, row in rows]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    after = training.evaluate(responses())
    assert after["loss"] < 0.8 * before["loss"] and after["agreement"] > before["agreement"]

    again = offline(params)
    again.train(responses(), 30, never, lambda step, row: None)
    assert bits(again.drafter) == bits(training.drafter)
    assert bits(offline(params, seed=1).drafter) == bits(offline(params).drafter)
    other = offline(params, seed=1)
    other.train(responses(), 30, never, lambda step, row: None)
    assert bits(other.drafter) != bits(training.drafter)


def test_a_larger_trace_is_gone_through_chunk_by_chunk(params, computed):
    drafter = offline(params).drafter.config
    sizes = {r.name: num_bytes(r, drafter, 4) for r in responses()}
    most_bytes = 3 * max(sizes.values())
    training, held = offline(params, most_bytes), []

    def look(step, row):
        buffer = training.trainer.buffer
        held.append((buffer.num_sequences, buffer.num_bytes))

    assert training.train(responses(), 20, never, look) == 20
    assert len(computed) > 4
    for names in computed:
        assert sum(sizes[n] for n in names) <= most_bytes
    # one chunk at a time is held, whole, and seen for as many steps as it has tokens for
    whole = [(len(names), sum(sizes[n] for n in names)) for names in computed]
    assert set(held) <= set(whole)
    num_tokens = {r.name: len(r.prompt_ids) + len(r.tokens) for r in responses()}
    due = [-(-sum(num_tokens[n] for n in names) // 64) for names in computed]
    assert sum(due[:-1]) < 20 <= sum(due)
    seen = [name for names in computed for name in names]
    assert sorted(seen[:10]) == sorted(sizes) and len(seen) > 10  # an epoch, then others


def test_judging_weighs_entries_alike_however_they_are_packed(params):
    """Against the sequences one a row, in one batch."""
    training = offline(params)
    drafter = training.drafter
    caught = list(hidden_of(responses(), params, MODEL, drafter.config, np.float32))
    rows = [pack([sequence], 1, 32)[0] for sequence in caught]
    batch = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    _, wanted = jax.jit(drafter_training.loss, static_argnums=(0, 1))(
        drafter.config, TRAINING, drafter.params, training._context.frozen, batch, np.float32(1)
    )
    got = training.evaluate(responses())
    assert set(got) == {"loss", "accuracy_top1", "accuracy_top3", "agreement"}
    for name, value in got.items():
        assert value == pytest.approx(float(wanted[name]), rel=1e-5)


def test_it_stops_between_steps_or_while_states_are_computed(params):
    steps = []
    training = offline(params)
    done = training.train(
        responses(), 30, lambda: len(steps) >= 3, lambda step, row: steps.append(step)
    )
    assert (done, steps) == (3, [1, 2, 3])

    asked = []

    def after_two():
        asked.append(None)
        return len(asked) > 2

    fresh = offline(params)
    assert fresh.train(responses(), 30, after_two, lambda step, row: None) == 0
    assert fresh.trainer.buffer.num_sequences == 2

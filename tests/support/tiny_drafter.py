"""A tiny engine's drafter, what it learns from, and its trainer."""

import dataclasses

import jax
import numpy as np
from tiny_team import CONFIG, MODEL, PARAMS

from reprise.rl.drafter_training.config import DrafterConfig
from reprise.rl.drafter_training.trainer import DrafterTrainer
from reprise.rl.engine.engine import Engine
from reprise.rl.speculation.device_drafters import LearnedDrafter
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import DataBufferConfig, DrafterTrainingConfig, TreeConfig
from reprise.spec.eagle.model import EagleWeights
from reprise.spec.eagle_training.training_data import DataBuffer, HiddenStates

TREE = TreeConfig(max_depth=2, top_k=2)
DRAFTER = DrafterConfig(
    max_depth=2,
    top_k=2,
    micro_batches=3,
    batch_rows=1,
    row_tokens=24,
)
TRAINING = DrafterTrainingConfig(learning_rate=0.01, warmup_steps=0)


def make_engine(**options):
    return Engine(MODEL, CONFIG, feature_layers=(), **options)


def make_learned(seed=0):
    config = eagle.config_for(MODEL)
    return LearnedDrafter(EagleWeights(config, eagle.init(config, jax.random.key(seed))), TREE)


def filled_buffer(num_sequences=12, step=1, seed=0):
    buffer, rng = DataBuffer(DataBufferConfig()), np.random.default_rng(seed)
    for _ in range(num_sequences):
        n = int(rng.integers(6, 20))
        tokens = rng.integers(0, MODEL.vocab_size, n).astype(np.int32)
        states = rng.normal(size=(n - 1, MODEL.d_model)).astype(np.float32)
        buffer.add(HiddenStates(tokens, 3, states, 0), step)
    return buffer


def make_trainer(buffer=None, checkpoints=None, **changes):
    buffer = filled_buffer() if buffer is None else buffer
    trainer = DrafterTrainer(
        dataclasses.replace(DRAFTER, **changes),
        TRAINING,
        make_learned(),
        buffer,
        seed=3,
        temperature=1.0,
        checkpoints=checkpoints,
    )
    trainer.begin(1)
    return trainer


def context_at(trainer, engine):
    return trainer.context(engine, engine.place(PARAMS))


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]

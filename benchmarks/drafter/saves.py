"""Delay of training by a save: selective and in the background, against a save of everything.

Ours is `DrafterTrainer.save`: what is trained and the optimizer's state, copied off the device,
then written by a thread while training continues. The other way writes the frozen embedding and
head as well and waits for the disk. Counted is how long the call takes; that training may be
slower while a thread writes is not. Source: TLT, sections 4.2 and 6.4, Figure 17 (a).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.drafter.parts import TRAINING, in_turns, ratio
from benchmarks.workloads import BASE_POLICY
from models import hf
from models.config import ModelConfig
from rl.checkpoint.checkpointer import Checkpointer
from rl.checkpoint.config import CheckpointConfig
from rl.drafter_training.config import DrafterConfig
from rl.drafter_training.trainer import DrafterTrainer
from rl.speculation.learned_drafter import LearnedDrafter
from spec.eagle import model as eagle
from spec.eagle import training as drafter_training
from spec.eagle.config import DataBufferConfig, EagleConfig, TreeConfig
from spec.eagle.data_buffer import DataBuffer
from spec.eagle.model import EagleWeights, SharedParams

# a drafter whose frozen parts are most of it, as those of large vocabularies are
WIDE = ModelConfig(
    architecture="llama",
    vocab_size=32768,
    d_model=1024,
    num_layers=1,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    d_ff=3072,
)


def checkpoint_stall(
    scratch: Path,
    *,
    policies: Mapping[str, ModelConfig] | None = None,
    repeats: int = 5,
) -> dict[str, Any]:
    """Seconds that a save holds training up, the vanilla save's over ours.

    `checkpoint_stall_ratio` is that of the wide drafter, `…_tiny` that of the shipped policy's.
    Files go to `scratch`, which must be on a disk. No save meets the one before.
    """
    if policies is None:
        policies = {"wide": WIDE, "tiny": hf.check(BASE_POLICY)}
    rows = {name: compare_saves(model, scratch / name, repeats) for name, model in policies.items()}
    first, *others = rows
    return {
        "checkpoint_stall_ratio": round(rows[first]["ratio"], 3),
        **{f"checkpoint_stall_ratio_{name}": round(rows[name]["ratio"], 3) for name in others},
        "checkpoint_baseline": (
            "weights, optimizer, and the frozen embedding and head; waits for the disk"
        ),
        "checkpoint_rows": rows,
    }


def compare_saves(model: ModelConfig, scratch: Path, repeats: int) -> dict[str, Any]:
    """Time `DrafterTrainer.save`, the same waiting for the disk, and a save of everything."""
    shape = eagle.config_for(model)
    shapes = (model.vocab_size, model.d_model), (model.d_model, model.vocab_size)
    frozen = SharedParams(*map(_random, shapes))  # as weights are: they do not compress
    selective, waiting, full = (scratch / name for name in ("selective", "waiting", "full"))
    in_time = CheckpointConfig(asynchronous=False)
    with (
        Checkpointer(selective) as in_background,
        Checkpointer(waiting, in_time) as waits,
        Checkpointer(full, in_time) as whole,
    ):
        trainer = _trainer(shape)
        everything = {"drafter": trainer.state, "frozen": frozen}

        def timed(save: Callable[[], None], wait: Callable[[], None]) -> float:
            trainer.step += 1
            began_s = time.perf_counter()
            save()
            held_s = time.perf_counter() - began_s
            wait()
            return held_s

        def by_trainer(checkpoints: Checkpointer) -> float:
            trainer.checkpoints = checkpoints
            return timed(trainer.save, checkpoints.wait)

        def save_everything() -> None:
            whole.save(trainer.step, everything, {"step": trainer.step})

        arms = {
            "selective_background": partial(by_trainer, in_background),
            "selective": partial(by_trainer, waits),
            "everything": partial(timed, save_everything, whole.wait),
        }
        in_turns(arms, 1)  # Orbax starts its threads with the first
        seconds = in_turns(arms, repeats)
    ours = seconds["selective_background"]
    return {
        "ratio": ratio(seconds["everything"], ours),
        "ratio_of_background": ratio(seconds["selective"], ours),
        "seconds": {name: [round(s, 4) for s in found] for name, found in seconds.items()},
        "selective_bytes": _num_bytes(trainer.state),
        "everything_bytes": _num_bytes(everything),
    }


def _trainer(shape: EagleConfig) -> DrafterTrainer:
    learned = LearnedDrafter(
        EagleWeights(shape, eagle.init(shape, jax.random.key(0))), TreeConfig()
    )
    buffer = DataBuffer(DataBufferConfig())
    trainer = DrafterTrainer(DrafterConfig(), TRAINING, learned, buffer, seed=0, temperature=1.0)
    grads = eagle.init(shape, jax.random.key(1))  # moments of zero would compress
    trainer.state, _ = drafter_training.apply(trainer.state, grads, training=TRAINING)
    return trainer


def _random(shape: tuple[int, int]) -> jax.Array:
    return jax.block_until_ready(jax.random.normal(jax.random.key(0), shape, jnp.float32))


def _num_bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))

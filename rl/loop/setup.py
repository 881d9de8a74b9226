"""The parts of a run: opened, laid out on devices and compiled before its first step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models import hf
from models.folder import Folder
from models.sharding import make_mesh
from rl.data.prompts import DataOrder
from rl.learner import critic, trainer
from rl.learner.optimizer import TrainState
from rl.loop import drafter_run, experiment, rollout_setup
from rl.loop.drafter_run import DrafterRun
from rl.loop.experiment import Inputs, TrainConfig
from rl.loop.generation import System
from rl.loop.run_folder import ROLLOUTS
from rl.rewards.pool import RewardPool
from rl.runtime import devices
from rl.runtime.progress import Progress
from rl.runtime.signals import Watch
from rl.runtime.waits import Patience
from rl.speculation.device_drafters import DeviceDrafterSource
from rl.speculation.draft_model import DraftModel
from rl.speculation.reuse import Reuse
from rl.speculation.sources import Speculation
from rl.workers.multi_engine import split_devices
from spec.budget.config import LEARNED, MODEL
from spec.reuse.rollout_cache import RolloutCache


@contextlib.contextmanager
def opened(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    *,
    show: Progress,
    watch: Watch,
    clock: Callable[[], float],
) -> Iterator[tuple[System, TrainState]]:
    """The parts of a run, warm, and its first state; the folder holds what is spilled and timed."""
    with contextlib.ExitStack() as stack:
        mesh = run_mesh(config)
        if mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
        cache = RolloutCache(
            config.rollout.cache_bytes,
            Folder(folder, create=True).folder(ROLLOUTS),
            policy=inputs.shape_name,
            vocab_size=inputs.model.vocab_size,
            epochs=config.reuse.epochs,
        )
        drafter, drafters = None, dict[str, DeviceDrafterSource]()
        if config.speculation.learns:
            start = drafter_run.open_drafter(config, inputs)
            drafter = drafter_run.open_run(config, start, folder, stack, clock, watch.alive)
            drafters[LEARNED] = drafter.trainer.learned
        if config.speculation.asks_model:
            drafters[MODEL] = DraftModel.load(config.draft_model)
        patience = Patience(config.run.hang_limit_s, watch.alive)
        speculation = stack.enter_context(
            Speculation(
                *(config.speculation, cache, drafters, config.tuner),
                seed=config.run.seed,
                patience=patience,
            )
        )
        pool = stack.enter_context(RewardPool(config.reward, tasks=config.task.specs))
        yield build(config, inputs, folder, mesh, pool, cache, speculation, drafter, show, watch)


def build(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    mesh: Mesh | None,
    pool: RewardPool,
    cache: RolloutCache,
    speculation: Speculation,
    drafter: DrafterRun | None,
    show: Progress,
    watch: Watch,
) -> tuple[System, TrainState]:
    """Load the policy, lay out the training state, and compile all that the run can need."""
    recipe = experiment.recipe(config, inputs.model)
    _, params = hf.load_pretrained(inputs.policy, mesh, dtype=jnp.float32)
    reference = jax.tree.map(jnp.copy, params) if config.algorithm.needs_reference else None
    judge = critic.init(params, recipe) if config.algorithm.resolved.needs_critic else None
    state = trainer.init_state(params, trainer.make_optimizer(config.optimizer, recipe.total_steps))
    state = dataclasses.replace(state, critic=judge)
    greedy = config.sampling.temperature == 0
    reuse = Reuse(config.reuse, cache, seed=config.run.seed, greedy=greedy)
    engine = rollout_setup.make_engine(config, inputs, mesh, recipe.trainer.dtype, drafter)
    shape = trainer.batch_shape(recipe, config.longest_tokens)
    weights = trainer.cast_params(state.params, engine.dtype)
    told = partial(_compiled, show, watch, "rollouts")
    rollout_setup.warm_up(config, engine, weights, speculation, folder, told)
    if drafter is not None:
        drafter_run.warm_up(drafter, engine, weights)
    told = partial(_compiled, show, watch, "training")
    state = trainer.warm_up(state, shape, recipe=recipe, told=told)
    order = DataOrder(len(inputs.task), config.run.seed)
    system = System(
        config,
        inputs,
        recipe,
        shape,
        engine,
        cache,
        speculation,
        reuse,
        pool,
        order,
        reference,
        drafter,
        show,
        watch,
    )
    return system, state


def run_mesh(config: TrainConfig) -> Mesh | None:
    """The mesh that a configuration asks for; None where one device serves.

    Raises ValueError where the devices are not those that were asked for, or too many or few.
    """
    available, _ = split_devices(config.sched, devices.found())
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    if sizes == (1, 1, 1) or (len(available) == 1 and sizes == (-1, 1, 1)):
        return None
    if config.sched.mode == "pipeline" and config.mesh.data != -1:
        available = available[: math.prod(sizes)]
    return make_mesh(config.mesh, available)


def _compiled(show: Progress, watch: Watch, what: str, done: int, total: int) -> None:
    """One more program is compiled."""
    watch.alive()
    show.compiling(what, done, total)

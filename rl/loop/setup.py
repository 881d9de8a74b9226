"""A run's parts: made, laid out on devices, and compiled as far as its first step needs it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models import hf
from models.config import ModelConfig
from models.folder import Folder
from models.sharding import make_mesh
from models.transformer import Params
from rl.data.prompts import DataOrder
from rl.engine.engine import Engine, RolloutEngine
from rl.learner import critic, trainer
from rl.learner.config import TrainSpec
from rl.learner.optimizer import TrainState, init_state, make_optimizer
from rl.learner.trainer import Learner
from rl.loop import drafter_run, experiment
from rl.loop.drafter_run import DrafterRun
from rl.loop.experiment import Inputs, TrainConfig
from rl.loop.generation import System
from rl.rewards.pool import RewardPool
from rl.runtime import devices
from rl.runtime.parallel_compile import OnCompiled
from rl.runtime.progress import Progress
from rl.runtime.run_files import MOVES_FILE, ROLLOUTS, ROUNDS_FILE
from rl.runtime.signals import Watch
from rl.runtime.waits import Patience
from rl.speculation.device_drafters import DeviceDrafterSource
from rl.speculation.draft_model import DraftModel
from rl.speculation.reuse import Reuse
from rl.speculation.sources import Speculation
from rl.warm_up import compile_buckets, transfer_times
from rl.warm_up.host_kernels import compile_host_kernels
from rl.warm_up.longer_buckets import LongerBuckets
from rl.warm_up.round_times import load_or_measure
from rl.workers.multi_engine import MultiEngine, make_engines, split_devices
from spec.budget.bandit_budget import node_counts
from spec.budget.budget import DraftDecision, best_trees, equal_trees
from spec.budget.config import BANDIT, LEARNED, MODEL, parse_budget
from spec.reuse.rollout_cache import RolloutCache
from spec.sampling import step_key


@contextlib.contextmanager
def build(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    *,
    show: Progress,
    watch: Watch,
    clock: Callable[[], float],
) -> Iterator[tuple[System, TrainState]]:
    """Make a run's parts, compile what it can need, and yield them with its first state.

    What only longer responses need is left to `System.longer`, where there is one engine.

    `folder` is the run's: what is spilled and timed goes there.
    """
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
        patience = Patience(config.run.hang_limit_s, watch.alive)
        drafter, drafters = _drafters(config, inputs, folder, stack, clock, watch)
        speculation = stack.enter_context(
            Speculation(
                *(config.speculation, cache, drafters, config.tuner),
                seed=config.run.seed,
                patience=patience,
            )
        )
        specs = tuple(dict.fromkeys((*config.task.specs, *inputs.evals.specs)))
        rewards = RewardPool(config.reward, tasks=specs)
        stack.callback(rewards.close)
        rewards.start()  # their processes start while training is traced
        greedy = config.sampling.temperature == 0
        reuse = Reuse(config.reuse, cache, seed=config.run.seed, greedy=greedy)
        learner, state = _learner(config, inputs, mesh)
        engine = _engine(config, inputs, mesh, learner.recipe, drafter)
        eval_engine = _eval_engine(config, inputs, mesh, engine)

        def told(what: str, done: int, total: int) -> None:
            watch.alive()
            show.compiling(what, done, total)

        weights = trainer.cast_params(state.params, engine.dtype)
        training = trainer.lowered(state, learner.shape, recipe=learner.recipe)
        rewards.wait_started()
        heard = partial(told, "training and rollouts")
        longer = _longer_buckets(config, engine, weights, speculation, watch, told)
        _warm_up(config, engine, weights, speculation, folder, heard, training, longer)
        warm_up_evaluation(config, inputs, eval_engine, weights, partial(told, "evaluation"))
        if drafter is not None:
            drafter_run.warm_up(drafter, engine, weights)
        state = trainer.first_run(state, learner.shape, recipe=learner.recipe)
        system = System(
            *(config, inputs, learner, engine, eval_engine, cache, speculation, reuse, rewards),
            *(DataOrder(len(inputs.task), config.run.seed), drafter, longer),
            show=show,
            watch=watch,
        )
        yield system, state


def _drafters(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    stack: contextlib.ExitStack,
    clock: Callable[[], float],
    watch: Watch,
) -> tuple[DrafterRun | None, dict[str, DeviceDrafterSource]]:
    """The training of a learned drafter, if there is one, and all drafters on the device."""
    drafter, drafters = None, dict[str, DeviceDrafterSource]()
    if config.speculation.learns:
        start = drafter_run.open_drafter(config, inputs)
        drafter = drafter_run.open_run(config, start, folder, stack, clock, watch.alive)
        drafters[LEARNED] = drafter.trainer.learned
    if config.speculation.asks_model:
        drafters[MODEL] = DraftModel.load(config.draft_model)
    return drafter, drafters


def _learner(config: TrainConfig, inputs: Inputs, mesh: Mesh | None) -> tuple[Learner, TrainState]:
    """Load the policy and lay out the training state."""
    recipe = experiment.recipe(config, inputs.model)
    _, params = hf.load_pretrained(inputs.policy, mesh, dtype=jnp.float32)
    reference = jax.tree.map(jnp.copy, params) if config.algorithm.needs_reference else None
    values = critic.init(params, recipe) if config.algorithm.resolved.needs_critic else None
    state = init_state(params, make_optimizer(config.optimizer, recipe.total_steps))
    shape = trainer.batch_shape(recipe, config.longest_tokens)
    learner = Learner(recipe, shape, config.sampling, config.run.seed, reference)
    return learner, dataclasses.replace(state, critic=values)


def _engine(
    config: TrainConfig,
    inputs: Inputs,
    mesh: Mesh | None,
    recipe: TrainSpec,
    drafter: DrafterRun | None,
) -> RolloutEngine:
    """One engine on the trainer's devices, or several workers on devices of their own."""
    options: dict[str, Any] = {"dtype": recipe.trainer.dtype}
    if drafter is not None:
        options["feature_layers"] = drafter.trainer.learned.config.feature_layers
    if config.sched.workers == 1 and config.sched.mode == "sync":
        return Engine(inputs.model, config.engine, mesh=mesh, **options)
    engines = make_engines(inputs.model, config.engine, config.sched, **options)
    spot = None if drafter is None else drafter.spot
    limit_s = config.run.hang_limit_s
    return MultiEngine(engines, config.sched, seed=config.run.seed, spot=spot, hang_limit_s=limit_s)


def _eval_engine(
    config: TrainConfig, inputs: Inputs, mesh: Mesh | None, engine: RolloutEngine
) -> RolloutEngine:
    """Rollouts' engine; in a pipeline, whose workers answer the next step meanwhile, another."""
    if config.sched.mode != "pipeline" or not inputs.evals.sets:
        return engine
    return Engine(inputs.model, config.engine, dtype=engine.dtype, mesh=mesh)


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


def _node_sizes(config: TrainConfig) -> compile_buckets.NodeSizes | None:
    """The numbers of nodes that rounds can have, by slots; None: all.

    A bandit has one for each range of batch sizes, so that fewer programs are kept.
    """
    if config.speculation.budget != BANDIT:
        return None
    engine, tuner = config.engine, config.tuner

    def nodes(num_slots: int) -> set[int]:
        sizes, wanted = engine.node_sizes(num_slots), node_counts(tuner, num_slots)
        return {next((m for m in sizes if m >= count), sizes[-1]) for count in wanted if sizes}

    return nodes


def drafted_alone(config: TrainConfig) -> dict[str, compile_buckets.Decisions]:
    """Decisions for rounds in which one drafter alone drafts, on the device, by its name."""
    longest = config.engine.max_nodes - 1
    asked = {LEARNED: longest, MODEL: min(config.draft_model.max_depth, longest)}
    sources, nodes = config.speculation.sources, _node_sizes(config)
    budget, fixed = parse_budget(config.speculation.budget)

    def decisions(most: int, num_slots: int) -> list[DraftDecision]:
        sizes = config.engine.node_sizes(num_slots)
        if nodes is not None:  # a bandit's
            wanted = [m // num_slots - 1 for m in nodes(num_slots)]
        elif budget == "fixed":
            wanted = [min(most, fixed)]
        else:
            return [best_trees(m, num_slots, most) for m in sizes]
        found = (equal_trees(tokens, sizes, num_slots) for tokens in wanted)
        return [decision for decision in found if decision is not None]

    can = {name for name in asked if name in sources and (nodes or len(sources) == 1)}
    return {name: partial(decisions, asked[name]) for name in can if budget not in ("off", "aimd")}


def rollout_reach(config: TrainConfig) -> compile_buckets.Reach:
    """Return what a run's rollouts can reach, but for drafters on the device."""
    pipeline = config.sched.mode == "pipeline"  # evaluated on another engine
    return compile_buckets.Reach(
        config.rollout.num_requests,
        config.rollout.max_prompt_tokens if pipeline else config.longest_prompt_tokens,
        speculative=config.speculation.enabled,
        reuse=config.reuse.enabled,
        moves=config.sched.workers > 1 or pipeline,
        nodes=_node_sizes(config),
        alone=drafted_alone(config),
    )


def num_whole_model(config: TrainConfig, model: ModelConfig) -> int:
    """Return how many programs of rollouts run the whole policy; opens no device."""
    runner, reach = Engine(model, config.engine), rollout_reach(config)
    return compile_buckets.num_whole_model(runner, config.sampling, reach)


def _longer_buckets(
    config: TrainConfig,
    engine: RolloutEngine,
    weights: Params,
    speculation: Speculation,
    watch: Watch,
    told: Callable[[str, int, int], None],
) -> LongerBuckets | None:
    """Return the warm-up in two parts, for one engine without drafters on the device; else None."""
    if not isinstance(engine, Engine) or speculation.drafters:
        return None

    def told_later(done: int, total: int) -> None:
        told("longer responses", done, total)
        watch.check()

    placed, reach = engine.place(weights), rollout_reach(config)
    pool = compile_buckets.Pool(engine, placed, config.sampling, reach)
    return LongerBuckets(pool, watch, told_later)


def _warm_up(
    config: TrainConfig,
    engine: RolloutEngine,
    weights: Params,
    speculation: Speculation,
    folder: Path,
    told: OnCompiled,
    training: Sequence[Any],
    longer: LongerBuckets | None,
) -> None:
    """Compile all that rollouts can need, and time what the budget and the scheduler decide by.

    The lowered steps of `training` are compiled with it: nothing is timed beside a compilation.
    """
    settings = config, engine, weights, speculation, folder, told, training, longer
    engine.do(partial(_warm_up_here, *settings))
    jax.block_until_ready(step_key(0, 0))  # in this thread, under the trainer's mesh


def _warm_up_here(
    config: TrainConfig,
    engine: RolloutEngine,
    weights: Params,
    speculation: Speculation,
    folder: Path,
    told: OnCompiled,
    training: Sequence[Any],
    longer: LongerBuckets | None,
) -> None:
    reach = dataclasses.replace(rollout_reach(config), drafters=speculation.drafters)
    for one in engine.engines:
        placed = one.place(weights)
        if longer is None:
            compile_buckets.warm_up(one, placed, config.sampling, reach, told, training)
        else:
            longer.warm_up(told, training)
        training = ()
    # workers are alike: the last one's times are those of all
    if isinstance(engine, MultiEngine):
        path = folder / MOVES_FILE
        moves = transfer_times.measure(one, placed, config.sampling, reach, path)
        engine.prefer_pool = moves.prefers_copy
    if reach.speculative:
        path, sampling = folder / ROUNDS_FILE, config.sampling
        most = None if longer is None else longer.most_positions
        speculation.times = load_or_measure(path, one, placed, sampling, reach, most)
        compile_host_kernels(
            config.speculation,
            speculation.times,
            one,
            placed,
            sampling,
            speculation.drafters,
            config.tuner,
        )


def warm_up_evaluation(
    config: TrainConfig, inputs: Inputs, engine: RolloutEngine, weights: Params, told: OnCompiled
) -> None:
    """Compile what evaluations need and the engine's rollouts do not: more slots, or all of it."""
    num_requests = inputs.evals.num_questions * config.eval.samples
    slots = config.engine.slot_bucket
    reached = config.rollout.num_requests if engine.engines[0].longest_tokens else 0
    if not num_requests or (reached and slots(num_requests) <= slots(reached)):
        return
    reach = compile_buckets.Reach(
        num_requests, config.longest_prompt_tokens, moves=isinstance(engine, MultiEngine)
    )

    def compile_here() -> None:
        for one in engine.engines:
            compile_buckets.warm_up(one, one.place(weights), config.sampling, reach, told)

    engine.do(compile_here)

"""A run's parts: made, laid out on devices, and compiled as far as its first step needs it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models import hf
from models.config import ModelConfig
from models.folder import Folder
from models.sharding import make_mesh
from models.transformer import Params
from rl.cluster.lockstep import LockstepWatch
from rl.cluster.processes import ALONE, Processes
from rl.data.prompts import DataOrder
from rl.engine.engine import Engine, RolloutEngine, ThreadedEngine
from rl.learner import critic, trainer
from rl.learner.config import TrainSpec
from rl.learner.gathering import own_part
from rl.learner.optimizer import TrainState, init_state, make_optimizer
from rl.learner.trainer import Learner
from rl.loop import drafter_run, experiment, ray_workers
from rl.loop.drafter_run import DrafterRun
from rl.loop.exchange import WHOLE, Shares
from rl.loop.experiment import Inputs, TrainConfig
from rl.loop.generation import System, rollout_weights
from rl.loop.ray_workers import RayWorkers
from rl.loop.rewards import open_rewards
from rl.rewards.pool import RewardPool
from rl.rewards.scores import Rewards
from rl.runtime import devices
from rl.runtime.parallel_compile import OnCompiled
from rl.runtime.progress import Progress
from rl.runtime.run_files import MOVES_FILE, ROLLOUTS, ROUNDS_FILE, spill_folder
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
from sched.simulator.measured_costs import MeasuredCosts
from spec.budget.bandit_budget import node_counts
from spec.budget.budget import DraftDecision, best_trees, equal_trees
from spec.budget.config import BANDIT, LEARNED, MODEL, parse_budget
from spec.config import SamplingConfig
from spec.reuse.rollout_cache import RolloutCache
from spec.sampling import step_key


def remove_other_spills(run: Folder, num_processes: int) -> None:
    """Delete what processes of an earlier leg have spilled that this one has not."""
    own = [spill_folder(index) for index in range(num_processes)]
    for name in run.names():
        if name.startswith(f"{ROLLOUTS}_") and name not in own:
            run.remove(name)


def _shares(config: TrainConfig, processes: Processes) -> Shares:
    """Return the way in which processes share out rollouts; process 0 has the workers on Ray."""
    by_first = config.cluster.kind == "ray"
    return Shares(processes, by_first or config.cluster.rollouts == "local", by_first)


@contextlib.contextmanager
def build(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    *,
    show: Progress,
    watch: Watch,
    clock: Callable[[], float],
    processes: Processes = ALONE,
) -> Iterator[tuple[System, TrainState]]:
    """Make a run's parts, compile what it can need, and yield them with its first state.

    What only longer responses need is left to `System.longer`, where there is one engine.

    `folder` is the run's: what is spilled and timed goes there.
    """
    with contextlib.ExitStack() as stack:
        mesh = run_mesh(config)
        if mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
        shares = _shares(config, processes)
        run = Folder(folder, create=True)
        if processes.is_first:
            remove_other_spills(run, processes.count)
        cache = RolloutCache(
            config.rollout.cache_bytes,
            run.folder(spill_folder(processes.index)),
            policy=inputs.shape_name,
            vocab_size=inputs.model.vocab_size,
            epochs=config.reuse.epochs,
        )
        patience = Patience(config.run.hang_limit_s, watch.alive)
        drafter, drafters = _drafters(config, inputs, folder, mesh, stack, clock, watch, shares)
        speculation = stack.enter_context(
            Speculation(
                *(config.speculation, cache, drafters, config.tuner),
                seed=config.run.seed,
                patience=patience,
            )
        )
        specs = tuple(dict.fromkeys((*config.task.specs, *inputs.evals.specs)))
        opened = open_rewards(config, specs, show.message)
        rewards: Rewards | None = None
        if not shares.scores_any:
            rewards = RewardPool(config.reward, specs)  # nothing is given to it, nor started
        elif not config.cluster.scorers:
            rewards = stack.enter_context(opened)
        greedy = config.sampling.temperature == 0
        reuse = Reuse(config.reuse, cache, seed=config.run.seed, greedy=greedy)
        learner, state = _learner(config, inputs, mesh)
        workers, on_ray = None, config.cluster.kind == "ray"
        if on_ray:
            speculation.for_others = True
        if on_ray and processes.is_first:
            ours = learner.recipe.trainer.dtype, speculation, drafter, show.message
            workers = stack.enter_context(ray_workers.open_workers(config, inputs, *ours))
        if rewards is None:
            rewards = stack.enter_context(opened)  # scorers are actors of the Ray that is there now
        if on_ray:
            processes.barrier("workers on Ray", watch.alive)
        lockstep = _lockstep(shares, stack)
        engine = _engine(config, inputs, mesh, learner.recipe, drafter, workers, shares, lockstep)
        eval_engine = _eval_engine(config, inputs, mesh, engine, shares)

        def told(what: str, done: int, total: int) -> None:
            watch.alive()
            show.compiling(what, done, total)

        weights = rollout_weights(state.params, engine, shares)
        training = trainer.lowered(state, learner.shape, recipe=learner.recipe)
        rewards.wait_started()
        heard = partial(told, "training and rollouts")
        reach = rollout_reach(config, shares)
        # several processes leave together: not in the middle of what each compiles
        sign = watch.check if processes.alone else watch.alive
        settings = engine, weights, config.sampling, speculation, reach, watch, told, sign
        longer = None if on_ray else engine.do(partial(_longer_buckets, *settings))
        if workers is not None:
            bounds = ray_workers.bounds(config, inputs, reach, drafter)
            workers.warm_up(bounds, weights, folder, training, heard, watch.alive)
        elif on_ray:
            compile_buckets.compile_programs(engine.engines[0], (), heard, training)
        else:
            kept = Kept(folder, processes)
            _warm_up(config, engine, weights, speculation, reach, kept, heard, training, longer)
        if not on_ray or eval_engine is not engine:
            told_evaluation = partial(told, "evaluation")
            warm_up_evaluation(config, inputs, eval_engine, weights, told_evaluation, shares)
        if drafter is not None:
            drafter_run.warm_up(drafter, engine, weights)
        # a collective does not wait for as long as a compilation may take
        processes.barrier("compiled", watch.alive)
        if on_ray:
            ray_workers.read_times(speculation, folder)  # which the workers have measured
        state = trainer.first_run(state, learner.shape, recipe=learner.recipe)
        system = System(
            *(config, inputs, learner, engine, eval_engine, cache, speculation, reuse, rewards),
            *(DataOrder(len(inputs.task), config.run.seed), drafter, longer, shares),
            show=show,
            watch=watch,
        )
        yield system, state


def _drafters(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    mesh: Mesh | None,
    stack: contextlib.ExitStack,
    clock: Callable[[], float],
    watch: Watch,
    shares: Shares,
) -> tuple[DrafterRun | None, dict[str, DeviceDrafterSource]]:
    """The training of a learned drafter, if there is one, and all drafters on the device."""
    drafter, drafters = None, dict[str, DeviceDrafterSource]()
    home, elsewhere = None, config.cluster.kind == "ray"
    if config.speculation.learns:
        start = drafter_run.open_drafter(config, inputs)
        if elsewhere:
            options: dict[str, Any] = {"feature_layers": start.config.feature_layers}
            dtype = experiment.recipe(config, inputs.model).trainer.dtype
            home = Engine(inputs.model, config.engine, mesh=mesh, dtype=dtype, **options)
        given = stack, clock, watch.alive, shares, home
        drafter = drafter_run.open_run(config, start, folder, *given)
        drafters[LEARNED] = drafter.trainer.learned
    if config.speculation.asks_model:
        read = DraftModel.elsewhere if elsewhere else DraftModel.load
        drafters[MODEL] = read(config.draft_model)
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
    workers: RayWorkers | None,
    shares: Shares,
    lockstep: LockstepWatch | None,
) -> RolloutEngine:
    """One engine on the trainer's devices, or several workers on devices of their own.

    Of several processes each may have its own, on its devices.
    """
    if workers is not None:
        return workers.engine
    if shares.by_first and not shares.processes.is_first:
        return Engine(inputs.model, config.engine, dtype=recipe.trainer.dtype)  # never asked
    options: dict[str, Any] = {"dtype": recipe.trainer.dtype}
    if drafter is not None:
        options["feature_layers"] = drafter.trainer.learned.config.feature_layers
    if config.sched.workers == 1 and config.sched.mode == "sync":
        if shares.splits and not shares.processes.alone:
            return _own_engine(config, inputs, mesh, **options)
        return Engine(inputs.model, config.engine, mesh=mesh, lockstep=lockstep, **options)
    engines = make_engines(inputs.model, config.engine, config.sched, **options)
    spot = None if drafter is None else drafter.spot
    limit_s = config.run.hang_limit_s
    return MultiEngine(engines, config.sched, seed=config.run.seed, spot=spot, hang_limit_s=limit_s)


def _own_engine(
    config: TrainConfig, inputs: Inputs, mesh: Mesh | None, **options: Any
) -> ThreadedEngine:
    """An engine on this process's devices of the trainer's mesh, which has those of others too.

    Weights that come from a mesh are bound to a device: so is all else.
    """
    assert mesh is not None
    part = own_part(mesh)
    place: dict[str, Any] = {"mesh": part} if isinstance(part, Mesh) else {"device": part}
    return ThreadedEngine(inputs.model, config.engine, **place, **options)


def _lockstep(shares: Shares, stack: contextlib.ExitStack) -> LockstepWatch | None:
    """The watch over what processes launch together, where one engine spans several."""
    processes = shares.processes
    if processes.alone or shares.splits:
        return None
    return stack.enter_context(LockstepWatch(processes, lambda text: processes.end(text)))


def _eval_engine(
    config: TrainConfig,
    inputs: Inputs,
    mesh: Mesh | None,
    engine: RolloutEngine,
    shares: Shares,
) -> RolloutEngine:
    """Rollouts' engine; in a pipeline, whose workers answer the next step meanwhile, another."""
    if config.sched.mode != "pipeline" or not inputs.evals.sets:
        return engine
    if not shares.processes.alone:
        return _own_engine(config, inputs, mesh, dtype=engine.dtype)
    return Engine(inputs.model, config.engine, dtype=engine.dtype, mesh=mesh)


def run_mesh(config: TrainConfig) -> Mesh | None:
    """The mesh that a configuration asks for; None where one device serves.

    It spans devices of all processes, as many of each. Raises ValueError where the devices are not
    those that were asked for, or too many or few.
    """
    of_processes: dict[int, list[jax.Device]] = {}
    for device in devices.found():
        of_processes.setdefault(device.process_index, []).append(device)
    rows: list[Sequence[jax.Device]] = list(of_processes.values())
    if config.cluster.kind != "ray":  # whose workers have devices of their own
        rows = [split_devices(config.sched, row)[0] for row in rows]
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    here = jax.process_count() == 1
    if here and (sizes == (1, 1, 1) or (len(rows[0]) == 1 and sizes == (-1, 1, 1))):
        return None
    if config.sched.mode == "pipeline" and config.mesh.data != -1:
        each = math.ceil(math.prod(sizes) / len(rows))
        rows = [row[:each] for row in rows]
    return make_mesh(config.mesh, [device for row in rows for device in row])


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


def _no_nodes(num_slots: int) -> set[int]:
    """Return the numbers of nodes of rounds without drafts beside the plain one."""
    return set()


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


def rollout_reach(config: TrainConfig, shares: Shares = WHOLE) -> compile_buckets.Reach:
    """Return what a process's rollouts can reach, but for drafters on the device."""
    pipeline = config.sched.mode == "pipeline"  # evaluated on another engine
    return compile_buckets.Reach(
        shares.most_groups(config.rollout.prompts_per_step) * config.rollout.group_size,
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
    engine: RolloutEngine,
    weights: Params,
    sampling: SamplingConfig,
    speculation: Speculation,
    reach: compile_buckets.Reach,
    watch: Watch,
    told: Callable[[str, int, int], None],
    sign: Callable[[], object],
) -> LongerBuckets | None:
    """Return the warm-up in two parts, for one engine without drafters on the device; else None.

    `sign` is called as programs of the second part are compiled, and may raise.
    """
    if not isinstance(engine, Engine) or speculation.drafters:
        return None

    def told_later(done: int, total: int) -> None:
        told("longer responses", done, total)
        sign()

    pool = compile_buckets.Pool(engine, engine.place(weights), sampling, reach)
    return LongerBuckets(pool, watch, told_later)


class Kept(NamedTuple):
    """The folder of a run's tables of seconds, and the processes that decide by them."""

    folder: Path
    processes: Processes


def _warm_up(
    config: TrainConfig,
    engine: RolloutEngine,
    weights: Params,
    speculation: Speculation,
    reach: compile_buckets.Reach,
    kept: Kept,
    told: OnCompiled,
    training: Sequence[Any],
    longer: LongerBuckets | None,
) -> None:
    """Compile all that rollouts can need, and time what the budget and the scheduler decide by.

    The lowered steps of `training` are compiled with it: nothing is timed beside a compilation.
    """
    settings = config, engine, weights, speculation, reach, kept, told, training, longer
    engine.do(partial(_warm_up_here, *settings))
    engine.do(lambda: jax.block_until_ready(step_key(0, 0)))


def _warm_up_here(
    config: TrainConfig,
    engine: RolloutEngine,
    weights: Params,
    speculation: Speculation,
    reach: compile_buckets.Reach,
    kept: Kept,
    told: OnCompiled,
    training: Sequence[Any],
    longer: LongerBuckets | None,
) -> None:
    reach = dataclasses.replace(reach, drafters=speculation.drafters)
    for one in engine.engines:
        placed = one.place(weights)
        if longer is None:
            compile_buckets.warm_up(one, placed, config.sampling, reach, told, training)
        else:
            longer.warm_up(told, training)
        training = ()
    # workers are alike: the last one's times are those of all
    if isinstance(engine, MultiEngine):
        path = kept.folder / MOVES_FILE
        settings = one, placed, config.sampling, reach, path
        moves = transfer_times.measure(*settings, processes=kept.processes)
        engine.prefer_pool = moves.prefers_copy
    if reach.speculative or config.sched.measures_rounds:
        path, sampling = kept.folder / ROUNDS_FILE, config.sampling
        most = None if longer is None else longer.most_positions
        timed = reach if reach.speculative else dataclasses.replace(reach, nodes=_no_nodes)
        measured = path, one, placed, sampling, timed, most
        times = load_or_measure(*measured, processes=kept.processes)
    if isinstance(engine, MultiEngine) and config.sched.measures_rounds:
        engine.costs = MeasuredCosts(times.rounds, moves.seconds)
    if reach.speculative:
        speculation.times = times
        compile_host_kernels(
            config.speculation,
            times,
            one,
            placed,
            sampling,
            speculation.drafters,
            config.tuner,
        )


def warm_up_evaluation(
    config: TrainConfig,
    inputs: Inputs,
    engine: RolloutEngine,
    weights: Params,
    told: OnCompiled,
    shares: Shares = WHOLE,
) -> None:
    """Compile what evaluations need and the engine's rollouts do not: more slots, or all of it."""
    num_requests = shares.most_groups(inputs.evals.num_questions) * config.eval.samples
    slots = config.engine.slot_bucket
    reached = shares.most_groups(config.rollout.prompts_per_step) * config.rollout.group_size
    reached = reached if engine.engines[0].longest_tokens else 0
    if not num_requests or (reached and slots(num_requests) <= slots(reached)):
        return
    reach = compile_buckets.Reach(
        num_requests, config.longest_prompt_tokens, moves=isinstance(engine, MultiEngine)
    )

    def compile_here() -> None:
        for one in engine.engines:
            compile_buckets.warm_up(one, one.place(weights), config.sampling, reach, told)

    engine.do(compile_here)

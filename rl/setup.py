"""A run's parts: made, laid out on devices, and compiled as far as its first step needs it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models import hf
from models.config import ModelConfig
from models.folder import Folder
from models.sharding import make_mesh, rollout_mesh
from models.transformer import Params
from rl import drafter_run, drafting_run, first_programs
from rl.cluster.actors import ActorSettings
from rl.cluster.lockstep import LockstepWatch
from rl.cluster.processes import ALONE, Processes
from rl.config import TrainConfig, drafter_shape, recipe
from rl.data.prompts import DataOrder
from rl.drafter_run import AnyDrafter, DrafterRun
from rl.engine.engine import Engine, RolloutEngine, ThreadedEngine
from rl.inputs import Inputs
from rl.learner import critic, trainer
from rl.learner.config import TrainSpec
from rl.learner.gathering import own_devices
from rl.learner.optimizer import TrainState, init_state, make_optimizer
from rl.learner.trainer import Learner
from rl.responses import Partition
from rl.rewards.pool import RewardPool
from rl.rewards.scorers import Scorers
from rl.rewards.scores import Rewards
from rl.runtime import devices
from rl.runtime.progress import Progress
from rl.runtime.run_files import ROLLOUTS, spill_folder
from rl.runtime.signals import Watch
from rl.runtime.waits import Patience
from rl.speculation.device_drafters import DeviceDrafterSource
from rl.speculation.draft_model import DraftModel
from rl.speculation.reuse import Reuse
from rl.speculation.sources import Speculation
from rl.system import System
from rl.warm_up import compile_buckets
from rl.warm_up.longer_buckets import LongerBuckets
from rl.workers.ahead_engine import AheadEngine
from rl.workers.multi_engine import MultiEngine, make_engines, split_devices
from spec.budget.config import LEARNED, MODEL
from spec.reuse.rollout_cache import RolloutCache

if TYPE_CHECKING:
    from rl.ray_run import RayWorkers


def remove_other_spills(run: Folder, num_processes: int) -> None:
    """Delete what processes of an earlier leg have spilled that this one has not."""
    own = [spill_folder(index) for index in range(num_processes)]
    for name in run.names():
        if name.startswith(f"{ROLLOUTS}_") and name not in own:
            run.remove(name)


def _partition(config: TrainConfig, processes: Processes) -> Partition:
    """Return the way in which processes share out rollouts; process 0 has the workers on Ray."""
    is_central = config.cluster.kind == "ray"
    return Partition(processes, is_central or config.cluster.rollouts == "local", is_central)


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
        partition = _partition(config, processes)
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
        drafter, drafters = _drafters(config, inputs, folder, mesh, stack, clock, watch, partition)
        speculation = stack.enter_context(
            Speculation(
                *(config.speculation, cache, drafters, config.tuner),
                seed=config.run.seed,
                patience=patience,
            )
        )
        specs = tuple(dict.fromkeys((*config.task.specs, *inputs.evals.specs)))
        opened = _open_rewards(config, specs, show.message)
        rewards: Rewards | None = None
        if not partition.scores_any:
            rewards = RewardPool(config.reward, specs)  # nothing is given to it, nor started
        elif not config.cluster.scorers:
            rewards = stack.enter_context(opened)
        greedy = config.sampling.temperature == 0
        reuse = Reuse(config.reuse, cache, seed=config.run.seed, greedy=greedy)
        learner, state = _learner(config, inputs, mesh)
        dtype = learner.recipe.trainer.dtype
        workers, on_ray = None, config.cluster.kind == "ray"
        if on_ray:
            speculation.for_others = True
            if config.drafting.workers:
                speculation.apart_elsewhere = frozenset({MODEL})
        if on_ray and processes.is_first:
            from rl import ray_run

            ours = dtype, speculation, drafter, show.message
            workers = stack.enter_context(ray_run.open_workers(config, inputs, *ours))
            builder = ray_run.open_history(config, cache, show.message)
            speculation.history_workers = stack.enter_context(builder)
        if rewards is None:
            rewards = stack.enter_context(opened)  # scorers are actors of the Ray that is there now
        if on_ray:
            processes.barrier("workers on Ray", watch.alive)
        lockstep = _lockstep(partition, stack)
        engine = _engine(config, inputs, mesh, dtype, drafter, workers, partition, lockstep)
        apart = drafting_run.take_workers(config, engine, speculation, clock, show.message)
        if apart is not None:
            stack.enter_context(apart)
        eval_engine = _eval_engine(config, inputs, mesh, engine, partition)
        system = System(
            *(config, inputs, learner, engine, eval_engine, cache, speculation, reuse, rewards),
            *(DataOrder(len(inputs.task), config.run.seed), drafter, None, partition, apart),
            show=show,
            watch=watch,
        )
        longer = _compile(system, state, folder, workers)
        state = trainer.first_run(state, learner.shape, recipe=learner.recipe)
        yield dataclasses.replace(system, longer=longer), state


@contextlib.contextmanager
def _open_rewards(
    config: TrainConfig, tasks: Sequence[str], say: Callable[[str], None]
) -> Iterator[Rewards]:
    """Start reward workers without waiting for them, and end them at the end.

    With `Cluster.scorers` they are actors of Ray, which is open (`rl.ray_run.open_workers`).
    """
    with contextlib.ExitStack() as stack:
        rewards: Rewards
        if count := config.cluster.scorers:
            from rl.cluster.ray_session import reserve

            limit_s, cpus = config.cluster.deadline_s, config.reward.workers
            setting = f"Cluster.scorers={count} of Reward.workers={cpus}"
            room = stack.enter_context(reserve(count, setting, 2 * limit_s, cpus=cpus))
            settings = ActorSettings({}, limit_s, 2 * limit_s, say)
            rewards = Scorers(config.reward, tasks, count, room, settings)
        else:
            rewards = RewardPool(config.reward, tasks)
        stack.callback(rewards.close)
        rewards.start()  # their processes start while training is traced
        yield rewards


def _compile(
    system: System, state: TrainState, folder: Path, workers: RayWorkers | None
) -> LongerBuckets | None:
    """Compile training, rollouts and evaluation; return what waits until the first step is done."""
    config, inputs, watch, partition = system.config, system.inputs, system.watch, system.partition
    engine, speculation, processes = system.engine, system.speculation, system.processes

    def told(what: str, done: int, total: int) -> None:
        watch.alive()
        system.show.compiling(what, done, total)

    weights, learner = system.weights(state.params), system.learner
    training = trainer.lowered(state, learner.shape, recipe=learner.recipe)
    system.rewards.wait_started()
    heard = partial(told, "training and rollouts")
    reach = first_programs.rollout_reach(config, partition)
    longer, on_ray = None, config.cluster.kind == "ray"
    if on_ray:
        from rl import ray_run
    if workers is not None:
        bounds = ray_run.bounds(config, inputs, reach, system.drafter)
        workers.warm_up(bounds, weights, folder, training, heard, watch.alive)
    elif not partition.scores_any:  # another process speaks with the workers
        compile_buckets.compile_programs(engine.engines[0], (), heard, training)
    else:
        # several processes leave together: not in the middle of what each compiles
        sign = watch.check if processes.alone else watch.alive
        settings = engine, weights, config.sampling, speculation, reach, watch, told, sign
        longer = engine.do(partial(first_programs.longer_buckets, *settings))
        kept = first_programs.Kept(folder, processes, system.drafting)
        given = engine, weights, speculation, reach, kept, heard, training, longer
        engine.do(partial(first_programs.warm_up, config, *given))
    if not on_ray or system.eval_engine is not engine:
        evaluated = weights
        if system.eval_engine is not engine and (processes.alone or not partition.is_central):
            evaluated = system.evaluated(state.params)  # laid out by other programs
        asked = evaluated, partial(told, "evaluation"), partition
        first_programs.warm_up_evaluation(config, inputs, system.eval_engine, *asked)
    if system.drafter is not None:
        system.drafter.warm_up(engine, weights)
    # a collective does not wait for as long as a compilation may take
    processes.barrier("compiled", watch.alive)
    if on_ray:
        ray_run.read_times(speculation, folder)  # which the workers have measured
    return longer


def _drafters(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    mesh: Mesh | None,
    stack: contextlib.ExitStack,
    clock: Callable[[], float],
    watch: Watch,
    partition: Partition,
) -> tuple[AnyDrafter | None, dict[str, DeviceDrafterSource]]:
    """The training of a learned drafter, if there is one, and all drafters on the device."""
    drafter: AnyDrafter | None = None
    drafters, elsewhere = dict[str, DeviceDrafterSource](), config.cluster.kind == "ray"

    def opened(home: Engine | None = None) -> DrafterRun:
        start = drafter_run.open_drafter(config, inputs)
        given = stack, clock, watch.alive, partition, home
        return drafter_run.open_run(config, start, folder, *given)

    if config.speculation.learns:
        if not partition.scores_any:
            drafter = drafter_run.open_stub(config, inputs)
        elif elsewhere:
            home = _home(config, inputs, mesh, partition)
            drafter = home.do(partial(opened, home))
        else:
            drafter = opened()
        drafters[LEARNED] = drafter.learned
    if config.speculation.asks_model:
        read = DraftModel.elsewhere if elsewhere else DraftModel.load
        drafters[MODEL] = read(config.draft_model)
    return drafter, drafters


def _home(config: TrainConfig, inputs: Inputs, mesh: Mesh | None, partition: Partition) -> Engine:
    """The trainer's devices for a drafter of workers elsewhere; of several processes this one's."""
    shape = drafter_shape(config, inputs.model)
    assert shape is not None, "it is asked where a drafter learns"
    dtype = recipe(config, inputs.model).trainer.dtype
    options: dict[str, Any] = {"dtype": dtype, "feature_layers": shape.feature_layers}
    if partition.processes.alone:
        return Engine(inputs.model, config.engine, mesh=mesh, **options)
    return _own_engine(config, inputs, mesh, **options)


def _learner(config: TrainConfig, inputs: Inputs, mesh: Mesh | None) -> tuple[Learner, TrainState]:
    """Load the policy and lay out the training state."""
    spec = recipe(config, inputs.model)
    _, params = hf.load_pretrained(inputs.policy, mesh, dtype=jnp.float32)
    reference = _reference(params, spec) if config.algorithm.needs_reference else None
    values = critic.init(params, spec) if config.algorithm.resolved.needs_critic else None
    state = init_state(params, make_optimizer(config.optimizer, spec.total_steps))
    shape = trainer.batch_shape(spec, config.longest_tokens)
    learner = Learner(spec, shape, config.sampling, config.run.seed, reference)
    return learner, dataclasses.replace(state, critic=values)


def _reference(params: Params, recipe: TrainSpec) -> Params:
    """Return a copy in the dtype of products, to which its weights would be rounded in any case."""
    found = trainer.cast_params(params, recipe.trainer.dtype)
    return jax.tree.map(jnp.copy, found) if found is params else found


def _engine(
    config: TrainConfig,
    inputs: Inputs,
    mesh: Mesh | None,
    dtype: Any,
    drafter: AnyDrafter | None,
    workers: RayWorkers | None,
    partition: Partition,
    lockstep: LockstepWatch | None,
) -> RolloutEngine:
    """One engine on the trainer's devices, or several workers on devices of their own.

    Of several processes each may have its own, on its devices.
    """
    if workers is not None:
        return workers.engine
    if not partition.scores_any:  # another process speaks with the workers
        shapes = Engine(inputs.model, config.engine, dtype=dtype)
        return MultiEngine([shapes], config.sched, places=())
    options: dict[str, Any] = {"dtype": dtype}
    if drafter is not None:
        options["feature_layers"] = drafter.learned.config.feature_layers
    if config.sched.workers == 1 and config.sched.mode == "sync":
        if partition.splits and not partition.processes.alone:
            return _own_engine(config, inputs, mesh, **options)
        layout = engine_mesh(config, inputs.model, mesh)
        return Engine(inputs.model, config.engine, mesh=layout, lockstep=lockstep, **options)
    engines = make_engines(inputs.model, config.engine, config.sched, **options)
    spot = None if drafter is None else drafter.spot
    limit_s = config.run.hang_limit_s
    kind = AheadEngine if config.sched.mode == "ahead" else MultiEngine
    return kind(engines, config.sched, seed=config.run.seed, spot=spot, hang_limit_s=limit_s)


def _own_engine(
    config: TrainConfig, inputs: Inputs, mesh: Mesh | None, **options: Any
) -> ThreadedEngine:
    """An engine on this process's devices of the trainer's mesh, which has those of others too.

    Weights that come from a mesh are bound to a device: so is all else.
    """
    assert mesh is not None
    part = engine_mesh(config, inputs.model, mesh, own=True)
    assert part is not None
    place: dict[str, Any] = {"mesh": part} if part.size > 1 else {"device": part.devices.item()}
    return ThreadedEngine(inputs.model, config.engine, **place, **options)


def _lockstep(partition: Partition, stack: contextlib.ExitStack) -> LockstepWatch | None:
    """The watch over what processes launch together, where one engine spans several."""
    processes = partition.processes
    if processes.alone or partition.splits:
        return None
    return stack.enter_context(LockstepWatch(processes, lambda text: processes.end(text)))


def _eval_engine(
    config: TrainConfig,
    inputs: Inputs,
    mesh: Mesh | None,
    engine: RolloutEngine,
    partition: Partition,
) -> RolloutEngine:
    """Rollouts' engine; where its workers begin or answer the next step meanwhile, another.

    Where process 0 answers for all, it alone has one.
    """
    if not config.sched.beside_training or not inputs.evals.sets or not partition.scores_any:
        return engine
    if not partition.processes.alone:
        return _own_engine(config, inputs, mesh, dtype=engine.dtype)
    layout = engine_mesh(config, inputs.model, mesh)
    return Engine(inputs.model, config.engine, dtype=engine.dtype, mesh=layout)


def engine_mesh(
    config: TrainConfig, model: ModelConfig, mesh: Mesh | None, *, own: bool = False
) -> Mesh | None:
    """Return the mesh of an engine that has the trainer's devices: all, or a process's `own`.

    Raises ValueError where `Mesh.rollout_tensor` does not fit them or the policy.
    """
    if mesh is None:
        return None
    chosen = own_devices(mesh) if own else list(mesh.devices.flat)
    ways, asked = config.mesh.fsdp * config.mesh.tensor, config.mesh.rollout_tensor
    return rollout_mesh(chosen, model.num_kv_heads, ways, asked)


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
    if config.sched.beside_training and config.mesh.data != -1:
        each = math.ceil(math.prod(sizes) / len(rows))
        rows = [row[:each] for row in rows]
    return make_mesh(config.mesh, [device for row in rows for device in row])

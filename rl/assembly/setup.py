"""Construction of the parts of a run, their layout on devices, and compilation for step one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from reprise.models import hf, lora
from reprise.models.config import ModelConfig
from reprise.models.folder import Folder
from reprise.models.layout import axis_ways
from reprise.models.sharding import make_mesh, platform_in_use, rollout_mesh
from reprise.models.transformer import Params
from reprise.rl.assembly import first_programs
from reprise.rl.assembly.listeners import StepListener
from reprise.rl.assembly.system import System
from reprise.rl.cluster.lockstep import LockstepWatch
from reprise.rl.cluster.processes import ALONE, Processes
from reprise.rl.data.prompts import DataOrder
from reprise.rl.engine.engine import Engine, RolloutEngine, ThreadedEngine
from reprise.rl.exchange.responses import Partition
from reprise.rl.learner import critic, trainer
from reprise.rl.learner.config import TrainSpec, why_other_bits, why_other_bits_on_accelerators
from reprise.rl.learner.gathering import own_devices
from reprise.rl.learner.optimizer import TrainState, init_state, make_optimizer
from reprise.rl.learner.trainer import Learner
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.rewards.scores import Rewards
from reprise.rl.runtime import devices
from reprise.rl.runtime.parallel_compile import OnCompiled
from reprise.rl.runtime.progress import Progress
from reprise.rl.runtime.run_files import ROLLOUTS, spill_folder
from reprise.rl.runtime.signals import Watch
from reprise.rl.runtime.waits import Deadline
from reprise.rl.settings.checks import ahead_loss
from reprise.rl.settings.config import TrainConfig, recipe
from reprise.rl.settings.inputs import Inputs
from reprise.rl.speculation.device_drafters import DeviceDrafterSource, DraftModel
from reprise.rl.speculation.reuse import Reuse
from reprise.rl.speculation.sources import Speculation
from reprise.rl.warm_up.rollout_programs import Reach
from reprise.rl.workers.ahead_engine import AheadEngine
from reprise.rl.workers.multi_engine import MultiEngine, make_engines, split_devices
from reprise.spec.budget.config import LEARNED, MODEL
from reprise.spec.reuse.rollout_cache import RolloutCache

if TYPE_CHECKING:
    from reprise.rl.assembly.drafter_run import AnyDrafter, DrafterRun
    from reprise.rl.drafting.workers import DraftingWorkers


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
    """Create the parts of a run, compile its programs, and yield the system and initial state.

    Spilled rollouts and measured times are written to `folder`.
    """
    with contextlib.ExitStack() as stack:
        mesh = run_mesh(config)
        partition = _partition(config, processes)
        if mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
        builder = _builder(config, partition)(
            config=config,
            inputs=inputs,
            folder=folder,
            mesh=mesh,
            show=show,
            watch=watch,
            clock=clock,
            partition=partition,
            stack=stack,
        )
        cache = builder.cache
        drafter = builder.drafter() if config.speculation.learns else None
        drafters = builder.device_drafters(drafter)
        speculation = stack.enter_context(
            Speculation(
                config.speculation,
                cache,
                drafters,
                config.tuner,
                seed=config.run.seed,
                deadline=builder.deadline,
            )
        )
        reuse = Reuse(
            config.reuse,
            cache,
            seed=config.run.seed,
            greedy=config.sampling.temperature == 0,
            seconds=speculation.seconds,
        )
        learner, state = make_learner(config, inputs, mesh)
        engine = builder.engine(learner.recipe.trainer.dtype, speculation, drafter)
        rewards = builder.rewards()
        if partition.is_central:
            processes.barrier("workers", watch.heartbeat)
        builder.drafting = builder.drafting_workers(engine, speculation)
        evaluates_apart = config.sched.beside_training and inputs.evals.sets
        eval_engine = builder.eval_engine(engine.dtype) if evaluates_apart else None
        system = System(
            config=config,
            inputs=inputs,
            learner=learner,
            engine=engine,
            eval_engine=eval_engine or engine,
            cache=cache,
            speculation=speculation,
            reuse=reuse,
            rewards=rewards,
            order=DataOrder(len(inputs.task), config.run.seed),
            drafter=drafter,
            partition=partition,
            listeners=builder.listeners(drafter),
            show=show,
            watch=watch,
        )
        builder.compile(system, state)
        state = trainer.first_run(state, learner.shape, recipe=learner.recipe, base=learner.base)
        yield system, state


def _partition(config: TrainConfig, processes: Processes) -> Partition:
    """Return the partition of rollouts between processes; with Ray, process 0 has all workers."""
    on_ray = config.cluster.kind == "ray"
    return Partition(processes, on_ray or config.cluster.rollouts == "local", on_ray)


def _builder(config: TrainConfig, partition: Partition) -> type[RunBuilder]:
    if config.cluster.kind != "ray" and partition.scores_any:
        return RunBuilder
    from reprise.rl.assembly import ray_run

    return ray_run.RayRunBuilder if partition.scores_any else ray_run.FollowerBuilder


@dataclasses.dataclass(eq=False)
class RunBuilder:
    """A builder of the parts of a run with workers in this program."""

    config: TrainConfig
    inputs: Inputs
    folder: Path
    mesh: Mesh | None
    show: Progress
    watch: Watch
    clock: Callable[[], float]
    partition: Partition
    stack: contextlib.ExitStack
    drafting: DraftingWorkers | None = None  # on engines of this program

    @property
    def deadline(self) -> Deadline:
        return Deadline(self.config.run.hang_limit_s, self.watch.heartbeat)

    @functools.cached_property
    def cache(self) -> RolloutCache:
        """Return the response cache; delete spill folders of processes that no longer exist."""
        config = self.config
        processes = self.partition.processes
        run = Folder(self.folder, create=True)
        own = [spill_folder(index) for index in range(processes.count)]
        for name in run.names() if processes.is_first else ():
            if name.startswith(f"{ROLLOUTS}_") and name not in own:
                run.remove(name)
        return RolloutCache(
            config.rollout.cache_bytes,
            run.folder(spill_folder(processes.index)),
            policy=self.inputs.shape_name,
            vocab_size=self.inputs.model.vocab_size,
            epochs=config.reuse.epochs,
        )

    # -- drafters -------------------------------------------------------------------------

    def drafter(self) -> AnyDrafter:
        """Set up training of the learned drafter."""
        return self._open_drafter()

    def device_drafters(self, drafter: AnyDrafter | None) -> dict[str, DeviceDrafterSource]:
        """Return the on-device draft sources by name."""
        drafters = dict[str, DeviceDrafterSource]()
        if drafter is not None:
            drafters[LEARNED] = drafter.learned
        if self.config.speculation.asks_model:
            drafters[MODEL] = self.draft_model()
        return drafters

    def draft_model(self) -> DraftModel:
        return DraftModel.load(self.config.draft_model)

    def _open_drafter(self, trainer_engine: Engine | None = None) -> DrafterRun:
        from reprise.rl.assembly import drafter_run

        return drafter_run.open_run(
            self.config,
            drafter_run.open_drafter(self.config, self.inputs),
            self.folder,
            self.stack,
            self.clock,
            heartbeat=self.watch.heartbeat,
            partition=self.partition,
            trainer_engine=trainer_engine,
        )

    # -- engines --------------------------------------------------------------------------

    def engine(
        self, dtype: Any, speculation: Speculation, drafter: AnyDrafter | None
    ) -> RolloutEngine:
        """Return an engine on the trainer devices, or workers on separate devices."""
        sched = self.config.sched
        options = dict[str, Any]()
        if drafter is not None:
            options["feature_layers"] = drafter.learned.config.feature_layers
        if sched.has_trainer_devices:
            return self._trainer_engine(dtype, lockstep=self._lockstep(), **options)
        engines = make_engines(self.inputs.model, self.config.engine, sched, dtype=dtype, **options)
        if loss := ahead_loss(sched.mode, *split_devices(sched, jax.local_devices())):
            self.show.message(f"warning: {loss}")
        kind = AheadEngine if sched.mode == "ahead" else MultiEngine
        return kind(
            engines,
            sched,
            seed=self.config.run.seed,
            spot=None if drafter is None else drafter.spot,
            hang_limit_s=self.config.run.hang_limit_s,
        )

    def eval_engine(self, dtype: Any) -> RolloutEngine | None:
        """Return an engine for evaluations while the workers continue with the next step."""
        questions = self.partition.max_groups(self.inputs.evals.num_questions)
        num_requests = questions * self.config.eval.samples
        return self._trainer_engine(dtype, num_evaluated=num_requests)

    def _trainer_engine(
        self,
        dtype: Any,
        lockstep: LockstepWatch | None = None,
        num_evaluated: int = 0,
        **options: Any,
    ) -> Engine:
        """Return an engine on the trainer devices, or on the trainer devices of this process.

        Weights of a mesh are bound to their devices, so all other arrays must be there too. Unless
        0, `num_evaluated` is the number of requests of an engine that only evaluates.
        """
        config = self.config
        model = self.inputs.model
        own = self.partition.splits and not self.partition.processes.alone
        mesh = engine_mesh(config, model, self.mesh, own=own)
        settings = config.engine
        if num_evaluated:
            ways = 1 if mesh is None else axis_ways(mesh.shape, "batch")
            settings = first_programs.evaluation_engine(config, num_evaluated, ways)
        options["dtype"] = dtype
        if not own:
            return Engine(model, settings, mesh=mesh, lockstep=lockstep, **options)
        assert mesh is not None
        place: dict[str, Any] = {"mesh": mesh} if mesh.size > 1 else {"device": mesh.devices.item()}
        return ThreadedEngine(model, settings, **place, **options)

    def _lockstep(self) -> LockstepWatch | None:
        """Return a watch that compares program launches if one engine spans several processes."""
        processes = self.partition.processes
        if processes.alone or self.partition.splits:
            return None
        watch = LockstepWatch(processes, lambda text: processes.end(text))
        return self.stack.enter_context(watch)

    def drafting_workers(
        self, engine: RolloutEngine, speculation: Speculation
    ) -> DraftingWorkers | None:
        """Assign workers to drafting, and enable helping by idle workers; None without either."""
        settings = self.config.drafting
        if not (settings.drafts_apart or settings.helps):
            return None
        from reprise.rl.assembly import drafting_run

        workers = drafting_run.take_workers(
            self.config, engine, speculation, self.clock, report=self.show.message
        )
        return self.stack.enter_context(workers)

    def listeners(self, drafter: AnyDrafter | None) -> tuple[StepListener, ...]:
        """Return the features that take part in the steps of the run."""
        found = list[StepListener]()
        if isinstance(drafter, StepListener):
            found.append(drafter)
        if self.drafting is not None:
            from reprise.rl.assembly.drafting_run import DraftingListener

            found.append(DraftingListener(self.drafting))
        return tuple(found)

    # -- rewards --------------------------------------------------------------------------

    def rewards(self) -> Rewards:
        """Launch the reward workers; they start up while programs are traced."""
        config = self.config
        specs = self._specs
        rewards = None
        if count := config.cluster.scorers:
            from reprise.rl.cluster.actors import ActorSettings
            from reprise.rl.cluster.ray_session import reserve
            from reprise.rl.rewards.scorers import Scorers

            limit_s = config.cluster.deadline_s
            cpus = config.reward.workers
            setting = f"Cluster.scorers={count} of Reward.workers={cpus}"
            room = self.stack.enter_context(reserve(count, setting, 2 * limit_s, cpus=cpus))
            settings = ActorSettings({}, limit_s, 2 * limit_s, self.show.message)
            rewards = Scorers(config.reward, specs, count, room, settings)
        opened = rewards or RewardPool(config.reward, specs)
        self.stack.callback(opened.close)
        opened.start()
        return opened

    @property
    def _specs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.config.task.specs, *self.inputs.evals.specs)))

    # -- compilation ----------------------------------------------------------------------

    def compile(self, system: System, state: TrainState) -> None:
        """Compile training, rollouts and evaluation."""
        weights = system.weights(state.params)
        learner = system.learner
        training = trainer.lowered(state, learner.shape, recipe=learner.recipe, base=learner.base)
        system.rewards.wait_started()
        bounds = first_programs.rollout_reach(self.config, self.partition)
        self.compile_rollouts(system, weights, bounds, training)
        self.compile_evaluation(system, state, weights)
        if system.drafter is not None:
            system.drafter.warm_up(system.engine, weights)
        # a collective may time out while another process compiles
        system.processes.barrier("compiled", self.watch.heartbeat)

    def compile_rollouts(
        self, system: System, weights: Params, reach: Reach, training: Sequence[Any]
    ) -> None:
        engine = system.engine
        tables = first_programs.Kept(
            folder=self.folder,
            processes=system.processes,
            drafting=self.drafting,
            say=self.show.message,
        )
        engine.do(
            partial(
                first_programs.warm_up,
                self.config,
                engine,
                weights,
                system.speculation,
                reach,
                tables,
                on_compiled=self.on_compiled("training and rollouts"),
                training=training,
            )
        )

    def compile_evaluation(self, system: System, state: TrainState, weights: Params) -> None:
        is_own = system.eval_engine is not system.engine
        if is_own and (system.processes.alone or not self.partition.is_central):
            weights = system.evaluated(state.params)  # needs other programs for the layout
        first_programs.warm_up_evaluation(
            self.config,
            self.inputs,
            system.eval_engine,
            weights,
            on_compiled=self.on_compiled("evaluation"),
            partition=self.partition,
        )

    def on_compiled(self, what: str) -> OnCompiled:
        return partial(self._on_compiled, what)

    def _on_compiled(self, what: str, done: int, total: int) -> None:
        self.watch.heartbeat()
        self.show.compiling(what, done, total)


def make_learner(
    config: TrainConfig, inputs: Inputs, mesh: Mesh | None
) -> tuple[Learner, TrainState]:
    """Load the policy, and return the learner and the sharded training state."""
    spec = recipe(config, inputs.model)
    model = inputs.model
    dtype = jnp.float32 if model.lora is None else spec.trainer.dtype
    _, params = hf.load_pretrained(inputs.policy, mesh, dtype=dtype)
    values = critic.init(params, spec) if config.algorithm.resolved.needs_critic else None
    reference = None
    base = None
    trained = params
    if model.lora is not None:
        base = params
        trained = lora.init(model, jax.random.key(config.run.seed), mesh)
    if config.algorithm.needs_reference:
        reference = _reference(params, spec) if base is None else base
    state = init_state(trained, make_optimizer(config.optimizer, spec.total_steps))
    shape = trainer.batch_shape(spec, config.longest_tokens)
    learner = Learner(spec, shape, config.sampling, config.run.seed, reference, base)
    return learner, dataclasses.replace(state, critic=values)


def _reference(params: Params, recipe: TrainSpec) -> Params:
    """Return a copy in the dtype of matrix products, which round weights anyway."""
    rounded = trainer.cast_params(params, recipe.trainer.dtype)
    return jax.tree.map(jnp.copy, rounded) if rounded is params else rounded


def engine_mesh(
    config: TrainConfig, model: ModelConfig, mesh: Mesh | None, *, own: bool = False
) -> Mesh | None:
    """Return the mesh of an engine on all trainer devices, or if `own`, on the local devices.

    Raises ValueError if `Mesh.rollout_tensor` does not fit the devices or the policy.
    """
    if mesh is None:
        return None
    devices_here = own_devices(mesh) if own else list(mesh.devices.flat)
    ways = config.mesh.fsdp * config.mesh.tensor
    tensor = config.mesh.rollout_tensor
    return rollout_mesh(devices_here, model.num_kv_heads, ways, tensor)


def open_mesh(
    config: TrainConfig, model: ModelConfig, *, own: bool = False
) -> tuple[Mesh | None, str | None]:
    """Return the mesh of a policy, and a remark if its passes compute different bits.

    Every program that opens a policy calls this before loading weights. If `own`, engines use the
    devices of this process. Raises ValueError.
    """
    devices.keep_order(config.numerics.same_bits)
    mesh = run_mesh(config)
    engine_mesh(config, model, mesh, own=own)
    return mesh, check_bits(config, model, mesh)


def check_bits(config: TrainConfig, model: ModelConfig, mesh: Mesh | None) -> str | None:
    """Return why passes compute different bits; None without a reason or if `same_bits` is False.

    Raises ValueError if `NumericsConfig.same_bits` requires the same bits.
    """
    reason = _why_other_bits(config, model, mesh)
    if reason is None or config.numerics.same_bits is False:
        return None
    if config.numerics.same_bits is True:
        raise ValueError(f"Numerics.same_bits=True: {reason}")
    return f"tokens and ratios are exact up to rounding: {reason}"


def _why_other_bits(config: TrainConfig, model: ModelConfig, mesh: Mesh | None) -> str | None:
    tensor_ways = 1 if mesh is None else mesh.shape["tensor"]
    platform = platform_in_use()
    if platform == "cpu":
        return why_other_bits(model, tensor_ways)
    if platform not in ("cuda", "tpu"):
        return f"expected CPUs, TPUs or GPUs, whose kernels sum in one order, got a {platform}"
    if config.cluster.rollouts != "local":
        return f"expected Cluster.rollouts='local', got {config.cluster.rollouts!r}"
    if config.cluster.kind == "ray":
        return "expected Cluster.kind='local' or 'spmd': workers on Ray have flags of their own"
    if platform == "tpu" and (reason := _large_rounds(config, model, mesh)):
        return reason
    if platform == "cuda" and (reason := _single_rows(config, model, mesh)):
        return reason
    return why_other_bits_on_accelerators(
        platform,
        model,
        tensor_ways,
        dtype=config.trainer.dtype,
        page_tokens=config.engine.page_tokens,
    )


def _large_rounds(config: TrainConfig, model: ModelConfig, mesh: Mesh | None) -> str | None:
    """Return why the pages and tokens of a round do not fit into the memories of a TPU core."""
    from reprise.models.kernels.page_attention_tpu import why_too_large

    engines = engine_mesh(config, model, mesh)
    sizes = {} if engines is None else engines.shape
    ways = axis_ways(sizes, "batch") if sizes else 1
    engine = config.engine.over(ways)
    prompts = engine.prefill_rows * engine.chunk_tokens(config.longest_tokens, is_cpu=False)
    return why_too_large(
        (engine.max_slots // ways, engine.slot_pages(config.longest_tokens)),
        max(prompts, engine.max_round_nodes, 2 * engine.max_slots),
        model.num_kv_heads // sizes.get("tensor", 1),
        model.head_dim,
        config.trainer.dtype,
    )


def _single_rows(config: TrainConfig, model: ModelConfig, mesh: Mesh | None) -> str | None:
    """Return why a GPU has one-row products, which XLA sums in another order than its tiles."""
    engines = engine_mesh(config, model, mesh, own=True)
    ways = 1 if engines is None else axis_ways(engines.shape, "batch")
    engine = config.engine.over(ways)
    prompts = engine.prefill_rows * engine.chunk_tokens(config.longest_tokens, is_cpu=False)
    rows = {"min_slots": engine.min_slots, "prefill_rows × prefill_chunk_tokens": prompts}
    for name, size in rows.items():
        if size < 2 * ways:
            return (
                f"expected Engine.{name} of at least {2 * ways}, two for each of {ways} part(s) of "
                f"the devices, got {size}: one row of a product has another order of sums"
            )
    return None


def run_mesh(config: TrainConfig) -> Mesh | None:
    """Return the mesh of a configuration, with an equal number of devices from each process.

    Return None if one device is enough. Raises ValueError for too many or too few devices.
    """
    of_processes: dict[int, list[jax.Device]] = {}
    for device in devices.found():
        of_processes.setdefault(device.process_index, []).append(device)
    rows: list[Sequence[jax.Device]] = list(of_processes.values())
    if config.cluster.kind != "ray":  # Ray workers have other devices
        rows = [split_devices(config.sched, row)[0] for row in rows]
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    is_single = jax.process_count() == 1
    if is_single and (sizes == (1, 1, 1) or (len(rows[0]) == 1 and sizes == (-1, 1, 1))):
        return None
    if config.sched.beside_training and config.mesh.data != -1:
        each = math.ceil(math.prod(sizes) / len(rows))
        rows = [row[:each] for row in rows]
    return make_mesh(config.mesh, [device for row in rows for device in row])

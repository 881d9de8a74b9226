"""Construction of the parts of a run, and compilation of its programs before step one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from reprise.models.decoder import lora
from reprise.models.decoder.transformer import Params
from reprise.models.folder import Folder
from reprise.models.formats import hf
from reprise.models.layout import axis_ways
from reprise.rl.assembly import first_programs
from reprise.rl.assembly.listeners import StepListener
from reprise.rl.assembly.system import System, evaluation_weights, rollout_weights
from reprise.rl.cluster.lockstep import LockstepWatch
from reprise.rl.cluster.processes import ALONE, Processes
from reprise.rl.data.prompts import DataOrder
from reprise.rl.engine.engine import Engine, RolloutEngine, ThreadedEngine
from reprise.rl.exchange.responses import Partition, Scorer
from reprise.rl.learner import critic, trainer
from reprise.rl.learner.config import TrainSpec
from reprise.rl.learner.optimizer import TrainState, init_state, make_optimizer, settle
from reprise.rl.learner.trainer import Learner
from reprise.rl.placement.engines import engine_settings, evaluation_engine
from reprise.rl.placement.meshes import engine_mesh, run_mesh
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.rewards.scores import Rewards
from reprise.rl.runtime.parallel_compile import OnCompiled
from reprise.rl.runtime.progress import Progress
from reprise.rl.runtime.run_files import ROLLOUTS, resolve_path, spill_folder
from reprise.rl.runtime.signals import Watch
from reprise.rl.runtime.waits import Deadline
from reprise.rl.sessions.ahead_engine import AheadEngine
from reprise.rl.sessions.multi_engine import MultiEngine
from reprise.rl.settings.checks import ahead_loss
from reprise.rl.settings.config import TrainConfig, recipe
from reprise.rl.settings.inputs import Inputs
from reprise.rl.speculation.device_drafters import DeviceDrafters, DeviceDrafterSource, DraftModel
from reprise.rl.speculation.reuse import Reuse
from reprise.rl.speculation.sources import Speculation, make_bandits
from reprise.rl.workers.engines import EngineSettings, make_engine, make_engines, split_devices
from reprise.spec.budget.config import LEARNED, MODEL
from reprise.spec.reuse.rollout_cache import RolloutCache
from reprise.spec.round_times import RoundTimes

if TYPE_CHECKING:
    from reprise.rl.assembly.drafter_run import AnyDrafter, DrafterRun
    from reprise.rl.drafting.workers import DraftingWorkers
    from reprise.rl.learner.distillation import Teacher
    from reprise.rl.speculation.bandits import Bandits


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
        learner, state = make_learner(config, inputs, mesh)
        engine = builder.engine(drafters, drafter)
        rewards = builder.rewards()
        new_scorer = builder.scorer()
        if partition.is_central:
            processes.barrier("workers", watch.heartbeat)
        builder.drafting = builder.drafting_workers(engine, drafters)
        evaluates_apart = config.sched.beside_training and inputs.evals.sets
        eval_engine = builder.eval_engine() if evaluates_apart else None
        times = builder.compile(
            state,
            learner=learner,
            engine=engine,
            eval_engine=eval_engine or engine,
            drafters=drafters,
            drafter=drafter,
            rewards=rewards,
        )
        speculation = stack.enter_context(builder.speculation(drafters, times))
        reuse = Reuse(
            config.reuse,
            cache,
            seed=config.run.seed,
            greedy=config.sampling.temperature == 0,
            seconds=speculation.seconds,
        )
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
            new_scorer=new_scorer,
            order=DataOrder(len(inputs.task), config.run.seed),
            drafter=drafter,
            partition=partition,
            listeners=builder.listeners(drafter),
            show=show,
            watch=watch,
        )
        state = trainer.first_run(state, learner)
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

    @property
    def sources_apart(self) -> Collection[str]:
        """The sources that only drafting workers draft from, except for copies of requests."""
        return () if self.drafting is None else self.drafting.sources

    def make_bandits(self, drafters: DeviceDrafters) -> Bandits | None:
        """Return the bandits of the budget, or None for another budget."""
        own = {n: drafter for n, drafter in drafters.items() if n not in self.sources_apart}
        return make_bandits(self.config.speculation, own, self.config.tuner, self.config.run.seed)

    def speculation(self, drafters: DeviceDrafters, times: RoundTimes | None) -> Speculation:
        """Return the drafters of the run, which decide by the measured seconds of rounds."""
        return Speculation(
            self.config.speculation,
            self.cache,
            drafters,
            times=times,
            bandits=self.make_bandits(drafters),
            apart={} if self.drafting is None else self.drafting.sources,
            methods_of_copies=self.config.drafting.methods_of_copies,
            deadline=self.deadline,
        )

    def engine(self, drafters: DeviceDrafters, drafter: AnyDrafter | None) -> RolloutEngine:
        """Return an engine on the trainer devices, or workers on separate devices."""
        sched = self.config.sched
        settings = engine_settings(self.config, self.inputs.model)
        if sched.has_trainer_devices:
            return self._trainer_engine(settings, self._lockstep())
        engines = make_engines(settings, sched)
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

    def eval_engine(self) -> RolloutEngine | None:
        """Return an engine for evaluations while the workers continue with the next step."""
        questions = self.partition.max_groups(self.inputs.evals.num_questions)
        num_requests = questions * self.config.eval.samples
        mesh = self._engine_mesh()
        ways = 1 if mesh is None else axis_ways(mesh.shape, "batch")
        settings = engine_settings(self.config, self.inputs.model, drafts=False)
        config = evaluation_engine(self.config, num_requests, ways)
        return self._trainer_engine(dataclasses.replace(settings, config=config))

    def _engine_mesh(self) -> Mesh | None:
        own = self.has_own_engine
        return engine_mesh(self.config, self.inputs.model, self.mesh, own=own)

    @property
    def has_own_engine(self) -> bool:
        """True if each of several processes has an engine."""
        return self.partition.splits and not self.partition.processes.alone

    def _trainer_engine(
        self, settings: EngineSettings, lockstep: LockstepWatch | None = None
    ) -> Engine:
        """Return an engine on the trainer devices, or on the trainer devices of this process.

        Weights of a mesh are bound to their devices, so all other arrays must be there too.
        """
        mesh = self._engine_mesh()
        if not self.has_own_engine:
            return make_engine(settings, mesh, lockstep=lockstep)
        assert mesh is not None
        place = mesh if mesh.size > 1 else mesh.devices.item()
        return make_engine(settings, place, kind=ThreadedEngine)

    def _lockstep(self) -> LockstepWatch | None:
        """Return a watch that compares program launches if one engine spans several processes."""
        processes = self.partition.processes
        if processes.alone or self.partition.splits:
            return None
        watch = LockstepWatch(processes, lambda text: processes.end(text))
        return self.stack.enter_context(watch)

    def drafting_workers(
        self, engine: RolloutEngine, drafters: DeviceDrafters
    ) -> DraftingWorkers | None:
        """Assign workers to drafting, and enable helping by idle workers; None without either."""
        settings = self.config.drafting
        if not (settings.drafts_apart or settings.helps):
            return None
        from reprise.rl.assembly import drafting_run

        workers = drafting_run.take_workers(
            self.config, engine, drafters, self.clock, report=self.show.message
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

    def scorer(self) -> Callable[..., Scorer]:
        """Return the class of scorers; with an environment, one that plays episodes."""
        config = self.config
        if not config.environment.enabled:
            return Scorer
        from reprise.rl.environments.episode_scorer import open_scorer

        scorer = open_scorer(
            config.environment,
            config.task,
            self.inputs.tokenizer,
            self.inputs.task[0],
            rows=config.engine.max_slots,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
        )
        return self.stack.enter_context(scorer)

    @property
    def _specs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.config.task.specs, *self.inputs.evals.specs)))

    # -- compilation ----------------------------------------------------------------------

    def compile(
        self,
        state: TrainState,
        *,
        learner: Learner,
        engine: RolloutEngine,
        eval_engine: RolloutEngine,
        drafters: DeviceDrafters,
        drafter: AnyDrafter | None,
        rewards: Rewards,
    ) -> RoundTimes | None:
        """Compile training, rollouts and evaluation; return the measured seconds of rounds."""
        processes = self.partition.processes
        weights = rollout_weights(state.params, learner, engine, self.partition)
        training = trainer.lowered(state, learner)
        rewards.wait_started()
        times = self.compile_rollouts(engine, weights, drafters, drafter, training)
        evaluated = weights
        if eval_engine is not engine and (processes.alone or not self.partition.is_central):
            # needs other programs for the layout
            evaluated = evaluation_weights(state.params, learner, eval_engine, self.partition)
        self.compile_evaluation(eval_engine, evaluated)
        if drafter is not None:
            drafter.warm_up(engine, weights)
        # a collective may time out while another process compiles
        processes.barrier("compiled", self.watch.heartbeat)
        return times

    def compile_rollouts(
        self,
        engine: RolloutEngine,
        weights: Params,
        drafters: DeviceDrafters,
        drafter: AnyDrafter | None,
        training: Sequence[Any],
    ) -> RoundTimes | None:
        tables = first_programs.Kept(
            folder=self.folder,
            processes=self.partition.processes,
            drafting=self.drafting,
            say=self.show.message,
        )
        return engine.do(
            partial(
                first_programs.warm_up,
                self.config,
                engine,
                weights,
                drafters,
                first_programs.rollout_reach(self.config, self.partition),
                tables,
                on_compiled=self.on_compiled("training and rollouts"),
                training=training,
            )
        )

    def compile_evaluation(self, engine: RolloutEngine, weights: Params) -> None:
        first_programs.warm_up_evaluation(
            self.config,
            self.inputs,
            engine,
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
    config: TrainConfig, inputs: Inputs, mesh: Mesh | None, *, any_sampling: bool = False
) -> tuple[Learner, TrainState]:
    """Load the policy, and return the learner and the sharded training state.

    Responses have the sampling of the configuration, or with `any_sampling` any.
    """
    spec = recipe(config, inputs.model, any_sampling=any_sampling)
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
    teacher = _teacher(config, inputs, spec, mesh)
    learner = Learner(spec, shape, config.sampling, config.run.seed, reference, base, teacher)
    return learner, dataclasses.replace(state, critic=values)


def _teacher(
    config: TrainConfig, inputs: Inputs, recipe: TrainSpec, mesh: Mesh | None
) -> Teacher | None:
    """Load the teacher in the dtype of matrix products; None without distillation."""
    if inputs.teacher is None:
        return None
    from reprise.rl.learner.distillation import Teacher, teacher_recipe

    folder = resolve_path(str(config.distill.teacher))
    _, params = hf.load_pretrained(folder, mesh, dtype=recipe.trainer.dtype)
    return Teacher(settle(params), teacher_recipe(recipe, inputs.teacher))


def _reference(params: Params, recipe: TrainSpec) -> Params:
    """Return a copy in the dtype of matrix products, which round weights anyway."""
    rounded = trainer.cast_params(params, recipe.trainer.dtype)
    return jax.tree.map(jnp.copy, rounded) if rounded is params else rounded

"""Rollout workers of a run as Ray actors: start, compilation, and a common scheduler."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, cast

from reprise.models.decoder.transformer import Params
from reprise.models.folder import replace_file
from reprise.rl.assembly import drafter_run, first_programs
from reprise.rl.assembly.drafter_run import AnyDrafter
from reprise.rl.assembly.drafting_run import have_idle_help, make_planner, open_actors
from reprise.rl.assembly.setup import RunBuilder
from reprise.rl.cluster.actors import Actor, ActorSettings, Handle, Starts
from reprise.rl.cluster.join import DRAFT_MODEL, POLICY
from reprise.rl.drafting.plans import MeasuredSeconds, Planner
from reprise.rl.drafting.workers import DraftingActors
from reprise.rl.engine.engine import Engine, RolloutEngine
from reprise.rl.placement.engines import engine_settings
from reprise.rl.ray_workers.place import (
    Bounds,
    LearnedSettings,
    Measured,
    RayPlace,
    Shared,
    WorkerSettings,
)
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.rewards.scores import Rewards
from reprise.rl.runtime.parallel_compile import OnCompiled
from reprise.rl.runtime.run_files import MOVES_FILE, ROUNDS_FILE
from reprise.rl.runtime.user_files import files_of, is_user_name
from reprise.rl.runtime.waits import POLL_S
from reprise.rl.sessions.ahead_engine import AheadEngine
from reprise.rl.sessions.multi_engine import MultiEngine
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs
from reprise.rl.speculation.bandits import Bandits
from reprise.rl.speculation.device_drafters import DeviceDrafters, DraftModel
from reprise.rl.speculation.history_workers import HistoryWorkers
from reprise.rl.speculation.sources import Speculation, history_rule
from reprise.rl.warm_up import compile_buckets
from reprise.rl.warm_up.measured_run import MoveTimes, read_moves, read_rounds
from reprise.rl.warm_up.rollout_programs import Reach
from reprise.rl.workers.engines import EngineSettings, make_engine
from reprise.rl.workers.pool import Place
from reprise.sched.simulator.measured_costs import MeasuredCosts
from reprise.spec.buckets import buckets
from reprise.spec.budget.config import MODEL
from reprise.spec.reuse.rollout_cache import RolloutCache
from reprise.spec.round_times import RoundTimes

SPARE_CPUS = 2  # of a Ray that a run starts, in addition to CPUs of workers and services


@dataclasses.dataclass(frozen=True, eq=False)
class RayWorkers:
    """Started workers under the scheduler of one engine.

    `helping` plans which requests idle workers answer again.
    """

    engine: MultiEngine
    places: Sequence[RayPlace]
    shared: Shared
    drafting: DraftingActors | None = None
    helping: Planner | None = None

    def warm_up(
        self,
        bounds: Bounds,
        weights: Params,
        folder: Path,
        training: Sequence[Any],
        *,
        on_compiled: OnCompiled,
        heartbeat: Callable[[], object],
    ) -> None:
        """Compile and measure on the workers while this process compiles `training`.

        The measurements are written to `folder`.
        """
        rounds = folder / ROUNDS_FILE
        moves = folder / MOVES_FILE
        known = rounds.read_text(encoding="utf-8") if rounds.is_file() else None
        with ThreadPoolExecutor(1) as thread:
            warming = thread.submit(self._warm_up, weights, bounds, known)
            first = self.engine.engines[0]
            compile_buckets.compile_programs(first, (), on_compiled, training)
            while not wait([warming], POLL_S).done:
                heartbeat()  # each call has a deadline
            measured = warming.result()
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in ((rounds, measured.rounds), (moves, measured.moves)):
            if text:
                replace_file(path, text)
        moved = read_moves(moves)
        if moved is not None:
            self.engine.prefer_pool = moved.prefers_copy
        times = read_rounds(rounds)
        if self.helping is not None and times is not None and moved is not None:
            self.helping.seconds = self._seconds(times, moved)

    def _seconds(self, times: RoundTimes, moves: MoveTimes) -> MeasuredSeconds:
        """Return measured times of rounds, copies and drafts; workers hold the draft weights."""
        costs = MeasuredCosts(times.rounds, moves.seconds)
        draft_s = 0.0 if self.drafting is None else self.drafting.draft_s
        return MeasuredSeconds.of(costs, times, draft_s)

    def _warm_up(self, weights: Params, bounds: Bounds, rounds: str | None) -> Measured:
        """Prepare all workers; the first worker measures, and the others use its table."""
        self.shared.weights.publish(weights)
        first, *others = self.places
        compiling = [place.compile(bounds) for place in others]
        measured = first.prepare(bounds, rounds).result()
        for compiled in compiling:
            compiled.result()
        for prepared in [place.prepare(bounds, measured.rounds) for place in others]:
            prepared.result()
        if self.drafting is not None:
            self.drafting.wait_ready()  # these actors compile concurrently
        return measured


def num_cpus(config: TrainConfig) -> int:
    """Return the number of CPUs for a Ray that the run starts, excluding the trainers."""
    scoring = config.cluster.scorers * config.reward.workers
    drafting = (config.drafting.workers or 0) * config.sched.devices_per_worker
    return config.num_verifying + drafting + scoring + config.cluster.history_workers + SPARE_CPUS


@contextlib.contextmanager
def open_workers(
    config: TrainConfig,
    inputs: Inputs,
    bandits: Bandits | None,
    drafter: AnyDrafter | None,
    say: Callable[[str], None],
) -> Iterator[RayWorkers]:
    """Start or join Ray, and start its workers, including workers that draft for others.

    Exit stops everything that was started. `bandits` keep the states of bandits on workers. Idle
    workers run copies of straggling requests, or train `drafter` if it has spot training. Raises
    ProgramLost if workers cannot start.
    """
    from reprise.rl.cluster.ray_session import open_ray, reserve, share

    cluster = config.cluster
    sched = config.sched
    limit_s = config.cluster.deadline_s
    count = config.num_verifying
    files = {POLICY: str(inputs.policy)}
    if (folder := config.draft_model_folder) is not None:
        files[DRAFT_MODEL] = str(folder)
    speculation_names = (config.speculation.budget, *config.speculation.sources)
    files |= files_of(filter(is_user_name, speculation_names))
    settings = ActorSettings(files, limit_s, 2 * limit_s, say)
    engines = engine_settings(config, inputs.model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(open_ray(cluster.address, num_cpus(config), limit_s))
        setting = f"Sched.workers={sched.workers}"
        start_s = 2 * limit_s
        reserved = reserve(count, setting, start_s, devices=sched.devices_per_worker)
        room = stack.enter_context(reserved)
        drafting = stack.enter_context(open_actors(config, engines, say))
        drafts = None
        if "group" in config.speculation.sources:
            beside = stack.enter_context(reserve(1, setting, start_s))
            drafts = stack.enter_context(_draft_server(beside, settings))
        shared = Shared(
            share,
            learned=None if drafter is None else drafter.learned,
            bandits=bandits,
            apart=None if drafting is None else drafting.apart,
        )
        workers = [worker_settings(config, engines, drafter, i) for i in range(count)]
        places = [_place(config, w, room, settings, shared, drafts) for w in workers]
        for place in places:
            stack.callback(place.actor.close)
        kind = AheadEngine if sched.mode == "ahead" else MultiEngine
        engine = kind(
            [make_engine(engines)],  # of shapes
            sched,
            seed=config.run.seed,
            spot=None if drafter is None else drafter.spot,
            places=cast(Sequence[Place], places),  # `may_return` is read there, never set
            hang_limit_s=config.run.hang_limit_s,
        )
        helping = None
        if config.drafting.helps:
            helping = make_planner(config)
            helping.drafting_workers = config.drafting.workers or 0
            have_idle_help(engine, helping)
        yield RayWorkers(engine, places, shared, drafting, helping)


@contextlib.contextmanager
def _draft_server(room: Starts, settings: ActorSettings) -> Iterator[Handle]:
    """Start the central draft server, and stop it on exit."""
    target = "reprise.rl.workers.group_drafts:GroupDrafts"
    server = Actor("draft server", target, (), settings, room, 0, restarts=False)
    with contextlib.closing(server):
        server.call("exchange", "", 1, (), (), {}, limit_s=settings.start_s).result()
        assert server.handle is not None, "it has answered"
        yield server.handle


def _place(
    config: TrainConfig,
    worker: WorkerSettings,
    room: Starts,
    settings: ActorSettings,
    shared: Shared,
    drafts: Handle | None,
) -> RayPlace:
    """Start the actor of a worker, and return the place of this worker."""
    actor = Actor(
        f"worker {worker.number}",
        "reprise.rl.ray_workers.actor:WorkerActor",
        (worker, drafts),
        settings,
        room,
        worker.number,
        concurrency=1,
    )
    return RayPlace(
        worker.number,
        actor,
        shared,
        call_limit_s=config.run.hang_limit_s,
        compile_s=config.run.compile_limit_s,
        report=settings.say,
    )


def worker_settings(
    config: TrainConfig,
    engine: EngineSettings,
    drafter: AnyDrafter | None,
    number: int,
) -> WorkerSettings:
    """Return the settings of a verifying worker."""
    drafting = config.drafting
    draft_model = None
    if (folder := config.draft_model_folder) is not None:
        draft_model = dataclasses.replace(config.draft_model, directory=str(folder))
    learned = None
    if drafter is not None:
        learned = LearnedSettings(
            config=drafter.learned.config,
            tree=drafter.learned.tree,
            training=config.drafter_training,
            draft_ids_U=drafter.learned.draft_ids_U,
            temperature=config.sampling.temperature,
        )
    helps_by_model = drafting.helps and MODEL in drafting.methods
    return WorkerSettings(
        number=number,
        engine=engine,
        num_devices=config.sched.devices_per_worker,
        speculation=config.speculation,
        tuner=config.tuner,
        seed=config.run.seed,
        draft_model=draft_model,
        model_here=not drafting.drafts_apart or helps_by_model,
        model_apart=drafting.drafts_apart,
        methods_of_copies=drafting.methods_of_copies,
        learned=learned,
        fetch_s=config.cluster.deadline_s,
        folder=os.getcwd(),
    )


def bounds(
    config: TrainConfig,
    inputs: Inputs,
    reach: Reach,
    drafter: AnyDrafter | None = None,
) -> Bounds:
    """Return bounds on the programs that workers compile.

    These are for rollouts, for evaluations on workers, and for drafter training by idle workers.
    """
    options = config.drafter
    spot = drafter is not None and drafter.spot is not None
    slots = config.engine
    sizes = buckets(slots.slot_bucket(slots.max_slots), slots.slot_bucket(1))
    num_evaluated = inputs.evals.num_questions * config.eval.samples
    max_requests = max(config.rollout.num_requests, num_evaluated)
    evaluates = not config.sched.beside_training
    nodes = reach.nodes
    sent = dataclasses.replace(
        reach,
        max_requests=max_requests if evaluates else config.rollout.num_requests,
        moves=True,
        nodes=None if nodes is None else _table(nodes, sizes),
        alone={name: _table(decisions, sizes) for name, decisions in reach.alone.items()},
    )
    batch = (options.batch_rows, options.row_tokens) if spot else None
    return Bounds(config.sampling, sent, batch)


def _table(function: Callable[[int], Any], sizes: Sequence[int]) -> Callable[[int], Any]:
    """Return `function` tabulated over `sizes`, so that it can be pickled; () at other sizes."""
    return collections.defaultdict(tuple, {n: function(n) for n in sizes}).__getitem__


@contextlib.contextmanager
def open_history(
    config: TrainConfig, cache: RolloutCache, say: Callable[[str], None]
) -> Iterator[HistoryWorkers | None]:
    """Start the history workers, or yield None without any; stop them on exit. Ray is running.

    Raises ProgramLost if a history worker cannot serve.
    """
    count = config.cluster.history_workers
    limit_s = config.cluster.deadline_s
    if config.speculation.history_source is None or not count:
        yield None
        return
    from reprise.rl.cluster.ray_session import reserve

    settings = ActorSettings({}, limit_s, 2 * limit_s, say)
    with reserve(count, f"Cluster.history_workers={count}", 2 * limit_s) as room:
        rule = history_rule(config.speculation)
        with contextlib.closing(HistoryWorkers(rule, cache, count, room, settings)) as workers:
            workers.wait_started()
            yield workers


@dataclasses.dataclass(eq=False)
class RayRunBuilder(RunBuilder):
    """A builder of the parts of a run with Ray actors as workers."""

    workers: RayWorkers | None = None
    history: HistoryWorkers | None = None
    bandits: Bandits | None = None  # shared with the workers

    def drafter(self) -> AnyDrafter:
        """Set up training of the learned drafter on the trainer devices."""
        settings = engine_settings(self.config, self.inputs.model)
        if self.partition.processes.alone:
            engine = make_engine(settings, self.mesh)
        else:
            engine = self._trainer_engine(settings)
        return engine.do(partial(self._open_drafter, engine))

    def draft_model(self) -> DraftModel:
        return DraftModel.elsewhere(self.config.draft_model)

    @property
    def sources_apart(self) -> Collection[str]:
        return {MODEL} if self.config.drafting.workers else ()

    def speculation(self, drafters: DeviceDrafters, times: RoundTimes | None) -> Speculation:
        """Return the history of the run, and the settings of the drafters of its workers."""
        return Speculation(
            self.config.speculation,
            self.cache,
            drafters,
            times=read_rounds(self.folder / ROUNDS_FILE),  # of the workers
            bandits=self.bandits,
            for_others=True,
            history_workers=self.history,
            deadline=self.deadline,
        )

    def engine(self, drafters: DeviceDrafters, drafter: AnyDrafter | None) -> RolloutEngine:
        """Start Ray and its workers."""
        config = self.config
        say = self.show.message
        self.bandits = self.make_bandits(drafters)
        opened = open_workers(config, self.inputs, self.bandits, drafter, say)
        self.workers = self.stack.enter_context(opened)
        self.history = self.stack.enter_context(open_history(config, self.cache, say))
        return self.workers.engine

    def drafting_workers(self, engine: RolloutEngine, drafters: DeviceDrafters) -> None:
        """Return None: drafting workers are actors (`rl.assembly.drafting_run.open_actors`)."""

    def compile_rollouts(
        self,
        engine: RolloutEngine,
        weights: Params,
        drafters: DeviceDrafters,
        drafter: AnyDrafter | None,
        training: Sequence[Any],
    ) -> None:
        assert self.workers is not None
        reach = first_programs.rollout_reach(self.config, self.partition)
        limits = bounds(self.config, self.inputs, reach, drafter)
        self.workers.warm_up(
            limits,
            weights,
            self.folder,
            training,
            on_compiled=self.on_compiled("training and rollouts"),
            heartbeat=self.watch.heartbeat,
        )

    def compile_evaluation(self, engine: RolloutEngine, weights: Params) -> None:
        if isinstance(engine, Engine):  # workers compiled their programs
            super().compile_evaluation(engine, weights)


class FollowerBuilder(RayRunBuilder):
    """A builder for trainer processes other than 0, without workers, drafter and rewards."""

    def drafter(self) -> AnyDrafter:
        return drafter_run.open_stub(self.config, self.inputs)

    def engine(self, drafters: DeviceDrafters, drafter: AnyDrafter | None) -> RolloutEngine:
        self.bandits = self.make_bandits(drafters)
        shapes = make_engine(engine_settings(self.config, self.inputs.model))
        return MultiEngine([shapes], self.config.sched, places=())

    def eval_engine(self) -> None:
        return None

    def rewards(self) -> Rewards:
        return RewardPool(self.config.reward, self._specs)  # not started

    def compile_rollouts(
        self,
        engine: RolloutEngine,
        weights: Params,
        drafters: DeviceDrafters,
        drafter: AnyDrafter | None,
        training: Sequence[Any],
    ) -> None:
        on_compiled = self.on_compiled("training and rollouts")
        compile_buckets.compile_programs(engine.engines[0], (), on_compiled, training)

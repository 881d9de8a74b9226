"""The rollout workers of a run as actors of Ray: opened, compiled, and behind one engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from models.folder import replace_file
from models.transformer import Params
from rl.cluster.config import ClusterConfig
from rl.cluster.join import identity_of
from rl.config.loader import dump
from rl.drafting.actors import DraftingActors
from rl.drafting.plans import MeasuredSeconds, Planner
from rl.loop.drafter_elsewhere import AnyDrafter
from rl.loop.drafting import have_idle_help, make_planner, open_actors
from rl.loop.experiment import Inputs, TrainConfig
from rl.remote.drafter_messages import Drafters, Learned
from rl.remote.jobs import Jobs
from rl.remote.messages import Compile, Hello, Measured
from rl.remote.remote_engine import RemoteEngine
from rl.remote.team import Deadlines, Team
from rl.runtime.parallel_compile import OnCompiled
from rl.runtime.run_files import MOVES_FILE, ROUNDS_FILE
from rl.runtime.waits import POLL_S
from rl.speculation.sources import Speculation
from rl.warm_up import compile_buckets
from rl.warm_up.measured_run import MoveTimes, read_moves, read_rounds
from rl.warm_up.rollout_programs import Reach
from rl.workers.ahead_engine import AheadEngine
from rl.workers.multi_engine import MultiEngine
from sched.simulator.measured_costs import MeasuredCosts
from spec.buckets import buckets
from spec.budget.config import MODEL
from spec.round_times import RoundTimes

SPARE_CPUS = 2  # of a Ray that a run starts, beside those of workers and services
SILENCE = 5  # deadlines that nobody speaks to a worker for, until it ends by itself


@dataclasses.dataclass(frozen=True, eq=False)
class RayWorkers:
    """Workers that have started, and the engine that speaks for them.

    `helping` plans which requests idle ones answer again.
    """

    engine: MultiEngine
    team: Team
    drafting: DraftingActors | None = None
    helping: Planner | None = None

    def warm_up(
        self,
        bounds: Compile,
        weights: Params,
        folder: Path,
        training: Sequence[Any],
        told: OnCompiled,
        alive: Callable[[], object],
    ) -> None:
        """Have the workers compile and measure, while `training` is compiled here.

        What they measured goes into the run's folder.
        """
        rounds, moves = folder / ROUNDS_FILE, folder / MOVES_FILE
        known = rounds.read_text(encoding="utf-8") if rounds.is_file() else None
        with ThreadPoolExecutor(1) as thread:
            there = thread.submit(self._warm_up, weights, bounds, known)
            first = self.engine.engines[0]
            compile_buckets.compile_programs(first, (), told, training)
            while not wait([there], POLL_S).done:
                alive()  # each answer has its own deadline
            measured = there.result()
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in ((rounds, measured.rounds), (moves, measured.moves)):
            if text:
                replace_file(path, text)
        found = read_moves(moves)
        if found is not None:
            self.engine.prefer_pool = found.prefers_copy
        times = read_rounds(rounds)
        if self.helping is not None and times is not None and found is not None:
            self.helping.seconds = self._seconds(times, found)

    def _seconds(self, times: RoundTimes, moves: MoveTimes) -> MeasuredSeconds:
        """Return what a copy costs: none for a draft model's weights, which workers have."""
        costs = MeasuredCosts(times.rounds, moves.seconds)
        draft_s = 0.0 if self.drafting is None else self.drafting.draft_s
        return MeasuredSeconds.of(costs, times, draft_s)

    def _warm_up(self, weights: Params, bounds: Compile, rounds: str | None) -> Measured:
        measured = self.team.warm_up(weights, bounds, rounds)
        if self.drafting is not None:
            self.drafting.wait_ready()  # they compile by themselves, meanwhile
        return measured


def num_cpus(config: TrainConfig) -> int:
    """The CPUs of a Ray that a run starts, beside those of its trainers."""
    scoring = config.cluster.scorers * config.reward.workers
    drafting = (config.drafting.workers or 0) * config.sched.devices_per_worker
    return config.num_verifying + drafting + scoring + config.cluster.history_workers + SPARE_CPUS


@contextlib.contextmanager
def open_workers(
    config: TrainConfig,
    inputs: Inputs,
    dtype: np.dtype,
    speculation: Speculation,
    drafter: AnyDrafter | None,
    say: Callable[[str], None],
) -> Iterator[RayWorkers]:
    """Start Ray, or join it, and the workers; some of these may draft for the others.

    All are ended at the end. They draft as `speculation` has it; idle ones help with others' last
    requests, or learn for `drafter`, if it has spot training. Raises ProgramLost where they cannot
    start, with expected, got and mend.
    """
    from rl.cluster.ray_session import open_ray
    from rl.ray_roles.session import RaySession

    cluster, sched = config.cluster, config.sched
    cpus = num_cpus(config)
    limit_s = cluster.deadline_s
    text = dump(dataclasses.replace(config, cluster=ClusterConfig()))
    deadlines = Deadlines(limit_s, 2 * limit_s, config.run.compile_limit_s)
    with open_ray(cluster.address, cpus, limit_s), contextlib.ExitStack() as stack:
        session = RaySession(
            text,
            config.num_verifying,
            sched.devices_per_worker,
            deadline_s=limit_s,
            start_s=deadlines.start_s,
        )
        stack.callback(session.close)
        drafting = stack.enter_context(open_actors(config, inputs.model, dtype, say))
        jobs = Jobs(speculation)
        if (actors := drafting) is not None:
            jobs = Jobs(speculation, lambda worker: session.publish(worker, actors.apart(worker)))
        engines = _engines(config, inputs, dtype, jobs, drafter)
        options: dict[str, Any] = {"seed": config.run.seed, "hang_limit_s": config.run.hang_limit_s}
        kind = AheadEngine if sched.mode == "ahead" else MultiEngine
        engine = kind(engines, sched, spot=None if drafter is None else drafter.spot, **options)
        helping = None
        if config.drafting.helps:
            helping = make_planner(config)
            helping.drafting_workers = config.drafting.workers or 0
            have_idle_help(engine, speculation, helping)
        drafters = drafters_of(config, drafter)
        identity = identity_of(text, inputs.policy, config.draft_model_folder)

        def hello(number: int) -> Hello:
            return Hello(
                identity,
                str(inputs.policy),
                number,
                inputs.model,
                config.engine,
                np.dtype(dtype).name,
                sched.devices_per_worker,
                SILENCE * limit_s,
                config.speculation,
                config.tuner,
                config.run.seed,
                drafters,
            )

        team = Team(engines, jobs, session.connect, hello, deadlines, say)
        stack.enter_context(team)
        team.start()
        yield RayWorkers(engine, team, drafting, helping)


def _engines(
    config: TrainConfig, inputs: Inputs, dtype: np.dtype, jobs: Jobs, drafter: AnyDrafter | None
) -> list[RemoteEngine]:
    """Return the engines of the workers that verify."""
    layers = None if drafter is None else drafter.learned.config.feature_layers
    return [
        RemoteEngine(
            inputs.model,
            config.engine,
            dtype=dtype,
            number=i,
            jobs=jobs,
            hang_limit_s=config.run.hang_limit_s,
            feature_layers=layers,
        )
        for i in range(config.num_verifying)
    ]


def drafters_of(config: TrainConfig, drafter: AnyDrafter | None) -> Drafters:
    """Return what workers are told of the drafters on their devices."""
    model, learned = None, None
    if (folder := config.draft_model_folder) is not None:
        model = dataclasses.replace(config.draft_model, directory=str(folder))
    if drafter is not None:
        mine = drafter.learned
        shape = mine.config, mine.tree, config.drafter_training, mine.draft_ids_U
        learned = Learned(*shape, config.sampling.temperature)
    settings = config.drafting
    for_copies = settings.helps and MODEL in settings.methods
    return Drafters(model, learned, settings.drafts_apart, for_copies)


def bounds(
    config: TrainConfig,
    inputs: Inputs,
    reach: Reach,
    drafter: AnyDrafter | None = None,
) -> Compile:
    """Return what workers compile: what rollouts reach, evaluations that they answer, and what
    idle ones do for `drafter`.
    """
    options, spot = config.drafter, drafter is not None and drafter.spot is not None
    slots = config.engine
    sizes = buckets(slots.slot_bucket(slots.max_slots), slots.slot_bucket(1))
    most = max(config.rollout.num_requests, inputs.evals.num_questions * config.eval.samples)
    evaluates = not config.sched.beside_training
    return Compile(
        config.sampling,
        most if evaluates else config.rollout.num_requests,
        reach.max_prompt_tokens,
        reach.speculative,
        reach.reuse,
        None if reach.nodes is None else {n: tuple(sorted(reach.nodes(n))) for n in sizes},
        {
            name: {n: tuple((d.num_nodes, d.tree_tokens) for d in decisions(n)) for n in sizes}
            for name, decisions in reach.alone.items()
        },
        (options.batch_rows, options.row_tokens) if spot else None,
    )


def read_times(speculation: Speculation, folder: Path) -> None:
    """Set the seconds of rounds that the workers have measured."""
    speculation.times = read_rounds(folder / ROUNDS_FILE)

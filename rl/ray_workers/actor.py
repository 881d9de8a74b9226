"""A rollout worker in a Ray actor: an engine, its drafters, and a `RolloutWorker` that uses them.

One thread calls all methods. The program of the run calls them from `rl.ray_workers.place`.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from reprise.models.decoder import transformer
from reprise.rl.cluster import ray_session
from reprise.rl.cluster.actors import ActorDied, Handle
from reprise.rl.drafter_training.trainer import empty_batch
from reprise.rl.drafting.workers import RemoteDrafts
from reprise.rl.engine.rollout_spec import DrafterFactory, RolloutSpec
from reprise.rl.ray_workers.place import (
    Bounds,
    LearnedSettings,
    Measured,
    Reply,
    RolloutMessage,
    WorkerSettings,
)
from reprise.rl.records.stats import EngineStats
from reprise.rl.runtime.parallel_compile import keep_programs
from reprise.rl.runtime.waits import ProgramLost
from reprise.rl.speculation.device_drafters import DeviceDrafterSource, DraftModel, LearnedDrafter
from reprise.rl.speculation.history_workers import history_index
from reprise.rl.speculation.sources import Speculation, StepDrafts, history_rule, make_bandits
from reprise.rl.warm_up import compile_buckets, transfer_times
from reprise.rl.warm_up.rollout_programs import Reach
from reprise.rl.warm_up.round_times import load_or_measure
from reprise.rl.weights.versions import Offer, WeightCopy
from reprise.rl.workers.engines import make_engine, place_on
from reprise.rl.workers.group_drafts import SharedDrafts
from reprise.rl.workers.messages import Command, Report, WorkerLimits
from reprise.rl.workers.worker import RolloutWorker
from reprise.spec.budget.config import LEARNED, MODEL
from reprise.spec.config import SamplingConfig
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.model import EagleParams, EagleWeights
from reprise.spec.eagle_training import training as drafter_training
from reprise.spec.eagle_training.training_data import DrafterBatch, HiddenStates, RequestSample
from reprise.spec.reuse.rollout_cache import RolloutCache
from reprise.spec.round_times import RoundTimes
from reprise.spec.verification.sampling import KEY_IMPL


class _Sink:
    """Keeps the hidden states of a sample of requests until the next reply."""

    def __init__(self, number: int, sample: RequestSample) -> None:
        self._number = number
        self._sample = sample
        self.states = collections.deque[tuple[int, HiddenStates]]()

    def wants(self, request_id: int, num_tokens: int) -> bool:
        return request_id in self._sample

    def add(self, sequence: HiddenStates) -> None:
        self.states.append((self._number, sequence))


class WorkerActor:
    """The worker; `drafts` is the handle of the central draft server, or None."""

    def __init__(self, settings: WorkerSettings, drafts: Handle | None) -> None:
        keep_programs()
        if os.path.isdir(settings.folder):
            os.chdir(settings.folder)
        self._settings = settings
        self._drafts = drafts
        devices = jax.local_devices()
        count = settings.num_devices
        if count > len(devices):
            raise ValueError(
                f"expected {count} devices for Sched.devices_per_worker, got {len(devices)} on "
                f"{socket.gethostname()}"
            )
        self._learned = _learned(settings.learned)
        self._drafters = _drafters(settings, self._learned)
        place = place_on(devices[:count], settings.engine.model)
        self.engine = make_engine(settings.engine, place, number=settings.number)
        self._copy = WeightCopy(partial(_fetch, limit_s=settings.fetch_s))
        self._placed: tuple[int, Any] | None = None
        self._remarks = list[str]()
        self._apart = RemoteDrafts(self._remarks.append)
        own = dict(self._drafters)
        if settings.model_apart:
            own.pop(MODEL, None)
        self._bandits = make_bandits(settings.speculation, own, settings.tuner, settings.seed)
        self._speculation = self._make_speculation(None)
        self._sinks = list[_Sink]()
        self._training: tuple[int, EagleParams] | None = None
        self._worker: RolloutWorker | None = None
        self._reach: Reach | None = None  # once compiled
        self._is_tuned = False

    def _make_speculation(self, times: RoundTimes | None) -> Speculation:
        settings = self._settings
        return Speculation(
            settings.speculation,
            RolloutCache(),
            self._drafters,
            times=times,
            bandits=self._bandits,
            apart={MODEL: self._apart} if settings.model_apart else {},
            methods_of_copies=settings.methods_of_copies,
        )

    # -- before the first rollout ------------------------------------------------------------

    def prepare(self, weights: Offer, bounds: Bounds, rounds: str | None) -> Measured:
        """Compile unless already compiled, and measure; `rounds` is the text of known times."""
        if self._reach is None:
            self.compile(weights, bounds)
        assert self._reach is not None
        return self._measure(self._params(weights), bounds.sampling, self._reach, rounds)

    def compile(self, weights: Offer, bounds: Bounds) -> None:
        """Compile the programs that rollouts can reach."""
        params = self._params(weights)
        drafters = dict(self._drafters)
        if not self._settings.model_here:
            drafters.pop(MODEL, None)
        self._reach = whole_reach = dataclasses.replace(bounds.reach, drafters=drafters)
        compile_buckets.warm_up(self.engine, params, bounds.sampling, whole_reach)
        if bounds.batch is not None:
            self._compile_gradient(bounds.batch, params)

    def _measure(
        self, params: Any, sampling: SamplingConfig, reach: Reach, rounds: str | None
    ) -> Measured:
        settings = self._settings
        engine = self.engine
        moves = ""
        times = None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "moves.json")
            if rounds is None:
                transfer_times.measure(engine, params, sampling, reach, path)
                moves = path.read_text()
            if reach.speculative or reach.reuse:
                path = Path(folder, "rounds.json")
                if rounds:
                    path.write_text(rounds)
                times = load_or_measure(
                    path, engine, params, sampling, reach, speculation=settings.speculation
                )
                rounds = path.read_text()
                self._speculation = self._make_speculation(times)
            if reach.speculative:
                assert times is not None
                compile_buckets.compile_host_kernels(
                    settings.speculation,
                    times,
                    engine,
                    params,
                    sampling,
                    self._drafters,
                    settings.tuner,
                    {MODEL: RemoteDrafts(print)} if settings.model_apart else {},
                )
        return Measured(rounds or "", moves, self.engine.clock())

    def _params(self, offer: Offer) -> Any:
        """Return the weights of an offer on the devices of this worker, which hold one version."""
        if self._placed is None or self._placed[0] != offer.version:
            self._placed = None
            tree = jax.tree.structure(transformer.param_specs(self.engine.model))
            host = jax.tree.unflatten(tree, self._copy.take(offer))
            self._placed = offer.version, self.engine.place(host)
        return self._placed[1]

    # -- rollouts ----------------------------------------------------------------------------

    def join(self, limits: WorkerLimits) -> None:
        """Start a session, and abort the previous session if it was lost."""
        if self._worker is not None:
            self._worker.close(abort=True)
        self._worker = RolloutWorker(self.engine, limits, self._spec)
        self._sinks = []
        self._stats = EngineStats()
        self._sent = 0
        self._num_rollouts = 0

    def step(
        self, commands: Sequence[Command], max_s: float, drafter: tuple[int, Any] | None
    ) -> Reply:
        """See `RolloutWorker.step`; `drafter` holds new weights of the learned drafter, if any."""
        worker = self._session
        if drafter is not None:
            assert self._learned is not None
            [params] = _fetch([drafter[1]], self._settings.fetch_s)
            self._learned.swap(params)
        return self._reply(worker.step(commands, max_s))

    def leave(self, abort: bool) -> Reply:
        """Close the session; return a reply with everything not sent yet."""
        worker = self._session
        worker.close(abort=abort)
        self._worker = None
        return self._reply(worker.report(()))

    @property
    def _session(self) -> RolloutWorker:
        if self._worker is None:
            raise ProgramLost("its program was lost between two calls, and started again")
        return self._worker

    def _reply(self, report: Report) -> Reply:
        if report.stats is not self._stats:
            self._stats = report.stats
            self._sent = 0
            self._num_rollouts += 1
        timeline = report.stats.timeline
        stats = dataclasses.replace(report.stats, timeline=timeline[self._sent :])
        self._sent = len(timeline)
        states = list[tuple[int, HiddenStates]]()
        remarks = list(self._remarks)
        bandit = None
        del self._remarks[: len(remarks)]
        for sink in self._sinks:  # other threads may add more
            while sink.states:
                states.append(sink.states.popleft())
        if report.is_idle and self._bandits is not None:
            bandit = self._bandits.of(self.engine.number).state()
        return Reply(report._replace(stats=stats), self._num_rollouts, states, remarks, bandit)

    def _spec(self, message: RolloutMessage, stack: ExitStack) -> RolloutSpec:
        """Return the rollout of a message; `stack` closes its links to other programs."""
        sink = None
        if message.bandit is not None and not self._is_tuned:  # later messages have older states
            assert self._bandits is not None, "the run has the same budget"
            self._bandits.of(self.engine.number).load_state(message.bandit)
            self._is_tuned = True
        if message.sample is not None:
            sink = _Sink(message.sink, message.sample)
            self._sinks = [*self._sinks[-1:], sink]
        drafts = message.spec.drafts
        if isinstance(drafts, StepDrafts):
            drafts = self._drafter(message, drafts, stack)
        return dataclasses.replace(
            message.spec,
            params=self._params(message.weights),
            key=jax.random.wrap_key_data(message.key, impl=KEY_IMPL),
            drafts=drafts,
            sink=sink,
            times=self._speculation.times,
        )

    def _drafter(
        self, message: RolloutMessage, drafts: StepDrafts, stack: ExitStack
    ) -> DrafterFactory:
        speculation = self._speculation
        server = None
        index = None
        config = speculation.config
        if message.apart is not None:
            self._apart.use(message.apart, speculation.times)
        if self._drafts is not None and "group" in config.sources:
            exchange = partial(_exchange, self._drafts, self._settings.fetch_s)
            shared = SharedDrafts(message.name, drafts.group_size, exchange, self._remarks.append)
            server = stack.enter_context(shared)
        if config.history_source is not None:
            pairs = zip(drafts.keys, drafts.prompts, strict=True)
            index = history_index(
                drafts.history,
                {key: np.asarray(ids, np.int32) for key, ids in pairs},
                drafts.shards,
                history_rule(config),
                self._settings.fetch_s,
                self._remarks.append,
            )
        return speculation.drafter_factory(
            drafts.keys,
            drafts.prompts,
            drafts.last,
            first_group=drafts.first_group,
            group_size=drafts.group_size,
            server=server,
            index=index,
        )

    # -- training of the drafter -------------------------------------------------------------

    def gradients(
        self, weights: Offer, drafter: tuple[int, Any], batch: DrafterBatch
    ) -> tuple[EagleParams, dict[str, float]]:
        """Return the gradient and metrics of a micro-batch; `drafter` is (step, weights)."""
        if self._training is None or self._training[0] != drafter[0]:
            [params] = _fetch([drafter[1]], self._settings.fetch_s)
            self._training = drafter[0], params
        return self._gradients(self._training[1], batch, self._params(weights))

    def _compile_gradient(self, shape: tuple[int, int], policy: Any) -> None:
        assert self._learned is not None and self._settings.learned is not None
        batch = empty_batch(shape, self._settings.learned.config, self.engine.dtype)
        self._gradients(self._learned.newest[1], batch, policy)

    def _gradients(
        self, params: EagleParams, batch: DrafterBatch, policy: Any
    ) -> tuple[EagleParams, dict[str, float]]:
        learned = self._settings.learned
        engine = self.engine
        assert learned is not None, "there is a learned drafter"
        ids_U = learned.draft_ids_U
        with engine.mesh_context():
            grads, metrics = drafter_training.gradients(
                jax.tree.map(lambda x: engine.put(np.asarray(x)), params),
                eagle.frozen(policy, None if ids_U is None else engine.put(ids_U)),
                jax.tree.map(engine.argument, batch),
                np.float32(learned.temperature),
                config=learned.config,
                training=learned.training,
            )
            fetched: tuple[EagleParams, dict[str, Any]] = jax.device_get((grads, metrics))
            return fetched[0], {name: float(x) for name, x in fetched[1].items()}


def _learned(settings: LearnedSettings | None) -> LearnedDrafter | None:
    """Return a learned drafter with random weights, until the first weights arrive."""
    if settings is None:
        return None
    params = eagle.init(settings.config, jax.random.key(0))
    return LearnedDrafter(
        EagleWeights(settings.config, params, settings.draft_ids_U), settings.tree
    )


def _drafters(
    settings: WorkerSettings, learned: LearnedDrafter | None
) -> dict[str, DeviceDrafterSource]:
    drafters = dict[str, DeviceDrafterSource]()
    if (model := settings.draft_model) is not None:
        if not Path(str(model.directory)).exists():
            raise ValueError(
                f"expected the draft model {model.directory} on {socket.gethostname()}, whose "
                "worker drafts with it: put the same folder there"
            )
        read = DraftModel.load if settings.model_here else DraftModel.elsewhere
        drafters[MODEL] = read(model)
    if learned is not None:
        drafters[LEARNED] = learned
    return drafters


def _fetch(references: Sequence[Any], limit_s: float) -> list[Any]:
    """Return values from Ray's store. Raises ActorDied if a value is lost; the actor restarts."""
    values = ray_session.fetch(references, limit_s)
    for value in values:
        if isinstance(value, Exception):
            raise ActorDied(str(value)) from value
    return values


def _exchange(handle: Handle, limit_s: float, *news: Any) -> Any:
    return handle.submit("call", "exchange", *news).result(limit_s)

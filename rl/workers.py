"""Several engines under one scheduler: a rollout whose requests run where it decides.

Each worker is a thread with an engine on devices of its own. All talk to one coordinator,
which tells the scheduler what happens, under a lock and with the time, and hands its answers
out. Tokens do not depend on any of it: a request's are a function of its seed.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from models import transformer
from models.config import ModelConfig
from models.sharding import MeshConfig, make_mesh
from rl.coordinator import Aborted, Coordinator, WorkerError, WorkerFeed
from rl.engine import Engine, OnFinish, OnRound
from rl.engine_config import EngineConfig
from rl.kv_pool import KvPool
from rl.timeline import EngineStats, joined
from rl.trajectory import Request, Trajectory, check_requests, longest_tokens
from sched.policies import make_scheduler
from sched.replay import Decision
from spec.budget import Budget
from spec.drafter import Drafter
from spec.prefix_reuse import PrefixRule
from spec.sampling import SamplingConfig

ON_ERROR = ("stop", "restart")


@dataclasses.dataclass(frozen=True)
class SchedConfig:
    """Rollout workers, and the scheduler that says what runs where; none of it changes a token.

    With one worker rollouts run on the trainer's devices, as `Engine` says. More have
    `devices_per_worker` devices each, in the order of the process's devices; where there are
    not enough, workers of one device share them. A worker's requests take `kv_tokens`
    positions together at most (None: as many as its slots can need). Those that wait between
    two chunks keep keys and values of `pool_bytes` on the host.
    """

    policy: str = "seer"
    workers: int = 1
    devices_per_worker: int = 1
    chunk_tokens: int = 512
    kv_tokens: int | None = None
    pool_bytes: int = 2**33
    on_error: str = "stop"  # or restart: the requests of a worker that raised go on elsewhere

    def __post_init__(self) -> None:
        make_scheduler(self.policy, seed=0, chunk_tokens=self.chunk_tokens)
        if self.policy == "oracle":
            raise ValueError("policy 'oracle' knows lengths beforehand: it is for simulations only")
        if min(self.workers, self.devices_per_worker) < 1:
            raise ValueError(
                f"expected a worker and a device at least, got {self.workers} workers of "
                f"{self.devices_per_worker} devices"
            )
        if self.on_error not in ON_ERROR:
            raise ValueError(f"expected on_error of {', '.join(ON_ERROR)}, got {self.on_error!r}")


@dataclasses.dataclass(frozen=True)
class RolloutSpec:
    """What stays the same over one rollout."""

    sampling: SamplingConfig
    key: jax.Array
    stop_token_ids: Sequence[int]
    policy_version: int


class Workers:
    """Engines on devices of their own, with the interface of one engine.

    `seed` is the scheduler's; each rollout has a fresh one.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        config: SchedConfig,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engines, self.config = list(engines), config
        self._seed, self._clock = seed, clock
        self.stats = EngineStats()
        self.decisions: list[Decision] = []

    @property
    def dtype(self) -> np.dtype:
        return self.engines[0].dtype

    def run(
        self,
        params: transformer.Params,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        *,
        stop_token_ids: Sequence[int],
        policy_version: int = 0,
        drafter: Drafter | None = None,
        budget: Budget | None = None,
        rule: PrefixRule | None = None,
        on_finish: OnFinish | None = None,
        on_round: OnRound | None = None,
    ) -> list[Trajectory]:
        """Every request to its end; trajectories in the order of the requests.

        `on_finish` is called here, in the caller's thread, as responses end; so is `on_round`,
        now and then: what it raises ends the rollout. Raises WorkerError where a worker raised
        and is not restarted, ValueError for drafts and reuse, which one worker has.
        """
        if drafter is not None or rule is not None:
            raise ValueError("expected no drafter and no reuse with several workers")
        check_requests(self.engines[0].model, requests, sampling.max_new_tokens)
        rollout = RolloutSpec(sampling, key, stop_token_ids, policy_version)
        weights = [engine.place(params) for engine in self.engines]
        slots = min(self.engines[0].config.slots, len(requests))
        longest = longest_tokens(requests, sampling.max_new_tokens)
        kv_tokens = self.config.kv_tokens or slots * longest
        scheduler = make_scheduler(
            self.config.policy, seed=self._seed, chunk_tokens=self.config.chunk_tokens
        )
        pool = KvPool(self.config.pool_bytes)
        coordinator = Coordinator(scheduler, self._clock, pool)
        threads: dict[int, threading.Thread] = {}
        engine_of: dict[int, int] = {}

        def join(worker_id: int, engine: int) -> None:
            coordinator.join(worker_id, kv_tokens, slots)
            feed = WorkerFeed(worker_id, coordinator, pool, slots, longest)
            arguments = (
                *(worker_id, self.engines[engine], weights[engine]),
                *(rollout, feed, coordinator),
            )
            thread = threading.Thread(target=_work, args=arguments, daemon=True)
            threads[worker_id], engine_of[worker_id] = thread, engine
            thread.start()

        done: dict[int, Trajectory] = {}
        whole = False
        try:
            for i in range(len(self.engines)):
                join(i, i)
            coordinator.submit(requests, rollout.sampling.max_new_tokens)
            while len(done) < len(requests):
                result = coordinator.next_result(timeout_s=0.05)
                if isinstance(result, WorkerError):
                    if self.config.on_error == "stop":
                        raise result
                    # its successor first, so that what it ran has somewhere to go
                    join(max(threads) + 1, engine_of[result.worker_id])
                    coordinator.lose(result.worker_id)
                elif result is not None:
                    done[result.request_id] = result
                    if on_finish is not None:
                        on_finish(result)
                if on_round is not None:
                    on_round(len(done), sum(e.stats.tokens for e in self.engines))
            whole = True
        finally:
            coordinator.close(abort=not whole)
            self.decisions = coordinator.decisions
            for thread in threads.values():
                thread.join()
        self.stats = joined([engine.stats for engine in self.engines])
        return [done[r.request_id] for r in requests]


def make_engines(
    model: ModelConfig, engine: EngineConfig, config: SchedConfig, *, dtype: np.dtype
) -> list[Engine]:
    """An engine for each worker, on devices of its own as far as there are any.

    Raises ValueError where workers of several devices do not fit into those of this process.
    """
    devices, size = jax.local_devices(), config.devices_per_worker
    needed = config.workers * size
    if size > 1 and needed > len(devices):
        raise ValueError(
            f"expected {needed} devices for Sched.workers={config.workers} of "
            f"Sched.devices_per_worker={size}, got {len(devices)}; mend: fewer of either, or on a "
            f"CPU XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        )
    engines = []
    for i in range(config.workers):
        mine = [devices[(i * size + j) % len(devices)] for j in range(size)]
        place: dict[str, Any] = {"mesh": make_mesh(MeshConfig(data=1, tensor=size), mine)}
        if size == 1:  # the first device is the default one, whose programs are there
            place = {"device": None if mine == devices[:1] else mine[0]}
        engines.append(Engine(model, engine, dtype=dtype, **place))
    return engines


def _work(
    worker_id: int,
    engine: Engine,
    params: transformer.Params,
    rollout: RolloutSpec,
    feed: WorkerFeed,
    coordinator: Coordinator,
) -> None:
    """A worker's thread: one phase of its engine, fed by the coordinator."""
    try:
        engine.run(
            params,
            (),
            rollout.sampling,
            rollout.key,
            stop_token_ids=rollout.stop_token_ids,
            policy_version=rollout.policy_version,
            feed=feed,
            on_finish=lambda trajectory: coordinator.finished(worker_id, trajectory),
            on_round=coordinator.check,
        )
    except Aborted:
        pass
    except BaseException as error:
        coordinator.failed(worker_id, error)

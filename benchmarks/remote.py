"""Rollout workers in programs of their own, on Ray, against workers in threads: tokens and losses.

    python -m benchmarks.remote --json --output benchmarks/results/remote.json

Three workers in threads answer a set of requests; three programs answer the same ones, with drafts
from history, siblings and own text. Then programs are killed at random points of rollouts, until
`--kills` have been; one is stopped (it answers no more, and does not end), and a fourth comes when
a rollout is half done. Counted: tokens that differ from those of the threads, requests that never
came, and what the rollouts themselves saw of it. `ping_ms` is the time of a message and its answer
to an idle worker, `messages_per_round` how many a round of a worker costs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import environment
from models import transformer
from models.config import ModelConfig
from rl.cluster.join import identity_of
from rl.engine.config import EngineConfig
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from rl.ray_roles.session import RaySession, open_ray
from rl.remote.jobs import Jobs
from rl.remote.link import Link
from rl.remote.messages import Hello, Ping, Pong
from rl.remote.remote_engine import RemoteEngine
from rl.remote.team import Deadlines, Team
from rl.speculation.config import SpeculationConfig
from rl.speculation.sources import Speculation
from rl.trajectory import Request, Trajectory
from rl.workers.config import SchedConfig
from rl.workers.multi_engine import MultiEngine
from sched.protocol import ChunkDone, WorkerJoined, WorkerLost
from spec.budget.config import TunerConfig
from spec.config import SamplingConfig
from spec.reuse.rollout_cache import CachedGroup, CachedResponse, RolloutCache
from spec.sampling import step_key

MODEL = ModelConfig("llama", 64, 32, 2, 2, 2, 16, 64, max_positions=256)
ENGINE = EngineConfig(8, 8, 64, 4, 8, 64, 2, 32)
SAMPLING = SamplingConfig(max_new_tokens=96)
SCHED = SchedConfig(policy="seer", workers=3, chunk_tokens=12)
SPECULATION = SpeculationConfig(budget="fixed:3", sources=("history", "group", "own"))
GROUPS, SAMPLES, STOP, SEED = 6, 8, (3,), 0
DEADLINE_S, START_S = 20.0, 180.0
PINGS = 200


def policy() -> Any:
    """Return random weights; their responses have 1 to 96 tokens."""
    rng = np.random.default_rng(SEED)

    def one(spec: Any) -> np.ndarray:
        return (2 * (spec.scale or 0.5) * rng.standard_normal(spec.shape)).astype(np.float32)

    return jax.tree.map(one, transformer.param_specs(MODEL))


class Trial:
    """The requests and their answers by threads, which also are the history that drafts have."""

    def __init__(self) -> None:
        rng = np.random.default_rng(SEED + 1)
        self.params = policy()
        self.prompts = [
            tuple(rng.integers(4, 64, rng.integers(2, 20)).tolist()) for _ in range(GROUPS)
        ]
        self.keys = [f"q{g}" for g in range(GROUPS)]
        self.requests = [
            Request(SAMPLES * g + i, self.prompts[g], g, i)
            for i in range(SAMPLES)
            for g in range(GROUPS)
        ]
        self.cache = RolloutCache()
        threads = MultiEngine([Engine(MODEL, ENGINE, number=i) for i in range(3)], SCHED)
        with Speculation(SPECULATION, self.cache) as speculation:
            self.expected = self.run(threads, speculation)
        for g, key in enumerate(self.keys):
            own = [t for t in self.expected if t.group_id == g]
            responses = tuple(CachedResponse(t.sample_index, t.response_ids, 1.0) for t in own)
            self.cache.replace(key, CachedGroup(np.asarray(self.prompts[g], np.int32), responses))

    def run(
        self, engine: MultiEngine, speculation: Speculation, on_round: Any = None
    ) -> list[Trajectory]:
        drafts = speculation.drafter_factory(self.keys, self.prompts, group_size=SAMPLES)
        spec = RolloutSpec(self.params, SAMPLING, step_key(SEED, 0), STOP, 1, drafts)
        return engine.run(spec, self.requests, on_round=on_round)

    def differing(self, done: Sequence[Trajectory]) -> int:
        """Return how many tokens differ; a response of another length differs in what is more."""
        total = 0
        for wanted, got in zip(self.expected, done, strict=True):
            a, b = wanted.response_ids, got.response_ids
            n = min(len(a), len(b))
            total += int((a[:n] != b[:n]).sum()) + max(len(a), len(b)) - n
        return total

    @property
    def num_tokens(self) -> int:
        return sum(t.num_tokens for t in self.expected)


class Killer:
    """Sends signals to programs at random numbers of tokens of each rollout."""

    def __init__(self, multi: MultiEngine, num_tokens: int, seed: int) -> None:
        self._engines, self._num_tokens = multi.engines, num_tokens
        self._random = random.Random(seed)
        self._at: list[tuple[int, int]] = []
        self.sent: list[int] = []

    def plan(self, signals: Sequence[int]) -> None:
        """Send these in the rollout to come."""
        points = sorted(self._random.randrange(self._num_tokens) for _ in signals)
        self._at = list(zip(points, signals, strict=True))

    def __call__(self, finished: int, tokens: int) -> None:
        while self._at and tokens >= self._at[0][0]:
            running = [e for e in self._engines if isinstance(e, RemoteEngine) and e.runs]
            running = [e for e in running if e.is_ready]
            if not running:
                return
            os.kill(self._random.choice(running).pid, self._at[0][1])
            self.sent.append(self._at.pop(0)[1])


def make_team(session: RaySession, count: int) -> tuple[MultiEngine, Team]:
    jobs = Jobs()

    def engine(number: int) -> RemoteEngine:
        options: dict[str, Any] = {"dtype": "float32", "jobs": jobs, "hang_limit_s": START_S}
        return RemoteEngine(MODEL, ENGINE, number=number, **options)

    identity = identity_of("", Path(__file__))

    def hello(number: int) -> Hello:
        engine = MODEL, ENGINE, "float32", 1
        return Hello(
            *(identity, "none", number, *engine), START_S, SPECULATION, TunerConfig(), SEED
        )

    multi = MultiEngine([engine(i) for i in range(count)], SCHED, keeps_decisions=True)
    deadlines = Deadlines(DEADLINE_S, START_S, START_S)
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731
    team = Team([], jobs, session.connect, hello, deadlines, say)
    team.engines = multi.engines  # type: ignore[assignment]
    return multi, team


def counted_messages() -> Any:
    """Count the messages of all links from now on."""
    count = itertools.count()
    submit = Link.submit

    def counting(self: Link, message: Any) -> Any:
        next(count)
        return submit(self, message)

    Link.submit = counting  # type: ignore[method-assign]
    return count


def ping_ms(engine: RemoteEngine) -> float:
    link, taken = engine.link, []
    assert link is not None
    for _ in range(PINGS):
        began_s = time.perf_counter()
        link.ask(Ping(), Pong)
        taken.append(time.perf_counter() - began_s)
    return 1e3 * statistics.median(taken)


def measure(kills: int) -> dict[str, Any]:
    """Return the figures."""
    trial = Trial()
    with (
        open_ray(None, 6, 120.0),
        Speculation(SPECULATION, trial.cache) as speculation,
    ):
        speculation.for_others = True
        session = RaySession("", 4, 1, deadline_s=DEADLINE_S, start_s=START_S)
        multi, team = make_team(session, 4)
        late = multi.engines.pop()  # it comes in the last rollout
        with team:
            team.start()
            first = multi.engines[0]
            assert isinstance(first, RemoteEngine)
            figures: dict[str, Any] = {"tokens_of_a_rollout": trial.num_tokens}
            trial.run(multi, speculation)  # compiles
            count = counted_messages()
            figures["tokens_that_differ"] = trial.differing(trial.run(multi, speculation))
            figures["accepted_draft_tokens"] = multi.stats.accepted_tokens
            rounds = multi.stats.fetches
            figures["messages_per_round"] = round((next(count)) / max(rounds, 1), 3)
            figures["ping_ms"] = round(ping_ms(first), 2)
            figures |= under_kills(trial, multi, team, speculation, late, kills)
        session.close()
    return figures


def under_kills(
    trial: Trial,
    multi: MultiEngine,
    team: Team,
    speculation: Speculation,
    late: Engine,
    kills: int,
) -> dict[str, Any]:
    """Rollouts until enough programs were killed, then one with a hang and a late joiner."""
    killer = Killer(multi, trial.num_tokens, SEED)
    differing = rollouts = chunks = lost = joined = compared = 0
    came = False
    while (killed := killer.sent.count(signal.SIGKILL)) < kills or not came:
        if killed < kills:
            killer.plan([signal.SIGKILL] * min(2, kills - killed))
        else:
            killer.plan([signal.SIGSTOP])
            killer._num_tokens = trial.num_tokens // 2

        def on_round(finished: int, tokens: int, last: bool = killed >= kills) -> None:
            nonlocal came
            killer(finished, tokens)
            if last and finished >= len(trial.requests) // 2 and not came:
                came = True
                multi.engines.append(late)

        done = trial.run(multi, speculation, on_round)
        differing, rollouts = differing + trial.differing(done), rollouts + 1
        compared += trial.num_tokens
        events = [d.event for d in multi.decisions]
        lost += sum(isinstance(e, WorkerLost) for e in events)
        chunks += sum(isinstance(e, ChunkDone) for e in events)
        joined += sum(isinstance(e, WorkerJoined) for e in events)
        wait_for_programs(multi)
    done = trial.run(multi, speculation)  # with the one that came late
    return {
        "kills": killer.sent.count(signal.SIGKILL),
        "stopped": killer.sent.count(signal.SIGSTOP),
        "came_late": int(came),
        "rollouts_with_losses": rollouts,
        "workers_lost_in_rollouts": lost,
        "programs_started_again": len(team.losses),
        "chunks": chunks,
        "tokens_compared": compared + trial.num_tokens,
        "tokens_that_differ_with_losses": differing + trial.differing(done),
    }


def wait_for_programs(multi: MultiEngine) -> None:
    """Until all are there again: the next rollout begins with as many as the first."""
    until_s = time.monotonic() + START_S
    while not all(e.is_ready for e in multi.engines):
        assert time.monotonic() < until_s, "programs come back in time"
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote", description=__doc__)
    environment.add_output_flags(parser)
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    figures = measure(args.kills)
    record = environment.record("benchmarks.remote", ("jax", "numpy", "ray"))
    environment.show(record | figures, args, figures)
    return int(bool(figures["tokens_that_differ"] or figures["tokens_that_differ_with_losses"]))


if __name__ == "__main__":
    sys.exit(main())

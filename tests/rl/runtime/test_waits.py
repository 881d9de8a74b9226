"""Every wait of a run has an end, and what is waited for is named: a hang is planted in each.

The waits are those of the table in docs/architecture.md, "Stops and hangs". A hang is a wait for an
event that no thread sets, in place of a device, a disk or a thread that does not return. Deadlines
are a second. Engines, rewards and a pipeline's other parts are fakes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import jax.numpy as jnp
import jax.random
import pytest
from trajectories import trajectory
from whole_steps import whole_steps

from reprise.rl.assembly import setup as run_setup
from reprise.rl.checkpoint import checkpointer
from reprise.rl.drafter_training.spot_trainer import SpotTrainer
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.rl.rewards import pool as rewards
from reprise.rl.rewards.config import RewardConfig
from reprise.rl.rewards.process import RewardWorkerError
from reprise.rl.runtime import signals
from reprise.rl.runtime.parallel_compile import compile_all
from reprise.rl.runtime.signals import STARTING, Limits, Watch
from reprise.rl.runtime.waits import POLL_S, Deadline, Hang
from reprise.rl.sessions import driver
from reprise.rl.sessions.multi_engine import MultiEngine
from reprise.rl.sessions.session import Session
from reprise.rl.slots.config import EngineConfig
from reprise.rl.speculation import sources
from reprise.rl.workers.config import SchedConfig
from reprise.rl.workers.messages import WorkerError
from reprise.spec.config import SamplingConfig
from reprise.spec.reuse.rollout_cache import RolloutCache
from tests.support import tiny_run

LIMIT_S = 1.0  # a thread of a busy machine has run by then
NEVER_S = 60.0  # and then it goes on: a hang that nothing ends is counted, not waited for
REQUESTS = [Request(i, (1, 2), 0, i) for i in range(2)]
NOT_ENDED = "nothing has ended it"

Never = threading.Event


def response(request: Request) -> Trajectory:
    of = {"group": request.group_id, "sample": request.sample_index, "reward": None}
    return trajectory(request.request_id, request.prompt_ids, [0] * 4, **of)


def words_of(kind: type[BaseException], work: Callable[[], object]) -> str:
    """What is said where a deadline ends `work`."""
    try:
        work()
    except kind as error:
        return str(error)
    return NOT_ENDED


# --- the main thread ---------------------------------------------------------------------


def compilation(never: Never) -> str:
    """XLA does not come back with a program, in a thread of its own; other parts: test_signals."""
    step, said = SimpleNamespace(compile=lambda: never.wait(NEVER_S)), list[str]()
    watch = Watch(Limits(NEVER_S, LIMIT_S), say=said.append, end=lambda status: never.set())
    with mock.patch.object(signals, "SPEAKING_S", NEVER_S), watch:
        watch.at(STARTING)
        compile_all([step], 1)
    return said[-1] if said else NOT_ENDED


# --- workers -----------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class StandIn:
    """An engine that answers at once; one that `hangs` does not come back from that part."""

    hangs: str
    never: Never
    number: int = 0
    config: ClassVar[EngineConfig] = EngineConfig(slots=4, min_slots=4)
    where: ClassVar[str] = "nowhere"
    makes_shapes: ClassVar[bool] = False
    clock: ClassVar[Callable[[], float]] = time.monotonic

    def abandoned(self) -> StandIn:
        return dataclasses.replace(self)

    def place(self, params: Any) -> None:
        self._at("weights")

    def mesh_context(self) -> Any:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def rollout(self, spec: Any, **_: object) -> Iterator[None]:
        self.waiting: list[Any] = []
        yield
        self._at("end")

    def add(self, requests: Sequence[Any]) -> None:
        self.waiting += requests

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Trajectory]:
        self._at("rounds")
        ended, self.waiting = self.waiting, []
        return [response(partial_request.request) for partial_request in ended]

    def _at(self, part: str) -> None:
        if part == self.hangs:
            self.never.wait(NEVER_S)


def worker(part: str, never: Never, on_error: Any = "stop") -> str:
    """Its thread hangs with its requests, or once there is nothing more to come."""
    team = team_of([StandIn(part, never)], on_error=on_error)
    return words_of(WorkerError, lambda: rollout(team))


def spare_time(never: Never) -> str:
    """A worker without requests hangs in a unit of the drafter's training."""
    trainer = SimpleNamespace(
        buffer=SimpleNamespace(num_sequences=1),
        step=0,
        begin=lambda step: None,
        context=lambda runner, _: SimpleNamespace(runner=runner),
        work=lambda *_, leads: never.wait(NEVER_S),
        abandon=lambda: None,
    )
    spot = SpotTrainer(trainer, 1, time.monotonic)  # type: ignore[arg-type]
    spot.prepare({}, 1)
    team = team_of([StandIn("nowhere", never) for _ in range(2)], spot)
    return words_of(WorkerError, lambda: poll(team, spot=spot))


def drivers_thread(never: Never) -> str:
    """It hangs with a result, as in a copy or a score, while the main thread waits for others."""
    team = team_of([StandIn("nowhere", never)])
    return words_of(Hang, lambda: poll(team, deliver=lambda result: never.wait(NEVER_S)))


def poll(team: MultiEngine, **options: Any) -> None:
    """A session that goes on after its results, until one is an error."""
    until_s, key = time.monotonic() + NEVER_S, jax.random.key(0)
    with team.session(team.make_scheduler(), 4, 8, **options) as session:
        submit(session, key)
        while time.monotonic() < until_s:
            session.next_result(POLL_S)


def rollout(team: MultiEngine) -> None:
    """All requests of a step, to their end."""
    missing, key = len(REQUESTS), jax.random.key(0)  # compiled before anything waits
    with team.session(team.make_scheduler(), 4, 8) as session:
        submit(session, key)
        while missing:
            missing -= session.next_result(POLL_S) is not None


def submit(session: Session, key: jax.Array) -> None:
    """The requests of a step."""
    session.submit(0, RolloutSpec({}, SamplingConfig(max_new_tokens=4), key), REQUESTS)


def team_of(
    engines: Sequence[StandIn],
    spot: SpotTrainer | None = None,
    on_error: Any = "stop",
    limit_s: float = LIMIT_S,
) -> MultiEngine:
    config = SchedConfig(policy="group_fifo", workers=len(engines), on_error=on_error)
    options: dict[str, Any] = {"spot": spot, "hang_limit_s": limit_s}
    return MultiEngine(engines, config, **options)  # type: ignore[arg-type]


# --- other threads -----------------------------------------------------------------------


def scores(never: Never) -> str:
    """No reward worker comes back, nor is there one in its place."""
    config = RewardConfig(functions=("exact_match",), deadline_s=LIMIT_S / 10)
    with mock.patch.object(rewards, "MARGIN_S", LIMIT_S / 10):
        pool = rewards.RewardPool(config, startup_s=0.0)
        return words_of(RewardWorkerError, lambda: pool.result(Future()))


def background_save(part: str, never: Never) -> str:
    """The arrays, or the manifest behind them, are never written; nor does closing wait."""
    with _save_that_hangs(part, never) as (saver, _):
        first, again = (words_of(Hang, work) for work in (saver.wait, saver.close))
    return NOT_ENDED if again == NOT_ENDED else first


def turn_to_save(never: Never) -> str:
    """Another directory's save has the turn, and does not go on."""
    with _save_that_hangs("wait_until_finished", never) as (_, folder):
        with checkpointer.Checkpointer(folder / "other", deadline=Deadline(LIMIT_S)) as other:
            return words_of(Hang, lambda: other.save(1, {"x": jnp.zeros(2)}))


@contextlib.contextmanager
def _save_that_hangs(part: str, never: Never) -> Iterator[tuple[checkpointer.Checkpointer, Path]]:
    """A save that does not go on in the background, and a folder beside its own."""
    with tempfile.TemporaryDirectory() as folder:
        saver = checkpointer.Checkpointer(Path(folder, "one"), deadline=Deadline(LIMIT_S))
        where = checkpointer.manifest if part == "write_manifest" else saver._orbax
        written = getattr(where, part)

        def hang(*args: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                never.wait(NEVER_S)
            return written(*args)

        with mock.patch.object(where, part, hang):
            saver.save(1, {"x": jnp.zeros(2)})
            try:
                yield saver, Path(folder)
            finally:
                never.set()
                saver._hangs, saver._deadline = False, Deadline(NEVER_S)  # it now ends
                saver.close()


def history_index(never: Never) -> str:
    """The index of the next step's prompts is never built; the save that follows does not wait."""
    config = sources.SpeculationConfig(sources=("history",))
    deadline = Deadline(LIMIT_S)
    with (
        mock.patch.object(sources, "build_index", lambda *_: never.wait(NEVER_S)),
        sources.Speculation(config, RolloutCache(), deadline=deadline) as speculates,
    ):
        speculates.prepare({"a": (1, 2)})
        words = words_of(Hang, speculates.settle)
        return words if words_of(Hang, speculates.settle) == NOT_ENDED else NOT_ENDED


# what hangs, and the words that name it
PLANTED: dict[str, tuple[Callable[[Never], str], str]] = {
    "main thread: compiling": (
        compilation,
        "main thread at starting (rl/runtime/parallel_compile.py",
    ),
    "worker: rounds": (partial(worker, "rounds"), "while generating"),
    "worker: weights": (partial(worker, "weights"), "while generating"),
    "worker: weights, each time": (
        partial(worker, "weights", on_error="restart"),
        "worker 3 failed on requests 0, 1: Hang: no sign of life",
    ),
    "worker: spare time": (spare_time, "while training the drafter"),
    "worker: its end": (partial(worker, "end"), "worker 0 failed on requests none: Hang"),
    "driver's thread": (drivers_thread, "from the driver's thread (tests/rl/runtime/"),
    "scores": (scores, "no reward worker has answered for"),
    "save: arrays": (
        partial(background_save, "wait_until_finished"),
        "waits for a save in FOLDER/one: no sign of life",
    ),
    "save: manifest": (
        partial(background_save, "write_manifest"),
        "waits for a save in FOLDER/one: no sign of life",
    ),
    "save: its turn": (turn_to_save, "other waits for a save in FOLDER/one: no sign of life"),
    "index of the history": (history_index, "waits for the index of the prompts' history"),
}


@pytest.mark.fault
@pytest.mark.parametrize("wait", PLANTED)
def test_a_hang_is_ended_and_named(wait):
    hang, named = PLANTED[wait]
    never = threading.Event()
    try:
        said = hang(never)
    finally:
        never.set()
    assert named in re.sub(re.escape(tempfile.gettempdir()) + r"/\w+", "FOLDER", said)


@pytest.mark.fault
def test_an_abandoned_rollout_does_not_wait_for_a_hanging_worker(monkeypatch):
    """It waits for less than a hang's limit: somebody has asked for the end."""
    monkeypatch.setattr(driver, "LEAVING_S", 0.2)
    never, begun = threading.Event(), time.monotonic()
    team = team_of([StandIn("rounds", never)], limit_s=60.0)
    with pytest.raises(KeyboardInterrupt):
        with team.session(team.make_scheduler(), 4, 8) as left:
            submit(left, jax.random.key(0))
            raise KeyboardInterrupt
    assert time.monotonic() - begun < 20
    never.set()


def test_a_worker_without_requests_is_ended_by_close():
    """Nobody watches it, and it does not count as one that hangs."""
    team = team_of([StandIn("nowhere", threading.Event())])
    with team.session(team.make_scheduler(), 4, 8) as idle:
        until = time.monotonic() + 3 * LIMIT_S
        while time.monotonic() < until:
            assert idle.next_result(0.05) is None
        assert idle._thread.is_alive()
    assert not idle._thread.is_alive()


@pytest.mark.fault
def test_a_save_waits_while_another_makes_progress(tmp_path, monkeypatch):
    heartbeat, beats = [], iter(range(8))
    other = SimpleNamespace(directory="there", _progress=lambda: next(beats, None))
    monkeypatch.setattr(checkpointer, "_writer", other)
    deadline, began_s = Deadline(0.2, lambda: heartbeat.append(1)), time.monotonic()
    with checkpointer.Checkpointer(tmp_path, deadline=deadline) as saver, checkpointer._writing:
        with pytest.raises(Hang, match="waits for a save in there: no sign of life for"):
            saver.save(1, {"x": jnp.zeros(2)})
    assert len(heartbeat) >= 8 and time.monotonic() - began_s > 0.5


@pytest.mark.fault
def test_an_index_that_hangs_ends_the_run_with_the_last_whole_step_saved(
    tiny, tmp_path, monkeypatch
):
    never, build, begun = threading.Event(), sources.build_index, []

    class Impatient:
        """A short deadline for the index that hangs alone: others take as long as they take."""

        heartbeat = Deadline().heartbeat
        hang_limit_s = property(lambda self: 0.3 if len(begun) == 2 else 60.0)

    def impatient(*args, **options):
        return sources.Speculation(*args, **options | {"deadline": Impatient()})

    def hanging(*args):
        if threading.current_thread() is not threading.main_thread():
            begun.append(args)
            if len(begun) == 2:  # in the second step, for the third
                never.wait(60)
        return build(*args)

    monkeypatch.setattr(sources, "build_index", hanging)
    monkeypatch.setattr(run_setup, "Speculation", impatient)
    settings = ("Speculation.budget='fixed:1'", "Speculation.sources=('history',)")
    with pytest.raises(Hang, match="waits for the index of the prompts' history"):
        tiny_run.train(tiny, tmp_path, *settings, "Checkpoint.every_steps=0")
    assert whole_steps(tmp_path / "checkpoints")[0] == 2
    never.set()

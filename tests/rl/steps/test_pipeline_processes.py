"""A pipeline of several processes, which threads play: what all of them come to have."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from run_settings import DAPO, LEARNED, PIPELINE, SETTINGS, Deferring

from reprise.rl.assembly import first_programs
from reprise.rl.assembly import setup as run_setup
from reprise.rl.assembly import system as run_system
from reprise.rl.cluster.processes import ALONE, Processes
from reprise.rl.exchange import responses
from reprise.rl.exchange.responses import Partition, PeerFailed
from reprise.rl.gin.loader import load
from reprise.rl.learner import trainer
from reprise.rl.metrics.writer import Timings
from reprise.rl.run.loop import open_rollouts
from reprise.rl.runtime.signals import Stopped, Watch
from reprise.rl.sessions.ahead_engine import AheadEngine
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from reprise.rl.steps import pipeline
from reprise.rl.steps.position import RunPosition
from reprise.rl.steps.step import train_step
from reprise.rl.weights.gathering import on_host
from reprise.rl.workers.messages import WorkerError
from tests.support import tiny_run
from tests.support.stores import play

pytestmark = pytest.mark.usefixtures("one_device")

DEADLINE_S = 300.0  # of a busy machine


@pytest.fixture(autouse=True)
def without_a_mesh(monkeypatch):
    """Each plays a trainer of its own: weights come from one device, not from a common mesh."""

    def weights(trained, learner, engine, partition):
        rounded = trainer.cast_params(learner.policy(trained, engine.dtype), engine.dtype)
        return on_host(rounded) if isinstance(engine, AheadEngine) else rounded

    for module in (run_setup, run_system):
        monkeypatch.setattr(module, "rollout_weights", weights)


def let_the_first_answer(monkeypatch):
    """Give process 0 alone workers, whose rounds it times for itself."""
    kept = first_programs.Kept
    is_central = lambda config, processes: Partition(processes, is_central=True)  # noqa: E731
    monkeypatch.setattr(run_setup, "_partition", is_central)

    def kept_alone(*, processes: Processes, **settings):
        return kept(processes=ALONE, **settings)

    monkeypatch.setattr(first_programs, "Kept", kept_alone)


@pytest.fixture(params=["all answer", "process 0 answers"])
def answered_by(request, monkeypatch):
    """Who has workers: each process its own, or process 0 alone, as on Ray."""
    if request.param == "process 0 answers":
        let_the_first_answer(monkeypatch)
    return request.param


@dataclasses.dataclass
class Seen:
    """What a process learns from in each step, and what it would save after it."""

    responses: list[list[tuple]] = dataclasses.field(default_factory=list)
    carried: list[float] = dataclasses.field(default_factory=list)
    phases: list[float] = dataclasses.field(default_factory=list)
    states: list[dict] = dataclasses.field(default_factory=list)
    stale: list[list[bytes]] = dataclasses.field(default_factory=list)


def steps_of(processes: Processes, tiny: Path, folder: Path, stops=None, *overrides: str) -> Seen:
    """Run all steps as one of the processes; `stops` names (process, step) that a signal meets."""
    config = load(TrainConfig, [tiny], [*overrides, f"Run.directory={str(folder)!r}"])
    inputs, seen = open_inputs(config), Seen()
    watch = Watch(should_stop=lambda: stops == (processes.index, 1 + len(seen.states)))
    with contextlib.ExitStack() as stack:
        options = {"show": tiny_run.Recorder(), "watch": watch, "clock": time.perf_counter}
        built = run_setup.build(config, inputs, folder, **options, processes=processes)
        system, state = stack.enter_context(built)
        source = stack.enter_context(open_rollouts(system, 1, None, {}))

        def noted(*args):
            rollouts = source(*args)
            rows = zip(rollouts.trajectories, rollouts.scores, rollouts.completions, strict=True)
            seen.responses.append(
                [
                    (
                        rollouts.prompts.keys[t.group_id],
                        t.sample_index,
                        t.response_ids.tolist(),
                        t.policy_versions.tolist(),
                        score.total,
                        text,
                    )
                    for t, score, text in rows
                ]
            )
            seen.carried.append(rollouts.metrics.get("rollout/carried", 0.0))
            seen.phases.append(rollouts.metrics.get("dynamic_sampling/phases", 1.0))
            seen.states.append(repr(source.state()))
            return rollouts

        position = RunPosition()
        while position.step < config.run.steps:
            timings = Timings(time.perf_counter)
            state, position, _ = train_step(system, state, position, timings, noted)
            if position.step < config.run.steps:
                stale = jax.tree.leaves(source.stale_params(state, position.step))
                seen.stale.append([np.asarray(x).tobytes() for x in stale])
    return seen


def together(count, tiny, folder, *overrides, stops=None):
    def one(processes):
        with processes:
            return steps_of(processes, tiny, folder, stops, *overrides)

    return play(count, one, DEADLINE_S)


@pytest.mark.parametrize("mode", ["pipeline", "ahead"])
def test_processes_learn_from_what_one_would(tiny, tmp_path, answered_by, mode):
    """Three processes for two prompts a step: one of them has nothing to answer."""
    settings = (
        *SETTINGS,
        *DAPO,
        "Reuse.mode='coupled'",
        tiny_run.rewarded(tiny, "lucky"),
        *PIPELINE,
        "Run.steps=6",
    )
    settings += (f"Sched.mode={mode!r}",)
    alone = steps_of(ALONE, tiny, tmp_path / "alone", None, *settings)
    assert len(set(alone.phases)) > 1, "some steps are to ask further prompts"
    found = together(3, tiny, tmp_path / "three", *settings)
    for one in found:
        assert isinstance(one, Seen), one
        assert one.responses == alone.responses
        assert one.phases == alone.phases
        assert one.stale == alone.stale, "the weights that answer the step to come"
        assert one.states == found[0].states, "any of them may be saved"


@pytest.mark.parametrize("policy", ["of a process", "histopipe"])
def test_what_one_process_moves_into_the_next_step_all_expect_there(
    tiny, tmp_path, monkeypatch, policy, answered_by
):
    """By local timing; request 4 goes on where the process that answers it is told to."""
    settings = (*SETTINGS, *PIPELINE, "Sched.workers=1", "Run.steps=4")
    if policy == "histopipe":
        settings += ("Sched.policy='histopipe'", "Sched.chunk_tokens=1", "Sched.workers=2")
    else:
        monkeypatch.setattr(pipeline, "step_scheduler", lambda *_, **__: Deferring())
    first, second = together(2, tiny, tmp_path, *settings)
    assert isinstance(first, Seen) and isinstance(second, Seen), (first, second)
    assert first == second
    counts = [len(rows) for rows in first.responses]
    assert sum(counts) == 4 * 8
    if policy == "of a process":
        assert counts == [4, 12, 8, 8] and first.carried == [0, 4, 0, 0]


@pytest.mark.parametrize("spot", [True, False])
def test_the_drafter_of_process_0_is_trained_while_the_others_go_on(
    tiny, tmp_path, monkeypatch, spot
):
    let_the_first_answer(monkeypatch)
    learned = (*LEARNED, f"Drafter.spot={spot}", "Drafter.micro_batches=1", "Run.steps=3")
    learned += (f"Drafter.steps_after_rollout={int(not spot)}",)
    first, second = together(2, tiny, tmp_path, *SETTINGS, *PIPELINE, *learned)
    assert isinstance(first, Seen) and isinstance(second, Seen), (first, second)
    assert first == second and sum(map(len, first.responses)) == 3 * 8


def test_a_signal_to_one_stops_all_at_the_same_step(tiny, tmp_path):
    found = together(2, tiny, tmp_path, *SETTINGS, *PIPELINE, stops=(1, 3))
    assert [type(one) for one in found] == [Stopped, Stopped]


@pytest.mark.fault
def test_a_worker_that_fails_in_one_ends_all(tiny, tmp_path, monkeypatch):
    answers = responses.Scorer.__call__

    def failing(self, t):
        if t.group_id == 3:  # of step 2, in process 1
            raise WorkerError(0, [t.request_id], RuntimeError("a device is gone"))
        answers(self, t)

    monkeypatch.setattr(responses.Scorer, "__call__", failing)
    first, second = together(2, tiny, tmp_path, *SETTINGS, *PIPELINE)
    assert isinstance(second, WorkerError) and isinstance(first, PeerFailed)
    assert "process 1 failed" in str(first) and "a device is gone" in str(first)

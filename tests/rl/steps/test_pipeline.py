"""Rollouts that run ahead of training: whose weights answer what, and what is learnt from it."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from loop_runs import finish, stop_after
from run_settings import DRAFTS, PIPELINE, SETTINGS, Deferring
from trajectories import trajectory

from reprise.models.formats import hf
from reprise.rl.checkpoint import reader
from reprise.rl.data.prompts import DataOrder, prompts_for_step
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.exchange import responses
from reprise.rl.gin.loader import load
from reprise.rl.learner import trainer
from reprise.rl.learner.optimizer import TrainState
from reprise.rl.metrics.writer import read_metrics
from reprise.rl.records.stats import EngineStats
from reprise.rl.records.trajectory import Request
from reprise.rl.rewards.scores import Score
from reprise.rl.runtime.signals import Stopped
from reprise.rl.sessions.multi_engine import MultiEngine
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from reprise.rl.speculation import sources
from reprise.rl.steps import pipeline
from reprise.rl.steps import step as run_step
from reprise.rl.workers.config import SchedConfig
from reprise.rl.workers.engines import split_devices
from reprise.rl.workers.messages import WorkerError
from reprise.sched.policies import histopipe
from reprise.sched.policies.histopipe import HistoPipe
from reprise.spec.retrieval.history import LastResponseDrafter
from reprise.spec.verification.sampling import step_key
from tests.support import tiny_run

pytestmark = pytest.mark.usefixtures("one_device")  # several: test_loop_workers.py

# one bucket of everything, so that who runs beside whom moves no bit
FOUR = (*SETTINGS, *PIPELINE, "Run.steps=4", "Checkpoint.keep=10")
SIZE = 8  # responses a step: 2 prompts, 4 each


@pytest.fixture(scope="module")
def tokens():
    """By request id, of the run that is compared with."""
    return {}


@pytest.fixture(scope="module")
def ahead(tiny, tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahead")
    with noting(tokens):
        return finish(tiny, folder, *FOUR, "Checkpoint.every_steps=1")


@contextlib.contextmanager
def noting(tokens):
    """The tokens that are scored meanwhile are noted, by request id."""
    score = responses.Scorer.__call__

    def noted(self, t):
        tokens[t.request_id] = t.response_ids.tolist()
        score(self, t)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(responses.Scorer, "__call__", noted)
        yield


def samples(done):
    return [json.loads(line) for line in done.samples.splitlines()]


def answers(config, inputs, params, step):
    """What one engine answers a step with, by these weights and the pipeline's noise."""
    order = DataOrder(len(inputs.task), config.run.seed)
    examples = prompts_for_step(inputs.task, order, 2 * (step - 1), 2)
    requests = [
        Request((step - 1) * SIZE + 4 * g + i, inputs.encode(example, config.task), g, i)
        for g, example in enumerate(examples)
        for i in range(4)
    ]
    key = step_key(config.run.seed, pipeline.ALL_STEPS)
    spec = RolloutSpec(params, config.sampling, key, inputs.model.eos_token_ids)
    done = Engine(inputs.model, config.engine).run(spec, requests)
    return [inputs.tokenizer.decode(t.response_ids.tolist()) for t in done]


@pytest.mark.parity
def test_a_step_is_answered_by_weights_one_update_behind(tiny, ahead):
    """Steps 1 and 2 by the first weights, step s by those after update s − 2."""
    folder = ahead.folder
    config = load(TrainConfig, [tiny], [*FOUR, f"Run.directory={str(folder)!r}"])
    inputs = open_inputs(config)
    _, first = hf.load_pretrained(inputs.policy, None)

    def after(step):
        if step < 1:
            return first
        template = TrainState(None, first, ())
        found = reader.restore(folder / "checkpoints", template, step, subset=True)
        return found.arrays.params

    for step in range(1, 5):
        got = [s["completion"] for s in samples(ahead) if s["step"] == step]
        assert got == answers(config, inputs, after(step - 2), step)
        if step > 2:  # by the step's own weights they would be others
            assert got != answers(config, inputs, after(step - 1), step)
    assert [row["rollout/off_policyness/max"] for row in ahead.rows] == [0, 1, 1, 1]


@pytest.mark.parametrize("steps", [1, 3])
def test_stopped_anywhere_and_resumed_gives_the_same_bits(tiny, ahead, tmp_path, steps):
    """The weights that answer the step to come are part of a checkpoint."""
    settings = (*FOUR, "Checkpoint.every_steps=0")
    stop_after(tiny, tmp_path, steps, *settings)
    resumed = finish(tiny, tmp_path, *settings)
    assert f"resuming after step {steps}" in resumed.show.messages
    same_but_rounds = [
        [{k: v for k, v in row.items() if not k.startswith("rollout/")} for row in d.rows]
        for d in (resumed, ahead)
    ]
    assert same_but_rounds[0] == same_but_rounds[1]
    assert resumed.samples == ahead.samples
    for one, other in zip(resumed.leaves, ahead.leaves, strict=True):
        assert one.tobytes() == other.tobytes()


def test_drafts_change_nothing(tiny, ahead, tokens, tmp_path, monkeypatch):
    """Found ones, and by hand: right ones for every second request, wrong ones for the others.

    Found ones alone need not meet one token of so short a run of random weights.
    """
    known = {r: np.array(ids, np.int32) ^ ((r + 1) % 2) for r, ids in tokens.items()}
    monkeypatch.setattr(sources, "NgramDrafter", lambda: LastResponseDrafter(known))
    drafted = {}
    with noting(drafted):
        done = finish(tiny, tmp_path, *FOUR, *DRAFTS)
    assert drafted == {r: tokens[r] for r in drafted} and len(drafted) == 4 * SIZE
    assert [s["completion"] for s in samples(done)] == [s["completion"] for s in samples(ahead)]
    assert all(row["spec/tokens_per_round"] > 1 for row in done.rows)
    assert all(0 < row["spec/accept_rate"] < 1 for row in done.rows)


def test_rollouts_run_and_are_scored_while_an_update_runs(tiny, tmp_path, monkeypatch):
    scored, enough = [], threading.Event()
    score = responses.Scorer.__call__

    def counted(self, t):
        score(self, t)
        scored.append(t)
        if len(scored) == 2 * SIZE:
            enough.set()

    update, waited = trainer.update, []

    def slow(*args, **options):
        waited.append(enough.wait(timeout=120))  # for the answers to the next step
        return update(*args, **options)

    monkeypatch.setattr(responses.Scorer, "__call__", counted)
    monkeypatch.setattr(trainer, "update", slow)
    finish(tiny, tmp_path, *FOUR, "Run.steps=2")
    assert waited == [True, True]


# --- HistoPipe --------------------------------------------------------------------------


def test_histopipe_trains_on_every_response(tiny, tmp_path, monkeypatch):
    """An epoch is three steps, so that half of the run goes by past lengths.

    Whatever grows beyond its group's median is moved.
    """
    settings = ("Sched.policy='histopipe'", "Sched.ranking_groups=2", "Run.steps=6")
    moves = {"last_share": 1.0, "growth_quantile": 0.0, "least_growth": 1.0}
    eager = functools.partial(pipeline.HistoPipeConfig, **moves)
    monkeypatch.setattr(pipeline, "HistoPipeConfig", eager)
    done = finish(tiny, tmp_path, *FOUR, *settings)
    moved = [row["rollout/moved"] for row in read_metrics(done.folder)]
    assert sum(moved) > 0 and moved[0] == 0, "no past lengths yet"
    counts = [row["completions/count"] for row in done.rows]
    assert sum(counts) == 6 * SIZE
    answered = collections.Counter((s["example_id"], s["sample_index"]) for s in samples(done))
    assert set(answered.values()) == {2}, "six prompts, four samples, two epochs"
    assert max(row["rollout/off_policyness/max"] for row in done.rows) <= 2


@pytest.fixture
def deferring(monkeypatch):
    monkeypatch.setattr(pipeline, "step_scheduler", lambda *args, **options: Deferring())


def test_what_goes_on_in_the_next_step_carries_its_versions(tiny, tmp_path, deferring, monkeypatch):
    """And its siblings wait for it."""
    seen = []
    train_step = run_step._advantages

    def spy(config, rollouts, trajectories, parts):
        advantages, metrics = train_step(config, rollouts, trajectories, parts)
        seen.append((rollouts, advantages))
        return advantages, metrics

    monkeypatch.setattr(run_step, "_advantages", spy)
    settings = ("Sched.workers=1",)
    done = finish(tiny, tmp_path, *FOUR, *settings)
    assert [row["completions/count"] for row in done.rows] == [4, 12, 8, 8]
    assert [row["rollout/carried"] for row in done.rows] == [0, 4, 0, 0]
    (rollouts, advantages) = seen[1]
    late, *siblings = rollouts.trajectories[-4:]
    assert late.request_id == 4 and late.group_id == 2 and late.num_tokens > 3
    assert late.policy_versions[:3].tolist() == [0, 0, 0]
    assert [t.group_id for t in siblings] == [2, 2, 2]
    rewards = np.array([t.reward for t in (late, *siblings)])
    wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    assert advantages[-4:].tolist() == pytest.approx(wanted.tolist(), rel=1e-2, abs=1e-3)
    (row,) = [s for s in samples(done) if s["step"] == 2][-1:]
    assert row["example_id"] == seen[0][0].prompts.examples[1].example_id


def test_a_group_with_a_deferred_response_is_scored_and_learnt_from_once_it_is_whole(
    tiny, tmp_path, deferring
):
    (tmp_path / "rank.py").write_text(
        "def rank(completions, **columns):\n"
        "    assert len(completions) == 4\n"
        "    return [float(sorted(completions).index(text)) for text in completions]\n"
    )
    rank = f"Reward.functions=('{tmp_path}/rank.py:rank',)"
    settings = ("Sched.workers=1", "Reward.per='group'", rank)
    done = finish(tiny, tmp_path / "run", *FOUR, *settings)
    assert [row["completions/count"] for row in done.rows] == [4, 12, 8, 8]
    assert [row["rollout/carried"] for row in done.rows] == [0, 4, 0, 0]
    assert all(row["rewards/failures"] == 0 for row in done.rows)
    carried = [s for s in samples(done) if s["step"] == 2][-4:]
    assert len({s["example_id"] for s in carried}) == 1
    assert abs(sum(s["advantage"] for s in carried)) < 1e-5


def test_what_went_on_when_a_run_was_stopped_is_asked_anew(tiny, tmp_path, monkeypatch):
    """By the step that it had gone on into, so that every sample is learnt from once."""
    settings = (*FOUR, "Sched.workers=1", "Checkpoint.every_steps=0")
    show = tiny_run.Recorder()
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(pipeline, "step_scheduler", lambda *args, **options: Deferring())
        tiny_run.train(
            tiny, tmp_path, *settings, show=show, should_stop=lambda: len(show.rows) == 1
        )
    done = finish(tiny, tmp_path, *settings)
    assert "resuming after step 1" in done.show.messages
    assert [row["completions/count"] for row in done.rows] == [4, 12, 8, 8]
    assert [row["rollout/carried"] for row in done.rows] == [0, 4, 0, 0]
    late = samples(done)[12]
    asked = collections.Counter(
        (s["example_id"], s["sample_index"]) for s in samples(done) if s["step"] < 4
    )
    assert late["step"] == 2 and late["sample_index"] == 0 and set(asked.values()) == {1}
    assert late["advantage"] != 0, "its siblings of the step before were held"


def test_the_second_tier_changes_no_token(tiny, ahead, tokens, tmp_path, monkeypatch):
    """Three workers for two groups, all of whose responses are expected to be as long as can be."""
    plans, two_tiers = [], histopipe.two_tiers

    def noted(*args, **options):
        plans.append(two_tiers(*args, **options))
        return plans[-1]

    def expecting(self, state):
        examples = self._system.inputs.task
        self._lengths = {examples[i].example_id: (8,) * 4 for i in range(len(examples))}

    monkeypatch.setattr(histopipe, "two_tiers", noted)
    monkeypatch.setattr(pipeline.PipelineRollouts, "load_state", expecting)
    found = {}
    with noting(found):
        settings = ("Sched.policy='histopipe'", "Sched.ranking_groups=2", "Sched.workers=3")
        done = finish(tiny, tmp_path, *FOUR, *settings)
    assert found == tokens and [sum(plan) for plan in plans][:1] == [3]
    assert [s["completion"] for s in samples(done)] == [s["completion"] for s in samples(ahead)]


def answered(*rewards):
    """Responses with these rewards, by (group, sample)."""
    rows = [
        (trajectory(2 * g + i, [1], [5], group=g, sample=i, reward=r), Score({}, r), f"{g}.{i}")
        for (g, i, r) in rewards
    ]
    return responses.in_order(rows, EngineStats())


def test_carried_groups_come_last():
    found = answered((4, 0, 1.0), (4, 1, 0.0), (10, 0, 1.0), (10, 1, 1.0), (11, 1, 0.0))
    moved = pipeline.renumbered(found, [10, 11, 4])
    assert moved.texts == ["10.0", "10.1", "11.1", "4.0", "4.1"]
    assert [t.group_id for t in moved.trajectories] == [0, 0, 1, 2, 2]


def test_groups_that_go_on_are_not_missing():
    """Group 10 and 11 are of the step; 4 became whole in it."""

    def missing(wanted, num_prompts, held, *rewards):
        rollout = SimpleNamespace(prompts_per_step=wanted)
        source = SimpleNamespace(
            _system=SimpleNamespace(config=SimpleNamespace(rollout=rollout)),
            _held=held,
            _prompts={2: range(num_prompts)},
            _first_group=lambda step: 10,
        )
        return pipeline.PipelineRollouts._num_missing(source, 2, answered(*rewards))

    alike = (10, 0, 1.0), (10, 1, 1.0), (11, 0, 1.0), (11, 1, 1.0)
    assert missing(2, 2, {}, *alike, (4, 0, 1.0), (4, 1, 0.0)) == 2, "4 is none of the step's own"
    assert missing(2, 2, {10: [], 11: []}, (4, 0, 1.0), (4, 1, 1.0)) == 0
    one = (10, 0, 1.0), (10, 1, 0.0), (11, 0, 1.0), (11, 1, 1.0)
    assert missing(1, 2, {}, *one) == 0
    assert missing(2, 2, {}, *one) == 2, "one is missing, and half are of use"
    assert missing(2, 3, {}, *one, (12, 0, 0.5), (12, 1, 0.0)) == 0


# --- what cannot be ---------------------------------------------------------------------


def test_histopipe_needs_a_pipeline(tiny, tmp_path):
    with pytest.raises(ValueError, match='set Sched.mode = "pipeline"'):
        finish(tiny, tmp_path, "Sched.policy='histopipe'")


@pytest.mark.fault
def test_a_worker_that_raises_ends_the_run_and_the_last_whole_step_is_saved(
    tiny, ahead, tmp_path, monkeypatch
):
    engine_round = Engine._round

    def failing(self, *args):
        if self._spec.policy_version == 1:  # step 3, which is asked while step 2 is answered
            raise RuntimeError("a device is gone")
        engine_round(self, *args)

    monkeypatch.setattr(Engine, "_round", failing)
    with pytest.raises(WorkerError, match="a device is gone"):
        tiny_run.train(tiny, tmp_path, *FOUR, "Checkpoint.every_steps=0")
    monkeypatch.undo()
    steps = [row["step"] for row in read_metrics(tmp_path)]
    resumed = finish(tiny, tmp_path, *FOUR, "Checkpoint.every_steps=0")
    if steps:
        assert f"resuming after step {steps[-1]}" in resumed.show.messages
    assert resumed.samples == ahead.samples


def test_devices_are_shared_out():
    devices = list(range(8))
    ahead = SchedConfig(mode="pipeline", workers=2, devices_per_worker=2)
    assert split_devices(ahead, devices) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert split_devices(ahead, devices[:4]) == (devices[:4], devices[:4])
    assert split_devices(SchedConfig(workers=2), devices) == (devices, devices)


def test_the_policy_names_the_scheduler():
    def made(policy):
        team = MultiEngine([], SchedConfig(mode="pipeline", policy=policy))
        return pipeline.step_scheduler(team, num_steps=3, epoch_prompts=6)

    assert isinstance(made("histopipe"), HistoPipe)
    assert made("seer").num_unfinished == 0

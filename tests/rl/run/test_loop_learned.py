"""Training with a learned drafter: the same tokens, a drafter that learns, and exact resumes."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from loop_runs import assert_same_bits, assert_same_run, finish, spare_time
from run_settings import BANDIT, LEARNED, PIPELINE, SETTINGS, TRAINED_AFTER
from whole_steps import whole_steps

from reprise.rl.assembly.drafter_run import DrafterRun
from reprise.rl.drafter_training import trainer as drafter_trainer
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.runtime.signals import Stopped
from reprise.spec.config import SamplingConfig
from reprise.spec.eagle.config import DataBufferConfig
from reprise.spec.eagle_training.training_data import DataBuffer, HiddenStates
from reprise.spec.verification.sampling import step_key
from tests.support import tiny_run

pytestmark = pytest.mark.usefixtures("one_device")

AFTER = (*TRAINED_AFTER, "Run.steps=4")
LATE = ("Checkpoint.every_steps=0",)  # so that the stop has to save


@pytest.fixture(scope="module")
def trained_after(tiny, tmp_path_factory):
    return finish(tiny, tmp_path_factory.mktemp("after"), *AFTER)


@pytest.mark.parity
def test_a_learned_drafter_changes_no_reward_and_no_token(tiny, tmp_path, trained_after):
    plain = finish(tiny, tmp_path, "Run.steps=4")
    assert_same_run(plain, trained_after)


def test_it_learns_from_what_rollouts_bring(tiny, tmp_path):
    """The policy stays as it is: as another one it would be another target each step."""
    rows = finish(tiny, tmp_path, *AFTER, "Optimizer.learning_rate=1e-7").rows
    assert [row["drafter/total_steps"] for row in rows] == [3, 6, 9, 12]
    assert rows[-1]["drafter/loss"] < rows[0]["drafter/loss"]
    assert rows[-1]["drafter/buffer_sequences"] > 0
    assert sum(row.get("spec/learned/speculated_fraction", 0.0) for row in rows) > 0


@pytest.mark.fault
@pytest.mark.parametrize("more", [(), BANDIT], ids=["fixed", "bandit"])
def test_stopped_and_resumed_gives_the_same_bits(tiny, tmp_path, trained_after, more):
    """Drafter, its optimizer, its buffer and the tuner are in the checkpoint."""
    whole = finish(tiny, tmp_path / "whole", *AFTER, *more) if more else trained_after
    cut, show = tmp_path / "cut", tiny_run.Recorder()
    if more:  # what decides are the same seconds
        cut.mkdir()
        for name in ("round_times.json", "step_seconds.jsonl"):
            shutil.copy(tmp_path / "whole" / name, cut)
    with pytest.raises(Stopped):
        tiny_run.train(tiny, cut, *AFTER, *more, show=show, should_stop=lambda: len(show.rows) == 2)
    resumed = finish(tiny, cut, *AFTER, *more)
    assert "resuming after step 2" in resumed.show.messages
    assert_same_bits(resumed, whole)


@pytest.mark.fault
def test_stopped_in_a_rollout_its_responses_are_caught_once(tiny, tmp_path, trained_after):
    """Those of the step that is left half way are taken out of the buffer again."""
    show = tiny_run.Recorder()
    with pytest.raises(Stopped):
        tiny_run.train(
            tiny, tmp_path, *AFTER, *LATE, show=show, should_stop=lambda: show.fetches >= 15
        )
    assert len(show.rows) == 1
    assert_same_bits(finish(tiny, tmp_path, *AFTER, *LATE), trained_after)


@pytest.mark.fault
def test_a_step_that_the_drafter_has_learnt_from_is_brought_to_its_end(
    tiny, tmp_path, trained_after, monkeypatch
):
    """The stop comes while its answers are scored; what the drafter has learnt cannot go back."""
    show, trained = tiny_run.Recorder(), []
    after_rollout, result = DrafterRun.after_rollout, RewardPool.result

    def noted(self, *args):
        after_rollout(self, *args)
        trained.append(self.trainer.step)

    def waited_for(self, future, on_wait):
        on_wait()
        return result(self, future, on_wait)

    monkeypatch.setattr(DrafterRun, "after_rollout", noted)
    monkeypatch.setattr(RewardPool, "result", waited_for)
    with pytest.raises(Stopped):
        tiny_run.train(
            tiny, tmp_path, *AFTER, *LATE, show=show, should_stop=lambda: len(trained) >= 2
        )
    assert len(show.rows) == len(trained) == 2
    assert_same_bits(finish(tiny, tmp_path, *AFTER, *LATE), trained_after)


def test_what_is_learnt_in_one_phase_of_a_step_counts_in_its_later_ones():
    """Dynamic sampling has several rollouts a step, and none of them may be left after that."""
    trainer = SimpleNamespace(step=0, begin=lambda step: None)
    config = SimpleNamespace(drafter=SimpleNamespace(steps_after_rollout=0))
    run = DrafterRun(config, trainer, None)
    spec = RolloutSpec({}, SamplingConfig(), step_key(0, 0), (1,))
    seen = []
    for step in (1, 1, 2):
        assert run.before_rollout(spec, step).sink is None
        seen.append(run.trained_this_step)
        trainer.step += 3
    assert seen == [False, True, False]


def test_a_step_collects_as_many_requests_as_its_part_of_the_buffer_holds():
    buffer = DataBuffer(DataBufferConfig(max_bytes=128_000))  # a step's part: 1,000 tokens
    learned = SimpleNamespace(config=SimpleNamespace(hidden_width=15))
    config = SimpleNamespace(
        run=SimpleNamespace(seed=3),
        drafter=SimpleNamespace(steps_after_rollout=1),
        trainer=SimpleNamespace(dtype=np.float32),
        sched=SimpleNamespace(mode="sync"),
        rollout=SimpleNamespace(num_requests=400),
        longest_tokens=10,
    )
    run = DrafterRun(config, SimpleNamespace(buffer=buffer, learned=learned), None)

    def chosen(step):
        sink = run.sink(step)
        return {r for r in range(400) if sink.wants(r, 10)}

    assert chosen(1) == chosen(1) != chosen(2) and 60 < len(chosen(1)) < 140
    short = HiddenStates(np.zeros(4, np.int32), 1, np.zeros((3, 15), np.float32), 0)
    run.sink(1).add(short)
    assert 200 < len(chosen(2)) < 300
    config.sched.mode = "pipeline"  # step 1 is not whole when step 2 begins
    assert 60 < len(chosen(2)) < 140 and 200 < len(chosen(3)) < 300
    config.drafter.steps_after_rollout = 0
    assert run.sink(3) is None, "nothing trains on them"


def test_idle_workers_of_a_pipeline_train_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(drafter_trainer, "SAVE_EVERY_STEPS", 1)
    with spare_time():
        settings = (*LEARNED, *SETTINGS, *PIPELINE)
        done = finish(tiny, tmp_path, *settings)
    assert done.rows[-1]["drafter/total_steps"] > 0
    assert whole_steps(tmp_path / "drafter")[0] > 0


def test_in_a_pipeline_too_it_may_be_trained_after_each_rollout(tiny, tmp_path):
    settings = (*SETTINGS, *PIPELINE, *AFTER, "Run.steps=3")
    done = finish(tiny, tmp_path, *settings)
    assert [row["drafter/total_steps"] for row in done.rows] == [3, 6, 9]

"""Evaluation in a run: what it writes, that training does not notice, and that it is resumed."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
from loop_runs import finish, unpriced
from run_settings import DRAFTS, PIPELINE, SETTINGS

from reprise.rl.checkpoint.best import read_best
from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.checkpoint.folders import list_steps
from reprise.rl.engine.engine import Engine
from reprise.rl.metrics.writer import MetricsWriter, read_metrics, read_samples, step_rows
from reprise.rl.runtime.signals import Stopped
from reprise.rl.warm_up import round_times
from tests.support import tiny_run

pytestmark = pytest.mark.usefixtures("one_device")

QUESTIONS = ("1+1=", "3+3=", "4+1+2=", "9=", "5+5+5=")
EVALUATED = ("Eval.num_prompts=5", "Eval.every_steps=2", "Run.steps=5", "Checkpoint.keep=1")
# one of everything that evaluation must leave alone
WITH_ALL = (*DRAFTS, "Reuse.mode='coupled'", "Speculation.losing_steps=0")


@pytest.fixture(scope="module")
def sets(tiny):
    """Two sets: one of which training holds two questions, and one sampled from it alone."""
    path = tiny.parent / "held_out.jsonl"
    rows = [{"prompt": p, "answer": "0"} for p in QUESTIONS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"Eval.sets=('own=jsonl:{path}', 'train=jsonl:{tiny.parent / 'task.jsonl'}')"


WRITES: list[str] = []  # of the run `evaluated`, in order


@contextlib.contextmanager
def noted_writes():
    def noted(owner, method, name):
        original = getattr(owner, method)

        def call(self, *arguments):
            WRITES.append(name or arguments[0])
            return original(self, *arguments)

        patch.setattr(owner, method, call)

    with pytest.MonkeyPatch.context() as patch:
        noted(MetricsWriter, "_append", None)
        noted(MetricsWriter, "amend", "amend")
        noted(Checkpointer, "save", "save")
        yield


@pytest.fixture(scope="module")
def evaluated(tiny, sets, tmp_path_factory):
    sampled = ("Eval.samples=2", "Eval.temperature=0.7", "Checkpoint.every_steps=1")
    folder = tmp_path_factory.mktemp("evaluated")
    with noted_writes(), unpriced():
        return finish(tiny, folder, *EVALUATED, *WITH_ALL, sets, *sampled)


def test_what_a_kill_would_lose_is_written_first(evaluated):
    """Samples before their row, the row before the checkpoint, an evaluation's samples before
    the figures that say that it is done.
    """
    step = ["samples.jsonl", "metrics.jsonl", "save"]
    evaluation = ["eval_samples.jsonl", "amend"]
    before = [*evaluation, "metrics.jsonl"]
    order = [name for name, _ in itertools.groupby(WRITES)]
    assert order == [
        *before,
        *step,
        *step,
        *evaluation,
        *step,
        *step,
        *evaluation,
        *step,
        *evaluation,
    ]


def without_evaluation(rows):
    kept = [{n: x for n, x in row.items() if not n.startswith("eval")} for row in rows]
    return step_rows(kept)


def evaluations(done):
    return {row["step"]: row for row in done.rows if "eval/mean_reward" in row}


def test_training_does_not_notice_that_it_is_evaluated(tiny, evaluated, tmp_path):
    """Samples, metrics and weights are those of the run without, bit for bit."""
    with unpriced():
        plain = finish(tiny, tmp_path, "Run.steps=5", *WITH_ALL)
    assert len(evaluations(evaluated)) == 4 and not evaluations(plain)
    assert without_evaluation(evaluated.rows) == plain.rows
    assert evaluated.samples == plain.samples
    for one, other in zip(evaluated.leaves, plain.leaves, strict=True):
        assert one.tobytes() == other.tobytes()
    assert plain.rows[-1]["spec/reused_fraction"] > 0, "there was something to disturb"


def test_the_figures_of_an_evaluated_run(evaluated):
    found = evaluations(evaluated)
    assert list(found) == [0, 2, 4, 5], "before, every other step, and at the end"
    for row in found.values():
        for name in ("eval/own", "eval/train", "eval"):
            for figure in ("mean_reward", "pass@1", "pass@2"):
                low, mean, high = (row[f"{name}/{figure}{x}"] for x in ("_low", "", "_high"))
                assert 0 <= low <= mean <= high <= 1
        assert row["eval/mean_reward"] == pytest.approx(
            (row["eval/own/mean_reward"] + row["eval/train/mean_reward"]) / 2
        )
        assert (row["eval/own/questions"], row["eval/own/seen_in_training"]) == (5, 2)
        assert row["eval/train/seen_in_training"] == 5
    assert found[0]["eval/mean_reward"] != found[5]["eval/mean_reward"]
    rows = read_samples(evaluated.folder, "eval_samples.jsonl")
    assert {row["step"] for row in rows} == {0, 2, 4, 5}
    assert len(rows) == 4 * 2 * 5 * 2  # evaluations, sets, questions, responses
    of_own = [r["reward"] for r in rows if r["step"] == 5 and r["set"] == "own"]
    assert found[5]["eval/own/mean_reward"] == pytest.approx(sum(of_own) / len(of_own))


def test_what_is_said_of_it(evaluated):
    said = [m for m in evaluated.show.messages if m.startswith("eval ")]
    assert said[0].startswith("eval before training: mean_reward: own 0.")
    assert said[1].startswith("eval after step 2: ") and "; best at step 2" in said[1]
    row, best = evaluations(evaluated), read_best(evaluated.folder)
    assert [m.partition(":")[0] for m in said[3:]] == ["eval own", "eval train", "eval all"]
    figures = [f"{row[step]['eval/own/mean_reward']:.3f} ± " for step in (0, 5)]
    assert all(text in said[3] for text in figures) and " → " in said[3]
    assert said[3].endswith(f"; best at step {best.step}")


def test_the_best_step_is_recorded_and_kept(evaluated):
    rows = evaluations(evaluated)
    values = {step: row["eval/mean_reward"] for step, row in rows.items() if step}
    best = read_best(evaluated.folder)
    assert best.value == max(values.values()) == values[best.step]
    assert best.metric == "eval/mean_reward"
    assert set(list_steps(evaluated.folder / "checkpoints")) == {best.step, 5}


@pytest.fixture(scope="module")
def greedy(tiny, sets, tmp_path_factory):
    """A run whose best step is not its last: the reward falls once the rate is this high."""
    more = ("Checkpoint.every_steps=0", "Optimizer.learning_rate=0.01")
    return finish(tiny, tmp_path_factory.mktemp("greedy"), *EVALUATED, sets, *more), more


@pytest.mark.parametrize("asked", [1, 7])
def test_stopped_in_an_evaluation_and_resumed_gives_the_same(tiny, sets, greedy, tmp_path, asked):
    """The evaluation that was under way is done again, those before are not."""
    whole, more = greedy
    show = tiny_run.Recorder()
    evaluating = []

    def part(step, name):
        evaluating.append((step, name))

    show.part = part

    def should_stop():
        parts = [p for p in evaluating if p[1] == "evaluation"]
        return len(parts) == asked // 3 + 1 and evaluating[-1][1] == "evaluation"

    with pytest.raises(Stopped):
        tiny_run.train(tiny, tmp_path, *EVALUATED, sets, *more, show=show, should_stop=should_stop)
    done_before = len([m for m in show.messages if m.startswith("eval ")])
    assert done_before == asked // 3
    resumed = finish(tiny, tmp_path, *EVALUATED, sets, *more)
    assert resumed.rows == whole.rows
    assert resumed.samples == whole.samples
    samples = "eval_samples.jsonl"
    assert (tmp_path / samples).read_bytes() == (whole.folder / samples).read_bytes()
    assert read_best(tmp_path) == read_best(whole.folder)
    said = [m for m in resumed.show.messages if m.startswith("eval ")]
    assert len(said) == len([m for m in whole.show.messages if m.startswith("eval ")]) - done_before


def test_ended_in_an_evaluation_and_resumed_gives_the_same(tiny, sets, greedy, tmp_path):
    """As a kill does: nothing is saved any more, and the row of the step may be there already."""
    whole, _ = greedy
    show = tiny_run.Recorder()

    def part(step, name):
        if (step, name) == (4, "evaluation"):
            raise MemoryError

    show.part = part
    asked = (*EVALUATED, sets, "Checkpoint.every_steps=1")
    with pytest.raises(MemoryError):
        tiny_run.train(tiny, tmp_path, *asked, show=show)
    assert read_metrics(tmp_path)[-1]["step"] == 4
    assert "eval_s" not in read_metrics(tmp_path)[-1]
    resumed = finish(tiny, tmp_path, *asked)
    assert resumed.rows == whole.rows
    assert read_best(tmp_path) == read_best(whole.folder)


def test_other_questions_begin_a_new_comparison(tiny, sets, greedy, tmp_path):
    finish(tiny, tmp_path, *EVALUATED, sets, "Run.steps=2")
    assert read_best(tmp_path).step == 2
    resumed = finish(tiny, tmp_path, *EVALUATED, sets, "Run.steps=3", "Eval.num_prompts=3")
    assert any("figures from here on are not those of before" in m for m in resumed.show.messages)
    assert read_best(tmp_path).step == 3


def test_several_workers_and_a_pipeline_answer_as_one_engine(
    tiny, sets, greedy, tmp_path, monkeypatch
):
    """In a pipeline too the weights are those after the step, and evaluation changes no sample.

    An engine that only evaluates keeps no cache.
    """
    first, free, left = evaluations(greedy[0])[0], Engine.free, []

    def freed(engine):
        free(engine)
        if engine.stats.fetches and engine.clock is not float:  # the warm-up has other ones
            left.append(engine._rows.memory.cache)

    monkeypatch.setattr(Engine, "free", freed)
    monkeypatch.setattr(round_times, "_fetch_seconds", lambda *_: 1e-4)  # by an engine of its own
    for mode in ("sync", "ahead", "pipeline"):
        settings = (*SETTINGS, *PIPELINE, f"Sched.mode='{mode}'", "Run.steps=2")
        found = finish(tiny, tmp_path / mode, *settings, *EVALUATED[:2], sets)
        assert evaluations(found)[0]["eval/mean_reward"] == first["eval/mean_reward"]
        assert left == ([] if mode == "sync" else [None, None]), "after each evaluation"
        left.clear()
        without = finish(tiny, tmp_path / f"{mode}_without", *settings)
        assert drawn(found) == drawn(without)


def drawn(done):
    """The samples but for log-probabilities: the shapes of rounds depend on time, and round alike
    but for the last bits."""
    rows = [json.loads(line) for line in done.samples.splitlines()]
    return [{name: x for name, x in row.items() if name != "logprob"} for row in rows]

"""Evaluations: the responses of a policy to named sets of questions, and their metrics.

A run evaluates the weights after a step on its engine, with noise that is the same in every
evaluation and not used in training. Evaluations do not touch the data cursor, the cached responses,
drafters and budgets, so they change no bit of training. `rl.evaluate` does the same for any policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from reprise.models.config import ModelConfig
from reprise.models.decoder.transformer import Params
from reprise.models.formats.hf_files import WeightsError
from reprise.rl.assembly.system import System
from reprise.rl.checkpoint.best import Best, BestRecord
from reprise.rl.engine.engine import OnRound, RolloutEngine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.exchange.responses import WHOLE, Partition, Responses, Scorer, failures_text
from reprise.rl.metrics.eval_metrics import EvalResponse, overall_metrics, set_metrics
from reprise.rl.metrics.step_metrics import sample_rows
from reprise.rl.metrics.writer import EVAL_SECONDS, MetricsWriter, Row
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.rl.rewards.scores import Score
from reprise.rl.runtime.run_files import CHECKPOINTS, EVAL_SAMPLES_FILE
from reprise.rl.settings import identity
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.eval_sets import EVAL_SEED, EvalSet
from reprise.rl.settings.inputs import Inputs
from reprise.spec.verification.sampling import step_key

EVAL_STEP = 2**31 - 1  # step number of the noise, beyond all training steps


@dataclasses.dataclass(frozen=True, eq=False)
class Answers:
    """The responses to one set, in the order of its questions, with their scores and texts."""

    asked: EvalSet
    trajectories: list[Trajectory]
    scores: list[Score]
    texts: list[str]

    def metrics(self, config: TrainConfig) -> dict[str, float]:
        """Return the metrics of this set (`rl.metrics.eval_metrics.set_metrics`)."""

        def is_correct(score: Score) -> bool:
            value = score.values[config.correct_by]
            return value is not None and value >= config.eval.correct_at

        responses = [
            EvalResponse(
                prompt=t.group_id,
                reward=s.total,
                is_correct=is_correct(s),
                num_tokens=t.num_tokens,
                truncated=t.truncated,
                failed=s.failure is not None,
            )
            for t, s in zip(self.trajectories, self.scores, strict=True)
        ]
        figures = set_metrics(responses, config.eval.samples, config.eval.ks)
        return figures | {"seen_in_training": self.asked.seen + self.asked.alike}


def respond(
    engine: RolloutEngine,
    weights: Params,
    config: TrainConfig,
    inputs: Inputs,
    scorer: Scorer,
    on_round: OnRound | None = None,
    partition: Partition = WHOLE,
    waiting: Callable[[], object] = lambda: None,
) -> list[Answers]:
    """Generate and score `Eval.samples` responses to every question, all sets in one rollout."""
    n = config.eval.samples
    sets = inputs.evals.sets
    examples = [example for s in sets for example in s.examples]
    prompts = [prompt for s in sets for prompt in s.prompts]
    sampling = config.eval.sampling(config.sampling)
    wanted = [(s.name, example.task) for s in sets for example in s.examples]
    each = [sampling.of(name) or sampling.of(task) for name, task in wanted]
    requests = [
        Request(p * n + i, prompts[p], p, i, sampling=each[p])
        for p in range(len(prompts))
        for i in range(n)
    ]
    scorer.examples.update(enumerate(examples))
    key = engine.do(partial(step_key, EVAL_SEED, EVAL_STEP))
    spec = RolloutSpec(
        weights,
        sampling,
        key,
        inputs.model.eos_token_ids,
        words=inputs.token_bytes_for(sampling),
    )
    own = [r for r in requests if partition.answers(r.group_id)]

    def answer() -> Responses:
        return scorer.responses(*scorer.run(engine, spec, own, on_round, "evaluation"))

    matches = partition.exchange("evaluation", requests, answer, waiting)
    answers = []
    first = 0
    for s in sets:
        some = slice(first * n, (first + len(s.examples)) * n)
        moved = [
            dataclasses.replace(t, group_id=t.group_id - first) for t in matches.trajectories[some]
        ]
        answers.append(Answers(s, moved, matches.scores[some], matches.texts[some]))
        first += len(s.examples)
    return answers


def row_of(answers: Sequence[Answers], config: TrainConfig) -> dict[str, float]:
    """Return the metrics of an evaluation, as in a row of metrics.jsonl."""
    by_set = {a.asked.name: a.metrics(config) for a in answers}
    row = {f"eval/{name}": x for name, x in overall_metrics(list(by_set.values())).items()}
    for name, figures in by_set.items():
        row |= {f"eval/{name}/{figure}": value for figure, value in figures.items()}
    return row


class RunEvaluation:
    """The evaluations of a run: due evaluations, their metrics, and the best step.

    `rows` are the metrics so far of a resumed run; evaluations in them are not repeated.
    """

    def __init__(
        self,
        system: System,
        best: BestRecord,
        metrics: MetricsWriter,
        clock: Callable[[], float],
        rows: Sequence[Row],
    ) -> None:
        self._system = system
        self._best = best
        self._metrics = metrics
        self._clock = clock
        self._config = system.config.eval
        self._metric = f"eval/{system.config.eval.best_by}"
        self._sets = system.inputs.evals.sets
        evaluated = [row for row in rows if EVAL_SECONDS in row]
        self._done = {row["step"] for row in evaluated}
        self._first: Mapping[str, Any] | None = None
        if not self._sets:
            best.keep()
            return
        bests = [self._as_best(row) for row in evaluated if row["step"]]
        step = rows[-1]["step"] if rows else 0
        if best.begin(step, [b for b in bests if b is not None]):
            self._first = next((row for row in evaluated if row["step"] == 0), None)
        elif evaluated:
            system.show.message(
                "warning: the sets of Eval, or how they are asked, have changed: figures from here "
                "on are not those of before, and the best step is looked for anew"
            )

    def due(self, step: int) -> bool:
        """Return whether the weights after `step` must be evaluated now."""
        last = self._system.config.run.steps
        return bool(self._sets) and step not in self._done and self._config.due(step, last)

    def __call__(self, params: Params, step: int) -> bool:
        """Evaluate the weights after `step`; return whether they are the best so far.

        Raises Stopped if a stop is requested during the evaluation; a resumed run then repeats it.
        """
        system = self._system
        config = self._system.config
        system.watch.at("evaluation")
        system.processes.barrier(f"evaluation after step {step}", system.watch.heartbeat)
        system.show.part(step, "evaluation")
        start_s = self._clock()
        total = system.inputs.evals.num_questions * config.eval.samples

        def watch(finished: int, tokens: int) -> None:
            system.show.rollout(finished, total, tokens)
            system.leave_rollout_if_stopped()

        answers = respond(
            system.eval_engine,
            system.evaluated(params),
            config,
            system.inputs,
            system.scorer(config.eval.samples),
            watch,
            system.partition,
            system.is_stop_requested,
        )
        if system.eval_engine is not system.engine:  # idle until the next evaluation
            for one in system.eval_engine.engines:
                system.eval_engine.do(one.free)
        row = row_of(answers, config) | {EVAL_SECONDS: self._clock() - start_s}
        # the row marks the evaluation as done, so its samples come first
        self._metrics.write_samples(step, self._samples(answers), EVAL_SAMPLES_FILE)
        self._metrics.amend(step, row)
        self._done.add(step)
        if text := failures_text([score for a in answers for score in a.scores]):
            system.show.message(f"warning: evaluation after step {step}: {text}")
        if step == 0:
            self._first = row
        matches = self._as_best({"step": step} | row) if step else None
        best = self._best.best
        is_best = matches is not None and (best is None or matches.value > best.value)
        if is_best:
            assert matches is not None
            self._best.found(matches)
        self._tell(row, step)
        return is_best

    def _as_best(self, row: Mapping[str, Any]) -> Best | None:
        value = row.get(self._metric)
        return None if value is None else Best(row["step"], self._metric, float(value))

    def _samples(self, answers: Sequence[Answers]) -> list[dict[str, Any]]:
        tokenizer = self._system.inputs.tokenizer
        return [
            {"set": a.asked.name} | row
            for a in answers
            for row in sample_rows(
                tokenizer, a.asked.examples, a.trajectories, a.texts, a.scores, None
            )
        ]

    def _tell(self, row: Mapping[str, float], step: int) -> None:
        """Show the metrics; after the last step, also show the metrics before training."""
        say = self._system.show.message
        figure = self._config.best_by.rpartition("/")[2]
        names = {s.name: f"eval/{s.name}/{figure}" for s in self._sets}
        if len(names) > 1:
            names["all"] = f"eval/{figure}"
        best = self._best.best
        tail = f"; best at step {best.step}" if best is not None else ""
        if step == self._system.config.run.steps and self._first is not None:
            for name, metric in names.items():
                before = plus_minus(self._first, metric)
                after = plus_minus(row, metric)
                say(f"eval {name}: {figure} {before} → {after}{tail}")
            return
        when = f"after step {step}" if step else "before training"
        said = ", ".join(f"{name} {plus_minus(row, metric)}" for name, metric in names.items())
        say(f"eval {when}: {figure}: {said}{tail}")


def plus_minus(row: Mapping[str, Any], metric: str) -> str:
    """Return a metric with half the width of its interval: 0.512 ± 0.061."""
    values = [row.get(name) for name in (metric, f"{metric}_low", f"{metric}_high")]
    if any(value is None for value in values):
        return "-"
    mean, low, high = (float(value) for value in values if value is not None)
    return f"{mean:.3f} ± {(high - low) / 2:.3f}"


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """The policy of a checkpoint; an adapter is merged into its weights."""

    model: ModelConfig
    params: Params
    step: int
    warnings: tuple[str, ...]
    contents: Mapping[str, str]  # of the files of the run, by `rl.settings.identity.contents`


def load_checkpoint(run: Path, inputs: Inputs, mesh: Any = None, step: int | None = None) -> Loaded:
    """Return the policy of the newest whole checkpoint of a run, or of `step`.

    `inputs` are the policy that the run started from; if its shape has `lora`, it has the frozen
    weights. Raises NoWholeCheckpointError, or StructureMismatchError if the policy folder has
    another shape than the run, or ValueError if its files differ from the files of the run
    (`identity.check_policy`).
    """
    import jax.numpy as jnp

    from reprise.models.config import trained_specs
    from reprise.models.formats.peft_files import load_merged
    from reprise.models.sharding import param_shardings
    from reprise.rl.checkpoint.reader import restore
    from reprise.rl.learner.gradient_accumulation import all_finite
    from reprise.rl.learner.optimizer import SavedArrays

    model = inputs.model
    specs = trained_specs(model)
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = (
        jax.tree.map(lambda _: one_device, specs) if mesh is None else param_shardings(mesh, specs)
    )
    params = jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=sharding),
        specs,
        shardings,
    )
    template = SavedArrays(None, params, ())  # type: ignore[arg-type]  # of the state, this alone
    matches = restore(run / CHECKPOINTS, template, step, subset=True)
    if not all_finite(matches.arrays.params):
        raise WeightsError(
            f"the checkpoint of step {matches.step} in {run} has weights that are not finite: name "
            "an earlier one with --step"
        )
    params = matches.arrays.params
    then = matches.host.get("contents", {})
    is_base = model.lora is not None
    others = identity.check_policy(matches.step, then, inputs.policy, is_base=is_base)
    if is_base:
        model, params = load_merged(inputs.policy, model, params, mesh)
    return Loaded(model, params, matches.step, (*matches.warnings, *others), then)


def result(config: TrainConfig, answers: Sequence[Answers], training_is_known: bool) -> Row:
    """Return the metrics by set and over all sets, with their settings; plain JSON."""
    sets: dict[str, Row] = {}
    for a in answers:
        sets[a.asked.name] = a.metrics(config) | {
            "spec": a.asked.spec,
            "left_out": a.asked.left_out if training_is_known else None,
        }
        if not training_is_known:
            sets[a.asked.name]["seen_in_training"] = None
    return {
        "samples_per_prompt": config.eval.samples,
        "correct_by": config.correct_by,
        "correct_at": config.eval.correct_at,
        "seed": EVAL_SEED,
        "sampling": dataclasses.asdict(config.eval.sampling(config.sampling)),
        "reward_functions": list(config.reward.functions),
        "sets": sets,
        "overall": overall_metrics([a.metrics(config) for a in answers]),
    }

"""Checks of the rewards before a run: every function works, and right answers are paid."""

from __future__ import annotations

import dataclasses
import time

from models.hf_files import shown
from rl.data.answers import expected_answer, extract_answer, with_marker
from rl.data.tasks import Example, Task
from rl.rewards.config import BUILT_IN, RewardConfig
from rl.rewards.pool import RewardPool
from rl.rewards.process import RewardWorkerError
from rl.rewards.scores import Score, ScoreJob

_MAX_ANSWERS = 64
_MAX_S = 20.0


def check_rewards(config: RewardConfig, task: Task) -> list[str]:
    """Call every function as a run will, in a worker, within the deadline; return warnings.

    The user's functions get the first example, with its answer as the completion. The built-in
    ones get the first 64 and should pay each; unpaid and missing answers give warnings. Raises
    ValueError if a function fails, or no answer can be met.
    """
    try:
        if own := [name for name in config.functions if name not in BUILT_IN]:
            failure = _scores(_only(config, own), [task[0]])[0].failure
            if failure is not None:
                raise ValueError(
                    f"Reward.functions: called on the first example ({task[0].example_id}), with "
                    f"its own answer as the completion: {failure}"
                )
        built_in = [name for name in config.functions if name in BUILT_IN]
        if not built_in:
            return []
        missing = _missing_answers(config, task)
        return missing + _unpaid_answers(_only(config, built_in), task)
    except RewardWorkerError as error:
        raise ValueError(f"Reward.functions: {error}") from error


def _missing_answers(config: RewardConfig, task: Task) -> list[str]:
    """Return a warning if questions have no answer. Raises ValueError if none could be paid."""
    num_first = min(_MAX_ANSWERS, len(task))
    num_missing = sum(task[i].answer is None for i in range(num_first))
    if not num_missing:
        return []
    text = f"{num_missing} of the first {num_first} questions have no answer, and get no reward"
    if num_missing == num_first and all(name in BUILT_IN for name in config.functions):
        raise ValueError(
            f"{text} from {', '.join(config.functions)}: name the column with ?answer=COLUMN, or "
            "set Reward.functions to a function that needs none"
        )
    return [f"{text} from the built-in functions"]


def _unpaid_answers(config: RewardConfig, task: Task) -> list[str]:
    first = (task[i] for i in range(min(_MAX_ANSWERS, len(task))))
    examples = [example for example in first if example.answer is not None]
    scores = _scores(config, examples)
    reasons = {
        example.example_id: reason
        for example, score in zip(examples, scores, strict=False)  # fewer if they take long
        if (reason := _why_unpaid(config, example, score)) is not None
    }
    if not reasons:
        return []
    example_id, reason = next(iter(reasons.items()))
    text = (
        f"{len(reasons)} of the first {len(scores)} answers cannot be met by any response, for "
        f"example {example_id}: {reason}"
    )
    if len(reasons) == len(scores):
        raise ValueError(text)
    return [text]


def _why_unpaid(config: RewardConfig, example: Example, score: Score) -> str | None:
    """Return why a response with the example's own answer is not paid; None if it is."""
    assert example.answer is not None
    expected = expected_answer(config.extract, example.answer)
    for name, marker in (("hash", "####"), ("answer_tag", "</answer>")):
        if marker in expected and extract_answer(name, expected) is not None:
            return (
                f"its answer holds {marker}, and Reward.extract is {config.extract!r}: add "
                f"?answer_extract={name} to the task, so that the text there is the answer"
            )
    if score.failure is not None:
        return score.failure
    if all(value is None or value >= 1.0 for value in score.values.values()):
        return None
    read = extract_answer(config.extract, with_marker(config.extract, expected))
    if read != expected.strip():
        return (
            f"Reward.extract={config.extract!r} reads {shown(read or '')} of the answer "
            f"{shown(expected)}: choose another, or ?answer_extract=NAME for the task"
        )
    return f"the answer {shown(expected)} as a response is paid {dict(score.values)}"


def _scores(config: RewardConfig, examples: list[Example]) -> list[Score]:
    """Score the examples' own answers; fewer of them if they take too long."""
    limit = time.monotonic() + _MAX_S
    scores: list[Score] = []
    with RewardPool(config) as pool:
        for example in examples:
            answer = expected_answer(config.extract, example.answer or "")
            job = ScoreJob(example, with_marker(config.extract, answer))
            scores.append(pool.result(pool.submit(job)))
            if time.monotonic() > limit:
                break
    return scores


def _only(config: RewardConfig, functions: list[str]) -> RewardConfig:
    """Return the configuration of some of the functions, in one worker."""
    weights = dict(zip(config.functions, config.full_weights, strict=True))
    selected = tuple(weights[name] for name in functions)
    return dataclasses.replace(config, functions=tuple(functions), weights=selected, workers=1)

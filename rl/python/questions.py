"""Questions of tasks for a custom loop: their order, the rewards of responses, evaluations."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Self

from reprise.rl.data.prompts import DataOrder, prompts_for_step
from reprise.rl.data.tasks import Example
from reprise.rl.exchange.responses import Scorer
from reprise.rl.python.api import Policy
from reprise.rl.python.sampler import Sample, Sampler
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.rewards.scores import Score, ScoreJob
from reprise.rl.run import evaluation
from reprise.rl.runtime.progress import say
from reprise.rl.settings.inputs import open_inputs


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """A question of the data, and its prompt as token ids."""

    example: Example
    prompt: tuple[int, ...]

    @property
    def example_id(self) -> str:
        """The name of the question, the same in every epoch."""
        return self.example.example_id

    @property
    def answer(self) -> str | None:
        return self.example.answer


class Questions:
    """The questions of a policy's sections `Task`, `Reward` and `Eval`, as `rl.train` has them.

        with Questions(policy) as questions:
            batch = questions.batch(step, 8)
            groups = policy.sample([question.prompt for question in batch], n=8)
            rewards = questions.rewards(batch, groups)

    A context manager, since rewards are computed by worker processes.
    """

    def __init__(self, policy: Policy) -> None:
        """Open and check the data and the rewards. Raises ValueError or FileNotFoundError.

        Sets of evaluations that are missing, or that training sees, are named on stderr.
        """
        self._config = policy.config
        self._inputs = open_inputs(policy.config)
        self._order = DataOrder(len(self._inputs.task), policy.config.run.seed)
        specs = (*policy.config.task.specs, *self._inputs.evals.specs)
        self._pool = RewardPool(policy.config.reward, tuple(dict.fromkeys(specs)))
        for remark in self._inputs.evals.remarks():
            say(f"evaluation: {remark}", sys.stderr)

    def __enter__(self) -> Self:
        """Start the reward workers. Raises RewardWorkerError if a function cannot be loaded."""
        self._pool.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.close()

    def __len__(self) -> int:
        """Return the number of questions of an epoch."""
        return len(self._inputs.task)

    def batch(self, step: int, size: int) -> list[Question]:
        """Return the questions at places step · size … (step + 1) · size − 1 of the data order.

        The order is a new permutation in every epoch, by `Run.seed`, so a loop that continues from
        a saved state gets the same questions. Prompts of more than `Rollout.max_prompt_tokens` are
        left out; only data too large to be checked when they were opened have such prompts. Raises
        ValueError.
        """
        if step < 0 or size < 1:
            raise ValueError(f"expected a step of 0 or more and a size above 0, got {step}, {size}")
        examples = prompts_for_step(self._inputs.task, self._order, step * size, size)
        questions = [
            Question(example, self._inputs.encode(example, self._config.task))
            for example in examples
        ]
        limit = self._config.rollout.max_prompt_tokens
        return [question for question in questions if len(question.prompt) <= limit]

    def rewards(
        self, questions: Sequence[Question], groups: Sequence[Sequence[Sample]]
    ) -> list[list[float | None]]:
        """Return the rewards of the responses to each question, by the section `Reward`.

        None is a response to which no function applies, or that a function failed on if
        `Reward.on_failure` is "skip". Raises ValueError for another number of groups, and
        RewardWorkerError once workers can no longer be started.
        """
        scores = self.scores(questions, groups)
        return [[score.total for score in group] for group in scores]

    def scores(
        self, questions: Sequence[Question], groups: Sequence[Sequence[Sample]]
    ) -> list[list[Score]]:
        """Return the scores behind `rewards`: the value of each function, and any failure."""
        if len(questions) != len(groups):
            raise ValueError(
                f"expected a group of samples for each of {len(questions)} questions, got "
                f"{len(groups)}"
            )
        futures: list[list[Future[list[Score]]]] = []
        for question, group in zip(questions, groups, strict=True):
            jobs = [ScoreJob(question.example, s.text, s.token_ids) for s in group]
            if self._config.reward.per == "group":
                futures.append([self._pool.submit_group(jobs)])
            else:
                futures.append([self._pool.submit_group([job]) for job in jobs])
        return [
            [score for future in several for score in self._pool.result(future)]
            for several in futures
        ]

    def failures(self) -> dict[str, float]:
        """Return the numbers of responses that could not be scored so far, by function."""
        return self._pool.metrics()

    def evaluate(self, policy: Policy | Sampler) -> dict[str, float]:
        """Return the metrics of an evaluation by the section `Eval`, as in metrics.jsonl.

        Questions and noise are the same in every evaluation and apart from training's. Raises
        ValueError without a set to evaluate.
        """
        if not self._inputs.evals.sets:
            reasons = self._inputs.evals.skipped or ("Eval.num_prompts is 0",)
            raise ValueError(f"there is no set to evaluate: {'; '.join(reasons)}")
        scorer = Scorer(self._inputs.tokenizer, self._pool, lambda: None, self._config.eval.samples)
        answers = policy.answers(self._inputs.evals, scorer)
        return evaluation.row_of(answers, self._config)

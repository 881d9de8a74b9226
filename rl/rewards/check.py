"""A check of the rewards before a run: right answers are paid, and wrong answers are not.

Expected answers, in several forms, are scored as a run scores responses: encoded, decoded, and sent
to the reward workers. rl.rewards.findings turns the scores into messages.
"""

from __future__ import annotations

import dataclasses
import random
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from reprise.rl.answers.answers import with_marker
from reprise.rl.data.tasks import Example, Task
from reprise.rl.rewards.answer_forms import Form, differ, find_core, right_forms, wrong_forms
from reprise.rl.rewards.config import BUILT_IN, RewardConfig
from reprise.rl.rewards.findings import Reader, Row, Scored, findings
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.rewards.process import RewardWorkerError
from reprise.rl.rewards.scores import Score, ScoreJob

MAX_ROWS = 1000
_LIMIT_S = 8.0
_BATCH_ROWS = 64
_ROWS_PER_WORKER = 256


def check_rewards(
    config: RewardConfig, task: Task, read: Reader, *, max_rows: int = MAX_ROWS
) -> list[str]:
    """Score expected answers in several forms; return warnings.

    If there are more than `max_rows` examples, a sample is checked. Raises ValueError if a function
    fails on the first example, or if no response can match any answer.
    """
    numbers = [0, *random.Random(0).sample(range(1, len(task)), min(len(task), max_rows) - 1)]
    examples = {number: task[number] for number in sorted(numbers)}  # files are read in order
    rows = [_row(config, number, examples[number]) for number in numbers]
    answered = _with_others([row for row in rows if row.example.answer is not None])
    try:
        workers = min(config.workers, 1 + len(answered) // _ROWS_PER_WORKER)  # slow to start
        specs = dict.fromkeys(row.example.spec or row.example.task for row in rows)
        with RewardPool(dataclasses.replace(config, workers=workers), tuple(specs)) as pool:
            checker = _Checker(config, pool, read)
            checker.refuse_failure(rows[0])
            scored = list(checker.scored(answered))
    except RewardWorkerError as error:
        raise ValueError(f"Reward.functions: {error}") from error
    lines = findings(config, scored, read)
    if missing := [row for row in rows if row.example.answer is None]:
        lines += _without_answers(config, missing, len(rows))
    if len(scored) < len(answered):
        lines.append(
            f"rewards are slow: {len(scored)} of {len(answered)} answers were checked in "
            f"{_LIMIT_S:.0f} s"
        )
    return lines


def _row(config: RewardConfig, index: int, example: Example) -> Row:
    return Row(index, example, find_core(example.answer or "", config.extract))


def _with_others(rows: Sequence[Row]) -> list[Row]:
    """Give each row a nearby preceding row with a different answer, or None."""
    result = []
    for place, row in enumerate(rows):
        before = (rows[place - 1 - back] for back in range(min(len(rows) - 1, 8)))
        other = next((one for one in before if differ(row.core.text, one.core.text)), None)
        result.append(dataclasses.replace(row, other=other))
    return result


def _without_answers(config: RewardConfig, rows: Sequence[Row], total: int) -> list[str]:
    """Report rows without an answer, which the built-in functions do not score."""
    if not all(name in BUILT_IN for name in config.functions):
        return []
    text = f"{len(rows)} of {total} examples have no answer and are never paid"
    if len(rows) == total:
        raise ValueError(f"Reward.functions: {text}: name the column with ?answer=COLUMN")
    return [f"{text}, first {min(rows, key=lambda row: row.index).example.example_id}"]


def _shape(row: Row) -> str:
    return re.sub(r"\d+", "0", row.core.text)


class _TimeIsUp(Exception):
    """The time limit of the check has passed."""


class _Checker:
    """Scores the forms of answers until the time limit."""

    def __init__(self, config: RewardConfig, pool: RewardPool, read: Reader) -> None:
        self._config = config
        self._pool = pool
        self._read = read
        self._end_s = 0.0
        # `task` and `exact_match` pay only for equal text, or have tested verifiers
        self._needs_wrong = any(name not in ("task", "exact_match") for name in config.functions)
        # math_verify reads an answer only if a response differs, so each answer shape gets a probe
        self._reads_answers = "math_verify" in config.functions
        self._probe = Form(with_marker(config.extract, "? ?"), "no answer")
        self._probes = dict[str, Scored]()

    def refuse_failure(self, row: Row) -> None:
        """Raise ValueError if a function fails on an example with its answer."""
        forms = right_forms(row.core.text, self._config.extract)
        size = len(forms) if self._config.per == "group" else 1
        texts = [self._as_read(row, form) for form in forms[:size]]
        score = self._pool.result(self._submit(row, texts))[0]
        if score.failure is not None and score.failure.partition("/")[0] not in BUILT_IN:
            raise ValueError(
                f"Reward.functions: called on the first example ({row.example.example_id}), with "
                f"its own answer as the completion: {score.failure}"
            )

    def scored(self, rows: Sequence[Row]) -> Iterator[Scored]:
        """Yield rows with their scores until the time limit."""
        self._end_s = time.monotonic() + _LIMIT_S
        for start in range(0, len(rows), _BATCH_ROWS):
            try:
                yield from self._batch([Scored(row) for row in rows[start : start + _BATCH_ROWS]])
            except _TimeIsUp:
                return

    def _batch(self, batch: list[Scored]) -> list[Scored]:
        """Score the likeliest right form and the wrong forms, then the other right forms.

        The other right forms are scored only if the likeliest is unpaid.
        """
        forms = {s: right_forms(s.row.core.text, self._config.extract) for s in batch}
        self._score([(s, right[:1], self._wrong(s)) for s, right in forms.items()])
        unpaid = [s for s in batch if not all(map(s.is_paid, self._config.names))]
        self._score([(s, forms[s][1:], []) for s in unpaid])
        for s in batch if self._reads_answers else ():
            s.wrong[self._probe] = self._probes[_shape(s.row)].wrong[self._probe]
        return batch

    def _wrong(self, scored: Scored) -> list[Form]:
        if not self._needs_wrong:
            return []
        row = scored.row
        extract = self._config.extract
        other = None if row.other is None else row.other.core.text
        forms = wrong_forms(row.example, row.core.text, other, extract)
        is_first = self._probes.setdefault(_shape(row), scored) is scored
        return [*forms, self._probe] if self._reads_answers and is_first else forms

    def _score(self, work: Sequence[tuple[Scored, list[Form], list[Form]]]) -> None:
        sent = [(s, right, wrong, self._send(s.row, right, wrong)) for s, right, wrong in work]
        for s, right, wrong, futures in sent:
            scores = [score for f in futures for score in self._pool.result(f, self._look_at_clock)]
            s.right |= dict(zip(right, scores, strict=False))
            s.wrong |= dict(zip(wrong, scores[len(right) :], strict=True))

    def _send(self, row: Row, right: list[Form], wrong: list[Form]) -> list[Future[list[Score]]]:
        # wrong responses stay wrong whatever the tokenizer does to the text
        texts = [*(self._as_read(row, form) for form in right), *(form.text for form in wrong)]
        if self._config.per == "group":
            return [self._submit(row, texts)] if texts else []
        return [self._submit(row, [text]) for text in texts]

    def _as_read(self, row: Row, form: Form) -> str:
        return self._read(form.text, row.example.task).text

    def _submit(self, row: Row, texts: list[str]) -> Future[list[Score]]:
        return self._pool.submit_group([ScoreJob(row.example, text) for text in texts])

    def _look_at_clock(self) -> None:
        if time.monotonic() > self._end_s:
            raise _TimeIsUp

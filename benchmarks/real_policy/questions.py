"""The questions that `benchmarks.real_policy` asks, in sets by content.

The shipped policy understands its own tasks only (`tiny`). A policy with a chat template gets
arithmetic and word puzzles of reasoning-gym, and open questions and requests for code from
`benchmarks/data` (`chat`), all in its template.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.environment import ROOT
from models.tokenizer import Tokenizer
from rl.data.prompts import encode_prompt
from rl.data.tasks import Example, TaskConfig, open_tasks

SEED = 21


@dataclasses.dataclass(frozen=True)
class QuestionSet:
    """Tasks that take turns, the suffix of their prompts, and how an answer is found for a reward.

    `extract` names it as `Reward.extract` does; None: nothing scores these responses.
    """

    name: str
    specs: tuple[str, ...]
    suffix: str = ""
    extract: str | None = None


def _file(name: str) -> str:
    return f"jsonl:{ROOT / 'benchmarks' / 'data' / name}?answer="


KINDS: dict[str, tuple[QuestionSet, ...]] = {
    "tiny": (
        QuestionSet(
            "arithmetic",
            (
                "reasoning_gym:gcd?min_numbers=2&max_numbers=2&min_value=2&max_value=99",
                "reasoning_gym:chain_sum?min_terms=2&max_terms=4&min_digits=1&max_digits=1",
                "reasoning_gym:count_bits?min_n=1&max_n=127",
            ),
            "\n",
            extract="hash",
        ),
        QuestionSet(
            "words",
            ("reasoning_gym:spell_backward?min_word_len=3&max_word_len=7",),
            "\n",
            extract="hash",
        ),
    ),
    "chat": (
        QuestionSet(
            "arithmetic",
            (
                "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2",
                "reasoning_gym:gcd?min_numbers=2&max_numbers=2&min_value=2&max_value=30",
                "reasoning_gym:basic_arithmetic?min_terms=2&max_terms=3&min_digits=1&max_digits=2",
                "reasoning_gym:products?min_terms=2&max_terms=2&min_digits=1&max_digits=1",
            ),
            extract="last_number",
        ),
        QuestionSet(
            "words",
            (
                "reasoning_gym:letter_counting?min_words=3&max_words=6",
                "reasoning_gym:spell_backward?min_word_len=3&max_word_len=5",
                "reasoning_gym:word_sorting?min_words=3&max_words=4",
                "reasoning_gym:sentence_reordering?min_words_in_sentence=3",
            ),
            extract="last_line",
        ),
        QuestionSet("writing", (_file("writing_questions.jsonl"),)),
        QuestionSet("code", (_file("code_questions.jsonl"),)),
    ),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """One question with the tokens of its prompt; `asked` is the text of the user."""

    of: QuestionSet
    example: Example
    asked: str
    prompt_ids: tuple[int, ...]


def ask(kind: str, tokenizer: Tokenizer, count: int) -> list[Question]:
    """Return `count` questions of each set of that kind, set by set."""
    found = []
    for question_set in KINDS[kind]:
        each = -(-count // len(question_set.specs))
        tasks = [open_tasks(TaskConfig((s,), size=each), SEED) for s in question_set.specs]
        for i in range(count):
            example = tasks[i % len(tasks)][i // len(tasks)]
            ids = encode_prompt(tokenizer, example, TaskConfig(prompt_suffix=question_set.suffix))
            assert isinstance(example.prompt, str)
            found.append(Question(question_set, example, example.prompt + question_set.suffix, ids))
    return found


def set_names(questions: Sequence[Question]) -> list[str]:
    """Return the names of the sets, in order."""
    return list(dict.fromkeys(q.of.name for q in questions))

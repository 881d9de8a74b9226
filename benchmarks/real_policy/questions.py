"""The questions of `benchmarks.real_policy`, in sets by content.

The shipped policy can do its own tasks only (`tiny`). A policy with a chat template gets arithmetic
and word puzzles of reasoning-gym, open questions and requests for code (`chat`), in its template.
"""

from __future__ import annotations

import dataclasses

from benchmarks.environment import ROOT
from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.data.prompts import encode_prompt
from reprise.rl.data.tasks import Example, TaskConfig, open_tasks

SEED = 21


@dataclasses.dataclass(frozen=True)
class QuestionSet:
    """Tasks in turns, the suffix of their prompts, and `Reward.extract` (None: no reward)."""

    name: str
    specs: tuple[str, ...]
    suffix: str = ""
    extract: str | None = None


def _file(name: str) -> str:
    return f"jsonl:{ROOT / 'benchmarks' / 'data' / name}?answer="


_GCD = "reasoning_gym:gcd?min_numbers=2&max_numbers=2&min_value=2&max_value="
_SUM = "reasoning_gym:chain_sum?min_terms=2&min_digits=1&"
_SPELL = "reasoning_gym:spell_backward?min_word_len=3&max_word_len="
KINDS: dict[str, tuple[QuestionSet, ...]] = {
    "tiny": (
        QuestionSet(
            "arithmetic",
            (
                _GCD + "99",
                _SUM + "max_terms=4&max_digits=1",
                "reasoning_gym:count_bits?min_n=1&max_n=127",
            ),
            "\n",
            extract="hash",
        ),
        QuestionSet("words", (_SPELL + "7",), "\n", extract="hash"),
    ),
    "chat": (
        QuestionSet(
            "arithmetic",
            (
                _SUM + "max_terms=2&max_digits=2",
                _GCD + "30",
                "reasoning_gym:basic_arithmetic?min_terms=2&max_terms=3&min_digits=1&max_digits=2",
                "reasoning_gym:products?min_terms=2&max_terms=2&min_digits=1&max_digits=1",
            ),
            extract="last_number",
        ),
        QuestionSet(
            "words",
            (
                "reasoning_gym:letter_counting?min_words=3&max_words=6",
                _SPELL + "5",
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
    """A question with its prompt tokens; `asked` is the user's text."""

    of: QuestionSet
    example: Example
    asked: str
    prompt_ids: tuple[int, ...]


def ask(kind: str, tokenizer: Tokenizer, count: int) -> list[Question]:
    """Return `count` questions of each set of a kind, set by set."""
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

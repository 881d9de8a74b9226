"""Forms of an expected answer: right forms, which a reward should pay, and wrong forms."""

from __future__ import annotations

import re
from typing import NamedTuple

from reprise.rl.answers import written_numbers
from reprise.rl.answers.answers import EXTRACTORS, extract_answer, with_marker
from reprise.rl.answers.math_answers import Plain, plain_value
from reprise.rl.data.tasks import Example

MARKERS = {"hash": "####", "boxed": r"\boxed{", "answer_tag": "</answer>"}
OTHER = "another example's answer"
QUESTION = "the question itself"
_SENTENCE = "The answer is {}."
_PLAIN_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


class Form(NamedTuple):
    """A response to score; `kind` names a wrong response in messages."""

    text: str
    kind: str = ""


class Core(NamedTuple):
    """The part of an expected answer that a response should give, and its marker or None."""

    text: str
    marker: str | None = None


def find_core(answer: str, extract: str) -> Core:
    """Return the answer inside a solution, trying the marker of `extract` first."""
    for name in sorted(MARKERS, key=lambda name: name != extract):
        if MARKERS[name] in answer and (inner := extract_answer(name, answer)):
            return Core(inner, name)
    return Core(answer.strip())


def right_forms(core: str, extract: str) -> list[Form]:
    """Return responses that give the answer; the first follows the convention `extract`."""
    texts = [with_marker(extract, core), core, _SENTENCE.format(core)]
    texts += [with_marker(name, core) for name in MARKERS]
    texts += [f"```\n{core}\n```"] if "\n" in core else []
    if _PLAIN_NUMBER.fullmatch(core):
        texts += [with_marker(extract, f"${core}"), with_marker(extract, f"{core} units")]
        texts += [] if "." in core else [with_marker(extract, f"{core}.0")]
    return [Form(text) for text in dict.fromkeys(texts)]


def wrong_forms(example: Example, core: str, other: str | None, extract: str) -> list[Form]:
    """Return responses that do not give the answer; `other` is the answer of another example."""
    forms = [] if other is None else other_forms(other, extract)
    if (number := _larger(core)) is not None:
        name = f"{number} for {core[:40]}"
        forms += [Form(with_marker(extract, number), name), Form(number, name)]
    question = example.prompt if isinstance(example.prompt, str) else example.prompt[-1]["content"]
    readings = [plain_value(extract_answer(name, question) or "") for name in EXTRACTORS]
    if (value := plain_value(core)) is None or value not in readings:
        forms.append(Form(question, QUESTION))
    return forms


def other_forms(other: str, extract: str) -> list[Form]:
    """Return the answer of another example by the convention `extract`, and as plain text."""
    return [Form(text, OTHER) for text in dict.fromkeys([with_marker(extract, other), other])]


def differ(one: str, other: str) -> bool:
    """Return whether two answers surely differ: both are numbers or words, and not equal."""
    values: list[Plain | None] = [plain_value(one), plain_value(other)]
    return None not in values and values[0] != values[1]


def _larger(core: str) -> str | None:
    """Return a wrong number with the same last digits: 1,072 for 72, 7 for -7."""
    value = written_numbers.read(core)
    if value is not None and value < 0:
        return written_numbers.to_text(-value)
    if not _PLAIN_NUMBER.fullmatch(core):
        return None
    return f"1,{int(core):03d}" if core.isdecimal() and len(core) < 4 else f"1{core}"

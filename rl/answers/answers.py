"""Extraction of the answer from a completion, by the name of a convention.

Each extractor returns the stripped answer, or None (which scores 0) without its marker. The last
marker counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from reprise.rl.answers import written_numbers


def whole(text: str) -> str | None:
    """Return the whole text."""
    return text.strip()


def last_line(text: str) -> str | None:
    """Return the last line that is not blank."""
    lines = text.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, inner braces balanced."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":  # an escaped brace does not count
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position].strip()
        position += 1
    return None  # cut off before the closing brace


def answer_tag(text: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def hash_mark(text: str) -> str | None:
    """Return the rest of the line after the last `####`."""
    start = text.rfind("####")
    return text[start + 4 :].split("\n", 1)[0].strip() if start >= 0 else None


def last_number(text: str) -> str | None:
    """Return the value of the last number: -1250.5 for `-$1,250.50` (`written_numbers`)."""
    value = written_numbers.last(text)
    return None if value is None else written_numbers.to_text(value)


Extractor = Literal["whole", "last_line", "boxed", "answer_tag", "hash", "last_number"]
EXTRACTORS: Mapping[str, Callable[[str], str | None]] = {
    "whole": whole,
    "last_line": last_line,
    "boxed": boxed,
    "answer_tag": answer_tag,
    "hash": hash_mark,
    "last_number": last_number,
}


def extract_answer(name: str, text: str) -> str | None:
    """Apply the extractor `name`; an empty answer is no answer."""
    return EXTRACTORS[name](text) or None


def expected_answer(name: str, answer: str) -> str:
    """Return the expected answer, extracted as from a completion if it has the marker."""
    return extract_answer(name, answer) or answer


def with_marker(name: str, answer: str) -> str:
    """Return a completion with only the answer, by the convention `name`."""
    marked = {
        "boxed": f"\\boxed{{{answer}}}",
        "answer_tag": f"<answer>{answer}</answer>",
        "hash": f"#### {answer}",
    }
    return marked.get(name, answer)

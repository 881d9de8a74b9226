"""The prose lint: `python -m docs.prose [--list]`.

Counts phrases that an English-speaking engineer would not write, in docstrings and comments of the
source (per 1,000 words), and words that name nothing, in identifiers (per 10,000). Fails above the
budget, which only falls. Fails too if a marker is more than twice as frequent, in the source or in
the pages, as in other repositories of this field.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "spec", "sched", "rl")
PHRASES_PER_1000, NAMES_PER_10000 = 0.03, 168  # at first 24.9 and 557

VERBS = (
    "is was were are it they a an the its this that each others another has have had comes came "
    "runs goes stands lies waits rounds requests workers"
)
SUBJECTS = "there it they one a an the no nobody none some that this others another"
PHRASES = re.compile(
    "|".join(
        (
            rf"\b[Ww]hat (?:{'|'.join(VERBS.split())})\b",  # name the thing
            r"\b(?:that|those) of\b",
            r"\b(?:of|in|for|from|by|on) (?:which|whose|whom)\b",
            rf"\b[Ww]here (?:{'|'.join(SUBJECTS.split())})\b",  # if, when, unless
            # programs send, receive, call, return, fail, time out
            r"\b(?:told|tells?|telling|asked|asks?|hears?|heard)\b",
            r"\b(?:nobody|somebody|anybody|signs? of life)\b",
            r"\b(?:stands?|stood|lies?|lay|behind|beside|begun|began|begins?)\b",
            r"\b(?:go|goes|going|went|gone) on\b",
            r"\b(?:its|their) own\b|\bas far as\b|\ball that\b",
        )
    )
)
NAMES = frozenset(
    "told tell asked ask given found made kept most least longest apart elsewhere begun began "
    "there here lacking alive sign patience mend leg standing words word reach meet talk hello "
    "welcome home silent hear hears of".split()
)
# Markers of the dialect that this project had, by their rate per 1,000 words in the docstrings and
# comments of prime-rl, rlax and nanochat (81,476 words, November 2026).
MARKERS = {
    r"\b(?:so|as) many\b": 0.01,
    r"\balone\b": 0.09,
    r"\b(?:the|other|another|each|no|which|these|those) ones?\b": 0.05,
    r"\bwhose\b": 0.58,
    r"\btheirs\b|\bothers'|\banother's|\bone's\b": 0.01,
    r"\bif (?:any (?:is|has|does|are)|there (?:is|are) (?:none|any|one))\b": 0.0,
    r"\bas of\b|\bmay be (?:anything|none)\b|\bone after\b|\bin turn\b|\bby (?:now|then)\b": 0.0,
    r"\balike\b|\bin vain\b|\banew\b|\bafresh\b|\bat rest\b|\bmeanwhile\b": 0.0,
    r"\bat once\b": 0.02,
    r"\b(?:a|an|the|each|its|this) \w+'s\b": 1.96,
    r"\bof (?:it|them)\b": 0.04,
    r"\b(?:is|are) to be\b": 0.02,
    r"\bends\b": 0.1,
    r": (?:it|they|none|all|no|one|each|these|those)\b": 0.37,
}
ALLOWED_RATIO, FEW_PER_1000 = 2, 0.05  # of an anchor's rate; a marker that rare is no dialect
GENERATED = {"configuration.md", "results.md", "history_of_results.md"}  # from what is counted


class Found(NamedTuple):
    """A phrase or a name, and its line."""

    place: str
    text: str


class Counts(NamedTuple):
    """Words and names of a source, and the ones that the lint counts."""

    prose: list[Found]  # each docstring and comment
    num_words: int
    num_names: int
    phrases: list[Found]
    names: list[Found]


def count(text: str, place: str) -> Counts:
    """Return the counts of a module's text."""
    tree = ast.parse(text)
    proses = [Found(f"{place}:{line}", prose) for line, prose in _prose(text, tree)]
    phrases = [Found(at, m.group()) for at, prose in proses for m in PHRASES.finditer(prose)]
    num_words = sum(len(prose.split()) for _, prose in proses)
    names = list(_names(tree))
    counted = [Found(f"{place}:{line}", name) for line, name in names if _parts(name) & NAMES]
    return Counts(proses, num_words, len(names), phrases, counted)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the prose of each page, without blocks of code."""
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ):
        if path.name not in GENERATED:
            text = path.read_text(encoding="utf-8")
            yield path.name, re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def dialect(texts: Mapping[str, str]) -> tuple[dict[str, float], list[Found]]:
    """Return the markers of texts that are too frequent, by their rate, and all places of these."""
    num_words = sum(len(text.split()) for text in texts.values())
    rates, places = dict[str, float](), list[Found]()
    for marker, anchor_rate in MARKERS.items():
        found = [
            Found(place, text[max(0, m.start() - 30) : m.end() + 20])
            for place, text in texts.items()
            for m in re.finditer(marker, text)
        ]
        rate = 1e3 * len(found) / max(1, num_words)
        if rate > max(ALLOWED_RATIO * anchor_rate, FEW_PER_1000):
            rates[marker] = rate
            places += found
    return rates, places


def _prose(text: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring, those of fields too, and of each comment."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented):
            for statement in node.body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    yield statement.lineno, " ".join(str(statement.value.value).split())
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string[1:].strip()


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each definition, argument and assignment."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _parts(name: str) -> set[str]:
    """Return the words of an identifier."""
    return set(re.findall("[a-z]+", re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()))


def main(argv: list[str]) -> int:
    """Print the rates; return 1 if one is above its budget."""
    parser = argparse.ArgumentParser(prog="python -m docs.prose", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print each place")
    args = parser.parse_args(argv)
    paths = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
    parts = [count(p.read_text("utf-8"), str(p.relative_to(ROOT))) for p in paths]
    phrases = [found for part in parts for found in part.phrases]
    names = [found for part in parts for found in part.names]
    if args.list:
        for place, text in phrases + names:
            print(f"{place}: {text}")
    phrase_rate = 1e3 * len(phrases) / sum(part.num_words for part in parts)
    name_rate = 1e4 * len(names) / sum(part.num_names for part in parts)
    is_within = phrase_rate <= PHRASES_PER_1000 and name_rate <= NAMES_PER_10000
    source = {place: " ".join(prose.split()) for part in parts for place, prose in part.prose}
    for where, texts in {"source": source, "pages": dict(pages())}.items():
        rates, places = dialect(texts)
        is_within = is_within and not rates
        for marker, rate in rates.items():
            print(f"prose: {rate:.2f} per 1,000 words in the {where}: {marker}")
        for place, text in places if args.list else ():
            print(f"{place}: {' '.join(text.split())}")
    print(
        f"prose: {phrase_rate:.2f} phrases per 1,000 words (at most {PHRASES_PER_1000}), "
        f"{name_rate:.0f} names per 10,000 (at most {NAMES_PER_10000})"
    )
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

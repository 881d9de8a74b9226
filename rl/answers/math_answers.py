r"""Comparison of mathematical answers: numbers and words here, everything else by math-verify.

math-verify 0.9 is used only with its LaTeX grammar (its other parser evaluates text). Numbers are
read by `rl.answers.written_numbers`, so that no answer is compiled or evaluated (tests/hostile).
docs/rewards.md has the rules.
"""

from __future__ import annotations

import functools
import logging
import re
from fractions import Fraction
from typing import Any, NamedTuple

from reprise.rl.answers import units, written_numbers
from reprise.rl.answers.answers import boxed
from reprise.rl.answers.units import SPACE, TEXT

_MAX_DIGITS = 1000  # of a repeating decimal
# A decimal equals another number if it is this close; small numbers share four digits.
_ABSOLUTE = Fraction(1, 10**6)
_RELATIVE = Fraction(1, 10**4)
_ROUNDING = 1e-12  # relative, of exact expressions that are evaluated

_DELIMITERS = (r"\boxed{", "}"), (r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))")
_GROUPED = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{SPACE}+\d{{3}})+(?!\d)")  # 1 000
_SPACED_DIGITS = re.compile(rf"(?<![_^\d])\d+{SPACE}+\d")
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)")
_BROKEN = re.compile(r"\d'\d|\d\.\d+\.\d")  # 1'5, 1.000.000
_NAME = re.compile(r"\A[A-Za-z]\s*=(?!=)\s*")  # x = 3 for 3
_EXPONENT = re.compile(r"[\d.][eE][+-]?\d")
_LETTERS = r"[^\W\d_]"
_TERM = re.compile(rf"{_LETTERS}{{2,}}\.?|(?=.*{_LETTERS}{{3}}){_LETTERS}+(?:['’-]{_LETTERS}+)+\.?")


def equal(answer: str, response: str) -> bool:
    """Return whether a response equals the expected answer.

    Numbers are compared by value, words by their letters, and lists with words item by item. Raises
    ValueError if the expected answer cannot be read.
    """
    number = _number(answer, letters_are_units=False)
    is_number = number is not None
    named = _NAME.sub("", _bare(response)) if is_number else response
    if is_number and (value := _number(named)) is not None:
        return _same_numbers(number, value, is_rounded="." in _bare(answer) + _bare(response))
    gold = _clean(answer)
    actual = _clean(response, letters_are_units=is_number)
    if gold and gold == actual:
        return True
    if (terms := _terms(gold)) and (_terms(actual) or any(len(term) > 2 for term in terms)):
        return terms == _terms(actual)
    items = _items(gold)
    if len(items) > 1 and any(map(_terms, items)):
        others = _items(actual)
        return len(items) == len(others) and all(map(equal, items, others))
    other = _parse(actual)
    if is_number and not other:
        return False
    if not (parsed := _parse(gold)):
        raise ValueError(f"math_verify cannot read the expected answer {answer[-80:]!r}")
    return bool(other and _library().verify(parsed, other, timeout_seconds=None))


Plain = Fraction | tuple[str, ...]


def plain_value(answer: str) -> Plain | None:
    """Return the value of a number, or the words, that make up an answer; otherwise None."""
    number = _number(answer)
    if number is not None:
        return number
    return tuple(_terms(_clean(answer, letters_are_units=True))) or None


@functools.cache
def prepare() -> None:
    """Build the grammar and import sympy, which takes seconds."""
    equal("x^2+2x", "x(x+2)")


# --- text -------------------------------------------------------------------------------


def _number(text: str, *, letters_are_units: bool = True) -> Fraction | None:
    """Return the value of a number, possibly with a unit; None for any other text."""
    if len(text) > written_numbers.MAX_CHARACTERS:
        return None
    text = _REPEATING.sub(_repeating, _bare(text))
    return written_numbers.read(text, letters_are_units=letters_are_units)


def _bare(text: str) -> str:
    """Return an answer without delimiters and without a final period."""
    text = text.strip()
    for left, right in _DELIMITERS:
        if text.startswith(left) and text.endswith(right) and len(text) > len(left + right):
            inner = text[len(left) : -len(right)]
            if left not in inner and (left != r"\boxed{" or boxed(text) == inner.strip()):
                text = inner.strip()
    return re.sub(r"(?<=[\w})])\s*\.$", "", text)


def _clean(text: str, *, letters_are_units: bool = False) -> str:
    """Return an answer as the grammar reads it: without currency, percent signs and units."""
    text = text.strip().replace("−", "-").replace(r"\$", "").replace("{,}", ",")
    text = _bare(re.sub(r"\\!\s*", "", text))
    if text.startswith("$") and text.count("$") == 1:  # an amount of money
        text = text[1:].strip()
    text = re.sub(r"(?<=[\d})])\s*(?:\\?%|percent(?:age)?\b|pct\b)", "", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _GROUPED.sub(lambda match: re.sub(r"[^\d]", "", match[0]), text)
    text = _REPEATING.sub(_repeating, text)
    return units.without_unit(text, letters_are_units=letters_are_units).strip()


def _repeating(match: re.Match[str]) -> str:
    r"""Return a number like `0.1\overline{6}` as a fraction."""
    whole = match[1]
    fixed = match[2]
    period = match[3] or match[4]
    if len(match[0]) > _MAX_DIGITS:
        return match[0]
    numerator = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}}"


def _without_exponent(text: str) -> str:
    """Return a number like 1e-3 as a fraction: the grammar reads the e as Euler's number."""
    number = written_numbers.read(text) if _EXPONENT.search(text) else None
    return text if number is None else rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _same_numbers(gold: Any, actual: Any, *, is_rounded: bool) -> bool:
    limit = min(_ABSOLUTE, _RELATIVE * abs(gold)) if is_rounded else 0
    return bool(abs(gold - actual) <= limit)


def _terms(text: str) -> list[str]:
    """Return the words of a text of words only, else nothing; single letters are variables."""
    terms = re.sub(TEXT, r" \1 ", text).split()
    return (
        [term.casefold().rstrip(".") for term in terms] if all(map(_TERM.fullmatch, terms)) else []
    )


def _items(text: str) -> list[str]:
    """Return the items of a flat list; other text is one item."""
    inner = re.sub(r"^\\?[{(\[]|\\?[})\]]$", "", re.sub(TEXT, r" \1 ", text).strip())
    return [text] if re.search(r"[(){}\[\]]", inner) else [i.strip() for i in inner.split(",")]


# --- math-verify ------------------------------------------------------------------------


class _Library(NamedTuple):
    parse: Any
    verify: Any
    extraction: list[Any]


@functools.cache
def _library() -> _Library:
    """Import math-verify, with our number parser and our equality of numbers and symbols."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy2
    from math_verify import LatexExtractionConfig, grader, parse, verify

    # math-verify warns at every start that its timeouts are off, which is intended
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    latex2sympy2.Number = _sympy_number  # the original evaluates text
    latex2sympy2._Latex2Sympy.parse_number = lambda _, text: _sympy_number(text.replace(",", ""))
    grader.sympy_numeric_eq = functools.partial(_same_values, grader.sympy_numeric_eq)
    # the original takes the product of letters t·a·c for the word cat
    grader.sympy_compare_symbols = _same_symbols
    without_units = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    return _Library(parse, verify, [LatexExtractionConfig(normalization_config=without_units)])


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> list[Any]:
    """Return the expressions of a text; an empty list if it cannot be read."""
    # the grammar multiplies spaced digits, and leaves amounts out
    if _SPACED_DIGITS.search(text) or _BROKEN.search(text) or units.has_amount(text):
        return []
    text = _without_exponent(text)
    if not any(mark in text for mark in ("$", r"\boxed", r"\(", r"\[")):
        text = f"${text}$"
    library = _library()
    options = {"fallback_mode": "no_fallback", "parsing_timeout": None}
    return list(library.parse(text, extraction_config=library.extraction, **options))


def _sympy_number(text: str) -> Any:
    """Return a text as a sympy number. Raises ValueError for any other text."""
    import sympy

    return sympy.Integer(int(text)) if text.isdecimal() else sympy.Float(text)


def _same_values(compare_matrices: Any, gold: Any, actual: Any, *precisions: int) -> bool:
    """Return whether two sympy numbers are equal, exactly if both are rational.

    math-verify compares absolute differences, which makes all small numbers equal.
    """
    import sympy

    matrices = sympy.MatrixBase, sympy.MatrixExpr
    if isinstance(gold, matrices) or isinstance(actual, matrices):
        return bool(compare_matrices(gold, actual, *precisions))
    gold = gold.doit()
    actual = actual.doit()
    if not (gold.is_number and actual.is_number):
        return False
    if gold.is_Rational and actual.is_Rational:
        return bool(gold == actual)
    difference = abs((gold - actual).evalf(20))
    size = max(abs(gold.evalf(20)), abs(actual.evalf(20)))
    if not (difference.is_Float or difference.is_Integer):
        return False
    limit = _ROUNDING * size
    if gold.has(sympy.Float) or actual.has(sympy.Float):
        limit = max(limit, min(float(_ABSOLUTE), float(_RELATIVE) * size))
    return bool(difference <= limit)


def _same_symbols(gold: Any, actual: Any) -> bool:
    """Return whether a symbol equals another expression; longer names ignore case."""
    import sympy

    if sympy.E in (gold, actual):  # the symbol e is Euler's number
        return "e" in (str(gold).lower(), str(actual).lower())
    if not (isinstance(gold, sympy.Symbol) and isinstance(actual, sympy.Symbol)):
        return bool(gold == actual)
    pair = gold.name, actual.name
    return pair[0] == pair[1] or (min(map(len, pair)) > 1 and pair[0].lower() == pair[1].lower())

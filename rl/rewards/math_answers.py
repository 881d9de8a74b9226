r"""Answers in mathematics, compared: numbers and words here, everything else by math-verify.

math-verify 0.9 reads LaTeX by its grammar alone (its other parser evaluates text). Numbers are
built here, so that no answer is compiled or evaluated (tests/hostile). docs/rewards.md has the
rules.
"""

from __future__ import annotations

import functools
import logging
import re
from fractions import Fraction
from typing import Any, NamedTuple

from rl.data.answers import boxed

_MAX_DIGITS, _MAX_EXPONENT = 1000, 400  # of a number that is read here
# A decimal equals another number if it is this close; small numbers share four digits.
_ABSOLUTE, _RELATIVE = Fraction(1, 10**6), Fraction(1, 10**4)
_ROUNDING = 1e-12  # relative, of exact expressions that are evaluated

_DELIMITERS = (r"\boxed{", "}"), (r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$")
_EXPONENT = r"(?:[eE][+-]?\d+)?"
_DECIMAL = rf"(?:[1-9]\d{{0,2}}(?:,\d{{3}})+|\d+)(?:\.\d*)?{_EXPONENT}|\.\d+{_EXPONENT}"
_RATIO = r"(\d+)\s*/\s*(\d+)|\\[dtc]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}"
_NUMBER = re.compile(rf"([+-]?)\s*(?:({_DECIMAL})|(\d+\s+)?(?:{_RATIO}))")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))")
_SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad)"
_GROUPED = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_SPACE}+\d{{3}})+(?!\d)")  # 1 000
_SPACED_DIGITS = re.compile(rf"(?<![_^\d])\d+{_SPACE}+\d")
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)")

_KNOWN_UNITS = (
    "mm cm dm km in ft yd mi mg kg lb lbs oz sec min hr hrs ms ml mL mph kmh kph Hz kJ kW"
)
_LETTER_UNITS = "m g s h l L J W V N K A F C"
_NOT_UNITS = "hundred thousand million billion trillion dozen squared cubed factorial half halves "
_NOT_UNITS += "third thirds plus minus times over alpha beta gamma delta theta lambda sigma omega "
_NOT_UNITS += "infinity"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d)|²|³)?"
_TEXT = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}"
_TEXT_UNIT = re.compile(rf"(.*\d(?:.*[)}}])?){_SPACE}*(?:{_TEXT}{_POWER} ?/? ?)+")
_DEGREES = re.compile(r"(.*[\d)}]) ?(?:\^ ?(?:\\circ|\{ ?\\circ ?\})|°)")
_MAX_UNIT_CHARACTERS = 300  # of an answer that may have one
# Letters after any other command are variables: only numbers have units.
_NUMERIC_COMMANDS = re.compile(r"\\(?:[dtc]?frac|sqrt|pi|times|cdot|left|right)(?![A-Za-z])")
_LETTERS = r"[^\W\d_]"
_TERM = re.compile(rf"{_LETTERS}{{2,}}\.?|(?=.*{_LETTERS}{{3}}){_LETTERS}+(?:['’-]{_LETTERS}+)+\.?")


def equal(answer: str, response: str) -> bool:
    """Return whether a response equals the expected answer; ValueError if that is unreadable.

    Numbers are compared by value, words by their letters, and lists with words item by item.
    """
    gold = _clean(answer)
    is_number = _number(gold) is not None
    actual = _clean(response, letters_are_units=is_number)
    if gold and gold == actual:
        return True
    if is_number and (value := _number(actual)) is not None:
        return _same_numbers(_number(gold), value, is_rounded="." in gold + actual)
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
    """Return the value of a number, or the words, that an answer consists of; None for others."""
    text = _clean(answer, letters_are_units=True)
    number = _number(text)
    return number if number is not None else tuple(_terms(text)) or None


@functools.cache
def prepare() -> None:
    """Build the grammar and import sympy, which takes seconds."""
    equal("x^2+2x", "x(x+2)")


# --- text -------------------------------------------------------------------------------


def _clean(text: str, *, letters_are_units: bool = False) -> str:
    """Return an answer without delimiters, currency, percent signs, units and a final period."""
    text = text.strip().replace("−", "-").replace(r"\$", "").replace("{,}", ",")
    text = re.sub(r"\\!\s*", "", text)
    for left, right in _DELIMITERS:
        if text.startswith(left) and text.endswith(right) and len(text) > len(left + right):
            inner = text[len(left) : -len(right)]
            if left not in inner and (left != r"\boxed{" or boxed(text) == inner.strip()):
                text = inner.strip()
    if text.startswith("$") and text.count("$") == 1:  # an amount of money
        text = text[1:].strip()
    text = re.sub(r"(?<=[\w})])\s*\.$", "", text)
    text = re.sub(r"(?<=[\d})])\s*(?:\\?%|percent(?:age)?\b|pct\b)", "", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _GROUPED.sub(lambda match: re.sub(r"[^\d]", "", match[0]), text)
    return _without_unit(_REPEATING.sub(_repeating, text), letters_are_units).strip()


def _without_unit(text: str, letters_are_units: bool) -> str:
    r"""Return a text without the unit or words after its number.

    `2ab` and `2m` are products, unless a number is expected; `2 m`, `2cm`, `2 apples` have units.
    """
    if len(text) > _MAX_UNIT_CHARACTERS:
        return text
    text = " ".join(text.split())
    if match := _TEXT_UNIT.fullmatch(text):
        return match[1]
    pattern = _plain_unit(letters_are_units)
    if not (match := pattern.fullmatch(text) or _DEGREES.fullmatch(text)):
        return text
    is_number = not re.search(r"[A-Za-z\\]", _NUMERIC_COMMANDS.sub("", match[1]))
    return match[1] if is_number else text


@functools.cache
def _plain_unit(letters_are_units: bool) -> re.Pattern[str]:
    known, letters, others = (
        "|".join(names.split()) for names in (_KNOWN_UNITS, _LETTER_UNITS, _NOT_UNITS)
    )
    noun = rf"(?!(?:{others})\b){_LETTERS}{{3,}}+"
    # atomic: a text of many units is read in one way only
    unit = rf"(?>(?:{known}|{letters})(?!{_LETTERS})|{noun}){_POWER}"
    first = rf"{_SPACE}+{unit}|(?:{known})(?!{_LETTERS}){_POWER}"
    if letters_are_units:
        first = rf"{_SPACE}*{unit}"
    return re.compile(rf"(.*[\d)}}])-?(?:{first})(?:(?: ?[/·] ?| ){unit})*+")


def _repeating(match: re.Match[str]) -> str:
    r"""Return `0.1\overline{6}` as a fraction."""
    whole, fixed, period = match[1], match[2], match[3] or match[4]
    if len(match[0]) > _MAX_DIGITS:
        return match[0]
    numerator = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}}"


def _number(text: str) -> Fraction | None:
    """Return the value of a decimal, fraction or mixed number; None for any other text."""
    match = _NUMBER.fullmatch(text) if len(text) <= _MAX_DIGITS else None
    if match is None:
        return None
    minus, decimal, whole, *ratio = match.groups()
    if decimal is not None:
        digits, _, exponent = decimal.replace(",", "").lower().partition("e")
        if abs(int(exponent or "0")) > _MAX_EXPONENT:
            return None
        value = Fraction(digits.rstrip(".")) * Fraction(10) ** int(exponent or "0")
    else:
        top, bottom = (int(number) for number in ratio if number is not None)
        if not bottom:
            return None
        value = Fraction(top, bottom) + int(whole or "0")
    return -value if minus == "-" else value


def _without_exponent(text: str) -> str:
    """Return a number like 1e-3 as a fraction: the grammar takes the e for Euler's number."""
    number = _number(text) if "e" in text.lower() else None
    return text if number is None else rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _same_numbers(gold: Any, actual: Any, *, is_rounded: bool) -> bool:
    limit = min(_ABSOLUTE, _RELATIVE * abs(gold)) if is_rounded else 0
    return bool(abs(gold - actual) <= limit)


def _terms(text: str) -> list[str]:
    """Return the words of a text that holds nothing else; single letters are variables."""
    terms = re.sub(_TEXT, r" \1 ", text).split()
    return (
        [term.casefold().rstrip(".") for term in terms] if all(map(_TERM.fullmatch, terms)) else []
    )


def _items(text: str) -> list[str]:
    """Return the items of a flat list, or all of a nested one."""
    inner = re.sub(r"^\\?[{(\[]|\\?[})\]]$", "", re.sub(_TEXT, r" \1 ", text).strip())
    return [text] if re.search(r"[(){}\[\]]", inner) else [i.strip() for i in inner.split(",")]


# --- math-verify ------------------------------------------------------------------------


class _Library(NamedTuple):
    parse: Any
    verify: Any
    extraction: list[Any]


@functools.cache
def _library() -> _Library:
    """Import math-verify, with our numbers, and our equality of numbers and of symbols."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy2
    from math_verify import LatexExtractionConfig, grader, parse, verify

    # It warns at every start that its timeouts are off, which is on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    latex2sympy2.Number = _sympy_number  # sympy's evaluates text
    latex2sympy2._Latex2Sympy.parse_number = lambda _, text: _sympy_number(text.replace(",", ""))
    grader.sympy_numeric_eq = functools.partial(_same_values, grader.sympy_numeric_eq)
    # math_verify's takes the product of letters t·a·c for the word cat
    grader.sympy_compare_symbols = _same_symbols
    without_units = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    return _Library(parse, verify, [LatexExtractionConfig(normalization_config=without_units)])


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> list[Any]:
    """Return the expressions of a text; none if it cannot be read."""
    if _SPACED_DIGITS.search(text):  # the grammar takes the product
        return []
    text = _without_exponent(text)
    if not any(mark in text for mark in ("$", r"\boxed", r"\(", r"\[")):
        text = f"${text}$"
    library = _library()
    options = {"fallback_mode": "no_fallback", "parsing_timeout": None}
    return list(library.parse(text, extraction_config=library.extraction, **options))


def _sympy_number(text: str) -> Any:
    """Read a sympy number; raises ValueError for any other text."""
    import sympy

    return sympy.Integer(int(text)) if text.isdecimal() else sympy.Float(text)


def _same_values(compare_matrices: Any, gold: Any, actual: Any, *precisions: int) -> bool:
    """Return whether two sympy numbers are equal, exactly if both are rational.

    math-verify compares absolute differences, so that all small numbers are equal.
    """
    import sympy

    matrices = sympy.MatrixBase, sympy.MatrixExpr
    if isinstance(gold, matrices) or isinstance(actual, matrices):
        return bool(compare_matrices(gold, actual, *precisions))
    gold, actual = gold.doit(), actual.doit()
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
    """Return whether a symbol is equal to another expression; longer names up to case."""
    import sympy

    if sympy.E in (gold, actual):  # the symbol e is Euler's number
        return "e" in (str(gold).lower(), str(actual).lower())
    if not (isinstance(gold, sympy.Symbol) and isinstance(actual, sympy.Symbol)):
        return bool(gold == actual)
    pair = gold.name, actual.name
    return pair[0] == pair[1] or (min(map(len, pair)) > 1 and pair[0].lower() == pair[1].lower())

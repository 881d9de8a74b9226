"""Nouns after a number: units, which do not change its value, and amounts, which do.

`5 km` and `3 apples` are 5 and 3; `5 million` is 5,000,000, and `3 halves` is 1.5.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

_SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "lakh": 10**5,
    "million": 10**6,
    "mln": 10**6,
    "mio": 10**6,
    "crore": 10**7,
    "billion": 10**9,
    "bn": 10**9,
    "trillion": 10**12,
}
_PARTS = {
    "half": 2,
    "third": 3,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
    "hundredth": 10**2,
    "thousandth": 10**3,
    "millionth": 10**6,
    "billionth": 10**9,
}
_POWERS = {"squared": 2, "cubed": 3}
# Suffixes of amounts of money: `$5k`. After other numbers they may be units or variables.
MONEY_SUFFIXES = {"k": 10**3, "m": 10**6, "mn": 10**6, "mm": 10**6, "b": 10**9, "t": 10**12}
_OPERATORS = "plus minus times over below"
# Amounts of other kinds and languages, and symbols: a number before them is not read.
_FOREIGN = (
    "mil tn grand gross ten tens mille tausend mrd miljoen miljard milliard milliards millionen "
    "milliarden millones millón milhões milhão milioni miliardi"
)
CJK_AMOUNTS = "十百千万萬億亿兆"
_SYMBOLS = "factorial alpha beta gamma delta theta lambda sigma omega infinity pi"
UNCLEAR = f"{_FOREIGN} {_SYMBOLS}".split()

_PLURALS = {"halves": "half"} | {f"{one}s": one for one in [*_SCALES, *_PARTS] if len(one) > 3}
_AMOUNTS = [*_SCALES, *_PARTS, *_POWERS, *_PLURALS, "quarter", "quarters"]
_AMOUNT = f"(?i:{'|'.join(sorted(_AMOUNTS, key=len, reverse=True))})"
_OTHERS = "|".join([*_OPERATORS.split(), *UNCLEAR])
_NO_UNITS = rf"(?:(?:{_AMOUNT}|(?i:{_OTHERS}))(?![A-Za-z])|[{CJK_AMOUNTS}])"

SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad)"
TEXT = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}"
_KNOWN_UNITS = (
    "mm cm dm km in ft yd mi mg kg lb lbs oz sec min hr hrs ms ml mL mph kmh kph Hz kJ kW"
)
_LETTER_UNITS = "m g s h l L J W V N K A F C"
_LETTERS = r"[^\W\d_²³]"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d)|²|³)?"
_TEXT_UNIT = re.compile(rf"(.*\d(?:.*[)}}])?){SPACE}*((?:{TEXT}{_POWER} ?/? ?)+)")
_BARE_TEXT = re.compile(TEXT)
_DEGREES = re.compile(r"(.*[\d)}]) ?(?:\^ ?(?:\\circ|\{ ?\\circ ?\})|°)")
_LEADING_AMOUNTS = re.compile(rf"(?:[\s-]*(?:{_NO_UNITS}))+", re.IGNORECASE)
_MAX_CHARACTERS = 300  # of a text that may have a unit
# Letters after any other command are variables: only numbers have units.
_NUMERIC_COMMANDS = re.compile(r"\\(?:[dtc]?frac|sqrt|pi|times|cdot|left|right)(?![A-Za-z])")


def without_unit(text: str, *, letters_are_units: bool) -> str:
    r"""Return a text without the unit or words after its number; amounts stay.

    `2ab` and `2m` are products, unless a number is expected; `2 m`, `2cm`, `2 apples` have units.
    """
    if len(text) > _MAX_CHARACTERS:
        return text
    text = " ".join(text.split())
    if match := _TEXT_UNIT.fullmatch(text):
        inner = _BARE_TEXT.sub(r" \1 ", match[2])
        amounts = _LEADING_AMOUNTS.match(inner)
        if amounts and _ends_with_power(amounts[0]) and inner[amounts.end() :].strip():
            return text  # 36 squared units: 36 units, or 36²
        return match[1] + (f" {amounts[0].strip()}" if amounts else "")
    match = _plain_unit(letters_are_units).fullmatch(text) or _DEGREES.fullmatch(text)
    if match is None or _ends_with_power(match[1]):
        return text
    number = re.sub(rf"[ -]{_AMOUNT}(?![A-Za-z])", "", match[1])
    is_number = not re.search(r"[A-Za-z\\]", _NUMERIC_COMMANDS.sub("", number))
    return match[1] if is_number else text


@functools.cache
def _plain_unit(letters_are_units: bool) -> re.Pattern[str]:
    known = "|".join(_KNOWN_UNITS.split())
    letters = "|".join(_LETTER_UNITS.split())
    noun = rf"(?!{_NO_UNITS}){_LETTERS}{{3,}}+"
    # atomic: a text of many units is read in one way only
    unit = rf"(?>(?:{known}|{letters})(?!{_LETTERS})|{noun}){_POWER}"
    first = rf"{SPACE}+{unit}|(?:{known})(?!{_LETTERS}){_POWER}"
    if letters_are_units:
        first = rf"{SPACE}*{unit}"
    amounts = rf"(?:[ -]{_AMOUNT}(?!{_LETTERS})){{0,3}}+"
    return re.compile(rf"(.*[\d)}}]{amounts})-?(?:{first})(?:(?: ?[/·] ?| ){unit})*+")


def has_amount(text: str) -> bool:
    """Return whether an amount directly follows a digit."""
    return _AMOUNT_AFTER_DIGIT.search(text) is not None


_AMOUNT_AFTER_DIGIT = re.compile(
    rf"\d{SPACE}{{0,9}}(?:\\[a-z]{{4,6}}\s{{0,9}}\{{)?{SPACE}{{0,9}}-?{_AMOUNT}(?![A-Za-z])"
)


def times_amount(value: Fraction, noun: str) -> Fraction | None:
    """Return a number times the amount that follows; the same number if `noun` is a unit.

    Returns None if `noun` is unclear: `3 quarters` are three quarters or three coins, `5 half` is
    neither.
    """
    name = noun.lower()
    singular = _PLURALS.get(name, name)
    if singular in _SCALES:
        return value * _SCALES[singular]
    if singular in _PARTS:
        return value / _PARTS[singular] if name != singular or value == 1 else None
    if name in _POWERS:
        return value ** _POWERS[name]
    if name in UNCLEAR or (name in ("quarter", "quarters") and value in (1, 3)):
        return None
    return value


def is_scale(noun: str) -> bool:
    """Return whether other amounts may follow, as in `5 hundred million`."""
    name = noun.lower()
    return _PLURALS.get(name, name) in _SCALES


def _ends_with_power(text: str) -> bool:
    return text.split()[-1].lower() in _POWERS


def is_power(noun: str) -> bool:
    return noun.lower() in _POWERS


def is_amount(noun: str) -> bool:
    """Return whether a noun changes the value of the number before it."""
    return noun.lower() in _AMOUNTS

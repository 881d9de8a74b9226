r"""The reader of numbers as people write them, used for all answers and responses.

It knows signs (also `−`), currencies, thousands separators, `.25`, exponents (`1.5e3`,
`6.02 \times 10^{23}`), powers, fractions, mixed numbers, percent signs and amounts (`5 million`).
Values are exact. A form that people read in two ways, such as `1,5` and `1.000.000`, has no value.
"""

from __future__ import annotations

import re
from fractions import Fraction

from reprise.rl.answers import units

MAX_CHARACTERS = 1000  # of a text that is one number, and of the digits of a value
_MAX_EXPONENT = 400
_MAX_DECIMALS = 10**400  # values with a larger denominator are written as fractions

# --- spelling -----------------------------------------------------------------------------

_DASHES = dict.fromkeys(map(ord, "‐‑‒–"), "-")  # a hyphen, or a minus: the place decides
_MINUS_SIGNS = dict.fromkeys(map(ord, "﹣－➖"), "−")
_SPACES = dict.fromkeys([0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000], " ")
_NOTHING = dict.fromkeys([0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF], None)
_OTHERS = {"，": ",", "．": ".", "٫": ".", "٬": ",", "’": "'", "ʼ": "'", "％": "%", "⁄": "/"}
_OTHERS |= {"∕": "/", "•": "·", "＄": "$", "＋": "+", "∙": "·", "⋅": "·", "✕": "×", "∗": "*"}
_SPELLING = _DASHES | _MINUS_SIGNS | _SPACES | _NOTHING | str.maketrans(_OTHERS)
_PARTS = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_PART_TEXTS = "1/4 1/2 3/4 1/7 1/9 1/10 1/3 2/3 1/5 2/5 3/5 4/5 1/6 5/6 1/8 3/8 5/8 7/8".split()
_PART = re.compile(rf"(\d ?)?([{_PARTS}])")
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_LEVEL = "0123456789+-"
_SUPERSCRIPT = re.compile(rf"[{_RAISED}]+")
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")
_ENTITY_MINUS = re.compile(r"&(?:minus|#8722|#x2212);")
_DOUBLE_STAR = re.compile(r"(?<=\d)\*\*(?=[-+−]?\d|[({])")
_LATEX = [
    (re.compile(units.TEXT), r"\1"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\{([-−])\}"), r"\1"),
    (re.compile(r"\\!\s{0,9}"), ""),
    (re.compile(r"\\[,;: ]|~|\\q?quad(?![A-Za-z])"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "×"),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:text)?minus(?![A-Za-z])\s?"), "−"),
    (re.compile(r"\\pm(?![A-Za-z])"), "±"),
    (re.compile(r"\\pi(?![A-Za-z])"), "π"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
]


def _plain(text: str) -> str:
    """Return a text in one spelling: ASCII digits, one kind of space, no commands for spaces."""
    if not text.isascii():
        text = _SUPERSCRIPT.sub(_level, text.translate(_SPELLING))
        text = _PART.sub(_part, text)
        text = _FOREIGN_DIGIT.sub(lambda digit: str(int(digit[0])), text)
    if "&" in text:
        text = _ENTITY_MINUS.sub("−", text).replace("&nbsp;", " ")
    if "\\" in text or "{" in text or "~" in text:
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
    return _DOUBLE_STAR.sub("^", text)


def _level(raised: re.Match[str]) -> str:
    return "^{" + raised[0].translate(str.maketrans(_RAISED, _LEVEL)) + "}"


def _part(match: re.Match[str]) -> str:
    before = match[1].rstrip() + " " if match[1] else ""
    return before + _PART_TEXTS[_PARTS.index(match[2])]


# --- forms --------------------------------------------------------------------------------

_GROUPS = r"(?:(?:,\d{3})+|(?: \d{3})+|(?:'\d{3})+|(?:_\d{3})+)(?!\d)"
_WHOLE = rf"(?:[1-9]\d{{0,2}}{_GROUPS}|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d+|\.(?=[eE][-+−]?\d))?|\.\d+)"
_POWER = r"\^ ?(?:\{ ?(?P<{0}1>[-+−]?\d+) ?\}|\((?P<{0}2>[-+−]?\d+)\)|(?P<{0}3>[-+−]?\d+))"
_EXPONENT = r"[eE](?P<e>[-+−]?\d+)"
_SCIENTIFIC = rf" {{0,3}}[×xX*·] {{0,3}}10 ?{_POWER.replace('{0}', 't')}"
_FRACTION = (
    r"\\frac ?(?:\{{ ?(?P<{0}3>[-−]?{1}) ?\}} ?\{{ ?(?P<{0}4>{1}) ?\}}|(?P<{0}5>\d) ?(?P<{0}6>\d))"
)
_BODY = re.compile(
    rf"(?P<mixed>\d+)(?: (?P<f1>\d+)/(?P<f2>\d+)(?![\d/])| ?{_FRACTION.format('m', _WHOLE)})"
    rf"|(?P<top>{_DECIMAL}) ?/ ?(?P<bottom>{_DECIMAL})(?![eE]\d)"
    rf"|{_FRACTION.format('g', _DECIMAL)}"
    rf"|(?P<decimal>{_DECIMAL})(?:{_EXPONENT}|{_SCIENTIFIC}|{_POWER.replace('{0}', 'p')})?"
)
_CURRENCY = (
    r"(?:(?-i:(?<![A-Za-z])[A-Z]{1,3} ?)?\$|[€£¥₹₩₽₺₫₪฿₿]|"
    r"(?<![A-Za-z])(?:USD|EUR|GBP|CHF|JPY|INR|CNY|RMB|Rs\.?|AUD|CAD|NZD|SEK|NOK|DKK|PLN|KRW|BRL|"
    r"MXN|ZAR|SGD|HKD)(?![A-Za-z]))"
)
_PERCENT = r"(?:%|percent(?:age)?(?![A-Za-z])|pct(?![A-Za-z]))"


def read(text: str, *, letters_are_units: bool = True) -> Fraction | None:
    """Return the number that a text consists of, possibly with a unit; None for other text.

    `letters_are_units` says whether `2m` is 2 metres or a product.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = text.strip()
    bare = units.without_unit(text, letters_are_units=letters_are_units)
    value = _whole(_plain(text).strip())  # first, since K is thousands after a currency
    return value if value is not None or bare == text else _whole(_plain(bare).strip())


def _whole(text: str) -> Fraction | None:
    """Return the number that a text without a unit consists of."""
    start = _START.match(text)
    assert start is not None  # every part of the pattern may be empty
    body = _BODY.match(text, start.end())
    signs = [part for part in start.group("text", "sign", "second") if part]
    if body is None or len(signs) > 1:
        return None
    has_currency = start["currency"] is not None
    value, end = _with_amounts(_value(body), text, body.end(), has_currency)
    if value is None or not _END.fullmatch(text, end):
        return None
    return value if signs in ([], ["+"]) else -value


_START = re.compile(
    rf"(?:(?P<text>minus|negative)\s+)?(?P<sign>[-+−])?\s*(?P<currency>{_CURRENCY})?\s*"
    rf"(?P<second>[-+−])?\s*",
    re.IGNORECASE,
)
_END = re.compile(rf"\.?\s*(?:{_PERCENT}|{_CURRENCY}|dollars?|euros?|cents?)?\s*\.?", re.IGNORECASE)


def last(text: str) -> Fraction | None:
    """Return the last number of a text; None if it is missing or can be read in two ways.

    Exponents of units and indices of variables (`18 cm^2`, `x_1`) are not numbers.
    """
    text = _plain(text)
    for body in reversed(list(_BODY.finditer(text))):
        before = text[max(0, body.start() - _CONTEXT) : body.start()]
        if not _INDEX.search(before):
            return _in_sentence(body, before, text)
    return None


def to_text(value: Fraction) -> str:
    """Return the shortest decimal of a value, or a fraction; equal values have equal texts."""
    top = value.numerator
    bottom = value.denominator
    places = max(_multiplicity(bottom, 2), _multiplicity(bottom, 5))
    if bottom > _MAX_DECIMALS or (10**places) % bottom:
        return f"{top}/{bottom}"
    digits = str(abs(top) * 10**places // bottom).rjust(places + 1, "0")
    whole = digits[: len(digits) - places]
    decimals = digits[len(digits) - places :]
    return ("-" if top < 0 else "") + whole + (f".{decimals}" if decimals else "")


def _multiplicity(number: int, prime: int) -> int:
    count = 0
    while number % prime == 0:
        number //= prime
        count += 1
    return count


def _value(body: re.Match[str]) -> Fraction | None:
    """Return the value of a form; None if it is too large, or not a number."""
    parts = {name: part for name, part in body.groupdict().items() if part is not None}
    if len(body[0]) > MAX_CHARACTERS:
        return None
    if "decimal" not in parts:
        names = [name for name in parts if name != "mixed"]
        top, bottom = (_decimal(parts[name]) for name in names)
        if not bottom or ("mixed" in parts and not 0 < top < bottom):
            return None
        return _decimal(parts.get("mixed", "0")) + top / bottom
    value = _decimal(parts.pop("decimal"))
    if not parts:
        return value
    ((name, exponent_text),) = parts.items()
    exponent = int(exponent_text.replace("−", "-"))
    if abs(exponent) > _MAX_EXPONENT:
        return None
    if name[0] != "p":
        return value * Fraction(10) ** exponent
    is_bounded = len(str(value.numerator)) * abs(exponent) <= MAX_CHARACTERS
    is_power = value.denominator == 1 and is_bounded and (value or exponent > 0)
    return value**exponent if is_power else None


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[, '_]", "", text).replace("−", "-").rstrip("."))


def _with_amounts(
    value: Fraction | None, text: str, end: int, has_currency: bool
) -> tuple[Fraction | None, int]:
    """Return a value times the following amounts (None if unclear), and the end of the amounts."""
    if value is None:
        return None, end
    suffix = _SUFFIX.match(text, end)
    if suffix and has_currency:
        return value * units.MONEY_SUFFIXES[suffix[2].lower()], suffix.end()
    if suffix and not suffix[1] and suffix[2] not in _UNIT_SUFFIXES:
        return None, end  # 5k, 300K: thousands, or a variable, or a unit
    if more := _AND_A_PART.match(text, end):
        if more[1] is None or value.denominator != 1:
            return None, end
        value = value + Fraction(1, 2)
        end = more.end()
    for _ in range(3):
        noun = _NOUN.match(text, end)
        if noun is None or not (units.is_amount(noun[1]) or noun[1].lower() in units.UNCLEAR):
            break
        if units.is_power(noun[1]) and _NOUN.match(text, noun.end()):
            return None, end  # 36 squared units: 36 units, or 36²
        if (changed := units.times_amount(value, noun[1])) is None:
            return None, end
        value = changed
        end = noun.end()
        if not units.is_scale(noun[1]):
            break
    return value, end


_SUFFIX = re.compile(r"( ?)(k|m|mn|mm|b|t)(?![A-Za-z0-9]|[-&]\w)", re.IGNORECASE)
_UNIT_SUFFIXES = ("m", "mm", "b", "t")
_AND_A_PART = re.compile(
    r" and (?:(a half)|(?:an?|one|two|three|four|five|\d+)[ -]?/?(?:half|third|quarter|fourth|"
    r"fifth|sixth|eighth|tenth|\d+)s?)(?![A-Za-z])"
)
_NOUN = re.compile(r"[$*(){}\[\]]{0,3}[ -]{0,3}([^\W\d_]+)")  # also of `$5$ million`


# --- in a sentence ------------------------------------------------------------------------

_CONTEXT = 60  # characters around a number that decide its meaning
# The `_` of an index follows a name; any other `_` is emphasis, as in `_42_`.
_INDEX = re.compile(r"(?:(?<=[^\d\s])\^|(?<=[A-Za-z0-9)}\]])_)\s?[{(]?\s?[-−+]?\Z")
_GLUED = re.compile(r"[A-Za-z]\Z")  # m3, x2
_COMMANDS = r"\\(?:sqrt|frac|dot|sin|cos|tan|log|ln|exp|binom|overline|bar|p?mod)"
_SCALED = r"(?:dozen|hundred|thousand|lakh|million|crore|billion|trillion)s?"
# Text before digits that are only a part of a number, or not a number by themselves.
_PARTIAL = re.compile(
    # 1.000.000, 12:30, 1/2/3
    r"\d[.'_:·^]\Z|[\d)}] ?/ ?[({]?\s?[-−+]?\Z|(?<!\w)0[xXbo]\Z|\d ?[eE][-+−]?\Z"
    r"|\d\d[-/]\d\d?[-/]\Z|[.,'_]\d{3} \Z|[\d.]\^\{?[-−+]?\Z"  # 2024-11-29, 3.141 592, 1.5^{2.5}
    # ±5, \sqrt[3]{2}
    rf"|[±√]\s?\Z|{_COMMANDS} ?(?:\[[^\[\]]*\])? ?\{{? ?[-−+]?\Z|\}}\s?\{{\s?[-−+]?\Z"
    r"|\\frac ?(?:\{[^{}]*\}|\d ?\{) ?\Z|[\d.]\(\Z"  # \frac{1}2, 0.(6)
    r"|[-−—]\s?(?:\\[a-zA-Z]+\s?)?\$?[({\[]\s?\Z|[-−—]\s?[-−—]\s?\Z|\|[-−]\Z"  # -(5), --5, |-5|
    r"|[-−—]\s?[*`\"']{1,3}\Z"  # -**5**
    r"|\d\s+\\?(?:over|point)\s+\Z|\d to the (?:power )?(?:of )?\Z"
    rf"|\d[ -]{_SCALED},?\s+(?:and\s+)?\Z"  # 5 million 300
)
_CONTINUED = re.compile(
    r"[.,'_:·]\d|/ ?[\d({]|\^(?! ?(?:\{ ?)?\\circ)|_[A-Za-z0-9{(]|[₀-₉\u0304\u0305\u0307]"
    r"|[)}]\s?\^|[xX][0-9a-fA-F]{2}"
    rf"| ?(?:[{units.CJK_AMOUNTS}π√‰‱]|\\sqrt|\\frac)|.{{0,20}}\bbelow (?:zero|freezing)"
)
_LIST = re.compile(r"(?<![\d.,])\d{1,2}(?:,\d{1,2})+,\Z")  # 1,2,3 is not a number
_LAKHS = re.compile(r"(?<![\d.,])\d{1,2}(?:,\d\d)+,\Z")  # 1,00,000 may be a number
_MONEY_BEFORE = re.compile(rf"{_CURRENCY}\s?\Z", re.IGNORECASE)
_MINUS_BEFORE = re.compile(r"([-+−—])(\s{0,3})\Z")
_TEXT_MINUS = re.compile(r"(?:(\w+|[^\w\s]) *)?\b(minus|negative)\s+\Z", re.IGNORECASE)
_STATING = "is are was be to of at equals equal give gives get gets answer or and than".split()


def _in_sentence(body: re.Match[str], before: str, text: str) -> Fraction | None:
    """Return the value of a number, given the text around it; None if that is unclear."""
    after = text[body.end() : body.end() + _CONTEXT]
    if _PARTIAL.search(before) or _CONTINUED.match(after):
        return None
    is_after_comma = re.search(r"\d,\Z", before)
    is_list = _LIST.search(before) and not (_LAKHS.search(before) and len(body[0]) == 3)
    is_glued = body[0].startswith(".") and re.search(r"[\w.)]\Z", before)
    if is_glued or _is_continuation(body, before, after) or (is_after_comma and not is_list):
        return None
    has_currency = _MONEY_BEFORE.search(re.sub(r"[-+−]\s?\Z", "", before)) is not None
    if _GLUED.search(before) and not has_currency:
        return None
    is_latex = has_currency and "$" in after[:12]
    if is_latex and _SUFFIX.match(text, body.end()):
        return None  # `$5 M$`: an amount, or moles
    value, _ = _with_amounts(_value(body), text, body.end(), has_currency and not is_latex)
    factor = _factor(before)
    return None if value is None or factor is None else factor * value


def _is_continuation(body: re.Match[str], before: str, after: str) -> bool:
    """Return whether a number may continue another number: 3 and 1/2, 1  000, 5 • 10^3."""
    is_power_of_ten = body["decimal"] == "10" and len(body[0]) > 2
    is_part = body["top"] is not None or body["g3"] is not None or body["g5"] is not None
    is_group = len(body[0]) == 3 and body[0].startswith("0")
    return bool(
        (" " in body[0] and re.search(r"\d \Z", before))
        or (" " in body[0] and re.match(r"-[A-Za-z]", after))  # 3 200-page books
        or (is_power_of_ten and re.search(r"\d[^\w\n]{0,8}(?:\\[a-z]+\s?)?\Z", before))
        or (is_part and re.search(r"\d(?: and | ?[-&+] ?)\Z", before))
        or (is_group and re.search(r"\d,?\s+\Z", before))
    )


def _factor(before: str) -> int | None:
    """Return the sign of a number, given the text before it; None if that is unclear."""
    inside = before if _MINUS_BEFORE.search(before) else _MONEY_BEFORE.sub("", before)
    if (match := _MINUS_BEFORE.search(inside)) is None:
        return _factor_in_text(inside)
    mark, gap = match.groups()
    head = inside[: match.start()]
    operand = head.rstrip(" $€£%*")
    is_spaced = operand != head
    last_one = operand[-1:]
    if re.search(r"[\d)]\*\Z", head):
        return None  # 2*-3, or emphasis
    if last_one.isdigit() or last_one == ")":
        return 1 if gap or head[-1:] != " " else None  # 3 - 2, 3-2; but 3 -2
    if mark == "+":
        return 1
    if mark == "—" or last_one in ("]", "}"):
        return None
    if last_one.isalpha() and not head.endswith("$"):
        if not is_spaced:
            return 1  # x-2
        return None if gap else -1  # x - 2, or: the answer is -2
    if gap and mark == "-" and (last_one in ("", "\n") or last_one in ".,;:!?"):
        return None  # a bullet, or a minus
    return -1


def _factor_in_text(before: str) -> int | None:
    if (match := _TEXT_MINUS.search(before)) is None:
        return 1
    previous = match[1] or ""
    name = match[2].lower()
    if name == "minus" and (previous.isdigit() or previous == ")"):
        return 1
    is_stated = not previous.isalpha() or previous.lower() in _STATING
    return -1 if name == "negative" or is_stated else None

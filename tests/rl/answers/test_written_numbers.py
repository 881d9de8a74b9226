"""Numbers as people write them: each is read as itself, or not at all."""

import decimal
import random
from collections.abc import Callable
from fractions import Fraction

import pytest

from reprise.rl.answers import written_numbers
from reprise.rl.answers.math_answers import equal


def grouped(separator: str) -> Callable[[str, str], str]:
    def write(sign: str, digits: str) -> str:
        whole, point, decimals = digits.partition(".")
        return sign + f"{int(whole):,}".replace(",", separator) + point + decimals

    return write


def powered(form: str) -> Callable[[str, str], str]:
    """Return a writer with a mantissa from 1 to 10 and an exponent."""

    def write(sign: str, digits: str) -> str:
        _, all_digits, exponent = decimal.Decimal(digits).normalize().as_tuple()
        mantissa = "".join(map(str, all_digits))
        rest = mantissa[1:] or "0"
        raised = str(exponent + len(mantissa) - 1)
        superscript = raised.translate(str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"))
        return sign + form.format(m=f"{mantissa[0]}.{rest}", e=raised, s=superscript)

    return write


def scaled(word: str, places: int) -> Callable[[str, str], str]:
    """Return a writer of a number of thousands, millions, …"""

    def write(sign: str, digits: str) -> str:
        return sign + f"{decimal.Decimal(digits).scaleb(-places):f}" + word

    return write


def as_fraction(form: str) -> Callable[[str, str], str]:
    def write(sign: str, digits: str) -> str:
        value = Fraction(digits)
        return sign + form.format(a=value.numerator, b=value.denominator)

    return write


def in_digits(digits_and_point: str) -> Callable[[str, str], str]:
    table = str.maketrans("0123456789.", digits_and_point)
    return lambda sign, digits: sign + digits.translate(table)


def bare_point(sign: str, digits: str) -> str:
    return sign + (digits.removeprefix("0") if "." in digits else digits)


WAYS: dict[str, Callable[[str, str], str]] = {
    "plain": "{0}{1}".format,
    "U+2212": lambda sign, digits: sign.replace("-", "−") + digits,
    "en dash": lambda sign, digits: sign.replace("-", "–") + digits,
    "figure dash": lambda sign, digits: sign.replace("-", "‒") + digits,
    "hyphen": lambda sign, digits: sign.replace("-", "‑") + digits,
    "full-width": lambda sign, digits: sign.replace("-", "－") + digits,
    "plus": lambda sign, digits: (sign or "+") + digits,
    "word": lambda sign, digits: sign.replace("-", "negative ") + digits,
    "minus": lambda sign, digits: sign.replace("-", "minus ") + digits,
    "braced sign": lambda sign, digits: sign.replace("-", "{-}") + digits,
    "bare point": bare_point,
    "$ behind the sign": "{0}${1}".format,
    "$ before the sign": "${0}{1}".format,
    r"\$": r"{0}\${1}".format,
    "US$": "{0}US${1}".format,
    "€": "{0}€{1}".format,
    "€ at the end": "{0}{1} €".format,
    "USD": "USD {0}{1}".format,
    "USD at the end": "{0}{1} USD".format,
    "dollars": "{0}{1} dollars".format,
    "commas": grouped(","),
    "spaces": grouped(" "),
    "thin spaces": grouped("\u2009"),
    "narrow spaces": grouped("\u202f"),
    "no-break spaces": grouped("\xa0"),
    "apostrophes": grouped("'"),
    "typographic apostrophes": grouped("’"),
    "underscores": grouped("_"),
    "{,}": grouped("{,}"),
    r"\,": grouped(r"\,"),
    r",\!": grouped(r",\!"),
    "$ and commas": lambda sign, digits: sign + grouped(",")("$", digits),
    "1.5e3": powered("{m}e{e}"),
    "1.5E3": powered("{m}E{e}"),
    "1.5 × 10^3": powered("{m} × 10^{e}"),
    "1.5x10^3": powered("{m}x10^{e}"),
    "1.5*10**3": powered("{m}*10**{e}"),
    r"1.5 \times 10^{3}": powered(r"{m} \times 10^{{{e}}}"),
    r"1.5\cdot10^{3}": powered(r"{m}\cdot10^{{{e}}}"),
    "1.5 × 10³": powered("{m} × 10{s}"),
    "thousand": scaled(" thousand", 3),
    "million": scaled(" million", 6),
    r"\text{ million}": scaled(r" \text{ million}", 6),
    r"\mathrm{billion}": scaled(r"\,\mathrm{billion}", 9),
    "$ million": lambda sign, digits: sign + scaled(" million", 6)("$", digits),
    "$M": lambda sign, digits: sign + scaled("M", 6)("$", digits),
    "hundred million": scaled(" hundred million", 8),
    "percent": "{0}{1}%".format,
    r"\%": r"{0}{1}\%".format,
    "percent in words": "{0}{1} percent".format,
    "unit": "{0}{1} km".format,
    "unit in text": r"{0}{1}\text{{ kg}}".format,
    "squared unit": "{0}{1} cm^2".format,
    "raised unit": "{0}{1} m²".format,
    "fraction": as_fraction("{a}/{b}"),
    r"\frac": as_fraction(r"\frac{{{a}}}{{{b}}}"),
    r"\dfrac": as_fraction(r"\dfrac{{{a}}}{{{b}}}"),
    "Arabic digits": lambda s, d: s + d.translate(str.maketrans("0123456789.", "٠١٢٣٤٥٦٧٨٩٫")),
    "wide digits": lambda s, d: (
        s + d.translate(str.maketrans("0123456789.", "０１２３４５６７８９．"))
    ),
}
SENTENCES = (
    "The answer is {}.",
    "x = {}",
    "So **{}**",
    "3 and 4 make $x={}$ in all",
    r"\boxed{{{}}}",
    "- apples\n{}\n",
    "that is ({}), so",
)


def some_numbers(count: int) -> list[str]:
    """Return decimals of many sizes, with and without a point and a sign."""
    rng = random.Random(0)
    result = ["0", "1", "7", "10", "100", "999", "1000", "1234", "0.5", "0.25", "0.001", "1000.001"]
    while len(result) < count:
        digits = str(rng.randrange(10 ** rng.randint(1, 12)))
        places = rng.choice([0, 0, 1, 2, 3, 4])
        result.append(f"{decimal.Decimal(digits).scaleb(-places):f}")
    signs = [rng.choice(["", "-"]) if set(digits) - set("0.") else "" for digits in result]
    return [sign + digits for sign, digits in zip(signs, result, strict=True)]


def written(number: str, way: str) -> str:
    sign = "-" if number.startswith("-") else ""
    return WAYS[way](sign, number.removeprefix("-"))


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("way", WAYS)
def test_a_number_is_read_as_itself_in_every_way_of_writing(way, count):
    readings, wrong = 0, []
    for number in some_numbers(count):
        text, value = written(number, way), Fraction(number)
        found = {text: written_numbers.read(text)}
        found |= {one.format(text): written_numbers.last(one.format(text)) for one in SENTENCES}
        readings += sum(reading is not None for reading in found.values())
        wrong += [pair for pair in found.items() if pair[1] not in (None, value)]
    assert not wrong
    refused = count if way == "$M" else 0  # in LaTeX: `$x=$5M$`
    assert readings == count * (1 + len(SENTENCES)) - refused


def test_answers_and_responses_have_one_reader():
    rng = random.Random(1)
    for number in some_numbers(60):
        for way in rng.sample(list(WAYS), 8):
            text, value = written(number, way), Fraction(number)
            plain = written_numbers.to_text(value)
            assert equal(plain, text) and equal(text, plain)
            others = {-value, value * 10, value / 10, value * 1000} - {value}
            assert not any(equal(written_numbers.to_text(other), text) for other in others)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("3 halves", "1.5"),
        ("2 dozen eggs", "24"),
        ("3 squared", "9"),
        ("3 tenths", "0.3"),
        ("2½", "2.5"),
        ("¾", "0.75"),
        ("2 and a half", "2.5"),
        (r"2\frac{1}{2}", "2.5"),
        (r"-2\tfrac12", "-2.5"),
        ("-1 1/2", "-1.5"),
        ("2^10", "1024"),
        ("10³", "1000"),
        (r"-\$1{,}250.50", "-1250.5"),
        ("$1.5 million dollars", "1500000"),
        ("$5K", "5000"),
        ("300 K", "300"),
        ("5 hundred thousand", "500000"),
        ("1/3", "1/3"),
        ("6.", "6"),
        ("007", "7"),
        ("-0", "0"),
        ("12 quarters", "12"),
        ("5 millionaires", "5"),
        ("5 Million people", "5000000"),
        (r"5\text{ Million}", "5000000"),
    ],
)
def test_other_forms(text, wanted):
    assert written_numbers.to_text(written_numbers.read(text)) == wanted
    assert written_numbers.to_text(written_numbers.last(f"It is {text}")) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "1,5",
        "3,14",
        "1.000.000",
        "1.234,56",
        "1,00,000",
        "0,500",
        "1'5",
        "12:30",
        "2 1/2/3",
        "1e3e4",
    ]
    + ["3/4/5", "1e999", "10^999", "9^9999999", "5k", "5M", "3 quarters", "2 third", "1/0", "±5"]
    + [
        "--5",
        "5 factorial",
        "3.1.2",
        "101_2",
        "3.141 592",
        "5 and two thirds",
        "0x1F",
        "5‰",
        "9e99999",
    ],
)
def test_what_people_read_in_two_ways_is_not_read(text):
    assert written_numbers.read(text) is None
    assert written_numbers.last(f"It is {text}") is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("18 cm^2", "18"),
        ("18 m²", "18"),
        ("x_1 is 5", "5"),
        ("5 is x_{12}", "5"),
        ("3-2", "2"),
        ("3 − 2", "2"),
        ("pages 3–5", "5"),
        ("$5$-$3$", "3"),
        ("x-2", "2"),
        ("10 minus 5", "5"),
        ("it is minus 5", "-5"),
        ("= - 5", "-5"),
        ("is -5 - -3", None),
        ("(1, -2)", "-2"),
        ("1,2,3", "3"),
        ("f(x)=-2", "-2"),
        ("3 -5", None),
        ("x - 5", None),
        ("- 5", None),
        ("is—5", None),
        (r"\sqrt{2}", None),
        (r"\frac{\pi}{4}", None),
        (r"3\pi", None),
        (r"5\sqrt{2}", None),
        (r"5 \pm 1", None),
        ("-(5)", None),
        ("2024-11-29", None),
        ("12/25/2024", None),
        ("5 million 300 thousand", None),
        ("3 over 4", None),
        ("10 to the power of 6", None),
        ("1 2 3 100 200", None),
        ("no. It is apples.25", None),
        ("", None),
        ("none", None),
    ],
)
def test_numbers_in_a_sentence(text, wanted):
    value = written_numbers.last(text)
    assert (value if value is None else written_numbers.to_text(value)) == wanted


PECULIAR = {
    "5000": ["5 • 10^3", r"5 \ast 10^3", "5 10^3", "5 e3", "5E+3", "5 grand", "$5k"],
    "1500": ["1.5  ×  10^3", r"1.5 \times {10}^{3}", "1.5×10^{+3}"],
    "1000": ["1  000", "{10}^{3}"],
    "1234567": [r"1,234\,567", "1.234.567", "12,34,567"],
    "1000.5": ["1.000,5", "1 000,5", "1'000.5"],
    "-5": ["-$(5)", r"-\left(5\right)", r"-\boxed{5}", "-**5**", "- **5**", "-`5`", "-US $5"]
    + ["-MX$5", "-SEK 5", "&minus;5", r"\textminus 5", "$-$5", r"\text{−}5", r"-\ 5", "- $ 5"]
    + ["5 below zero", "5 degrees below zero", "(−5)", "-5 °C"],
    "5": ["|-5|", "USD5", "5USD", "$ 5", "5m", "5 m s^{-1}", "5 kg·m/s²"],
    "0.5": ["1∕2", r"\frac{1}2", r"\frac1{2}", r"\nicefrac{1}{2}", r"{1 \over 2}", "1 half"],
    "0.75": ["{3}/{4}", "3 quarters", r"\frac{ 3 }{ 4 }"],
    "3.5": ["3 and 1/2", "3-1/2", "3-½", "3 and a half"],
    "2/3": ["0.(6)", r"0.\dot{6}", r"0.\overline{6}", "0.6\u0305"],
    "1500000": ["1.5 mil", "1.5 mln", "$1.5m", "$1.5 MM", "1.5 millones"],
    "50000": ["5万", "5 万人民币"],
    "5000300": ["5 million 300", "5 million and 300"],
    "27": ["2 dozen and 3"],
    "0.0005": ["5 ten-thousandths"],
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"The angle is $30^\circ$.", "30"),
        (r"120^{\circ}", "120"),
        ("Answer: _42_", "42"),
        ("__42__", "42"),
        ("$18 T-shirts", "18"),
        ("$5 M&M packs", "5"),
        *((text, None) for text in ("36 squared units", "12 cubed inches", "5 m3", "5 m/s2")),
        *((text, None) for text in (r"\frac{x}{-2}", r"\sqrt{-4}", r"\log_{2}{-8}", "5/-2")),
        *((text, None) for text in ("2*-3", "3 200-page books", "3, 000", "x10")),
    ],
)
def test_units_indices_and_commands_make_no_number(text, wanted):
    assert written_numbers.last(text) == (None if wanted is None else Fraction(wanted))


@pytest.mark.parametrize("wanted", PECULIAR)
def test_peculiar_forms_are_read_as_themselves_or_not_at_all(wanted):
    value, texts = Fraction(wanted), PECULIAR[wanted]
    found = {text: written_numbers.read(text) for text in texts}
    found |= {
        one.format(text): written_numbers.last(one.format(text))
        for text in texts
        for one in SENTENCES
    }
    assert {text: one for text, one in found.items() if one not in (None, value)} == {}


def test_one_value_has_one_text():
    for text in ("0.1", "-0.001", "12", "-5.5", "1000000", "1/3", "-2/7", "0", "0.0625"):
        assert written_numbers.to_text(Fraction(text)) == text
    assert written_numbers.to_text(Fraction(1, 3**600)).startswith("1/")


@pytest.mark.parametrize(
    "part",
    [
        "5",
        "1,234",
        "1 234",
        "1 000 000 ",
        "- ",
        "$",
        "1.",
        "1e5",
        "\\frac{1}{2}",
        "{",
        "\\text{5 ",
        "5 million ",
    ]
    + ["−", "1_", "½", "²", "10^", "2^{", "a.5", "**", "\\sqrt[", "1,2,", "\\,", "negative "],
)
def test_hostile_texts_take_time_by_their_length(part):
    """100,000 repetitions would take hours in any other time."""
    written_numbers.read(part * 500)
    written_numbers.last(part * 100_000)

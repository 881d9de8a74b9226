"""Answers in mathematics: what is equal, and what is not."""

import pytest

from reprise.rl.answers.math_answers import _sympy_number, equal
from reprise.rl.rewards.functions import load, math_verify


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{1/2}", r"$\frac12$", 1.0),
        (r"\boxed{x(x+2)}", "x^2+2x", 1.0),
        (r"\boxed{3}", "4", 0.0),
        (r"\boxed{\$1,000}", "1000", 1.0),
        (r"\boxed{5}", r"\$5", 1.0),
        ("4", "4", 0.0),  # no box, no answer
        ("x", None, None),
        (r"\boxed{__import__('os').getpid()}", "4", 0.0),
    ],
)
def test_math_verify(completion, gold, expected):
    assert math_verify(completion, gold, "boxed") == expected


def test_math_verify_keeps_text_from_parse_expr(monkeypatch):
    import math_verify.parser

    seen = []
    monkeypatch.setattr(math_verify.parser, "parse_expr", lambda text, **_: seen.append(text))
    verify = load("math_verify", "whole")
    # The lone $ keeps the text from being read as LaTeX.
    for text in ("print(1)", "2**3", "1+1", "it costs $ or so: (3+4)*5", "The answer is 12."):
        verify.score(completions=[text], columns={"answer": "12"}, spec="jsonl:x")
    assert seen == []
    math_verify.parser.parse("it costs $ or so: (3+4)*5")  # its default would have
    assert seen != []


def test_math_verify_says_when_the_expected_answer_is_unreadable():
    with pytest.raises(ValueError, match="expected answer"):
        math_verify(r"\boxed{1}", "", "boxed")


def test_numbers_are_what_sympy_would_make_of_them():
    import sympy

    for text in ("1", "0.5", ".5", "1.", "5E-310", "1E5", "123.4567890123456789012345"):
        made, theirs = _sympy_number(text), sympy.Number(text)
        assert made == theirs and type(made) is type(theirs)
        assert getattr(made, "_prec", 0) == getattr(theirs, "_prec", 0)
    for text in ("x", "1+1", "__import__('os')"):
        with pytest.raises(ValueError, match="could not convert|not a valid|string-float"):
            _sympy_number(text)


EQUAL = {
    "3": ["3.", "3.0", r"\$3", "$3$", r"\(3\)", "3 apples", r"3\text{ km}", "x = 3", "٣", "3 km/h"],
    "1000": [r"1\,000", "1 000", "1,000", r"1,\!000", "1{,}000", "1e3", "1.0E+3", r"10^3"],
    "6.02e23": [r"6.02 \times 10^{23}"],
    "1500": ["1.5e3", r"1.5 \times 10^{3}"],
    "18": ["18 cm^2", "18 m", "18m", r"18\text{ cm}^2", "18 square feet", "18-degrees"],
    "18 cm^2": ["18", "18 cm"],
    "5 m": ["5"],
    "4": ["4%", r"4\%", "4 percent"],
    "90": [r"90^\circ", r"90^{\circ}", "90°"],
    r"\frac13": [r"0.\overline{3}", "1/3", "0.333333", r"\dfrac{1}{3}"],
    r"\frac{1}{6}": [r"0.1\overline{6}", "0.166667"],
    "2.5": ["2 1/2", r"2\frac{1}{2}", "5/2", "2.50"],
    "0": ["-0", "0.0", "-0.0"],
    "5.50": ["5.5", "$5.50"],
    r"\text{cat}": ["Cat", "cat."],
    "no": ["No", r"\text{no}"],
    "New York": ["new  york"],
    "yes, no": ["Yes,no"],
    "2ab": ["2ba", r"2 a \cdot b"],
    r"\frac{\sqrt{2}}{2}": [r"\frac{1}{\sqrt{2}}"],
    r"\frac{1}{2^{99}}": [r"2^{-99}", "1/633825300114114700748351602688"],
    "5000000": [r"5 \text{ million}", "5 million dollars", "$5M", r"5\,\mathrm{million}", "5e6"],
    r"5 \text{ million}": ["5,000,000", r"5\text{ million people}", "0.005 billion"],
    "-3": ["x = -$3", "x=\u22123", r"$y = -3\text{ m}$"],
    "-5": ["\u22125", "-$5", r"\(-\$5\)", "minus 5", "$-5$", "- 5", "\uff0d5"],
    "0.25": [".25", "1/4", "¼", "25e-2", r"2.5 \times 10^{-1}"],
    "1.5": ["3 halves", r"3 \text{ halves}", "1½"],
    "18 m^2": ["18 m²"],
    "10^{-20}": ["1e-20", "0.00000000000000000001"],
}
NOT_EQUAL = {
    r"\frac{1}{2^{99}}": [r"\frac{1}{2^{98}}", "0"],
    r"\frac{1}{2004!}": [r"\frac{1}{2006!}"],
    r"\frac{2^{2005}+1}{3\cdot 2^{2006}}": [r"\frac{1}{3\cdot 2^{2006}}"],
    "10^{-20}": ["2e-20", "1e-21"],
    "4": ["2 2", r"2\ 2", r"2~2", r"400\%", "400%", "4 million", "4 dozen", "4x", "40", "-4"],
    "cat": ["act", "tac", r"t \cdot a \cdot c", "c a t", "cats"],
    "no": ["on"],
    "yes, no": ["no, yes", "yes"],
    "2ab": ["2", "ab"],
    "2m": ["2"],
    "1000000": ["1000001", "1,000"],
    "0.5": ["50%", "0.51"],
    "72": ["1,072", "172", "seventy-two", "7 2"],
    "5": [r"5 \text{ million}", "5 million", "\u22125", "-$5", r"5\text{ factorial}", "5k", "$5k"],
    r"5\text{ million}": ["5", r"5\text{ billion}", r"5\text{ km}"],
    r"x = 5": [r"x = 5 \text{ million}"],
    "25": [".25", "2.5e2"],
    "3": [r"3 \text{ squared}", r"3\text{ halves}", "3 tenths", r"3 \mathrm{ hundredths}"],
    "1": ["1.000.000", "x = 1_000"],
    "0": ["1.000.000"],
    "15": ["1'5"],
    r"\text{Monday}": [r"\text{Tuesday}", "Mondays"],
}


@pytest.mark.parametrize("gold", EQUAL)
def test_equal_answers(gold):
    assert {text: equal(gold, text) for text in EQUAL[gold]} == dict.fromkeys(EQUAL[gold], True)


@pytest.mark.parametrize("gold", NOT_EQUAL)
def test_answers_that_differ(gold):
    wrong = NOT_EQUAL[gold]
    assert {text: equal(gold, text) for text in wrong} == dict.fromkeys(wrong, False)


def test_texts_that_could_be_read_in_many_ways_are_read_fast():
    for text in ("5 " + "min " * 70 + "!", "5" + " aaa  " * 50 + "!", "9" * 9000, "5 " * 4000):
        assert not equal("4", text)

"""What reasoning-gym's tasks pay: 1 for right answers, never more, and never 1 for others.

The table in docs/rewards.md is what `table` makes; run this file to print it.
"""

import functools
from pathlib import Path

import pytest

from reprise.rl.data.reasoning_gym_tasks import EXACT_TASKS, SAFE_TASKS, open_procedural

DOCS = Path(__file__).resolve().parents[3] / "docs" / "rewards.md"
NUM_ENTRIES = 12
WRONG = {
    "words behind": lambda answer: f"{answer} apples",
    "words before": lambda answer: f"wrong 17 {answer}",
    "twice": lambda answer: f"{answer} {answer}",
    "sign flipped": lambda answer: answer[1:] if answer.startswith("-") else f"-{answer}",
}


def entries(name):
    source = open_procedural(name, {}, seed=1, size=NUM_ENTRIES)
    for index in range(NUM_ENTRIES):
        entry = source.entry(index)
        if entry["answer"] not in ("", "0", "0.0"):  # -0 is right
            yield source, entry


@functools.cache
def most_paid(name):
    """The most that each kind of wrong answer is paid, over some entries."""
    most = dict.fromkeys(WRONG, 0.0)
    for source, entry in entries(name):
        for kind, spoil in WRONG.items():
            most[kind] = max(most[kind], source.score(spoil(entry["answer"]), entry))
    return most


def table():
    """Rows of the tasks that pay anything for a wrong answer."""
    rows = ["| task | " + " | ".join(WRONG) + " |", "|---" * (1 + len(WRONG)) + "|"]
    for name in SAFE_TASKS:
        paid = most_paid(name)
        if any(round(value, 2) for value in paid.values()):
            rows.append(f"| `{name}` | " + " | ".join(f"{p:.2f}" for p in paid.values()) + " |")
    return "\n".join(rows)


@pytest.mark.parametrize("name", SAFE_TASKS)
def test_right_answers_pay_1_and_wrong_ones_less(name):
    for source, entry in entries(name):
        assert source.score(entry["answer"], entry) == 1.0
    paid = most_paid(name)
    assert all(0.0 <= value < 1.0 for value in paid.values()), paid
    if name in EXACT_TASKS:
        assert not any(paid.values())


@pytest.mark.parametrize(
    ("name", "gold", "paid", "unpaid"),
    [
        ("gcd", "12", ["12"], ["12 ", "120", "-12", "１２", "012"]),
        ("count_bits", "3", ["3"], ["33", "3.", "+3"]),
        ("chain_sum", "1000", ["1000", "1,000.0", "+1000"], ["10,00", "1_000", "1e3", "1000 or 2"]),
        ("chain_sum", "-7", ["-7", "-7.0"], ["7", "--7", "−7"]),
        ("spell_backward", "tac", ["tac", "TAC"], ["ta", "tacx", "tac tac", "act", "tac."]),
        ("gsm_symbolic", "33", ["33", "33.0"], ["-33", "33 apples", "$33", "133"]),
    ],
)
def test_forms_of_an_answer(name, gold, paid, unpaid):
    source = open_procedural(name, {}, seed=1, size=1)
    entry = source.entry(0) | {"answer": gold}
    assert {text: source.score(text, entry) for text in paid} == dict.fromkeys(paid, 1.0)
    assert {text: source.score(text, entry) for text in unpaid} == dict.fromkeys(unpaid, 0.0)


def test_claims_about_knights_in_any_order_and_nothing_else():
    source = open_procedural("knights_knaves", {}, seed=1, size=1)
    entry = source.entry(0) | {"answer": "Ann is a knight, and Bob is a knave."}
    paid = [
        entry["answer"],
        "Bob is a knave and Ann is a knight",
        "ann is a knight, bob is a knave",
    ]
    unpaid = ["Ann is a knight", "17 Ann is a knight, and Bob is a knave.", "Ann knight Bob knave"]
    unpaid += ["Ann is a knave, and Bob is a knave.", "Ann is a knight, and Bob is a knave. No"]
    assert {text: source.score(text, entry) for text in paid} == dict.fromkeys(paid, 1.0)
    assert {text: source.score(text, entry) for text in unpaid} == dict.fromkeys(unpaid, 0.0)


def test_the_table_in_the_docs_is_what_is_paid():
    assert table() in DOCS.read_text()


if __name__ == "__main__":
    print(table())

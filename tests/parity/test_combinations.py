"""Settings of rollouts in pairs: `benchmarks.combinations` has all, of which a part runs here."""

import itertools

import jax
import pytest

from benchmarks import combinations
from benchmarks.combinations import FACTORS, covering, pairs, rejected, rejection
from tests.support import tiny_run

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 (virtual) devices"),
]
# Every pair is `make soak`.
ROWS = [
    dict(zip(FACTORS, values.split(), strict=True))
    for values in (
        "learned+group bandit coupled few two 4 pipeline all one",
        "history+model goodput lenient:e^0.5 all helpers 1 sync all one",
        "model+own fixed:2 coupled all drafting 1 ahead adapters several",
        "history aimd off few two 1 histopipe adapters one",
    )
]
FEW_SIZES = ("Engine.min_slots=8",)  # one bucket of slots: half of the programs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, tiny_run.keep_every_program():
        patch.setattr(combinations, "SIZES", combinations.SIZES + FEW_SIZES)
        yield combinations.Runs(tmp_path_factory.mktemp("combinations"))


@pytest.mark.parametrize(
    "row",
    [ROWS[0], *(pytest.param(row, marks=pytest.mark.soak) for row in ROWS[1:])],
    ids=lambda row: " ".join(row.values()),
)
def test_a_combination_gives_the_responses_of_plain_decoding(runs, row):
    differing, responses = runs.differing(row)
    assert not differing
    assert responses >= 60
    assert responses == 60 or row["passes"] == "several"


@pytest.mark.parametrize("row", rejected(), ids=lambda row: " ".join(row.values()))
def test_a_combination_that_cannot_run_is_rejected_by_its_sentence(runs, row):
    assert combinations.is_rejected(row, runs)


def test_the_table_has_every_pair_that_may_be_combined():
    table = covering(FACTORS)
    found = set().union(*map(pairs, table))
    for one, other in itertools.combinations(FACTORS, 2):
        for pair in itertools.product(FACTORS[one], FACTORS[other]):
            row = dict(zip((one, other), pair, strict=True))
            others = {name: values for name, values in FACTORS.items() if name not in row}
            allowed = any(
                rejection(row | dict(zip(others, values, strict=True))) is None
                for values in itertools.product(*others.values())
            )
            assert (frozenset(row.items()) in found) == allowed
    assert all(rejection(row) is None for row in table)


def test_crashes_hangs_and_responses_that_differ_are_counted_apart():
    row, other, cannot = ROWS[0], ROWS[1], rejected()[0]
    hang = "rl.workers.messages.WorkerError: worker 0 failed on requests 1: Hang: no sign of life"
    found = [
        {"row": row, "differing": 0, "responses": 60},
        {"row": row, "differing": 2, "responses": 60},
        {"row": other, "error": "TypeError: hang_limit_s"},
        {"row": other, "error": hang},
        {"row": cannot, "rejected": False},
    ]
    counted = combinations.figures(found)
    assert counted.pop("failed") == found[1:4]
    assert counted == {
        "rows": 4,
        "pairs": len(pairs(row) | pairs(other)),
        "crashes": 1,
        "hangs": 1,
        "responses": 120,
        "responses_that_differ": 2,
        "not_rejected": 1,
    }

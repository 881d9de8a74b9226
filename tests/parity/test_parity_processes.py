"""One engine over the devices of several processes: bit for bit what one process does."""

import re

import jax
import mesh_rollouts
import numpy as np
import pytest
from processes import launch

pytestmark = pytest.mark.parity

TWO = {"data": 2}
FOUR = {"data": 2, "tensor": 2}
LIMIT_S = 400  # on a busy machine


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes of two devices each return."""
    folder = tmp_path_factory.mktemp("two")
    given = {"devices": 2, "arguments": {"mesh": TWO, "wide": FOUR}, "limit_s": LIMIT_S}
    outcomes = launch("mesh_rollouts:everything", 2, folder, **given)
    return [outcome.result for outcome in outcomes]


def assert_alike(expected, results):
    """Names, types and bits, of all processes."""
    for result in results:
        for name, array in expected.items():
            assert result[name].dtype == array.dtype, name
            np.testing.assert_array_equal(result[name], array, err_msg=name)


def test_two_processes_have_the_bits_and_the_launches_of_one(two):
    mesh = mesh_rollouts.title(TWO)
    alone = mesh_rollouts.all_rollouts(mesh_rollouts.Worker(jax.devices()[:2], TWO), mesh)
    assert_alike(alone, two)
    plain = alone[f"{mesh}/plain/tokens"]
    np.testing.assert_array_equal(alone[f"{mesh}/drafts/tokens"], plain)
    np.testing.assert_array_equal(alone[f"{mesh}/coupled/tokens"], [*plain, *plain])
    np.testing.assert_array_equal(alone[f"{mesh}/learned/tokens"], [*plain, *plain])
    _, accepted, kept = alone[f"{mesh}/coupled/counts"].tolist()
    assert accepted and kept and alone[f"{mesh}/learned/counts"][1]
    assert alone[f"{mesh}/drafts/counts"][1] > 20 and len(alone[f"{mesh}/digests"]) > 40
    assert len(alone[f"{mesh}/hidden"]) == 5


def test_two_processes_of_two_devices_have_the_bits_of_one(two):
    worker = mesh_rollouts.Worker(jax.devices()[:4], FOUR)
    names = mesh_rollouts.NAMES[:2]
    alone = mesh_rollouts.all_rollouts(worker, mesh_rollouts.title(FOUR), names)
    assert_alike(alone, two)


def test_nothing_is_compiled_after_the_warm_up(two):
    assert [result["compiled"] for result in two] == [0, 0]
    assert two[0]["programs"] == two[1]["programs"] > 10


def test_all_decide_by_the_seconds_of_process_0(two):
    assert two[0]["table"] == two[1]["table"]
    assert [result["written"] for result in two] == [True, False]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("a_token", r"launch 7: tokens of 4 × 4, .*; process 0: the same with other contents"),
        ("an_order", r"launch 1: a prompt round of 4 × 32, .*: 8 .*; process 0: a prompt .*: 0 "),
        ("a_table", r"launch \d+: plain rounds of 4 × 32 × .*; process 0: a round of 4 × 16 × 32"),
    ],
    ids=lambda x: x if x.isidentifier() else "",
)
def test_a_planted_fault_is_named_by_all(two, fault, told):
    first, second = (result[fault] for result in two)
    assert first == second and len(first) == 1
    assert re.search(f"process 1 diverged in {told}", first[0]), first[0]

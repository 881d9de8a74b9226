"""Arrays of one mesh over several processes: what they train, save and hand out is the same.

Two processes of a device equal one of two, bit for bit. With four devices sums of four numbers
depend on the order of addition: gloo's is another than that inside a process. So two of two devices
are compared with one process that uses gloo as well.
"""

from __future__ import annotations

from pathlib import Path

import array_tasks
import jax
import numpy as np
import pytest
from processes import launch

from reprise.models.formats import hf
from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.checkpoint.reader import restore

pytestmark = [pytest.mark.parity, pytest.mark.slow]

POLICY = Path(__file__).parents[2] / "policies" / "tiny"
TRAIN, LIMIT_S = "array_tasks:train_and_save", 250.0  # of a busy machine
OF_TWO = {
    "data": ("ppo", {"data": 2}),
    "tensor": ("grpo", {"data": 1, "tensor": 2}),
}
OF_FOUR = {"fsdp and tensor": ("grpo", {"data": 1, "fsdp": 2, "tensor": 2})}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """This process with two devices: what it trained, and the folder that it saved it in."""
    folder, found = tmp_path_factory.mktemp("one"), {}
    for name, run in OF_TWO.items():
        mesh, state, metrics = array_tasks.train(*run, jax.devices()[:2])
        found |= {f"{name}: state": array_tasks.numbers(state), f"{name}: metrics": metrics}
    with Checkpointer(folder) as saver:
        saver.save(array_tasks.UPDATES, state, {"cursor": [7, 8]})
    return found, folder, array_tasks.template(mesh)


@pytest.fixture(scope="module")
def both(tmp_path_factory, one):
    """Two processes of two devices: what they trained, on one device of each too, and shared.

    They read what one process has saved, and save their own beside it.
    """
    folder = tmp_path_factory.mktemp("both")
    arguments = {"runs": OF_TWO | OF_FOUR, "save": str(folder / "saved"), "policy": str(POLICY)}
    arguments["others"] = [str(one[1])]
    found = launch(TRAIN, 2, folder, devices=2, arguments=arguments, limit_s=LIMIT_S)
    return [outcome.result for outcome in found], folder / "saved"


def assert_same(found, wanted):
    for name, x in wanted.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_two_processes_train_what_one_with_two_devices_does(one, both):
    assert len(one[0]) == 2 * len(OF_TWO)
    for result in both[0]:
        assert_same(result, one[0])


def test_two_processes_of_two_devices_train_what_one_with_four_does(both, tmp_path):
    arguments = {"runs": OF_FOUR, "others": [str(both[1])]}
    (alone,) = launch(TRAIN, 1, tmp_path, devices=4, arguments=arguments, limit_s=LIMIT_S)
    wanted = {k: v for k, v in alone.result.items() if k.startswith("fsdp and tensor")}
    assert wanted
    for result in both[0]:
        assert_same(result, wanted)
    np.testing.assert_array_equal(alone.result[str(both[1])], wanted["fsdp and tensor: state"])


def test_any_number_of_processes_restores_what_another_saved(both, one):
    results, folder = both
    for result in results:
        np.testing.assert_array_equal(result[str(one[1])], one[0]["tensor: state"])
        np.testing.assert_array_equal(result["of process 0"], [0, 1, 1, 1, 1])
    saved = results[0]["fsdp and tensor: state"]
    for where, wanted in ((folder, saved), (one[1], one[0]["tensor: state"])):
        again = restore(where, one[2])
        np.testing.assert_array_equal(array_tasks.numbers(again.arrays), wanted)
        assert again.host == {"cursor": [7, 8]}


def test_each_process_has_the_weights_for_its_own_devices(both):
    whole = [
        np.ravel(np.asarray(x, np.float32)) for x in jax.tree.leaves(hf.load_pretrained(POLICY)[1])
    ]
    exact = np.concatenate(whole)
    rounded = exact.astype(jax.numpy.bfloat16).astype(np.float32)
    assert np.any(rounded != exact)
    for index, result in enumerate(both[0]):
        shared = {name: x for name, x in result.items() if name.startswith("shared: ")}
        for name, x in shared.items():
            if name.endswith("disk"):
                assert len(x) == (len(whole) if index == 0 else 0) and all(x)
            else:
                np.testing.assert_array_equal(x, rounded if name.endswith("device") else exact)
        assert len(shared) == 3 * 4 + 1


@pytest.mark.fault
def test_a_save_that_fails_on_one_process_fails_on_all_and_a_killed_one_costs_no_checkpoint(
    tmp_path,
):
    folder = tmp_path / "saved"
    options = {"arguments": {"folder": str(folder)}, "limit_s": LIMIT_S}
    outcomes = launch("array_tasks:fail_to_save", 2, tmp_path, **options, stop_at_failure=False)
    assert outcomes[1].returncode == -9
    told = outcomes[0].result["told"]
    assert told[0].startswith("SaveError: process 1 failed at beginning to save step 2: ")
    assert "expected a jax array, got ndarray" in told[0]
    assert told[1].startswith("SaveError: process 1 failed at writing step 3: ")
    assert "No space left" in told[1] and "the newest whole one is of step 1" in told[1]
    assert told[2].startswith("ProcessLost: process 1 is lost: no sign of life for")
    wanted = {"x": jax.ShapeDtypeStruct((8,), np.float32)}
    with Checkpointer(folder) as saver:
        again = saver.restore(wanted)
        assert (again.step, again.host, again.warnings) == (4, {"step": 4}, ())
        np.testing.assert_array_equal(again.arrays["x"], np.arange(8.0))
        saver.save(5, again.arrays, {"step": 5})
    assert restore(folder, wanted).step == 5

"""Bodies that no client sends: each is answered with a short sentence, and the server goes on."""

from __future__ import annotations

import pytest
from served import KEY, NAME, call, serve

from reprise.rl.gin.loader import load
from reprise.rl.http import requests
from reprise.rl.python import api
from reprise.rl.settings.config import TrainConfig
from tests.hostile import server_sequences
from tests.rl.server.test_client import SETTINGS

NUM_BODIES, NUM_SEQUENCES = 600, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def address(tiny, folder):
    policy = api.Policy(load(TrainConfig, [tiny]).policy.directory, *SETTINGS)
    with serve(policy, folder / "server", KEY) as address:
        yield address


def test_hostile_bodies_and_sequences_change_nothing_for_others(address, folder):
    """No other status, no hang, no changed sample, no lost record, no file outside the folder."""
    found, _, examples = server_sequences.play(address, NAME, NUM_BODIES, NUM_SEQUENCES, KEY)
    assert not any(found[kind] for kind in server_sequences.WRONG), examples
    assert found["answers"] > NUM_BODIES + 10 * NUM_SEQUENCES and found["samples_compared"] > 4
    assert [p.name for p in folder.iterdir()] == ["server"]


def test_bodies_and_paths_have_bounds(address, monkeypatch):
    monkeypatch.setattr(requests, "MAX_JSON_BYTES", 1000)
    assert call(address, "create_session", b" " * 1001)[0] == 413
    for path in ("training_runs/..%2F..%2Fx", "training_runs/x/checkpoints/weights/../../y"):
        assert call(address, path, method="GET")[0] in (404, 405)
    assert call(address, "training_runs?limit=-1", method="GET")[0] == 400
    assert call(address, "training_runs/x/checkpoints/weights/y", method="DELETE")[0] == 404


def test_a_key_is_needed_if_there_is_one(address):
    status, answer = call(address, "create_session", {}, key="tml-other")
    assert status == 401 and b"TINKER_API_KEY" in answer
    assert call(address, "get_server_capabilities", method="GET")[0] == 200

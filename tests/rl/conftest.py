"""The smallest run's inputs, for the tests that run the loop in this process.

Imports wait until a fixture runs: jax must not be imported before ../conftest.py
has named the folder of compiled programs.
"""

import pytest


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The configuration's path; until the module's end every program is kept on disk."""
    from tests.support import tiny_run

    with tiny_run.keep_every_program():
        yield tiny_run.make_inputs(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def one_device():
    """Workers share one device, as on a user's CPU: what one has compiled serves all."""
    from loop_runs import few_devices

    with few_devices():
        yield


@pytest.fixture(scope="module")
def engines():
    """Three tiny engines, for teams of workers."""
    from tiny_team import CONFIG, MODEL

    from reprise.rl.engine.engine import Engine

    return [Engine(MODEL, CONFIG) for _ in range(3)]


@pytest.fixture(scope="module")
def alone(engines):
    """What one of them gives to the team's requests, by request id."""
    from tiny_team import play

    return {t.request_id: t for t in play(engines[0])}

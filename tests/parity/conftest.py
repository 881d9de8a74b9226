"""One policy, one engine and one reference for the whole folder: compiled once.

Imports wait until a fixture runs: jax must not be imported before ../conftest.py
has named the folder of compiled programs.
"""

import functools

import pytest


@pytest.fixture(scope="session", autouse=True)
def full_precision():
    import jax

    # Accelerators multiply float32 in fewer bits unless told otherwise; an engine's threads too.
    jax.config.update("jax_default_matmul_precision", "highest")
    yield
    jax.config.update("jax_default_matmul_precision", None)


@pytest.fixture(scope="session")
def params():
    from parity_model import MODEL, make_params

    return make_params(MODEL, scale=3.0)


@pytest.fixture(scope="session")
def requests():
    from parity_model import make_requests

    return make_requests()


@pytest.fixture(scope="session")
def golden(params, requests, full_precision):
    """`golden(name)`: what the requests must give under a sampling, by request id."""
    from parity_model import MODEL, SAMPLINGS, naive_rollout

    return functools.cache(lambda name: naive_rollout(MODEL, params, requests, SAMPLINGS[name]))


@pytest.fixture(scope="session")
def engine():
    from parity_model import CONFIG, MODEL

    from reprise.rl.engine.engine import Engine

    return Engine(MODEL, CONFIG)


@pytest.fixture(scope="session")
def rollout(params, requests, engine, full_precision):
    """`rollout(name, …)`: trajectories under a sampling; anything else is the engine's own."""
    import rollouts
    from parity_model import SAMPLINGS, STEP_KEY, STOP

    def run(name, these=None, *, engine=engine, params=params, **options):
        these = requests if these is None else these
        return rollouts.run(engine, params, these, SAMPLINGS[name], STEP_KEY, STOP, **options)

    return run

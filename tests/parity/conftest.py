"""One policy, one engine and one reference for the whole folder: compiled once."""

import functools

import jax
import pytest
from parity_model import (
    BASE,
    MODEL,
    SAMPLINGS,
    STEP_KEY,
    STOP,
    make_params,
    make_requests,
    naive_rollout,
)

from rl.engine import Engine


@pytest.fixture(scope="session", autouse=True)
def full_precision():
    # Accelerators multiply float32 in fewer bits unless told otherwise.
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session")
def params():
    return make_params(MODEL, scale=3.0)


@pytest.fixture(scope="session")
def requests():
    return make_requests()


@pytest.fixture(scope="session")
def golden(params, requests, full_precision):
    """`golden(name)`: what the requests must give under a sampling, by request id."""
    return functools.cache(lambda name: naive_rollout(MODEL, params, requests, SAMPLINGS[name]))


@pytest.fixture(scope="session")
def engine():
    return Engine(MODEL, BASE)


@pytest.fixture(scope="session")
def rollout(params, requests, engine, full_precision):
    """`rollout(name, …)`: trajectories under a sampling; anything else is the engine's own."""

    def run(name, these=None, *, engine=engine, params=params, **options):
        return engine.run(
            params,
            requests if these is None else these,
            SAMPLINGS[name],
            STEP_KEY,
            stop_token_ids=STOP,
            **options,
        )

    return run

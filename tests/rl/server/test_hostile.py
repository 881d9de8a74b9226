"""Bodies that no client sends: each is answered with a short sentence, and the server goes on."""

from __future__ import annotations

import json
import random

import pytest
from served import KEY, NAME, call, retrieve, serve

from rl import api
from rl.config import TrainConfig
from rl.gin.loader import load
from rl.server import requests, wire
from tests.rl.server.test_client import SETTINGS

POSTED = (
    *("create_session", "session_heartbeat", "create_model", "get_info", "load_weights"),
    *("optim_step", "save_weights", "save_weights_for_sampler", "create_sampling_session"),
    *("asample", "retrieve_future", "weights_info", "telemetry", "forward_backward"),
)
NUM_BODIES = 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def address(tiny, folder):
    policy = api.Policy(load(TrainConfig, [tiny]).policy.directory, *SETTINGS)
    with serve(policy, folder / "server", KEY) as address:
        yield address


def values(rng):
    """A value of some type, near or far from one that is expected."""
    return rng.choice(
        [
            *(None, True, -1, 0, 2**63, 2**200, 0.5, 1e308, float("nan"), float("inf"), "", "x"),
            *(
                "../../etc/passwd",
                "tinker://../weights/x",
                "tinker://a/weights/../../b",
                "\0",
                "é" * 99,
            ),
            *([], [[]], [1, "a"], [None] * 50, {}, {"chunks": 3}, {"chunks": [{"tokens": [-1]}]}),
            *({"rank": "4"}, {"rank": 4, "seed": -1}, {"learning_rate": "x"}, {"a": {"b": {}}}),
        ]
    )


def body(rng, known):
    """The bytes of a body: fields of the protocol with wrong values, cut or nested or no JSON."""
    names = [
        *("session_id", "model_id", "seq_id", "base_model", "lora_config", "model_seq_id", "path"),
        *("adam_params", "sampling_session_id", "prompt", "sampling_params", "num_samples"),
        *("request_id", "tinker_path", "optimizer", "sampling_session_seq_id", "ttl_seconds"),
        *("user_metadata", "overwrite", "prompt_logprobs", "model_path"),
    ]
    fields = {name: values(rng) for name in rng.sample(names, rng.randrange(len(names)))}
    fields |= {name: x for name, x in known.items() if rng.random() < 0.6}
    data = json.dumps(fields).encode()
    kind = rng.randrange(6)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        return rng.randbytes(rng.randrange(300))
    if kind == 2:
        return b"[" * rng.choice([10, 100_000]) + data
    return data


def messages(rng, run):
    """The bytes of training requests, most of them wrong."""
    message = wire.make(
        "ForwardBackwardRequest",
        model_id=rng.choice([run, "other", "../x"]),
        seq_id=rng.choice([-1, 0, 1, 2**31 - 1]),
        loss_fn=rng.choice(["cross_entropy", "ppo", "custom", "\0"]),
    )
    for _ in range(rng.randrange(3)):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = rng.randbytes(rng.randrange(40))
        if rng.random() < 0.3:
            datum.model_input.add().image.SetInParent()
        tensor = datum.loss_fn_inputs[rng.choice(["target_tokens", "weights", "x"])]
        tensor.dtype, tensor.dense = rng.randrange(5), rng.randbytes(rng.randrange(40))
        tensor.shape.extend(rng.choices([-1, 0, 1, 2, 2**60], k=rng.randrange(3)))
        if rng.random() < 0.3:
            tensor.sparse_csr.values = rng.randbytes(8)
            tensor.sparse_csr.crow_indices = rng.randbytes(16)
    message.loss_fn_config["clip_low_threshold"] = rng.choice([0.1, float("nan")])
    data = message.SerializeToString()
    return data if rng.random() < 0.8 else data[: len(data) // 2] + b"\xff"


def test_two_thousand_wrong_bodies(address, folder):
    """No traceback, no hang, no file outside of the server's folder."""
    rng = random.Random(0)
    session = json.loads(call(address, "create_session", {})[1])["session_id"]
    lora = {"rank": 4, "seed": 1}
    made = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": lora}
    request_id = json.loads(call(address, "create_model", made)[1])["request_id"]
    run = retrieve(address, request_id)["model_id"]
    known = {"session_id": session, "model_id": run, "base_model": NAME}
    statuses = set()
    for _ in range(NUM_BODIES):
        path = rng.choice(POSTED)
        data = messages(rng, run) if path == "forward_backward" else body(rng, known)
        status, answer = call(address, path, data)
        statuses.add(status)
        assert len(answer) < 2000 and b"Traceback" not in answer, (path, answer)
        assert status != 500, (path, data, answer)
    assert {200, 400, 404, 410} <= statuses
    assert [p.name for p in folder.iterdir()] == ["server"]
    status, answer = call(address, "get_info", {"model_id": run})
    assert status == 200 and json.loads(answer)["lora_rank"] == 4


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

"""Bodies that no client sends: each has a sentence or an answer, and other samples never change."""

from __future__ import annotations

import json
import random
from http.client import HTTPConnection

import pytest
from endpoint_client import TEMPLATE, ask, connect, send
from served import NAME, serve

from reprise.rl.endpoint import bodies
from reprise.rl.gin.loader import load
from reprise.rl.http import requests
from reprise.rl.python import api
from reprise.rl.settings.config import TrainConfig
from tests.hostile import server_bodies
from tests.rl.server.test_client import SETTINGS

NUM_BODIES = 600
PATHS = ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions")
DEEP = [[]]
for _ in range(200):
    DEEP = [DEEP]
VALUES = (
    *("1+1=", "\ud800", "a" * 50, [4, 5], [[4], [5]], [10**9], [2**31], [-1], [None], DEEP),
    *([{"role": "user", "content": "1"}], [{"role": "user", "content": DEEP}], [{"role": []}]),
    *([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}],),
    *([{"type": "function", "function": {"name": "a"}}], {"include_usage": True}, "\n", True),
    *(1, 2, 1024, 0.5, {"seed": 3, "n": 2, "max_tokens": 3}, {"stop": ["1"] * 99}, {"messages": 1}),
)
STATUSES = (200, 400, 404, 413)


@pytest.fixture(scope="module")
def address(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "template.jinja").write_text(TEMPLATE)
    settings = {"Task.chat_template": str(folder / "template.jinja")}
    policy = api.Policy(load(TrainConfig, [tiny]).policy.directory, *SETTINGS, settings)
    with serve(policy, folder / "server") as address:
        yield address


NEAR = {
    PATHS[0]: ("token_ids", [4, 5], bodies.GENERATE),
    PATHS[1]: ("prompt", "1+1=", bodies.COMPLETION),
    PATHS[2]: ("messages", [{"role": "user", "content": "1"}], bodies.CHAT),
}


def body(rng: random.Random, path: str) -> bytes:
    """Return a request of a route with up to two fields of any type."""
    name, value, known = NEAR[path]
    names = sorted({*known, *bodies.NEUTRAL, "x"})
    fields = {name: value, "model": NAME}
    for other in rng.sample(names, rng.randrange(3)):
        fields[other] = rng.choice([*VALUES, server_bodies.value(rng)])
    data = json.dumps(fields).encode()
    return data[: rng.randrange(len(data))] if rng.random() < 0.05 else data


def answer(connection: HTTPConnection, path: str, data: bytes) -> tuple[int, bytes]:
    response = send(connection, path, data)
    return response.status, response.read()


def test_each_hostile_body_has_an_answer_or_a_sentence(address):
    """Never another status, never an error without words, and no other change of a sample."""
    rng = random.Random(0)
    own = {"token_ids": [4, 5, 6], "sampling_params": {"seed": 1, "max_tokens": 9, "n": 2}}
    expected = ask(address, PATHS[0], own)[1]["choices"]
    connection = connect(address)
    counts = dict.fromkeys(STATUSES, 0)
    for number in range(NUM_BODIES):
        path = rng.choice(PATHS)
        data = body(rng, path)
        status, content = answer(connection, path, data)
        assert status in STATUSES, (path, data[:500], content[:500])
        counts[status] += 1
        if status != 200:
            message = json.loads(content)["error"]["message"]
            assert " " in message and "in the server" not in message, (data[:500], content)
        if number % 100 == 0:
            assert ask(address, PATHS[0], own)[1]["choices"] == expected
    connection.close()
    assert counts[200] > 30 and counts[400] > 100, counts
    assert ask(address, PATHS[0], own)[1]["choices"] == expected


def test_bodies_have_bounds(address, monkeypatch):
    monkeypatch.setattr(requests, "MAX_JSON_BYTES", 1000)
    status, content = ask(address, PATHS[1], {"prompt": "1" * 1001})
    assert status == 413 and content["error"]["code"] == "request_too_large"

"""Sessions, models and operations in order, with a worker that runs them at once."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rl.server import service as module
from rl.server.bodies import Unknown
from rl.server.records import Records
from rl.server.service import Busy, Gone, Served, Service

LORA = {"rank": 4, "seed": 1}


class Policy:
    """A policy that notes what is done to its adapters."""

    model = SimpleNamespace(lora=SimpleNamespace(rank=8))
    config = SimpleNamespace(longest_tokens=32)

    def __init__(self):
        self.steps, self.fails = [], False

    def with_new_adapter(self, *given):
        if self.fails:
            raise ValueError("no memory")
        return self

    def optim_step(self, adam):
        self.steps.append(adam.learning_rate)
        return 1.0


class Worker:
    def do(self, operation, on_result):
        try:
            on_result(operation())
        except ValueError as error:
            on_result({"error": str(error), "category": "user"})


@pytest.fixture
def service(tmp_path):
    clock = SimpleNamespace(now_s=1000.0)
    records = Records(tmp_path, lambda: clock.now_s)
    made = Service(Served(Policy(), "name", "tokenizer"), records, Worker())
    made.clock = clock
    return made


def new_model(service, session, number=0):
    body = {"session_id": session, "model_seq_id": number, "base_model": "name"}
    return service.create_model(body | {"lora_config": LORA})["request_id"]


def content(service, request_id):
    return json.loads(service.answers._answers[request_id].body)


def step(service, run, number, rate=0.1):
    body = {"model_id": run, "seq_id": number, "adam_params": {"learning_rate": rate}}
    return service.optim_step(body)["request_id"]


@pytest.fixture
def session(service):
    return service.create_session({})["session_id"]


@pytest.fixture
def run(service, session):
    return content(service, new_model(service, session))["model_id"]


def test_operations_run_once_in_the_order_of_their_numbers(service, run):
    for number in (3, 2, 2):
        step(service, run, number, number / 10)
    assert service.policy.steps == []
    first = step(service, run, 1)
    assert service.policy.steps == [0.1, 0.2, 0.3]
    assert step(service, run, 1) == first and len(service.policy.steps) == 3
    assert content(service, first) == {"metrics": {"grad_norm": 1.0}}
    with pytest.raises(ValueError, match="expected seq_id 4 or a later one, got 0"):
        step(service, run, 0)


def test_a_model_refused_for_now_is_made_later(service, session, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(service.account, "max_bytes", 0)
        with pytest.raises(Busy):
            new_model(service, session)
    assert content(service, new_model(service, session)) == {"model_id": f"{session}:train:0"}


def test_a_wrong_request_for_a_model_leaves_nothing(service, session, run):
    """Neither a model nor an answer that nobody sets."""
    path = f"tinker://{run}/weights/one"
    record = {"run": run, "folder": "0" * 32, "expires_s": None}
    service.records.put("checkpoints", path, record)
    body = {"session_id": session, "model_seq_id": 1, "path": path}
    with pytest.raises(ValueError, match="expected the field 'optimizer'"):
        service.load(body)
    assert list(service.models) == [run] and service.answers.num_waiting == 0


def test_a_model_that_could_not_be_made_takes_no_room(service, session):
    service.policy.fails = True
    assert content(service, new_model(service, session))["error"] == "no memory"
    assert not service.models


def test_models_of_idle_sessions_make_room(service, session, run, monkeypatch):
    monkeypatch.setattr(module, "MAX_MODELS", 1)
    other = service.create_session({})["session_id"]
    with pytest.raises(ValueError, match="expected at most 1 models in training"):
        new_model(service, other)
    service.clock.now_s += module.IDLE_S + 1
    service.heartbeat({"session_id": other})
    assert "model_id" in content(service, new_model(service, other))
    with pytest.raises(Unknown, match="found no model"):
        step(service, run, 1)


def test_a_finished_session_is_gone(service, session, run):
    service.finish(session)
    with pytest.raises(Gone):
        service.heartbeat({"session_id": session})
    with pytest.raises(Unknown):
        service.get_info({"model_id": run})

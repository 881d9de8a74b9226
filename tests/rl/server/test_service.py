"""Sessions, models and operations in order, with a worker that runs them at once."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from reprise.rl.server import service as module
from reprise.rl.server import turns
from reprise.rl.server.bodies import Unknown
from reprise.rl.server.records import Records
from reprise.rl.server.service import Busy, Gone, Served, Service

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


def errors(service):
    bodies = [a.body for a in service.answers._answers.values() if a.body is not None]
    return [x["error"] for x in map(json.loads, bodies) if "error" in x]


def test_operations_of_a_finished_session_are_answered_and_freed(service, session, run):
    for number in range(2, 60):
        step(service, run, number)
    assert service.answers.num_waiting == 58 and service.account.used == 58 * 1024
    service.finish(session)
    assert service.answers.num_waiting == 0 and service.account.used == 0
    assert set(errors(service)) == {f"{run}: session {session} has finished"}


def test_operations_of_an_idle_session_are_answered(service, session, run, monkeypatch):
    monkeypatch.setattr(module, "MAX_MODELS", 1)
    step(service, run, 2)
    service.clock.now_s += module.IDLE_S + 1
    new_model(service, service.create_session({})["session_id"])
    assert service.answers.num_waiting == 0 and "was idle" in errors(service)[0]


def test_operations_of_a_model_that_was_not_made_are_answered(service, session):
    """The worker makes it after they have come."""
    jobs = []
    service._worker.do = lambda operation, on_result: jobs.append((operation, on_result))
    service.policy.fails = True
    request_id = new_model(service, session)
    step(service, request_id.removesuffix(":create"), 2)
    for operation, on_result in jobs:
        Worker.do(None, operation, on_result)
    assert service.answers.num_waiting == 0 and not service.models
    assert errors(service) == ["no memory", f"{session}:train:0 was not made"]


def test_an_operation_that_never_comes_has_a_deadline(service, session, run):
    for number in (1, 3, 4, 6):
        step(service, run, number, number / 10)
        service.clock.now_s += 1
    service.tick()
    assert service.answers.num_waiting == 3
    service.clock.now_s += turns.GAP_S
    service.tick()
    assert service.answers.num_waiting == 0 and service.policy.steps == [0.1]
    assert errors(service) == ["the operation with seq_id 2 has not come"] * 3
    step(service, run, 7, 0.7)
    assert service.policy.steps == [0.1, 0.7]
    with pytest.raises(ValueError, match="expected seq_id 8 or a later one, got 2"):
        step(service, run, 2)


def test_the_deadline_of_a_gap_begins_with_it(service, run):
    service.clock.now_s += 10 * turns.GAP_S
    step(service, run, 2)
    service.tick()
    assert service.answers.num_waiting == 1


def test_queued_operations_of_a_model_that_has_ended_do_not_run(service, session, run):
    jobs = []
    service._worker.do = lambda operation, on_result: jobs.append((operation, on_result))
    step(service, run, 1)
    service.finish(session)
    for operation, on_result in jobs:
        Worker.do(None, operation, on_result)
    assert service.policy.steps == [] and errors(service) == [
        f"{run}: session {session} has finished"
    ]


def test_a_model_whose_record_fails_leaves_nothing(service, session, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(service.records, "put", full)
        with pytest.raises(OSError, match="No space"):
            new_model(service, session)
    assert not service.models and len(service.answers) == 0 and service.account.used == 0
    assert "model_id" in content(service, new_model(service, session))


def test_the_oldest_sessions_without_a_client_are_forgotten(service, monkeypatch):
    """Not those with a client, a checkpoint or a model."""
    monkeypatch.setattr(module, "MAX_SESSIONS", 4)
    sessions = [service.create_session({})["session_id"] for _ in range(4)]
    with pytest.raises(Busy, match="the server has 4 sessions"):
        service.create_session({})
    new_model(service, sessions[0])
    new_model(service, sessions[1])
    at = {"session_id": sessions[2], "sampling_session_seq_id": 0, "base_model": "name"}
    service.create_sampler(at)
    service.clock.now_s += module.SILENT_S + 1
    service.heartbeat({"session_id": sessions[3]})
    service.finish(sessions[1])
    service.create_session({})
    left = list(service.records.sessions)
    assert left[:2] == [sessions[0], sessions[3]] and len(left) == 3
    assert list(service.records.runs) == [f"{sessions[0]}:train:0"]
    assert not service.records.samplers


def ask(service, key, seq=1, **more):
    body = {"sampling_session_id": key, "seq_id": seq, "num_samples": 1, "sampling_params": {}}
    return service.sample(body | {"prompt": {"chunks": [{"tokens": [1]}]}} | more)


def test_a_request_for_no_sample_is_refused(service, session):
    at = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "name"}
    key = service.create_sampler(at)["sampling_session_id"]
    with pytest.raises(ValueError, match="num_samples: expected 1 to 1024, got 0"):
        ask(service, key, num_samples=0)
    assert service.answers.num_waiting == 0


def test_samples_that_run_keep_their_weights(service, session, run, monkeypatch):
    """Also the pass over the prompt, if their checkpoint is deleted meanwhile."""
    held, passed = [], []
    service._worker.sample = lambda *given: held.append(given)
    sampler = SimpleNamespace(forward=lambda data: passed.append(data) or [[0.0]])
    monkeypatch.setattr(service.weights, "sampler", lambda path: sampler)
    at = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "name"}
    key = service.create_sampler(at)["sampling_session_id"]
    two = {"chunks": [{"tokens": [1, 2]}]}
    ask(service, key, prompt_logprobs=True, prompt=two)
    [(request, finish, *_)] = held
    request()

    def gone(path):
        raise ValueError("found no checkpoint")

    monkeypatch.setattr(service.weights, "sampler", gone)
    assert isinstance(finish([]), bytes) and len(passed) == 1


def test_far_times_break_no_listing(service, session, run):
    """Also one of a record from before times to live had a bound."""
    record = {
        **{"path": f"tinker://{run}/weights/a", "run": run, "kind": "weights", "name": "a"},
        **{"folder": "0" * 32, "time_s": 1.0, "public": False, "bytes": 1, "user_metadata": {}},
        "expires_s": 2.0**60,
    }
    service.records.put("checkpoints", record["path"], record)
    [listed] = service.listings.checkpoints(None, 10, 0)["checkpoints"]
    assert listed["expires_at"].startswith("9999-12-31")
    assert service.listings.runs(10, 0)["training_runs"][0]["last_checkpoint"]
    service.save({"model_id": run, "seq_id": 1, "path": "b", "ttl_seconds": 2**60})
    assert "ttl_seconds: expected 0 to" in content(service, f"{run}:1")["error"]

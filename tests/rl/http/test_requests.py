"""Who may send a request, and what its body and its answer take, by a policy that does nothing."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time

import pytest
from idle_server import NAME, idle_server

from reprise.rl.http import requests, wire
from reprise.rl.http.wire import CONTENT_TYPE


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with idle_server(tmp_path_factory.mktemp("server")) as (app, address):
        yield app, address.removeprefix("http://")


@pytest.fixture
def place(running):
    return running[1]


@pytest.fixture
def account(running):
    return running[0].state.service.account


def send(place, path="create_session", body=b"{}", method="POST", **headers):
    """Return the status and the answer to a request with these headers."""
    connection = http.client.HTTPConnection(place, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, f"/api/v1/{path}", body, named)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_names_of_this_machine_are_hosts(place):
    port = place.partition(":")[2]
    for host in (place, f"localhost:{port}", f"[::1]:{port}", "LOCALHOST", "127.0.0.1:9999"):
        assert send(place, Host=host)[0] == 200, host


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"]
    + ["127.0.0.1@evil.example", "[::1", "evil.example/127.0.0.1", "", "[", "2130706433", "x y"],
)
def test_another_host_is_refused(place, host):
    for path, method in (("create_session", "POST"), ("sessions", "GET")):
        status, answer = send(place, path, method=method, Host=host)
        assert status == 421 and b"expected the Host localhost or" in answer, answer


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "file://", "", "http://[", "x"]
)
def test_a_page_of_another_site_is_refused(place, origin):
    status, answer = send(place, Origin=origin)
    assert status == 403 and b"expected no Origin" in answer


def test_types_of_forms_are_refused(place):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; a=b"):
        status, answer = send(place, Content_Type=kind)
        assert status == 415 and b"expected application/json or" in answer
    assert send(place, Content_Type="Application/JSON; charset=utf-8")[0] == 200
    assert send(place, "forward_backward", b"", Content_Type=CONTENT_TYPE)[0] == 404


def test_with_a_key_any_host_may_be(tmp_path):
    options = {"api_key": "tml-k", "hosts": None}
    with idle_server(tmp_path, **options) as (_, address):
        place = address.removeprefix("http://")
        assert send(place, Host="gpu.example", X_API_Key="tml-k")[0] == 200
        assert send(place, Host="gpu.example")[0] == 401
        assert send(place, Host="gpu.example", Authorization="Bearer tml-k")[0] == 200
        for wrong in ("Bearer tml-x", "Basic tml-k", "tml-k", "Bearer", "Bearer \xff"):
            assert send(place, Host="gpu.example", Authorization=wrong)[0] == 401
        named = {"Host": "gpu.example", "X_API_Key": "tml-k"}
        assert send(place, Origin="http://evil.example", **named)[0] == 403


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 5_000_000, 400),
        (b'{"a":' * 500_000, 400),
        (b'{"a": [' + b"[]," * (2 * 2**20) + b"1]}", 400),  # of few bytes, much memory
        (('{"a": [' + "{}," * 2**18 + "1]}").encode("utf-16"), 400),
        (b'{"request_id": "' + b"x" * 2**23 + b'"}', 413),
        (b'{"request_id": ' + b"9" * 5000 + b"}", 400),
        (b'{"request_id": 1e400}', 400),
        (b"\xff\xfe{", 400),
        (b"[]", 400),
    ],
)
def test_bodies_of_much_memory_are_refused(place, account, body, status):
    found, answer = send(place, "retrieve_future", body)
    assert found == status and len(answer) < 500, answer
    assert account.used == 0


def test_others_are_answered_while_a_large_body_is_parsed(place, monkeypatch):
    parse = requests._parsed
    began = threading.Event()
    ended = threading.Event()

    def slowly(body):
        began.set()
        assert ended.wait(60)
        return parse(body)

    monkeypatch.setattr(requests, "_parsed", slowly)
    body = json.dumps({"request_id": "x" * requests.SMALL_BYTES}).encode()
    thread = threading.Thread(target=send, args=(place, "retrieve_future", body))
    thread.start()
    assert began.wait(60)
    assert send(place, "healthz", None, "GET")[0] == 200
    ended.set()
    thread.join(60)


def test_bodies_that_are_being_read_have_a_bound(place, account, monkeypatch):
    """The one that is too much is refused; small requests are answered."""
    monkeypatch.setattr(account, "max_bytes", 2**23)
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: {place}\r\nContent-Length: 4000000"
    host, port = place.split(":")
    sockets = [socket.create_connection((host, int(port)), 60) for _ in range(3)]
    for one in sockets:
        one.sendall(f"{head}\r\n\r\n".encode() + b"x" * 2_000_000)
    answers = []
    for one in sockets:
        one.settimeout(1.0)
        try:
            answers.append(one.recv(20))
        except TimeoutError:
            answers.append(None)
    assert sorted(map(str, answers)) == [
        "None",
        "b'HTTP/1.1 429 Too Man'",
        "b'HTTP/1.1 429 Too Man'",
    ]
    assert 4_000_000 <= account.used <= account.max_bytes
    assert send(place)[0] == 200
    for one in sockets:
        one.close()
    wait_until(lambda: account.used == 0)


def wait_until(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_client_that_hangs_up_in_its_body_leaves_no_traceback(place, account, capsys):
    host, port = place.split(":")
    for length in (100, 1_000_000):
        one = socket.create_connection((host, int(port)), 60)
        head = f"POST /api/v1/asample HTTP/1.1\r\nHost: {place}\r\nContent-Length: {length}\r\n\r\n"
        one.sendall(head.encode() + b'{"a": ')
        wait_until(lambda: account.used > 0)
        one.close()
        wait_until(lambda: account.used == 0)
    assert send(place)[0] == 200
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out


def test_a_client_that_leaves_its_poll_is_waited_for_no_longer(running, place, monkeypatch):
    monkeypatch.setattr("reprise.rl.server.app.LONG_POLL_S", 3600.0)
    service, live = running[0].state.service, []
    service.answers.open("never")
    fetch = service.answers.fetch

    async def counted(*given):
        live.append(given)
        try:
            return await fetch(*given)
        finally:
            live.pop()

    monkeypatch.setattr(service.answers, "fetch", counted)
    host, port = place.split(":")
    body = json.dumps({"request_id": "never"}).encode()
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: {place}\r\n"
    with socket.create_connection((host, int(port)), 60) as one:
        one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: live)
    wait_until(lambda: not live)
    service.answers.set("never", b"")


def test_a_training_body_that_is_refused_is_the_result_of_its_number(place, account, monkeypatch):
    """A client sends the next number after it, which would wait for a number that has failed."""
    monkeypatch.setattr(wire, "MAX_FIELDS", 100)
    session = json.loads(send(place)[1])["session_id"]
    made = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": NAME,
        "lora_config": {"rank": 4},
    }
    assert send(place, "create_model", json.dumps(made))[0] == 200
    request = wire.make("ForwardBackwardRequest", model_id=f"{session}:train:0", seq_id=1)
    body = request.SerializeToString() + b"\x1a\x00" * 200
    status, sent = send(place, "forward_backward", body, content_type=CONTENT_TYPE)
    assert status == 200
    fetched = send(place, "retrieve_future", json.dumps(json.loads(sent)).encode())
    assert fetched[0] == 200 and b"expected at most 100 fields" in fetched[1]


def test_an_operation_holds_its_body_until_its_result(running, place, account):
    session = json.loads(send(place)[1])["session_id"]
    lora = {"rank": 4}
    made = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": lora}
    run = f"{session}:train:0"
    assert send(place, "create_model", json.dumps(made))[0] == 200
    wait_until(lambda: account.used == 0)
    late = {"model_id": run, "seq_id": 2, "adam_params": {}, "more": "x" * 100_000}
    for _ in range(2):  # the second one is the same operation
        assert send(place, "optim_step", json.dumps(late))[0] == 200
        assert 100_000 * requests.JSON_FACTOR < account.used < 101_100 * requests.JSON_FACTOR
    assert send(place, "optim_step", json.dumps(late | {"seq_id": 1}))[0] == 200
    wait_until(lambda: account.used == 0)


def test_a_large_answer_is_sent_in_parts_and_held_until_it_is(running, place, account):
    service = running[0].state.service
    service.answers.open("large")
    service.answers.set("large", bytes(2**25))
    body = json.dumps({"request_id": "large"}).encode()
    assert send(place, "retrieve_future", body) == (200, bytes(2**25))
    wait_until(lambda: account.used == 0)
    host, port = place.split(":")
    with socket.create_connection((host, int(port)), 60) as one:
        head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: {place}\r\n"
        one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: account.used == 2**25)
    wait_until(lambda: account.used == 0)

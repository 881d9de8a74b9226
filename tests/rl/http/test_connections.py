"""Half-sent requests, idle connections and slow readers end, and keep nobody out."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time

import pytest
from idle_server import idle_server

from reprise.rl.http import connections

HALF_HEADER = b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nContent-Le"
HALF_BODY = b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"


@pytest.fixture
def place(tmp_path):
    with idle_server(tmp_path) as (_, address):
        yield address.removeprefix("http://")


def connect(place, data=b""):
    host, port = place.split(":")
    one = socket.create_connection((host, int(port)), 60)
    one.sendall(data)
    return one


def is_answered(place):
    connection = http.client.HTTPConnection(place, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/api/v1/healthz")
        return connection.getresponse().status == 200


def is_closed(one):
    """Wait for the other side's end."""
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("data", [b"", b"P", HALF_HEADER])
def test_a_header_has_a_deadline(place, monkeypatch, data):
    monkeypatch.setattr(connections, "HEADER_S", 0.2)
    assert is_closed(connect(place, data))


def test_a_header_sent_byte_by_byte_has_the_same_deadline(place, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_S", 0.5)
    one = connect(place)
    with pytest.raises(OSError):
        for byte in HALF_HEADER * 100:
            one.sendall(bytes([byte]))
            time.sleep(0.02)
            one.settimeout(0.001)
            with contextlib.suppress(TimeoutError):
                if not one.recv(1):
                    raise OSError


def test_a_body_has_a_deadline(place, monkeypatch):
    monkeypatch.setattr(connections, "BODY_S", 0.2)
    assert is_closed(connect(place, HALF_BODY))


def test_a_second_header_has_a_deadline_too(place, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_S", 0.5)
    one = connect(place, b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"200 OK" in one.recv(1000)
    one.sendall(HALF_HEADER)
    assert is_closed(one)


def test_a_request_that_is_answered_later_has_none(place, monkeypatch):
    """As a poll for a result is."""
    monkeypatch.setattr(connections, "HEADER_S", 0.1)
    monkeypatch.setattr(connections, "BODY_S", 0.1)
    monkeypatch.setattr("reprise.rl.server.app.LONG_POLL_S", 1.0)
    monkeypatch.setattr("reprise.rl.http.answers.Answers.fetch", waits)
    body = b'{"request_id": "a"}'
    head = b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    assert b"408 " in connect(place, head % len(body) + body).recv(1000)


async def waits(self, request_id, limit_s):
    import asyncio

    await asyncio.sleep(limit_s)


def test_a_client_that_takes_no_answer_is_let_go(place, monkeypatch):
    monkeypatch.setattr(connections, "SEND_S", 0.2)
    monkeypatch.setattr("reprise.rl.server.app.CLIENT_CONFIG", {"a": "x" * 2**25})
    one = connect(place, b"POST /api/v1/client/config HTTP/1.1\r\nHost: localhost\r\n\r\n")
    time.sleep(1.0)
    with pytest.raises(OSError):
        total = 0
        while data := one.recv(2**20):
            total += len(data)
        if total < 2**25:
            raise OSError
    assert is_answered(place)


def test_half_sent_headers_keep_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "_room", lambda: 20)
    with idle_server(tmp_path) as (_, address):
        place = address.removeprefix("http://")
        held = [connect(place, HALF_HEADER) for _ in range(60)]
        assert is_answered(place)
        assert is_closed(held[0])
        held[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            held[-1].recv(1)


def test_requests_that_are_served_are_not_closed_for_others(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "_room", lambda: 5)
    with idle_server(tmp_path) as (_, address):
        place = address.removeprefix("http://")
        served = [connect(place, HALF_BODY) for _ in range(5)]
        time.sleep(0.3)
        assert is_closed(connect(place, HALF_HEADER))
        for one in served:
            one.sendall(b"1234567}")
            assert b"400 " in one.recv(1000)
            one.close()


def test_requests_that_do_not_wait_for_answers_are_refused(place):
    body = b'{"request_id": "a"}'
    head = b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    one = connect(place, (head % len(body) + body) * 2)
    assert is_closed(one)

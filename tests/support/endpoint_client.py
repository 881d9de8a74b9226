"""Calls of the token endpoint and of OpenAI's routes, without a client library."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

LIMIT_S = 600.0
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def connect(address: str) -> http.client.HTTPConnection:
    parts = urlsplit(address)
    assert parts.hostname is not None
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=LIMIT_S)


def send(
    connection: http.client.HTTPConnection, path: str, body: Any, **headers: str
) -> http.client.HTTPResponse:
    """Send a body, a GET without one; return the response, of which only the header is read."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    sent = {"Content-Type": "application/json"} | headers
    connection.request(method, path, data, sent)
    return connection.getresponse()


def ask(address: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Return the status and the JSON of an answer."""
    connection = connect(address)
    try:
        response = send(connection, path, body, **headers)
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def events(address: str, path: str, body: Any) -> list[Any]:
    """Return the objects of a stream."""
    connection = connect(address)
    try:
        response = send(connection, path, body)
        assert response.status == 200, response.read()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        *lines, last, rest = response.read().decode().split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        return [json.loads(line.removeprefix("data: ")) for line in lines]
    finally:
        connection.close()

"""A server in a thread of this process, with the configuration's tiny policy."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from reprise.rl.endpoint.routes import ROUTES
from reprise.rl.http.connections import configured
from reprise.rl.python.api import Policy
from reprise.rl.server.app import make_app
from reprise.rl.server.records import Records
from reprise.rl.server.service import Served

NAME = "reprise/tiny"
KEY = "tml-test"
LIMIT_S = 600.0


@contextlib.contextmanager
def serve(policy: Policy, folder: Path, key: str | None = None) -> Iterator[str]:
    """Serve a policy; yields the address."""
    served = Served(policy, NAME, policy.config.policy.directory)
    app = make_app(served, policy.stream(2), Records(folder), key, more=[ROUTES])
    with in_thread(app) as address:
        yield address


@contextlib.contextmanager
def in_thread(app: Any) -> Iterator[str]:
    """Serve an application in a thread; yields the address."""
    server = uvicorn.Server(configured(app, port=0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server has ended"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)  # until the operation that runs has ended
        assert not thread.is_alive(), "the server goes on"


def call(
    address: str, path: str, body: Any = None, method: str = "POST", key: str = KEY
) -> tuple[int, bytes]:
    """Return the status and the body of an answer; a body that is no bytes is sent as JSON."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"X-API-Key": key, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/api/v1/{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def retrieve(address: str, request_id: str) -> Any:
    """Return the JSON of a result, once it is ready."""
    while True:
        status, answer = call(address, "retrieve_future", {"request_id": request_id})
        if status != 408:
            assert status == 200, answer
            return json.loads(answer)

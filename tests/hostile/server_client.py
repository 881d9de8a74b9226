"""A bare client of the server, which notes what no server should do."""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import socket
import threading
import time
from typing import Any

import numpy as np

from reprise.rl.http import wire

LIMIT_S = 120.0  # of an answer, and of a result
KNOWN_ERRORS = 2000  # characters of the longest


class Gone(Exception):
    """The server has ended, or gives no answer."""


class Client:
    """Sends requests on a connection that it keeps; counts are of `found`, for all clients."""

    def __init__(self, address: str, found: collections.Counter[str], key: str = "") -> None:
        self.place = address.removeprefix("http://")
        self.found = found
        self._key = key
        self.examples: list[str] = []
        self._local = threading.local()

    def call(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, bytes]:
        """Return the status and the answer. Raises Gone."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = wire.CONTENT_TYPE if path == "forward_backward" else "application/json"
        headers = {"X-API-Key": self._key, "Content-Type": kind}
        for attempt in range(2):
            connection = getattr(self._local, "connection", None)
            if connection is None:
                connection = http.client.HTTPConnection(self.place, timeout=LIMIT_S)
                self._local.connection = connection
            try:
                connection.request(method, f"/api/v1/{path}", data, headers)
                answer = connection.getresponse()
                status, content = answer.status, answer.read()
                break
            except TimeoutError as error:
                self._note("hangs", f"{method} {path}")
                raise Gone from error
            except (http.client.HTTPException, OSError) as error:
                connection.close()
                self._local.connection = None
                if attempt:  # a connection that was idle may have been closed
                    raise Gone from error
        self.found["answers"] += 1
        if not 200 <= status < 500:
            self._note("answers_of_other_statuses", f"{method} {path}: {status} {content!r:.300}")
        if status >= 400 and (len(content) > KNOWN_ERRORS or b"Traceback" in content):
            self._note("answers_of_other_statuses", f"{method} {path}: {content!r:.300}")
        return status, content

    def ask(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """Return the object of an answer with status 200, else None."""
        status, content = self.call(path, body, method)
        return json.loads(content) if status == 200 else None

    def result(self, request_id: str, limit_s: float = LIMIT_S) -> Any:
        """Return the result of an operation: bytes of a message, or an object; None: not yet."""
        deadline_s = time.monotonic() + limit_s
        while True:
            status, content = self.call("retrieve_future", {"request_id": request_id})
            if status == 410:
                return {"error": "gone"}
            if status == 200:
                break
            if time.monotonic() > deadline_s:
                return None
        if not content.startswith(b'{"'):
            return content
        found = json.loads(content)
        if "in the server: see its log" in found.get("error", ""):
            self._note("internal_errors", f"{request_id}: {found}")
        return found

    def finish(self, path: str, body: Any) -> Any:
        """Send an operation and return its result, which is not late; None if it is refused."""
        queued = self.ask(path, body)
        if queued is None:
            return None
        result = self.result(queued["request_id"])
        if result is None:
            self._note("hangs", f"{path} {body!r:.200}")
        return result

    def hang_up(self, path: str, data: bytes, length: int) -> None:
        """Send a part of a request, and go."""
        host, port = self.place.split(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 10) as one:
            head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: {self.place}\r\n"
            one.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + data)

    def _note(self, kind: str, example: str) -> None:
        self.found[kind] += 1
        if len(self.examples) < 50:
            self.examples.append(f"{kind}: {example}")


def sampled(result: Any) -> list[tuple[list[int], bytes]] | None:
    """Return the tokens and the bits of the log-probs of a result; None: it is an error."""
    if not isinstance(result, bytes):
        return None
    sequences = wire.parse("SampleResponse", result).sequences
    return [(np.frombuffer(x.tokens, "<i4").tolist(), x.logprobs) for x in sequences]


def training(
    run: str, seq: int, ids: tuple[int, ...] = (5, 6, 7, 8), loss: str = "cross_entropy", **inputs
) -> bytes:
    """Return a training request of one datum."""
    message = wire.make("ForwardBackwardRequest", model_id=run, seq_id=seq, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(ids[:-1], "<i4").tobytes()
    target = datum.loss_fn_inputs["target_tokens"]
    target.dtype, target.dense = wire.INT64, np.asarray(ids[1:], "<i8").tobytes()
    for name, values in inputs.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype, tensor.dense = wire.FLOAT32, np.asarray(values, "<f4").tobytes()
    data: bytes = message.SerializeToString()
    return data

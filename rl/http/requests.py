"""Incoming requests and outgoing answers: access checks and memory limits."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from reprise.rl.http import wire
from reprise.rl.http.account import SMALL_BYTES, Hold

MAX_BODY_BYTES = 2**26
MAX_JSON_BYTES = 2**23
MAX_CONTAINERS = 2**16  # lists and objects of a JSON body
JSON_FACTOR = 16  # memory of parsed JSON per byte
MESSAGE_FACTOR = 2
PART_BYTES = 2**16  # of an answer, sent in one message
JSON_TYPE = "application/json"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
T = TypeVar("T")


class TooLarge(Exception):
    """A request body above the size limit."""


def error(status: int, text: str) -> Response:
    return JSONResponse({"detail": text}, status)


def refusal(
    request: Request, hosts: tuple[str, ...] | None, api_key: str | None
) -> tuple[int, str] | None:
    """Return status and text for a request to another host or without the key, else None.

    Clients send the key as X-API-Key, or as a bearer token.

    A page of another site can send requests to loopback, and its name is the Host after DNS
    rebinding. Programs send no Origin. If `hosts` is None, any Host is accepted, which needs a key.
    """
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    if hosts is not None and _name(host) not in hosts:
        return 421, f"expected the Host {' or '.join(hosts)}, got {host!r:.100}"
    if origin is not None and _netloc(origin) != host:
        return 403, f"expected no Origin, got {origin!r:.100}: this is no site for browsers"
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("", JSON_TYPE, wire.CONTENT_TYPE):
        return 415, f"expected {JSON_TYPE} or {wire.CONTENT_TYPE}, got {kind!r:.100}"
    if api_key is not None and not hmac.compare_digest(_key(request), api_key.encode()):
        return 401, "expected the server's key: TINKER_API_KEY, or the api_key of an OpenAI client"
    return None


def _key(request: Request) -> bytes:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return (request.headers.get("x-api-key") or bearer).encode()


def _netloc(url: str) -> str | None:
    """Return the host and port of an origin, or None without a host."""
    try:
        return urlsplit(url).netloc or None
    except ValueError:
        return None


def _name(host: str) -> str | None:
    """Return the name in a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


async def read_body(request: Request, hold: Hold, factor: int, limit: int) -> bytearray:
    """Return the body; the request then holds `factor` times the bytes of the body.

    Raises TooLarge, Busy, or starlette's ClientDisconnect.
    """
    body = bytearray()
    async for part in request.stream():
        if len(body) + len(part) > limit:
            raise TooLarge(f"expected a body of at most {limit:,} bytes")
        hold.take(factor * len(part))
        body += part
    return body


async def read_json(request: Request, hold: Hold) -> dict[str, Any]:
    """Return the object of a JSON body, {} if empty. Raises ValueError, TooLarge, or Busy."""
    body = await read_body(request, hold, JSON_FACTOR, MAX_JSON_BYTES)
    return await off_loop(_parsed, body) if body else {}


async def off_loop(parse: Callable[[Any], T], body: bytes | bytearray) -> T:
    """Parse a body; large bodies are parsed in a thread, so that the event loop is not blocked."""
    if len(body) <= SMALL_BYTES:
        return parse(body)
    return await asyncio.to_thread(parse, body)


def _parsed(body: bytearray) -> dict[str, Any]:
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        raise ValueError(f"expected JSON of at most {MAX_CONTAINERS:,} lists and objects")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as wrong:
        raise ValueError(f"expected JSON: {wrong}") from wrong
    if not isinstance(content, dict):
        raise ValueError("expected a JSON object")
    return content


class InParts(Response):
    """A large response, sent in parts as the client reads; its bytes are held until sent."""

    def __init__(self, response: Response, hold: Hold) -> None:
        """Take the bytes of the body. Raises Busy."""
        hold.take(len(response.body))
        super().__init__(None, response.status_code)
        self.body = response.body
        self.raw_headers = response.raw_headers
        self._hold = hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        whole = memoryview(self.body)
        try:
            await send(start | {"headers": self.raw_headers})
            for at in range(0, len(whole), PART_BYTES):
                part = bytes(whole[at : at + PART_BYTES])
                more = at + PART_BYTES < len(whole)
                await send({"type": "http.response.body", "body": part, "more_body": more})
        finally:
            self._hold.release()

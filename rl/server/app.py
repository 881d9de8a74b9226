"""The routes of the server: bodies in, answers and errors out."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl.runtime.progress import say
from rl.server import wire
from rl.server.bodies import Unknown, field, number
from rl.server.records import Records
from rl.server.service import Busy, Gone, Served, Service
from rl.server.worker import Worker
from rl.stream import Stream

MAX_BODY_BYTES = 2**26
LONG_POLL_S = 25.0
STATUSES: dict[type[Exception], int] = {Unknown: 404, Gone: 410, Busy: 429, ValueError: 400}
CLIENT_CONFIG = {"parallel_fwdbwd_chunks": False}  # the parts of a call come in order
Handler = Callable[[Service, Request], Awaitable[Response]]


class TooLarge(Exception):
    """A body of more than MAX_BODY_BYTES."""


def make_app(
    served: Served, stream: Stream, records: Records, api_key: str | None = None
) -> Starlette:
    """Return the application, whose samples are the stream's; clients need the key, if any."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker = Worker(stream, asyncio.get_running_loop())
        with contextlib.closing(records), contextlib.closing(worker):
            app.state.service = Service(served, records, worker)
            yield

    def guarded(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def guard(request: Request) -> Response:
            key = request.headers.get("x-api-key", "").encode()
            if api_key is not None and not hmac.compare_digest(key, api_key.encode()):
                return _error(401, "expected the server's key in TINKER_API_KEY")
            try:
                return await handler(request.app.state.service, request)
            except TooLarge:
                return _error(413, f"expected a body of at most {MAX_BODY_BYTES:,} bytes")
            except tuple(STATUSES) as error:
                status = next(x for kind, x in STATUSES.items() if isinstance(error, kind))
                return _error(status, str(error))
            except Exception as error:
                say("".join(traceback.format_exception(error)), sys.stderr)
                return _error(500, f"{type(error).__name__} in the server: see its log")

        return guard

    routes = [
        Route(f"/api/v1/{path}", guarded(handler), methods=[method])
        for method, path, handler in _ROUTES
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def _error(status: int, text: str) -> Response:
    return JSONResponse({"detail": text}, status)


async def _body(request: Request) -> bytes:
    """Return the body. Raises TooLarge."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise TooLarge
        parts.append(part)
    return b"".join(parts)


async def _json(request: Request) -> dict[str, Any]:
    """Return the object of a JSON body. Raises ValueError."""
    data = await _body(request)
    if not data:
        return {}
    try:
        content = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"expected JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("expected a JSON object")
    return content


# -- handlers --------------------------------------------------------------------------------


def _posted(method: Callable[[Service, dict[str, Any]], Any]) -> Handler:
    """Return the handler of a method that takes a JSON body and returns an object."""

    async def handler(service: Service, request: Request) -> Response:
        return JSONResponse(method(service, await _json(request)))

    return handler


def _got(method: Callable[[Service, Request], Any]) -> Handler:
    """Return the handler of a method that takes no body, and returns an object or nothing."""

    async def handler(service: Service, request: Request) -> Response:
        return JSONResponse(method(service, request) or {})

    return handler


async def _telemetry(service: Service, request: Request) -> Response:
    """Drop it: it may hold keys."""
    await _body(request)
    return JSONResponse({"status": "accepted"})


async def _train(service: Service, request: Request) -> Response:
    return JSONResponse(service.train(await _body(request)))


async def _retrieve(service: Service, request: Request) -> Response:
    """Return an answer once it is ready; 408 while it is not, and 410 if it is unknown.

    At a 410 a client requests samples again, as after a start of the server.
    """
    request_id = field(await _json(request), "request_id", str)
    try:
        answer = await service.answers.fetch(request_id, LONG_POLL_S)
    except KeyError:
        return _error(410, "expected a request of this server, since its last start")
    if answer is None:
        return JSONResponse({"type": "try_again", "request_id": request_id}, 408)
    if answer.message is not None:
        return Response(answer.message, media_type=wire.CONTENT_TYPE)
    return JSONResponse(answer.content)


def _page(request: Request) -> tuple[int, int]:
    """Return how many entries a listing shows, and after how many."""
    sizes = []
    for name, default in (("limit", "100"), ("offset", "0")):
        text = request.query_params.get(name, default)
        if not text.isdecimal() or len(text) > 9:
            raise ValueError(f"{name}: expected a number, got {text!r:.50}")
        sizes.append(int(text))
    return min(sizes[0], 1000), sizes[1]


def _checkpoint(request: Request) -> tuple[str, str]:
    """Return the run and the id of a checkpoint."""
    return request.path_params["run"], request.path_params["checkpoint"]


def _list_checkpoints(service: Service, request: Request) -> Any:
    return service.listings.checkpoints(request.path_params.get("run"), *_page(request))


def _publish(service: Service, request: Request) -> None:
    """Note whether a checkpoint is public: every client of this server can read all of them."""
    is_public = request.method == "POST"
    service.listings.change_checkpoint(*_checkpoint(request), public=is_public)


async def _ttl(service: Service, request: Request) -> Response:
    ttl_s = number(await _json(request), "ttl_seconds", None)
    service.listings.expire_after(*_checkpoint(request), ttl_s)
    return JSONResponse({})


_CHECKPOINT = "training_runs/{run}/checkpoints/{checkpoint:path}"
_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "client/config", _got(lambda service, r: CLIENT_CONFIG)),
    ("POST", "client/dynamic_config", _got(lambda service, r: {})),
    ("POST", "create_session", _posted(Service.create_session)),
    ("POST", "session_heartbeat", _posted(Service.heartbeat)),
    ("POST", "sessions/{session}/finish", _got(lambda s, r: s.finish(r.path_params["session"]))),
    ("POST", "telemetry", _telemetry),
    ("GET", "get_server_capabilities", _got(lambda service, r: service.capabilities())),
    ("GET", "healthz", _got(lambda service, r: {"status": "ok"})),
    ("POST", "create_model", _posted(Service.create_model)),
    ("POST", "get_info", _posted(Service.get_info)),
    ("POST", "load_weights", _posted(Service.load)),
    ("POST", "forward_backward", _train),
    ("POST", "optim_step", _posted(Service.optim_step)),
    ("POST", "save_weights", _posted(Service.save)),
    ("POST", "save_weights_for_sampler", _posted(Service.save_sampler)),
    ("POST", "create_sampling_session", _posted(Service.create_sampler)),
    ("GET", "samplers/{sampler}", _got(lambda s, r: s.sampler(r.path_params["sampler"]))),
    ("POST", "asample", _posted(Service.sample)),
    ("POST", "retrieve_future", _retrieve),
    ("POST", "weights_info", _posted(lambda s, body: s.listings.weights_info(body))),
    ("GET", "training_runs", _got(lambda s, r: s.listings.runs(*_page(r)))),
    ("GET", "training_runs/{run}", _got(lambda s, r: s.listings.run(r.path_params["run"]))),
    ("GET", "training_runs/{run}/checkpoints", _got(_list_checkpoints)),
    ("GET", "checkpoints", _got(_list_checkpoints)),
    ("POST", _CHECKPOINT + "/publish", _got(_publish)),
    ("DELETE", _CHECKPOINT + "/publish", _got(_publish)),
    ("PUT", _CHECKPOINT + "/ttl", _ttl),
    ("DELETE", _CHECKPOINT, _got(lambda s, r: s.listings.delete_checkpoint(*_checkpoint(r)))),
    ("GET", "sessions", _got(lambda s, r: s.listings.sessions(*_page(r)))),
    ("GET", "sessions/{session}", _got(lambda s, r: s.listings.session(r.path_params["session"]))),
)

"""The HTTP routes of the server, from request bodies to answers and errors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from reprise.rl.http import requests as incoming
from reprise.rl.http.account import SMALL_BYTES, Account, Busy, Hold
from reprise.rl.http.requests import LOOPBACK, InParts, TooLarge, error, read_json
from reprise.rl.python.stream import Stream
from reprise.rl.runtime.progress import say
from reprise.rl.server import bodies
from reprise.rl.server.bodies import Unknown, field
from reprise.rl.server.records import Records, no_space
from reprise.rl.server.service import Gone, Served, Service
from reprise.rl.server.worker import Worker

LONG_POLL_S = 25.0
TICK_S = 5.0
STATUSES: dict[type[Exception], int] = {
    Unknown: 404,
    Gone: 410,
    TooLarge: 413,
    Busy: 429,
    ValueError: 400,
}
CLIENT_CONFIG = {"parallel_fwdbwd_chunks": False}  # so that parts of a call arrive in order
Handler = Callable[[Service, Request, Hold], Awaitable[Response]]


@dataclasses.dataclass(frozen=True)
class Routes:
    """Methods, paths and handlers, and the form of their errors from a status and a text."""

    handlers: Sequence[tuple[str, str, Handler]]
    error: Callable[[int, str], Response]


def make_app(
    served: Served,
    stream: Stream,
    records: Records,
    api_key: str | None = None,
    hosts: tuple[str, ...] | None = LOOPBACK,
    *,
    more: Sequence[Routes] = (),
    warms_up: bool = False,
) -> Starlette:
    """Return the application, which samples from `stream`; clients need `api_key` unless None.

    The routes are Tinker's, and `more`. `hosts` are the accepted host names of the server (None:
    any). If `warms_up`, the sampling programs compile in the background as soon as the server runs,
    and samples wait for them.
    """
    account = Account()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        worker = Worker(stream, loop, records.folder, warms_up=warms_up)
        with contextlib.closing(records), contextlib.closing(worker):
            app.state.service = Service(served, records, worker, account)
            ticks = asyncio.create_task(_tick(app.state.service))
            try:
                yield
            finally:
                ticks.cancel()

    def guarded(
        handler: Handler, error: Callable[[int, str], Response]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guard(request: Request) -> Response:
            if (refused := incoming.refusal(request, hosts, api_key)) is not None:
                status, text = refused
                return error(status, text)
            hold = Hold(account)
            try:
                response = await handler(request.app.state.service, request, hold)
                if len(response.body) > SMALL_BYTES:
                    return InParts(response, Hold(account))
                return response
            except Exception as failure:
                status, text = _failed(failure, records)
                return error(status, text)
            finally:
                hold.release()

        return guard

    tinker = Routes([(method, f"/api/v1/{path}", h) for method, path, h in _ROUTES], error)
    routes = [
        Route(path, guarded(handler, some.error), methods=[method])
        for some in (tinker, *more)
        for method, path, handler in some.handlers
    ]
    return Starlette(routes=routes, lifespan=lifespan)


async def _tick(service: Service) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        try:
            service.tick()
        except Exception as failure:  # the next tick may succeed
            say("".join(traceback.format_exception(failure)), sys.stderr)


def _failed(failure: Exception, records: Records) -> tuple[int, str]:
    """Return the status and the text of a failed request."""
    for kind, status in STATUSES.items():
        if isinstance(failure, kind):
            return status, str(failure)
    if isinstance(failure, ClientDisconnect):
        return 400, "the client has gone"
    if (text := no_space(failure, records.folder)) is not None:
        return 507, text
    say("".join(traceback.format_exception(failure)), sys.stderr)
    return 500, f"{type(failure).__name__} in the server: see its log"


# -- handlers --------------------------------------------------------------------------------


def _posted(method: Callable[[Service, dict[str, Any]], Any]) -> Handler:
    """Return a handler for a method that takes a JSON body and returns an object."""

    async def handler(service: Service, request: Request, hold: Hold) -> Response:
        result = method(service, await read_json(request, hold))
        service.answers.keep(result.get("request_id"), hold)
        return JSONResponse(result)

    return handler


def _got(method: Callable[[Service, Request], Any]) -> Handler:
    """Return a handler for a method that takes no body, and returns an object or nothing."""

    async def handler(service: Service, request: Request, hold: Hold) -> Response:
        return JSONResponse(method(service, request) or {})

    return handler


async def _telemetry(service: Service, request: Request, hold: Hold) -> Response:
    """Discard telemetry, which may contain keys."""
    async for _ in request.stream():
        pass
    return JSONResponse({"status": "accepted"})


async def _train(service: Service, request: Request, hold: Hold) -> Response:
    factor = incoming.MESSAGE_FACTOR
    limit = incoming.MAX_BODY_BYTES
    body = bytes(await incoming.read_body(request, hold, factor, limit))
    operation = await incoming.off_loop(bodies.parse_operation, body)
    result = service.train(operation, body)
    service.answers.keep(result["request_id"], hold)
    return JSONResponse(result)


async def _retrieve(service: Service, request: Request, hold: Hold) -> Response:
    """Return an answer once ready, 408 if still pending, or 410 if the request is unknown.

    After a 410 a client requests samples again, as after a restart of the server.
    """
    request_id = field(await read_json(request, hold), "request_id", str)
    hold.release()
    fetching = asyncio.ensure_future(service.answers.fetch(request_id, LONG_POLL_S))
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((fetching, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not fetching.done():
            raise ClientDisconnect
        answer = fetching.result()
    except KeyError:
        return error(410, "expected a request of this server, since its last start")
    finally:
        fetching.cancel()
        leaving.cancel()
    if answer is None:
        return JSONResponse({"type": "try_again", "request_id": request_id}, 408)
    return Response(answer.body, media_type=answer.media_type)


def _page(request: Request) -> tuple[int, int]:
    """Return the limit and the offset of a listing."""
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
    """Record whether a checkpoint is public, although every client can read all checkpoints."""
    is_public = request.method == "POST"
    service.listings.change_checkpoint(*_checkpoint(request), public=is_public)


async def _ttl(service: Service, request: Request, hold: Hold) -> Response:
    ttl_s = bodies.ttl_s(await read_json(request, hold))
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

"""Handlers of the token endpoint, and of the routes of OpenAI's clients.

POST /inference/v1/generate      token ids to token ids, as trainers use it
POST /v1/completions             texts or token ids to texts
POST /v1/chat/completions        messages to texts, by the chat template
GET  /v1/models                  the policy, and its adapters by the paths of their checkpoints
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from reprise.rl.endpoint import bodies
from reprise.rl.endpoint.answers import DONE, Choice, Writer, as_event, generated
from reprise.rl.endpoint.bodies import Wanted
from reprise.rl.endpoint.draws import Draws, Failed, unless_gone
from reprise.rl.endpoint.errors import content, error
from reprise.rl.http.account import Hold
from reprise.rl.http.requests import read_json
from reprise.rl.server.app import Handler, Routes
from reprise.rl.server.bodies import Unknown
from reprise.rl.server.records import SAMPLER, SCHEME, is_over
from reprise.rl.server.service import Service

VERSION = "X-Weight-Version"
ParseText = Callable[..., Wanted]


async def _generate(service: Service, request: Request, hold: Hold) -> Response:
    body = await read_json(request, hold)
    limit = service.policy.config.longest_tokens
    wanted = await asyncio.to_thread(bodies.generation, body, limit)
    path, _ = _model(service, wanted.model)

    def answer(draws: Draws) -> dict[str, Any]:
        return generated(wanted, draws.choices, draws.version, draws.prompt_logprobs)

    return await _whole(service, request, wanted, path, answer)


def _text_handler(parse: ParseText, *, is_chat: bool) -> Handler:
    """Return the handler for bodies in OpenAI's form."""

    async def handler(service: Service, request: Request, hold: Hold) -> Response:
        body = await read_json(request, hold)
        limit = service.policy.config.longest_tokens
        tokenizer = service.policy.tokenizer
        # a template takes up to seconds, and a tokenizer as long for a large text
        wanted = await asyncio.to_thread(parse, body, limit, tokenizer)
        path, model = _model(service, wanted.model)
        writer = Writer(wanted, model, tokenizer, is_chat=is_chat)
        if wanted.streams:
            return await _stream(service, request, wanted, path, writer)
        return await _whole(
            service,
            request,
            wanted,
            path,
            lambda draws: writer.whole(draws.choices, draws.version),
        )

    return handler


async def _whole(
    service: Service,
    request: Request,
    wanted: Wanted,
    path: str | None,
    answer: Callable[[Draws], dict[str, Any]],
) -> Response:
    """Return an answer once all choices are complete."""
    draws = Draws(service, wanted, path)
    try:
        await unless_gone(request.receive, draws.finish())
        draws.take_answer()
        return await asyncio.to_thread(lambda: JSONResponse(answer(draws)))
    except Failed as failure:
        return error(failure.status, str(failure))
    finally:
        draws.close()


async def _stream(
    service: Service, request: Request, wanted: Wanted, path: str | None, writer: Writer
) -> Response:
    """Return an answer in events, once there are tokens; until then, errors have a status."""
    draws = Draws(service, wanted, path)
    try:
        await unless_gone(request.receive, draws.wait())
        return Events(draws, writer, wanted)
    except Failed as failure:
        draws.close()
        return error(failure.status, str(failure))
    except BaseException:
        draws.close()
        raise


class Events(Response):
    """Server-sent events with the tokens of all choices, as they come."""

    media_type = "text/event-stream"

    def __init__(self, draws: Draws, writer: Writer, wanted: Wanted) -> None:
        headers = {VERSION: str(draws.version), "Cache-Control": "no-cache"}
        super().__init__(None, 200, headers)
        del self.headers["Content-Length"]
        self._draws = draws
        self._writer = writer
        self._wanted = wanted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await unless_gone(receive, self._send_all(send))
        finally:
            self._draws.close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send(start | {"headers": self.raw_headers})

        async def put(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        draws = self._draws
        sent = [0] * len(draws.choices)
        ended = [False] * len(draws.choices)
        try:
            while not all(ended):
                for choice in draws.choices:
                    if not ended[choice.index] and _is_new(choice, sent[choice.index]):
                        data = self._writer.event(choice, sent[choice.index], draws.version)
                        sent[choice.index] = len(choice.token_ids)
                        ended[choice.index] = choice.finish is not None
                        await put(data)
                if not all(ended):
                    await draws.wait()
            if self._wanted.shows_usage:
                await put(self._writer.last_event(draws.choices, draws.version))
        except Failed as failure:
            await put(as_event(content(failure.status, str(failure))))
        await put(DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _is_new(choice: Choice, num_sent: int) -> bool:
    return len(choice.token_ids) > num_sent or choice.finish is not None


# -- models --------------------------------------------------------------------------------


def _model(service: Service, name: str | None) -> tuple[str | None, str]:
    """Return the path of the checkpoint of a model, None for the policy, and its name.

    Raises Unknown.
    """
    if name is None or name == service.name:
        return None, service.name
    record = service.records.checkpoints.get(name)
    if record is None or is_over(record, service.records.now_s()):
        raise Unknown(
            f"expected the model {service.name!r}, or the path of a checkpoint "
            f"({SCHEME}RUN/{SAMPLER}/NAME; GET /v1/models lists them), got {name!r:.200}"
        )
    return name, name


def _card(service: Service, path: str | None) -> dict[str, Any]:
    """Return the description of a model."""
    card = {"id": service.name, "object": "model", "created": 0, "owned_by": "reprise"}
    card |= {"max_model_len": service.policy.config.longest_tokens, "root": service.name}
    if path is None:
        return card | {"parent": None, "weight_version": 0}
    record = service.records.checkpoints[path]
    own = {"id": path, "created": int(record["time_s"]), "parent": service.name}
    return card | own | {"weight_version": record.get("version")}


async def _list(service: Service, request: Request, hold: Hold) -> Response:
    """Return the policy, and the adapters that were saved under a name to sample from."""
    now_s = service.records.now_s()
    paths: list[str | None] = [None]
    for path, record in list(service.records.checkpoints.items()):
        is_named = record.get("sampling_session") is None
        if record["kind"] == SAMPLER and is_named and not is_over(record, now_s):
            paths.append(path)
    return JSONResponse({"object": "list", "data": [_card(service, path) for path in paths]})


async def _one(service: Service, request: Request, hold: Hold) -> Response:
    path, _ = _model(service, request.path_params["model"])
    return JSONResponse(_card(service, path))


ROUTES = Routes(
    (
        ("POST", "/inference/v1/generate", _generate),
        ("POST", "/v1/completions", _text_handler(bodies.completion, is_chat=False)),
        ("POST", "/v1/chat/completions", _text_handler(bodies.chat, is_chat=True)),
        ("GET", "/v1/models", _list),
        ("GET", "/v1/models/{model:path}", _one),
    ),
    error,
)

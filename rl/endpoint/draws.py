"""The responses to one request, drawn in the rounds that all clients share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from reprise.rl.endpoint.answers import LENGTH, STOP, Choice
from reprise.rl.endpoint.bodies import Wanted
from reprise.rl.http.account import Hold
from reprise.rl.python.sampler import Sample, Sampler
from reprise.rl.python.stream import SampleRequest
from reprise.rl.server.service import SAMPLE_BYTES, Service, prompt_logprobs

TOKEN_BYTES = 256  # of memory for a token of an answer that is written


class Failed(Exception):
    """The request has failed, with a text for its client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Draws:
    """The choices of a request as they grow, in the event loop. `close` drops unfinished ones.

    The choices of all prompts come from one snapshot of the weights, whose number of updates is
    `version`.
    """

    def __init__(self, service: Service, wanted: Wanted, path: str | None) -> None:
        """Queue the request for the weights of a checkpoint, None for the plain policy.

        Raises Busy.
        """
        self._wanted = wanted
        self._hold = Hold(service.account)
        self._hold.take(SAMPLE_BYTES * wanted.num_choices)
        self._changed = asyncio.Event()
        self._failure: Failed | None = None
        self._sampler: Sampler | None = None
        self._noise = uuid.uuid4().hex  # fresh, also if a client repeats a request
        self.choices = [Choice(i) for i in range(wanted.num_choices)]
        self.prompt_logprobs: list[float] | None = None
        self._drops: list[Callable[[], None]] = []
        for g in range(len(wanted.prompts)):
            dropped = service.draw(
                path,
                partial(self._request, g),
                self._finish,
                partial(self._on_result, g),
                partial(self._on_tokens, g) if wanted.streams else None,
            )
            self._drops.append(dropped)

    @property
    def version(self) -> int:
        """The number of optimizer steps of the weights, once a choice has tokens."""
        assert self._sampler is not None
        return self._sampler.version

    @property
    def is_finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    async def wait(self) -> None:
        """Return after the next tokens. Raises Failed."""
        await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure

    async def finish(self) -> None:
        """Return once all choices are complete. Raises Failed."""
        while not self.is_finished:
            await self.wait()

    def take_answer(self) -> None:
        """Hold memory to write the answer. Raises Busy."""
        self._hold.take(TOKEN_BYTES * sum(len(choice.token_ids) for choice in self.choices))

    def close(self) -> None:
        """Drop unfinished choices, so that their rows serve other requests."""
        self._hold.release()
        if not self.is_finished:
            for drop in self._drops:
                drop()

    # -- in the thread of the worker -------------------------------------------------------

    def _request(self, g: int, sampler: Sampler) -> SampleRequest:
        self._sampler = self._sampler or sampler
        wanted = self._wanted
        seed = wanted.seed
        return SampleRequest(
            self._sampler,
            wanted.prompts[g],
            wanted.n,
            wanted.samplings[g],
            self._noise + str(g) if seed is None else seed,
            first=g * wanted.n,
        )

    def _finish(self, sampler: Sampler, samples: list[Sample]) -> dict[str, Any]:
        logps = None
        if self._wanted.prompt_logprobs:
            logps = prompt_logprobs(sampler, samples[0].prompt_ids).tolist()
        return {"samples": samples, "prompt_logprobs": logps}

    # -- in the event loop -----------------------------------------------------------------

    def _on_tokens(self, g: int, i: int, tokens: list[int], logprobs: list[float]) -> None:
        choice = self.choices[g * self._wanted.n + i]
        choice.token_ids += tokens
        choice.logprobs += logprobs
        self._changed.set()

    def _on_result(self, g: int, result: Any) -> None:
        if "error" in result:
            status = 400 if result["category"] == "user" else 500
            self._failure = self._failure or Failed(status, result["error"])
        else:
            self.prompt_logprobs = result["prompt_logprobs"]
            for i, sample in enumerate(result["samples"]):
                choice = self.choices[g * self._wanted.n + i]
                choice.token_ids = sample.token_ids
                choice.logprobs = sample.logprobs.tolist()
                choice.finish = LENGTH if sample.is_truncated else STOP
        self._changed.set()


async def unless_gone(receive: Receive, work: Any) -> None:
    """Await `work`, a coroutine, while its client is there. Raises ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""Packages of PyPI that call an endpoint, unmodified; run by a Python that has them.

Reads a JSON object of `address`, `key`, `model` (a local folder, whose tokenizer the packages
load), `prompts` (texts), `seeds` and `max_tokens` from stdin. Prints a JSON object of `calls`, each
with a name and its tokens or its error, and of the `versions` of the packages. A package that is
not installed makes no calls.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from typing import Any

PACKAGES = ("openai", "renderers", "verifiers")
IDS = {"return_token_ids": True}
Call = dict[str, Any]


def openai_calls(given: dict[str, Any]) -> list[Call]:
    """Call by `openai`: completions and chats, whole and in streams, and errors."""
    import openai

    client = openai.OpenAI(base_url=f"{given['address']}/v1", api_key=given["key"], max_retries=0)
    model = given["model"]
    common = {"model": model, "max_tokens": given["max_tokens"]}
    calls = []
    for i, text in enumerate(given["prompts"]):
        for seed in given["seeds"]:
            named = common | {"seed": seed}
            chat = named | {"messages": [{"role": "user", "content": text}]}

            def completion(named: Any = named, text: str = text) -> list[int]:
                answer = client.completions.create(prompt=text, logprobs=1, extra_body=IDS, **named)
                [choice] = answer.choices
                assert len(choice.logprobs.tokens) == len(choice.token_ids)
                assert answer.usage.completion_tokens == len(choice.token_ids)
                return choice.token_ids

            def completion_stream(named: Any = named, text: str = text) -> list[int]:
                stream = client.completions.create(
                    prompt=text, stream=True, extra_body=IDS, **named
                )
                return [token for part in stream for token in part.choices[0].token_ids]

            def whole_chat(chat: Any = chat) -> list[int]:
                answer = client.chat.completions.create(
                    logprobs=True, top_logprobs=1, extra_body=IDS, **chat
                )
                [choice] = answer.choices
                assert len(choice.logprobs.content) == len(choice.token_ids)
                assert choice.message.role == "assistant"
                return choice.token_ids

            def chat_stream(chat: Any = chat) -> list[int]:
                options = {"include_usage": True}
                stream = client.chat.completions.create(
                    stream=True, stream_options=options, extra_body=IDS, **chat
                )
                *parts, last = stream
                tokens = [token for part in parts for token in part.choices[0].token_ids]
                assert last.usage.completion_tokens == len(tokens)
                return tokens

            for function in (completion, completion_stream, whole_chat, chat_stream):
                calls.append(called(f"openai {function.__name__}", i, seed, function))

    def models() -> None:
        found = {one.id: one for one in client.models.list()}
        assert found[model].max_model_len == client.models.retrieve(model).max_model_len > 0

    def errors() -> None:
        text = given["prompts"][0]
        for kind, wrong in (
            (openai.NotFoundError, {"model": "other"}),
            (openai.BadRequestError, common | {"max_tokens": -1}),
            (openai.BadRequestError, common | {"logprobs": 5}),
            (openai.BadRequestError, common | {"frequency_penalty": 1.0}),
        ):
            try:
                client.completions.create(prompt=text, **wrong)
            except kind as error:
                assert "expected" in error.body["message"], error
            else:
                raise AssertionError(f"no error for {wrong}")

    return [*calls, called("openai models", 0, 0, models), called("openai errors", 0, 0, errors)]


def renderers_calls(given: dict[str, Any]) -> list[Call]:
    """Call by `renderers`, which turns messages to ids and posts these."""
    import openai
    from renderers import create_renderer
    from renderers.base import load_tokenizer
    from renderers.client import generate

    renderer = create_renderer(load_tokenizer(given["model"]), None)

    async def one(text: str, seed: int) -> list[int]:
        async with openai.AsyncOpenAI(
            base_url=f"{given['address']}/v1", api_key=given["key"], max_retries=0
        ) as client:
            result = await generate(
                client=client,
                renderer=renderer,
                messages=[{"role": "user", "content": text}],
                model=given["model"],
                sampling_params={"seed": seed, "max_tokens": given["max_tokens"]},
                cache_salt="salt",
                priority=1,
            )
        assert len(result["completion_logprobs"]) == len(result["completion_ids"])
        return result["completion_ids"]

    return [
        called(
            "renderers generate", i, seed, lambda text=text, seed=seed: asyncio.run(one(text, seed))
        )
        for i, text in enumerate(given["prompts"])
        for seed in given["seeds"]
    ]


def verifiers_calls(given: dict[str, Any]) -> list[Call]:
    """Call by the training client of `verifiers`, all requests together."""
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    os.environ["ENDPOINT_KEY"] = given["key"]
    config = TrainClientConfig(base_url=f"{given['address']}/v1", api_key_var="ENDPOINT_KEY")

    async def one(client: Any, i: int, text: str, seed: int) -> Call:
        try:
            body = {"model": given["model"], "messages": [{"role": "user", "content": text}]}
            sampling = SamplingConfig(max_tokens=given["max_tokens"], seed=seed)
            response = await client.get_response(ChatDialect(), body, sampling, session_id=f"{i}")
            found = {"tokens": response.tokens.completion_ids}
        except Exception as error:
            found = {"error": described(error)}
        return {"name": "verifiers TrainClient", "prompt": i, "seed": seed, **found}

    async def all_of_them() -> list[Call]:
        client = TrainClient(config)
        prompts = list(enumerate(given["prompts"]))
        calls = [one(client, i, text, seed) for i, text in prompts for seed in given["seeds"]]
        try:
            return await asyncio.gather(*calls)
        finally:
            await client.close()

    return asyncio.run(all_of_them())


def called(name: str, prompt: int, seed: int, function: Callable[[], Any]) -> Call:
    try:
        found = {"tokens": function()}
    except Exception as error:
        found = {"error": described(error)}
    return {"name": name, "prompt": prompt, "seed": seed, **found}


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def main() -> None:
    given = json.load(sys.stdin)
    calls, versions = list[Call](), dict[str, str]()
    for name, make in zip(PACKAGES, (openai_calls, renderers_calls, verifiers_calls), strict=True):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        calls += make(given)
    print(json.dumps({"calls": calls, "versions": versions}))


if __name__ == "__main__":
    main()

"""JSON bodies of the token endpoint and of OpenAI's routes, as requests for samples.

A body may have fields that select a feature which this server does not have. Such a field is
accepted with the value that turns the feature off (`NEUTRAL`), and refused with any other value,
so that no answer ignores a part of its request. Fields without effect on an answer are
`IGNORED`. A null is the same as no field.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from reprise.models.text.tokenizer import Tokenizer
from reprise.models.text.tool_calls import check_depth
from reprise.rl.server import bodies
from reprise.rl.server.bodies import MAX_SAMPLES, field, number
from reprise.spec.config import SamplingConfig

MAX_SEED = 2**31 - 1  # as `Policy.sample`
MAX_LOGPROBS = 1
NAME = re.compile(r"[\x21-\x7e]{1,128}")  # of a request
IGNORED = frozenset(
    (
        *("cache_salt", "metadata", "priority", "prompt_cache_key", "prompt_cache_retention"),
        *("routed_experts_prompt_start", "safety_identifier", "service_tier", "store", "user"),
    )
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
SAMPLING = frozenset("max_tokens temperature top_p top_k seed stop stop_token_ids n".split())
GENERATE = frozenset("model token_ids sampling_params request_id stream return_token_ids".split())
PARAMS = SAMPLING | {"logprobs", "prompt_logprobs"}
NO_TEXT = frozenset(("detokenize", "include_stop_str_in_output", "skip_special_tokens"))
OPENAI = SAMPLING | {
    *("model", "max_completion_tokens", "stream", "stream_options", "logprobs", "request_id"),
    *("return_token_ids", "return_tokens_as_token_ids"),
}
COMPLETION = OPENAI | {"prompt"}
CHAT = OPENAI | {"messages", "tools", "tool_choice", "top_logprobs", "chat_template_kwargs"}
ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"developer": "system"}
MESSAGE = frozenset("role content name tool_calls tool_call_id reasoning_content".split())


@dataclasses.dataclass(frozen=True, eq=False)
class Wanted:
    """A request for `n` responses to each prompt; `samplings` are the settings of each prompt.

    `name` is the id of the request, and `model` its model, None for the plain policy. `logprobs`,
    `prompt_logprobs`, `shows_ids` and `shows_usage` say which parts the answer has, and
    `names_ids` that log-probs name their tokens by ids.
    """

    name: str
    model: str | None
    prompts: Sequence[tuple[int, ...]]
    samplings: Sequence[SamplingConfig]
    n: int
    seed: int | None
    logprobs: bool
    top_logprobs: bool = False
    prompt_logprobs: bool = False
    shows_ids: bool = False
    names_ids: bool = False
    streams: bool = False
    shows_usage: bool = True
    has_tools: bool = False  # responses may have calls
    stop_ids: frozenset[int] = frozenset()  # of the body
    stops: tuple[str, ...] = ()  # of the body

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)


# -- bodies --------------------------------------------------------------------------------


def generation(body: Mapping[str, Any], max_tokens: int) -> Wanted:
    """Return the request of a body of token ids; ValueError. `max_tokens` bound its tokens."""
    body = _read(body, GENERATE)
    if field(body, "stream", bool, False):
        raise ValueError(
            "stream: expected false, got true: this route answers once; fix: leave it out, or "
            "post token ids as the prompt of /v1/completions"
        )
    params = _read(field(body, "sampling_params", dict, {}), PARAMS, ignored=NO_TEXT)
    prompts = [_ids(field(body, "token_ids", list), "token_ids")]
    return Wanted(
        name=_name(body, "gen"),
        model=field(body, "model", str, None),
        prompts=prompts,
        logprobs=_num_logprobs(params, "logprobs") is not None,
        prompt_logprobs=_num_logprobs(params, "prompt_logprobs") is not None,
        shows_ids=field(body, "return_token_ids", bool, False),
        **_sampling(params, prompts, max_tokens),
    )


def completion(body: Mapping[str, Any], max_tokens: int, tokenizer: Tokenizer) -> Wanted:
    """Return the request of a body with a prompt, or several, as texts or ids; ValueError."""
    body = _read(body, COMPLETION)
    prompts = _prompts(body.get("prompt"), tokenizer)
    top = _num_logprobs(body, "logprobs")
    return Wanted(
        prompts=prompts,
        logprobs=top is not None,
        top_logprobs=bool(top),
        **_openai(body, "cmpl"),
        **_sampling(body, prompts, max_tokens),
    )


def chat(body: Mapping[str, Any], max_tokens: int, tokenizer: Tokenizer) -> Wanted:
    """Return the request of a body with messages; ValueError. The chat template is rendered."""
    body = _read(body, CHAT)
    messages = _messages(field(body, "messages", list))
    tools = _tools(body)
    prompt = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        **field(body, "chat_template_kwargs", dict, {}),
    )
    logprobs = field(body, "logprobs", bool, False)
    top = _num_logprobs(body, "top_logprobs")
    if top is not None and not logprobs:
        raise ValueError("top_logprobs: expected logprobs=true with it")
    prompts = [tuple(prompt)]
    return Wanted(
        prompts=prompts,
        logprobs=logprobs,
        top_logprobs=bool(top),
        has_tools=bool(tools),
        **_openai(body, "chatcmpl"),
        **_sampling(body, prompts, max_tokens),
    )


# -- parts ---------------------------------------------------------------------------------


def _read(
    body: Mapping[str, Any], known: Collection[str], ignored: Collection[str] = ()
) -> dict[str, Any]:
    """Return the fields of a body that have a meaning here. Raises ValueError for other fields."""
    check_depth(body)
    result = dict[str, Any]()
    for name, value in body.items():
        if value is None or name in IGNORED or name in ignored:
            continue
        if name in known:
            result[name] = value
        elif name not in NEUTRAL:
            raise ValueError(
                f"{name!r:.60}: expected a field of {', '.join(sorted(known))}; this server does "
                "not know what the field changes; fix: leave it out"
            )
        elif not any(_equal(value, neutral) for neutral in NEUTRAL[name]):
            expected = " or ".join(json.dumps(x) for x in NEUTRAL[name])
            raise ValueError(
                f"{name}: expected {expected}, got {value!r:.60}: this server has nothing else; "
                "fix: leave it out"
            )
    return result


def _equal(value: Any, neutral: Any) -> bool:
    """Return whether two JSON values are equal; a boolean is no number."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _name(body: Mapping[str, Any], prefix: str) -> str:
    name = field(body, "request_id", str, None)
    if name is None:
        return f"{prefix}-{uuid.uuid4().hex}"
    if not NAME.fullmatch(name):
        raise ValueError(
            f"request_id: expected 1 to 128 ASCII characters without spaces, got {name!r:.60}"
        )
    return name


def _num_logprobs(body: Mapping[str, Any], name: str) -> int | None:
    """Return for how many tokens of a position log-probs are wanted. Raises ValueError."""
    result: int | None = number(body, name, None)
    if result is not None and result > MAX_LOGPROBS:
        raise ValueError(
            f"{name}: expected 0 or 1, got {result!r:.50}: this server has the log-probs of drawn "
            "tokens alone; fix: 1"
        )
    return result


def _sampling(
    body: Mapping[str, Any], prompts: Sequence[Sequence[int]], max_tokens: int
) -> dict[str, Any]:
    """Return the fields of `Wanted` that `SAMPLING` names. Raises ValueError."""
    stops = body.get("stop", ())
    stops = (stops,) if isinstance(stops, str) else stops
    if not isinstance(stops, list | tuple) or not all(isinstance(x, str) for x in stops):
        raise ValueError(f"stop: expected a string or a list of strings, got {stops!r:.60}")
    stop_ids = _ids(field(body, "stop_token_ids", list, []), "stop_token_ids")
    settings = {
        name: body[name] for name in ("temperature", "top_p", "top_k", "max_tokens") if name in body
    }
    if stops:
        settings["stop"] = list(stops)
    samplings = []
    for prompt in prompts:
        if len(prompt) >= max_tokens:
            raise ValueError(
                f"expected a prompt of fewer than {max_tokens} tokens, which is the maximum "
                f"context length of this server, got {len(prompt)}"
            )
        one = bodies.parse_sampling(settings, len(prompt), max_tokens)
        if len(prompt) + one.max_new_tokens > max_tokens:
            raise ValueError(
                f"max_tokens: expected at most {max_tokens - len(prompt)} after a prompt of "
                f"{len(prompt)} tokens, since this server's maximum context length is {max_tokens} "
                f"tokens, got {one.max_new_tokens}; fix: leave it out for the rest of the context"
            )
        samplings.append(dataclasses.replace(one, stop_ids=stop_ids))
    n = number(body, "n", 1, low=1, high=MAX_SAMPLES)
    if n * len(prompts) > MAX_SAMPLES:
        raise ValueError(
            f"expected at most {MAX_SAMPLES} responses, got {n} to each of {len(prompts)} prompts: "
            "send several requests"
        )
    return {
        "samplings": samplings,
        "n": n,
        "seed": number(body, "seed", None, high=MAX_SEED),
        "stop_ids": frozenset(stop_ids),
        "stops": tuple(stops),
    }


def _openai(body: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the fields of `Wanted` that OpenAI's bodies share; rename the limit of tokens."""
    limit = body.pop("max_completion_tokens", None)
    if limit is not None and body.setdefault("max_tokens", limit) != limit:
        raise ValueError(
            f"max_completion_tokens: expected the same as max_tokens, got {limit!r:.50} and "
            f"{body['max_tokens']!r:.50}; fix: send one"
        )
    streams = field(body, "stream", bool, False)
    options = field(body, "stream_options", dict, {})
    shows_usage = field(options, "include_usage", bool, False) if streams else True
    if unknown := sorted(options.keys() - {"include_usage"}):
        raise ValueError(f"stream_options: expected include_usage, got {unknown[0]!r:.60}")
    if options and not streams:
        raise ValueError("stream_options: expected stream=true with it")
    return {
        "name": _name(body, prefix),
        "model": field(body, "model", str, None),
        "shows_ids": field(body, "return_token_ids", bool, False),
        "names_ids": field(body, "return_tokens_as_token_ids", bool, False),
        "streams": streams,
        "shows_usage": shows_usage,
    }


def _ids(values: Any, name: str) -> tuple[int, ...]:
    if not all(type(x) is int and 0 <= x < 2**31 for x in values):
        raise ValueError(f"{name}: expected a list of token ids, got {values!r:.60}")
    return tuple(values)


def _prompts(value: Any, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the ids of each prompt. Raises ValueError."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not value or not all(value):
        raise ValueError(
            f"prompt: expected a text, token ids, or a list of either, got {value!r:.60}"
        )
    if len(value) > MAX_SAMPLES:
        raise ValueError(f"prompt: expected at most {MAX_SAMPLES} prompts, got {len(value)}")
    prompts = []
    for one in value:
        if isinstance(one, str):
            prompts.append(tuple(tokenizer.encode_prompt(one)))
        elif isinstance(one, list):
            prompts.append(_ids(one, "prompt"))
        else:
            raise ValueError(f"prompt: expected texts or lists of token ids, got {one!r:.60}")
    return prompts


def _messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages as chat templates take them. Raises ValueError."""
    if not messages:
        raise ValueError("messages: expected at least one message, got none")
    result = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where}: expected an object, got {message!r:.60}")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"{where}: expected a role of {', '.join(ROLES)}, got {role!r:.60}")
        # clients send back an answer with its empty fields
        present = {name: x for name, x in message.items() if x not in (None, [], {})}
        if unknown := sorted(present.keys() - MESSAGE):
            raise ValueError(
                f"{where}: expected fields of {', '.join(sorted(MESSAGE))}, got {unknown[0]!r:.60}"
            )
        calls = [_call(x, where) for x in field(present, "tool_calls", list, [])]
        content = _content(present.get("content"), where)
        if content is None and not calls:
            raise ValueError(f"{where}: expected a content, got none")
        texts = {
            name: field(present, name, str) for name in present.keys() - {"content", "tool_calls"}
        }
        result.append(
            {
                **texts,
                "role": ROLES[role],
                "content": content or "",
                **({"tool_calls": calls} if calls else {}),
            }
        )
    return result


def _content(content: Any, where: str) -> str | None:
    """Return the text of a content, which may be a list of parts. Raises ValueError."""
    if content is None or isinstance(content, str):
        return content
    parts = list[str]()
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != "text":
            raise ValueError(
                f"{where}: expected a text, or parts of the type text, got {part!r:.60}: this "
                "policy reads neither images nor sound"
            )
        parts.append(text)
    return "".join(parts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as templates take them; ValueError."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: expected tool_calls with functions, got {call!r:.60}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
            check_depth([arguments])
        except (ValueError, RecursionError):
            arguments = function["arguments"]  # as the policy wrote them
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(body: Mapping[str, Any]) -> list[Any]:
    """Return the tools that the prompt shows. Raises ValueError."""
    tools = field(body, "tools", list, [])
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise ValueError(
                f'tools: expected {{"type": "function", "function": {{…}}}}, got {tool!r:.60}'
            )
        if not isinstance(function.get("name"), str):
            raise ValueError(f"tools: expected the name of a function, got {function!r:.60}")
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ValueError(
            f'tool_choice: expected "auto" or "none", got {choice!r:.60}: no call can be forced; '
            "fix: leave it out"
        )
    return tools if choice == "auto" else []

"""Answers of the token endpoint and of OpenAI's routes, whole and as events of a stream."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reprise.models.text import tool_calls
from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.endpoint.bodies import Wanted

STOP = "stop"
LENGTH = "length"
TOOL_CALLS = "tool_calls"
DONE = b"data: [DONE]\n\n"
NO_LOGPROB = -9999.0  # of a prompt token that the policy cannot draw: JSON has no infinity
UNFINISHED = "\ufffd"  # a decoder's text for bytes that are no whole character
Json = dict[str, Any]


@dataclasses.dataclass(eq=False)
class Choice:
    """A response so far; `finish` is None until it is complete."""

    index: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish: str | None = None


class Writer:
    """Writes the answers to one request, in OpenAI's form for a chat or for a completion."""

    def __init__(self, wanted: Wanted, model: str, tokenizer: Tokenizer, *, is_chat: bool) -> None:
        self._wanted = wanted
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._kind = "chat.completion" if is_chat else "text_completion"
        self._common = {"id": wanted.name, "created": int(time.time()), "model": model}
        self._tails = [_Tail(wanted, tokenizer) for _ in range(wanted.num_choices)]
        self._has_started = [False] * wanted.num_choices

    def whole(self, choices: Sequence[Choice], version: int) -> Json:
        """Return the answer with all choices."""
        return {
            **self._common,
            "object": self._kind,
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage(self._wanted, choices),
            "weight_version": version,
            **self._prompt_ids(),
        }

    def _choice(self, choice: Choice) -> Json:
        ids = choice.token_ids
        text = self._tails[choice.index].add(ids, is_last=True)
        text, calls, finish = self._with_calls(choice, text)
        message: Json = {"role": "assistant", "content": text or None if calls else text}
        message |= {"tool_calls": calls} if calls else {}
        return {
            "index": choice.index,
            **({"message": message} if self._is_chat else {"text": text}),
            "logprobs": self._logprobs(ids, choice.logprobs, 0),
            "finish_reason": finish,
            **self._ids(ids),
        }

    def event(self, choice: Choice, first: int, version: int) -> bytes:
        """Return the event with the tokens of a choice from `first` on."""
        ids = choice.token_ids[first:]
        tail = self._tails[choice.index]
        num_characters = tail.num_characters
        text = tail.add(ids, is_last=choice.finish is not None)
        text, calls, finish = self._with_calls(choice, text)
        is_first = not any(self._has_started)
        delta: Json = {} if self._has_started[choice.index] else {"role": "assistant"}
        self._has_started[choice.index] = True
        delta |= {"content": text}
        if calls:
            delta |= {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}
        shown = {
            "index": choice.index,
            **({"delta": delta} if self._is_chat else {"text": text}),
            "logprobs": self._logprobs(ids, choice.logprobs[first:], num_characters),
            "finish_reason": finish,
            **self._ids(ids),
        }
        content = self._event([shown], version)
        if is_first:
            content |= self._prompt_ids()
        return as_event(content)

    def _with_calls(self, choice: Choice, text: str) -> tuple[str, list[Json], str | None]:
        """Return the text, the calls of tools of a complete choice, and why it has ended.

        If a call cannot be read, all calls are text.
        """
        held = self._tails[choice.index].calls
        if choice.finish is None or not held:
            return text, [], choice.finish
        calls = tool_calls.read_calls(held)
        if any(call.error is not None for call in calls):
            return text + held, [], choice.finish
        shown = [
            {
                "id": f"call-{self._wanted.name}-{choice.index}-{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for i, call in enumerate(calls)
        ]
        return text, shown, TOOL_CALLS if choice.finish == STOP else choice.finish

    def last_event(self, choices: Sequence[Choice], version: int) -> bytes:
        """Return the event with the numbers of tokens."""
        return as_event(self._event([], version) | {"usage": usage(self._wanted, choices)})

    def _event(self, choices: list[Json], version: int) -> Json:
        return {
            **self._common,
            "object": self._kind + (".chunk" if self._is_chat else ""),
            "choices": choices,
            "weight_version": version,
            **({"usage": None} if self._wanted.shows_usage else {}),
        }

    def _prompt_ids(self) -> Json:
        """Return the ids of the prompt; of several prompts, a list of the ids of each."""
        if not self._wanted.shows_ids:
            return {}
        ids = [list(prompt) for prompt in self._wanted.prompts]
        return {"prompt_token_ids": ids[0] if len(ids) == 1 else ids}

    def _ids(self, ids: Sequence[int]) -> Json:
        return {"token_ids": list(ids)} if self._wanted.shows_ids else {}

    def _logprobs(
        self, ids: Sequence[int], logprobs: Sequence[float], first_character: int
    ) -> Json | None:
        """Return the log-probs of tokens in a text, after `first_character` characters."""
        if not self._wanted.logprobs:
            return None
        names = [self._token(i) for i in ids]
        pairs = list(zip(names, logprobs, strict=True))
        if self._is_chat:
            pieces = [list(self._tokenizer.token_bytes.of(i)) for i in ids]
            both = zip(pairs, pieces, strict=True)
            return {"content": [self._entry(name, x, piece) for (name, x), piece in both]}
        lengths = [len(self._text(i)) for i in ids]
        ends = np.cumsum([first_character, *lengths])[:-1]
        return {
            "tokens": names,
            "token_logprobs": list(logprobs),
            "top_logprobs": [{name: x} for name, x in pairs] if self._wanted.top_logprobs else None,
            "text_offset": ends.tolist(),
        }

    def _entry(self, name: str, logprob: float, piece: list[int]) -> Json:
        entry = {"token": name, "logprob": logprob, "bytes": piece}
        return entry | {"top_logprobs": [entry] if self._wanted.top_logprobs else []}

    def _token(self, token: int) -> str:
        return f"token_id:{token}" if self._wanted.names_ids else self._text(token)

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes.of(token).decode("utf-8", "replace")


class _Tail:
    """The text of a response as it grows, without the end token and the stop string.

    Text that may be the start of a stop string, or of a character, waits for more tokens. The text
    is decoded from the first token of the last piece, since the text of a token may depend on the
    token before. With tools, `calls` is the text from the first call on, which `add` leaves out.
    """

    def __init__(self, wanted: Wanted, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stops = wanted.stops
        self._ends = wanted.stop_ids | {*tokenizer.eos_token_ids}
        self._ids: list[int] = []
        self._begin = self._end = 0  # tokens of the last piece
        self._held = ""
        self._has_stopped = False
        self._marks = (*wanted.stops, *([tool_calls.START] if wanted.has_tools else []))
        self._has_tools = wanted.has_tools
        self.calls = ""
        self.num_characters = 0

    def add(self, ids: Sequence[int], *, is_last: bool) -> str:
        """Return the text that further tokens add."""
        self._ids += ids
        shown = self._ids
        if is_last and shown and shown[-1] in self._ends:
            shown = shown[:-1]
        before = self._decoded(shown[self._begin : self._end])
        now = self._decoded(shown[self._begin :])
        if is_last or not now.endswith(UNFINISHED):
            self._begin = self._end
            self._end = len(shown)
            self._held += now[len(before) :]
        text = self._held
        cuts = [text.find(stop) for stop in self._stops if stop in text]
        if self._has_stopped:
            text = ""
        elif cuts:
            self._has_stopped = True
            text = text[: min(cuts)]
        elif not is_last:
            text = text[: len(text) - _started(text, self._marks)]
        self._held = self._held[len(text) :]
        if self.calls:
            self.calls += text
            text = ""
        elif self._has_tools:
            text, start, rest = text.partition(tool_calls.START)
            self.calls = start + rest
        self.num_characters += len(text)
        return text

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_ends=False)


def _started(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of a text that starts a stop string."""
    longest = max((min(len(stop) - 1, len(text)) for stop in stops), default=0)
    for size in range(longest, 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops if len(stop) > size):
            return size
    return 0


def generated(
    wanted: Wanted,
    choices: Sequence[Choice],
    version: int,
    prompt_logprobs: Sequence[float] | None,
) -> Json:
    """Return the answer of the token endpoint."""
    answer = {
        "request_id": wanted.name,
        "choices": [_generated_choice(wanted, choice) for choice in choices],
        "usage": usage(wanted, choices),
        "weight_version": version,
    }
    [prompt] = wanted.prompts
    if wanted.shows_ids:
        answer["prompt_token_ids"] = list(prompt)
    if prompt_logprobs is not None:
        pairs = zip(prompt[1:], prompt_logprobs, strict=True)
        entries = [{str(i): {"logprob": _finite(logprob)}} for i, logprob in pairs]
        answer["prompt_logprobs"] = [None, *entries]
    return answer


def _generated_choice(wanted: Wanted, choice: Choice) -> Json:
    content = None
    if wanted.logprobs:
        pairs = zip(choice.token_ids, choice.logprobs, strict=True)
        content = {"content": [{"token": f"token_id:{i}", "logprob": x} for i, x in pairs]}
    return {
        "index": choice.index,
        "token_ids": choice.token_ids,
        "logprobs": content,
        "finish_reason": choice.finish,
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NO_LOGPROB


def usage(wanted: Wanted, choices: Sequence[Choice]) -> Json:
    """Return the numbers of tokens; each prompt counts once."""
    prompt = sum(map(len, wanted.prompts))
    response = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": response,
        "total_tokens": prompt + response,
    }


def as_event(content: Mapping[str, Any]) -> bytes:
    """Return an object as a server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"

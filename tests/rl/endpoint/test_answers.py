"""Texts of streams are those of whole answers, for any cut into tokens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.rl.endpoint.answers import Choice, Writer, generated
from reprise.rl.endpoint.bodies import Wanted
from reprise.spec.config import SamplingConfig

END = 256


class TokenBytes:
    def of(self, token):
        return b"<end>" if token == END else bytes([token])


class Words:
    """A tokenizer whose tokens are bytes, so that most characters are several."""

    eos_token_ids = (END,)
    token_bytes = TokenBytes()

    def decode(self, ids, skip_ends=True):
        assert not skip_ends
        return b"".join(map(self.token_bytes.of, ids)).decode("utf-8", "replace")


def asked(**more):
    settings = {"name": "a", "model": None, "prompts": [(5, 6)], "samplings": [SamplingConfig()]}
    settings |= {"n": 1, "seed": None, "logprobs": True, "shows_ids": True, "streams": True}
    return Wanted(**settings | more)


def streamed(one, ids, cuts, finish="stop"):
    """Return the text of the events for these cuts of a response, and of the whole answer."""
    logprobs = [-0.5] * len(ids)
    whole = Writer(one, "m", Words(), is_chat=False)
    text = whole.whole([Choice(0, ids, logprobs, finish)], 3)["choices"][0]["text"]
    writer = Writer(one, "m", Words(), is_chat=False)
    parts, first = "", 0
    ends = [*sorted({x % len(ids) for x in cuts} - {0}), len(ids)]
    for end in ends:
        is_last = end == len(ids)
        choice = Choice(0, ids[:end], logprobs[:end], finish if is_last else None)
        event = json.loads(writer.event(choice, first, 3).removeprefix(b"data: "))
        parts += event["choices"][0]["text"]
        assert event["choices"][0]["token_ids"] == ids[first:end]
        first = end
    return parts, text


@given(
    text=st.text("aé€𝄞x\ufffd", min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 50), max_size=8),
    stops=st.lists(st.text("aé€x", min_size=1, max_size=3), max_size=2),
)
def test_the_parts_of_a_stream_are_the_whole_text(text, cuts, stops):
    """Also with stop strings, which engines find in bytes: the text ends before the first."""
    ids = [*text.encode(), END]
    one = asked(stops=tuple(stops))
    parts, whole = streamed(one, ids, cuts)
    ends = [text.find(stop) for stop in stops if stop in text]
    assert parts == whole == text[: min(ends, default=len(text))]


def test_a_cut_character_at_the_end_is_shown_at_last():
    ids = [*"a€".encode()][:-1]
    parts, whole = streamed(asked(), ids, [1, 2], "length")
    assert parts == whole == "a\ufffd"


def test_own_end_tokens_are_left_out_of_the_text():
    ids = [*b"abc"]
    assert streamed(asked(stop_ids=frozenset([ord("c")])), ids, [1])[1] == "ab"
    assert streamed(asked(stop_ids=frozenset([ord("b")])), ids, [1])[1] == "abc"


def test_names_of_tokens_are_ids_if_asked():
    choice = Choice(0, [*b"ab"], [-1.0, -2.0], "stop")
    one = asked(names_ids=True, top_logprobs=True)
    found = Writer(one, "m", Words(), is_chat=False).whole([choice], 0)["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:97", "token_id:98"]
    assert found["top_logprobs"] == [{"token_id:97": -1.0}, {"token_id:98": -2.0}]
    found = Writer(one, "m", Words(), is_chat=True).whole([choice], 0)["choices"][0]["logprobs"]
    assert found["content"][0]["token"] == "token_id:97" and found["content"][0]["bytes"] == [97]


CALL = '<tool_call>{"name": "add", "arguments": {"a": "é"}}</tool_call>'


def chat_of(one, text, cuts, finish="stop"):
    """Return the message and the finish of a stream with these cuts, and of a whole answer."""
    ids = [*text.encode(), END]
    logprobs = [-0.5] * len(ids)
    whole = Writer(one, "m", Words(), is_chat=True)
    choice = whole.whole([Choice(0, ids, logprobs, finish)], 3)["choices"][0]
    writer = Writer(one, "m", Words(), is_chat=True)
    message = {"role": None, "content": ""}
    first = 0
    for end in [*sorted({x % len(ids) for x in cuts} - {0}), len(ids)]:
        last = finish if end == len(ids) else None
        event = writer.event(Choice(0, ids[:end], logprobs[:end], last), first, 3)
        [shown] = json.loads(event.removeprefix(b"data: "))["choices"]
        delta = shown["delta"]
        message["role"] = message["role"] or delta["role"]
        message["content"] += delta["content"]
        if calls := delta.get("tool_calls"):
            assert [call.pop("index") for call in calls] == [*range(len(calls))]
            message["tool_calls"] = calls
        first = end
    return (message, shown["finish_reason"]), (choice["message"], choice["finish_reason"])


@given(
    pieces=st.lists(st.sampled_from(["a", "é", "<tool_call>", "<to", CALL, "]", "{"]), max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    has_tools=st.booleans(),
    stops=st.sampled_from([(), ("]",), ("<tool_call>",)]),
)
def test_calls_of_a_stream_are_those_of_the_whole_answer(pieces, cuts, has_tools, stops):
    """Every character before the first call is content; a call that cannot be read is content."""
    text = "".join(pieces)
    one = asked(has_tools=has_tools, stops=stops)
    (message, finish), (whole, whole_finish) = chat_of(one, text, cuts)
    message["content"] = (
        message["content"] or None if "tool_calls" in message else message["content"]
    )
    assert (message, finish) == (whole, whole_finish)
    shown = text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
    if "tool_calls" in message:
        assert has_tools and finish == "tool_calls"
        assert shown.partition("<tool_call>")[0] == (message["content"] or "")
    else:
        assert message["content"] == shown and finish == "stop"


def test_calls_of_tools_are_read():
    (message, finish), _ = chat_of(asked(has_tools=True), f"I add. {CALL}\n{CALL}", [3, 9, 20])
    assert message["content"] == "I add. " and finish == "tool_calls"
    assert [call["id"] for call in message["tool_calls"]] == ["call-a-0-0", "call-a-0-1"]
    function = message["tool_calls"][0]["function"]
    assert function["name"] == "add" and json.loads(function["arguments"]) == {"a": "é"}
    assert chat_of(asked(has_tools=True), CALL, [], "length")[0][1] == "length"


@pytest.mark.parametrize("logprob", [-2.0, -float("inf")])
def test_prompt_logprobs_are_numbers_of_json(logprob):
    choice = Choice(0, [7], [-1.0], "length")
    answer = generated(asked(), [choice], 5, [logprob])
    assert answer["prompt_logprobs"] == [None, {"6": {"logprob": max(logprob, -9999.0)}}]
    assert answer["weight_version"] == 5 and answer["prompt_token_ids"] == [5, 6]
    json.dumps(answer, allow_nan=False)

"""What bodies mean, and that no field which changes an answer is left out without a word."""

from __future__ import annotations

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.rl.endpoint import bodies

CONTEXT = 32


class Words:
    """A tokenizer of which each character is a token."""

    eos_token_ids = (1,)

    def encode_prompt(self, text):
        return [ord(x) for x in text]

    def apply_chat_template(self, messages, tools=(), **variables):
        self.given = types.SimpleNamespace(messages=messages, tools=tools, variables=variables)
        return [7, 8, 9]


def generation(**params):
    return bodies.generation({"token_ids": [1, 2], "sampling_params": params}, CONTEXT)


def completion(**body):
    return bodies.completion({"prompt": "ab"} | body, CONTEXT, Words())


def chat(words=None, **body):
    message = {"role": "user", "content": "hi"}
    return bodies.chat({"messages": [message]} | body, CONTEXT, words or Words())


def test_a_body_without_settings_has_temperature_1_and_the_rest_of_the_context():
    for asked, room in ((generation(), 30), (completion(), 30), (chat(), 29)):
        [sampling] = asked.samplings
        found = sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens
        assert found == (1.0, 1.0, 0, room)
        assert (asked.n, asked.seed, asked.logprobs, asked.streams) == (1, None, False, False)
        assert asked.model is None and asked.name


def test_settings_are_read():
    asked = generation(temperature=0, top_p=0.5, top_k=-1, seed=3, max_tokens=4, n=2, logprobs=0)
    [sampling] = asked.samplings
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 0)
    assert (asked.n, asked.seed, asked.logprobs, sampling.max_new_tokens) == (2, 3, True, 4)
    asked = completion(stop=["x", "y"], stop_token_ids=[5], stream=True, return_token_ids=True)
    assert asked.samplings[0].stop == asked.stops == ("x", "y")
    assert asked.samplings[0].stop_ids == (5,) and asked.stop_ids == {5}
    assert asked.streams and asked.shows_ids and not asked.shows_usage
    assert completion(stop="x").stops == ("x",)
    assert completion(max_completion_tokens=3).samplings[0].max_new_tokens == 3
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    assert completion(**usage).shows_usage


def test_prompts_are_texts_or_ids_or_lists_of_them():
    for prompt, expected in (
        ("ab", [(97, 98)]),
        ([5, 6], [(5, 6)]),
        (["a", "b"], [(97,), (98,)]),
        ([[5], "a"], [(5,), (97,)]),
    ):
        assert completion(prompt=prompt).prompts == expected
    for prompt in (None, 3, "", [], [""], [[]], [5, "a"], [None], {}, [[True]], [[-1]]):
        with pytest.raises(ValueError, match="prompt: expected"):
            completion(prompt=prompt)
    with pytest.raises(ValueError, match="at most 1024 responses, got 600 to each of 2 prompts"):
        completion(prompt=["a", "b"], n=600)


def test_messages_are_given_to_the_template():
    words = Words()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "f"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}] * 2},
        {"role": "user", "content": "b", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": {}},
        {"role": "tool", "content": "", "tool_call_id": "c"},
        {"role": "user", "content": "c"},
    ]
    kwargs = {"enable_thinking": False}
    chat(words, messages=messages, tools=[tool], tool_choice="auto", chat_template_kwargs=kwargs)
    parsed = call | {"function": {"name": "f", "arguments": {"a": 1}}}
    assert words.given.messages == [
        {"role": "system", "content": "aa"},
        {"role": "user", "content": "b", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [parsed]},
        {"role": "tool", "content": "", "tool_call_id": "c"},
        {"role": "user", "content": "c"},
    ]
    assert words.given.tools == [tool] and words.given.variables == kwargs
    assert chat(words, tools=[tool]).has_tools
    assert not chat(words, tools=[tool], tool_choice="none").has_tools
    assert words.given.tools == []


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("x", "expected an object"),
        ({"role": "human", "content": "x"}, "expected a role of system, user"),
        ({"role": "user"}, "expected a content, got none"),
        ({"role": "user", "content": 3}, "expected a text, or parts"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "neither images"),
        ({"role": "user", "content": "x", "weight": 0.5}, "expected fields of content, name"),
        ({"role": "user", "content": "x", "name": 3}, "name: expected str"),
        ({"role": "assistant", "tool_calls": [{"id": 3}]}, "expected tool_calls with functions"),
    ],
)
def test_other_messages_are_refused(message, text):
    with pytest.raises(ValueError, match=text):
        chat(messages=[message])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"logprobs": 2}, "logprobs: expected 0 or 1, got 2: this server has the log-probs of dra"),
        ({"temprature": 1}, "'temprature': expected a field of .*temperature"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: expected 0, got 0.5: .*leave it out"),
        ({"logit_bias": {"5": 1}}, "logit_bias: expected {}, got"),
        ({"echo": True}, "echo: expected false, got True"),
        ({"echo": 0}, "echo: expected false, got 0"),
        ({"seed": -1}, "seed: expected 0 to 2147483647, got -1"),
        ({"seed": 2**31}, "seed: expected 0 to 2147483647"),
        ({"n": 0}, "n: expected 1 to 1024, got 0"),
        ({"max_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "expected the same as max_tokens"),
        ({"top_p": 0}, "top_p must be in"),
        ({"stop": 3}, "stop: expected a string or a list of strings"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stream": "yes"}, "stream: expected bool"),
        ({"stream_options": {"include_usage": True}}, "expected stream=true with it"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options: expected include_usage"),
        ({"request_id": "a b"}, "request_id: expected 1 to 128 ASCII"),
        ({"prompt": "a" * 32}, "fewer than 32 tokens, which is the maximum context length"),
        ({"model": 3}, "model: expected str"),
    ],
)
def test_what_changes_an_answer_is_obeyed_or_refused(body, text):
    with pytest.raises(ValueError, match=text):
        completion(**body)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"top_logprobs": 1}, "top_logprobs: expected logprobs=true"),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs: expected 0 or 1, got 5"),
        ({"logprobs": 1}, "logprobs: expected bool"),
        ({"tools": [{"type": "custom"}]}, "tools: expected"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools: expected the name"),
        ({"tool_choice": "required"}, "no call can be forced"),
        ({"response_format": {"type": "json_object"}}, "response_format: expected"),
        ({"prompt": "x"}, "'prompt': expected a field of .*messages"),
    ],
)
def test_settings_of_a_chat_are_obeyed_or_refused(body, text):
    with pytest.raises(ValueError, match=text):
        chat(**body)


def test_a_body_of_ids_has_its_own_fields():
    with pytest.raises(ValueError, match="token_ids: expected a list of token ids"):
        bodies.generation({"token_ids": [2**31]}, CONTEXT)
    with pytest.raises(ValueError, match="stream: expected false, got true: this route answers"):
        bodies.generation({"token_ids": [1], "stream": True}, CONTEXT)
    with pytest.raises(ValueError, match="prompt_logprobs: expected 0 or 1, got 5"):
        generation(prompt_logprobs=5)
    with pytest.raises(ValueError, match="min_p: expected 0, got 0.1"):
        generation(min_p=0.1)


def test_neutral_and_null_fields_are_accepted():
    neutral = {name: values[0] for name, values in bodies.NEUTRAL.items()}
    ignored = dict.fromkeys(bodies.IGNORED, "x")
    assert completion(**neutral, **ignored, anything=None, logprobs=None).logprobs is False
    assert generation(skip_special_tokens=True, detokenize=False, min_p=0.0).n == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted({*bodies.CHAT, *bodies.COMPLETION, *bodies.PARAMS, *bodies.GENERATE, "echo"})


@given(body=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6))
def test_any_json_is_a_request_or_a_value_error(body):
    for read in (
        lambda: bodies.generation(body, CONTEXT),
        lambda: bodies.generation({"token_ids": [1], "sampling_params": body}, CONTEXT),
        lambda: bodies.completion({"prompt": "a"} | body, CONTEXT, Words()),
        lambda: bodies.chat(body, CONTEXT, Words()),
        lambda: chat(**body),
    ):
        try:
            asked = read()
        except ValueError as error:
            assert str(error) and len(str(error)) < 2000
        else:
            assert len(asked.samplings) == len(asked.prompts) >= 1

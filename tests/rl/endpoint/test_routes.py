"""The token endpoint and OpenAI's routes over HTTP, beside samples of the policy in process."""

from __future__ import annotations

import concurrent.futures
import copy
import json
import socket
import time
import urllib.request

import numpy as np
import pytest
from endpoint_client import TEMPLATE, ask, connect, events
from served import KEY, NAME, call, retrieve, serve

from reprise.rl.gin.loader import load
from reprise.rl.http import wire
from reprise.rl.python import api
from reprise.rl.settings.config import TrainConfig
from reprise.spec.config import SamplingConfig
from tests.rl.server.test_client import SETTINGS

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
IDS = [4, 5, 6, 7]
PARAMS = {"temperature": 0.9, "top_p": 0.95, "top_k": 12, "seed": 7, "max_tokens": 9}
SAMPLING = SamplingConfig(temperature=0.9, top_p=0.95, top_k=12, max_new_tokens=9)


@pytest.fixture(scope="module")
def policy(tiny, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    directory = load(TrainConfig, [tiny]).policy.directory
    return api.Policy(directory, *SETTINGS, {"Task.chat_template": str(file)})


@pytest.fixture(scope="module")
def stream(policy):
    return policy.stream(2)


@pytest.fixture(scope="module")
def address(policy, stream, tmp_path_factory):
    served = copy.copy(policy)
    served.stream = lambda places: stream
    with serve(served, tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture(scope="module")
def adapter(policy, address):
    """A checkpoint to sample from, and the same adapter in process, after an update."""
    session = json.loads(call(address, "create_session", {})[1])["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": NAME}
    answer = call(address, "create_model", body | {"lora_config": {"rank": 4, "seed": 3}})[1]
    run = retrieve(address, json.loads(answer)["request_id"])["model_id"]
    body = {"model_id": run, "seq_id": 1, "path": "one"}
    answer = call(address, "save_weights_for_sampler", body)[1]
    return retrieve(address, json.loads(answer)["request_id"])["path"]


def base(policy):
    """The policy of a server without an adapter: its adapter has no effect."""
    return policy.with_new_adapter()


def test_generate_gives_the_tokens_of_samples_of_the_policy(policy, address):
    """Tokens and log-probs are equal to the bit, for several responses too."""
    [wanted] = base(policy).sample([IDS], 3, SAMPLING, seed=7)
    params = PARAMS | {"n": 3, "logprobs": 1, "prompt_logprobs": 0, "skip_special_tokens": False}
    body = {"model": NAME, "token_ids": IDS, "sampling_params": params, "cache_salt": "a"}
    status, answer = ask(address, GENERATE, body | {"priority": 1, "request_id": "mine"})
    assert status == 200 and answer["request_id"] == "mine" and answer["weight_version"] == 0
    for choice, sample in zip(answer["choices"], wanted, strict=True):
        assert choice["token_ids"] == sample.token_ids
        content = choice["logprobs"]["content"]
        assert [x["token"] for x in content] == [f"token_id:{i}" for i in sample.token_ids]
        found = np.array([x["logprob"] for x in content], np.float32)
        np.testing.assert_array_equal(found, sample.logprobs)
        assert choice["finish_reason"] == ("length" if sample.is_truncated else "stop")
    first, *rest = answer["prompt_logprobs"]
    assert first is None and [int(i) for x in rest for i in x] == IDS[1:]
    [scored] = base(policy).forward([api.Datum(IDS[:-1], IDS[1:])])
    np.testing.assert_allclose([y["logprob"] for x in rest for y in x.values()], scored, 1e-5)
    assert answer["usage"]["prompt_tokens"] == 4


def test_without_a_limit_a_response_has_the_rest_of_the_context(policy, address):
    body = {"token_ids": IDS, "sampling_params": {"seed": 1, "n": 16, "temperature": 3.0}}
    answer = ask(address, GENERATE, body)[1]
    longest = policy.config.longest_tokens - len(IDS)
    lengths = {x["finish_reason"]: len(x["token_ids"]) for x in answer["choices"]}
    assert lengths["length"] == longest and answer["choices"][0]["logprobs"] is None


def test_without_a_seed_each_request_has_new_noise(address):
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 12}, "request_id": "same"}
    answers = [ask(address, GENERATE, body)[1]["choices"][0]["token_ids"] for _ in range(4)]
    assert len({str(x) for x in answers}) > 1


def test_models_are_the_policy_and_its_adapters(policy, address, adapter):
    status, answer = ask(address, "/v1/models")
    first, *rest = answer["data"]
    assert status == 200 and first["id"] == NAME
    assert first["max_model_len"] == policy.config.longest_tokens
    assert adapter in [model["id"] for model in rest]
    assert ask(address, f"/v1/models/{adapter}")[1]["parent"] == NAME
    status, answer = ask(address, "/v1/models/other")
    assert status == 404 and answer["error"]["code"] == "model_not_found"


def test_adapters_are_models_whose_answers_name_their_updates(policy, address, adapter):
    """A version is that of the checkpoint, also once its folder has been loaded."""
    run = adapter.removeprefix("tinker://").partition("/")[0]
    data = wire.make("ForwardBackwardRequest", model_id=run, seq_id=2, loss_fn="cross_entropy")
    datum = data.data.add()
    datum.model_input.add().encoded_text.tokens = wire.int32_bytes(IDS[:-1])
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype, tensor.dense = wire.INT64, np.array(IDS[1:], "<i8").tobytes()
    headers = {"Content-Type": wire.CONTENT_TYPE}
    url = f"{address}/api/v1/forward_backward"
    sent = urllib.request.Request(url, data.SerializeToString(), headers)
    urllib.request.urlopen(sent).close()
    adam = {"learning_rate": 0.5}
    call(address, "optim_step", {"model_id": run, "seq_id": 3, "adam_params": adam})
    body = {"model_id": run, "seq_id": 4, "path": "two"}
    answer = call(address, "save_weights_for_sampler", body)[1]
    path = retrieve(address, json.loads(answer)["request_id"])["path"]
    params = {"max_tokens": 12, "seed": 3, "n": 2}
    found = {}
    for model in (NAME, adapter, path):
        body = {"model": model, "token_ids": IDS, "sampling_params": params}
        answer = ask(address, GENERATE, body)[1]
        found[model] = answer["weight_version"], [x["token_ids"] for x in answer["choices"]]
    assert [version for version, _ in found.values()] == [0, 0, 1]
    assert found[NAME] == found[adapter] and found[path][1] != found[NAME][1]


def test_a_completion_has_the_text_and_the_ids_of_a_sample(policy, address):
    """Of several prompts, each n times."""
    prompts = ["1+1=", "2+3="]
    wanted = base(policy).sample(prompts, 2, SAMPLING, seed=7)
    body = PARAMS | {"model": NAME, "prompt": prompts, "n": 2, "return_token_ids": True}
    answer = ask(address, COMPLETIONS, body | {"logprobs": 1})[1]
    assert answer["object"] == "text_completion" and answer["weight_version"] == 0
    samples = [sample for group in wanted for sample in group]
    for choice, sample in zip(answer["choices"], samples, strict=True):
        assert (choice["token_ids"], choice["text"]) == (sample.token_ids, sample.text)
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == sample.logprobs.tolist()
        assert [list(x.values()) for x in logprobs["top_logprobs"]] == [
            [x] for x in sample.logprobs.tolist()
        ]
    assert answer["prompt_token_ids"] == [list(group[0].prompt_ids) for group in wanted]
    ids = {"prompt": list(wanted[0][0].prompt_ids), "n": 2, "logprobs": None}
    one = ask(address, COMPLETIONS, body | ids)[1]
    assert [x["text"] for x in one["choices"]] == [x.text for x in wanted[0]]
    assert one["usage"]["prompt_tokens"] == len(one["prompt_token_ids"])


def chat(**more):
    return PARAMS | {"model": NAME, "messages": [{"role": "user", "content": "1+1"}]} | more


def test_a_chat_renders_the_template_with_tools(policy, address):
    tool = {"type": "function", "function": {"name": "abc", "parameters": {}}}
    for more, text in (({}, "1+1="), ({"tools": [tool]}, "abc1+1=")):
        ids = policy.tokenizer.encode(text)
        [[wanted]] = base(policy).sample([ids], 1, SAMPLING, seed=7)
        asked = chat(return_token_ids=True, logprobs=True, top_logprobs=1, **more)
        answer = ask(address, CHAT, asked)[1]
        [choice] = answer["choices"]
        assert answer["object"] == "chat.completion" and answer["prompt_token_ids"] == ids
        assert choice["message"] == {"role": "assistant", "content": wanted.text}
        assert choice["token_ids"] == wanted.token_ids
        entries = choice["logprobs"]["content"]
        assert [x["logprob"] for x in entries] == wanted.logprobs.tolist()
        assert "".join(bytes(x["bytes"]).decode() for x in entries).startswith(wanted.text)
        assert [x["top_logprobs"][0]["logprob"] for x in entries] == wanted.logprobs.tolist()


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stream_has_the_parts_of_the_whole_answer(address, is_chat):
    path, body = CHAT, chat(n=3, return_token_ids=True, logprobs=True)
    if not is_chat:
        path, body = COMPLETIONS, body | {"prompt": ["1+1=", "2="], "logprobs": 1}
        del body["messages"]
    whole = ask(address, path, body)[1]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = events(address, path, body | options)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert {part["weight_version"] for part in parts} == {0}
    assert len(parts) > len(whole["choices"])
    for choice in whole["choices"]:
        own = [x for part in parts for x in part["choices"] if x["index"] == choice["index"]]
        assert [i for x in own for i in x["token_ids"]] == choice["token_ids"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert all(x["finish_reason"] is None for x in own[:-1])
        if is_chat:
            assert own[0]["delta"]["role"] == "assistant"
            text = "".join(x["delta"]["content"] for x in own)
            assert text == choice["message"]["content"]
            entries = [y for x in own for y in x["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]
        else:
            assert "".join(x["text"] for x in own) == choice["text"]
            for name, values in choice["logprobs"].items():
                if name != "text_offset":
                    streamed = [y for x in own for y in x["logprobs"][name]]
                    assert streamed == values


def test_a_stop_string_ends_the_text_before_it(policy, address):
    """The ids go on to the token that completes it."""
    [samples] = base(policy).sample(["1+1="], 8, SamplingConfig(max_new_tokens=9), seed=7)
    sample = max(samples, key=lambda sample: len(sample.text))
    stop = sample.text[3:5]
    before = sample.text[: sample.text.index(stop)]
    body = {"prompt": "1+1=", "n": 8, "max_tokens": 9, "seed": 7, "stop": [stop]}
    answer = ask(address, COMPLETIONS, body | {"return_token_ids": True})[1]
    choice = answer["choices"][samples.index(sample)]
    assert (choice["text"], choice["finish_reason"]) == (before, "stop")
    assert choice["token_ids"] == sample.token_ids[: len(choice["token_ids"])]
    parts = events(address, COMPLETIONS, body | {"stream": True})
    mine = [x for part in parts for x in part["choices"] if x["index"] == choice["index"]]
    assert "".join(x["text"] for x in mine) == before
    ended = body | {"stop": None, "stop_token_ids": [sample.token_ids[2]]}
    one = ask(address, COMPLETIONS, ended)[1]["choices"][choice["index"]]
    assert sample.text.startswith(one["text"]) and len(one["text"]) <= 2


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_rows(address, stream, streams):
    """A thousand responses are dropped within a few rounds."""
    body = {"prompt": [IDS] * 8, "n": 128, "temperature": 3.0, "stream": streams}
    connection = connect(address)
    before = stream.stats.tokens
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    if streams:
        connection.getresponse().read(20)
    while stream.stats.tokens == before:
        time.sleep(0.001)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    while stream.has_work:
        time.sleep(0.001)
    assert stream.stats.tokens - before < 8 * 128 * 4


def test_many_clients_share_rounds_and_have_their_own_tokens(address):
    def one(seed):
        params = {"max_tokens": 10, "seed": seed, "n": 2}
        answer = ask(address, GENERATE, {"token_ids": IDS, "sampling_params": params})[1]
        return [x["token_ids"] for x in answer["choices"]]

    alone = [one(seed) for seed in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        assert list(pool.map(one, range(12))) == alone


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        (GENERATE, {"token_ids": [9999]}, 400, "token 9999, outside the policy's vocabulary"),
        (GENERATE, {"token_ids": [1] * 40}, 400, "fewer than 32 tokens, which is the maximum"),
        (GENERATE, {"token_ids": []}, 400, "an empty prompt: expected at least one token"),
        (GENERATE, {"token_ids": IDS, "model": "other"}, 404, "expected the model 'reprise/tiny'"),
        (
            GENERATE,
            {"token_ids": IDS, "sampling_params": {"max_tokens": 31}},
            400,
            "max_tokens: expected at most 28 after a prompt of 4 tokens",
        ),
        (COMPLETIONS, {"prompt": "1", "stream": True, "max_tokens": 99}, 400, "at most 31 after"),
        (COMPLETIONS, {"prompt": "1", "stop": "\n\n"}, 200, ""),
        (CHAT, {"messages": []}, 400, "expected at least one message"),
        (CHAT, b"[" * 100_000, 400, "expected JSON"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogate"),
    ],
)
def test_errors_are_sentences_in_the_form_of_openai(address, path, body, status, text):
    found, answer = ask(address, path, body)
    assert found == status, answer
    if status != 200:
        assert text in answer["error"]["message"] and answer["error"]["type"].endswith("_error")


def test_the_key_is_a_bearer_token(policy, tmp_path):
    with serve(policy, tmp_path, KEY) as address:
        assert ask(address, "/v1/models", Authorization=f"Bearer {KEY}")[0] == 200
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": f"Basic {KEY}"}):
            status, answer = ask(address, "/v1/models", **headers)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        status, answer = ask(address, "/v1/models", Host="evil.example")
        assert status == 421 and "expected the Host" in answer["error"]["message"]
        status, _ = ask(address, GENERATE, {"token_ids": IDS}, Origin="http://evil.example")
        assert status == 403

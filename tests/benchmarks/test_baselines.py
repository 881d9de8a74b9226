"""Drivers of other samplers, with stand-ins for packages that are not installed here."""

import types

import pytest

from benchmarks.baselines import protocol, vllm_generate
from benchmarks.shape import Shape

SHAPE = Shape(vocab=50, batch=3, prompt=4, new_tokens=5, cache=9)


class FakeLLM:
    """Answers each prompt with its first id, counted up."""

    def __init__(self, **settings):
        self.settings = settings

    def generate(self, prompts, settings, use_tqdm):
        assert self.settings["max_model_len"] == SHAPE.cache and settings.ignore_eos
        answers = []
        for prompt in prompts:
            first = prompt["prompt_token_ids"][0]
            ids = tuple(range(first, first + settings.max_tokens))
            steps = [{token: types.SimpleNamespace(logprob=-float(token))} for token in ids]
            one = types.SimpleNamespace(token_ids=ids, logprobs=steps)
            answers.append(types.SimpleNamespace(outputs=[one]))
        return answers


def test_vllm_answers_with_tokens_and_their_logprobs(monkeypatch):
    fake = types.ModuleType("vllm")
    fake.LLM = FakeLLM
    fake.SamplingParams = lambda **settings: types.SimpleNamespace(**settings)
    monkeypatch.setitem(__import__("sys").modules, "vllm", fake)
    system = vllm_generate.VLLM()
    found = protocol._prepare(system, SHAPE, {"policy": "p", "variant": system.variants[0]})
    assert found["warm_call_s"] >= 0, "each row has as many tokens as were asked for"
    tokens, logprobs = system.generate(1, greedy=False)
    assert [row[0] for row in tokens] == [prompt[0] for prompt in SHAPE.prompts()]
    assert logprobs == [[-float(token) for token in row] for row in tokens]
    fake.LLM.generate = lambda *given, **options: []
    with pytest.raises(RuntimeError, match="vllm: expected 3 rows of 5 tokens"):
        protocol._timed(system, SHAPE, 0)

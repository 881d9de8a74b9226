"""A rollout without end: adapters share rounds, dialogues continue their rows, nothing differs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from loop_runs import counted_compilations

from reprise.rl.gin.loader import load
from reprise.rl.python import api
from reprise.rl.python.stream import SampleRequest, Stream
from reprise.rl.settings.config import TrainConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Source
from reprise.spec.round_times import StepSeconds
from reprise.spec.verification.sampling import NOISE_NAMES, noise_names

SIZES = (
    *(
        "Policy.lora_rank=16",
        "Policy.lora_alpha=64",
        "Policy.lora_targets=('attention','mlp','head')",
        "Mesh.data=1",
    ),
    *("Rollout.max_prompt_tokens=44", "Sampling.max_new_tokens=16", "Engine.slots=8"),
    *("Engine.min_slots=8", "Engine.page_tokens=8", "Trainer.micro_batch_tokens=128"),
    *("Engine.prefill_rows=2", "Engine.prefill_chunk_tokens=8"),
)


@pytest.fixture(scope="module")
def policy(tiny):
    return api.Policy(load(TrainConfig, [tiny]).policy.directory, *SIZES)


@pytest.fixture(scope="module")
def stream(policy):
    """A stream of two places, which all tests share: programs compile once."""
    stream = policy.stream(2)
    yield stream
    stream.close()


def moved(policy, seed, bad=None):
    """A sampler whose adapter is far from the others; one number of its last weight is `bad`."""
    twin = policy.with_new_adapter(seed)
    noise = np.random.default_rng(seed)
    with jax.default_device(None):
        params = jax.tree.map(
            lambda x: x + 0.3 * noise.normal(size=x.shape).astype(np.float32), twin._state.params
        )
    if bad is not None:
        *leaves, last = jax.tree.leaves(params)
        tree = jax.tree.structure(params)
        params = jax.tree.unflatten(tree, [*leaves, last.at[(0,) * last.ndim].set(bad)])
    twin._state = api.init_state(params, api.make_optimizer(twin._learner.recipe.optimizer, 1))
    return twin.sampler()


@pytest.fixture(scope="module")
def drafting(policy):
    """A stream whose requests have drafts in every round."""
    stream = with_budget(policy, "fixed:3")
    yield stream
    stream.close()


def with_budget(policy, budget, lines=None):
    """A stream on the settings of `policy`, with drafts."""
    config, rollouts = policy.config, copy.copy(policy._rollouts)
    speculation = dataclasses.replace(config.speculation, budget=budget)
    rollouts.config = dataclasses.replace(config, speculation=speculation)
    return Stream(rollouts, policy._learner.base, 2, [].append if lines is None else lines.append)


def drawn(stream: Stream, *requests: SampleRequest, late=()):
    """Return each request's responses; a late one joins after each of some steps."""
    found, late = {}, list(late)
    requests = list(requests)
    for request in requests:
        stream.add(request, functools.partial(found.__setitem__, request))
    while stream.has_work or late:
        stream.step()
        if late:
            request = late.pop(0)
            requests.append(request)
            stream.add(request, functools.partial(found.__setitem__, request))
    return [found[request] for request in requests]


def run(stream: Stream, *requests: SampleRequest, late=()):
    """Return the tokens of each request's responses."""
    return [[x.token_ids for x in some] for some in drawn(stream, *requests, late=late)]


def test_requests_are_functions_of_themselves(policy, stream):
    """Alone, together, of several adapters, or joining later."""
    samplers = [policy.sampler(), moved(policy, 1), moved(policy, 2)]
    samplings = [SamplingConfig(max_new_tokens=9), SamplingConfig(0.5, max_new_tokens=12)]
    requests = [
        SampleRequest(samplers[i % 3], (1, 2, 3, 4 + i % 2), 3, samplings[i % 2], f"{i}")
        for i in range(9)
    ]
    together = run(stream, *requests)
    alone = [run(stream, request)[0] for request in requests]
    assert together == alone
    assert run(stream, *requests[:4], late=requests[4:]) == alone
    assert len({str(tokens) for tokens in alone}) == 9 and all(len(x) == 3 for x in alone)


def test_no_two_responses_of_a_request_share_their_noise():
    """Hashes of 31 bits, one for each response, gave two of these 1,024 the same."""
    request = SampleRequest(None, (1, 2), 1024, SamplingConfig(), "seed 12")
    requests = request.requests(number=5, adapter=0)
    assert len(set(noise_names(np.array([r.request_id for r in requests])))) == 1024
    assert [r.request_id // NOISE_NAMES for r in requests] == list(range(5, 1029))
    other = SampleRequest(None, (1, 2), 4, SamplingConfig(), "seed 13").requests(0, 0)
    assert requests[0].request_id % NOISE_NAMES != other[0].request_id % NOISE_NAMES


def test_drafts_change_no_token(policy, stream, drafting):
    """Of siblings in one request and in several, of earlier responses, and of another adapter."""
    samplers = [policy.sampler(), moved(policy, 1)]
    sampling = SamplingConfig(max_new_tokens=14)
    for turn in range(6):
        requests = [
            SampleRequest(
                samplers[i % 2], (1, 2, 3, 4 + i // 4), 1 + i % 3, sampling, f"{turn}.{i}"
            )
            for i in range(8)
        ]
        assert run(drafting, *requests) == run(stream, *requests)
    accepted = drafting.stats.accepted_by_source
    assert accepted[Source.GROUP] > 0 and accepted[Source.HISTORY] > 0
    assert not drafting._history._groups and not drafting._history._trees


def test_after_its_warm_up_a_stream_compiles_nothing(policy):
    stream, samplers = with_budget(policy, "goodput"), [policy.sampler(), moved(policy, 1)]
    done = list[tuple[int, int]]()
    stream.warm_up(lambda *counts: done.append(counts))
    assert done[-1][0] == done[-1][1] > 5
    cases = [
        ((1, 2, 3), SamplingConfig(max_new_tokens=16)),
        ((4,) * 40, SamplingConfig(0.0, max_new_tokens=5)),
    ]
    with counted_compilations() as compiled:
        for sampler in samplers:
            for i, (prompt, sampling) in enumerate(cases):
                [answers] = run(stream, SampleRequest(sampler, prompt, 9, sampling, f"{i}"))
                longer = (*prompt, *answers[0], 3)
                if len(longer) < 50:
                    greedy = SamplingConfig(0.0, max_new_tokens=4)
                    run(stream, SampleRequest(sampler, longer, 1, greedy, "turn"))
    assert not compiled
    stream.close()


def test_drafts_that_lose_time_end_when_no_request_runs(policy, stream, monkeypatch):
    def loses(rounds, times, has_history):
        return StepSeconds(1.0, -0.1, {}, has_history)

    monkeypatch.setattr("reprise.rl.python.stream.step_seconds", loses)
    monkeypatch.setattr("reprise.rl.python.stream.LOOK_AFTER", 1)
    lines = list[str]()
    drafting = with_budget(policy, "goodput", lines)
    for turn in range(5):
        request = SampleRequest(
            policy.sampler(), (7, 8), 6, SamplingConfig(max_new_tokens=12), f"{turn}"
        )
        assert run(drafting, request) == run(stream, request)
        assert drafting._has_drafts == (turn < 3), "three batches of rounds have lost before"
    assert lines == [
        "drafts have cost about 10.0% of 3.0 s of rounds: they are turned off "
        "(Speculation.losing_steps)"
    ]
    assert len(drafting._history) == 0
    drafting.close()


def test_an_adapters_tokens_are_those_of_its_merged_weights(policy, stream, tmp_path):
    """Of a rollout of one adapter, and of `Policy.sample`, greedily."""
    sampler, prompt = moved(policy, 3), (5, 6, 7)
    greedy = SamplingConfig(0.0, max_new_tokens=12)
    [[got]] = run(stream, SampleRequest(sampler, prompt, 1, greedy, "greedy"))
    [[wanted]] = sampler.sample([prompt], 1, greedy)
    assert got == wanted.token_ids
    [[plain]] = run(stream, SampleRequest(policy.sampler(), prompt, 1, greedy, "plain"))
    assert plain != got


def test_a_dialogue_computes_its_new_tokens_alone(policy):
    """Eight dialogues of several turns, with one and with two adapters, against no row kept."""
    stream, fresh = policy.stream(2), policy.stream(2)
    samplers = [policy.sampler(), moved(policy, 4)]
    sampling, rng = SamplingConfig(max_new_tokens=4), np.random.default_rng(0)
    dialogues = [(1 + i, 2, 3) for i in range(8)]
    new_tokens = computed = 0
    for turn in range(8):
        requests = [
            SampleRequest(samplers[i % 2], ids, 1, sampling, f"{turn}.{i}")
            for i, ids in enumerate(dialogues)
        ]
        before = stream.stats.prefilled_tokens
        answers = run(stream, *requests)
        computed += stream.stats.prefilled_tokens - before
        fresh.close()
        assert run(fresh, *requests) == answers
        # the row holds all but the last token, and the request's first round computes the last
        new_tokens += sum(len(ids) - 1 for ids in dialogues) if not turn else 8 * 3
        answers_now = [tuple(tokens) for [tokens] in answers]
        says = rng.integers(1, 10, (8, 3))
        dialogues = [
            (*ids, *answer, *map(int, said))
            for ids, answer, said in zip(dialogues, answers_now, says, strict=True)
        ]
    assert computed <= 1.1 * new_tokens
    fresh.close()
    stream.close()


def test_a_request_that_cannot_run_is_refused(policy, stream):
    long = SampleRequest(policy.sampler(), (1,) * 46, 1, SamplingConfig(max_new_tokens=16), "")
    with pytest.raises(ValueError, match="expected at most 60 tokens of prompt and response"):
        stream.add(long, print)
    none = SampleRequest(policy.sampler(), (1,), 0, SamplingConfig(max_new_tokens=16), "")
    with pytest.raises(ValueError, match="expected at least 1 response to a request, got n=0"):
        stream.add(none, print)
    with pytest.raises(ValueError, match="has an empty prompt"):
        stream.add(dataclasses.replace(none, n=1, prompt_ids=()), print)
    assert not stream.has_work


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_adapter_fails_its_own_requests_alone(policy, stream, drafting, bad, drafts):
    """Good ones beside it, and later ones in its rows, have the bits that they have alone."""
    one = drafting if drafts else stream
    good = moved(policy, 1)
    broken = moved(policy, 2, bad)
    prompt = (1, 2, 3)
    sampling = SamplingConfig(max_new_tokens=12)
    wanted = {f"{i}": SampleRequest(good, (*prompt, i), 2, sampling, f"{i}") for i in range(6)}
    failing = {f"b{i}": SampleRequest(broken, (*prompt, i), 3, sampling, f"b{i}") for i in range(3)}
    found = {}
    for name, request in [*wanted.items(), *failing.items()][::-1]:
        one.add(request, functools.partial(found.__setitem__, name))
    while one.has_work:
        one.step()
    text = r"logits of these weights \(version 0\) after \d+ tokens of response \d are not finite"
    for name in failing:
        assert isinstance(found[name], ValueError) and re.search(text, str(found[name]))
    assert one._places.busy == [0, 0] and not one._history._groups
    after = {}
    for name, request in wanted.items():
        stream.add(request, functools.partial(after.__setitem__, name))
        while stream.has_work:
            stream.step()
    for name in wanted:
        for sample, again in zip(found[name], after[name], strict=True):
            assert sample.token_ids == again.token_ids
            np.testing.assert_array_equal(sample.logprobs, again.logprobs)


def test_rounds_that_compute_nothing_end_with_an_error(policy, monkeypatch):
    stream = policy.stream(1)
    request = SampleRequest(policy.sampler(), (1, 2), 1, SamplingConfig(max_new_tokens=4), "a")
    wanted = run(stream, request)
    with monkeypatch.context() as patch:
        patch.setattr(stream._engine, "step", lambda: [])
        stream.add(request, print)
        with pytest.raises(RuntimeError, match="no token in 1000 fetches, with 1 requests"):
            for _ in range(1002):
                stream.step()
    assert not stream.has_work
    assert run(stream, request) == wanted
    stream.close()


@pytest.mark.parametrize("fails", ["step", "rollout"])
def test_after_a_failure_the_stream_starts_again(policy, monkeypatch, fails):
    """A step that fails has consumed the cache; a rollout may not open at all."""
    stream, sampling = policy.stream(1), SamplingConfig(max_new_tokens=4)
    request = SampleRequest(policy.sampler(), (1, 2, 3), 1, sampling, "a")
    wanted = run(stream, request)
    if fails == "rollout":
        stream.close()

    def fail(*_, **__):
        for x in jax.tree.leaves(stream._engine._rows.memory.cache):
            x.delete()
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(stream._engine, fails, fail)
        stream.add(request, print)
        with pytest.raises(ZeroDivisionError):
            stream.step()
    assert not stream.has_work
    assert run(stream, request) == wanted
    stream.close()


def test_a_stream_that_is_never_idle_is_renewed(policy, stream, monkeypatch):
    """Later requests wait until the ones that run have ended; no token differs."""
    monkeypatch.setattr("reprise.rl.python.stream.RENEWED_AFTER", 4)
    opened = []
    rollout = stream._engine.rollout
    monkeypatch.setattr(
        stream._engine, "rollout", lambda *a, **k: opened.append(1) or rollout(*a, **k)
    )
    sampler, sampling = policy.sampler(), SamplingConfig(max_new_tokens=6)
    requests = [SampleRequest(sampler, (1, 2, 3 + i), 1, sampling, f"{i}") for i in range(12)]
    stream.close()
    found = run(stream, *requests)
    assert len(opened) >= 2
    assert found == [run(stream, request)[0] for request in requests]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_number_as_seed_has_the_noise_of_samples(policy, stream, drafting, drafts):
    """Each of several prompts of a call, beside requests with noise of their own."""
    prompts = [(1, 2, 3, 4), (5, 6, 7)]
    sampler = moved(policy, 3)
    sampling = SamplingConfig(temperature=20.0, top_p=0.9, max_new_tokens=9)
    wanted = sampler.sample(prompts, 3, sampling, seed=11)
    requests = [
        SampleRequest(sampler, ids, 3, sampling, 11, first=3 * i) for i, ids in enumerate(prompts)
    ]
    other = SampleRequest(sampler, prompts[0], 2, sampling, "seed 11")
    *found, own = drawn(drafting if drafts else stream, *requests, other)
    for group, samples in zip(wanted, found, strict=True):
        assert [s.token_ids for s in group] == [s.token_ids for s in samples]
        for one, another in zip(group, samples, strict=True):
            np.testing.assert_array_equal(one.logprobs, another.logprobs)
    assert [s.token_ids for s in own] != [s.token_ids for s in wanted[0][:2]]


@pytest.mark.parametrize("drafts", [False, True])
def test_tokens_are_shown_in_order_before_the_end(policy, stream, drafting, drafts):
    """Tokens but the last ones of a response, once, if it takes several fetches."""
    used = drafting if drafts else stream
    shown, done = [([], []) for _ in range(8)], []

    def on_tokens(index, tokens, logprobs):
        shown[index][0].extend(tokens)
        shown[index][1].extend(logprobs)

    sampling = SamplingConfig(max_new_tokens=50)
    request = SampleRequest(policy.sampler(), (1, 2, 3), 8, sampling, "a")
    used.add(request, done.append, on_tokens)
    while used.has_work:
        used.step()
    [samples] = done
    for sample, (tokens, logprobs) in zip(samples, shown, strict=True):
        assert tokens == sample.token_ids[: len(tokens)]
        assert logprobs == sample.logprobs[: len(tokens)].tolist()
    longest = max(range(8), key=lambda i: len(samples[i].token_ids))
    assert 0 < len(shown[longest][0]) < len(samples[longest].token_ids)


def test_a_dropped_request_frees_its_rows_and_changes_no_other(policy, stream):
    """Also one that waits; an unknown one is ignored."""
    sampler = policy.sampler()
    sampling = SamplingConfig(max_new_tokens=16)
    dropped = [SampleRequest(sampler, (1, 2, 3), 6, sampling, name) for name in "ab"]
    kept = SampleRequest(sampler, (1, 2, 3), 2, sampling, "c")
    [alone] = run(stream, kept)
    done = []
    for request in (*dropped, kept):
        stream.add(request, lambda samples, request=request: done.append((request, samples)))
    stream.step()
    for request in (*dropped, *dropped):
        stream.drop(request)
    late = SampleRequest(sampler, (1, 2, 3), 1, sampling, "d")
    stream.add(late, None)
    stream.drop(late)
    while stream.has_work:
        stream.step()
    [(request, samples)] = done
    assert request is kept and [s.token_ids for s in samples] == alone
    assert not stream._places.busy[0] and not stream._places.busy[1]

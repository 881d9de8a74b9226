"""The public call, as a notebook would make it."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from drafts_by_hand import Draft, stack
from shapes import PLAIN, TINY, make_params

from reprise.models.text import tokenizer
from reprise.models.text.token_bytes import TokenBytes
from reprise.rl.engine.engine import Engine
from reprise.rl.python.generate import generate
from reprise.rl.records.trajectory import FinishReason, Request
from reprise.spec.budget.budget import FixedBudget
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Drafter
from reprise.spec.verification.sampling import step_key

MODEL = dataclasses.replace(TINY, eos_token_ids=(4, 5, 6))
SAMPLING = SamplingConfig(max_new_tokens=12)
REQUESTS = [Request(i, (1, 2 + i % 2)) for i in range(4)]


@pytest.fixture(scope="module")
def params():
    return make_params()


@pytest.fixture(scope="module")
def engine():
    return Engine(MODEL, PLAIN)


def responses(trajectories):
    return [t.response_ids.tolist() for t in trajectories]


def test_five_lines(params, engine):
    """With the defaults for everything that has one; a handed-in engine changes nothing."""
    alone = generate(MODEL, params, REQUESTS, SAMPLING)
    assert responses(alone) == responses(generate(MODEL, params, REQUESTS, SAMPLING, engine=engine))
    assert [t.request_id for t in alone] == [0, 1, 2, 3]


def test_the_default_key_is_that_of_seed_and_step_zero(params, engine):
    def tokens(key):
        return responses(generate(MODEL, params, REQUESTS, SAMPLING, engine=engine, key=key))

    assert tokens(None) == tokens(step_key(0, 0))
    assert tokens(None) != tokens(step_key(0, 1))
    assert tokens(None) != tokens(step_key(1, 0))


def test_end_tokens_are_the_policy_s_unless_given(params, engine):
    own = generate(MODEL, params, REQUESTS, SAMPLING, engine=engine)
    none = generate(MODEL, params, REQUESTS, SAMPLING, engine=engine, stop_token_ids=())
    assert any(t.finish_reason is FinishReason.STOP for t in own)
    assert all(t.num_tokens == 12 for t in none)
    for a, b in zip(own, none, strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()[: a.num_tokens]
        ended = set(a.response_ids.tolist()) & {4, 5, 6}
        assert bool(ended) == (a.finish_reason is FinishReason.STOP)


LETTERS = TokenBytes(np.frombuffer(b"abcdefghijklmnopqrst", np.uint8), np.arange(21))
TOKENIZER = SimpleNamespace(
    token_bytes=LETTERS,
    eos_token_ids=(7,),
    vocab_size=20,
    vocabulary={chr(97 + i): i for i in range(20)},
)


def test_a_tokenizer_brings_its_end_tokens_and_the_text_of_stop_strings(params, engine):
    long = generate(MODEL, params, REQUESTS, SAMPLING, engine=engine, stop_token_ids=())
    text = "".join(chr(97 + i) for i in long[0].response_ids)
    stop = SamplingConfig(max_new_tokens=12, stop=(text[1:3],))
    requests = [REQUESTS[0], *(dataclasses.replace(r, sampling=SAMPLING) for r in REQUESTS[1:])]
    for given, options in ((REQUESTS, {}), (requests, {"stop_token_ids": ()})):
        got = generate(MODEL, params, given, stop, engine=engine, tokenizer=TOKENIZER, **options)
        ends = {4, 5, 6, 7} if not options else set()
        for a, b in zip(got, long, strict=True):
            read = "".join(chr(97 + i) for i in b.response_ids)
            n = [i + 1 for i, x in enumerate(b.response_ids) if x in ends]
            n += [i for i in range(2, 13) if read[i - 2 : i] == text[1:3]]
            assert a.response_ids.tolist() == b.response_ids.tolist()[: min(n, default=12)]
            assert (a.finish_reason is FinishReason.STOP) == bool(n)
    with pytest.raises(ValueError, match="expected a tokenizer"):
        generate(MODEL, params, REQUESTS, stop, engine=engine)


class Lacking(Drafter):
    """Drafts ids 1 and 2, and then 9, for every next token."""

    def propose(self, live, max_nodes_A, max_nodes):
        return stack([Draft((1, 2, 9), (-1, -1, -1))] * len(live), max_nodes)

    def finished(self, live): ...


def test_ids_that_the_tokenizer_lacks_are_never_drawn(params, engine):
    few = SimpleNamespace(**vars(TOKENIZER) | {"vocabulary": {"a": 0, "b": 9, "c": 7, "d": 12}})
    allowed = {0, 4, 5, 6, 7, 9, 12}  # with the end tokens

    def drawn(model, engine, **options):
        options |= {"engine": engine, "stop_token_ids": ()}
        return responses(generate(model, params, REQUESTS, SAMPLING, **options))

    assert not {i for row in drawn(MODEL, engine) for i in row} <= allowed
    with pytest.raises(ValueError, match="another model.*unused_ids are .*1, 4.*13, 20"):
        drawn(MODEL, engine, tokenizer=few)
    unused = tokenizer.fitted(MODEL, few).unused_ids
    limited = Engine(dataclasses.replace(MODEL, unused_ids=unused), PLAIN)
    plain = drawn(MODEL, limited, tokenizer=few)
    assert {i for row in plain for i in row} <= allowed
    drafts = {"drafter": Lacking(), "budget": FixedBudget(3), "tokenizer": few}
    assert drawn(MODEL, limited, **drafts) == plain


def test_requests_have_a_sampling_of_their_own(params, engine):
    """What a request gives is what it gives where all have its sampling."""
    samplings = [
        SAMPLING,
        SamplingConfig(temperature=0.0, max_new_tokens=5),
        SamplingConfig(temperature=0.6, top_k=3, max_new_tokens=9, stop_ids=(9, 10)),
        SamplingConfig(temperature=1.5, top_p=0.7, max_new_tokens=12),
    ]
    mixed = [dataclasses.replace(r, sampling=s) for r, s in zip(REQUESTS, samplings, strict=True)]
    got = generate(MODEL, params, mixed, engine=engine)
    for i, (sampling, t) in enumerate(zip(samplings, got, strict=True)):
        alone = generate(MODEL, params, REQUESTS, sampling, engine=engine)[i]
        assert t.response_ids.tolist() == alone.response_ids.tolist()
        np.testing.assert_allclose(t.logprobs, alone.logprobs, atol=1e-5)
        assert t.finish_reason is alone.finish_reason and t.sampling == sampling


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingConfig(stop_ids=(20,)), "Sampling.stop_ids: .* vocabulary of 20, got 20"),
        (SamplingConfig(draw="gumbel"), "request 0 has draw='gumbel': expected that of"),
        (SamplingConfig(max_new_tokens=63), "request 0 needs 65 positions"),
    ],
)
def test_a_request_s_sampling_that_does_not_fit_is_refused(params, engine, sampling, message):
    with pytest.raises(ValueError, match=message):
        wrong = [dataclasses.replace(REQUESTS[0], sampling=sampling)]
        generate(MODEL, params, wrong, SAMPLING, engine=engine)


def test_options_reach_the_engine(params, engine):
    told, rounds = [], []
    got = generate(
        MODEL,
        params,
        REQUESTS,
        SAMPLING,
        engine=engine,
        policy_version=3,
        on_finish=told.append,
        on_round=lambda done, tokens: rounds.append(done),
    )
    assert len(told) == 4 and rounds[-1] == 4
    assert {int(v) for t in got for v in t.policy_versions} == {3}


def test_an_engine_of_another_model_is_refused(params, engine):
    other = dataclasses.replace(MODEL, rope_theta=5000.0)
    with pytest.raises(ValueError, match="another model"):
        generate(other, params, REQUESTS, SAMPLING, engine=engine)

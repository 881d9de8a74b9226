"""Some requests, and teams of tiny engines that answer them."""

import dataclasses

import numpy as np
import pytest
import rollouts
from replay import RecordedTeam
from shapes import PLAIN, TINY, make_params

from reprise.rl.records.trajectory import Request
from reprise.rl.workers.config import SchedConfig
from reprise.sched.protocol import Start
from reprise.spec.config import SamplingConfig
from reprise.spec.reuse.rollout_cache import CachedResponse, Scores
from reprise.spec.verification.sampling import step_key

MODEL = dataclasses.replace(TINY, num_kv_heads=2)  # to be shared by two devices
CONFIG = dataclasses.replace(PLAIN, page_tokens=8, rounds_per_fetch=2)
SAMPLING = SamplingConfig(max_new_tokens=16)
STOP = (3,)
KEY = step_key(0, 0)


PARAMS = make_params(model=MODEL)
PROMPTS = ((4, 5, 6), (7,), (8, 9, 10, 11, 12), (13, 14))
REQUESTS = [Request(4 * g + i, PROMPTS[g], g, i) for i in range(4) for g in range(len(PROMPTS))]


def workers(engines, count, policy="divided_fifo", chunk=3, kv_tokens=60, **options):
    config = SchedConfig(
        policy=policy, workers=count, chunk_tokens=chunk, kv_tokens=kv_tokens, **options
    )
    return RecordedTeam(engines[:count], config)


def play(team, **options):
    return rollouts.run(team, PARAMS, REQUESTS, SAMPLING, KEY, STOP, policy_version=7, **options)


def assert_same_tokens(done, alone):
    assert [t.request_id for t in done] == [r.request_id for r in REQUESTS]
    for t in done:
        wanted = alone[t.request_id]
        assert t.response_ids.tolist() == wanted.response_ids.tolist()
        assert t.finish_reason == wanted.finish_reason
        assert t.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
        assert t.emission_logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
        assert (t.policy_versions == 7).all()
        assert (t.group_id, t.sample_index) == (wanted.group_id, wanted.sample_index)


def with_cached(requests, alone, wrong_at=5):
    """Each request with its own response as last epoch's, with a token changed in every other."""

    def one(r):
        tokens = alone[r.request_id].response_ids.copy()
        if r.sample_index % 2 and len(tokens) > wrong_at:
            tokens[wrong_at] = (tokens[wrong_at] + 1) % MODEL.vocab_size
        old = np.full(len(tokens), -2.0, np.float32)
        scores = Scores(old, old, np.full(len(tokens), 3, np.int32))
        return dataclasses.replace(r, cached=CachedResponse(r.sample_index, tokens, 1.0, scores))

    return [one(r) for r in requests]


def starts(team):
    return [a for d in team.decisions for a in d.actions if isinstance(a, Start)]

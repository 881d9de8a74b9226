"""How near a draw was to another token, checked against its own probability."""

import numpy as np
import pytest

from benchmarks import near_ties, workloads
from rl.rollout import generate
from spec.sampling import step_key

KEY = step_key(0, 1)


@pytest.fixture(scope="module")
def workload():
    model, params = workloads.random_policy(64, 1, 64, 64, 32)
    return workloads.replay("ties", model, params, 2, 12, 0.5, prompt_tokens=4)


def test_gaps_to_both_neighbours_are_the_tokens_probability(workload):
    w = workload
    checked = 0
    for t in generate(w.model, w.params, w.requests, w.sampling, key=KEY):
        for at, token in enumerate(t.response_ids.tolist()):
            if not 0 < token < w.model.vocab_size - 1:
                continue
            gaps = []
            for step in (-1, 1):
                other = t.response_ids.copy()
                other[at] += step
                found = near_ties.compare(w, KEY, t.request_id, t.response_ids, other)
                assert (found.at, found.tokens) == (at, 1)
                assert found.explained == (found.gap < 1e-5)
                gaps.append(found.gap)
            assert sum(gaps) == pytest.approx(np.exp(t.logprobs[at]), rel=1e-3)
            checked += 1
    assert checked > 5


def test_the_same_and_a_longer_one(workload):
    two, three = np.array([1, 2]), np.array([1, 2, 3])
    assert near_ties.compare(workload, KEY, 0, two, two) is None
    found = near_ties.compare(workload, KEY, 0, two, three)
    assert (found.at, found.tokens, found.gap, found.explained) == (2, 1, None, False)

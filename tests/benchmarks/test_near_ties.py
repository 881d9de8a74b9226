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
                assert near_ties.first_difference(t.response_ids, other) == at
                gaps.append(near_ties.gap(w, KEY, t.request_id, t.response_ids, other, at))
            assert sum(gaps) == pytest.approx(np.exp(t.logprobs[at]), rel=1e-3)
            checked += 1
    assert checked > 5


def test_no_difference():
    assert near_ties.first_difference(np.array([1, 2]), np.array([1, 2, 3])) is None

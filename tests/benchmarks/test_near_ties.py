"""How near a draw was to another token, checked against its own probability."""

import numpy as np
import pytest

from benchmarks import near_ties, workloads
from models import transformer
from rl.rollout import generate
from spec import sampling
from spec.sampling import step_key

KEY = step_key(0, 1)


@pytest.fixture(scope="module")
def workload():
    model, params = workloads.random_policy(64, 1, 64, 64, 32)
    return workloads.replay("ties", model, params, 2, 12, 0.5, prompt_tokens=4)


def test_gaps_to_both_neighbours_are_the_tokens_share_of_its_block(workload):
    """Where both neighbours are in the token's block; across its edge a gap is one of blocks."""
    w = workload
    W, V = sampling.block_tokens(w.model.vocab_size), w.model.vocab_size
    checked = 0
    for t in generate(w.model, w.params, w.requests, w.sampling, key=KEY):
        prompt_ids = w.requests[t.request_id].prompt_ids
        tokens_1T = np.zeros((1, 32), np.int32)  # one shape: eager passes compile for each
        tokens_1T[0, : t.num_tokens + len(prompt_ids)] = [*prompt_ids, *t.response_ids]
        logits_TV = np.asarray(transformer.logits(w.model, w.params, tokens_1T)[0], np.float64)
        for at, token in enumerate(t.response_ids.tolist()):
            block = range(token - token % W, min(token - token % W + W, V))
            if token in (block[0], block[-1]):
                continue
            share_V = np.exp(logits_TV[len(prompt_ids) + at - 1])
            gaps = []
            for step in (-1, 1):
                other = t.response_ids.copy()
                other[at] += step
                found = near_ties.compare(w, KEY, t.request_id, t.response_ids, other)
                assert (found.at, found.tokens) == (at, 1)
                assert found.explained == (found.gap < 1e-5)
                gaps.append(found.gap)
            share = share_V[token] / share_V[block.start : block.stop].sum()
            assert sum(gaps) == pytest.approx(share, rel=1e-3)
            checked += 1
    assert checked > 5


def test_a_gap_across_blocks_is_that_of_their_bound(workload):
    w = workload
    W, V = sampling.block_tokens(w.model.vocab_size), w.model.vocab_size
    t = generate(w.model, w.params, w.requests, w.sampling, key=KEY)[0]
    block = int(t.response_ids[0]) // W
    prompt = np.asarray([w.requests[t.request_id].prompt_ids], np.int32)
    mass_V = np.exp(np.asarray(transformer.logits(w.model, w.params, prompt)[0, -1], np.float64))
    share = mass_V[block * W : (block + 1) * W].sum() / mass_V.sum()
    gaps = []
    for neighbour in (block - 1, block + 1):
        other = t.response_ids.copy()
        other[0] = neighbour * W + W // 2
        if 0 <= other[0] < V:
            gaps.append(near_ties.compare(w, KEY, t.request_id, t.response_ids, other).gap)
    assert len(gaps) == 2 and sum(gaps) == pytest.approx(share, rel=1e-3)


def test_the_same_and_a_longer_one(workload):
    two, three = np.array([1, 2]), np.array([1, 2, 3])
    assert near_ties.compare(workload, KEY, 0, two, two) is None
    found = near_ties.compare(workload, KEY, 0, two, three)
    assert (found.at, found.tokens, found.gap, found.explained) == (2, 1, None, False)

"""Flips are counted once each, position by position, and none where nothing differs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bf16_flips, workloads
from reprise.rl.python.generate import generate
from reprise.rl.records.trajectory import Request
from reprise.spec.config import SamplingConfig
from reprise.spec.verification.sampling import step_key

KEY = step_key(0, 1)


@pytest.fixture(scope="module")
def policy():
    return workloads.random_policy(64, 1, 64, 64, 64)


@pytest.fixture(scope="module")
def plain(policy):
    model, params = policy
    requests = [Request(i, tuple(range(3 + i))) for i in range(3)]
    return generate(model, params, requests, SamplingConfig(max_new_tokens=20), key=KEY)


@pytest.mark.parametrize("num_nodes", [1, 4])
def test_no_flips_in_float32_and_one_where_one_is_planted(policy, plain, num_nodes):
    rest = KEY, num_nodes, "cdf"
    row = bf16_flips.compare_forced(*policy, plain, *rest)
    assert (row["tokens"], row["flips"]) == (sum(len(t.response_ids) for t in plain), 0)
    assert row["max_logprob_difference"] < 1e-4
    changed = plain[1].response_ids.copy()
    changed[-1] = (changed[-1] + 1) % 64  # the last one: what comes after is not compared
    planted = [plain[0], dataclasses.replace(plain[1], response_ids=changed), plain[2]]
    assert bf16_flips.compare_forced(*policy, planted, *rest)["flips"] == 1


def test_bfloat16_is_seen_to_round(policy, plain):
    model, params = policy
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    row = bf16_flips.compare_forced(model, half, plain, KEY, 4, "cdf")
    assert row["max_logprob_difference"] > 1e-4


def test_each_draw_has_named_figures():
    rows = [
        {"dtype": "bfloat16", "draw": draw, "measure": "forced_8", "flips_per_million": n}
        for n, draw in enumerate(("cdf", "gumbel"))
    ]
    named = bf16_flips._named(rows)
    assert named["bfloat16_forced_flips_per_million"] == 0
    assert named["bfloat16_gumbel_forced_flips_per_million"] == 1


def test_drafted_responses_are_compared_up_to_where_they_differ(plain):
    assert bf16_flips.compare_drafted(plain, plain)["responses_that_differ"] == 0
    changed = plain[1].response_ids.copy()
    changed[5] += 1
    logprobs = plain[1].logprobs.copy()
    logprobs[:2] += np.float32(0.5)
    logprobs[5:] += 100
    other = dataclasses.replace(plain[1], response_ids=changed, logprobs=logprobs)
    row = bf16_flips.compare_drafted(plain, [plain[0], other, plain[2]])
    assert row["responses_that_differ"] == 1
    assert row["tokens"] == 5 + sum(len(t.response_ids) for t in (plain[0], plain[2]))
    assert row["max_logprob_difference"] == pytest.approx(0.5, rel=1e-3)
    total = bf16_flips.total_of([row, row])
    assert total["mean_logprob_difference"] == pytest.approx(1.0 / row["tokens"], rel=1e-3)

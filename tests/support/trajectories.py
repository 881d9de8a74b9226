"""Trajectories by hand."""

import dataclasses

import numpy as np

from reprise.rl.records.episode import INSERTED, Episode
from reprise.rl.records.trajectory import FinishReason, Trajectory


def trajectory(
    number,
    prompt,
    response,
    *,
    group=None,
    sample=None,
    logprobs=-2.7,
    emission=None,
    reward=1.0,
    finish=FinishReason.STOP,
    version=0,
):
    """Return one, by default of a group of four; log-probabilities are of each token or of all."""
    n = len(response)
    logprobs = np.full(n, logprobs, np.float32)
    return Trajectory(
        number,
        number // 4 if group is None else group,
        number % 4 if sample is None else sample,
        np.array(prompt, np.int32),
        np.array(response, np.int32),
        logprobs,
        policy_versions=np.full(n, version, np.int32),
        origins=np.zeros(n, np.uint8),
        finish_reason=finish,
        reward=reward,
        emission_logprobs=logprobs if emission is None else np.full(n, emission, np.float32),
    )


def episode(number, prompt, pieces, **fields):
    """Return one of several turns; `pieces` alternate between the policy and its environment."""
    tokens = [token for piece in pieces for token in piece]
    turns = [k // 2 if k % 2 == 0 else INSERTED for k, piece in enumerate(pieces) for _ in piece]
    one = Episode(
        tokens=np.array(tokens, np.int32),
        turns=np.array(turns, np.int16),
        end="done",
        turn_rewards=[None] * len(pieces[::2]),
    )
    drawn = [token for piece in pieces[::2] for token in piece]
    return dataclasses.replace(trajectory(number, prompt, drawn, **fields), episode=one)


def some_trajectories(count=8, seed=0, max_response=12, min_response=1):
    """Return groups of four that share a prompt, and any responses of 16 tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 15, n) for n in rng.integers(1, 5, -(-count // 4))]
    return [
        trajectory(i, prompts[i // 4], rng.integers(0, 16, n))
        for i, n in enumerate(rng.integers(min_response, max_response, count))
    ]

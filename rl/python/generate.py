"""Generation of trajectories for a list of requests, outside of a run.

config, params = models.formats.hf.load_pretrained("policies/tiny")
tokenizer = models.text.tokenizer.load("policies/tiny")
requests = [Request(i, tuple(tokenizer.encode_prompt("2 + 3 =\\n"))) for i in range(4)]
for t in generate(config, params, requests, SamplingConfig(), tokenizer=tokenizer):
    print(tokenizer.decode(t.response_ids), t.logprobs.sum())
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.text.tokenizer import Tokenizer, fitted
from reprise.rl.engine.engine import Engine, OnFinish, OnRound
from reprise.rl.engine.rollout_spec import RolloutSpec, draft_with
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.spec.budget.budget import Budget
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Drafter
from reprise.spec.verification.sampling import step_key


def generate(
    config: ModelConfig,
    params: transformer.Params,
    requests: Sequence[Request],
    sampling: SamplingConfig | None = None,
    *,
    key: jax.Array | None = None,
    drafter: Drafter | None = None,
    budget: Budget | None = None,
    engine: Engine | None = None,
    stop_token_ids: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    policy_version: int = 0,
    on_finish: OnFinish | None = None,
    on_round: OnRound | None = None,
) -> list[Trajectory]:
    """Generate a response to every request; return trajectories in the order of the requests.

    Tokens are a function of policy, requests, sampling and `key` (default: `step_key(0, 0)`), not
    of engine settings, drafter or batch: exactly on a CPU, elsewhere up to rounding
    (docs/architecture.md, Exactness). With a `tokenizer`, which `sampling.stop` needs, only ids
    that the tokenizer has are drawn. `stop_token_ids` default to the end tokens of the policy and
    of its tokenizer. The sampling of a request takes precedence over `sampling`.
    An `engine` keeps its compiled steps and buffers between calls; None creates a new engine with
    default settings. `on_finish` is called with each finished trajectory, `on_round` with
    (responses finished, tokens emitted) after every fetch.
    """
    if tokenizer is not None:
        unused = fitted(config, tokenizer).unused_ids
        config = dataclasses.replace(config, unused_ids=unused)
    engine = engine or Engine(config, dtype=params.final_norm_D.dtype)
    if engine.model != config:
        raise ValueError(
            "the engine was made for another model: make one with Engine(config), whose unused_ids "
            f"are {config.unused_ids}"
        )
    if stop_token_ids is None:
        stop_token_ids = (*config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ()))
    samplings = [sampling or SamplingConfig(), *(r.sampling for r in requests if r.sampling)]
    token_bytes = None
    if tokenizer is not None and any(s.stop for s in samplings):
        token_bytes = tokenizer.token_bytes
    spec = RolloutSpec(
        params,
        samplings[0],
        step_key(0, 0) if key is None else key,
        stop_token_ids,
        policy_version,
        draft_with(drafter, budget),
        words=token_bytes,
    )
    return engine.run(spec, requests, on_finish=on_finish, on_round=on_round)

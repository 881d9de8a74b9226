"""Compile the host's kernels before the first step, by short rollouts of made-up prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from models.transformer import Params
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec, draft_with
from rl.speculation.config import SpeculationConfig
from rl.speculation.device_drafters import NO_DRAFTERS, DeviceDrafters, DrafterSource
from rl.speculation.sources import Speculation
from rl.trajectory import Request
from spec.budget.budget import SeeingBudget
from spec.budget.config import TunerConfig
from spec.config import SamplingConfig
from spec.reuse.rollout_cache import CachedGroup, CachedResponse, RolloutCache
from spec.round_times import RoundTimes
from spec.sampling import step_key

NAME = "rehearsal"
NUM_TOKENS = 24  # of a response, at most


def compile_host_kernels(
    config: SpeculationConfig,
    times: RoundTimes,
    engine: Engine,
    params: Params,
    sampling: SamplingConfig,
    drafters: DeviceDrafters = NO_DRAFTERS,
    tuner: TunerConfig | None = None,
    apart: Mapping[str, DrafterSource] | None = None,
) -> None:
    """Run a rollout that verifies draft tokens, and one with the budget of `config`.

    Call it after the warm-up: it compiles no program of the device.
    """
    prompt, tokens = (0, 1), np.arange(8, dtype=np.int32) % 2
    cached = tuple(CachedResponse(i, tokens, 0.0, None) for i in range(2))
    cache = RolloutCache()
    cache.replace(NAME, CachedGroup(np.asarray(prompt, np.int32), cached))
    # none ends early, with as many end tokens as there are: they make a shape
    num_ends = len({*engine.model.eos_token_ids, *sampling.stop_ids})
    no_stop = tuple(range(-1 - num_ends, -1))
    limit = min(NUM_TOKENS, sampling.max_new_tokens)
    sampling = dataclasses.replace(sampling, stop_ids=(), stop=(), by_task=())
    requests = [Request(i, prompt, 0, i, limit) for i in range(2)]
    with Speculation(config, cache, drafters, tuner) as speculation:
        speculation.times, speculation.apart = times, apart or {}
        for fixed in (SeeingBudget(2), None):
            drafts = speculation.drafter_factory([NAME], [prompt], dict.fromkeys(range(2), tokens))
            spec = RolloutSpec(params, sampling, step_key(0, 0), no_stop)
            drafter, budget = drafts(engine.drafter_context(spec))
            drafts = draft_with(drafter, fixed or budget)
            engine.run(dataclasses.replace(spec, drafts=drafts), requests)

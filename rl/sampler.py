"""Samples of given weights: whole batches of prompts, or requests that join as they come."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from models.transformer import Params
from rl import setup
from rl.config import TrainConfig
from rl.engine.engine import Engine, OnRound
from rl.engine.rollout_spec import DrafterFactory, RolloutSpec, draft_with
from rl.inputs import Inputs
from rl.learner.data import Datum
from rl.learner.objectives import target_logprobs
from rl.learner.trainer import Learner
from rl.speculation.reuse import remember
from rl.speculation.sources import Speculation
from rl.trajectory import PartialRequest, Request, Trajectory, check_requests
from rl.warm_up import compile_buckets, round_times
from rl.warm_up.rollout_programs import Reach, round_buckets
from spec.budget.config import parse_budget
from spec.config import SamplingConfig
from spec.drafter import Drafter
from spec.reuse.rollout_cache import RolloutCache
from spec.sampling import step_key

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """A response: its ids, their log-probs under the policy as sampled, float32 [n], and its text.

    `version` counts the optimizer steps of the policy that drew it.
    """

    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    logprobs: np.ndarray
    text: str
    is_truncated: bool
    sampling: SamplingConfig
    version: int


class Rollouts:
    """The engine of a policy's samples, and the drafts that its configuration names."""

    def __init__(self, config: TrainConfig, inputs: Inputs, mesh: Mesh | None, dtype: Any) -> None:
        self.config, self.inputs, self.mesh = config, inputs, mesh
        self.engine = Engine(
            inputs.model,
            config.engine,
            mesh=setup.engine_mesh(config, inputs.model, mesh),
            dtype=dtype,
        )
        self.cache = RolloutCache(config.rollout.cache_bytes, vocab_size=inputs.model.vocab_size)
        self.speculation = Speculation(
            config.speculation, self.cache, tuner=config.tuner, seed=config.run.seed
        )

    def drafts(
        self, weights: Params, keys: Sequence[str], prompts: Sequence[Any], n: int
    ) -> DrafterFactory:
        speculation = self.speculation
        if speculation.config.enabled and speculation.times is None:
            self._measure_rounds(weights)
        return speculation.drafter_factory(keys, prompts, group_size=n)

    def _measure_rounds(self, weights: Params) -> None:
        """Compile the programs of rounds with drafts, and time them for the budget."""
        config, engine, sampling = self.config, self.engine, self.config.sampling
        if parse_budget(config.speculation.budget)[0] == "fixed":
            return
        reach = Reach(engine.config.max_slots, config.rollout.max_prompt_tokens, speculative=True)
        buckets = list(round_buckets(engine, sampling, reach))
        compile_buckets.warm_up(engine, weights, sampling, reach)
        self.speculation.times = round_times.measure(engine, weights, sampling, buckets)


@dataclasses.dataclass(frozen=True, eq=False)
class SampleRequest:
    """`n` responses to a prompt; `seed` names their noise."""

    prompt_ids: tuple[int, ...]
    n: int
    sampling: SamplingConfig
    seed: str

    def requests(self, number: int) -> list[Request]:
        """Return the engine's requests; `number` is unlike those of others that run."""

        def noise(i: int) -> int:
            digest = hashlib.sha256(f"{self.seed}:{i}".encode()).digest()
            return int.from_bytes(digest[:4], "little") % 2**31

        def one(i: int) -> Request:
            request_id = (number + i) * 2**31 + noise(i)
            return Request(request_id, self.prompt_ids, number, i, sampling=self.sampling)

        return [one(i) for i in range(self.n)]


class _Running:
    """The requests of a stream that have not ended, by the number of each."""

    def __init__(self) -> None:
        self._number = 0
        self._requests: dict[int, tuple[SampleRequest, list[Trajectory]]] = {}

    def begin(self, requests: Sequence[SampleRequest]) -> list[PartialRequest]:
        begun = list[PartialRequest]()
        for request in requests:
            self._requests[self._number] = request, []
            begun += [PartialRequest(r) for r in request.requests(self._number)]
            self._number += request.n
        return begun

    def end(self, t: Trajectory) -> tuple[SampleRequest, list[Trajectory]] | None:
        """Return a request and its responses, in order, if this is the last of them."""
        request, done = self._requests[t.group_id]
        done.append(t)
        if len(done) < request.n:
            return None
        del self._requests[t.group_id]
        return request, sorted(done, key=lambda one: one.sample_index)


@dataclasses.dataclass(frozen=True, eq=False)
class Sampler:
    """The weights of a moment, to sample from; `version` counts their optimizer steps."""

    _rollouts: Rollouts
    _learner: Learner
    _weights: Params
    version: int

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
        *,
        drafter: Drafter | None = None,
        on_round: OnRound | None = None,
    ) -> list[list[Sample]]:
        """Return `n` responses to each prompt, a text or ids.

        Tokens are a function of weights, prompts, `n`, `sampling` and `seed`: neither a `drafter`
        nor the drafts of the configuration change one. `on_round` is called now and then with the
        responses finished and the tokens so far; raising ends the call. Raises ValueError for
        prompts that cannot run.
        """
        rollouts, inputs = self._rollouts, self._rollouts.inputs
        sampling = sampling or rollouts.config.sampling
        ids = [_encoded(inputs, prompt) for prompt in prompts]
        requests = [
            Request(g * n + i, prompt, g, i) for i in range(n) for g, prompt in enumerate(ids)
        ]
        keys = [hashlib.sha256(repr(prompt).encode()).hexdigest() for prompt in ids]
        with on_mesh(rollouts.mesh):
            drafts = draft_with(drafter)
            if drafter is None:
                drafts = rollouts.drafts(self._weights, keys, ids, n)
            spec = RolloutSpec(
                self._weights,
                sampling,
                step_key(seed, 0),
                inputs.model.eos_token_ids,
                self.version,
                drafts,
                words=inputs.token_bytes_for(sampling),
            )
            done = rollouts.engine.run(spec, requests, on_round=on_round)
        if rollouts.speculation.keeps_history:
            remember(rollouts.cache, keys, done, scored=False)
        groups: list[list[Sample]] = [[] for _ in ids]
        for t in done:
            groups[t.group_id].append(self._read(t, sampling))
        return groups

    def _read(self, t: Trajectory, sampling: SamplingConfig) -> Sample:
        """Return a trajectory as its caller gets it."""
        prompt, response = tuple(t.prompt_ids.tolist()), t.response_ids.tolist()
        text = self._rollouts.inputs.tokenizer.decode(response)
        return Sample(prompt, response, t.logprobs, text, t.truncated, sampling, self.version)

    def stream(
        self,
        requests: Sequence[SampleRequest],
        more: Callable[[], Sequence[SampleRequest]],
        on_finish: Callable[[SampleRequest, list[Sample]], None],
    ) -> None:
        """Answer requests in one rollout, which the ones that `more` returns join as it runs.

        `on_finish` is called with a request's responses. Tokens are a function of the weights and
        the request. Raises ValueError if one cannot run: `check` it before.
        """
        rollouts, engine, running = self._rollouts, self._rollouts.engine, _Running()
        config, inputs = rollouts.config, rollouts.inputs
        settings = self._weights, config.sampling, step_key(0, 0), inputs.model.eos_token_ids
        spec = RolloutSpec(*settings, self.version, words=inputs.tokenizer.token_bytes)
        sizes: dict[str, Any] = {
            "max_requests": engine.config.max_slots,
            "max_tokens": config.longest_tokens,
        }
        with on_mesh(rollouts.mesh), engine.rollout(spec, **sizes):
            engine.add(running.begin(requests))
            while engine.has_work:
                for trajectory in engine.step():
                    assert isinstance(trajectory, Trajectory), "whole requests have no chunks"
                    if (done := running.end(trajectory)) is not None:
                        on_finish(done[0], [self._read(t, done[0].sampling) for t in done[1]])
                engine.add(running.begin(more()))

    def check(self, request: SampleRequest) -> None:
        """Raise ValueError for a request that cannot run in a `stream`."""
        config, tokens = self._rollouts.config, len(request.prompt_ids)
        check_requests(self._rollouts.inputs.model, request.requests(0), config.sampling)
        if tokens + request.sampling.max_new_tokens > config.longest_tokens:
            raise ValueError(
                f"expected at most {config.longest_tokens} tokens of prompt and response, got "
                f"{tokens} and {request.sampling.max_new_tokens}"
            )

    def forward(self, data: Sequence[Datum]) -> list[np.ndarray]:
        """Return the log-probs of each datum's targets, float32 [T]. Raises ValueError."""
        with on_mesh(self._rollouts.mesh):
            learner = self._learner
            return target_logprobs(self._weights, data, learner.shape, learner.recipe)


@contextlib.contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Compute on a mesh, or on one device."""
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        yield


def _encoded(inputs: Inputs, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(inputs.tokenizer.encode_prompt(prompt))
    return tuple(int(token) for token in prompt)

"""Sampling from fixed weights, with the drafts that a configuration enables."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from reprise.models.config import param_specs
from reprise.models.decoder.lora import trained_part
from reprise.models.decoder.transformer import Params
from reprise.rl.batches.data import Datum
from reprise.rl.batches.drawn import DrawnResponses
from reprise.rl.engine.engine import Engine, OnRound
from reprise.rl.engine.rollout_spec import DrafterFactory, RolloutSpec, draft_with
from reprise.rl.learner.objectives import target_logprobs
from reprise.rl.learner.trainer import Learner, cast_params
from reprise.rl.placement.engines import engine_settings
from reprise.rl.placement.meshes import engine_mesh
from reprise.rl.records.trajectory import Origin, Request, Trajectory
from reprise.rl.runtime.parallel_compile import OnCompiled, unwatched
from reprise.rl.runtime.progress import progress, say
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs
from reprise.rl.speculation.device_drafters import NO_DRAFTERS
from reprise.rl.speculation.reuse import Reuse
from reprise.rl.speculation.sources import Speculation, make_bandits
from reprise.rl.warm_up import compile_buckets, kept_rounds, round_times
from reprise.rl.warm_up.rollout_programs import Reach
from reprise.rl.weights.gathering import laid_out
from reprise.rl.workers.engines import make_engine
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Drafter
from reprise.spec.reuse.rollout_cache import CachedResponse, RolloutCache
from reprise.spec.round_times import RoundTimes
from reprise.spec.verification.sampling import step_key

if TYPE_CHECKING:
    from reprise.rl.exchange.responses import Scorer
    from reprise.rl.run.evaluation import Answers
    from reprise.rl.settings.eval_sets import EvalSets

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """A response: token ids, log-probs under the policy as sampled (float32 [n]), and text.

    `version` is the number of optimizer steps of the policy that drew the response. `is_drafted`,
    bool [n], marks the tokens that a draft proposed and the policy drew as well, kept tokens of
    `coupled` among them; `is_reused` marks the tokens that another `Reuse.mode` kept.
    """

    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    logprobs: np.ndarray
    text: str
    is_truncated: bool
    sampling: SamplingConfig
    version: int
    is_drafted: np.ndarray
    is_reused: np.ndarray


class Rollouts:
    """The engine that samples from a policy, and the drafts that its configuration enables.

    Policies with the same base and different adapters share this object. `num_calls` counts
    samples without a seed, `drawn` records how each response was drawn, and `cache` has the last
    responses to each prompt, to draft from or to reuse.
    """

    def __init__(self, config: TrainConfig, inputs: Inputs, mesh: Mesh | None) -> None:
        if config.speculation.learns or config.speculation.asks_model:
            raise ValueError(
                "Speculation.sources: samples have drafts of history, histospec, group, own and of "
                f"your files, got {config.speculation.sources}"
            )
        if config.reuse.schedule.startswith("clip_fraction"):
            raise ValueError(
                f"Reuse.schedule={config.reuse.schedule!r}: only rl.train knows the clipped share "
                'of its updates; fix: "constant" or "linear:END:STEPS"'
            )
        self.config = config
        self.inputs = inputs
        self.mesh = mesh
        place = engine_mesh(config, inputs.model, mesh)
        self.engine = make_engine(engine_settings(config, inputs.model, any_sampling=True), place)
        self.cache = RolloutCache(
            config.rollout.cache_bytes,
            vocab_size=inputs.model.vocab_size,
            epochs=config.reuse.epochs,
        )
        self.reuse = Reuse(
            # the caller has the rewards, so no prompt is known to have taught nothing
            dataclasses.replace(config.reuse, renew_groups=False),
            self.cache,
            seed=config.run.seed,
            greedy=config.sampling.temperature == 0,
        )
        self._numbers: dict[str, int] = {}  # of prompts, by key, for noise that repeats
        self.speculation = open_speculation(config, self.cache)
        self.num_calls = 0
        self.drawn = DrawnResponses()
        self._base: Params | None = None

    def frozen(self, base: Params) -> Params:
        """Return the frozen policy weights in rollout layout; all policies share one copy."""
        if self._base is None:
            plain = dataclasses.replace(self.inputs.model, lora=None)
            self._base = self.laid_out(base, param_specs(plain))
        return self._base

    def laid_out(self, params: Params, specs: Params) -> Params:
        """Return weights with these `ParamSpec` in rollout dtype and layout."""
        rounded = cast_params(params, self.engine.dtype)
        mesh = self.engine.mesh
        return rounded if mesh is None else laid_out(rounded, specs, mesh)

    def requests(
        self, keys: Sequence[str], prompts: Sequence[Any], n: int, version: int
    ) -> list[Request]:
        """Return `n` requests for each prompt, each with the response that it may reuse.

        A response of these weights or of later ones is not reused: the policy would repeat it.
        """
        numbers = [self._numbers.setdefault(key, len(self._numbers)) for key in keys]
        requests = self.reuse.requests(keys, prompts, numbers, n, step=version + 1)
        if self.reuse.mode.couples_noise:  # which repeats on purpose
            return requests
        return [
            r if _is_older(r.cached, version) else dataclasses.replace(r, cached=None)
            for r in requests
        ]

    def reuse_state(self) -> dict[str, Any]:
        """Return the responses to reuse and the numbers of their prompts, for a saved state."""
        if not self.reuse.mode.repeats:
            return {}
        return {"responses": self.cache.state(), "keys": list(self._numbers)}

    def load_reuse_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `reuse_state`; without one, forget all responses."""
        if not self.reuse.mode.repeats:
            return
        empty = RolloutCache().state()
        self.cache.load_state(state.get("responses", empty))
        self._numbers = {key: number for number, key in enumerate(state.get("keys", ()))}

    def drafts(
        self,
        weights: Params,
        keys: Sequence[str],
        prompts: Sequence[Any],
        n: int,
        last: Mapping[int, np.ndarray],
    ) -> DrafterFactory:
        """Return the drafters of a call; `last` are the responses to reuse, by request id."""
        if needs_times(self.speculation):
            with progress() as show:
                on_compiled = partial(show.compiling, "samples")
                times = warm_up(self.config, self.engine, weights, on_compiled)
            self.speculation = open_speculation(self.config, self.cache, times)
        return self.speculation.drafter_factory(keys, prompts, last, group_size=n)

    def noise_key(self, seed: int | None) -> jax.Array:
        """Return the key of `seed`, or without a seed, of `Run.seed` and the next call number.

        Keys of seeds and of call numbers never coincide, and each call number has a unique key.
        """
        if seed is not None:
            return step_key(seed, 0)
        self.num_calls += 1
        return step_key(self.config.run.seed, self.num_calls)

    def to_sample(self, t: Trajectory, sampling: SamplingConfig, version: int) -> Sample:
        """Convert a trajectory to a `Sample`, and record how the response was drawn."""
        self.drawn.note(t.prompt_ids, t.response_ids, t.logprobs, sampling)
        prompt = tuple(t.prompt_ids.tolist())
        response = t.response_ids.tolist()
        return Sample(
            prompt_ids=prompt,
            token_ids=response,
            logprobs=t.logprobs,
            text=self.inputs.tokenizer.decode(response),
            is_truncated=t.truncated,
            sampling=sampling,
            version=version,
            is_drafted=t.origins == Origin.ACCEPTED,
            is_reused=t.origins == Origin.REUSED,
        )


def _is_older(response: CachedResponse | None, version: int) -> bool:
    """Return whether weights before `version` drew every token of a response, if there is one."""
    if response is None:
        return True
    assert response.scores is not None
    return bool(np.all(response.scores.policy_versions < version))


def open_speculation(
    config: TrainConfig,
    cache: RolloutCache,
    times: RoundTimes | None = None,
    *,
    has_history: bool = False,
) -> Speculation:
    return Speculation(
        config.speculation,
        cache,
        times=times,
        bandits=make_bandits(config.speculation, NO_DRAFTERS, config.tuner, config.run.seed),
        has_history=has_history,
    )


def needs_times(speculation: Speculation) -> bool:
    """Return whether the budget needs round times that are not measured yet."""
    config = speculation.config
    return config.enabled and speculation.times is None and config.budget_kind[0] != "fixed"


def warm_up(
    config: TrainConfig,
    engine: Engine,
    weights: Params,
    on_compiled: OnCompiled = unwatched,
) -> RoundTimes | None:
    """Compile the rollout programs; measure and return round times if the budget needs them."""
    sampling = config.sampling
    enabled = config.speculation.enabled
    reach = Reach(engine.config.max_slots, config.rollout.max_prompt_tokens, speculative=enabled)
    compile_buckets.warm_up(engine, weights, sampling, reach, on_compiled)
    if not enabled or config.speculation.budget_kind[0] == "fixed":
        return None
    return round_times.load_or_measure(
        None,
        engine,
        weights,
        sampling,
        reach,
        speculation=config.speculation,
        shared_folder=kept_rounds.folder(),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Sampler:
    """A snapshot of weights to sample from; `version` counts the optimizer steps."""

    _rollouts: Rollouts
    _learner: Learner
    _weights: Params
    version: int

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        sampling: SamplingConfig | None = None,
        seed: int | None = None,
        *,
        drafts: bool = True,
        drafter: Drafter | None = None,
        on_round: OnRound | None = None,
    ) -> list[list[Sample]]:
        """Return `n` responses to each prompt, which is a text or token ids.

        Tokens are a function of weights, prompts, `n`, `sampling` and `seed`; neither `drafter` nor
        configured drafts change any token. With `drafts` False, the call decodes plainly, reuses
        nothing, and leaves no response to draft from or to reuse. Without a seed, each call uses
        new noise, and a program that makes the same calls draws the same tokens.

        With a `Reuse.mode`, a response starts from the last response to its prompt with its sample
        index and sampling, of an earlier version of the weights: `lenient` keeps some of its tokens
        (`Sample.is_reused`), whose log-probs are computed anew. A prompt that a call repeats is
        answered without reuse. With `coupled`, prompt and sample index name the noise, and a seed
        is refused. `on_round` is called periodically with the
        numbers of finished responses and of tokens so far; raising there aborts the call. Raises
        ValueError for prompts that cannot run.
        """
        rollouts = self._rollouts
        inputs = self._rollouts.inputs
        sampling = sampling or rollouts.config.sampling
        ids = _check(inputs, prompts, n, sampling, seed)
        reuse = rollouts.reuse
        reuses = drafts and reuse.mode.repeats
        couples = reuses and reuse.mode.couples_noise
        if couples and seed is not None:
            raise ValueError(
                f'seed: Reuse.mode="coupled" names the noise by prompt and sample index, got the '
                f"seed {seed}; fix: leave it out, or drafts=False"
            )
        step = self.version + 1
        # drafts may come from responses of any sampling, reused responses may not
        names = [repr((prompt, sampling) if reuses else prompt) for prompt in ids]
        keys = [hashlib.sha256(name.encode()).hexdigest() for name in names]
        rule = reuse.rule(step) if reuses else None
        if rule is not None:
            rule = dataclasses.replace(rule, greedy=sampling.temperature == 0)
        if reuses:
            requests = rollouts.requests(keys, ids, n, self.version)
        else:
            requests = [
                Request(g * n + i, prompt, g, i) for i in range(n) for g, prompt in enumerate(ids)
            ]
        last = {r.request_id: r.cached.tokens for r in requests if r.cached is not None}
        with on_mesh(rollouts.mesh):
            made = draft_with(drafter)
            if drafter is None and drafts:
                made = rollouts.drafts(self._weights, keys, ids, n, last)
            key = reuse.key(step) if couples else rollouts.noise_key(seed)
            spec = RolloutSpec(
                self._weights,
                sampling,
                key,
                inputs.model.eos_token_ids,
                self.version,
                made,
                rule=rule,
                words=inputs.token_bytes_for(sampling),
            )
            done = rollouts.engine.run(spec, requests, on_round=on_round)
        if drafts and (reuses or rollouts.speculation.keeps_history):
            reuse.remember(keys, done, step, rollouts.cache)
        for problem in reuse.new_problems():
            for key, prompt in zip(keys, ids, strict=True):
                text = inputs.tokenizer.decode(list(prompt))
                problem = problem.replace(repr(key), f"{text!r:.60}")
            say(f"warning: {problem}", sys.stderr)
        groups: list[list[Sample]] = [[] for _ in ids]
        for t in done:
            groups[t.group_id].append(rollouts.to_sample(t, sampling, self.version))
        return groups

    def answers(self, evals: EvalSets, scorer: Scorer) -> list[Answers]:
        """Return the scored responses to the questions of evaluations, as in `rl.train`."""
        from reprise.rl.run import evaluation  # not needed to sample

        rollouts = self._rollouts
        inputs = dataclasses.replace(rollouts.inputs, evals=evals)
        with on_mesh(rollouts.mesh):
            return evaluation.respond(
                rollouts.engine, self._weights, rollouts.config, inputs, scorer
            )

    @property
    def adapter(self) -> Params:
        """The adapter of these weights."""
        return trained_part(self._weights)

    def forward(self, data: Sequence[Datum]) -> list[np.ndarray]:
        """Return the log-probs of the targets of each datum, float32 [T]. Raises ValueError."""
        with on_mesh(self._rollouts.mesh):
            learner = self._learner
            drawn = self._rollouts.drawn
            return target_logprobs(self._weights, data, drawn, learner.shape, learner.recipe)


@contextlib.contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Compute on a mesh, or on one device."""
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        yield


def _check(inputs: Inputs, prompts: Any, n: Any, sampling: Any, seed: Any) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt. Raises ValueError for invalid arguments."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts: expected a list of texts or of token ids, got {_shown(prompts)}; "
            "fix: put one prompt into a list"
        )
    if not isinstance(sampling, SamplingConfig):
        raise ValueError(
            f"sampling: expected a SamplingConfig, got {_shown(sampling)}; "
            "fix: spec.config.SamplingConfig(temperature=0.5)"
        )
    if not _is_integer(n) or n < 1:
        raise ValueError(f"n: expected at least one response to each prompt, got {n!r}")
    if seed is not None and not (_is_integer(seed) and 0 <= seed < 2**31):
        raise ValueError(f"seed: expected an integer of 0 to 2³¹−1, or None, got {seed!r:.100}")
    return [_encoded(inputs, f"prompt {i}", prompt) for i, prompt in enumerate(prompts)]


def _encoded(inputs: Inputs, name: str, prompt: Any) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(inputs.tokenizer.encode_prompt(prompt))
    try:
        return tuple(operator.index(token) for token in prompt)
    except TypeError:
        raise ValueError(
            f"{name}: expected a text or token ids, got {_shown(prompt)}; fix: encode messages "
            "with policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True)"
        ) from None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"

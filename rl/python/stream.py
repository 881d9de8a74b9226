"""Continuous sampling: requests of several adapters share the rounds of one rollout.

An adapter occupies a place in the engine policy (`models.decoder.lora.for_rows`) while it has
requests. Afterwards another adapter may take this place. A prompt that continues an earlier request
of the same adapter, such as the next turn of a dialogue, computes only its new tokens. Requests
with the same prompt draft from one another and from earlier responses to this prompt, across
adapters.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.config import with_adapters
from reprise.models.decoder import lora
from reprise.models.decoder.transformer import Params
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.placement.engines import engine_settings
from reprise.rl.placement.meshes import engine_mesh
from reprise.rl.python.sampler import (
    Rollouts,
    Sample,
    Sampler,
    needs_times,
    on_mesh,
    open_speculation,
    warm_up,
)
from reprise.rl.records.stats import EngineStats
from reprise.rl.records.trajectory import (
    FinishReason,
    PartialRequest,
    Request,
    Trajectory,
    check_requests,
)
from reprise.rl.runtime.parallel_compile import OnCompiled, unwatched
from reprise.rl.speculation.sources import history_rule
from reprise.rl.warm_up.step_seconds import loss_text, step_seconds
from reprise.rl.workers.engines import make_engine
from reprise.spec.config import SamplingConfig
from reprise.spec.retrieval.group import DraftServer
from reprise.spec.retrieval.history import GrowingHistory
from reprise.spec.reuse.rollout_cache import RolloutCache
from reprise.spec.verification.sampling import NOISE_NAMES, step_key

OnFinish = Callable[[list[Sample] | Exception], None]
OnTokens = Callable[[int, list[int], list[float]], None]  # of a response, by its number
RENEWED_AFTER = 10_000  # requests of a rollout, since its tables grow; then a new rollout opens
LOOK_AFTER = 64
LOOK_WITHIN = 1024  # fetches between checks whether drafts lose time: idle, busy
STUCK_AFTER = 1000  # fetches without a prompt token or response token
HISTORY_TOKENS = 2**21  # of old responses to draft from; each token takes about 100 bytes


@dataclasses.dataclass(frozen=True, eq=False)
class SampleRequest:
    """A request for `n` responses to a prompt from `sampler`.

    `seed` names the noise. Texts have separate noise. A number, 0 to 2³¹ − 1, has the noise of
    `Sampler.sample` with this seed, where `first` is the number of the first response in the call:
    n times the number of the prompt.
    """

    sampler: Sampler
    prompt_ids: tuple[int, ...]
    n: int
    sampling: SamplingConfig
    seed: str | int
    first: int = 0

    def ids(self, number: int) -> list[int]:
        """Return the ids of the engine requests; no other running request has `number`.

        Noise names count up from an offset that a text as `seed` determines, so that no two
        responses of a request share noise.
        """
        first = self.first
        if isinstance(self.seed, str):
            digest = hashlib.sha256(self.seed.encode()).digest()
            first = int.from_bytes(digest[:4], "little")
        return [(number + i) * NOISE_NAMES + (first + i) % NOISE_NAMES for i in range(self.n)]

    def requests(self, number: int, adapter: int, group: int = 0) -> list[Request]:
        """Return the engine requests."""
        seed = self.seed if isinstance(self.seed, int) else None

        def one(i: int, request_id: int) -> Request:
            return Request(
                request_id,
                self.prompt_ids,
                group,
                i,
                sampling=self.sampling,
                adapter=adapter,
                seed=seed,
            )

        return [one(i, request_id) for i, request_id in enumerate(self.ids(number))]


_Waiting = tuple[SampleRequest, OnFinish, OnTokens | None]


@dataclasses.dataclass(eq=False)
class _Running:
    request: SampleRequest
    request_ids: list[int]  # of the engine, by sample index
    place: int
    group: int  # of its responses, for drafts
    on_finish: OnFinish
    on_tokens: OnTokens | None
    done: list[Trajectory] = dataclasses.field(default_factory=list)
    num_shown: dict[int, int] = dataclasses.field(default_factory=dict)  # by sample index


class _Places:
    """The sampler of each place, its unique number, and the number of its running requests."""

    def __init__(self, count: int) -> None:
        self.samplers: list[Sampler | None] = [None] * count
        self.numbers = list(range(count))
        self.busy = [0] * count
        self._used = list(range(count))  # places, least recently used first

    def claim(self, sampler: Sampler) -> tuple[int | None, bool]:
        """Return the place (None: wait) of a sampler, and whether to load its adapter there."""
        is_new = sampler not in self.samplers
        if is_new:
            free = [place for place in self._used if not self.busy[place]]
            if not free:
                return None, False
            place = free[0]
            self.samplers[place] = sampler
            self.numbers[place] += len(self.numbers)
        place = self.samplers.index(sampler)
        self._used.remove(place)
        self._used.append(place)
        return place, is_new


class Stream:
    """A rollout that accepts requests at any time; all calls must come from one thread.

    Tokens are a function of a request and of the sampler weights. `report` is called with a line of
    text when drafts are turned off.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        base: Params,
        places: int,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        config = rollouts.config
        model = lora.with_places(rollouts.inputs.model, places)
        mesh = engine_mesh(config, model, rollouts.mesh)
        self._rollouts = rollouts
        self._base = base
        self._places = _Places(places)
        self._report = report
        self._engine = make_engine(engine_settings(config, model, any_sampling=True), mesh)
        self._adapters = lora.no_adapters(model, rollouts.engine.dtype)
        self._speculation = open_speculation(config, RolloutCache(), has_history=True)
        self._has_drafts = False  # of this rollout
        self._history = GrowingHistory(0)
        if config.speculation.history_source is not None:
            self._history = GrowingHistory(HISTORY_TOKENS, history_rule(config.speculation))
        self._waiting = collections.deque[_Waiting]()
        self._running: dict[int, _Running] = {}  # by the number of its first response
        self._number = self._num_idle = 0
        self._num_tokens: tuple[int, int] | None = None  # at the last fetch
        self._rollout: contextlib.ExitStack | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def stats(self) -> EngineStats:
        """Counts since the rollout was opened."""
        return self._engine.stats

    def warm_up(self, on_compiled: OnCompiled = unwatched) -> None:
        """Compile all sampling programs, and measure the round times that decide about drafts.

        Without this call, programs compile at first use.
        """
        rollouts = self._rollouts
        none = jax.tree.map(jnp.copy, self._adapters)
        with on_mesh(rollouts.mesh):
            times = warm_up(rollouts.config, self._engine, self._params(), on_compiled)
            if needs_times(self._speculation):
                self._speculation = open_speculation(
                    rollouts.config, RolloutCache(), times, has_history=True
                )
            one = lora.no_adapters(rollouts.inputs.model, self._engine.dtype)
            lora.put_adapter(none, one, jnp.int32(0))

    def add(
        self, request: SampleRequest, on_finish: OnFinish, on_tokens: OnTokens | None = None
    ) -> None:
        """Queue a request; a later `step` calls `on_finish` with the responses.

        `on_tokens` is called with the new tokens of a response and their log-probs, before the
        response is complete; it need not get the last tokens. `on_finish` gets a ValueError if
        logits of a response are not finite. Raises ValueError for a request that cannot run.
        """
        config = self._rollouts.config
        tokens = len(request.prompt_ids)
        if request.n < 1:
            raise ValueError(f"expected at least 1 response to a request, got n={request.n}")
        one = dataclasses.replace(request, n=1)
        check_requests(self._engine.model, one.requests(0, 0), config.sampling)
        if tokens + request.sampling.max_new_tokens > config.longest_tokens:
            raise ValueError(
                f"expected at most {config.longest_tokens} tokens of prompt and response, got "
                f"{tokens} and {request.sampling.max_new_tokens}: lower max_tokens, or raise "
                "Rollout.max_prompt_tokens and Sampling.max_new_tokens of the server"
            )
        self._waiting.append((request, on_finish, on_tokens))

    def drop(self, request: SampleRequest) -> None:
        """Drop a request that waits or runs, without a call of `on_finish`; ignore any other."""
        others = [waiting for waiting in self._waiting if waiting[0] is not request]
        self._waiting = collections.deque(others)
        for number, running in list(self._running.items()):
            if running.request is request:
                self._abandon(number)

    def step(self) -> None:
        """Run the rounds of one fetch; an error drops all requests."""
        with on_mesh(self._rollouts.mesh):
            try:
                if self._ends and not self._running:
                    self.close()
                if self._rollout is None:
                    self._open()
                self._begin()
                for t in self._engine.step():
                    assert isinstance(t, Trajectory), "whole requests have no chunks"
                    self._end(t)
                self._show()
                self._check_progress()
                self._look()
            except BaseException:
                self._waiting.clear()
                self.close()
                self._engine.free()  # the step may have donated the cache
                raise

    def close(self) -> None:
        """Close the rollout; the next step opens a new rollout."""
        rollout = self._rollout
        self._rollout = None
        self._running = {}
        self._number = 0
        self._num_idle = 0
        self._history.drop_groups()
        self._places.busy = [0] * len(self._places.busy)
        if rollout is not None:
            rollout.close()

    def _open(self) -> None:
        config = self._rollouts.config
        inputs = self._rollouts.inputs
        if needs_times(self._speculation):
            self.warm_up()
        speculation = self._speculation
        self._siblings = DraftServer()
        self._has_drafts = not speculation.is_off
        if not self._has_drafts:
            self._history = GrowingHistory(0)
        drafts = speculation.drafter_factory((), (), server=self._siblings, index=self._history)
        more: dict[str, Any] = {"words": inputs.tokenizer.token_bytes, "keeps_responses": True}
        spec = RolloutSpec(
            self._params(),
            config.sampling,
            step_key(0, 0),
            inputs.model.eos_token_ids,
            drafts=drafts,
            **more,
        )
        sizes: dict[str, Any] = {
            "max_requests": self._engine.config.max_slots,
            "max_tokens": config.longest_tokens,
        }
        rollout = contextlib.ExitStack()
        rollout.enter_context(self._engine.rollout(spec, **sizes))
        self._rollout = rollout

    def _params(self) -> Params:
        assert self._engine.model.lora is not None
        params = with_adapters(self._base, self._adapters, self._engine.model.lora)
        return self._engine.place(params, self._engine.model)

    @property
    def _ends(self) -> bool:
        """Return whether the rollout must be renewed after its running requests finish."""
        return self._number >= RENEWED_AFTER or (self._has_drafts and self._speculation.is_off)

    def _check_progress(self) -> None:
        """Raise RuntimeError if many fetches computed no token, so that no request can finish."""
        num_tokens = self.stats.tokens, self.stats.prefilled_tokens
        is_idle = num_tokens == self._num_tokens and self.has_work
        self._num_tokens = num_tokens
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if self._num_idle >= STUCK_AFTER:
            raise RuntimeError(
                f"no token in {STUCK_AFTER} fetches, with {len(self._running)} requests that run "
                f"and {len(self._waiting)} that wait"
            )

    def _look(self) -> None:
        """Check whether drafts of the last rounds saved time, as after a training step."""
        rounds = self._engine.stats.timeline
        speculation = self._speculation
        if len(rounds) < (LOOK_WITHIN if self.has_work else LOOK_AFTER):
            return
        if (times := speculation.times_now) is not None and self._has_drafts:
            speculation.seconds.played(step_seconds(rounds, times, has_history=True))
            if speculation.is_off:
                lost = loss_text(speculation.seconds, has_history=True)
                self._report(f"{lost}: they are turned off (Speculation.losing_steps)")
        rounds.clear()

    def _begin(self) -> None:
        """Start waiting requests in order, up to the first request without a free place.

        No request joins a rollout that must be renewed.
        """
        while self._waiting and not self._ends:
            request, on_finish, on_tokens = self._waiting[0]
            place, is_new = self._places.claim(request.sampler)
            if place is None:
                return
            self._waiting.popleft()
            if is_new:
                adapter = request.sampler.adapter
                at = jnp.int32(place)
                self._adapters = lora.put_adapter(self._adapters, adapter, at)
                self._engine.use(self._params())
            group = self._history.begin(request.prompt_ids, request.n)
            self._running[self._number] = _Running(
                request=request,
                request_ids=request.ids(self._number),
                place=place,
                group=group,
                on_finish=on_finish,
                on_tokens=on_tokens,
            )
            self._places.busy[place] += 1
            requests = request.requests(self._number, self._places.numbers[place], group)
            self._engine.add([PartialRequest(r) for r in requests])
            self._number += request.n

    def _end(self, t: Trajectory) -> None:
        """Record a response; if it completes its request, call `on_finish`."""
        number = t.request_id // NOISE_NAMES - t.sample_index
        if (running := self._running.get(number)) is None:
            return  # another response of this request failed in this round
        request = running.request
        if t.finish_reason is FinishReason.NOT_FINITE:
            return self._fail(number, t)
        running.done.append(t)
        self._leave_group(t.group_id, t.response_ids)
        if len(running.done) < request.n:
            return
        self._free(number)
        running.done.sort(key=lambda one: one.sample_index)
        sampling = request.sampling
        version = request.sampler.version
        running.on_finish([self._rollouts.to_sample(t, sampling, version) for t in running.done])

    def _show(self) -> None:
        """Call `on_tokens` with the tokens since the last call."""
        for running in self._running.values():
            if running.on_tokens is None:
                continue
            for i, request_id in enumerate(running.request_ids):
                shown = running.num_shown.get(i, 0)
                tokens, logprobs = self._engine.rows.table.response(request_id, shown)
                if len(tokens):
                    running.num_shown[i] = shown + len(tokens)
                    running.on_tokens(i, tokens.tolist(), logprobs.tolist())

    def _fail(self, number: int, t: Trajectory) -> None:
        """Fail a request because logits of one of its responses are not finite."""
        running = self._abandon(number)
        version = running.request.sampler.version
        running.on_finish(
            ValueError(
                f"the logits of these weights (version {version}) after "
                f"{t.num_tokens - 1} tokens of response {t.sample_index} are not finite: no token "
                "can be drawn; fix: sample from other weights, and train with a lower learning rate"
            )
        )

    def _abandon(self, number: int) -> _Running:
        """Remove a running request and its unfinished responses."""
        running = self._free(number)
        request = running.request
        for _ in range(request.n - len(running.done)):
            self._leave_group(running.group, None)
        self._engine.remove(running.request_ids)
        return running

    def _free(self, number: int) -> _Running:
        """Remove a running request; its place becomes free if no other request runs there."""
        running = self._running.pop(number)
        self._places.busy[running.place] -= 1
        return running

    def _leave_group(self, group: int, response: np.ndarray | None) -> None:
        """Remove a response from a group; unless None, later requests may draft from it."""
        if self._history.end(group, response):
            self._siblings.forget([group])

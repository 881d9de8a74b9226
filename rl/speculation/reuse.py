"""Reuse across epochs: requests that start from responses of the last epoch.

The `Reuse` of a run makes the requests of a step, each with the response of the last epoch to the
same (prompt, sample index) if cached, and the rule that decides how many of its tokens are kept.
Samples that draw fresh noise (`spec.reuse.renewal`) reuse nothing. After scoring, `remember` keeps
the responses of the step for the next epoch.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from reprise.rl.records.stats import EngineStats, cached_seconds
from reprise.rl.records.trajectory import Origin, Prompt, Request, Trajectory
from reprise.rl.speculation.config import MAX_SAMPLES, ReuseConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.reuse.agreement import Agreement, RunMisses, agreement, miss_rate, miss_rates
from reprise.spec.reuse.prefix_rule import PrefixRule, log, parse_mode, parse_schedule
from reprise.spec.reuse.renewal import Renewal, renewed_name
from reprise.spec.reuse.rollout_cache import CachedGroup, CachedResponse, RolloutCache, Scores
from reprise.spec.round_times import RunSeconds
from reprise.spec.verification.sampling import NOISE_NAMES, step_key

COUPLED_STEP = 0  # of noise that repeats; training steps count from 1


class Reuse:
    """The reuse of a run, which makes requests from the cache and adapts the lenience."""

    def __init__(
        self,
        config: ReuseConfig,
        cache: RolloutCache,
        *,
        seed: int,
        greedy: bool,
        seconds: RunSeconds | None = None,
    ) -> None:
        self.mode = parse_mode(config.mode)
        self._schedule = parse_schedule(config.schedule)
        self._renewal = Renewal(config.fresh_share, config.renew_groups)
        self._max_age_steps = config.max_age_steps
        self._cache = cache
        self._seed = seed
        self._greedy = greedy
        self._log_lenience = log(self.mode.lenience)
        self._problems: list[str] = []
        # groups that requests of a step repeat; the cache may change before responses arrive
        self._last: dict[int, dict[str, CachedGroup | None]] = {}
        self._misses = RunMisses()
        self._seconds = seconds or RunSeconds()  # of all steps so far

    def key(self, step: int) -> jax.Array:
        """Return the noise key of a step; with `coupled` all steps have the same key."""
        return step_key(self._seed, COUPLED_STEP if self.mode.couples_noise else step)

    def rule(self, step: int) -> PrefixRule | None:
        """Return the rule that decides how much of a cached response is kept; None without reuse.

        Also None if `coupled` reuse is off because it lost time, which changes no token.
        """
        has_lost = self.mode.couples_noise and self._seconds.reuse_is_off
        if not self.mode.enabled or has_lost:
            return None
        return PrefixRule(self.mode, self._at(step), self._seed, step, self._greedy)

    def requests(
        self,
        keys: Sequence[str],
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        size: int,
        *,
        step: int,
        before: Sequence[str] = (),
        samplings: Sequence[SamplingConfig | None] | None = None,
    ) -> list[Request]:
        """Return `size` requests for each prompt, with responses to reuse, by sample index.

        `keys` name the examples, `numbers` are their indices in the data set; `before` are the keys
        of earlier sampling passes of the step, `samplings` the settings of prompts that have
        separate settings. An example that a step repeats is answered without reuse, with different
        noise.
        """
        seen = collections.Counter(before)
        again = list[int]()
        for key in keys:
            again.append(seen[key])
            seen[key] += 1
        last = [
            self._group(key, prompt) if self.mode.repeats else None
            for key, prompt in zip(keys, prompts, strict=True)
        ]
        self._last.setdefault(step, {}).update(zip(keys, last, strict=True))
        cached = [
            {} if times else self._reusable(key, prompt, group, size, step)
            for key, prompt, group, times in zip(keys, prompts, last, again, strict=True)
        ]
        fresh = [self._renewal.is_fresh(i, size) for i in range(size)]

        def request(g: int, i: int) -> Request:
            request_id = (len(before) + g) * size + i
            if self.mode.couples_noise:
                own = MAX_SAMPLES + (again[g] - 1) * size if again[g] else 0
                name = 2 * MAX_SAMPLES * numbers[g] + own + i
                renewals = step if fresh[i] else self._renewal.renewals(last[g])
                request_id = renewals * NOISE_NAMES + renewed_name(name, renewals)
            reused = None if fresh[i] else cached[g].get(i)
            sampling = samplings[g] if samplings else None
            return Request(request_id, prompts[g], g, i, cached=reused, sampling=sampling)

        return [request(g, i) for i in range(size) for g in range(len(prompts))]

    def _group(self, key: str, prompt: Prompt, back: int = 0) -> CachedGroup | None:
        """Return the group of a prompt in the last epoch, or `back` epochs before that."""
        group = self._cache.get(key, back)
        if group is not None and group.prompt_ids.tolist() != list(prompt):
            self._problems.append(f"{key!r} is answered afresh: its cached prompt is another one")
            return None
        return group

    def _reusable(
        self, key: str, prompt: Prompt, last: CachedGroup | None, size: int, step: int
    ) -> Mapping[int, CachedResponse]:
        """Return the responses that may be reused, by sample index."""
        if last is None or not self.mode.enabled or self._renewal.is_due(last):
            return {}
        group = self._group(key, prompt, self.mode.back) if self.mode.back else last
        if group is None:
            return {}
        usable = {r.sample_index: r for r in self._expected(group) if r.scores is not None}
        if len(usable) != size:
            self._problems.append(
                f"{key!r} has {len(usable)} cached responses where {size} are asked for: the "
                "others are generated afresh"
            )
        if self._max_age_steps is None or self.mode.couples_noise:
            return usable
        oldest = step - 1 - self._max_age_steps
        return {i: r for i, r in usable.items() if _oldest_version(r) >= oldest}

    def _expected(self, group: CachedGroup) -> Sequence[CachedResponse]:
        """Return the responses of a group with their expected miss rates."""
        if not self.mode.couples_noise:
            return group.responses
        run_rate = self._misses.rate
        known = {r.sample_index: r.agreement for r in group.responses if r.agreement is not None}
        group_rate = miss_rate(list(known.values()), run_rate)
        rates = miss_rates(known, run_rate)
        return [
            dataclasses.replace(r, miss_rate=rates.get(r.sample_index, group_rate))
            for r in group.responses
        ]

    def remember(
        self,
        keys: Sequence[str],
        trajectories: Sequence[Trajectory],
        step: int,
        cache: RolloutCache,
    ) -> dict[str, float]:
        """Keep responses of a step in `cache` for the next epoch; return metrics of repetition."""
        last = {key: self._last.get(step, {}).get(key) for key in keys}
        self._last = {later: groups for later, groups in self._last.items() if later > step}
        if not self.mode.repeats:
            remember(cache, keys, trajectories, scored=False)
            return {}
        renewals = {key: self._renewal.renewals(group) for key, group in last.items()}
        agreements = self._agreements(keys, trajectories, last)
        self._misses.played([one for group in agreements.values() for one in group.values()])
        kept = remember(
            cache,
            keys,
            trajectories,
            scored=self.mode.enabled,
            renewals=renewals,
            agreements=agreements,
        )
        metrics = {"spec/renewed_groups": float(sum(map(self._renewal.is_due, kept.values())))}
        pairs = [
            (before.tokens, now.tokens)
            for key, group in kept.items()
            for before, now in _same_samples(last[key], group)
        ]
        if pairs:
            repeated = sum(np.array_equal(before, now) for before, now in pairs)
            metrics["spec/repeated_fraction"] = repeated / len(pairs)
        return metrics | self._ages(trajectories, step)

    def _agreements(
        self,
        keys: Sequence[str],
        trajectories: Sequence[Trajectory],
        last: Mapping[str, CachedGroup | None],
    ) -> dict[str, dict[int, Agreement]]:
        """Compare responses with the last epoch, by sample, if they have the same noise."""
        found: dict[str, dict[int, Agreement]] = {}
        if not (self.mode.enabled and self.mode.couples_noise):
            return found
        sizes = collections.Counter(keys[t.group_id] for t in trajectories)
        for t in trajectories:
            key = keys[t.group_id]
            group = last[key]
            is_fresh = self._renewal.is_fresh(t.sample_index, sizes[key])
            if group is None or is_fresh or self._renewal.is_due(group):
                continue
            before = {r.sample_index: r.tokens for r in group.responses}
            if t.sample_index in before:
                one = agreement(before[t.sample_index], t.response_ids)
                found.setdefault(key, {})[t.sample_index] = one
        return found

    def _ages(self, trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
        """Return the age of the kept tokens, in updates; tokens of `coupled` have no age."""
        if not self.mode.enabled or self.mode.couples_noise:
            return {}
        kept = [t.policy_versions[t.origins == Origin.REUSED] for t in trajectories]
        ages = step - 1 - np.concatenate([*kept, np.empty(0, np.int32)])
        if not ages.size:
            return {}
        return {"spec/reused_age": float(ages.mean()), "spec/reused_age_max": float(ages.max())}

    def after_update(self, metrics: Mapping[str, float]) -> None:
        """Adapt the lenience to the share of tokens that the updates of the step clipped."""
        clipped = metrics.get("clip_ratio/region_mean")
        if clipped is not None:
            self._log_lenience = self._schedule.after(self._log_lenience, clipped)

    def metrics(
        self, stats: EngineStats, num_tokens: int, step: int, rule: PrefixRule | None = None
    ) -> dict[str, float]:
        """Return metrics of reuse by the `rule` of a step, over `num_tokens` response tokens."""
        if not self.mode.enabled:
            return {}
        v = stats.cached
        metrics = {
            "spec/reused_fraction": v.kept_tokens / max(num_tokens, 1),
            "spec/full_reuse_fraction": v.whole / max(v.responses, 1),
            "spec/verified_prefix_tokens": v.kept_tokens / max(v.responses, 1),
            "spec/cached_responses": float(v.responses),
            "spec/cached_accept_rate": v.kept_tokens / max(v.decided_tokens, 1),
            "spec/cached_seconds": cached_seconds(stats.timeline),
        }
        if self.mode.name in ("lenient", "delayed"):
            log_lenience = self._at(step) if rule is None else rule.log_lenience
            metrics["spec/lenience"] = math.exp(log_lenience)
        return metrics

    def new_problems(self) -> list[str]:
        """Return messages about failed reuse since the last call: a few, and a count of others."""
        problems = list(dict.fromkeys(self._problems))
        self._problems = []
        more = [f"{len(problems) - 3} more prompts likewise"] if len(problems) > 4 else []
        return problems[: 3 if more else 4] + more

    def state(self) -> dict[str, Any]:
        misses = [self._misses.different, self._misses.decided]
        return {"log_lenience": self._log_lenience, "misses": misses}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._log_lenience = float(state["log_lenience"])
        self._misses = RunMisses(*map(float, state["misses"]))

    def _at(self, step: int) -> float:
        return self._schedule.at(self.mode.lenience, self._log_lenience, step)


def remember(
    cache: RolloutCache,
    keys: Sequence[str],
    trajectories: Sequence[Trajectory],
    *,
    scored: bool,
    renewals: Mapping[str, int] | None = None,
    agreements: Mapping[str, Mapping[int, Agreement]] | None = None,
) -> dict[str, CachedGroup]:
    """Keep the responses of a step for the next epoch, and return them by key.

    Group g has the key `keys[g]`. `renewals` counts the renewals of the noise of each prompt before
    the draws (None means 0); `agreements` compares samples with their previous responses.
    """
    groups: dict[str, dict[int, Trajectory]] = {key: {} for key in keys}
    for t in trajectories:
        groups[keys[t.group_id]][t.sample_index] = t
    kept = {}
    for key, group in groups.items():
        if not group:
            continue
        before = {} if agreements is None else agreements.get(key, {})
        responses = [_cached(group[i], before.get(i), scored=scored) for i in sorted(group)]
        prompt_ids = np.asarray(next(iter(group.values())).prompt_ids, np.int32)
        taught = len(group) == 1 or len({t.reward for t in group.values()} - {None}) > 1
        num_renewals = 0 if renewals is None else renewals[key]
        kept[key] = CachedGroup(prompt_ids, tuple(responses), taught, num_renewals)
        cache.replace(key, kept[key])
    return kept


def _cached(t: Trajectory, before: Agreement | None, *, scored: bool) -> CachedResponse:
    scores = Scores(t.logprobs, t.emission_logprobs, t.policy_versions) if scored else None
    return CachedResponse(t.sample_index, t.response_ids, t.reward or 0.0, scores, before)


def _same_samples(
    last: CachedGroup | None, group: CachedGroup
) -> list[tuple[CachedResponse, CachedResponse]]:
    """Return pairs of responses with the same sample index in both groups."""
    before = {} if last is None else {r.sample_index: r for r in last.responses}
    return [(before[r.sample_index], r) for r in group.responses if r.sample_index in before]


def _oldest_version(response: CachedResponse) -> int:
    """Return the version of the policy that drew the oldest token of a response."""
    assert response.scores is not None
    return int(response.scores.policy_versions.min(initial=2**31 - 1))

"""The answers of a pipeline, the slow way: one engine, each step when it is due, nothing ahead.

A source of responses for `train_step`. What a step is answered with is written down here
once more, from docs/architecture.md: its weights, its rule, its cached responses, its prompts, and
the names of its noise.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time

import jax
import numpy as np

from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.exchange.responses import Scorer
from reprise.rl.gin.loader import load
from reprise.rl.losses.advantages import informative_groups
from reprise.rl.metrics.writer import Timings
from reprise.rl.records.stats import EngineStats
from reprise.rl.records.trajectory import Request
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from reprise.rl.speculation.reuse import remember
from reprise.rl.steps.position import RunPosition
from reprise.rl.steps.rollouts import Prompts, Rollouts, groups_to_sample, prompts_at
from reprise.rl.steps.step import train_step
from reprise.spec.reuse.renewal import renewed_name
from reprise.spec.verification.sampling import step_key
from tests.support import tiny_run


class OneBehind:
    """Called once a step, in order, from the first one on."""

    def __init__(self):
        self.weights, self.rules, self.begins = {}, {}, {1: 0}
        self.cursor, self.not_remembered = 0, None
        self.renewals = {}  # of the noise of each prompt of the step
        self.answers = []  # (step, phase, group, sample, number in the data, tokens)

    def __call__(self, system, params, cursor, step, timings):
        config = system.config
        size, extra = config.rollout.prompts_per_step, config.algorithm.resolved.max_extra_phases
        copied = jax.tree.map(np.array, params)
        for s in {step, step + 1} - set(self.weights):
            self.weights[s], self.rules[s] = copied, system.reuse.rule(s)
        if step == 1:
            self.cursor = size
        if step < config.run.steps:
            self.begins[step + 1] = self.cursor
            self.cursor += size
        # the first pass knows what was answered up to the step before the last
        new = prompts_at(system, self.begins[step], size)
        done, prompts = self.answer(system, step, step, new, Prompts(), 0), new
        if self.not_remembered is not None:
            remember(system.cache, *self.not_remembered, **self.kept)
        # further ones the last one too; the policy at hand answers them
        for phase in range(1, 1 + (extra or 0)):
            used = informative_groups([t.reward for t, *_ in done], [t.group_id for t, *_ in done])
            if not (missing := groups_to_sample(size, len(prompts), len(used))):
                break
            new = prompts_at(system, self.cursor, missing)
            self.cursor = new.end
            done += self.answer(system, step, step + 1, new, prompts, phase)
            prompts += new
        done.sort(key=lambda d: (d[0].group_id, d[0].sample_index))
        trajectories, scores, texts = map(list, zip(*done, strict=True))
        self.not_remembered = prompts.keys, trajectories
        mode = system.reuse.mode
        self.kept = {"scored": mode.enabled, "renewals": self.renewals if mode.repeats else None}
        self.renewals = {}
        used = set(range(size))
        if extra is not None:
            used = informative_groups(
                [t.reward for t in trajectories], [t.group_id for t in trajectories]
            )
        end = self.begins.get(step + 1, self.cursor)
        stats = system.engine.stats
        return Rollouts(
            trajectories, scores, texts, stats, prompts, frozenset(used), {}, cursor=end
        )

    def answer(self, system, step, by, new, before, phase):
        """The scored responses of a step to new prompts, by weights and rule of step `by`."""
        config = system.config
        size = config.rollout.group_size
        phases = 1 + (config.algorithm.resolved.max_extra_phases or 0)
        first = (step - 1) * phases * config.rollout.prompts_per_step
        times, requests = collections.Counter(before.keys), []
        for g, (key, tokens, number) in enumerate(
            zip(new.keys, new.tokens, new.numbers, strict=True)
        ):
            group = len(before) + g
            cached = {}
            renewals = 0
            if system.reuse.mode.repeats and (last := system.cache.get(key)) is not None:
                renewals = last.renewals + (not last.taught)
                of_back = system.cache.get(key, system.reuse.mode.back)
                if not times[key] and last.taught and of_back is not None:
                    cached = {r.sample_index: r for r in of_back.responses}
            for i in range(size):
                name = (first + group) * size + i
                is_fresh = i == size - 1  # an eighth of the group, rounded up
                if system.reuse.mode.couples_noise:  # 512 names for the first time in a step
                    name = 1024 * number + i
                    name += 512 + (times[key] - 1) * size if times[key] else 0
                    name = renewed_name(name, step if is_fresh else renewals)
                self.renewals[key] = renewals
                reused = None if is_fresh else cached.get(i)
                requests.append(Request(name, tokens, group, i, cached=reused))
            times[key] += 1
        spec = RolloutSpec(
            self.weights[by],
            config.sampling,
            step_key(config.run.seed, 0),
            system.inputs.model.eos_token_ids,
            policy_version=max(by - 2, 0),
            rule=self.rules[by],
        )
        scorer = Scorer(system.inputs.tokenizer, system.rewards, lambda: None, size)
        scorer.examples.update(enumerate(new.examples, len(before)))
        done = system.engine.run(spec, requests, on_finish=scorer)
        for t in done:
            number = new.numbers[t.group_id - len(before)]
            names = step, phase, t.group_id, t.sample_index, number
            self.answers.append((*names, t.response_ids.tolist()))
        found = scorer.responses(done, EngineStats())
        rows = zip(found.trajectories, found.scores, found.texts, strict=True)
        scored = {row[0].request_id: row for row in rows}
        return [scored[t.request_id] for t in done]


@dataclasses.dataclass
class Reference:
    """The results of a run of this source, step by step."""

    texts: list[list[str]]
    examples: list[list[str]]
    rewards: list[list[float]]
    used: list[int]
    reused: list[int]
    versions: list[list[list[int]]]
    leaves: list[np.ndarray]


def run(tiny, *overrides) -> Reference:
    """The steps of a configuration, on one engine."""
    config = load(TrainConfig, [tiny], [*overrides, "Sched.mode='sync'", "Sched.workers=1"])
    source, found = OneBehind(), Reference([], [], [], [], [], [], [])

    def noted(*args):
        rollouts = source(*args)
        found.texts.append(rollouts.completions)
        found.examples.append([rollouts.prompts.keys[t.group_id] for t in rollouts.trajectories])
        found.rewards.append([s.total for s in rollouts.scores])
        found.used.append(len(rollouts.used_groups))
        found.reused.append(rollouts.stats.cached.kept_tokens)
        found.versions.append([t.policy_versions.tolist() for t in rollouts.trajectories])
        return rollouts

    with contextlib.ExitStack() as stack:
        system, state = stack.enter_context(tiny_run.opened(config, open_inputs(config)))
        position = RunPosition()
        while position.step < config.run.steps:
            timings = Timings(time.perf_counter)
            state, position, _ = train_step(system, state, position, timings, noted)
        found.leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    return found

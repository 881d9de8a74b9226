"""Rollouts under the bandit, for `benchmarks.drafter`: with all drafters, and with each alone.

The shipped policy answers the same prompts with the same noise under every way of drafting, in
turns: identical tokens. History is an epoch under other noise; the learned drafter was trained on
it. `tuner_gap` compares the bandit's choice with the exhaustive best.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.turns import in_turns
from models.transformer import Params
from rl.config import TrainConfig
from rl.drafter_training.trainer import BufferSink, DrafterTrainer
from rl.engine.config import EngineConfig
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec, draft_with
from rl.inputs import Inputs
from rl.speculation.config import SpeculationConfig
from rl.speculation.device_drafters import NO_DRAFTERS, DeviceDrafters, LearnedDrafter
from rl.speculation.reuse import remember
from rl.speculation.sources import Speculation
from rl.trajectory import Request, Trajectory
from rl.warm_up import compile_buckets
from rl.warm_up.rollout_programs import Reach
from rl.warm_up.round_times import load_or_measure
from spec.budget.bandit import BanditBudget, BanditConfig, BegMab, Strategy, strategies
from spec.budget.config import LEARNED, TunerConfig
from spec.budget.union import DrafterUnion
from spec.config import SamplingConfig
from spec.eagle import model as eagle
from spec.eagle.config import TreeConfig
from spec.eagle.data_buffer import DataBuffer
from spec.eagle.model import EagleWeights
from spec.reuse.rollout_cache import RolloutCache
from spec.round_times import RoundTimes
from spec.sampling import step_key

ENGINE = EngineConfig(slots=32, min_slots=4, min_positions=384, max_nodes=8)
TUNER = TunerConfig(thresholds=(1, 5), verify_tokens=(7, 3), depths=(2, 4))
TREE = TreeConfig(max_depth=4, top_k=2)
SOURCES = ("history", "group", "own", "learned")
PROMPTS, GROUP = 6, 8
TRAINING_STEPS = 300
GAP_REQUESTS = 4  # the range of few requests


class _Ground:
    """Engine, prompts, history, trained drafter and measured seconds: the same for every way."""

    def __init__(self, inputs: Inputs, params: Params, config: TrainConfig) -> None:
        self.params, self.sampling = params, SamplingConfig(max_new_tokens=256)
        self._inputs = inputs
        self.engine = Engine(inputs.model, ENGINE, feature_layers=())
        shape = eagle.config_for(inputs.model)
        weights = EagleWeights(shape, eagle.init(shape, jax.random.key(0)))
        self.learned, self.cache = LearnedDrafter(weights, TREE), RolloutCache()
        self.prompts = [inputs.encode(inputs.task[i], config.task) for i in range(PROMPTS)]
        self.keys = [f"p{i}" for i in range(PROMPTS)]
        options = dataclasses.replace(config.drafter, micro_batches=1, batch_rows=4)
        given = options, config.drafter_training, self.learned, DataBuffer(config.data_buffer)
        trainer = DrafterTrainer(*given, seed=0, temperature=1.0)
        trainer.begin(1)
        past = self.run(step_key(50, 0), sink=BufferSink(trainer.buffer, 1))
        past = [dataclasses.replace(t, reward=1.0) for t in past]
        remember(self.cache, self.keys, past, scored=False)
        trainer.run_steps(TRAINING_STEPS, trainer.context(self.engine, params))
        trainer.publish()
        drafters: DeviceDrafters = {LEARNED: self.learned}
        longest = max(map(len, self.prompts))
        reach = Reach(PROMPTS * GROUP, longest, speculative=True, drafters=drafters)
        compile_buckets.warm_up(self.engine, params, self.sampling, reach)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rounds.json"
            self.times = load_or_measure(path, self.engine, params, self.sampling, reach)

    def requests(self, groups: Sequence[int] | None = None) -> list[Request]:
        chosen = range(PROMPTS) if groups is None else groups
        return [Request(g * GROUP + i, self.prompts[g], g, i) for i in range(GROUP) for g in chosen]

    def run(
        self, key: jax.Array, requests: Sequence[Request] | None = None, **options: Any
    ) -> list[Trajectory]:
        stop = self._inputs.model.eos_token_ids
        spec = RolloutSpec(self.params, self.sampling, key, stop, **options)
        return self.engine.run(spec, self.requests() if requests is None else requests)

    def speculation(self, sources: Sequence[str], tuner: TunerConfig = TUNER) -> Speculation:
        config = SpeculationConfig(budget="bandit", sources=tuple(sources))  # type: ignore[arg-type]
        drafters: DeviceDrafters = {LEARNED: self.learned} if LEARNED in sources else NO_DRAFTERS
        speculation = Speculation(config, self.cache, drafters, tuner)
        speculation.times = self.times
        return speculation


def tuner(inputs: Inputs, params: Params, config: TrainConfig, *, turns: int) -> dict[str, Any]:
    """Return the speed with all drafters under the tuner, over the best of each alone."""
    ground = _Ground(inputs, params, config)
    ways = {name: ground.speculation((name,)) for name in SOURCES}
    ways["all"] = ground.speculation(SOURCES)
    found: dict[str, list[list[int]]] = {name: [] for name in (*ways, "plain")}  # by turn

    def phase(name: str) -> float:
        options: dict[str, Any] = {}
        if name != "plain":
            options = {"drafts": ways[name].drafter_factory(ground.keys, ground.prompts)}
        began_s = time.perf_counter()
        done = ground.run(step_key(51, len(found[name])), **options)
        seconds = time.perf_counter() - began_s
        found[name].append([token for t in done for token in t.response_ids.tolist()])
        return seconds

    seconds = in_turns({name: partial(phase, name) for name in found}, turns)
    medians = {name: float(np.median(s)) for name, s in seconds.items()}
    best = min(SOURCES, key=medians.__getitem__)
    for way in ways.values():
        way.__exit__()
    return {
        "tuner_ratio": round(float(np.median(seconds[best] / seconds["all"])), 4),
        "tuner_best_single": best,
        "tuner_over_plain": round(medians["plain"] / medians["all"], 4),
        "tuner_rollout_s": {name: round(s, 4) for name, s in medians.items()},
        "tuner_tokens_same": all(tokens == found["plain"] for tokens in found.values()),
        **_gap(ground),
    }


class _Forced(BanditBudget):
    """Always chooses the same arm; `rounds` are the bandit's observations of it."""

    def __init__(self, strategy: Strategy, times: RoundTimes, union: DrafterUnion) -> None:
        self._forced, self.rounds = strategy, list[tuple[float, float]]()
        super().__init__(self, times, union)  # type: ignore[arg-type]

    def select(self, batch_size: int) -> Strategy:
        return self._forced

    def candidates(self, batch_size: int) -> tuple[Strategy, ...]:
        return (self._forced,)

    def record(
        self, strategy: Strategy, elapsed_s: float, accept_lens: Sequence[float], batch_size: int
    ) -> None:
        self.rounds.append((elapsed_s, float(np.mean(accept_lens))))


def _gap(ground: _Ground) -> dict[str, Any]:
    """Play every arm of the range of few requests; then the bandit on these observations."""
    seconds, accepts = dict[Strategy, list[float]](), dict[Strategy, list[float]]()
    for arm in strategies(TUNER, SOURCES, TREE.top_k, {"learned": TREE.max_depth}):
        if arm.verify_tokens not in (0, TUNER.verify_tokens[0]):
            continue
        rounds = list[tuple[float, float]]()
        for turn in range(3):
            key = step_key(52, turn)
            spec = RolloutSpec(ground.params, ground.sampling, key)
            context = ground.engine.drafter_context(spec)
            with ground.speculation(SOURCES) as speculation:
                union, _ = speculation.drafter_factory(ground.keys, ground.prompts)(context)
                assert isinstance(union, DrafterUnion)
                forced = _Forced(arm, ground.times, union)
                some = ground.requests([turn % PROMPTS])[:GAP_REQUESTS]
                ground.run(key, some, drafts=draft_with(union, forced))
            rounds += forced.rounds
        seconds[arm], accepts[arm] = [s for s, _ in rounds], [a for _, a in rounds]
    bandit = BanditConfig((1,), TUNER.epsilon, TUNER.window)
    found = tuner_gap(seconds, accepts, bandit, 1)  # of means over the requests
    arms = dict[str, dict[str, float]]()
    for arm, taken_s in seconds.items():
        accept = 1 + statistics.mean(accepts[arm])
        rate = accept / statistics.mean(taken_s)
        arms[arm.name] = {"tokens_per_s": round(rate, 1), "accept_length": round(accept, 3)}
    return found | {"tuner_arms": arms}


def tuner_gap(
    round_s: Mapping[Strategy, Sequence[float]],
    accept_lens: Mapping[Strategy, Sequence[float]],
    config: BanditConfig,
    batch_size: int,
    *,
    rounds: int = 300,
    seeds: int = 200,
) -> dict[str, float]:
    """Return how much slower than the best strategy the bandit's choice is after some rounds.

        value(s) = (mean accept_lens + 1) · batch_size / mean round_s      gap = 1 − value / best

    Seconds and accepted draft tokens are resampled from each strategy's measurements. `best` is
    over all of them. `tuner_gap` is the median over seeds. Source: TLT, Algorithm 1.
    Raises ValueError if a strategy lacks measurements.
    """
    strategies = tuple(round_s)
    seconds = {s: np.asarray(round_s[s], float).reshape(-1) for s in strategies}
    accepts = {s: np.asarray(accept_lens.get(s, ())).reshape(-1) for s in strategies}
    missing = [s.name for s in strategies if not (len(seconds[s]) and len(accepts[s]))]
    if missing:
        raise ValueError(
            f"expected seconds and accepted drafts of each strategy, got none for {missing}: "
            "measure at least one round of each (plain decoding accepts 0)"
        )
    value = {s: (accepts[s].mean() + 1) * batch_size / seconds[s].mean() for s in strategies}
    best = max(value.values())
    gaps, found = [], 0
    for seed in range(seeds):
        rng = np.random.default_rng([seed, 1])  # of the rounds; the tuner has another
        tuner = BegMab(strategies, config, seed)
        for _ in range(rounds):
            s = tuner.select(batch_size)
            tuner.record(s, rng.choice(seconds[s]), rng.choice(accepts[s], batch_size), batch_size)
        held = tuner.best(batch_size)
        assert held is not None, "rounds have been"
        gaps.append(1 - value[held] / best)
        found += value[held] == best
    return {
        "tuner_gap": float(np.median(gaps)),
        "tuner_gap_p95": float(np.percentile(gaps, 95)),
        "tuner_found_best": found / seeds,
    }

"""Parts of drafter training, measured in isolation; `benchmarks.drafter` runs them.

    packing     training of packed rows against padded ones, the same sequences
    tuner_gap   how far BEG-MAB's choice is from the best there is, on measured rounds

Speeds are ratios of turns that alternate, medians of them. Further parts: what a save holds up
(`benchmarks.drafter.saves`), and memory of compiled programs (`benchmarks.drafter.pool`).
Sources: TLT sections 4.2, 5.2 and 6.4.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.workloads import BASE_POLICY, group_requests, policy, questions
from models import transformer
from models.config import ModelConfig
from rl.drafter_training.config import DrafterConfig
from rl.engine.config import EngineConfig
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from spec.budget.bandit import BegMab, Strategy
from spec.budget.config import BanditConfig
from spec.config import SamplingConfig
from spec.eagle import model as eagle
from spec.eagle import training as drafter_training
from spec.eagle.batch import DrafterBatch, HiddenStates
from spec.eagle.config import DrafterTrainingConfig, EagleConfig
from spec.eagle.model import SharedParams
from spec.eagle.packing import pack, pad
from spec.eagle.training import DrafterState
from spec.sampling import step_key

TRAINING = DrafterTrainingConfig()
PADDED_MULTIPLE = 32  # padded rows have this many tokens, or twice as many, …: few programs
LEAST_RESPONSE_TOKENS = 4


# -- turns ------------------------------------------------------------------------------


def in_turns(arms: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call each arm `repeats` times, in turns that begin with another arm each."""
    names = list(arms)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            found[name].append(arms[name]())
    return found


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of over / under, turn by turn."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


# -- packing ----------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Collector:
    """Takes every response."""

    sequences: list[HiddenStates] = dataclasses.field(default_factory=list)

    def wants(self, request_id: int, num_tokens: int) -> bool:
        return True

    def add(self, sequence: HiddenStates) -> None:
        self.sequences.append(sequence)


def packing(
    *,
    folder: Path = BASE_POLICY,
    num_prompts: int = 32,
    group_size: int = 4,
    batch_sequences: int = 32,
    row_tokens: int = DrafterConfig.row_tokens,
    repeats: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """Response entries trained on a second, packed over padded: `packing_ratio`.

    Sequences have the lengths of `long_tailed`; `packing_ratio_of_responses` is that of the
    policy's own responses, which its tasks keep short. 32 sequences an update are about as many
    tokens as a step of `DrafterConfig` has.
    """
    model, params = policy(folder)
    responses = responses_with_states(model, params, questions(num_prompts), group_size)
    sigma = response_spread(responses)
    sequences = long_tailed(responses, sigma, row_tokens, seed)
    shape = eagle.config_for(model)
    frozen = eagle.frozen(params, None)
    rows = {
        name: compare_packing(shape, frozen, found, batch_sequences, row_tokens, repeats)
        for name, found in (("long_tailed", sequences), ("responses", responses))
    }
    return {
        "packing_ratio": round(rows["long_tailed"]["ratio"], 3),
        "packing_ratio_of_responses": round(rows["responses"]["ratio"], 3),
        "packing_lengths": (
            "prompts of the policy's tasks; responses log-normal with the spread of its own "
            f"(sigma {sigma:.2f}), scaled so that the longest sequence fills {row_tokens} tokens"
        ),
        "packing_baseline": (
            "one sequence a row, as they come; rows as long as the batch's longest sequence, "
            f"rounded up to a multiple of {PADDED_MULTIPLE}; as many updates"
        ),
        "packing_rows": rows,
    }


def compare_packing(
    config: EagleConfig,
    frozen: SharedParams,
    sequences: Sequence[HiddenStates],
    batch_sequences: int,
    row_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Train on all sequences packed and padded, in turns; times include making the batches."""
    make: dict[str, Callable[[], list[DrafterBatch]]] = {
        "packed": lambda: packed_batches(sequences, batch_sequences, row_tokens),
        "padded": lambda: padded_batches(sequences, batch_sequences),
    }
    states = {
        name: drafter_training.state_of(TRAINING, eagle.init(config, jax.random.key(0)))
        for name in make
    }

    def arm(name: str) -> float:
        began_s = time.perf_counter()
        states[name] = train(config, frozen, states[name], make[name]())
        return time.perf_counter() - began_s

    arms = {name: partial(arm, name) for name in make}
    in_turns(arms, 1)  # compiles
    seconds = in_turns(arms, repeats)
    batches = {name: make[name]() for name in make}
    counts = {name: _sizes(found) for name, found in batches.items()}
    assert counts["packed"]["entries"] == counts["padded"]["entries"], "the same work"
    for name, found_s in seconds.items():
        median_s = statistics.median(found_s)
        counts[name]["entries_per_s"] = round(counts[name]["entries"] / median_s, 1)
    lengths = [len(s.tokens_T) for s in sequences]
    return {
        "ratio": ratio(seconds["padded"], seconds["packed"]),
        "seconds": {name: [round(s, 4) for s in found_s] for name, found_s in seconds.items()},
        "sequences": len(lengths),
        "mean_tokens": round(statistics.fmean(lengths), 1),
        "longest_tokens": max(lengths),
        **counts,
    }


def train(
    config: EagleConfig, frozen: SharedParams, state: DrafterState, batches: Sequence[DrafterBatch]
) -> DrafterState:
    """Do one update per batch, and wait for the last."""
    for batch in batches:
        grads, _ = drafter_training.gradients(
            state.params, frozen, batch, np.float32(1), config=config, training=TRAINING
        )
        state, _ = drafter_training.apply(state, grads, training=TRAINING)
    return jax.block_until_ready(state)


def padded_batches(sequences: Sequence[HiddenStates], batch_sequences: int) -> list[DrafterBatch]:
    """Batches of rows with one sequence each, as long as their longest, rounded up."""
    batches = []
    for first in range(0, len(sequences), batch_sequences):
        part = sequences[first : first + batch_sequences]
        longest = max(len(s.tokens_T) for s in part)
        row_tokens = -(-longest // PADDED_MULTIPLE) * PADDED_MULTIPLE
        batches += pad(part, batch_sequences, row_tokens)
    return batches


def packed_batches(
    sequences: Sequence[HiddenStates], batch_sequences: int, row_tokens: int
) -> list[DrafterBatch]:
    """Make at most as many batches as `padded_batches`, with as few rows as suffice."""
    num_rows = len(pack(sequences, 1, row_tokens))
    num_batches = -(-len(sequences) // batch_sequences)
    return pack(sequences, -(-num_rows // num_batches), row_tokens)


def responses_with_states(
    model: ModelConfig, params: transformer.Params, rows: Sequence[Any], group_size: int
) -> list[HiddenStates]:
    """The policy's responses with its hidden states, in the order in which they ended."""
    requests = group_requests(rows, group_size)
    slots = min(64, len(requests))
    config = EngineConfig(slots=slots, min_slots=slots, min_positions=model.max_positions)
    dtype = params.final_norm_D.dtype
    engine = Engine(model, config, dtype=dtype, feature_layers=())
    longest = max(len(r.prompt_ids) for r in requests)
    sampling = SamplingConfig(max_new_tokens=model.max_positions - longest)
    taken = Collector()
    key, stop = step_key(0, 1), model.eos_token_ids
    engine.run(RolloutSpec(params, sampling, key, stop, sink=taken), requests)
    return taken.sequences


def response_spread(responses: Sequence[HiddenStates]) -> float:
    """The standard deviation of the logarithm of the lengths: sigma of their log-normal."""
    return float(np.std([np.log(len(s.tokens_T) - s.prompt_tokens) for s in responses]))


def long_tailed(
    responses: Sequence[HiddenStates], sigma: float, longest_tokens: int, seed: int
) -> list[HiddenStates]:
    """Sequences with the prompts' lengths and log-normal responses; random tokens and states.

    Responses are scaled so that none makes a sequence longer than `longest_tokens`.
    """
    rng = np.random.default_rng(seed)
    prompts = [s.prompt_tokens for s in responses]
    draws = rng.lognormal(0.0, sigma, len(prompts))
    draws *= (longest_tokens - max(prompts)) / draws.max()
    width = responses[0].hidden_TW.shape[1]
    made = []
    for prompt_tokens, draw in zip(prompts, draws, strict=True):
        num_tokens = prompt_tokens + max(LEAST_RESPONSE_TOKENS, int(draw))
        tokens_T = rng.integers(0, 3, num_tokens).astype(np.int32)  # which ones costs nothing
        states_TW = rng.normal(size=(num_tokens - 1, width)).astype(np.float32)
        made.append(HiddenStates(tokens_T, prompt_tokens, states_TW, 0))
    return made


def _sizes(batches: Sequence[DrafterBatch]) -> dict[str, Any]:
    shapes = [batch.tokens_BT.shape for batch in batches]
    tokens = sum(B * T for B, T in shapes)
    filled = sum(int(np.count_nonzero(batch.sequence_BT)) for batch in batches)
    return {
        "entries": sum(int(batch.counts_BT.sum()) for batch in batches),
        "shapes": [f"{B}x{T}" for B, T in shapes],
        "filled": round(filled / tokens, 3),
    }


# -- the tuner --------------------------------------------------------------------------


def tuner_gap(
    round_s: Mapping[Strategy, Sequence[float]],
    accept_lens: Mapping[Strategy, Sequence[float]],
    config: BanditConfig,
    batch_size: int,
    *,
    rounds: int = 300,
    seeds: int = 200,
) -> dict[str, float]:
    """Return how much slower than the best strategy BEG-MAB's choice is after some rounds.

        value(s) = (mean accept_lens + 1) · batch_size / mean round_s      gap = 1 − value / best

    A round's seconds and each request's accepted draft tokens are drawn from what was measured of
    the strategy. `best` is over all strategies that were measured, whether the tuner may choose
    them for this batch size or not. `tuner_gap` is the median over seeds. Source: TLT, Algorithm 1.

    Raises ValueError where a strategy lacks measurements.
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
    most = max(value.values())
    gaps, found = [], 0
    for seed in range(seeds):
        rng = np.random.default_rng([seed, 1])  # of the rounds; the tuner has its own
        tuner = BegMab(strategies, config, seed)
        for _ in range(rounds):
            s = tuner.select(batch_size)
            tuner.record(s, rng.choice(seconds[s]), rng.choice(accepts[s], batch_size), batch_size)
        held = tuner.best(batch_size)
        assert held is not None, "rounds have been"
        gaps.append(1 - value[held] / most)
        found += value[held] == most
    return {
        "tuner_gap": float(np.median(gaps)),
        "tuner_gap_p95": float(np.percentile(gaps, 95)),
        "tuner_found_best": found / seeds,
    }

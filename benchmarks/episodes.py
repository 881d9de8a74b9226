"""Episodes with an environment: `python -m benchmarks.episodes PART --json`

| part | what it measures |
|---|---|
| learns | runs of --config: reward on held-out questions before and after, seconds, turns |
| drafts | episodes of --drafts_config, plain and with drafts from siblings, in turns |

`learns` reads runs of `rl.train` from outside. `drafts` counts tokens that differ, and
divides plain seconds by seconds with drafts. `computed_over_new` divides the prompt tokens that
were computed by new ones: the prompt once for each group, then inserted tokens and the last token
of the turn before. It is below 1 if prompts of several groups start alike. `computed_over_all`
divides by the prompt tokens of all turns.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import environment
from benchmarks.training import median_step_s, train
from benchmarks.turns import in_turns
from reprise.rl.metrics.writer import step_rows

REWARD = "eval/mean_reward"


class Played(NamedTuple):
    """The episodes of a rollout, and the counts of the engine."""

    trajectories: Sequence[Any]
    stats: Any


def learns(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with several seeds; `gain` is on questions that training does not draw."""
    runs = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            settings = [f"Run.seed={seed}"]
            if arguments.steps:
                settings.append(f"Run.steps={arguments.steps}")
            began_s = time.perf_counter()
            flags = [f"--gin_file={arguments.config}"]
            rows = train(Path(folder) / f"seed{seed}", *settings, flags=flags)
            seconds = round(time.perf_counter() - began_s)
            runs.append({"seed": seed, "seconds": seconds, **run_figures(rows)})
            environment.progress(runs[-1])
    return {
        "config": str(arguments.config),
        "gain_min": min(run["gain"] for run in runs),
        "seconds_max": max(run["seconds"] for run in runs),
        "runs": runs,
    }


def run_figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return rewards of the first and the last evaluation, with 95% intervals, and turns."""
    evaluated = [row for row in rows if REWARD in row]
    steps = step_rows(rows)
    names = (REWARD, f"{REWARD}_low", f"{REWARD}_high")
    first = evaluated[0]
    last = evaluated[-1]
    return {
        "steps": len(steps),
        "before": [round(first[name], 4) for name in names],
        "after": [round(last[name], 4) for name in names],
        "gain": round(last[REWARD] - first[REWARD], 4),
        "turns_before": round(steps[0]["episodes/turns"], 3),
        "turns_after": round(steps[-1]["episodes/turns"], 3),
        "step_time_s": median_step_s(steps),
    }


def drafts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Play the same episodes plain and with drafts, in turns."""
    with played_by(arguments) as play:
        found = dict[str, Any]()

        def seconds(kind: str) -> float:
            began_s = time.perf_counter()
            responses = play(draft_tokens=arguments.draft_tokens if kind == "drafts" else 0)
            taken_s = time.perf_counter() - began_s
            found.setdefault(kind, responses)
            return taken_s

        kinds = {kind: partial(seconds, kind) for kind in ("plain", "drafts")}
        taken = in_turns(kinds, arguments.turns, warm=1)
    plain_s = taken["plain"].tolist()
    drafts_s = taken["drafts"].tolist()
    ratios = [p / d for p, d in zip(plain_s, drafts_s, strict=True)]
    plain = found["plain"]
    return {
        "config": str(arguments.drafts_config),
        "draft_tokens": arguments.draft_tokens,
        "episodes": len(plain.trajectories),
        "turns": round(statistics.fmean(t.episode.num_turns for t in plain.trajectories), 3),
        "drawn_tokens": sum(t.num_tokens for t in plain.trajectories),
        "differing_tokens": num_differing(tokens_of(plain), tokens_of(found["drafts"])),
        "differing_logprobs": num_differing(logprobs_of(plain), logprobs_of(found["drafts"])),
        "accepted_share": accepted_share(found["drafts"]),
        "plain_over_drafts": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "plain_s": round(statistics.median(plain_s), 4),
        "drafts_s": round(statistics.median(drafts_s), 4),
        "computed_over_new": round(plain.stats.prefilled_tokens / num_new_tokens(plain), 4),
        "computed_over_all": round(plain.stats.prefilled_tokens / num_prompt_tokens(plain), 4),
    }


@contextlib.contextmanager
def played_by(arguments: argparse.Namespace) -> Any:
    """Yield a function that plays the first episodes of a configuration with its first weights."""
    import jax.numpy as jnp

    from reprise.models.formats import hf
    from reprise.rl.data.prompts import encode_prompt
    from reprise.rl.engine.rollout_spec import DrafterFactory, RolloutSpec, draft_with, no_drafts
    from reprise.rl.environments.episode_scorer import open_scorer
    from reprise.rl.gin.loader import load
    from reprise.rl.learner.trainer import cast_params
    from reprise.rl.placement.engines import engine_settings
    from reprise.rl.records.trajectory import Request
    from reprise.rl.rewards.pool import RewardPool
    from reprise.rl.settings.config import TrainConfig
    from reprise.rl.settings.inputs import open_inputs
    from reprise.rl.workers.engines import make_engine
    from reprise.spec.budget.budget import FixedBudget
    from reprise.spec.retrieval.group import GroupDrafter
    from reprise.spec.verification.sampling import step_key

    config = load(TrainConfig, [str(arguments.drafts_config)])
    inputs = open_inputs(config)
    engine = make_engine(engine_settings(config, inputs.model))
    loaded = hf.load_pretrained(inputs.policy, None, dtype=jnp.float32)[1]
    params = cast_params(loaded, engine.dtype)
    group_size = config.rollout.group_size
    prompts = arguments.prompts or config.rollout.prompts_per_step
    examples = {g: inputs.task[g] for g in range(prompts)}
    ids = {g: encode_prompt(inputs.tokenizer, e, config.task) for g, e in examples.items()}
    requests = [
        Request(g * group_size + i, ids[g], g, i) for g in range(prompts) for i in range(group_size)
    ]
    words = inputs.token_bytes_for(config.sampling)
    ends = inputs.model.eos_token_ids
    environments = open_scorer(
        config.environment,
        config.task,
        inputs.tokenizer,
        examples[0],
        rows=engine.config.max_slots,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
    )
    with environments as new_scorer, RewardPool(config.reward) as pool:

        def play(*, draft_tokens: int) -> Played:
            made: DrafterFactory = no_drafts
            if draft_tokens:
                made = draft_with(GroupDrafter(), FixedBudget(draft_tokens))
            key = engine.do(partial(step_key, 0, 1))
            spec = RolloutSpec(params, config.sampling, key, ends, drafts=made, words=words)
            scorer = new_scorer(inputs.tokenizer, pool, lambda: None, group_size)
            scorer.examples = examples
            return Played(*scorer.run(engine, spec, requests, None, "the benchmark"))

        yield play


def tokens_of(responses: Played) -> list[list[int]]:
    return [t.episode.tokens.tolist() for t in responses.trajectories]


def logprobs_of(responses: Played) -> list[list[float]]:
    return [t.logprobs.tolist() for t in responses.trajectories]


def num_differing(ours: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> int:
    """Return the number of places at which two lists of rows differ; a missing value differs."""
    differing = 0
    for one, other in zip(ours, others, strict=True):
        differing += sum(a != b for a, b in zip(one, other, strict=False))
        differing += abs(len(one) - len(other))
    return differing


def accepted_share(responses: Played) -> float:
    """Return the share of drawn tokens that were accepted draft tokens."""
    from reprise.rl.records.trajectory import Origin

    accepted = sum(int((t.origins != Origin.PLAIN).sum()) for t in responses.trajectories)
    return round(accepted / sum(t.num_tokens for t in responses.trajectories), 4)


def num_new_tokens(responses: Played) -> int:
    """Return the new tokens of the prompts of all turns; the prompt of a group counts once."""
    prompts = {t.group_id: len(t.prompt_ids) for t in responses.trajectories}
    later = sum(t.episode.num_turns - 1 for t in responses.trajectories)
    inserted = sum(t.episode.num_inserted for t in responses.trajectories)
    return sum(prompts.values()) + later + inserted


def num_prompt_tokens(responses: Played) -> int:
    """Return the prompt tokens of all turns: each turn has all tokens before it."""
    total = 0
    for t in responses.trajectories:
        num_turns = t.episode.num_turns
        before = [int((t.episode.turns == turn).argmax()) for turn in range(num_turns)]
        total += num_turns * len(t.prompt_ids) + sum(before)
    return total


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "learns": learns,
    "drafts": drafts,
}


if __name__ == "__main__":
    flags: dict[str, Any] = {
        "config": Path("configs/corrections_tiny.gin"),
        "seeds": 3,
        "steps": 0,  # 0: those of the configuration
        "drafts_config": Path("configs/episodes_tiny.gin"),
        "draft_tokens": 3,
        "prompts": 0,  # 0: those of a step
        "turns": 7,
    }
    environment.run(__doc__, PARTS, environment.TRAINING, **flags)

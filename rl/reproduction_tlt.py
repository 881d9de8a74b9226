"""TLT's figure 14: one worker, 128 requests, tree drafts once few of them are left.

Tokens a round by guesses verified follow from the paper's tables: the most is its table 1's,
and at batch one, where verifying costs the same for all, speedups (table 4) are in the
proportion of the tokens. What drafting takes a round is what makes the speedup of the most
guesses at batch one the published one.
"""

from __future__ import annotations

import statistics

from rl.reproduction import ReproducedRow
from rl.simulation import play_policy, rollout_of
from rl.simulation_config import SimulateRun, TreeDraftsConfig, make_instance
from rl.simulation_paces import Budgeted, Lane
from sched.cost_model import Instance
from sched.workloads import asks_for
from spec.budget import Goodput

FITTED = ("workload.mean_tokens", "workload.sigma", "workload.group_share")
FIGURE_14 = 2.44


def tree_lane(config: TreeDraftsConfig) -> Lane:
    """Chances that bring the tokens of each size: the same for guesses between two sizes."""
    chances: list[float] = []
    for guesses, speedup in zip(config.guesses, config.speedup_alone, strict=True):
        tokens = config.accept_tokens * speedup / config.speedup_alone[-1]
        more = guesses - len(chances)
        chances += [(tokens - 1 - sum(chances)) / more] * more
    return Lane(0, tuple(chances))


def draft_seconds(config: TreeDraftsConfig, instance: Instance, positions: float) -> float:
    """Of a round's guesses: tokens / speedup · plain − verification, at batch one."""
    plain_s = instance.round_seconds(1, positions)
    verify_s = instance.round_seconds(1, positions, 1 + config.guesses[-1])
    return config.accept_tokens / config.speedup_alone[-1] * plain_s - verify_s


def adaptive(config: SimulateRun) -> Budgeted:
    """Trees of the size that pays most, below the threshold."""
    instance, trees = make_instance(config), config.tree_drafts
    draft_s = draft_seconds(trees, instance, config.workload.prompt_tokens)
    return Budgeted(
        instance,
        [tree_lane(trees)],
        Goodput,
        [1 + n for n in trees.guesses],
        draft_s=lambda requests, nodes: draft_s,
        most_requests=trees.most_requests,
    )


def rows(config: SimulateRun) -> list[ReproducedRow]:
    """The speedup of one rollout."""
    found = []
    for seed in config.simulate.seeds:
        asks, lengths = asks_for(*rollout_of(config, seed))
        plain = play_policy(config, "group_fifo", seed, asks, lengths)
        trees = play_policy(config, "group_fifo", seed, asks, lengths, adaptive(config))
        found.append(plain.completion_s / trees.completion_s)
    row = "trees below 32 requests"
    mean = statistics.fmean(found)
    return [ReproducedRow("tlt", config.cluster.model, row, FIGURE_14, mean)]

"""Seer's table 6, figures 8, 10 and 11: divided rollouts, context-aware order, grouped drafts.

The baseline deals whole groups to instances, and requests to the ranks of an instance. Setups are
those of section 6.1 and table 5, acceptance that of table 2. Mean lengths are not in the text but
of the first public version, from memory; 1% of responses are assumed to reach the limit (figure 2
shows that some do). Nothing was fitted: Moonlight is calibrated in that the null model's constant
is of its rows (3% at the limit would fit these). The text gives no numbers for figure 7, and
figures 3, 9 and 12 are courses over time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from benchmarks.simulator.drafts import Budgeted, RequestClass, chain_probs
from benchmarks.simulator.experiment import Entry, Experiment, Figure, figures_of
from reprise.sched.policies.specactor import prob_of
from reprise.sched.simulator.cluster import play_policy
from reprise.sched.simulator.roofline import Instance, RoundCost
from reprise.sched.simulator.workloads import Workload, draw_lengths, make_requests
from reprise.spec.budget.budget import FixedBudget
from reprise.spec.budget.goodput import Goodput

EXPERIMENTS = {
    # an instance is 32 ranks: attention by data parallelism, experts spread over all of them
    "seer_kimi_k2": Experiment(
        *("H800", "Kimi-K2", 256, 1, Workload(800, 8, 38959, 98304, limit_share=0.01)),
        ranks_per_instance=32,
    ),
    "seer_moonlight": Experiment(
        *("H800", "Moonlight", 32, 1, Workload(400, 8, 22386, 65536, limit_share=0.01)),
        calibrated=True,
    ),
    "seer_qwen2_vl": Experiment(
        "H800", "Qwen2-VL-72B", 16, 8, Workload(600, 16, 7615, 40960, limit_share=0.01)
    ),
}
TABLE_6 = {  # + divided, + context-aware, + grouped drafts
    "Moonlight": (1.27, 1.33, 1.77),
    "Qwen2-VL-72B": (1.31, 1.44, 1.87),
    "Kimi-K2": (1.35, 1.47, 1.77),
}
LATENT = ("Moonlight", "Kimi-K2")  # multi-head latent attention
STUDIED = "Qwen2-VL-72B"  # the workload of figures 3, 8, 10 and 11, and of table 2's acceptance
ACCEPTED = "accepted: table 2"  # the source of the acceptance in rows with drafts
TAIL_CUT = 0.84  # by all of Seer: figure 8 has 75 to 93% over the three workloads

# table 2: tokens a round by finished siblings, for one chain and for several paths
FINISHED_SIBLINGS = (0, 1, 5, 15)
CHAIN_TOKENS = (1.70, 2.04, 2.32, 2.53)
PATHS_TOKENS = (1.85, 2.25, 2.59, 2.85)
WINDOW, PATHS = 8, 4  # the longest chain
LOOKUP_S = 5e-6  # of one request's draft tokens: O(p + s), in the engine's process


def assumed(experiment: Experiment) -> dict[str, float]:
    """Return the constants that the paper does not give."""
    return {
        "workload.mean_tokens": experiment.workload.mean_tokens,
        "workload.limit_share": experiment.workload.limit_share or 0.0,
        "grouped_drafts.lookup_s": LOOKUP_S,
    }


@dataclasses.dataclass(frozen=True)
class PathInstance(Instance):
    """An instance whose attention reads a request's cache once for each path of its tree.

    That is how latent attention works: "multiple attention operations" (section 5). Other models
    share the reads (cascade attention). A path has at most WINDOW draft tokens.
    """

    def round_cost(
        self, num_requests: float, num_nodes: float = 1.0, other_requests: float | None = None
    ) -> RoundCost:
        cost = super().round_cost(num_requests, num_nodes, other_requests)
        paths = math.ceil((num_nodes - 1) / WINDOW)
        moved_s = paths * self.model.kv_bytes / self._bytes_per_s
        return dataclasses.replace(cost, per_position_s=max(cost.per_position_s, moved_s))


def verifier_of(experiment: Experiment) -> Instance:
    """Return a worker that verifies trees as the paper does for its model."""
    instance = experiment.instance
    return PathInstance(**vars(instance)) if instance.model.name in LATENT else instance


def chain_lanes() -> list[RequestClass]:
    """Return probabilities that give a chain's published tokens."""
    return [
        RequestClass(siblings, chain_probs(prob_of(tokens, WINDOW), WINDOW))
        for siblings, tokens in zip(FINISHED_SIBLINGS, CHAIN_TOKENS, strict=True)
    ]


def grouped_lanes() -> list[RequestClass]:
    """Return probabilities that give the published tokens: a chain's, then other paths'."""
    others = (PATHS - 1) * WINDOW
    lanes = []
    for chain, tokens, paths in zip(chain_lanes(), CHAIN_TOKENS, PATHS_TOKENS, strict=True):
        probs = chain.probs + ((paths - tokens) / others,) * others
        lanes.append(RequestClass(chain.finished_siblings, tuple(sorted(probs, reverse=True))))
    return lanes


def drafted(instance: Instance, lanes: Sequence[RequestClass], *, adapts: bool = True) -> Budgeted:
    """Return rounds as `Goodput` chooses them, or of whole chains; lookups take LOOKUP_S."""
    return Budgeted(
        instance,
        lanes,
        Goodput if adapts else lambda times: FixedBudget(),
        (2, 3, 4, 5, 7, 9, 17, 33) if adapts else (1 + WINDOW,),
        draft_s=lambda requests, nodes: requests * LOOKUP_S,
    )


def figures(experiment: Experiment) -> list[Figure]:
    """Return the figures of one of the three workloads."""
    model = experiment.model
    divided, context, grouped = TABLE_6[model]
    entries: list[Entry] = [
        ("+ divided rollout", divided, "divided", "baseline", "gain"),
        ("+ context-aware order", context, "context", "baseline", "gain"),
        (f"+ grouped drafts ({ACCEPTED})", grouped, "grouped", "baseline", "gain"),
        (
            f"tail cut by all of it (75 to 93%; {ACCEPTED})",
            *(TAIL_CUT, "tail cut, grouped", None, "share"),
        ),
        ("divided faster than baseline", divided, "divided", "baseline", "order"),
        ("context faster than divided", context / divided, "context", "divided", "order"),
        ("grouped faster than context", grouped / context, "grouped", "context", "order"),
    ]
    if model == STUDIED:
        entries += [
            ("baseline's tail (nearly half)", 0.5, "tail share", None, "share"),
            ("tail cut, no context", 0.06, "tail cut, divided", None, "share"),
            ("tail cut, context", 0.87, "tail cut, context", None, "share"),
            ("share of the oracle", 0.95, "context", "oracle", "share"),
            (f"drafts ({ACCEPTED})", 1.30, "grouped", "context", "gain"),
            (f"drafts, none shared ({ACCEPTED})", 1.19, "alone", "context", "gain"),
            (f"drafts, not adapted ({ACCEPTED})", 1.03, "fixed", "context", "gain"),
            ("oracle faster than context", 1 / 0.95, "oracle", "context", "order"),
            ("shared faster than not", 1.3 / 1.19, "grouped", "alone", "order"),
            ("adapted faster than not", 1.3 / 1.03, "grouped", "fixed", "order"),
            ("none shared faster than none", 1.19, "alone", "context", "order"),
            ("not adapted faster than none", 1.03, "fixed", "context", "order"),
            (
                "context's tail shorter than without",
                *(0.94 / 0.13, "divided's tail", "context's tail", "order"),
            ),
        ]
    return figures_of(model, entries, experiment.calibrated)


def play(experiment: Experiment, seed: int) -> dict[str, float]:
    """Return the rates of one rollout (1 / seconds), and its tails."""
    instance, workload, lanes = verifier_of(experiment), experiment.workload, grouped_lanes()
    requests, lengths = make_requests(workload, draw_lengths(workload, seed=seed), known=True)
    round_models: dict[str, tuple[str, Budgeted | None]] = {
        "baseline": ("group_fifo", None),
        "divided": ("divided_fifo", None),
        "context": ("seer", None),
        "grouped": ("seer", drafted(instance, lanes)),
    }
    if experiment.model == STUDIED:
        round_models["oracle"] = ("oracle", None)
        round_models["alone"] = ("seer", drafted(instance, lanes[:1]))
        round_models["fixed"] = ("seer", drafted(instance, chain_lanes(), adapts=False))
    rates, tails = {}, {}
    for name, (policy, round_model) in round_models.items():
        record = play_policy(experiment.cluster, policy, seed, requests, lengths, round_model)
        rates[name], tails[name] = 1 / record.completion_s, record.tail_s
    cuts = {f"tail cut, {name}": 1 - tail_s / tails["baseline"] for name, tail_s in tails.items()}
    seconds = {f"{name}'s tail": tail_s for name, tail_s in tails.items()}
    return rates | cuts | seconds | {"tail share": tails["baseline"] * rates["baseline"]}

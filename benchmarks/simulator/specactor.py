"""SpecActor's figures 11 and 13: decoupled drafting, reconfiguration, best-of-N; and baselines.

Drafters on separate devices that are not decoupled have as many devices as a verifier. Section 5.4
credits the planner's placement to reconfiguration: before it, a unit's drafters have
`UNPLANNED_DRAFT_DEVICES`. Acceptance is the middle of the range that section 5.2 gives for the last
requests, 48.7 to 72.3% of drafted tokens; requests have the p at which the windows of the paper's
examples give this on average. DAPO's trace is calibrated: the mean length was fitted to the share
of idle time, the drafters' overhead and the spread of acceptance to figure 13. GRPO's is predicted,
with DAPO's mean length. The text has no numbers for figures 6, 12 and 14 but those of section 5.2.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.simulator.experiment import Entry, Experiment, Figure, figures_of
from benchmarks.simulator.specactor_devices import DevicePlan, Hardware, RequestTrace, plan
from benchmarks.simulator.specactor_rollout import (
    DECOUPLED,
    DISAGGREGATED,
    PLAIN,
    SEQUENTIAL,
    SpecActorRollout,
    Strategy,
)
from reprise.sched.policies.specactor import EVERY_TOKENS, prob_of, rank_methods
from reprise.sched.simulator.roofline import MODELS, Instance
from reprise.sched.simulator.workloads import Workload, draw_lengths

EXPERIMENTS = {
    "specactor_dapo": Experiment(
        "H800", "Qwen2.5-32B", 64, 4, Workload(1024, 16, 3300, 20480), calibrated=True
    ),
    "specactor_grpo": Experiment("H800", "Qwen2.5-32B", 64, 4, Workload(512, 16, 3300, 20480)),
}
DEVICES = 256
DRAFTERS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B")
ACCEPTED = 0.605  # share of drafted tokens: the middle of section 5.2's range
SPREAD = 0.1  # of p, the probability of a draft token, over requests
NGRAM_ACCEPTANCE = 0.2  # its mean p
UNPLANNED_DRAFT_DEVICES = 2  # of a unit, before reconfiguration plans them
DRAFTER_OVERHEAD_S = 2.3e-3  # of a draft token, instead of Efficiency.overhead_s
REQUESTS_PER_HELPER = 8
NETWORK_BYTES_PER_S = 50e9  # of a device, to other workers: 400 Gb/s, section 5.1
STEP_S = 2.0  # of the simulation
VANILLA_WINDOW = 3  # the paper's examples
ROLLOUT_SHARE = 0.75  # of a step: 70 to 80% in figure 2


def assumed(experiment: Experiment) -> dict[str, float]:
    """Return the constants that the paper does not give."""
    return {
        "workload.mean_tokens": experiment.workload.mean_tokens,
        "workload.sigma": experiment.workload.sigma,
        "specactor.spread": SPREAD,
        "specactor.drafter_overhead_s": DRAFTER_OVERHEAD_S,
        "specactor.ngram_acceptance": NGRAM_ACCEPTANCE,
        "specactor.unplanned_draft_devices": UNPLANNED_DRAFT_DEVICES,
        "specactor.requests_per_helper": REQUESTS_PER_HELPER,
    }


def hardware_of(experiment: Experiment) -> Hardware:
    """Return verifiers like the cluster's workers, and drafters of one device each."""
    verifier = experiment.instance
    overhead = dataclasses.replace(verifier.efficiency, overhead_s=DRAFTER_OVERHEAD_S)
    drafters: dict[str, Instance | None] = {
        name: Instance(verifier.device, MODELS[name], 1, overhead) for name in DRAFTERS
    }
    return Hardware(DEVICES, verifier, drafters | {"ngram": None}, NETWORK_BYTES_PER_S)


def acceptance() -> float:
    """Return the p of a draft token at which windows w have ACCEPTED = accepted / drafted.

    Σ_{i ≤ w} pⁱ = ACCEPTED · w.
    """
    return prob_of(1 + ACCEPTED * VANILLA_WINDOW, VANILLA_WINDOW)


def trace_of(workload: Workload, seed: int) -> RequestTrace:
    """Return groups in a random order; acceptance is drawn from beta laws by request and method."""
    lengths, rng = draw_lengths(workload, seed=seed), np.random.default_rng(seed)
    lengths_R = lengths[rng.permutation(len(lengths))].ravel()

    def drawn(mean: float) -> np.ndarray:
        weight = mean * (1 - mean) / SPREAD**2 - 1
        return rng.beta(mean * weight, (1 - mean) * weight, len(lengths_R))

    means = [acceptance()] * len(DRAFTERS) + [NGRAM_ACCEPTANCE]
    acceptance_RM = np.stack([drawn(m) for m in means], axis=1)
    return RequestTrace(
        lengths_R, acceptance_RM, np.array(means), workload.prompt_tokens, workload.limit_tokens
    )


def ranked(hardware: Hardware, trace: RequestTrace) -> tuple[Hardware, RequestTrace]:
    """Return both with the methods in the order of the draft ladder; the first serves the batch."""
    size, methods = hardware.verifier.num_devices, list(hardware.drafters)
    batch = len(trace.lengths_R) * size // hardware.num_devices
    positions = trace.mean_positions
    order = rank_methods(
        dict(zip(methods, trace.profiled_M.tolist(), strict=True)),
        {name: hardware.draft_line(name, size, batch, positions) for name in methods},
        lambda window: hardware.verify_line(size, window, batch, positions),
        batch,
    )
    columns = [methods.index(name) for name in order]
    drafters = {name: hardware.drafters[name] for name in order}
    acceptance_RM, profiled_M = trace.acceptance_RM[:, columns], trace.profiled_M[columns]
    return (
        dataclasses.replace(hardware, drafters=drafters),
        dataclasses.replace(trace, acceptance_RM=acceptance_RM, profiled_M=profiled_M),
    )


def first_plan(hardware: Hardware, trace: RequestTrace) -> DevicePlan:
    """Return the planner's plan, for verifiers of the cluster's size."""
    batch, size = len(trace.lengths_R), hardware.verifier.num_devices
    method, positions = next(iter(hardware.drafters)), trace.mean_positions
    max_batch = (size + 1) * batch // hardware.num_devices
    return plan(
        batch,
        hardware.num_devices,
        (size,),
        lambda devices: hardware.draft_line(method, devices, max_batch, positions),
        lambda devices, window: hardware.verify_line(devices, window, max_batch, positions),
        float(trace.profiled_M[0]),
    )


def strategies(planned: DevicePlan) -> dict[str, Strategy]:
    """Return the strategies of figure 13, and the baselines of figure 11."""
    together = dataclasses.replace(planned, window=VANILLA_WINDOW)
    separate = dataclasses.replace(together, draft_devices=planned.verify_devices)
    unplanned = dataclasses.replace(together, draft_devices=UNPLANNED_DRAFT_DEVICES)
    return {
        "plain": Strategy(PLAIN, planned),
        "vanilla": Strategy(SEQUENTIAL, together),
        "disaggregated": Strategy(DISAGGREGATED, separate),
        "decoupled": Strategy(DECOUPLED, unplanned),
        "reconfigured": Strategy(DECOUPLED, planned, EVERY_TOKENS),
        "all": Strategy(DECOUPLED, planned, EVERY_TOKENS, REQUESTS_PER_HELPER),
    }


def figures(experiment: Experiment) -> list[Figure]:
    """Return the figures of one trace: figure 13 is of DAPO's, ranges in the text are of both."""
    dapo = experiment.workload.num_groups == 1024
    rests = f"({ACCEPTED:.1%} accepted)"
    gains: list[Entry] = [
        (f"vanilla speculation {rests}", 1 / (1 - 0.026), "vanilla", "plain", "gain"),
        (f"naive disaggregation {rests}", 1 / 1.334, "disaggregated", "plain", "gain"),
        (f"decoupled {rests}", 1.3, "decoupled", "plain", "gain"),
        (f"+ reconfiguration {rests}", 1.2, "reconfigured", "decoupled", "gain"),
        (f"+ best of N {rests}", 1.2, "all", "reconfigured", "gain"),
        # section 5.2; geometric means of the ranges
        (f"all of it (2.0 to 2.4) {rests}", 2.19, "all", "plain", "gain"),
        (f"all, over vanilla (1.7 to 2.0) {rests}", 1.84, "all", "vanilla", "gain"),
        (f"all, over twice the devices (1.8 to 2.3) {rests}", 2.03, "all", "twice", "gain"),
        (f"all, of a whole step (1.5 to 1.7) {rests}", 1.6, "step", None, "gain"),
        (
            f"all, of a whole step, over the best baseline {rests}",
            *(1.3, "step over the best baseline", None, "gain"),
        ),
        ("idle devices, plain", 0.5, "idle", None, "share"),
        ("twice the devices (at most)", 1.2, "twice", "plain", "gain"),
    ]
    # the best baseline is vanilla speculation for GRPO, twice the devices for DAPO
    best, second = ("twice", "vanilla") if dapo else ("vanilla", "twice")
    orders = (
        ("vanilla", "plain", 1.027),
        ("plain", "disaggregated", 1.334),
        ("decoupled", "vanilla", 1.3 / 1.027),
        ("reconfigured", "decoupled", 1.2),
        ("all", "reconfigured", 1.2),
        ("all", "twice", 2.03),
        (best, second, 1.0),
    )
    entries: list[Entry] = [
        *(gains if dapo else gains[5:-2]),
        *(
            (f"{after} faster than {before}", ratio, after, before, "order")
            for after, before, ratio in (orders if dapo else orders[2:])
        ),
    ]
    name = "DAPO-32B-20K" if dapo else "GRPO-32B-20K"
    return figures_of(name, entries, experiment.calibrated)


def play(experiment: Experiment, seed: int) -> dict[str, float]:
    """Return the rates of one rollout (1 / seconds)."""
    hardware, trace = ranked(hardware_of(experiment), trace_of(experiment.workload, seed))
    planned = first_plan(hardware, trace)
    values: dict[str, float] = {}
    for name, strategy in strategies(planned).items():
        rollout = SpecActorRollout(hardware, trace, strategy, step_s=STEP_S, seed=seed)
        values[name] = 1 / rollout.seconds()
        if name == "plain":
            values["idle"] = rollout.idle_fraction
    more = dataclasses.replace(hardware, num_devices=2 * hardware.num_devices)
    twice = SpecActorRollout(more, trace, Strategy(PLAIN, planned), step_s=STEP_S)
    values["twice"] = 1 / twice.seconds()
    step_s = {
        name: 1 - ROLLOUT_SHARE + ROLLOUT_SHARE * values["plain"] / values[name]
        for name in ("all", "vanilla", "twice")
    }
    best_s = min(step_s["vanilla"], step_s["twice"])
    values["step"] = 1 / step_s["all"]
    return values | {"step over the best baseline": best_s / step_s["all"]}

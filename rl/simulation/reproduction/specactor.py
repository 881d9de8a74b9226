"""SpecActor's figures 11 and 13: decoupled drafting, reconfiguration, best-of-N; and baselines.

Drafters on devices of their own that are not decoupled have as many devices as a verifier. Section
5.4 credits the planner's placement to reconfiguration: before it, a unit's drafters have
`unplanned_draft_devices`. Acceptance is the middle of the range that section 5.2 gives for the last
requests, 48.7 to 72.3% of what was drafted; requests have the p at which the windows of the paper's
examples give this on average. The text gives no numbers for figures 6, 12 and 14 but those of
section 5.2.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rl.simulation.compare import rollout_of
from rl.simulation.config import SimulateRun, SpecActorConfig, make_instance
from rl.simulation.reproduction.rows import Entry, Figure, figures_of
from sched.policies.specactor import DevicePlan, plan, prob_of, rank_methods
from sched.simulator.roofline import MODELS, Instance
from sched.simulator.specactor_hardware import Hardware, RequestTrace
from sched.simulator.specactor_rollout import (
    DECOUPLED,
    DISAGGREGATED,
    PLAIN,
    SEQUENTIAL,
    SpecActorRollout,
    Strategy,
)

ASSUMED = (
    "workload.mean_tokens",  # fitted to the share of idle time, with the next
    "workload.sigma",
    "specactor.spread",  # fitted to figure 13, with the next
    "specactor.drafter_overhead_s",
    "specactor.ngram_acceptance",
    "specactor.unplanned_draft_devices",
    "specactor.requests_per_helper",
)
VANILLA_WINDOW = 3  # the paper's examples
ROLLOUT_SHARE = 0.75  # of a step: 70 to 80% in figure 2


def hardware_of(config: SimulateRun) -> Hardware:
    """Return verifiers like the cluster's workers, and drafters of one device each."""
    verifier, settings = make_instance(config), config.specactor
    overhead = dataclasses.replace(config.efficiency, overhead_s=settings.drafter_overhead_s)
    drafters: dict[str, Instance | None] = {
        name: Instance(verifier.device, MODELS[name], 1, overhead) for name in settings.drafters
    }
    drafters |= {"ngram": None}
    return Hardware(settings.devices, verifier, drafters, settings.network_bytes_per_s)


def acceptance_of(config: SpecActorConfig) -> float:
    """Return the p of a draft token at which windows w have `accepted` = accepted / drafted.

    Σ_{i ≤ w} pⁱ = accepted · w.
    """
    return prob_of(1 + config.accepted * VANILLA_WINDOW, VANILLA_WINDOW)


def trace_of(config: SimulateRun, seed: int) -> RequestTrace:
    """Return groups in a random order; acceptance is drawn from beta laws by request and method."""
    workload, lengths = rollout_of(config, seed)
    rng, settings = np.random.default_rng(seed), config.specactor
    lengths_R = lengths[rng.permutation(len(lengths))].ravel()

    def drawn(mean: float) -> np.ndarray:
        weight = mean * (1 - mean) / settings.spread**2 - 1
        return rng.beta(mean * weight, (1 - mean) * weight, len(lengths_R))

    means = [acceptance_of(settings)] * len(settings.drafters) + [settings.ngram_acceptance]
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
    positions = trace.mean_positions
    most = (size + 1) * batch // hardware.num_devices
    return plan(
        batch,
        hardware.num_devices,
        (size,),
        lambda devices: hardware.draft_line(
            next(iter(hardware.drafters)), devices, most, positions
        ),
        lambda devices, window: hardware.verify_line(devices, window, most, positions),
        float(trace.profiled_M[0]),
    )


def strategies(found: DevicePlan, settings: SpecActorConfig) -> dict[str, Strategy]:
    """Return the strategies of figure 13, and the baselines of figure 11."""
    size, every_tokens = found.verify_devices, settings.reconfigure_tokens
    together = dataclasses.replace(found, window=VANILLA_WINDOW)
    apart = dataclasses.replace(together, draft_devices=size)
    unplanned = dataclasses.replace(together, draft_devices=settings.unplanned_draft_devices)
    return {
        "plain": Strategy(PLAIN, found),
        "vanilla": Strategy(SEQUENTIAL, together),
        "disaggregated": Strategy(DISAGGREGATED, apart),
        "decoupled": Strategy(DECOUPLED, unplanned),
        "reconfigured": Strategy(DECOUPLED, found, every_tokens),
        "all": Strategy(DECOUPLED, found, every_tokens, settings.requests_per_helper),
    }


def figures(config: SimulateRun) -> list[Figure]:
    """Return the figures of one trace: figure 13 is of DAPO's, ranges in the text are of both."""
    dapo = config.workload.num_groups == 1024
    rests = f"({config.specactor.accepted:.1%} accepted)"
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
    return figures_of(name, entries, config.simulate.calibrated)


def play(config: SimulateRun, seed: int) -> dict[str, float]:
    """Return the rates of one rollout (1 / seconds)."""
    settings = config.specactor
    hardware, trace = ranked(hardware_of(config), trace_of(config, seed))
    first = first_plan(hardware, trace)
    found: dict[str, float] = {}
    for name, strategy in strategies(first, settings).items():
        rollout = SpecActorRollout(hardware, trace, strategy, step_s=settings.step_s, seed=seed)
        found[name] = 1 / rollout.seconds()
        if name == "plain":
            found["idle"] = rollout.idle_fraction
    more = dataclasses.replace(hardware, num_devices=2 * hardware.num_devices)
    strategy = Strategy(PLAIN, first)
    found["twice"] = 1 / SpecActorRollout(more, trace, strategy, step_s=settings.step_s).seconds()
    step_s = {
        name: 1 - ROLLOUT_SHARE + ROLLOUT_SHARE * found["plain"] / found[name]
        for name in ("all", "vanilla", "twice")
    }
    best_s = min(step_s["vanilla"], step_s["twice"])
    found["step"] = 1 / step_s["all"]
    return found | {"step over the best baseline": best_s / step_s["all"]}

"""SpecActor's figures 11 and 13: decoupled drafting, reconfiguration, best-of-N; and baselines.

Drafters that stand apart without being decoupled have as many devices as a verifier, as a
rollout worker has. Acceptance is the middle of what section 5.2 gives of the last requests,
48.7 to 72.3%. Figures 6, 12 and 14 have no numbers in the text but those of section 5.2.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rl.simulation.compare import rollout_of
from rl.simulation.config import SimulateRun, make_instance
from rl.simulation.reproduction.rows import Figure, Ordering
from sched.simulator.roofline import MODELS, Instance
from sched.simulator.specactor import DevicePlan, plan, rank_methods
from sched.simulator.specactor_rollout import (
    DECOUPLED,
    DISAGGREGATED,
    OBSERVED_TOKENS,
    PLAIN,
    SEQUENTIAL,
    Hardware,
    RequestTrace,
    SpecActorRollout,
    Strategy,
)

ASSUMED = (
    "workload.mean_tokens",  # fitted to the share of idle time
    "specactor.spread",  # fitted to figure 13, with the next
    "specactor.drafter_overhead_s",
    "specactor.ngram_acceptance",
    "specactor.requests_per_helper",
)
VANILLA_WINDOW = 3  # the paper's examples
ROLLOUT_SHARE = 0.75  # of a step: 70 to 80% in figure 2


def hardware_of(config: SimulateRun) -> Hardware:
    """Verifiers as the cluster's workers are; a drafter takes one device."""
    verifier, asked = make_instance(config), config.specactor
    overhead = dataclasses.replace(config.efficiency, overhead_s=asked.drafter_overhead_s)
    drafters: dict[str, Instance | None] = {
        name: Instance(verifier.device, MODELS[name], 1, overhead) for name in asked.drafters
    }
    return Hardware(asked.devices, verifier, drafters | {"ngram": None})


def trace_of(config: SimulateRun, seed: int) -> RequestTrace:
    """Groups in a drawn order; acceptance by request and method, drawn by beta laws."""
    workload, lengths = rollout_of(config, seed)
    rng, asked = np.random.default_rng(seed), config.specactor
    lengths_R = lengths[rng.permutation(len(lengths))].ravel()

    def drawn(mean: float) -> np.ndarray:
        weight = mean * (1 - mean) / asked.spread**2 - 1
        return rng.beta(mean * weight, (1 - mean) * weight, len(lengths_R))

    means = [asked.acceptance] * len(asked.drafters) + [asked.ngram_acceptance]
    acceptance_RM = np.stack([drawn(m) for m in means], axis=1)
    measured_R = rng.binomial(OBSERVED_TOKENS, acceptance_RM[:, 0]) / OBSERVED_TOKENS
    return RequestTrace(lengths_R, acceptance_RM, measured_R, workload.prompt_tokens)


def ranked(hardware: Hardware, trace: RequestTrace) -> tuple[Hardware, RequestTrace]:
    """Return both with the methods in the order of the draft ladder; the first serves the batch."""
    size, methods = hardware.verifier.num_devices, list(hardware.drafters)
    batch = len(trace.lengths_R) * size // hardware.num_devices
    positions = trace.prompt_tokens + float(trace.lengths_R.mean()) / 2
    means = trace.acceptance_RM.mean(axis=0)
    order = rank_methods(
        dict(zip(methods, means.tolist(), strict=True)),
        {name: hardware.draft_line(name, size, batch, positions) for name in methods},
        lambda window: hardware.verify_line(size, window, batch, positions),
        batch,
    )
    columns = [methods.index(name) for name in order]
    drafters = {name: hardware.drafters[name] for name in order}
    return (
        dataclasses.replace(hardware, drafters=drafters),
        dataclasses.replace(trace, acceptance_RM=trace.acceptance_RM[:, columns]),
    )


def first_plan(hardware: Hardware, trace: RequestTrace) -> DevicePlan:
    """SpecActor's planner, for verifiers of the cluster's size."""
    batch, size = len(trace.lengths_R), hardware.verifier.num_devices
    positions = trace.prompt_tokens + float(trace.lengths_R.mean()) / 2
    most = (size + 1) * batch // hardware.num_devices
    return plan(
        batch,
        hardware.num_devices,
        (size,),
        lambda devices: hardware.draft_line(
            next(iter(hardware.drafters)), devices, most, positions
        ),
        lambda devices, window: hardware.verify_line(devices, window, most, positions),
        float(trace.acceptance_RM[:, 0].mean()),
    )


def strategies(found: DevicePlan, helpers: int) -> dict[str, Strategy]:
    """The rows of figure 13, and the baselines of figure 11."""
    size = found.verify_devices
    together = dataclasses.replace(found, window=VANILLA_WINDOW)
    apart = dataclasses.replace(together, draft_devices=size)
    return {
        "plain": Strategy(PLAIN, found),
        "vanilla": Strategy(SEQUENTIAL, together),
        "disaggregated": Strategy(DISAGGREGATED, apart),
        "decoupled": Strategy(DECOUPLED, found),
        "reconfigured": Strategy(DECOUPLED, found, reconfigure=True),
        "all": Strategy(DECOUPLED, found, reconfigure=True, helpers=helpers),
    }


def figures(config: SimulateRun) -> list[Figure | Ordering]:
    """Figure 13 is of DAPO's trace; the text has ranges over both for all else."""
    dapo, calibrated = config.workload.num_groups == 1024, config.simulate.calibrated
    name = "DAPO-32B-20K" if dapo else "GRPO-32B-20K"
    rests = f"({config.specactor.acceptance:g} accepted)"
    ablation = (
        ("vanilla speculation", 1 / (1 - 0.026), "vanilla", "plain"),
        ("naive disaggregation", 1 / 1.334, "disaggregated", "plain"),
        ("decoupled", 1.3, "decoupled", "plain"),
        ("+ reconfiguration", 1.2, "reconfigured", "decoupled"),
        ("+ best of N", 1.2, "all", "reconfigured"),
    )
    ranges = (  # section 5.2; geometric means of the ranges
        ("all of it (2.0 to 2.4)", 2.19, "all", "plain"),
        ("all, over vanilla (1.7 to 2.0)", 1.84, "all", "vanilla"),
        ("all, over twice the devices (1.8 to 2.3)", 2.03, "all", "twice"),
        ("all, of a whole step (1.5 to 1.7)", 1.6, "step", None),
    )
    out: list[Figure | Ordering] = [
        Figure(name, f"{row} {rests}", published, value, over, calibrated)
        for row, published, value, over in (*(ablation if dapo else ()), *ranges)
    ]
    # the best baseline is vanilla speculation for GRPO, twice the devices for DAPO
    best = ("twice", "vanilla") if dapo else ("vanilla", "twice")
    title = f"all, of a whole step, over the best baseline {rests}"
    out.append(Figure(name, title, 1.3, "step over the best baseline", None, calibrated))
    if dapo:
        out.append(Figure(name, "idle devices, plain", 0.5, "idle", None, calibrated, True))
        out.append(Figure(name, "twice the devices (at most)", 1.2, "twice", "plain", calibrated))
    orders = (
        *((("vanilla", "plain", 1.027), ("plain", "disaggregated", 1.334)) if dapo else ()),
        ("decoupled", "vanilla", 1.3 / 1.027),
        ("reconfigured", "decoupled", 1.2),
        ("all", "reconfigured", 1.2),
        ("all", "twice", 2.03),
        (*best, 1.0),
    )
    return out + [
        Ordering(name, f"{after} faster than {before}", ratio, after, before, calibrated)
        for after, before, ratio in orders
    ]


def play(config: SimulateRun, seed: int) -> dict[str, float]:
    """Rates of one rollout (1 / seconds)."""
    asked = config.specactor
    hardware, trace = ranked(hardware_of(config), trace_of(config, seed))
    first = first_plan(hardware, trace)
    found: dict[str, float] = {}
    for name, strategy in strategies(first, asked.requests_per_helper).items():
        phase = SpecActorRollout(hardware, trace, strategy, step_s=asked.step_s)
        found[name] = 1 / phase.seconds()
        if name == "plain":
            found["idle"] = phase.idle_fraction
    more = dataclasses.replace(hardware, num_devices=2 * hardware.num_devices)
    strategy = Strategy(PLAIN, first)
    found["twice"] = 1 / SpecActorRollout(more, trace, strategy, step_s=asked.step_s).seconds()
    step_s = {
        name: 1 - ROLLOUT_SHARE + ROLLOUT_SHARE * found["plain"] / found[name]
        for name in ("all", "vanilla", "twice")
    }
    best_s = min(step_s["vanilla"], step_s["twice"])
    found["step"] = 1 / step_s["all"]
    return found | {"step over the best baseline": best_s / step_s["all"]}

"""SpecActor's figure 13: decoupled drafting, reconfiguration, best-of-N; and what is not enough.

All but the last two are speedups over plain decoding. Drafters that stand apart without
being decoupled have as many devices as a verifier, as a rollout worker has.
"""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np

from rl.reproduction import ReproducedRow
from rl.simulation import rollout_of
from rl.simulation_config import SimulateRun, make_instance
from sched.cost_model import MODELS, Instance
from sched.ladder import Ladder
from sched.specactor import Plan, plan
from sched.speculative_phase import (
    COUPLED,
    DECOUPLED,
    DISAGGREGATED,
    PLAIN,
    Hardware,
    SpeculativePhase,
    Trace,
    Way,
)

FITTED = (
    "workload.mean_tokens",
    "workload.sigma",
    "workload.group_share",
    "efficiency.overhead_s",
    "specactor.acceptance",
    "specactor.spread",
    "specactor.ngram_acceptance",
    "specactor.drafter_overhead_s",
)


def hardware_of(config: SimulateRun) -> Hardware:
    """Verifiers as the cluster's workers are; a drafter takes one device."""
    verifier, asked = make_instance(config), config.specactor
    overhead = dataclasses.replace(config.efficiency, overhead_s=asked.drafter_overhead_s)
    drafters: dict[str, Instance | None] = {
        name: Instance(verifier.device, MODELS[name], 1, overhead) for name in asked.drafters
    }
    return Hardware(asked.devices, verifier, drafters | {"ngram": None})


def trace_of(config: SimulateRun, seed: int) -> Trace:
    """Groups in a drawn order; acceptance by request and method, drawn by beta laws."""
    workload, lengths = rollout_of(config, seed)
    rng, asked = np.random.default_rng(seed), config.specactor
    lengths_R = lengths[rng.permutation(len(lengths))].ravel()

    def drawn(mean: float) -> np.ndarray:
        weight = mean * (1 - mean) / asked.spread**2 - 1
        return rng.beta(mean * weight, (1 - mean) * weight, len(lengths_R))

    means = [asked.acceptance] * len(asked.drafters) + [asked.ngram_acceptance]
    return Trace(lengths_R, np.stack([drawn(m) for m in means], axis=1), workload.prompt_tokens)


def ranked(hardware: Hardware, trace: Trace) -> tuple[Hardware, Trace]:
    """The same with the methods in the order of the draft ladder: the first serves the batch."""
    size, methods = hardware.verifier.num_devices, list(hardware.drafters)
    batch = len(trace.lengths_R) * size // hardware.num_devices
    positions = trace.prompt_tokens + float(trace.lengths_R.mean()) / 2
    ladder = Ladder(
        {name: hardware.draft_line(name, size, batch, positions) for name in methods},
        lambda window: hardware.verify_line(size, window, batch, positions),
        batch,
    )
    means = trace.acceptance_RM.mean(axis=0)
    order = ladder.rank(dict(zip(methods, means.tolist(), strict=True)))
    columns = [methods.index(name) for name in order]
    drafters = {name: hardware.drafters[name] for name in order}
    return (
        dataclasses.replace(hardware, drafters=drafters),
        dataclasses.replace(trace, acceptance_RM=trace.acceptance_RM[:, columns]),
    )


def first_plan(hardware: Hardware, trace: Trace) -> Plan:
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


def ways(config: SimulateRun, found: Plan) -> dict[str, Way]:
    """The rows of the figure."""
    size, helpers = found.verify_devices, config.specactor.requests_per_helper
    apart = dataclasses.replace(found, draft_devices=size)
    return {
        "plain": Way(PLAIN, found),
        "vanilla": Way(COUPLED, found),
        "disaggregated": Way(DISAGGREGATED, apart),
        "decoupled": Way(DECOUPLED, found),
        "reconfigured": Way(DECOUPLED, found, reconfigure=True),
        "best of N": Way(DECOUPLED, found, reconfigure=True, helpers=helpers),
    }


def rows(config: SimulateRun) -> list[ReproducedRow]:
    """Means over seeds."""
    seconds: dict[str, list[float]] = {}
    for seed in config.simulate.seeds:
        hardware, trace = ranked(hardware_of(config), trace_of(config, seed))
        for name, way in ways(config, first_plan(hardware, trace)).items():
            phase = SpeculativePhase(hardware, trace, way, step_s=config.specactor.step_s)
            seconds.setdefault(name, []).append(phase.seconds())

    def row(
        name: str, published: float, way: str, before: str, required: bool = True
    ) -> ReproducedRow:
        ratio = statistics.fmean(b / s for b, s in zip(seconds[before], seconds[way], strict=True))
        workload = config.cluster.model
        return ReproducedRow("specactor", workload, name, published, ratio, required=required)

    return [
        row("vanilla speculation", 1.027, "vanilla", "plain", required=False),
        row("naive disaggregation", 0.75, "disaggregated", "plain"),
        row("decoupled", 1.3, "decoupled", "plain"),
        row("+ reconfiguration", 1.2, "reconfigured", "decoupled"),
        row("+ best of N", 1.2, "best of N", "reconfigured"),
    ]

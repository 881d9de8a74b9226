"""RhymeRL's figure 14 and table 2: steps in opposite orders, two tiers, history's drafts.

A run of steps over a few epochs of the same prompts, of each of which a quarter is played; the
first epoch is history only. The baseline trains one step off as well, with a barrier. Training has
the devices that rollouts leave, and takes the share of the work that figure 2 gives. Ranks are as
stable as figure 9 says: 16% of math's responses move to a higher group, 28% of code's. For figures
13 and 15 the text gives averages over models and lengths only, for figures 16 to 18 ranges.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rl.simulation.config import SimulateRun, TrainingStepsConfig, make_cluster, make_instance
from rl.simulation.draft_costs import Windowed, WindowMean, window_mean
from rl.simulation.reproduction.rows import Entry, Figure, figures_of
from sched.policies.group_fifo import GroupFifo
from sched.policies.histopipe import HistoPipe, HistoPipeConfig
from sched.policies.histopipe_allocation import Pace, Tau, tau_of
from sched.policies.step_order import StepOrder
from sched.protocol import Scheduler
from sched.request import RequestSpec
from sched.simulator.cluster import Cluster, Record, Simulation
from sched.simulator.roofline import MODELS, Instance
from sched.simulator.worker import RoundModel
from sched.simulator.workloads import draw_epochs, draw_lengths, make_requests

ASSUMED = (
    "simulated_cluster.workers",  # of the paper's 128 devices, two each
    "workload.num_groups",  # 8K prompts; 20 epochs are 300 to 1,000 steps (figure 9): 16 an epoch
    "workload.mean_tokens",
    "workload.sigma",
    "training_steps.growth",
)
FIGURE_14 = {"math": (1.43, 1.10, 1.50), "code": (1.41, 1.08, 1.40)}
# table 2: means over three datasets of math and two of code, by ranking groups
MIGRATED = {"math": {8: 0.0276, 16: 0.0373}, "code": {8: 0.0265, 16: 0.0487}}
LARGE_BATCHES = {"Qwen3-8B": (2, 2176), "Qwen2.5-32B": (4, 4928)}  # devices, rollouts a worker
SUSTAINED = 1.83  # of HistoSpec at these: 1.80 to 1.86
LARGE_LIMIT_TOKENS = 8192


def draw_run(config: SimulateRun, seed: int) -> tuple[list[list[RequestSpec]], dict[int, int]]:
    """Return the requests of every step, and their lengths by number.

    Each epoch has its own order; past lengths are those of the epoch before.
    """
    settings, step = config.training_steps, config.workload
    epoch = dataclasses.replace(step, num_groups=step.num_groups * settings.steps_per_epoch)
    means = [step.mean_tokens * settings.growth**e for e in range(settings.epochs)]
    drawn = draw_epochs(epoch, means, seed=seed)
    rng, lengths = np.random.default_rng(seed), dict[int, int]()
    steps: list[list[RequestSpec]] = []
    sizes = step.prompt_tokens, step.limit_tokens
    for e in range(1, settings.epochs):
        for prompts in np.split(rng.permutation(epoch.num_groups), settings.steps_per_epoch):
            steps.append([])
            for prompt in prompts.tolist():
                group = len(steps) * epoch.num_groups + prompt
                past = tuple(drawn[e - 1, prompt].tolist())
                for length in drawn[e, prompt].tolist():
                    number = len(lengths)
                    lengths[number] = length
                    request = RequestSpec(
                        number, group, *sizes, past_tokens=past, step=len(steps) - 1
                    )
                    steps[-1].append(request)
    return steps, lengths


def history_windows(config: TrainingStepsConfig) -> WindowMean:
    """Return HistoSpec's mean windows at the published acceptance and share of tokens found.

    p is found by bisection. Tokens that history does not have take a round each, without drafts,
    so that a share of found / (found + tokens · (1 − found)) of all rounds has drafts.
    """
    low, high = 0.0, 1.0
    for _ in range(30):
        p = (low + high) / 2
        mean = window_mean(p)
        accepted = (mean.tokens - 1) / mean.drafts
        low, high = (p, high) if accepted < config.acceptance else (low, p)
    tokens = window_mean(high).tokens
    found = config.found_tokens / (config.found_tokens + tokens * (1 - config.found_tokens))
    return window_mean(high, found)


def profile(config: SimulateRun, instance: Instance, windows: WindowMean | None) -> Tau:
    """Return τ with the published windows, or without drafts."""
    pace = Pace(1 + windows.drafts, windows.tokens) if windows else Pace()
    prompt_tokens = config.workload.prompt_tokens
    return tau_of(instance.round_seconds, instance.kv_tokens, prompt_tokens, pace)


def histopipe(config: SimulateRun, groups: int, tau: Tau | None, train_s: float) -> HistoPipe:
    """Return a HistoPipe scheduler, with one tier if `tau` is None."""
    settings = config.training_steps
    return HistoPipe(
        HistoPipeConfig(
            num_steps=(settings.epochs - 1) * settings.steps_per_epoch,
            num_ranking_groups=groups,
            epoch_prompts=config.workload.num_groups * settings.steps_per_epoch,
            tau=None if tau is None else lambda: tau,
            train_s=train_s,
        )
    )


def figures(config: SimulateRun) -> list[Figure]:
    task, calibrated, settings = _task(config), config.simulate.calibrated, config.training_steps
    name = f"{task.capitalize()}-14B"
    rests = f"({settings.found_tokens:.0%} found, {settings.acceptance:.0%} accepted)"
    hybrid, two_tier, drafted = FIGURE_14[task]
    entries: list[Entry] = [
        ("hybrid pipeline", hybrid, "hybrid", "barrier", "gain"),
        ("hybrid faster than barrier", hybrid, "hybrid", "barrier", "order"),
        ("+ two-tier", two_tier, "two-tier", "hybrid", "gain"),
        ("two-tier faster than hybrid", two_tier, "two-tier", "hybrid", "order"),
        (f"+ HistoSpec {rests}", drafted, "drafted", "two-tier", "gain"),
        ("drafted faster than two-tier", drafted, "drafted", "two-tier", "order"),
        *(
            (f"migrated, {groups} groups", share, f"migrated {groups}", None, "share")
            for groups, share in MIGRATED[task].items()
        ),
    ]
    if task == "code":
        return figures_of(name, entries, calibrated)
    entries.append(("idle workers, barrier", 0.46, "idle", None, "share"))
    title = f"HistoSpec (1.80 to 1.86) {rests}"
    return figures_of(name, entries, calibrated) + [
        Figure(
            *(f"{model}, {rollouts:,} a worker", title, SUSTAINED),
            *(f"{model} drafted", f"{model} plain"),
        )
        for model, (_, rollouts) in LARGE_BATCHES.items()
    ]


def _task(config: SimulateRun) -> str:
    """Return the task by the paper's number of ranking groups: 16 for math, 8 for code."""
    return "math" if config.training_steps.ranking_groups == 16 else "code"


def play(config: SimulateRun, seed: int) -> dict[str, float]:
    """Return the rates of a run (1 / seconds to its last update), and shares of it."""
    steps, lengths = draw_run(config, seed)
    cluster, settings = make_cluster(config), config.training_steps
    windows, instance = history_windows(settings), make_instance(config)

    def played(
        scheduler: Scheduler, train_s: float, round_model: RoundModel | None = None
    ) -> Record:
        simulation = Simulation(scheduler, cluster, lengths, round_model=round_model)
        return simulation.run_steps(steps, [train_s] * len(steps))

    def barrier(train_s: float) -> Record:
        return played(StepOrder(GroupFifo(seed=seed), "one_step_off"), train_s)

    rollouts = barrier(0.0)
    train_s = train_share(config) * rollouts.trained_s[-1] / len(steps)
    found = {"idle": rollouts.idle_fraction, "barrier": 1 / barrier(train_s).trained_s[-1]}
    for groups in MIGRATED["math"]:
        scheduler = histopipe(config, groups, None, train_s)
        seconds = played(scheduler, train_s).trained_s[-1]
        found[f"migrated {groups}"] = scheduler.num_moved / len(lengths)
        if groups == settings.ranking_groups:
            found["hybrid"] = 1 / seconds
    for name, drafts in (("two-tier", None), ("drafted", windows)):
        scheduler = histopipe(
            config, settings.ranking_groups, profile(config, instance, drafts), train_s
        )
        round_model = Windowed(instance, drafts) if drafts else None
        found[name] = 1 / played(scheduler, train_s, round_model).trained_s[-1]
    return found | (_large_batches(config, windows, seed) if _task(config) == "math" else {})


def train_share(config: SimulateRun) -> float:
    """Return the seconds of an update over those of a plain rollout, each on its own devices."""
    settings, cluster = config.training_steps, config.simulated_cluster
    devices, rollout = cluster.workers * cluster.devices_per_worker, settings.rollout_share
    return (1 - rollout) / rollout * devices / (settings.devices - devices)


def _large_batches(config: SimulateRun, windows: WindowMean, seed: int) -> dict[str, float]:
    """Return the rates of one worker with thousands of rollouts, plain and with drafts."""
    found, step = {}, config.workload
    for model, (devices, rollouts) in LARGE_BATCHES.items():
        instance = dataclasses.replace(
            make_instance(config), model=MODELS[model], num_devices=devices
        )
        workload = dataclasses.replace(
            step,
            num_groups=rollouts // step.group_size,
            mean_tokens=step.mean_tokens * LARGE_LIMIT_TOKENS / step.limit_tokens,
            limit_tokens=LARGE_LIMIT_TOKENS,
        )
        requests, lengths = make_requests(workload, draw_lengths(workload, seed=seed))
        for name, round_model in (("plain", None), ("drafted", Windowed(instance, windows))):
            simulation = Simulation(
                GroupFifo(seed=seed), Cluster(instance, 1), lengths, round_model=round_model
            )
            found[f"{model} {name}"] = 1 / simulation.run(requests).completion_s
    return found

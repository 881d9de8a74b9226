"""RhymeRL's figure 14 and table 2: steps in opposite orders, two tiers, history's drafts.

A run of steps over a few epochs of the same prompts, of each of which a quarter is played; the
first epoch is history only. The baseline trains one step off as well, with a barrier. Training has
the devices that rollouts leave, and takes the share of the work that figure 2 gives. Ranks are as
stable as figure 9 says: 16% of math's responses move to a higher group, 28% of code's. From the
paper are the model, two devices a worker, 128 devices, responses of up to 16K, 16 a prompt, the
ranking groups, and the shares of accepted and found drafts (figures 17, 6). Math is calibrated: the
mean length was fitted to it, within the text's 1K to 10K, nothing to HistoSpec's rows. Code is
predicted, with math's mean length. For figures 13 and 15 the text gives averages over models and
lengths only, for figures 16 to 18 ranges.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.simulator.drafts import Windowed, WindowMean, window_mean
from benchmarks.simulator.experiment import Entry, Experiment, Figure, figures_of
from benchmarks.simulator.steps import StepSimulation, StepsRecord
from reprise.sched.policies.group_fifo import GroupFifo
from reprise.sched.policies.histopipe import HistoPipe, HistoPipeConfig, Pace, Tau, tau_of
from reprise.sched.policies.steps import StepOrder
from reprise.sched.protocol import Scheduler
from reprise.sched.request import RequestSpec
from reprise.sched.simulator.cluster import Cluster, Simulation
from reprise.sched.simulator.roofline import MODELS
from reprise.sched.simulator.worker import RoundModel
from reprise.sched.simulator.workloads import Workload, draw_epochs, draw_lengths, make_requests


@dataclasses.dataclass(frozen=True)
class TrainingRun(Experiment):
    """A run of steps over epochs of the same prompts."""

    ranking_groups: int = 16
    rollout_share: float = 0.91  # of the work of a step: figure 2
    found_tokens: float = 0.93  # share of the tokens that history has: figure 6
    steps_per_epoch: int = 4  # 8K prompts in 16 steps, of which 4 are played
    epochs: int = 3  # the first is history only


EXPERIMENTS = {
    "rhymerl_code": TrainingRun(
        *("H100", "Qwen3-14B", 48, 2, Workload(512, 16, 1000, 16384, group_share=0.85)),
        ranking_groups=8,
        rollout_share=0.84,
        found_tokens=0.75,
    ),
    "rhymerl_math": TrainingRun(
        "H100", "Qwen3-14B", 48, 2, Workload(512, 16, 1000, 16384), calibrated=True
    ),
}
DEVICES = 128  # including those that train
ACCEPTANCE = 0.72  # of draft tokens from history: 65 to 79%, figure 17
GROWTH = 1.02  # of the mean length from epoch to epoch
FIGURE_14 = {"math": (1.43, 1.10, 1.50), "code": (1.41, 1.08, 1.40)}
# table 2: means over three datasets of math and two of code, by ranking groups
MIGRATED = {"math": {8: 0.0276, 16: 0.0373}, "code": {8: 0.0265, 16: 0.0487}}
LARGE_BATCHES = {"Qwen3-8B": (2, 2176), "Qwen2.5-32B": (4, 4928)}  # devices, rollouts a worker
SUSTAINED = 1.83  # of HistoSpec at these: 1.80 to 1.86
LARGE_LIMIT_TOKENS = 8192


def assumed(run: TrainingRun) -> dict[str, float]:
    """Return the constants that the paper does not give."""
    return {
        "simulated_cluster.workers": run.workers,  # of the paper's 128 devices, two each
        # 20 epochs are 300 to 1,000 steps (figure 9): 16 an epoch
        "workload.num_groups": run.workload.num_groups,
        "workload.mean_tokens": run.workload.mean_tokens,
        "workload.sigma": run.workload.sigma,
        "training_steps.growth": GROWTH,
    }


def draw_run(run: TrainingRun, seed: int) -> tuple[list[list[RequestSpec]], dict[int, int]]:
    """Return the requests of every step, and their lengths by number.

    Each epoch has its own order; past lengths are those of the epoch before.
    """
    step = run.workload
    epoch = dataclasses.replace(step, num_groups=step.num_groups * run.steps_per_epoch)
    means = [step.mean_tokens * GROWTH**e for e in range(run.epochs)]
    drawn = draw_epochs(epoch, means, seed=seed)
    rng, lengths = np.random.default_rng(seed), dict[int, int]()
    steps: list[list[RequestSpec]] = []
    sizes = step.prompt_tokens, step.limit_tokens
    for e in range(1, run.epochs):
        for prompts in np.split(rng.permutation(epoch.num_groups), run.steps_per_epoch):
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


def history_windows(found_tokens: float) -> WindowMean:
    """Return HistoSpec's mean windows at the published acceptance and share of tokens found.

    p is found by bisection. Tokens that history does not have take a round each, without drafts,
    so a share of found / (found + tokens · (1 − found)) of all rounds has drafts.
    """
    low, high = 0.0, 1.0
    for _ in range(30):
        p = (low + high) / 2
        mean = window_mean(p)
        accepted = (mean.tokens - 1) / mean.drafts
        low, high = (p, high) if accepted < ACCEPTANCE else (low, p)
    tokens = window_mean(high).tokens
    return window_mean(high, found_tokens / (found_tokens + tokens * (1 - found_tokens)))


def histopipe(run: TrainingRun, groups: int, tau: Tau | None, train_s: float) -> HistoPipe:
    """Return a HistoPipe scheduler, with one tier if `tau` is None."""
    return HistoPipe(
        HistoPipeConfig(
            num_steps=(run.epochs - 1) * run.steps_per_epoch,
            num_ranking_groups=groups,
            epoch_prompts=run.workload.num_groups * run.steps_per_epoch,
            tau=None if tau is None else lambda: tau,
            train_s=train_s,
        )
    )


def _task(run: TrainingRun) -> str:
    """Return the task by the paper's number of ranking groups: 16 for math, 8 for code."""
    return "math" if run.ranking_groups == 16 else "code"


def figures(run: TrainingRun) -> list[Figure]:
    task, calibrated = _task(run), run.calibrated
    name = f"{task.capitalize()}-14B"
    rests = f"({run.found_tokens:.0%} found, {ACCEPTANCE:.0%} accepted)"
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


def play(run: TrainingRun, seed: int) -> dict[str, float]:
    """Return the rates of a run (1 / seconds to its last update), and shares of it."""
    steps, lengths = draw_run(run, seed)
    windows, instance, groups = history_windows(run.found_tokens), run.instance, run.ranking_groups

    def played(
        scheduler: Scheduler, train_s: float, round_model: RoundModel | None = None
    ) -> StepsRecord:
        simulation = StepSimulation(scheduler, run.cluster, lengths, round_model=round_model)
        return simulation.run_steps(steps, [train_s] * len(steps))

    def barrier(train_s: float) -> StepsRecord:
        return played(StepOrder(GroupFifo(seed=seed), "one_step_off"), train_s)

    rollouts = barrier(0.0)
    train_s = train_share(run) * rollouts.trained_s[-1] / len(steps)
    values = {"idle": rollouts.idle_fraction, "barrier": 1 / barrier(train_s).trained_s[-1]}
    for num_groups in MIGRATED["math"]:
        scheduler = histopipe(run, num_groups, None, train_s)
        seconds = played(scheduler, train_s).trained_s[-1]
        values[f"migrated {num_groups}"] = scheduler.num_moved / len(lengths)
        if num_groups == groups:
            values["hybrid"] = 1 / seconds
    prompt_tokens = run.workload.prompt_tokens
    paces = {"two-tier": Pace(), "drafted": Pace(1 + windows.drafts, windows.tokens)}
    for name, pace in paces.items():
        tau = tau_of(instance.round_seconds, instance.kv_tokens, prompt_tokens, pace)
        round_model = Windowed(instance, windows) if name == "drafted" else None
        record = played(histopipe(run, groups, tau, train_s), train_s, round_model)
        values[name] = 1 / record.trained_s[-1]
    return values | (_large_batches(run, windows, seed) if _task(run) == "math" else {})


def train_share(run: TrainingRun) -> float:
    """Return the seconds of an update over those of a plain rollout, each on its own devices."""
    devices, rollout = run.workers * run.devices_per_worker, run.rollout_share
    return (1 - rollout) / rollout * devices / (DEVICES - devices)


def _large_batches(run: TrainingRun, windows: WindowMean, seed: int) -> dict[str, float]:
    """Return the rates of one worker with thousands of rollouts, plain and with drafts."""
    values, step = {}, run.workload
    for model, (devices, rollouts) in LARGE_BATCHES.items():
        instance = dataclasses.replace(run.instance, model=MODELS[model], num_devices=devices)
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
            values[f"{model} {name}"] = 1 / simulation.run(requests).completion_s
    return values

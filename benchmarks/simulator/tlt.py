"""TLT's tables 2, 4, 7 and 8 and figure 14: tree drafts by batch, by device, and in one rollout.

    speedup = tokens · plain / (verification + depth · drafter's step)

all by the roofline. EAGLE's drafter is one layer of the model and its vocabulary's matrix, and a
step of it drafts `TOP_K` nodes a request. Table 4 is calibrated: with the plain rounds of tables 2
and 7 it gives `sched.simulator.roofline.Efficiency` for all papers, and tokens by draft tokens. So
are H100 of table 2 (one device) and EAGLE of table 7 (two), which give the fixed seconds of a
drafter's step. Accepted tokens are table 1's for table 4, and their own for the 7B tables. From the
paper are models, devices, depth, responses of up to 32K and the threshold of figure 14's rollout;
its mean length is assumed, and that 1% of its responses reach the limit, as "a few" do.
"""

from __future__ import annotations

import dataclasses

from benchmarks.simulator.drafts import Budgeted, RequestClass
from benchmarks.simulator.experiment import Entry, Experiment, Figure, figures_of
from reprise.sched.simulator.cluster import play_policy
from reprise.sched.simulator.roofline import ACCELERATORS, MODELS, Instance, ModelShape
from reprise.sched.simulator.workloads import Workload, draw_lengths, make_requests
from reprise.spec.budget.goodput import Goodput

EXPERIMENTS = {
    "tlt": Experiment("H100", "Qwen2.5-32B", 1, 4, Workload(8, 16, 4000, 32768, limit_share=0.01))
}
DRAFTS = (16, 32, 48, 64)
TOKENS = (7.57, 8.43, 8.67, 8.67)  # a round by DRAFTS, fitted to table 4; the last is table 1's
DEPTH = 10  # drafter steps; as in table 4 if the text gives none
TOP_K = 8  # nodes of each step
STEP_S, STEP_DEVICE_S = 0.1e-3, 0.2e-3  # fixed seconds of a drafter's step, more for each device
POSITIONS = 1000  # of a request, if the tables do not say
MAX_REQUESTS = 32  # with more running, rounds are plain

VOCABULARY = 152_064  # of Qwen2.5, from its published configuration
TABLE_4 = {
    1: (3.22, 3.46, 3.56, 3.62),
    2: (3.08, 3.28, 3.39, 3.38),
    4: (3.01, 3.09, 3.13, 2.98),
    8: (2.73, 2.63, 2.51, 2.27),
    16: (2.67, 2.52, 2.24, 1.91),
    32: (2.48, 2.23, 1.90, 1.70),
}
TABLE_2 = {
    "B200": 2.33,
    "H100": 2.61,
    "A100": 2.79,
    "RTX 5090": 2.91,
    "RTX 4090": 2.87,
    "RTX 3090": 3.22,
}
EAGLE_TOKENS = 6.53  # of the 7B model: tables 6 and 7
TABLE_7 = {"EAGLE": (6.53, 2.24), "HASS": (6.67, 2.29), "EAGLE-3": (6.83, 2.55)}
PLAIN_7 = 242.11  # tokens a second, two devices
TABLE_8 = {  # tokens accepted and tokens a second, by drafter
    "0.5B": (5.95, 363.87),
    "0.5B, trained": (6.68, 408.51),
    "0.5B, + OSD": (6.89, 421.35),
    "EAGLE, untrained": (1.57, 130.34),
    "EAGLE, + OSD": (6.77, 562.04),
}
SMALL, LARGE = "Qwen2.5-7B", "Qwen2.5-32B"
STEP_ROWS = ("H100", "EAGLE")  # their gains give the fixed seconds of a drafter's step


def assumed(experiment: Experiment) -> dict[str, float]:
    """Return the constants that the paper does not give."""
    return {
        "workload.mean_tokens": experiment.workload.mean_tokens,
        "workload.limit_share": experiment.workload.limit_share or 0.0,
        "tree_drafts.positions": POSITIONS,
        "tree_drafts.depth": DEPTH,
        "tree_drafts.step_s": STEP_S,
        "tree_drafts.step_device_s": STEP_DEVICE_S,
    }


def eagle(model: ModelShape) -> ModelShape:
    """Return EAGLE's drafter: one layer of the model, and the matrix of its vocabulary."""
    head = VOCABULARY * model.hidden
    params = (model.active_params - head) / model.num_layers + head
    return dataclasses.replace(
        model,
        name=f"EAGLE of {model.name}",
        active_params=params,
        weight_bytes=2 * params,
        num_layers=1,
        kv_bytes=model.kv_bytes / model.num_layers,
        attention_operations=model.attention_operations / model.num_layers,
    )


def tree_lane() -> RequestClass:
    """Return probabilities that give the tokens of each size, equal between two sizes."""
    probs: list[float] = []
    for drafts, tokens in zip(DRAFTS, TOKENS, strict=True):
        more = drafts - len(probs)
        probs += [(tokens - 1 - sum(probs)) / more] * more
    return RequestClass(0, tuple(probs))


def drafter_of(target: Instance, model: ModelShape) -> Instance:
    """Return a drafter on the devices of `target`: a step's fixed seconds grow with these."""
    step_s = STEP_S + STEP_DEVICE_S * target.num_devices
    efficiency = dataclasses.replace(target.efficiency, overhead_s=step_s)
    return dataclasses.replace(target, model=model, efficiency=efficiency)


def draft_seconds(target: Instance, batch: int) -> float:
    """Return the seconds of a round's trees: DEPTH drafter steps on the model's devices."""
    drafter = drafter_of(target, eagle(target.model))
    return DEPTH * drafter.round_seconds(batch, batch * POSITIONS, TOP_K)


def speedup(target: Instance, batch: int, drafts: int, tokens: float, draft_s: float) -> float:
    """Return the speedup of rounds that verify `drafts` and give `tokens`, over plain rounds."""
    positions = batch * POSITIONS
    verify_s = target.round_seconds(batch, positions, 1 + drafts)
    return tokens * target.round_seconds(batch, positions) / (verify_s + draft_s)


def adaptive(instance: Instance) -> Budgeted:
    """Return rounds with trees of the best size, up to MAX_REQUESTS requests."""
    return Budgeted(
        instance,
        [tree_lane()],
        Goodput,
        [1 + n for n in DRAFTS],
        draft_s=lambda requests, nodes: draft_seconds(instance, requests),
        max_requests=MAX_REQUESTS,
    )


def figures(experiment: Experiment) -> list[Figure]:
    micro: list[Entry] = [
        (f"batch {batch}, {n} verified (8.67 accepted)", gain, f"{batch} {n}", None, "gain")
        for batch, row in TABLE_4.items()
        for n, gain in zip(DRAFTS, row, strict=True)
    ]
    for batch, row in TABLE_4.items():
        best, worst = (DRAFTS[row.index(of)] for of in (max(row), min(row)))
        title = f"batch {batch}: {best} better than {worst}"
        ratio = max(row) / min(row)
        micro.append((title, ratio, f"{batch} {best}", f"{batch} {worst}", "order"))
    devices: list[Entry] = [
        (f"on {device} ({EAGLE_TOKENS} accepted)", gain, device, None, "gain")
        for device, gain in TABLE_2.items()
    ]
    ratio = TABLE_2["RTX 3090"] / TABLE_2["B200"]
    devices.append(("RTX 3090 gains more than B200", ratio, "RTX 3090", "B200", "order"))
    eagle_over, small = TABLE_7["EAGLE"][1], TABLE_8["0.5B, trained"][1] / PLAIN_7
    untrained = PLAIN_7 / TABLE_8["EAGLE, untrained"][1]
    drafters: list[Entry] = [
        (f"{name} ({tokens} accepted)", rate / PLAIN_7, name, None, "gain")
        for name, (tokens, rate) in TABLE_8.items()
    ]
    drafters += [
        ("EAGLE faster than 0.5B", eagle_over / small, "EAGLE", "0.5B, trained", "order"),
        ("plain faster than untrained EAGLE", untrained, "plain", "EAGLE, untrained", "order"),
    ]
    trained: list[Entry] = [
        (f"{name} ({tokens} accepted)", gain, name, None, "gain")
        for name, (tokens, gain) in TABLE_7.items()
    ]
    rollout = "trees below 32 requests (8.67 accepted)"
    all_figures = [
        *figures_of(f"{LARGE}, table 4", micro, calibrated=True),
        Figure(f"{LARGE}, figure 14", rollout, 2.44, "rollout"),
        *figures_of(f"{SMALL}, table 2", devices),
        *figures_of(f"{SMALL}, table 7", trained),
        *figures_of(f"{SMALL}, table 8", drafters),
    ]
    return [
        dataclasses.replace(
            f, calibrated=f.calibrated or (f.kind == "gain" and f.value in STEP_ROWS)
        )
        for f in all_figures
    ]


def play(experiment: Experiment, seed: int) -> dict[str, float]:
    """Return the speedups; only the rollout's depends on the seed."""
    large, values = experiment.instance, {"plain": 1.0}
    for batch in TABLE_4:
        draft_s = draft_seconds(large, batch)
        for drafts, tokens in zip(DRAFTS, TOKENS, strict=True):
            values[f"{batch} {drafts}"] = speedup(large, batch, drafts, tokens, draft_s)
    for device in TABLE_2:
        one = dataclasses.replace(
            large, device=ACCELERATORS[device], model=MODELS[SMALL], num_devices=1
        )
        values[device] = speedup(one, 1, DRAFTS[-1], EAGLE_TOKENS, draft_seconds(one, 1))
    two = dataclasses.replace(large, model=MODELS[SMALL], num_devices=2)
    by_eagle_s = draft_seconds(two, 1)
    by_small_s = DEPTH * drafter_of(two, MODELS["Qwen2.5-0.5B"]).round_seconds(1, POSITIONS)
    for name, (tokens, _) in (TABLE_7 | TABLE_8).items():
        is_chain = name.startswith("0.5B")
        drafts, draft_s = (DEPTH, by_small_s) if is_chain else (DRAFTS[-1], by_eagle_s)
        values[name] = speedup(two, 1, drafts, tokens, draft_s)
    lengths = draw_lengths(experiment.workload, seed=seed)
    requests, by_number = make_requests(experiment.workload, lengths)
    plain_s, drafted_s = (
        play_policy(experiment.cluster, "group_fifo", seed, requests, by_number, model).completion_s
        for model in (None, adaptive(large))
    )
    return values | {"rollout": plain_s / drafted_s}

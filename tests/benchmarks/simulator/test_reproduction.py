"""Published against simulated: what the metric can tell apart, rows, and small experiments."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from benchmarks.simulator import rhymerl, seer, specactor, tlt
from benchmarks.simulator.experiment import Figure
from benchmarks.simulator.reproduction import (
    EXPERIMENTS,
    PAPERS,
    constants,
    figures_of,
    gain_error,
    null_model,
    rows_of,
    summary,
)
from benchmarks.simulator.specactor_devices import DevicePlan
from reprise.sched.simulator.roofline import MODELS
from reprise.spec.budget.aimd import MAX_TOKENS

SHIPPED = {name: experiment for name, (_, experiment) in EXPERIMENTS.items()}
FIGURES = {name: figures_of(name) for name in EXPERIMENTS}
KEYS = ["paper", "workload", "row", "role", "published", "simulated", "low", "high", "null"]


def test_an_error_is_that_of_the_gain():
    assert gain_error(1.3, 1.3) == 0.0
    assert gain_error(1.0, 1.3) == gain_error(1.0, 9.0) == 1.0  # no gain at all
    assert gain_error(1.3**2, 1.3) == pytest.approx(1.0)  # twice the gain
    assert gain_error(1 / 1.3, 1.3) == pytest.approx(2.0)  # the wrong sign
    assert gain_error(0.75, 1 / 1.334) == pytest.approx(0.0, abs=0.01)


def planted(values):
    """Rows of a paper of one speedup, one share and one ordering, from what seeds gave."""
    figures = [
        Figure("w", "speedup", 1.5, "fast", "slow", "gain", True),
        Figure("w", "share", 0.4, "share", None, "share"),
        Figure("w", "fast faster than slow", 1.5, "fast", "slow", "order"),
    ]
    return list(rows_of("tlt", figures, values, {("tlt", "gain"): 1.2}))


def seeds(*speedups, share=0.5):
    return [{"fast": s, "slow": 1.0, "share": share} for s in speedups]


def test_a_row_is_the_median_over_seeds_with_its_interval_and_the_null_beside_it():
    speedup, share, order = planted(seeds(*(1 + i / 10 for i in range(11))))
    assert (speedup.simulated, speedup.low, speedup.high) == pytest.approx((1.5, 1.1, 1.9))
    assert (speedup.role, share.role) == ("calibrated", "predicted")
    assert (speedup.null, share.null, order.null) == (1.2, 0.5, 1.0)
    assert speedup.error(speedup.simulated) == pytest.approx(0.0, abs=1e-9)
    assert share.error(share.simulated) == pytest.approx(10.0)  # points
    assert list(speedup.as_json()) == KEYS and list(order.as_json()) == [*KEYS, "holds"]


@pytest.mark.parametrize(
    ("speedups", "holds"),
    [
        ([1.2] * 10, True),
        ([1.2] * 9 + [0.9], True),  # nine of ten
        ([1.2] * 8 + [0.9] * 2, False),
        ([1.0] * 10, False),  # a constant orders nothing
        ([0.9] * 10, False),
    ],
)
def test_an_ordering_holds_where_nine_of_ten_seeds_say_so(speedups, holds):
    assert planted(seeds(*speedups))[2].holds is holds


def test_the_summary_tells_a_right_simulator_from_a_constant():
    right, wrong = planted(seeds(1.5)), planted(seeds(1.0))
    assert summary(right)["calibrated_median_gain_error"] == 0.0
    assert summary(wrong)["calibrated_median_gain_error"] == 1.0
    assert summary(wrong)["calibrated_null_median_gain_error"] == pytest.approx(0.5503)
    assert summary(right)["predicted_median_share_error_points"] == pytest.approx(10.0)
    assert summary(right)["predicted_orderings_held"] == 1
    assert summary(wrong)["predicted_orderings_failed"] == ["tlt w: fast faster than slow"]


def test_nulls_are_one_constant_a_paper_from_its_calibrated_rows_alone():
    figures = [
        ("p", Figure("w", "a", 2.0, "x", None, "gain", True)),
        ("p", Figure("w", "b", 8.0, "x", None, "gain", True)),
        ("p", Figure("w", "c", 99.0, "x")),
        ("p", Figure("w", "d", 0.1, "x", None, "share", True)),
        ("q", Figure("w", "e", 7.0, "x", "y", "order", True)),
    ]
    nulls = null_model(figures)
    assert nulls == {("p", "gain"): pytest.approx(4.0), ("p", "share"): 0.1}


def test_a_paper_has_one_calibrated_workload_and_predicts_others():
    by_paper = {}
    for name, (paper, _) in EXPERIMENTS.items():
        for figure in FIGURES[name]:
            of = by_paper.setdefault(paper, {True: set(), False: set()})
            of[figure.calibrated].add(figure.workload)
    assert set(by_paper) == set(PAPERS)
    # besides table 4, two rows of TLT's give a drafter's fixed seconds
    steps = [f for f in FIGURES["tlt"] if f.calibrated and "table 4" not in f.workload]
    assert [(f.workload[-7:], f.row[:7], f.kind) for f in steps] == [
        ("table 2", "on H100", "gain"),
        ("table 7", "EAGLE (", "gain"),
    ]
    by_paper["tlt"][True] -= {f.workload for f in steps}
    for paper, of in by_paper.items():
        assert len(of[True]) == 1 and of[False] and not of[True] & of[False], paper
    rows = [(f.workload, f.row) for figures in FIGURES.values() for f in figures]
    assert len(set(rows)) == len(rows)


def test_physical_constants_are_shared_by_all_papers():
    shared = constants()["all papers"]
    # how alike a prompt's responses are is RhymeRL's own for code: its figure 9
    assert shared.pop("workload.group_share") == "0.85 / 0.97"
    assert len(shared) == 5 and not any("/" in value for value in shared.values())
    others = [x.workload.group_share for n, x in SHIPPED.items() if n != "rhymerl_code"]
    assert set(others) == {0.97}


def test_grouped_lanes_bring_the_published_tokens():
    for lane, tokens in zip(seer.grouped_lanes(), seer.PATHS_TOKENS, strict=True):
        assert 1 + sum(lane.probs) == pytest.approx(tokens)
        assert list(lane.probs) == sorted(lane.probs, reverse=True)


def test_latent_attention_reads_the_cache_once_a_path():
    """Chains of eight are one path, trees of 32 four; attention to other models is shared."""
    moonlight = seer.verifier_of(SHIPPED["seer_moonlight"])
    shared = SHIPPED["seer_moonlight"].instance
    plain_s, chain_s, tree_s = (moonlight.round_cost(2, n).per_position_s for n in (1, 9, 33))
    assert plain_s == chain_s == shared.round_cost(2, 9).per_position_s
    assert tree_s == pytest.approx(4 * plain_s) and tree_s > shared.round_cost(2, 33).per_position_s
    assert moonlight.round_cost(2, 33).fixed_s == shared.round_cost(2, 33).fixed_s
    qwen = SHIPPED["seer_qwen2_vl"]
    assert seer.verifier_of(qwen) == qwen.instance


def test_eagles_drafter_is_a_layer_and_a_vocabulary():
    drafter = tlt.eagle(MODELS["Qwen2.5-7B"])
    assert drafter.num_layers == 1 and drafter.kv_bytes == MODELS["Qwen2.5-7B"].kv_bytes / 28
    # 152,064 · 3,584 of the vocabulary, and a 28th of the rest
    assert drafter.active_params == pytest.approx(545e6 + (7.07e9 - 545e6) / 28, rel=1e-3)
    lane = tlt.tree_lane()
    assert [1 + sum(lane.probs[:n]) for n in tlt.DRAFTS] == pytest.approx(tlt.TOKENS)


def test_a_drafters_fixed_seconds_grow_with_its_devices_and_the_models_do_not():
    for devices, milliseconds in ((1, 0.3), (2, 0.5), (4, 0.9)):
        target = dataclasses.replace(SHIPPED["tlt"].instance, num_devices=devices)
        drafter = tlt.drafter_of(target, MODELS["Qwen2.5-0.5B"])
        assert drafter.efficiency.overhead_s == pytest.approx(milliseconds / 1e3)
        assert (drafter.device, drafter.num_devices) == (target.device, devices)
    assert target.efficiency.overhead_s == 0.9e-3


def test_two_calibrated_rows_predict_tlts_other_devices_and_drafters():
    """Of 12 rows that nothing was fitted to, the worst is wrong by a fifth of its gain."""
    found = tlt.play(SHIPPED["tlt"], 0)
    rows = [f for f in FIGURES["tlt"] if f.kind == "gain" and "7B" in f.workload]
    errors = {f.row: gain_error(f.of(found), f.published) for f in rows if not f.calibrated}
    assert len(errors) == 12 and max(errors.values()) < 0.2, errors
    assert statistics.median(errors.values()) < 0.1


def test_windows_of_history_have_the_published_acceptance_and_share():
    whole = rhymerl.history_windows(1.0)
    assert (whole.tokens - 1) / whole.drafts == pytest.approx(0.72, abs=1e-4)
    assert whole.drafts < MAX_TOKENS
    for share in (0.75, 0.93):
        some = rhymerl.history_windows(share)
        rounds = some.drafts / whole.drafts  # of all, those with drafts
        assert rounds * whole.tokens / some.tokens == pytest.approx(share)


def test_updates_take_the_published_share_of_the_work():
    config = SHIPPED["rhymerl_math"]
    # 91 : 9 of the work, on 96 and on 32 devices
    assert rhymerl.train_share(config) == pytest.approx(9 / 91 * 96 / 32)


def test_the_ladder_picks_the_method_that_serves_the_batch():
    experiment = SHIPPED["specactor_dapo"]
    workload = dataclasses.replace(experiment.workload, num_groups=16)
    hardware = dataclasses.replace(specactor.hardware_of(experiment), num_devices=20)
    found, trace = specactor.ranked(hardware, specactor.trace_of(workload, 0))
    # as good as the larger one, and cheaper; n-grams are right too seldom
    assert next(iter(found.drafters)) == "Qwen2.5-0.5B" and found.drafters["ngram"] is None
    means = dict(zip(found.drafters, trace.acceptance_RM.mean(axis=0), strict=True))
    # 256 draws each: five standard errors
    spread, p = 5 * specactor.SPREAD / 16, specactor.acceptance()
    assert means["ngram"] == pytest.approx(0.2, abs=spread)
    assert means["Qwen2.5-0.5B"] == pytest.approx(p, abs=spread)
    # decisions use the acceptance of earlier steps, not that of this one's requests
    assert trace.profiled_M.tolist() == [p, p, 0.2]


def test_acceptance_is_of_drafted_tokens():
    """Of the first draft token p is accepted, of the second p², of the third p³."""
    p = specactor.acceptance()
    assert (p + p**2 + p**3) / 3 == pytest.approx(0.605)


def test_the_plan_of_devices_is_part_of_reconfiguration():
    planned = DevicePlan(1, 4, 5, 0.0)
    found = specactor.strategies(planned)
    assert found["reconfigured"].plan == found["all"].plan == planned
    assert found["decoupled"].plan == DevicePlan(2, 4, specactor.VANILLA_WINDOW, 0.0)


SMALL = {
    "seer_qwen2_vl": {"num_groups": 40, "workers": 2},
    "seer_moonlight": {"num_groups": 24, "workers": 2},
    "rhymerl_math": {"num_groups": 16, "workers": 16, "steps_per_epoch": 2, "epochs": 2},
    "specactor_dapo": {"num_groups": 16},
    "tlt": {},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_experiment_has_all_that_its_rows_need(name, monkeypatch):
    monkeypatch.setattr(specactor, "DEVICES", 20)
    (paper, experiment), changes = EXPERIMENTS[name], dict(SMALL[name])
    num_groups = changes.pop("num_groups", experiment.workload.num_groups)
    workload = dataclasses.replace(experiment.workload, num_groups=num_groups)
    small = dataclasses.replace(experiment, workload=workload, **changes)
    found = PAPERS[paper].play(small, 0)
    for figure in FIGURES[name]:
        value = figure.of(found)
        assert -1 <= value <= 1 if figure.kind == "share" else value > 0, figure

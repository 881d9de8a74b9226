"""The rows of the accelerator benchmark at their tiny size: the same work on both sides."""

import ast
import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import environment, rounds
from benchmarks.accelerator import __main__ as command
from benchmarks.accelerator import gradient, kernels, plan, rollouts, same_bits, training
from benchmarks.accelerator import rounds as accelerator_rounds
from benchmarks.accelerator.budget import FAILED, NOT_RUN, NotRun
from benchmarks.accelerator.sizes import SIZES, accelerator, num_weights
from policies.make import grow
from reprise.models.config import num_params
from reprise.models.formats import hf

TINY = SIZES["tiny"]


class Quiet:
    """A log of a row that nobody writes down."""

    left_s = 1e6

    def __init__(self):
        self.phases = []

    def phase(self, name):
        self.phases.append(name)

    def note(self, **values):
        pass


def rows_of(name, folder=Path(), log=None):
    """The figures of a row, as they are once they have been in the file."""
    of = plan.measures("tiny", folder, sys.executable)[name]
    found = [json.loads(json.dumps(figures)) for figures in of(log or Quiet())]
    assert all(f["repeats"] >= 5 and f["ms"] > 0 for f in found if "ms" in f)
    return found


def test_every_row_of_the_plan_has_a_measure_and_a_test_under_its_name():
    """Some tests are soak tests, so that a row that is renamed would be missed for long."""
    assert set(plan.measures("tiny", Path(), "")) == set(plan.NAMES)
    texts = {
        node.value
        for node in ast.walk(ast.parse(Path(__file__).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert texts >= set(plan.NAMES)


def test_rows_of_most_worth_come_first_and_fit_into_the_budget():
    real, tiny = plan.plan("real"), plan.plan("tiny")
    assert [row.name for row in real] == [row.name for row in tiny] == list(plan.NAMES)
    assert [row.name for row in real[:3]] == [
        *("training: plain", "training: drafts", "rounds: first"),
    ]
    assert sum(row.expected_s for row in real[:4]) < command.BUDGET_S <= 9 * 60
    assert sum(row.expected_s for row in tiny) <= 3 * 60
    flags = [row.flags for row in real]
    assert flags == sorted(flags, key=bool), "rows that share a process come together"
    assert [row.name for row in plan.plan("tiny", ("same bits",))] == ["same bits"]


def test_the_grown_policy_has_the_size_of_a_real_one():
    grown = SIZES["real"].grown
    model = hf.shape(training.POLICY)
    wider = dataclasses.replace(model, head_dim=grown.head_width * model.head_dim)
    larger = grow.grown_config(wider, grown.width, grown.num_layers)
    shape = dataclasses.replace(larger, vocab_size=grown.vocab_size)
    real = SIZES["real"].model
    assert (shape.d_model, shape.num_layers) == (real.d_model, real.num_layers)
    assert shape.head_dim in (64, 128), "heads that a GPU's kernels take"
    for names in (("num_heads", "head_dim"), ("num_kv_heads", "head_dim"), ("d_ff",)):
        sizes = [np.prod([getattr(m, n) for n in names]) for m in (shape, real)]
        assert sizes[0] == sizes[1], names
    assert num_params(shape) == pytest.approx(num_params(real), rel=1e-3)


def test_plain_and_verified_rounds_emit_the_same_tokens():
    log = Quiet()
    for name, live in zip(("rounds: first", "rounds: second"), TINY.live_positions, strict=True):
        plain, *verified = rows_of(name, log=log)
        assert plain["round"] == "plain" and plain["tokens"] == TINY.slots * TINY.node_count
        assert [v["nodes"] for v in verified] == [TINY.slots * n for n in TINY.node_counts]
        assert all(v["tokens"] == v["nodes"] for v in verified), "all drafts are accepted"
        assert not any(v["tokens_that_differ"] for v in verified)
        assert {v["live_positions"] for v in (plain, *verified)} == {live}
    assert {"compile", "warm up", "measure"} <= set(log.phases)


def test_rounds_in_command_buffers_are_those_of_gpus(monkeypatch):
    name = "rounds: loops in command buffers"
    assert dict(zip(plan.NAMES, plan.plan("real"), strict=True))[name].flags == plan.WHILE
    monkeypatch.setattr(accelerator_rounds.jax, "default_backend", lambda: "tpu")
    with pytest.raises(NotRun, match="this is a tpu"):
        rows_of(name)


def test_bits_of_a_row_among_others():
    found = rows_of("same bits")
    by_kind = {kind: [r for r in found if r["of"] == kind] for kind in {r["of"] for r in found}}
    assert {*by_kind} == {"product", "norm", "rotary positions", "log-sum", "pass"}
    assert {r["tiles"] for r in by_kind["product"]} == {"one", "chosen"}
    assert not any(r["logits"] or r["logprobs"] for r in by_kind.pop("pass"))
    assert not any(r["differ"] for of in by_kind.values() for r in of), "a CPU sums in order"


def test_one_tile_is_set_before_the_process_starts():
    script = "from reprise import models; print(models.sums_in_order_on_accelerators())"
    env = os.environ | {"XLA_FLAGS": plan.ONE_TILE}
    run = {"cwd": environment.ROOT, "capture_output": True, "text": True, "check": True}
    assert subprocess.run([sys.executable, "-c", script], env=env, **run).stdout == "True\n"


def test_a_sum_that_depends_on_the_number_of_rows_is_found():
    x = np.ones((64, 8), np.float32)
    planted = partial(same_bits._compiled, lambda x: x * (1.0 + (len(x) == 8)), {})
    rows = list(same_bits._by_rows(planted, [1, 8, 64], 1, {}, x))
    assert [r["differ"] for r in rows] == [0, 64, 0]


@pytest.mark.soak
def test_all_paths_of_attention_compute_the_same():
    found = [*rows_of("kernels: pages"), *rows_of("kernels: rows")]
    assert {r["how"] for r in found} == {"ours", "portable", "xla"}
    assert all(r["difference_to_portable"] < 1e-5 for r in found)
    assert not any(r["kernel"] for r in found), "a CPU has none"


def test_a_difference_is_seen():
    x = np.array([1.0, -4.0, 2.0], np.float32)
    assert kernels.difference([x], [x]) == 0
    assert kernels.difference([x + np.array([0, 0, 0.5])], [x]) == pytest.approx(0.125)
    assert np.isnan(kernels.difference([x * np.nan, x], [x, x]))


@pytest.mark.soak
def test_a_gradient_step_has_one_gradient_whatever_is_kept():
    [layer], [dots] = rows_of("gradient: layer"), rows_of("gradient: dots")
    assert (layer["remat"], dots["remat"]) == gradient.REMATS
    assert layer["gradient_norm"] == pytest.approx(dots["gradient_norm"], rel=1e-4)
    assert layer["gradient_norm"] > 0
    assert layer["tokens"] == dots["tokens"] and layer["operations"] == dots["operations"]


def test_operations_of_a_step_by_hand():
    # two rows of 64: a prompt of 4, three of which are shared, and four responses of 15
    made = gradient.random_responses(TINY)
    assert {(len(t.prompt_ids), t.num_tokens) for t in made} == {(4, 15)} and len(made) == 8
    head = 64 * 32
    layer = 32 * 16 * (2 + 1 + 1) + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32 + 2 * 16
    assert num_weights(TINY.model) == head + layer + 32
    pairs = 2 * (6 + 4 * (15 * 3 + 15 * 16 / 2))
    positions = 2 * (3 + 4 * 15)
    expected = 6 * ((layer + 32) * positions + head * 2 * 4 * 15) + 12 * 1 * 2 * 16 * pairs
    assert gradient.operations(TINY, 4, 15) == (positions, expected)


def test_devices_are_found_by_their_name():
    kinds = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "TPU v5p", "cpu"
    names = [(device := accelerator(kind)) and device.name for kind in kinds]
    assert names == ["H100", "H200", "TPU v5p", None]


def test_the_real_size_is_refused_without_an_accelerator():
    command.refuse_cpu("tiny")
    with pytest.raises(ValueError, match=r"got cpu; fix: "):
        command.refuse_cpu("real")


def test_pages_are_filled_in_place():
    bench = accelerator_rounds.paged_rounds(TINY, 16)
    cache = bench.engine.full_cache(TINY.slots)
    filled = accelerator_rounds.filled(cache)
    assert all(x.is_deleted() for x in (*cache.keys, *cache.values)), "no room for them twice"
    assert float(abs(filled.keys[0]).max()) > 0


def test_slots_are_made_outside_of_the_seconds_of_a_round(monkeypatch):
    bench = accelerator_rounds.paged_rounds(TINY, 16)
    clock = iter(range(100))
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: next(clock))
    busy = rounds.busy  # takes a second
    monkeypatch.setattr(rounds, "busy", lambda *sizes: next(clock) >= 0 and busy(*sizes))
    assert bench.seconds(bench.plain) == 1.0


def test_responses_of_drafts_are_compared_token_by_token(tmp_path):
    steps = training.Steps(TINY, tmp_path)
    plain = {1: np.array([5, 6, 7]), 2: np.array([5, 6])}
    assert steps._compared("drafts", 1, plain)["tokens_compared"] == 0
    assert steps._compared("plain", 1, plain) == {"tokens": 5}
    same = steps._compared("drafts", 1, {i: x.copy() for i, x in plain.items()})
    assert (same["responses_that_differ"], same["tokens_from_a_difference"]) == (0, 0)
    other = steps._compared("drafts", 1, plain | {1: np.array([5, 9, 7, 7])})
    assert (other["responses_that_differ"], other["tokens_from_a_difference"]) == (1, 3)
    assert other["tokens_compared"] == 6


@pytest.mark.soak
def test_rollouts_beside_another_sampler_with_our_engine_in_its_place(monkeypatch, tmp_path):
    """Needs no torch: the other process answers with the same tokens at temperature 0."""
    ours = partial(rollouts.System, "reprise", sys.executable)
    monkeypatch.setattr(rollouts, "System", lambda name, python, *given: ours(*given))
    monkeypatch.setitem(rollouts.VARIANTS, "transformers", ("pages",))
    monkeypatch.setattr(rollouts, "_check", lambda package, python, *, on_gpu: None)
    monkeypatch.setattr(rollouts, "REPEATS", 5)
    own, other = rows_of("rollouts: transformers", tmp_path)
    assert own["system"] == "reprise" and own["tokens_per_s"] > 0
    assert other["greedy_agreement"] == 1.0 and other["to_reprise"] > 0
    assert own["shape"]["new_tokens"] == TINY.new_tokens and own["shape"]["vocab"] == 128


@pytest.mark.parametrize("name", ["rollouts: transformers", "rollouts: vllm"])
def test_rollouts_beside_a_package_that_is_missing_are_not_run(tmp_path, name):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Traceback >&2\necho ModuleNotFoundError: $2 >&2\nexit 1\n")
    python.chmod(0o755)
    package = name.partition(": ")[2]
    with pytest.raises(NotRun, match=f"ModuleNotFoundError: import {package}, torch"):
        next(plan.measures("tiny", tmp_path, str(python))[name](Quiet()))


@pytest.mark.soak
@pytest.mark.parametrize("fails", [TINY.baseline, "ours", "portable"])
def test_attention_that_fails_as_it_runs_costs_its_own_row(monkeypatch, fails):
    compiled = kernels.compiled

    def planted(attend, inputs, how):
        if how != fails:
            return compiled(attend, inputs, how)

        def step(*inputs):
            raise RuntimeError("planted\nand more")

        return False, step

    monkeypatch.setattr(kernels, "compiled", planted)
    first, *rest = (row for row in kernels.of_rows(TINY, Quiet()) if not row["backward"])
    assert (first["how"], first["not_run"]) == (fails, "RuntimeError: planted")
    hows = ("ours", "portable", TINY.baseline)
    assert [r["how"] for r in rest] == [how for how in hows if how != fails]
    assert all(r["ms"] > 0 for r in rest)


@pytest.mark.soak
def test_the_command_rehearses_all_rows_and_the_second_call_starts_warm(tmp_path):
    """The whole command on this CPU, training with and without drafts included."""
    output = tmp_path / "cpu.json"
    flags = "--size", "tiny", "--budget_s", "1200", "--output", str(output)
    run = [sys.executable, "-m", "benchmarks.accelerator", *flags]
    env = {k: x for k, x in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(run, cwd=environment.ROOT, capture_output=True, text=True, env=env)
    result = json.loads(output.read_text())
    assert done.returncode == 0, result
    assert {"command", "commit", "device", "versions", "date", "seconds"} <= set(result)
    assert result["command"].endswith("--size tiny --budget_s 1200 --output OUTPUT")
    by_name = {entry["row"]: entry for entry in result["rows"]}
    ended = {name: entry["status"] for name, entry in by_name.items()}
    assert set(ended) == set(plan.NAMES) and FAILED not in ended.values()
    without = {"rollouts: vllm", "rollouts: transformers"}
    assert {name for name, status in ended.items() if status == NOT_RUN} <= without
    plain, drafts = (by_name[f"training: {kind}"]["figures"] for kind in ("plain", "drafts"))
    assert [f["step"] for f in plain] == [f["step"] for f in drafts] == [1, 2]
    assert all(f["rollout_s"] > 0 and f["update_s"] > 0 for f in (*plain, *drafts))
    assert all(f["tokens_compared"] == f["tokens"] for f in drafts)
    assert not any(f["responses_that_differ"] for f in drafts), "a CPU draws the same tokens"
    assert drafts[1]["tokens_per_round"] > 1 and "tokens_per_round" not in plain[1]
    kept = output.parent / command.KEPT
    programs = len(list((kept / "programs").iterdir()))
    again = subprocess.run(
        [*run, "--rows", "rounds: first"], cwd=environment.ROOT, env=env, capture_output=True
    )
    [entry] = json.loads(output.read_text())["rows"]
    assert again.returncode == 0 and entry["status"] == "done"
    assert len(list((kept / "programs").iterdir())) == programs, "nothing compiles again"

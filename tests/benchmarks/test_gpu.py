"""The GPU benchmark at its tiny size: the same work on both sides, and what it refuses or cuts."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import rounds
from benchmarks.environment import ROOT
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import grpo, parts, same_bits
from benchmarks.gpu.parts import SIZES, accelerator, num_weights

TINY = SIZES["tiny"]


def rows_of(part):
    """The rows, as they are once they have been through the pipe of their process."""
    rows = [json.loads(json.dumps(row)) for row in parts.PARTS[part](TINY)]
    assert all(row["repeats"] >= 5 and row["ms"] > 0 for row in rows if "ms" in row)
    return rows


def command(*flags, **settings):
    run = [sys.executable, "-m", "benchmarks.gpu", *flags]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120, **settings)


def test_each_part_has_a_test_under_its_name():
    """Most of them are soak tests, so that a part that is renamed would be missed for long."""
    source = Path(__file__).read_text()
    named = set(re.findall(r'(?:rows_of|run_part)\("(\w+)"', source))
    for flags in re.findall(r'"--parts"((?:, "\w+")+)', source):
        named |= set(re.findall(r"\w+", flags))
    assert named | {"grpo"} == set(parts.PARTS), "whose figures have a test"


def test_plain_and_verified_rounds_emit_the_same_tokens():
    rows = rows_of("rounds")
    assert [(r["round"], r["live_positions"]) for r in rows] == [
        (name, live) for live in TINY.live_positions for name in ("plain", "verify")
    ]
    for plain, verify in zip(rows[::2], rows[1::2], strict=True):
        assert plain["tokens"] == verify["tokens"] == TINY.slots * TINY.node_count
        assert verify["tokens_that_differ"] == 0
        assert verify["nodes"] == TINY.node_count * plain["nodes"]


def test_bits_of_a_row_among_others(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which the part adds to
    rows = rows_of("same_bits")
    by_kind = {kind: [r for r in rows if r["of"] == kind] for kind in {r["of"] for r in rows}}
    assert {*by_kind} == {"product", "norm", "rotary positions", "log-sum", "pass"}
    assert {r["tiles"] for r in by_kind["product"]} == {"one", "chosen"}
    assert not any(r["logits"] or r["logprobs"] for r in by_kind.pop("pass"))
    assert not any(r["differ"] for of in by_kind.values() for r in of), "a CPU sums in order"


def test_a_sum_that_depends_on_the_number_of_rows_is_found():
    x = np.ones((64, 8), np.float32)
    planted = partial(same_bits._compiled, lambda x: x * (1.0 + (len(x) == 8)), {})
    rows = list(same_bits._by_rows(planted, [1, 8, 64], 1, {}, x))
    assert [r["differ"] for r in rows] == [0, 64, 0]


@pytest.mark.soak
def test_all_paths_of_attention_compute_the_same():
    rows = rows_of("kernels")
    assert {r["how"] for r in rows} == {"ours", "portable", "xla"}
    assert {r["attention"] for r in rows} == {"pages", "rows"}
    assert all(r["difference_to_portable"] < 1e-5 for r in rows)
    assert not any(r["kernel"] for r in rows), "a CPU has none"


def test_steps_without_drafts_have_no_rate():
    drafting = {"time/rollout": 2.0, "reward": 0.5, "spec/accept_rate": 0.25}
    rows = [drafting, {"time/rollout": 4.0, "reward": 1.0}]
    wanted = {"steps": 2, "rollout_s": 3.0, "reward": 0.75, "accept_rate": 0.25}
    assert grpo.figures(rows) == grpo.figures(rows[::-1]) == wanted


def test_a_difference_is_seen():
    x = np.array([1.0, -4.0, 2.0], np.float32)
    assert parts.difference([x], [x]) == 0
    assert parts.difference([x + np.array([0, 0, 0.5])], [x]) == pytest.approx(0.125)
    assert np.isnan(parts.difference([x * np.nan, x], [x, x]))


@pytest.mark.soak
def test_speculative_rollouts_have_the_tokens_of_plain_ones_and_are_called_synthetic():
    [row] = rows_of("rollouts")
    assert row["tokens_compared"] == 2 * TINY.repeats * row["tokens"] > 0
    assert row["differing_tokens"] == 0
    assert row["synthetic"] is True and row["acceptance"] == parts.ACCEPTANCE


def test_a_gradient_step_has_one_gradient_whatever_is_kept():
    layer, dots = rows_of("training")
    assert layer["gradient_norm"] == pytest.approx(dots["gradient_norm"], rel=1e-4)
    assert layer["gradient_norm"] > 0
    assert layer["tokens"] == dots["tokens"] and layer["operations"] == dots["operations"]


def test_operations_of_a_step_by_hand():
    # two rows of 64: a prompt of 4, three of which are shared, and four responses of 15
    made = parts.random_responses(TINY)
    assert {(len(t.prompt_ids), t.num_tokens) for t in made} == {(4, 15)} and len(made) == 8
    head = 64 * 32
    layer = 32 * 16 * (2 + 1 + 1) + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32 + 2 * 16
    assert num_weights(TINY.model) == head + layer + 32
    pairs = 2 * (6 + 4 * (15 * 3 + 15 * 16 / 2))
    positions = 2 * (3 + 4 * 15)
    expected = 6 * ((layer + 32) * positions + head * 2 * 4 * 15) + 12 * 1 * 2 * 16 * pairs
    assert parts.operations(TINY, 4, 15) == (positions, expected)


def test_the_parts_leave_the_device_to_their_runs():
    opened = "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    script = f"import benchmarks.gpu.parts; {opened}"
    run = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
    assert subprocess.run([sys.executable, "-c", script], **run).stdout.split() == ["False"]


def test_devices_are_found_by_their_name():
    found = {kind: accelerator(kind) for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "cpu")}
    names = [device and device.name for device in found.values()]
    assert names == ["H100", "H200", None]


def test_all_parts_end_within_nine_minutes_and_whole_runs_within_four_more():
    of_runs_s = gpu.DEADLINES_S["grpo"]
    others_s = sum(gpu.DEADLINES_S.values()) - of_runs_s
    assert others_s <= 9 * 60 - 20, "20 s to start and to write"
    assert of_runs_s <= 4 * 60
    assert set(gpu.DEADLINES_S) == set(parts.PARTS)


def test_the_real_size_is_refused_without_a_gpu(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert gpu.refusal("tiny") is None
    assert "got cpu; fix: " in gpu.refusal("real")


@pytest.mark.soak
def test_the_command_writes_the_rows_of_a_part_and_says_what_was_cut(tmp_path):
    output = tmp_path / "gpu.json"
    flags = "--size", "tiny", "--output", str(output), "--json"
    done = command("--parts", "training", *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result == json.loads(done.stdout)
    assert {"command", "commit", "device", "versions", "date"} <= set(result)
    part = result["parts"]["training"]
    assert part["status"] == "done" and [r["remat"] for r in part["rows"]] == ["layer", "dots"]
    cut = command("--parts", "training", "rounds", "--deadline_s", "0.01", *flags)
    assert cut.returncode == 1
    parts = json.loads(output.read_text())["parts"]
    assert [(p["status"], p["why"]) for p in parts.values()] == [
        ("cut", "not done within 0.01 s")
    ] * 2


def test_rows_that_came_before_a_failure_are_kept(monkeypatch):
    script = "import sys; print('{\"a\": 1}'); print('{\"b\"', end=''); raise KeyError('planted')"
    python = sys.executable
    popen = subprocess.Popen
    planted = lambda command, **rest: popen([python, "-c", script], **rest)  # noqa: E731
    monkeypatch.setattr(gpu.subprocess, "Popen", planted)
    saved = []
    found = gpu.run_part("rounds", "tiny", 60, lambda found: saved.append(dict(found)))
    assert (found["status"], found["why"]) == ("failed", "KeyError: 'planted'")
    assert found["rows"] == [{"a": 1}]
    assert [one["status"] for one in saved] == ["running"], "before the process has ended"


def test_pages_are_filled_in_place():
    bench, *_ = parts.paged_rounds(TINY, 16)
    cache = bench.engine.full_cache(TINY.slots)
    filled = parts.filled(cache)
    assert all(x.is_deleted() for x in (*cache.keys, *cache.values)), "no room for them twice"
    assert float(abs(filled.keys[0]).max()) > 0


def test_rows_stay_if_the_command_is_ended(monkeypatch, tmp_path):
    output = tmp_path / "gpu.json"

    def run_part(part, size, deadline_s, save):
        if part == "kernels":
            save({"status": "running", "rows": [{"ms": 2.0}]})
            raise KeyboardInterrupt
        return {"status": "done", "rows": [{"ms": 1.0}]}

    monkeypatch.setattr(gpu, "run_part", run_part)
    flags = ["--parts", "rounds", "kernels", "--size", "tiny", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["gpu", *flags])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    result = json.loads(output.read_text())
    ends = [(name, p["status"], p["rows"]) for name, p in result["parts"].items()]
    assert ends == [("rounds", "done", [{"ms": 1.0}]), ("kernels", "running", [{"ms": 2.0}])]
    assert result["commit"] is not None


def test_slots_are_made_outside_of_the_seconds_of_a_round(monkeypatch):
    bench, _, nodes_5M = parts.paged_rounds(TINY, 16)
    clock = iter(range(100))
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: next(clock))
    busy = rounds.busy  # takes a second
    monkeypatch.setattr(rounds, "busy", lambda *sizes: next(clock) >= 0 and busy(*sizes))
    verify = partial(bench.verify, nodes_5M=nodes_5M)
    assert bench.seconds(bench.plain) == bench.seconds(verify) == 1.0


@pytest.mark.soak
@pytest.mark.parametrize("fails", [TINY.baseline, "ours", "portable"])
def test_attention_that_fails_as_it_runs_costs_its_own_row(monkeypatch, fails):
    compiled = parts.compiled

    def planted(attend, inputs, how):
        if how != fails:
            return compiled(attend, inputs, how)

        def step(*inputs):
            raise RuntimeError("planted\nand more")

        return False, step

    monkeypatch.setattr(parts, "compiled", planted)
    rows = (row for row in parts.kernels(TINY) if row["attention"] == "rows")
    first, *rest = (row for row in rows if not row["backward"])
    assert (first["how"], first["not_run"]) == (fails, "RuntimeError: planted")
    hows = ("ours", "portable", TINY.baseline)
    assert [r["how"] for r in rest] == [how for how in hows if how != fails]
    assert all(r["ms"] > 0 for r in rest)

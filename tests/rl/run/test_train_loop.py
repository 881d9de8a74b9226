"""The training loop in this process: the same bits however it is stopped."""

from __future__ import annotations

import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import (
    assert_resumes_to_the_bit,
    assert_same_bits,
    assert_same_run,
    finish,
    stop_after,
)
from run_settings import DRAFTS, PIPELINE, SLOTS, WORKERS

from reprise.rl.assembly.system import System
from reprise.rl.checkpoint.reader import NoWholeCheckpointError
from reprise.rl.gin.loader import load
from reprise.rl.metrics.writer import read_metrics, read_samples
from reprise.rl.placement.meshes import run_mesh
from reprise.rl.records.packing import Shape
from reprise.rl.records.trajectory import NonFiniteLogits
from reprise.rl.run import loop
from reprise.rl.runtime import devices
from reprise.rl.runtime.signals import Stopped
from reprise.rl.settings.config import TrainConfig
from reprise.rl.steps.learning_checks import NotLearning
from tests.support import tiny_run

STEPS = 3
AHEAD = (*WORKERS, "Sched.mode='ahead'")


@pytest.fixture(scope="module")
def never_stopped(tiny, tmp_path_factory):
    return finish(tiny, tmp_path_factory.mktemp("runs") / "never_stopped")


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    """Five steps without draft tokens and without reuse: an epoch is three."""
    return finish(tiny, tmp_path_factory.mktemp("plain"), "Run.steps=5")


def test_another_seed_gives_others(tiny, never_stopped, tmp_path):
    assert finish(tiny, tmp_path / "other", "Run.seed=1").samples != never_stopped.samples


def test_the_rows_of_a_run(never_stopped):
    rows = never_stopped.rows
    assert [row["step"] for row in rows] == [1, 2, 3]
    tokens = [row["completions/mean_length"] * row["completions/count"] for row in rows]
    assert [row["num_tokens"] for row in rows] == np.cumsum(tokens).tolist()
    samples = [json.loads(line) for line in never_stopped.samples.splitlines()]
    for row in rows:
        rewards = [s["reward"] for s in samples if s["step"] == row["step"]]
        assert len(rewards) == 8
        assert row["reward"] == pytest.approx(np.mean(rewards))
    # emission against the trainer's scoring, before the parameters moved
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4


@pytest.mark.parametrize("fetches", [1, 3])
def test_stopped_anywhere_and_resumed_gives_the_same_bits(tiny, never_stopped, tmp_path, fetches):
    show = tiny_run.Recorder()
    with pytest.raises(Stopped):
        tiny_run.train(
            tiny,
            tmp_path,
            "Checkpoint.every_steps=0",  # so that the stop has to save
            show=show,
            should_stop=lambda: show.fetches >= fetches,
        )
    assert len(show.rows) == (fetches - 1) // 2  # two fetches a step
    resumed = finish(tiny, tmp_path, "Checkpoint.every_steps=0")
    assert_same_bits(resumed, never_stopped)
    if show.rows:
        assert f"resuming after step {len(show.rows)}" in resumed.show.messages


def test_prompts_that_are_too_long_are_passed_over_as_they_come(tiny, tmp_path):
    """2 of 6; stopped and resumed, the cursor knows of those that were."""
    stream = ("Task.stream_above_examples=0", "Rollout.max_prompt_tokens=4")
    whole = finish(tiny, tmp_path / "whole", *stream)
    asked = [json.loads(line) for line in whole.samples.splitlines()]
    prompts = [asked[i]["prompt"] for i in range(0, len(asked), 4)]
    assert len(prompts) == 6 and set(prompts) == {"1+1=", "2+3=", "7=", "0+8="}
    assert 2 <= sum(row["rollout/left_out_prompts"] for row in whole.rows) <= 4
    show = tiny_run.Recorder()
    with pytest.raises(Stopped):
        tiny_run.train(
            tiny, tmp_path / "parts", *stream, show=show, should_stop=lambda: len(show.rows) == 2
        )
    resumed = finish(tiny, tmp_path / "parts", *stream)
    assert_same_bits(resumed, whole)
    assert not any("the data is not" in text for text in resumed.show.messages)


def test_data_that_changed_is_told_of_when_a_run_resumes(tiny, never_stopped, tmp_path):
    shutil.copytree(never_stopped.folder, tmp_path / "run")
    lines = (tiny.parent / "task.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "fewer.jsonl").write_text("".join(lines[:-1]))
    more = (f"Task.specs=('jsonl:{tmp_path / 'fewer.jsonl'}',)", "Run.steps=4")
    said = finish(tiny, tmp_path / "run", *more).show.messages
    assert any("the data is not that of step 3 (6 examples then, 5 now)" in text for text in said)
    assert not any("the prompts have other tokens" in text for text in said)
    more = (more[0], "Task.prompt_suffix='0'", "Run.steps=5")
    said = finish(tiny, tmp_path / "run", *more).show.messages
    assert any("the prompts have other tokens than up to step 4: the policy's" in x for x in said)


def test_parts_of_a_time_limit_give_the_same_bits(tiny, never_stopped, tmp_path):
    limit = "Run.time_limit_s=0.001", "Checkpoint.every_steps=0"  # one step each
    for part in (1, 2):
        show = tiny_run.Recorder()
        with pytest.raises(Stopped):
            tiny_run.train(tiny, tmp_path, *limit, show=show)
        assert [row["step"] for row in show.rows] == [part]
        assert "stopping: Run.time_limit_s=0.001 leaves no time for a step" in show.messages
    assert_same_bits(finish(tiny, tmp_path, *limit), never_stopped)


# --- speculation ------------------------------------------------------------------------

# 4 nodes, and a second epoch (there are few prompts), so that history is drafted from
DRAFTED = (*DRAFTS, "Run.steps=5")


@pytest.fixture(scope="module")
def with_drafts(tiny, tmp_path_factory):
    return finish(tiny, tmp_path_factory.mktemp("drafts"), *DRAFTED)


def test_speculation_changes_no_reward_and_no_token(plain, with_drafts):
    assert_same_run(plain, with_drafts)
    accepted = [row.get("spec/history/speculated_fraction", 0.0) for row in with_drafts.rows]
    assert accepted[0] == 0.0 and max(accepted) > 0.0
    assert with_drafts.rows[-1]["spec/history_bytes"] > 0


def test_stopped_and_resumed_with_drafts_gives_the_same_bits(tiny, with_drafts, tmp_path):
    """The history is in the checkpoint: the same draft tokens, so the same passes, so the same
    bits.
    """
    stop_after(tiny, tmp_path, 4, *DRAFTED)
    resumed = finish(tiny, tmp_path, *DRAFTED)
    assert "resuming after step 4" in resumed.show.messages
    assert_same_bits(resumed, with_drafts)


# --- reuse ------------------------------------------------------------------------------


def reusing(mode, *more, steps=5):
    """An epoch is three steps."""
    return (f"Reuse.mode='{mode}'", f"Run.steps={steps}", *more)


def reused(done):
    return [row["spec/reused_fraction"] for row in done.rows]


def test_lenience_zero_trains_as_without_reuse(tiny, plain, tmp_path):
    zero = finish(tiny, tmp_path, *reusing("lenient:0"))
    assert_same_run(plain, zero)
    assert sum(reused(zero)) == 0 < sum(row["spec/cached_responses"] for row in zero.rows)


@pytest.mark.parametrize(
    "settings",
    [
        reusing("delayed:e^1", "Reuse.schedule='linear:1:4'", steps=8),
        reusing("lenient:1", "Reuse.schedule='clip_fraction:0.1'", "Trainer.minibatches=2"),
        reusing("full", "Rollout.cache_bytes=1"),
    ],
    ids=lambda s: s[0].partition("'")[2].strip("'"),
)
def test_reuse_stopped_and_resumed_gives_the_same_bits(tiny, tmp_path, settings):
    whole = finish(tiny, tmp_path / "whole", *settings)
    assert reused(whole)[0] == 0 < max(reused(whole)[1:])
    assert_resumes_to_the_bit(tiny, tmp_path, settings, whole)


def test_full_reuse_generates_nothing_anew(tiny, tmp_path):
    repeats = ("Reuse.fresh_share=0.0", "Reuse.renew_groups=False")
    done = finish(tiny, tmp_path, *reusing("full", *repeats))
    seen: dict[str, list[str]] = {}
    for line in done.samples.splitlines():
        row = json.loads(line)
        seen.setdefault((row["example_id"], row["sample_index"]), []).append(row["completion"])
    assert max(map(len, seen.values())) > 1
    assert all(len(set(texts)) == 1 for texts in seen.values())


def test_what_cannot_be_reused_is_said_and_generated_afresh(tiny, tmp_path):
    tiny_run.train(tiny, tmp_path, *reusing("full", "Run.steps=2"))
    changed = finish(tiny, tmp_path, *reusing("full", "Rollout.group_size=2"))
    warnings = [m for m in changed.show.messages if m.startswith("warning")]
    assert warnings and "4 cached responses where 2 are asked for" in warnings[0]
    longer = finish(tiny, tmp_path, *reusing("full", "Run.steps=6", "Task.prompt_suffix='1'"))
    assert any("its cached prompt is another one" in m for m in longer.show.messages)
    assert reused(longer)[-1] == 0


def test_goodput_keeps_its_table_in_the_run_folder(tiny, never_stopped, tmp_path):
    drafts = ("Speculation.budget='goodput'", "Engine.max_nodes=2", "Run.steps=1")
    finish(tiny, tmp_path, *drafts)
    table = tmp_path / "round_times.json"
    kept = table.read_bytes()
    rows = json.loads(kept)["rows"]
    names = "packed round", "packed round of short rows"
    assert {tuple(row[:3]) for row in rows} == {(name, 8, M) for name in names for M in (8, 16)}
    assert all(seconds > 0 for *_, seconds in rows)
    first = (tmp_path / "step_seconds.jsonl").read_text()
    assert json.loads(first)["step"] == 1 and json.loads(first)["rounds"]
    finish(tiny, tmp_path, *drafts, "Run.steps=2")
    assert table.read_bytes() == kept
    lines = (tmp_path / "step_seconds.jsonl").read_text()
    assert lines.startswith(first) and [json.loads(x)["step"] for x in lines.splitlines()] == [1, 2]


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(
    tiny, never_stopped, tmp_path
):
    tiny_run.train(tiny, tmp_path)
    newest = tmp_path / "checkpoints" / f"step_{STEPS:08d}"
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.write_bytes(raw)
    resumed = finish(tiny, tmp_path)
    (warning,) = [m for m in resumed.show.messages if m.startswith("warning")]
    assert str(victim) in warning
    assert f"resuming after step {STEPS - 1}" in resumed.show.messages
    assert_same_bits(resumed, never_stopped)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_afresh(tiny, tmp_path):
    tiny_run.train(tiny, tmp_path, "Run.steps=1")
    for manifest in (tmp_path / "checkpoints").rglob("manifest.json"):
        manifest.unlink()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(NoWholeCheckpointError, match="expected a whole checkpoint"):
        tiny_run.train(tiny, tmp_path, "Run.steps=1")
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


# --- rewards that fail ------------------------------------------------------------------


def with_reward(tiny, name, *more):
    return (
        tiny_run.rewarded(tiny, name),
        "Run.steps=1",
        "Run.seed=4",
        "Reward.max_failed_share=1.0",
        *more,
    )


@pytest.mark.parametrize(
    ("function", "policy"), [("raises", "zero"), ("nan", "skip"), ("two", "zero")]
)
def test_a_reward_that_fails_costs_what_the_policy_says(tiny, tmp_path, function, policy):
    done = finish(tiny, tmp_path, *with_reward(tiny, function, f"Reward.on_failure='{policy}'"))
    (row,) = done.rows
    samples = read_samples(tmp_path)
    failed = [s["completion"][:1] in "01234" for s in samples]
    assert 0 < sum(failed) < 8, "the seed must give both kinds"
    assert row["rewards/failures"] == sum(failed)
    # the others are all paid 1: a 0 would be their only difference
    assert (row["batch/samples"], row["batch/left_out"]) == (8 - sum(failed), sum(failed))
    assert row["batch/optimizer_steps"] == 0 and not any(s["advantage"] for s in samples)
    wanted = 0.0 if policy == "zero" else None
    assert [s["reward"] for s in samples] == [wanted if f else 1.0 for f in failed]
    reasons = [s["reward_failure"] for s in samples]
    assert [r is not None and r.startswith(f"{function}/") for r in reasons] == failed
    assert any(f"{sum(failed)} of 8 samples: {function}/" in text for text in done.show.messages)


def test_a_step_whose_rewards_fail_ends_the_run_and_the_step_before_is_saved(tiny, tmp_path):
    """The judge goes away after step 1."""
    plugin = tmp_path / "judge.py"
    plugin.write_text(
        "from pathlib import Path\n"
        f"CALLS = Path({str(tmp_path / 'calls')!r})\n"
        "def judge(completions, **columns):\n"
        "    with CALLS.open('a') as file:\n        file.write('.')\n"
        "    if CALLS.stat().st_size > 8:\n        raise KeyError('no judge')\n"
        "    return [float(len(completions[0]))]\n"
    )
    settings = f"Reward.functions=('{plugin}:judge',)", "Checkpoint.every_steps=0"
    with pytest.raises(NotLearning, match="step 2: 8 of 8 samples: judge/raised: Key"):
        finish(tiny, tmp_path / "run", *settings)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1]
    assert (tmp_path / "run" / "checkpoints" / "step_00000001").is_dir()


@pytest.mark.parametrize(
    ("settings", "step"),
    [((), 2), ((*DRAFTS, "Reuse.mode='coupled'"), 2), (WORKERS, 2), (AHEAD, 2), (PIPELINE, 3)],
    ids=["one engine", "drafts and reuse", "workers", "ahead", "pipeline"],
)
def test_logits_that_are_not_finite_end_the_run_with_the_step_before_saved(
    tiny, tmp_path, monkeypatch, settings, step
):
    """Later weights are finite and their logits overflow: no response is trained on."""
    weights, first = System.weights, []

    def overflowing(system, trained):
        params = weights(system, trained)
        first.append(np.array(params.embedding_VD))
        if np.array_equal(first[0], first[-1]):
            return params
        norm_D = jnp.full_like(params.final_norm_D, 3e38)
        return dataclasses.replace(params, final_norm_D=norm_D)

    monkeypatch.setattr(System, "weights", overflowing)
    message = rf"^step {step}: request \d+ .group \d+, sample \d.*after \d tokens.*not finite"
    with pytest.raises(NonFiniteLogits, match=message):
        finish(tiny, tmp_path, *SLOTS, *settings, "Checkpoint.every_steps=0")
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, step))
    assert (tmp_path / "checkpoints" / f"step_{step - 1:08}").is_dir()


def test_a_run_that_learns_nothing_ends_with_its_last_step_saved(tiny, tmp_path):
    limits = "Run.no_update_limit_steps=4", "Run.steps=6"
    settings = tiny_run.rewarded(tiny, "none"), "Checkpoint.every_steps=0", *limits
    show = tiny_run.Recorder()
    with pytest.raises(NotLearning, match="step 4: 4 steps in a row .*no response has a reward"):
        tiny_run.train(tiny, tmp_path, *settings, show=show)
    assert any("3 steps in a row have taught" in text for text in show.messages)
    assert (tmp_path / "checkpoints" / "step_00000004").is_dir()


def test_a_reward_that_does_not_apply_is_no_failure(tiny, tmp_path):
    done = finish(tiny, tmp_path, *with_reward(tiny, "none"))
    (row,) = done.rows
    assert (row["rewards/failures"], row["batch/samples"]) == (0, 0)
    assert row["update/without_gradient"] == 1
    assert any("no step has taught the policy anything: no resp" in t for t in done.show.messages)


def test_a_reward_that_ends_its_worker_costs_its_own_sample_alone(tiny, tmp_path):
    done = finish(tiny, tmp_path, *with_reward(tiny, "dies", "Reward.on_failure='zero'"))
    samples = read_samples(tmp_path)
    ended = [s["completion"][:1] in "01234" for s in samples]
    assert 0 < sum(ended) < 8, "the seed must give both kinds"
    assert [s["reward"] for s in samples] == [0.0 if e else 1.0 for e in ended]
    assert done.rows[0]["rewards/failures"] == sum(ended)
    assert ["dies/died:" in (s["reward_failure"] or "") for s in samples] == ended


# --- devices --------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"tensor": 3}, {"data": 2}])
def test_mesh_sizes_hold_on_one_device_as_on_four(tiny, sizes, monkeypatch):
    settings = [f"Mesh.{axis}={size}" for axis, size in sizes.items()]
    config = load(TrainConfig, [tiny], ["Mesh.data=-1", *settings, "Sched.devices_per_worker=1"])
    for count in (1, 5):
        monkeypatch.setattr(devices, "found", lambda n=count: jax.devices()[:n])
        with pytest.raises(ValueError, match=f"{count} device.*their product must be {count}"):
            run_mesh(config)


def test_one_device_needs_no_mesh(tiny, monkeypatch):
    monkeypatch.setattr(devices, "found", lambda: jax.devices()[:1])
    for sizes in (["Mesh.data=-1"], ["Mesh.data=1"]):
        assert run_mesh(load(TrainConfig, [tiny], sizes)) is None


@pytest.mark.skipif(jax.device_count() != 8, reason="needs 8 (virtual) devices")
def test_eight_devices_give_the_rewards_of_one(tiny, never_stopped, tmp_path):
    mesh = ("Mesh.data=1", "Mesh.fsdp=4", "Mesh.tensor=2")
    sharded = finish(tiny, tmp_path, *mesh)
    rewards = [
        [json.loads(x)["reward"] for x in r.samples.splitlines()] for r in (sharded, never_stopped)
    ]
    assert rewards[0] == rewards[1]
    for ours, theirs in zip(sharded.rows, never_stopped.rows, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if name == "batch/padding":  # rows come in multiples of the mesh's ways
                continue
            assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


def test_much_padding_is_noted():
    said = []
    show, rows = SimpleNamespace(message=said.append), Shape(4, 64, 64)
    loop._warn_of_padding(rows, {"batch/padding": 0.6}, show)
    loop._warn_of_padding(rows, {"batch/padding": 0.4}, show)
    loop._warn_of_padding(rows, {}, show)  # without an update
    loop._warn_of_padding(Shape(1, 64, 16), {"batch/padding": 0.9}, show)  # it can't be less
    (note,) = said
    assert note.startswith("note: 60% of") and "Trainer.micro_batch_tokens=64 has" in note

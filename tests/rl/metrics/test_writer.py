"""Metrics files: what is written, and that a kill leaves nothing behind after a resume."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from reprise.models import folder
from reprise.rl.metrics import writer as metrics_lib
from reprise.rl.metrics.writer import (
    MetricsConfig,
    MetricsWriter,
    Timings,
    deterministic_view,
    lost_rows,
    read_metrics,
    read_samples,
    step_rows,
)
from reprise.rl.runtime.run_files import EVAL_SAMPLES_FILE


def writer(directory: Path, **options) -> MetricsWriter:
    return MetricsWriter(directory, MetricsConfig(tensorboard=False, **options))


def files(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}


def write_steps(directory: Path, steps: range) -> None:
    with writer(directory) as out:
        for step in steps:
            out.write_samples(step, [{"prompt": f"p{step}", "reward": 0.5}])
            out.write(step, {"reward": step / 4, "num_tokens": step})


def test_a_row_is_one_strict_json_line_and_non_finite_is_null(tmp_path):
    with writer(tmp_path / "run") as out:
        row = out.write(
            3,
            {
                "reward": np.float32(0.5),
                "num_tokens": np.int64(7),
                "kl": float("nan"),
                "grad_norm": np.array(np.inf),
                "lr": np.array([0.25]),
            },
        )
        # On disk before the writer is closed.
        text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text == (
        '{"step": 3, "reward": 0.5, "num_tokens": 7, "kl": null, "grad_norm": null, "lr": 0.25}\n'
    )
    assert row == {
        "step": 3, "reward": 0.5, "num_tokens": 7, "kl": None, "grad_norm": None, "lr": 0.25
    }  # fmt: skip
    assert read_metrics(tmp_path / "run") == [row]
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [row]


@pytest.mark.parametrize("value", ["1", None, True, np.zeros(2), np.bool_(True), [1]])
def test_only_numbers_are_metrics(tmp_path, value):
    with writer(tmp_path) as out, pytest.raises(TypeError, match="metric kl: expected one number"):
        out.write(0, {"kl": value})
    assert read_samples(tmp_path) == []


def test_samples_are_thinned_evenly_and_cleaned(tmp_path):
    samples = [
        {"prompt": "é\u2028\ud800", "reward": float("nan"), "rewards": {"f": np.float32(i)}, "i": i}
        for i in range(6)
    ]
    with writer(tmp_path, samples_per_step=3) as out:
        out.write_samples(1, samples)
    rows = read_samples(tmp_path)
    assert [row["i"] for row in rows] == [0, 2, 4]
    assert rows[1] == {
        "step": 1, "prompt": "é\u2028\ud800", "reward": None, "rewards": {"f": 2.0}, "i": 2
    }  # fmt: skip


def test_truncating_leaves_what_a_run_stopped_there_would_have_left(tmp_path):
    write_steps(tmp_path / "stopped", range(1, 4))
    write_steps(tmp_path / "killed", range(1, 7))
    with writer(tmp_path / "killed") as out:
        out.truncate_to_step(3)
        assert files(tmp_path / "killed") == files(tmp_path / "stopped")
        out.write(4, {"reward": 1.0, "num_tokens": 4})
    assert [row["step"] for row in read_metrics(tmp_path / "killed")] == [1, 2, 3, 4]


def test_a_row_torn_at_any_byte_is_as_if_never_killed(tmp_path):
    write_steps(tmp_path / "whole", range(1, 3))
    write_steps(tmp_path / "first", range(1, 2))
    expected, first = files(tmp_path / "whole"), files(tmp_path / "first")
    whole, keep = expected["metrics.jsonl"], len(first["metrics.jsonl"])
    run = tmp_path / "torn"
    run.mkdir()
    for cut in range(keep, len(whole) + 1):
        (run / "metrics.jsonl").write_bytes(whole[:cut])
        (run / "samples.jsonl").write_bytes(expected["samples.jsonl"])
        seen = [row["step"] for row in read_metrics(run)]
        assert seen == ([1, 2] if cut >= len(whole) - 1 else [1])  # all but the newline is whole
        with writer(run) as out:
            out.truncate_to_step(1)
            assert files(run) == first
            out.write_samples(2, [{"prompt": "p2", "reward": 0.5}])
            out.write(2, {"reward": 0.5, "num_tokens": 2})
        assert files(run) == expected


def test_samples_of_an_evaluation_without_its_metrics_are_those_of_none(tmp_path):
    with writer(tmp_path) as out:
        out.write(1, {"reward": 0.5})
        for step in (0, 1):
            out.write_samples(step, [{"prompt": "p"}], EVAL_SAMPLES_FILE)
        out.truncate_to_step(1)
        assert read_samples(tmp_path, EVAL_SAMPLES_FILE) == []
        out.write_samples(1, [{"prompt": "p"}], EVAL_SAMPLES_FILE)
        out.amend(1, {"eval_s": 1.0})
        out.truncate_to_step(1)
    assert read_samples(tmp_path, EVAL_SAMPLES_FILE) == [{"step": 1, "prompt": "p"}]


def test_rows_that_a_checkpoint_has_and_the_file_lacks_are_named():
    rows = [{"step": step} for step in (0, 1, 3)]
    assert lost_rows(rows[:2], 1) == ""
    assert "no row of 2 steps" in lost_rows(rows, 4) and ": 2, 4; curves" in lost_rows(rows, 4)
    assert ": 1, 2, 3, 4, 5, 6, 7, 8 and 12 more;" in lost_rows([], 20)


def test_opening_after_a_kill_never_glues_two_rows(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    with writer(tmp_path) as out:
        out.write(2, {"reward": 1})
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2, "reward": 1}]


def test_a_whole_last_row_that_lost_only_its_newline_is_kept_and_ended(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}')
    with writer(tmp_path) as out:
        out.write(3, {})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize("line", [b"{torn\n", b'{"reward": 1}\n', b"[1]\n", b'{"step": 1.5}\n'])
def test_damage_that_is_not_a_torn_end_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b'{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: damaged row"):
        read_metrics(tmp_path)
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: damaged row"):
        writer(tmp_path)


def test_a_line_without_an_end_is_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_lib, "MAX_LINE_BYTES", 20)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + bytes(100))
    with pytest.raises(
        metrics_lib.DamagedRowError, match="metrics.jsonl:2: damaged row .expected less than 20"
    ):
        read_metrics(tmp_path)


def test_kill_between_the_new_file_and_its_name_loses_nothing(tmp_path, monkeypatch):
    write_steps(tmp_path, range(1, 4))
    before = files(tmp_path)
    out = writer(tmp_path)
    monkeypatch.setattr(folder.os, "replace", lambda *_, **__: (_ for _ in ()).throw(OSError))
    with pytest.raises(OSError):
        out.truncate_to_step(1)
    monkeypatch.undo()
    assert {k: v for k, v in files(tmp_path).items() if not k.endswith(".tmp")} == before
    out.truncate_to_step(1)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_kill_dash_nine_loses_no_written_row(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from reprise.rl.metrics.writer import MetricsConfig, MetricsWriter\n"
        "out = MetricsWriter(sys.argv[1], MetricsConfig(tensorboard=False))\n"
        "for step in range(5): out.write(step, {'reward': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(metrics_lib.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=False)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]


def test_deterministic_view_drops_what_the_clock_decides():
    row = {
        "step": 1, "reward": 0.5, "time/rollout": 1.0, "perf/throughput": 2.0, "step_time": 3.0,
        "timely": 1, "performance": 2,
    }  # fmt: skip
    assert deterministic_view(row) == {"step": 1, "reward": 0.5, "timely": 1, "performance": 2}


def test_timings_add_up_by_the_given_clock():
    ticks = iter([0.0, 2.0, 10.0, 13.0, 20.0, 24.0])
    timings = Timings(clock=lambda: next(ticks))
    with timings.section("rollout"):
        pass
    with timings.section("update"):
        pass
    with pytest.raises(KeyError), timings.section("rollout"):
        raise KeyError
    assert timings.seconds() == {"time/rollout": 6.0, "time/update": 3.0}
    after = Timings(clock=iter([0.0, 1.0]).__next__, before=timings)
    with after.section("update"):
        pass
    assert after.seconds() == {"time/rollout": 6.0, "time/update": 4.0}
    assert (after.before_s, after.total_s) == (9.0, 10.0)


# --- elsewhere --------------------------------------------------------------------------


def test_tensorboard_gets_the_finite_scalars_and_resumes_after_the_checkpoint(tmp_path):
    with MetricsWriter(tmp_path) as out:
        out.write(1, {"reward": 0.5, "kl": float("nan")})
        out.write(2, {"reward": 0.75})
        out.truncate_to_step(1)
        out.write(2, {"reward": 0.25})
    events = _events(tmp_path / "tensorboard")
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert scalars == [(1, "reward", 0.5), (2, "reward", 0.75), (2, "reward", 0.25)]
    # A session log of type START at the step from which on older events are void.
    assert [e.step for e in events if e.session_log.status == 1] == [2]


def _events(folder: Path) -> list:
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(folder.iterdir(), key=lambda p: (p.stat().st_mtime_ns, p.name)):
        data, at = path.read_bytes(), 0
        while at < len(data):  # TFRecord: length u64, crc u32, payload, crc u32
            size = int.from_bytes(data[at : at + 8], "little")
            events.append(Event.FromString(data[at + 12 : at + 12 + size]))
            at += 16 + size
    return events


def test_a_missing_package_is_named_with_the_mend(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="pip install wandb.*or set Metrics"):
        MetricsWriter(tmp_path, MetricsConfig(tensorboard=False, wandb_project="p"))


def test_wandb_gets_the_rows_and_keeps_its_run_over_a_resume(tmp_path, monkeypatch):
    logged, ids = [], []
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: (
        ids.append(options["id"])
        or types.SimpleNamespace(
            log=lambda metrics, step: logged.append((step, metrics)), finish=lambda: None
        )
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = MetricsConfig(tensorboard=False, wandb_project="p")
    for step in (1, 2):
        with MetricsWriter(tmp_path, config) as out:
            out.write(step, {"reward": 0.5, "kl": float("inf")})
    assert logged == [(1, {"reward": 0.5}), (2, {"reward": 0.5})]
    assert len(ids) == 2 and ids[0] == ids[1]


def test_the_section_checks_its_values():
    with pytest.raises(ValueError, match="samples_per_step=-2"):
        MetricsConfig(samples_per_step=-2)


def test_an_evaluation_is_added_to_the_row_of_its_step_or_has_one_of_its_own(tmp_path):
    config = MetricsConfig(tensorboard=False, samples_per_step=2)
    with MetricsWriter(tmp_path, config) as out:
        out.amend(0, {"eval/mean_reward": 0.5, "eval_s": 2.0})
        out.write(1, {"reward": 0.25})
        out.amend(1, {"eval/mean_reward": 0.75, "eval_s": 1.0})
        out.write_samples(1, [{"completion": str(i)} for i in range(4)], "eval_samples.jsonl")
        out.write(2, {"reward": 0.5})
    evaluated = {"step": 1, "reward": 0.25, "eval/mean_reward": 0.75}
    rows = read_metrics(tmp_path)
    assert [deterministic_view(row) for row in rows] == [
        {"step": 0, "eval/mean_reward": 0.5},
        evaluated,
        {"step": 2, "reward": 0.5},
    ]
    assert [row["step"] for row in step_rows(rows)] == [1, 2]
    samples = read_samples(tmp_path, "eval_samples.jsonl")
    assert [row["completion"] for row in samples] == ["0", "2"] and read_samples(tmp_path) == []
    with MetricsWriter(tmp_path, config) as out:  # resumed from step 0
        out.truncate_to_step(0)
    assert len(read_metrics(tmp_path)) == 1
    assert read_samples(tmp_path, "eval_samples.jsonl") == []

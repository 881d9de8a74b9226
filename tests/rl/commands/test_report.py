"""The report: what it reads, what it computes, and that the page is safe and whole."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from reprise.rl.commands import report
from reprise.rl.commands.report import pick_samples
from reprise.rl.records.stats import RoundRecord, load_timeline, save_timeline
from reprise.rl.reports import page as report_page
from reprise.rl.reports import plots as report_plots
from reprise.rl.reports import timeline_plot
from reprise.rl.reports.runs import Run, load_runs, run_labels, summary_table
from reprise.rl.runtime.run_files import ROW_FILES, TIMELINE_FILE

PNG = b"\x89PNG\r\n\x1a\n"
NASTY = "<script>alert(1)</script> & \"q\" 'a' \x00\x1b[31m é \ud800 $x_1$"


def make_run(folder: Path, rewards: list[float | None], **extra: list[float]) -> Path:
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for index, reward in enumerate(rewards):
            row = {"step": index + 1, "reward": reward}
            row |= {name: values[index] for name, values in extra.items()}
            file.write(json.dumps(row) + "\n")
    return folder


def run_of(rows: list[dict], label: str = "run") -> Run:
    return Run(label, [{"step": i + 1} | row for i, row in enumerate(rows)], [])


# --- reading and computing --------------------------------------------------------------


def test_runs_are_read_in_order_with_gaps_as_nan(tmp_path):
    folder = make_run(tmp_path / "a", [0.5, None])
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 0, "kl": 0.25}\n{"step": 1, "reward": 0.75}\n{"step": 3, "rew')
    (run,) = load_runs([folder / "metrics.jsonl"])
    assert run.steps.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(run.series("reward"), [np.nan, 0.75, np.nan])
    assert run.has("kl") and not run.has("entropy") and run.samples == []


def test_labels_are_the_shortest_that_tell_runs_apart():
    assert run_labels([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert run_labels([Path("/x/a"), Path("/y/a"), Path("/y/b")]) == ["x/a", "y/a", "y/b"]
    assert run_labels([Path("/x/a"), Path("/x/a")]) == ["a #1", "a #2"]


def test_the_summary_knows_which_end_is_good():
    run = run_of(
        [
            {"reward": 0.25, "step_time": 9.0, "entropy": 1.0, "rewards/exact/mean": 0.5},
            {"reward": 0.75, "step_time": 2.0, "entropy": 3.0, "rewards/exact/mean": 0.25},
            {"reward": None, "step_time": 4.0, "entropy": 2.0},
        ]
    )
    lines = {line["metric"]: line for line in summary_table([run])}
    reward = lines["reward"]
    assert (reward["first"], reward["last"], reward["best"]) == ("0.25", "0.75", "0.75 (step 2)")
    assert lines["step_time"]["best"] == "2 (step 2)"
    entropy = lines["entropy"]
    assert (entropy["best"], entropy["lowest"], entropy["highest"]) == ("", "1", "3")
    assert lines["rewards/exact/mean"]["best"] == "0.5 (step 1)"
    assert list(lines) == ["reward", "rewards/exact/mean", "entropy", "step_time"]


def test_samples_are_spread_and_end_with_the_last():
    samples = [{"step": step} for step in range(10)]
    assert [row["step"] for row in pick_samples(samples, 3)] == [3, 6, 9]
    assert pick_samples(samples, -1) == samples and pick_samples(samples, 0) == []


def test_the_trailing_mean_skips_gaps():
    values = np.array([np.nan, 1.0, 3.0, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(
        report_plots.trailing_mean(values, 3), [np.nan, 1.0, 2.0, 2.0, 3.0, np.nan]
    )


def test_time_no_part_covers_is_other_and_the_compiling_step_is_left_out():
    rows = [{"time/update": 1.0, "time/rollout": 2.0, "step_time": 4.0} for _ in range(4)]
    rows[0] = {"time/update": 30.0, "time/rollout": 60.0, "step_time": 91.0}
    run = run_of(rows)
    assert run.time_sections() == ["time/rollout", "time/update"]
    parts = report_plots.split(run, run.time_sections())
    assert {name: seconds.tolist() for name, seconds in parts.items()} == {
        "rollout": [60, 2, 2, 2],
        "update": [30, 1, 1, 1],
        "other": [1, 1, 1, 1],
    }
    assert report_plots.mean_split(run, run.time_sections()) == {
        "rollout": 2.0, "update": 1.0, "other": 1.0
    }  # fmt: skip
    covered = run_of([{"time/rollout": 2.0, "step_time": 2.001}])
    assert "other" not in report_plots.split(covered, ["time/rollout"])


# --- the command ------------------------------------------------------------------------


class Page(HTMLParser):
    """Start tags with their attributes, and the text outside style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        (self.scripts if self._inside == "script" else self.text).append(data)


def test_one_run_gives_pictures_and_a_page_beside_it(tmp_path, capsys):
    steps = 3
    folder = make_run(
        tmp_path / "run",
        [0.25, 0.5, 0.75],
        **{
            "completions/mean_length": [9.0] * steps,
            "completions/min_length": [1] * steps,
            "completions/max_length": [20] * steps,
            "clip_ratio/region_mean": [0.01] * steps,
            "entropy": [1.0] * steps,
            "perf/throughput": [1e4] * steps,
            "time/rollout": [1.0] * steps,
            "step_time": [2.0] * steps,
        },
    )
    assert report.main([str(folder)]) == 0
    written = capsys.readouterr().out.split()
    names = "index report reward length entropy clip throughput time".split()
    assert [Path(path).stem for path in written] == names
    assert {Path(path).parent for path in written} == {folder / "report"}
    assert all(Path(p).read_bytes().startswith(PNG) for p in written[1:])
    page = Page((folder / "report" / "index.html").read_text(encoding="utf-8"))
    sources = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert len(sources) == 6
    for source, path in zip(sources, written[2:], strict=True):
        assert source == "data:image/png;base64," + _base64(Path(path).read_bytes())
    assert "These runs recorded no samples." in page.text


def test_the_last_rollout_is_drawn_for_one_run_and_for_several(tmp_path):
    folders = [make_run(tmp_path / name, [0.5]) for name in "abc"]
    for folder in folders[:2]:
        save_timeline(folder, 1, [rollout_round(0, 1, [3, 4]), rollout_round(2, 4, [4])])
    for runs in (folders[:1], folders):
        report.write_report(load_runs(runs), tmp_path / "out")
        assert (tmp_path / "out" / "rollout.png").read_bytes().startswith(PNG)
    assert not timeline_plot.RolloutTimeline().shown(load_runs(folders[2:]))


GOOD_ROUND = json.dumps(
    dict.fromkeys(("began_s", "ready_s", "drafted_s", "called_s", "fetched_s", "ended_s"), 1.0)
    | dict.fromkeys(("num_slots", "num_nodes", "num_positions"), 1)
    | dict.fromkeys(
        ("cached_nodes", "prompt_tokens", "cached_in_chunks", "plain_rounds", "pricing_seconds"), 0
    )
    | {"num_compiled": 0}
    | {name: [1] for name in ("request_ids_A", "cached_tokens_A", "rounds_A", "emitted_A")}
)


@pytest.mark.parametrize(
    "content",
    [
        '{"step": 1e999, "rounds": []}',
        '{"step": 1, "rounds": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"step": 1, "rounds": [' + GOOD_ROUND.replace("1.0", "NaN", 1) + "]}",
        '{"step": 1, "rounds": [' + GOOD_ROUND.replace("[1]", "[1, 2]", 1) + "]}",
        '{"step": 1, "rounds": [' + GOOD_ROUND.replace("[1]", f"[{'9' * 400}]", 1) + "]}",
        '{"step": 1, "rounds": [' + GOOD_ROUND.replace("}", ', "more": 1}') + "]}",
    ],
)
def test_a_hostile_timeline_is_one_error(tmp_path, capsys, content):
    folder = make_run(tmp_path / "run", [0.5])
    (folder / "timeline.json").write_text(content)
    assert report.main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert "is not a timeline that a run wrote" in error and error.count("\n") == 1


def test_the_good_round_of_the_hostile_ones_is_read(tmp_path):
    (tmp_path / "timeline.json").write_text(f'{{"step": 1, "rounds": [{GOOD_ROUND}]}}')
    assert len(load_timeline(tmp_path)[1]) == 1


def test_hostile_numbers_and_names_are_left_out_or_taken_literally(tmp_path, capsys):
    name = r"time/$\frac$\u202e"
    values = [10**400, 1.5, -(10**400), 1e300, 2.0]
    rows = [0.5, 10**400, 0.75, 1.0, 0.25]
    folders = [
        make_run(
            tmp_path / run, rows, **{name: values, "step_time": values, "rewards/$^/mean": rows}
        )
        for run in (r"$\frac$", "b")
    ]
    deep = '{"a": ' * 300 + "1" + "}" * 300
    huge = f'{{"step": 1, "reward": {"9" * 400}, "advantage": {"9" * 400}, "deep": {deep}}}\n'
    (folders[0] / "samples.jsonl").write_text(huge + '{"step": 2, "prompt": "a\\u202eb"}\n')
    for runs in (folders[:1], folders):
        output = tmp_path / f"out{len(runs)}"
        assert report.main([*map(str, runs), "--output", str(output)]) == 0
        page = (output / "index.html").read_text(encoding="utf-8")
        assert "more than 1e308" in page and r"a\u202eb" in page and "\u202e" not in page
    assert "\u202e" not in capsys.readouterr().out


@pytest.mark.parametrize("row", ['{"step": 1' + "0" * 400 + "}", '{"step": -1}', "[" * 100_000])
def test_hostile_rows_are_one_error(tmp_path, capsys, row):
    folder = make_run(tmp_path / "run", [0.5])
    (folder / "metrics.jsonl").write_text(row + '\n{"step": 2, "reward": 1.0}\n')
    assert report.main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert "metrics.jsonl:1: damaged row" in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "eval_samples.jsonl"])
def test_a_torn_last_line_is_left_out_and_said(tmp_path, capsys, name):
    folder = make_run(tmp_path / "run", [0.5, 0.25])
    (folder / "samples.jsonl").write_text('{"step": 1}\n')
    with open(folder / name, "a", encoding="utf-8") as file:
        file.write('{"step": 3, "rew')
    assert report.main([str(folder)]) == 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(rf"warning: .*{name}:\d: the last line is", error)


def test_failed_rewards_have_a_plot_and_a_row(tmp_path):
    folder = make_run(tmp_path / "run", [0.0, 0.0], **{"rewards/failures": [128, 64]})
    assert report.main([str(folder)]) == 0
    page = Page((folder / "report" / "index.html").read_text(encoding="utf-8"))
    assert (folder / "report" / "failures.png").exists()
    assert "rewards/failures128" in "".join(page.text) and "64 (step 2)" in page.text


def test_what_drafts_brought_is_said_and_drawn(tmp_path):
    drafts = {"spec/accepted_tokens": [0.0, 50.0], "spec/seconds_saved": [-0.5, 2.5]}
    seconds = {"time/rollout": [4.0, 4.0], "step_time": [5.0, 5.0]}
    drawn = {"rollout/generated_tokens": [100.0, 100.0]}
    folder = make_run(tmp_path / "run", [0.0, 0.5], **drafts, **seconds, **drawn)
    assert report.main([str(folder)]) == 0
    page = Page((folder / "report" / "index.html").read_text(encoding="utf-8"))
    text = "".join(page.text)
    assert (folder / "report" / "spec_saved.png").exists()
    assert "time: 10 s in 2 steps (rollout 80%)" in text
    assert "25% of 200 response tokens were accepted draft tokens; by measured rounds" in text
    assert "spec/seconds_saved" in text and "2.5 (step 2)" in text


def test_every_plot_has_a_caption_of_one_sentence(tmp_path):
    folder = make_run(tmp_path / "run", [0.0, 0.0], entropy=[1.0, 2.0])
    assert report.main([str(folder)]) == 0
    page = (folder / "report" / "index.html").read_text(encoding="utf-8")
    captions = re.findall(r"<figure><img [^>]*><figcaption>([^<]*)</figcaption></figure>", page)
    shown = [report_plots.CAPTIONS[name] for name in ("reward.png", "entropy.png")]
    assert captions == shown and page.count("<img ") == 2
    assert all(text.endswith(".") and ". " not in text for text in report_plots.CAPTIONS.values())


def rollout_round(began_s: float, num_nodes: int, ids: list[int]) -> RoundRecord:
    marks = [began_s + 0.25 * i for i in range(6)]
    heartbeat = np.array(ids)
    emitted_A, one_A = np.full(len(ids), num_nodes), np.ones(len(ids), int)
    return RoundRecord(*marks, 4, 4 * num_nodes, 64, heartbeat, heartbeat, one_A, emitted_A)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_several_runs_are_overlaid_and_nothing_they_wrote_is_markup(tmp_path, capsys):
    rewards = [0.25, 0.5]
    first = make_run(tmp_path / "_a$b$<i>", rewards, **{"time/rollout": [1.0, 2.0]})
    second = make_run(tmp_path / "b", rewards)
    samples = [
        {"step": 1, "prompt": NASTY, "completion": NASTY, "reward": 0.5, "advantage": -1.25,
         "finish_reason": "stop", "rewards": {NASTY: 1.0}, NASTY: [NASTY]},
        {"step": 2, "prompt": "p", "completion": "x" * 30_000, "reward": None, "advantage": None},
    ]  # fmt: skip
    lines = "".join(json.dumps(sample) + "\n" for sample in samples)
    (first / "samples.jsonl").write_text(lines, encoding="utf-8")
    output = tmp_path / "out"
    assert report.main([str(first), str(second), "--output", str(output), "--smooth", "2"]) == 0
    text = (output / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 1 and tags.count("i") == 0 and tags.count("img") == 2
    assert tags.count("details") == 2
    assert any("<script>alert(1)</script> & \"q\" 'a' \u2400\u241b[31m é ?" in t for t in page.text)
    assert any("and 10,000 more characters" in t for t in page.text)
    assert not any(attr.startswith("on") for _, attrs in page.tags for attr in attrs)
    # The page's own policy admits its own script and no other.
    allowed = re.search(r"script-src 'sha256-([^']+)'", text)[1]
    digest = hashlib.sha256("".join(page.scripts).encode()).digest()
    assert allowed == _base64(digest)
    # All of it is inside the file.
    assert not re.search(r"(src|href)=\"(?!data:)", text)


def evaluated(folder: Path, *rewards: float, name: str = "gcd") -> Path:
    """A run of two steps that was evaluated before the first one and after each."""
    rows = []
    for step, reward in enumerate(rewards):
        row: dict = {"step": step} | ({"reward": reward} if step else {}) | {"eval_s": 1.0}
        for key in (f"eval/{name}", "eval/other", "eval"):
            row |= {f"{key}/mean_reward": reward, f"{key}/questions": 64}
            row |= {
                f"{key}/mean_reward_low": reward - 0.125,
                f"{key}/mean_reward_high": reward + 0.25,
            }
        rows.append(row | {f"eval/{name}/seen_in_training": 12})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_evaluations_have_a_plot_a_table_and_their_samples(tmp_path):
    folder = evaluated(tmp_path / "run", 0.25, 0.75, 0.5)
    sample = {"step": 2, "set": "gcd", "prompt": "p", "completion": NASTY, "reward": 0.5}
    (folder / "eval_samples.jsonl").write_text(json.dumps(sample) + "\n")
    assert report.main([str(folder)]) == 0
    assert (folder / "report" / "evaluation.png").read_bytes().startswith(PNG)
    text = (folder / "report" / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", text.partition("Evaluation before and after")[2])
    assert cells[:7] == [
        "gcd", "mean_reward", "64", "12", "0.25 [0.125, 0.5]", "0.5 [0.375, 0.75]", "0.75 (step 1)"
    ]  # fmt: skip
    assert cells[7] == "other" and cells[14] == "all sets"
    assert "2 steps recorded" in "".join(page.text), "the evaluation before is no step"
    assert "evaluation gcd" in page.text and [t for t, _ in page.tags].count("script") == 1
    (run,) = load_runs([folder])
    assert run.steps.tolist() == [1, 2] and run.eval_series("step").tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "$x$", "a/b", "\u202e", "x" * 5000])
def test_names_of_sets_that_no_run_writes_are_not_shown(tmp_path, name):
    folder = evaluated(tmp_path / "run", 0.25, 0.75, name=name)
    assert report.main([str(folder)]) == 0
    text = (folder / "report" / "index.html").read_text(encoding="utf-8")
    assert name not in text.replace(report_page._SCRIPT, "")


def test_a_run_that_was_evaluated_and_did_no_step_has_nothing_to_report(tmp_path, capsys):
    folder = evaluated(tmp_path / "run", 0.25)
    assert report.main([str(folder)]) == 2
    assert "no step has finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no metrics.jsonl here"),
        ("", "has no rows yet"),
        ('{"step": 1, "rew', "has no rows yet"),
        ('{"step": 1, "num_tokens": 3}\n', "no metric that can be drawn"),
        ("garbage\n{}\n", "metrics.jsonl:1: damaged row"),
    ],
)
def test_nothing_to_report_is_said_and_exits_with_2(tmp_path, capsys, content, words):
    folder = tmp_path / "run"
    folder.mkdir()
    if content is not None:
        (folder / "metrics.jsonl").write_text(content, encoding="utf-8")
    assert report.main([str(folder)]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""
    assert not (folder / "report").exists()


def test_a_missing_folder_and_a_bad_option_exit_with_2(tmp_path, capsys):
    assert report.main([str(tmp_path / "none")]) == 2
    assert f"{tmp_path / 'none'}: no metrics.jsonl" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        report.main([str(tmp_path), "--smooth", "0"])
    assert caught.value.code == 2


@pytest.mark.parametrize("kind", ["pipe", "device", "sparse", "folder"])
@pytest.mark.parametrize("name", [*ROW_FILES, TIMELINE_FILE])
def test_a_special_or_endless_file_is_one_line_and_exits_with_2(tmp_path, capsys, name, kind):
    run = make_run(tmp_path / "run", [0.5])
    (run / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(run / name)
    elif kind == "device":
        (run / name).symlink_to("/dev/zero")
    elif kind == "sparse":
        with open(run / name, "wb") as file:
            file.truncate(2**42)
    else:
        (run / name).mkdir()
    assert report.main([str(run)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and name in captured.err and captured.out == ""

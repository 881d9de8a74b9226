"""What workers did in a step: noted by hand, written, read, cut, and refused from strangers."""

import dataclasses
import json

import pytest

from reprise.rl.metrics.writer import MetricsConfig, MetricsWriter
from reprise.rl.records import worker_record
from reprise.rl.records.worker_record import (
    WorkerEvent,
    WorkerLog,
    WorkerPart,
    fitted,
    merged,
    read_workers,
)
from reprise.rl.runtime.run_files import WORKERS_FILE


def part(number, version, *spans, place="here"):
    return WorkerPart(f"worker {number}", place, version, spans)


def written(folder, steps=3):
    log, rows = WorkerLog(0), []
    with MetricsWriter(folder, MetricsConfig(tensorboard=False)) as metrics:
        for step in range(1, steps + 1):
            began_s = 50.0 + 10 * step
            parts = [part(i, step - 1, (began_s + i, began_s + i + 4)) for i in range(2)]
            row, _ = log.step(step, parts, [], began_s + 8)
            metrics.write_workers(row)
            rows.append(row)
    return rows


def test_rows_come_back_and_later_steps_are_cut(tmp_path):
    assert read_workers(tmp_path) == []
    rows = written(tmp_path)
    assert read_workers(tmp_path) == rows and rows[0].parts[1].busy_s == ((1.0, 5.0),)
    with open(tmp_path / WORKERS_FILE, "a") as file:
        file.write('{"step": 4, "le')
    assert read_workers(tmp_path) == rows
    with MetricsWriter(tmp_path, MetricsConfig(tensorboard=False)) as metrics:
        metrics.truncate_to_step(2)
    assert read_workers(tmp_path) == rows[:2]


def test_a_file_that_is_full_keeps_the_newest_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_record, "MAX_BYTES", 1000)
    rows = written(tmp_path, steps=40)
    kept = read_workers(tmp_path)
    assert 0 < len(kept) < 10 and kept == rows[-len(kept) :]
    assert (tmp_path / WORKERS_FILE).stat().st_size <= 1000


ROW = {
    "step": 1,
    "leg": 0,
    "ended_s": 2.0,
    "parts": [{"name": "worker 0", "place": "here", "version": 0, "busy_s": [[0.0, 1.0]]}],
    "events": [
        {"name": "worker 0", "place": "", "kind": "hung", "at_s": 1.0, "why": "", "requests": 3}
    ],
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"step": 1', '"step": true'),
        ('"leg": 0', '"leg": -1'),
        ('"ended_s": 2.0', '"ended_s": NaN'),
        ('"ended_s": 2.0', '"ended_s": 1e300'),
        ('"ended_s": 2.0', '"ended_s": 2.0, "more": 1'),
        ("[[0.0, 1.0]]", "[[1.0, 0.0]]"),
        ("[[0.0, 1.0]]", "[[0.0]]"),
        ("[[0.0, 1.0]]", "5"),
        ('"hung"', '"left"'),
        ('"why": ""', '"why": "' + "x" * 500 + '"'),
        ('"requests": 3', '"requests": "3"'),
        ('"events": [', '"events": ' + "[" * 100_000),
    ],
)
def test_what_no_run_wrote_is_one_error(tmp_path, old, new):
    line = json.dumps(ROW)
    (tmp_path / WORKERS_FILE).write_text(line + "\n")
    assert read_workers(tmp_path)[0].events[0].requests == 3
    assert old in line
    (tmp_path / WORKERS_FILE).write_text(f"{line}\n{line.replace(old, new)}\n")
    with pytest.raises(ValueError, match=r"workers\.jsonl:2 is not a step's workers"):
        read_workers(tmp_path)


def test_spans_of_another_clock_are_moved_into_what_was_seen():
    spans = [(105.0, 106.0), (107.0, 109.0)]
    assert fitted(spans, 0.0, 10.0) == [(6.0, 7.0), (8.0, 10.0)]
    assert fitted(spans, 110.0, 120.0) == [(110.0, 111.0), (112.0, 114.0)]
    assert fitted(spans, 104.0, 120.0) == spans and fitted([], 0.0, 1.0) == []


def test_the_longest_pauses_stay():
    spans = [(0, 1), (1.1, 2), (4, 5), (5.5, 6), (5.6, 5.8)]
    assert merged(spans, 10) == ((0, 1), (1.1, 2), (4, 5), (5.5, 6))
    assert merged(spans, 2) == ((0, 2), (4, 6)) and merged(spans, 1) == ((0, 6),)


def test_who_came_who_was_lost_and_how_old_weights_were():
    log = WorkerLog(0)
    assert log.step(1, [], [], 9.0) == (None, {})
    row, metrics = log.step(1, [part(0, 0, (1.0, 4.0)), part(1, 0, (1.0, 5.0))], [], 6.0)
    assert [e.kind for e in row.events] == ["joined"] * 2 and metrics["workers/joined"] == 2
    assert metrics["weights/age_versions"] == metrics["weights/age_s"] == 0
    again = WorkerEvent("worker 0", "here", "joined", 7.0)
    lost = WorkerEvent("worker 1", "here", "hung", 8.0, "no sign of life", 3)
    parts = [part(0, 0, (7.0, 9.5)), part(1, 1, (7.0, 8.0))]
    row, metrics = log.step(2, parts, [again, lost], 10.0)
    assert [dataclasses.replace(e, at_s=0) for e in row.events] == [
        dataclasses.replace(lost, at_s=0)
    ]
    assert (metrics["workers/joined"], metrics["workers/lost"]) == (0, 1)
    assert (metrics["weights/age_versions"], metrics["weights/age_s"]) == (1, 3.5)
    # another program under worker 0's name: the first was lost while nobody looked
    there = WorkerEvent("worker 0", "there", "joined", 11.0)
    late = part(1, 1, (7.0, 8.0))  # of the lost one, in a step that goes on
    row, metrics = log.step(3, [part(0, 2, (11.0, 12.0), place="there"), late], [there], 13.0)
    assert [(e.kind, e.place) for e in row.events] == [("killed", "here"), ("joined", "there")]
    assert (metrics["workers/joined"], metrics["workers/lost"]) == (1, 1)

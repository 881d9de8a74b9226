"""Weights & Biases shows what metrics.jsonl holds, whatever leg of a run wrote it.

The package is replaced by a stand-in with the service's documented rules: a row of a step below
the newest one is dropped, and `resume_from` cuts the rows above a step that the run has.
"""

from __future__ import annotations

import sys
import types

import pytest

from reprise.rl.metrics.writer import MetricsConfig, MetricsWriter, read_metrics

CONFIG = MetricsConfig(tensorboard=False, wandb_project="p")


class Service:
    """The service, with the rows of each run by its id."""

    def __init__(self, offline=False, rewinds=True):
        self.runs = {}
        self.is_open = set()
        self.offline = offline
        self.rewinds = rewinds
        self.fails = False

    def init(self, *, project, name, dir, id, resume=None, resume_from=None):
        if self.fails:
            raise ConnectionError("no answer")
        assert project == "p" and not self.is_open and (resume is None) != (resume_from is None)
        rows = self.runs.setdefault(id, {})
        if resume_from is not None and not self.offline:
            of, step = resume_from.split("?_step=")
            assert of == id
            if not self.rewinds or int(step) not in rows:
                raise RuntimeError("cannot rewind")
            self.runs[id] = rows = {s: row for s, row in rows.items() if s <= int(step)}
        self.is_open.add(id)

        def log(row, step):
            if step >= max(rows, default=0):
                rows.setdefault(step, {}).update(row)

        finish = lambda: self.is_open.discard(id)  # noqa: E731
        return types.SimpleNamespace(log=log, finish=finish, offline=self.offline)

    def shown(self, folder):
        rows = self.runs[(folder / "wandb_id").read_text().strip()]
        return [{"step": step, **row} for step, row in sorted(rows.items())]


@pytest.fixture(params=["rewinds", "refuses", "offline"])
def service(request, monkeypatch):
    made = Service(offline=request.param == "offline", rewinds=request.param == "rewinds")
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def leg(folder, after, steps, reward, config=CONFIG):
    with MetricsWriter(folder, config) as writer:
        writer.truncate_to_step(after)
        for step in steps:
            writer.write(step, {"reward": reward})
        writer.amend(steps[-1], {"eval/mean_reward": reward})


def test_it_shows_the_rows_after_a_run_went_back(tmp_path, service):
    leg(tmp_path, 0, range(1, 6), 0.1)
    leg(tmp_path, 2, range(3, 5), 0.9)
    assert service.shown(tmp_path) == read_metrics(tmp_path)
    leg(tmp_path, 4, range(5, 7), 0.5)  # stopped and gone on with: nothing is undone
    assert service.shown(tmp_path) == read_metrics(tmp_path)
    leg(tmp_path, 0, range(1, 3), 0.7)  # killed before its first checkpoint
    assert service.shown(tmp_path) == read_metrics(tmp_path) and len(read_metrics(tmp_path)) == 2


def test_one_run_as_long_as_nothing_is_undone_or_the_service_rewinds(tmp_path, service):
    leg(tmp_path, 0, range(1, 6), 0.1)
    leg(tmp_path, 5, range(6, 8), 0.1)
    assert len(service.runs) == 1
    leg(tmp_path, 2, range(3, 6), 0.1)
    assert len(service.runs) == (1 if service.rewinds and not service.offline else 2)


def test_a_leg_without_it_or_before_it_is_shown_too(tmp_path, service):
    off = MetricsConfig(tensorboard=False)
    leg(tmp_path, 0, range(1, 4), 0.1, off)
    leg(tmp_path, 3, range(4, 6), 0.2)
    assert service.shown(tmp_path) == read_metrics(tmp_path)
    leg(tmp_path, 3, range(4, 8), 0.3, off)
    leg(tmp_path, 7, range(8, 9), 0.4)
    assert service.shown(tmp_path) == read_metrics(tmp_path) and len(read_metrics(tmp_path)) == 8


def test_rows_that_the_service_lacks_after_a_kill(tmp_path, service):
    leg(tmp_path, 0, range(1, 6), 0.1)
    for rows in service.runs.values():
        del rows[2], rows[3], rows[4], rows[5]  # not yet sent
    leg(tmp_path, 3, range(4, 6), 0.9)
    assert service.shown(tmp_path) == read_metrics(tmp_path)


def test_a_kill_while_it_goes_back(tmp_path, service, monkeypatch):
    leg(tmp_path, 0, range(1, 6), 0.1)
    with MetricsWriter(tmp_path, CONFIG) as writer, monkeypatch.context() as patch:
        patch.setattr("reprise.rl.metrics.writer._keep_rows", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            writer.truncate_to_step(2)
    leg(tmp_path, 2, range(3, 4), 0.9)
    assert service.shown(tmp_path) == read_metrics(tmp_path) and len(read_metrics(tmp_path)) == 3


def test_a_service_that_does_not_answer_is_a_sentence(tmp_path, service):
    service.fails = True
    with pytest.raises(OSError, match=r"opened no run \(ConnectionError: no answer\); fix: log in"):
        MetricsWriter(tmp_path, CONFIG)

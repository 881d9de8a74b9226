"""Runs whose drafts come from drafting workers: the same tokens, whatever becomes of these."""

from __future__ import annotations

import json

import pytest
from loop_runs import finish, learnt

STEPS = "Run.steps=2"
WORKERS = (
    "Sched.workers=3",
    "Engine.max_nodes=6",
    "Engine.rounds_per_fetch=1",
    "Speculation.budget='fixed:5'",
    "DraftModel.max_depth=3",
    "DraftModel.proposal='shared_noise'",
    "Drafting.workers=1",
)


def apart(tiny, *settings):
    """Settings of a run whose draft model is the policy that it starts from."""
    folder = str(tiny.parent / "policy")
    sources = "Speculation.sources=('model',)", f"DraftModel.directory={folder!r}"
    return (*WORKERS, *sources, STEPS, *settings)


def texts(done):
    return [json.loads(line)["completion"] for line in done.samples.splitlines()]


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    return finish(tiny, tmp_path_factory.mktemp("plain"), STEPS)


@pytest.mark.parity
@pytest.mark.parametrize("ahead", ["free_running", "enumeration"])
def test_drafting_workers_change_no_token(tiny, tmp_path, plain, ahead):
    got = finish(tiny, tmp_path, *apart(tiny, f"Drafting.ahead={ahead!r}"))
    assert texts(got) == texts(plain)
    for ours, theirs in zip(plain.rows, got.rows, strict=True):
        assert learnt(ours) == pytest.approx(learnt(theirs), rel=1e-3, abs=1e-5)
    print({k: v for k, v in got.rows[0].items() if "spec" in k or "draft" in k})
    print(got.show.messages if hasattr(got.show, "messages") else "")


HELPERS = (
    *("Sched.workers=3", "Drafting.requests_per_helper=4", "Drafting.methods=('own',)"),
    *("Speculation.budget='fixed:3'", "Speculation.sources=('own',)", "Engine.max_nodes=6", STEPS),
)


@pytest.mark.parity
@pytest.mark.parametrize("mode", ["sync", "ahead"])
def test_copies_of_stragglers_change_no_token(tiny, tmp_path, plain, mode):
    got = finish(tiny, tmp_path, *HELPERS, f"Sched.mode={mode!r}")
    assert texts(got) == texts(plain)
    for ours, theirs in zip(plain.rows, got.rows, strict=True):
        assert learnt(ours) == pytest.approx(learnt(theirs), rel=1e-3, abs=1e-5)

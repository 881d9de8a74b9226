"""Runs with drafting workers: the same tokens, whatever becomes of these."""

from __future__ import annotations

import threading

import pytest
from loop_runs import (
    assert_same_run,
    compiles_nothing_late,
    few_devices,
    finish,
    stop_after,
    texts,
)

from reprise.rl.assembly import drafting_run as drafting
from reprise.rl.drafting import worker
from reprise.rl.drafting import workers as drafting_workers
from reprise.rl.drafting.plans import FIRST_HITS
from reprise.rl.drafting.workers import DraftingWorkers
from reprise.rl.metrics.writer import read_metrics
from reprise.rl.records.worker_record import read_workers
from reprise.rl.speculation import bandits as of_runs
from reprise.sched.policies.specactor import WorkerPlan
from reprise.spec.decoupled.ahead import Enumerating, FreeRunning
from reprise.spec.decoupled.copies import CopiesDrafter
from reprise.spec.drafter import PRIOR_PROB
from reprise.spec.eagle.drafter import EagleDrafter

pytestmark = pytest.mark.usefixtures("one_device")

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
KINDS = {"free_running": FreeRunning, "enumeration": Enumerating}


def apart(tiny, *settings):
    """Settings of a run whose draft model is the policy that it starts from."""
    folder = str(tiny.parent / "policy")
    sources = "Speculation.sources=('model',)", f"DraftModel.directory={folder!r}"
    return (*WORKERS, *sources, STEPS, *settings)


def said(done, word):
    return [line for line in done.show.messages if word in line]


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    return finish(tiny, tmp_path_factory.mktemp("plain"), STEPS)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(("ahead", "mode"), [("free_running", "sync"), ("enumeration", "ahead")])
def test_drafting_workers_change_no_token_and_compile_nothing_late(
    tiny, tmp_path, request, ahead, mode
):
    settings = f"Drafting.ahead={ahead!r}", f"Sched.mode={mode!r}"
    got = compiles_nothing_late(tiny, tmp_path, *apart(tiny, *settings))
    assert_same_run(got, request.getfixturevalue("plain"))  # of programs that are there by now
    assert not said(got, "drafting worker")


@pytest.mark.parity
def test_nor_does_a_ladder_of_models(tiny, tmp_path, plain, monkeypatch):
    """Each rollout has the method that is chosen for it: here each in turn."""
    chosen = []

    def in_turn(planner):
        if len(chosen) == 1:  # the first rollout behind the warm-up's
            seen = planner._seen[chosen[0]]
            assert (seen.p, seen.hits) == (PRIOR_PROB, pytest.approx(FIRST_HITS))
        assert planner.draft_s.keys() == set(planner.methods)
        assert planner.seconds.draft_s == planner.draft_s["model"] > 0, "of the first, measured"
        chosen.append(planner.methods[len(chosen) % 2])
        planner.method = chosen[-1]

    monkeypatch.setattr(drafting_workers.Planner, "choose_method", in_turn)
    folder = str(tiny.parent / "policy")
    got = finish(tiny, tmp_path, *apart(tiny, f"DraftModel.directories=({folder!r},)"))
    assert_same_run(got, plain)
    assert set(chosen) == {"model", "model2"}
    names = {part.name for step in read_workers(got.folder) for part in step.parts}
    assert names == {"worker 0", "worker 1", "drafting 0"}
    for row in read_metrics(got.folder):
        by = {name: row[f"drafting/by_{name}"] for name in ("model", "model2")}
        assert sum(by.values()) == 1 and 0 <= row["drafting/rounds_with_draft"] <= 1


@pytest.mark.parity
def test_more_of_them_than_verify_change_none_either(tiny, tmp_path, plain):
    with few_devices(2):
        assert_same_run(finish(tiny, tmp_path, *apart(tiny, "Drafting.workers=2")), plain)


def test_more_of_them_than_devices_are_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"as devices, got Drafting.workers=2 and 1: lower it, or"):
        finish(tiny, tmp_path, *apart(tiny, "Drafting.workers=2"))


# --- plans ------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("count", [0, 1])
def test_planned_workers_change_no_token(tiny, tmp_path, plain, monkeypatch, count):
    """However many the plan says; its own seconds decide otherwise from day to day."""
    taken, take = [], DraftingWorkers.take
    choose = drafting_workers.Planner.choose

    def planned(self, counts):
        assert choose(self, counts).tokens_per_s > 0
        return WorkerPlan(count, 2, 1.0)

    def noted(self, engines, number):
        taken.append(number)
        take(self, engines, number)

    monkeypatch.setattr(drafting_workers.Planner, "choose", planned)
    monkeypatch.setattr(DraftingWorkers, "take", noted)
    settings = "Drafting.workers=None", "Drafting.reconfigure_tokens=2"
    got = finish(tiny, tmp_path, *apart(tiny, *settings))
    assert_same_run(got, plain)
    assert taken == [1] * count


@pytest.mark.parity
def test_plans_of_a_run_itself(tiny, tmp_path, plain):
    settings = "Drafting.workers=None", "Drafting.reconfigure_tokens=2"
    assert_same_run(finish(tiny, tmp_path, *apart(tiny, *settings)), plain)


# --- losses -----------------------------------------------------------------------------


def steps_that(monkeypatch, ahead, do):
    """Have steps that draft something `do(n)` first, the n-th from 0 of the run's own; return how
    many there were.
    """
    kind, count = KINDS[ahead], []
    step = kind.step

    def stepped(self):
        if threading.current_thread().name == "drafting":  # and not where seconds are measured
            if any(request.wants for request in self.texts.requests.values()):
                count.append(None)
                do(len(count) - 1)
        return step(self)

    monkeypatch.setattr(kind, "step", stepped)
    return count


@pytest.mark.fault
@pytest.mark.parity
@pytest.mark.parametrize("ahead", ["free_running", "enumeration"])
def test_one_that_raises_starts_again(tiny, tmp_path, plain, monkeypatch, ahead):
    def fail_once(n):
        if n == 4:
            raise RuntimeError("a device is gone")

    count = steps_that(monkeypatch, ahead, fail_once)
    got = finish(tiny, tmp_path, *apart(tiny, f"Drafting.ahead={ahead!r}"))
    assert_same_run(got, plain)
    assert len(count) > 4
    assert said(got, "drafting worker") == [
        "warning: drafting worker 0 failed: RuntimeError: a device is gone; it starts again"
    ]


@pytest.mark.fault
@pytest.mark.parity
@pytest.mark.parametrize(("ahead", "replaced"), [("free_running", True), ("enumeration", False)])
def test_one_that_hangs_changes_no_token(tiny, tmp_path, plain, monkeypatch, ahead, replaced):
    """Whether it is replaced at once, or the run ends before that."""
    never, hung = threading.Event(), []

    def hang_once(n):
        if not hung:
            hung.append(n)
            never.wait(120)

    def impatient(*given, clock, **options):
        """Drafting workers whose clock leaps beyond the limit once one hangs."""
        return DraftingWorkers(*given, clock=lambda: clock() + 100.0 * len(hung), **options)

    if replaced:
        monkeypatch.setattr(drafting, "DraftingWorkers", impatient)
    monkeypatch.setattr(worker, "LEAVING_S", 0.1)
    steps_that(monkeypatch, ahead, hang_once)
    settings = apart(tiny, f"Drafting.ahead={ahead!r}", "Run.hang_limit_s=30.0")
    try:
        got = finish(tiny, tmp_path, *settings)
    finally:
        never.set()
    assert_same_run(got, plain)
    assert bool(said(got, "drafting worker 0 failed: TimeoutError: no answer")) == replaced


# --- steps that are begun ahead, and resumed ---------------------------------------------


@pytest.mark.parity
def test_stopped_and_resumed_it_draws_the_same(tiny, tmp_path, plain):
    settings = apart(tiny, "Sched.mode='ahead'")
    stop_after(tiny, tmp_path, 1, *settings, "Checkpoint.every_steps=0")
    resumed = finish(tiny, tmp_path, *settings)
    assert "resuming after step 1" in resumed.show.messages
    assert texts(resumed) == texts(plain)


# --- copies of stragglers ---------------------------------------------------------------

HELPERS = (
    *("Sched.workers=3", "Drafting.requests_per_helper=4", "Drafting.methods=('own',)"),
    *("Speculation.budget='fixed:3'", "Speculation.sources=('own',)", "Engine.max_nodes=6", STEPS),
)


@pytest.mark.slow
@pytest.mark.parity
def test_copies_of_stragglers_change_no_token_and_compile_nothing_late(tiny, tmp_path, plain):
    assert_same_run(compiles_nothing_late(tiny, tmp_path, *HELPERS), plain)


@pytest.mark.parity
def test_helpers_and_a_drafting_worker_change_no_token(tiny, tmp_path, plain):
    """Copies are drafted for by the drafting worker, and by each helper's own draft model."""
    helpers = "Drafting.requests_per_helper=4", "Drafting.methods=('model','own')"
    assert_same_run(finish(tiny, tmp_path, *apart(tiny, *helpers, "Sched.mode='ahead'")), plain)


# --- the bandit, and copies by a learned drafter ------------------------------------------

BANDIT = (
    *("Speculation.budget='bandit'", "Tuner.thresholds=(1, 5)", "Tuner.verify_tokens=(5, 3)"),
    "Tuner.depths=(1, 3)",
)


@pytest.fixture
def bandits(monkeypatch):
    """The bandits of the workers of the runs that begin now."""
    found, make = [], of_runs.make_bandit
    monkeypatch.setattr(of_runs, "make_bandit", lambda *a: found.append(make(*a)) or found[-1])
    return found


def rewarded(bandits):
    """The arms that have rewards."""
    windows = [w for bandit in bandits for w in bandit.state()["windows"] if w["rewards"]]
    return {w["strategy"] for w in windows}


@pytest.mark.parity
def test_a_bandit_chooses_among_what_drafting_workers_send(tiny, tmp_path, plain, bandits):
    named = "Speculation.sources=('own','model')"
    assert_same_run(finish(tiny, tmp_path, *apart(tiny, *BANDIT, named)), plain)
    assert rewarded(bandits) >= {"plain", "own × 3", "model × 3"}


@pytest.mark.parity
def test_a_bandit_on_workers_that_help_one_another(tiny, tmp_path, plain, bandits):
    got = finish(tiny, tmp_path, *HELPERS, *BANDIT)
    assert_same_run(got, plain)
    for row in got.show.rows:
        shares = [v for k, v in row.items() if k.startswith("bandit/") and k.endswith("/share")]
        assert sum(shares) == pytest.approx(1.0)
    assert row["bandit/plain/tokens_per_s"] > 0
    assert rewarded(bandits) >= {"plain", "own × 3"}


@pytest.mark.parity
def test_copies_are_drafted_for_by_a_learned_drafter(tiny, tmp_path, plain, monkeypatch):
    methods, made = [], CopiesDrafter.__init__
    noted = lambda self, usual, given, *a: methods.extend(given) or made(self, usual, given, *a)  # noqa: E731
    monkeypatch.setattr(CopiesDrafter, "__init__", noted)
    named = (
        *("Speculation.sources=('own','learned')", "Drafting.methods=('learned',)"),
        *("Drafter.max_depth=3", "Drafter.top_k=2", "Drafter.steps_after_rollout=1"),
        *("Drafter.batch_rows=1", "Drafter.row_tokens=32", "Drafter.micro_batches=1"),
    )
    assert_same_run(finish(tiny, tmp_path, *HELPERS, *named), plain)
    assert {type(method) for method in methods} == {EagleDrafter}

"""What each step's rounds took: measured once, kept, and replayed by a resumed run."""

import dataclasses

import numpy as np
import pytest

from reprise.models.folder import Folder
from reprise.rl.records.stats import RoundRecord
from reprise.rl.runtime.run_files import SECONDS_FILE
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.sources import Speculation
from reprise.rl.warm_up.step_seconds import (
    SecondsRecord,
    after_step,
    at_its_pace,
    go_on,
    step_seconds,
)
from reprise.spec.reuse.prefix_rule import parse_mode
from reprise.spec.reuse.rollout_cache import RolloutCache, of_group
from reprise.spec.round_times import RoundTimes, StepSeconds

PLAIN, DRAFTED = (4, 4, 64), (4, 16, 64)
TIMES = RoundTimes({PLAIN: 7.0, DRAFTED: 1.0})
LOSS = StepSeconds(10.0, -1.0, {PLAIN: (8, 14.0), DRAFTED: (2, 3.0)}, True)


def record(nodes, num_rounds, device_s=5.0, **more):
    """A fetch: 1 s of prompts, 2 s of drafting, 1 s of the call, the device, 1 s of commit."""
    marks = np.cumsum([0.0, 1, 2, 1, device_s, 1]).tolist()
    ids, full = np.array([5, 6]), np.array([num_rounds, min(num_rounds, 1)])
    return RoundRecord(*marks, 4, nodes, 64, ids, 7 + 0 * ids, full, full, **more)


def losing(**settings):
    return Speculation(SpeculationConfig(**settings), RolloutCache(), times=TIMES)


def test_seconds_of_rounds_are_medians_by_bucket():
    rounds = [record(4, 4), record(4, 8, 9.0), record(4, 2, 90.0), record(16, 1)]
    found = step_seconds(rounds, TIMES, True)
    # (1 + 5 + 1) / 4, (1 + 9 + 1) / 8 and (1 + 90 + 1) / 2 a round; with its drafting 2 + 7
    assert found.rounds == {PLAIN: (14, 11 / 8), DRAFTED: (1, 9.0)}
    assert found.rollout_s == 10 + 14 + 95 + 10
    plain_s = at_its_pace(rounds, TIMES)(*PLAIN)
    assert found.saved_s == pytest.approx(-3 * 2 + plain_s - 9)


def test_a_machine_that_is_slow_for_a_step_is_no_loss_by_drafts():
    """Two tokens for the seconds of one and a half plain rounds, at any pace."""
    times = RoundTimes({PLAIN: 6.0, DRAFTED: 9.0})
    drafted = dataclasses.replace(record(16, 1), emitted_A=np.array([2, 2]))
    steps = [[record(4, 1, 4.0)] * 50 + [drafted] * 9]
    slower = lambda r: {k: 9 * v for k, v in vars(r).items() if k.endswith("_s")}  # noqa: E731
    steps.append([dataclasses.replace(r, **slower(r)) for r in steps[0]])
    once, slow = (step_seconds(step, times, True) for step in steps)
    looked_s = 50 * 2
    assert once.saved_s == pytest.approx(9 * (2 * 6 - 9) - looked_s)
    assert slow.saved_s == pytest.approx(9 * once.saved_s)


def test_rounds_that_are_of_no_bucket_are_left_out():
    drafts_on_device = RoundTimes(TIMES.rounds, {"model": {(4, 2, 64): 1.0}})
    assert step_seconds([record(16, 1)], drafts_on_device, True).rounds == {DRAFTED: (1, 7.0)}
    several = [record(16, 3), record(4, 1, prompt_tokens=3), record(4, 0)]
    assert step_seconds(several, TIMES, True).rounds == {}
    cached = step_seconds([record(16, 1, cached_nodes=2)], TIMES, True)
    assert cached.saved_s == 0 and cached.rounds == {DRAFTED: (1, 9.0)}


def test_a_compiler_is_no_loss_by_drafts():
    rounds = [record(4, 4), record(4, 8, 9.0), record(16, 1), record(16, 1)]
    waited = [record(16, 1, 5000.0, num_compiled=3), record(4, 4, 5000.0, num_compiled=1)]
    assert step_seconds([*waited, *rounds], TIMES, True) == step_seconds(rounds, TIMES, True)
    pace = at_its_pace([*waited, *rounds], TIMES)
    assert pace.rows() == at_its_pace(rounds, TIMES).rows()


def test_a_recorded_step_is_read_instead_of_measured(tmp_path):
    first, folder = losing(losing_steps=2), Folder(tmp_path)
    kept = SecondsRecord(folder)
    for step in (1, 2, 3):
        measured = dataclasses.replace(LOSS, saved_s=-float(step))
        assert kept.of(step, lambda measured=measured: measured) == measured
        first.seconds.played(measured)
    with open(tmp_path / SECONDS_FILE, "ab") as file:
        file.write(b'{"step": 4, "rol')  # killed here
    again, resumed = losing(losing_steps=2), SecondsRecord(folder)
    go_on(again, resumed, 1)  # from the checkpoint of step 1
    assert not again.is_off
    for step in (2, 3):
        again.seconds.played(resumed.of(step, lambda: pytest.fail("it is recorded")))
    assert again.is_off and first.is_off
    assert again.times_now.rows() == first.times_now.rows() != TIMES.rows()
    assert resumed.of(4, lambda: LOSS) == LOSS == SecondsRecord(folder).of(4, pytest.fail)


def line(step="1", rollout_s="1", rounds="[]", has_history="true", reuse_saved_s="0"):
    seconds = f'"rollout_s": {rollout_s}, "saved_s": 0, "has_history": {has_history}'
    seconds += f', "reuse_saved_s": {reuse_saved_s}'
    return f'{{"step": {step}, {seconds}, "rounds": {rounds}}}'


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[" * 99_999, "[1]", '{"step": 1}', line(step="1.5")),
        *(line(rounds=rounds) for rounds in ("[[4]]", "[3]", "[[4, 4, 64, 0, 1.0]]")),
        *(line(rollout_s=seconds) for seconds in ("NaN", "-1", "1e99")),
        line(has_history="1"),
        line(reuse_saved_s="-1e99"),
    ],
)
def test_a_damaged_record_is_named(tmp_path, text):
    (tmp_path / SECONDS_FILE).write_text(text + "\n")
    with pytest.raises(
        ValueError, match=r"step_seconds\.jsonl is not what a run wrote .*delete it"
    ):
        SecondsRecord(Folder(tmp_path))


def play(speculation, folder, steps, first=1):
    """The metrics of so many steps that lose, and the messages."""
    said, record = [], SecondsRecord(Folder(folder))
    numbers = range(first, first + steps)
    rows = [after_step(speculation, record, step, [], said.append) for step in numbers]
    return [row.get("spec/turned_off") for row in rows], said


@pytest.fixture
def always_lost(monkeypatch):
    monkeypatch.setattr(
        "reprise.rl.warm_up.step_seconds.step_seconds",
        lambda rounds, times, has_history: dataclasses.replace(LOSS, has_history=has_history),
    )


def test_a_budget_that_loses_says_so_once_and_turns_itself_off(always_lost, tmp_path):
    speculation = losing(budget="goodput", sources=("own",))
    off, said = play(speculation, tmp_path, 5)
    assert off == [0, 0, 0, 1, 1]
    (line,) = said
    assert "cost about 10.0% of 30.0 s of rounds in the last 3 steps: they are turned off" in line
    assert "for the rest of the run" in line
    assert speculation.drafter_factory(["a"], [(1, 2)])(None) == (None, None)


def test_drafts_that_lose_in_the_first_epoch_are_judged_again_in_the_second(always_lost, tmp_path):
    speculation = losing(budget="goodput", sources=("history", "own"))

    def drafter():
        return speculation.drafter_factory(["a"], [(1, 2)])(None)[0]

    assert drafter() is not None
    off, [line] = play(speculation, tmp_path, 5)
    assert off == [0, 0, 0, 1, 1] and "turned off until the second epoch" in line
    assert drafter() is None and speculation.keeps_history

    speculation._cache.replace("a", of_group([np.array([3, 4, 5])], [1.0]))
    assert drafter() is not None
    again = losing(budget="goodput", sources=("history", "own"))
    go_on(again, SecondsRecord(Folder(tmp_path)), 5)
    assert again.seconds.is_off(False) and not again.seconds.is_off(True), "as resumed"
    off, [line] = play(speculation, tmp_path, 5, first=6)
    assert off == [0, 0, 0, 1, 1] and "for the rest of the run" in line
    assert drafter() is None
    assert not speculation.keeps_history and speculation.history_metrics() == {}


@pytest.mark.parametrize(
    ("settings", "num_said"), [({"budget": "fixed:3"}, 1), ({"losing_steps": 0}, 0)]
)
def test_drafts_that_are_wanted_in_any_case_stay(always_lost, tmp_path, settings, num_said):
    speculation = losing(sources=("own",), **settings)
    off, said = play(speculation, tmp_path, 5)
    assert off == [0] * 5 and len(said) == num_said and not speculation.is_off
    assert all("kept as configured" in line for line in said)
    if not num_said:
        assert speculation.drafter_factory(["a"], [(1, 2)])(None)[1]._times(*PLAIN) != 7.0


def test_drafts_of_drafting_workers_stay(always_lost, tmp_path):
    speculation = Speculation(
        SpeculationConfig(sources=("model",)),
        RolloutCache(),
        {"model": None},
        times=TIMES,
        apart={"model": None},
    )
    assert play(speculation, tmp_path, 4)[0] == [0] * 4 and speculation.seconds.is_off(False)


def test_without_drafts_nothing_is_recorded(tmp_path):
    assert play(losing(budget="off", sources=()), tmp_path, 2) == ([None, None], [])
    assert not (tmp_path / SECONDS_FILE).exists()


CHUNKS = {"cached_in_chunks": 9, "plain_rounds": 3.0}


def test_tokens_of_chunks_save_the_plain_rounds_that_would_bring_them():
    """A pass of 9 s after its prompts; three plain rounds take as many seconds as the step's do."""
    rounds = [record(4, 4), record(4, 1, **CHUNKS)]
    found = step_seconds(rounds, TIMES, True)
    assert found.rounds == {PLAIN: (4, 7 / 4)}, "a pass is no plain round"
    plain_s = at_its_pace(rounds, TIMES)(*PLAIN)
    assert found.reuse_saved_s == pytest.approx(3 * plain_s - 9)
    assert found.saved_s == pytest.approx(-2), "drafting before the plain fetch"
    assert step_seconds(rounds[:1], TIMES, True).reuse_saved_s == 0


def test_the_price_of_a_pass_that_is_not_made_is_a_loss_of_reuse():
    priced = step_seconds([record(4, 4, pricing_seconds=1.5)], TIMES, True)
    assert priced.saved_s == pytest.approx(-0.5) and priced.reuse_saved_s == pytest.approx(-1.5)


@pytest.mark.parametrize(
    ("mode", "end"),
    [
        ("coupled", "it ends for the rest of the run, and its responses only draft"),
        ("lenient:1", "it goes on, since it is a part of the training; Reuse.mode turns it off"),
    ],
)
def test_reuse_that_loses_is_told_once_and_after_a_resume_not_again(
    monkeypatch, tmp_path, mode, end
):
    lost = StepSeconds(10.0, 0.0, {}, True, -2.0)
    monkeypatch.setattr("reprise.rl.warm_up.step_seconds.step_seconds", lambda *_: lost)
    said, mode = [], parse_mode(mode)
    speculation, record = losing(budget="off", sources=()), SecondsRecord(Folder(tmp_path))
    for step in range(1, 5):
        assert not after_step(speculation, record, step, [], said.append, mode)
        assert speculation.seconds.reuse_is_off == (step >= 3)
    [line] = said
    assert "has cost about 20.0% of 30.0 s of rounds in the last 3 steps" in line and end in line
    resumed = losing(budget="off", sources=())
    go_on(resumed, SecondsRecord(Folder(tmp_path)), 4)
    assert resumed.seconds.reuse_is_off
    after_step(resumed, record, 5, [], said.append, mode)
    assert len(said) == 1


class Shared:
    """Two processes that tell each other in turn."""

    def __init__(self, index, told):
        self.is_first, self._told = index == 0, told

    def from_first(self, what, value):
        if self.is_first:
            self._told.append(value())
            return self._told[-1]
        return self._told.pop(0)


def test_all_processes_go_by_what_the_first_has_recorded(tmp_path):
    told, other = [], tmp_path / "other"
    first = SecondsRecord(Folder(tmp_path), Shared(0, told))
    second = SecondsRecord(Folder(other, create=True), Shared(1, told))
    assert first.of(1, lambda: LOSS) == second.of(1, lambda: pytest.fail("not its own")) == LOSS
    assert not (other / SECONDS_FILE).exists()

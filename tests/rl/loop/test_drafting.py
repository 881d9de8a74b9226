"""Which runs may have drafting workers, and what their programs on Ray are told."""

import queue
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from drafting_programs import DEADLINES, save_policy
from tiny_team import MODEL

from rl.config.loader import load
from rl.loop.config_checks import check_drafting
from rl.loop.drafting import have_idle_help, make_planner, open_programs, take_workers
from rl.loop.experiment import TrainConfig
from rl.loop.ray_workers import drafters_of
from rl.remote.drafting_messages import CODEC, Meet

RAY = "Cluster.kind='ray'"
DRAFTS = (
    *("Speculation.sources=('model',)", "Speculation.budget='fixed:3'"),
    *("Sched.workers=4", "Drafting.workers=1"),
)


def made(*settings):
    return load(TrainConfig, ["configs/epochs_tiny.gin"], settings)


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_some_workers_may_draft_for_the_others(kind):
    check_drafting(made(*DRAFTS, f"Cluster.kind={kind!r}"))
    assert made(*DRAFTS).num_verifying == 3 and made(RAY).num_verifying == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "Drafting.workers=None",
            r"expected a number of .*got None.* set Drafting.workers = 1 … 3",
        ),
        ("Drafting.workers=4", r"at least one worker that verifies.*4 of Sched.workers=4"),
        ("Speculation.sources=('own',)", r"draft by a draft model: expected \"model\""),
        ("Drafting.window=31", r"Drafting.window of at most Engine.max_nodes"),
    ],
)
def test_what_drafting_workers_on_ray_cannot_do_is_refused(override, message):
    with pytest.raises(ValueError, match=message):
        check_drafting(made(*DRAFTS, RAY, override))


def test_a_plan_may_say_how_many_draft_where_workers_are_threads():
    check_drafting(made(*DRAFTS, "Drafting.workers=None"))


HELPS = "Drafting.requests_per_helper=2", "Drafting.methods=('model','own')"


def test_workers_on_ray_are_told_that_they_draft_for_copies_with_a_draft_model(tmp_path):
    folder = f"DraftModel.directory={save_policy(tmp_path).directory!r}"
    config = made(*DRAFTS, RAY, folder, *HELPS)
    check_drafting(config)
    assert drafters_of(config, None).copies
    assert not drafters_of(made(*DRAFTS, RAY, folder, "Drafting.methods=('model',)"), None).copies
    others = made(*DRAFTS, RAY, folder, *HELPS, "Drafting.methods=('own',)")
    assert not drafters_of(others, None).copies


def test_idle_workers_help_by_the_methods_and_the_plan_of_the_run():
    config, engine = made(*DRAFTS, *HELPS), SimpleNamespace()
    speculation, planner = SimpleNamespace(), make_planner(config)
    have_idle_help(engine, speculation, planner)
    assert speculation.methods_of_copies == ("model", "own")
    assert (engine.helpers.num_methods, engine.helpers.requests_each) == (2, 2)
    assert engine.helpers.worth == planner.worth
    planner.observed.add([5], np.ones(1, int), np.ones(1, int))
    assert set(engine.helpers.acceptance()) == {5}


class Silent:
    """A channel that takes messages, and brings no answer."""

    def __init__(self, number, name):
        self.number, self.name, self.ended = number, name, False
        self.heard = queue.SimpleQueue()

    def submit(self, message):
        self.heard.put(CODEC.decode(message))
        return Future()

    def end(self):
        self.ended = True


def test_programs_are_started_in_the_last_places_and_told_what_they_draft(tmp_path):
    model = save_policy(tmp_path)
    more = f"DraftModel.directory={model.directory!r}", "DraftModel.max_depth=3"
    config = made(*DRAFTS, RAY, *more, "Drafting.workers=2", "Sched.devices_per_worker=2")
    inputs, started = SimpleNamespace(model=MODEL), queue.SimpleQueue()

    def connect(number, name):
        channel = Silent(number, name)
        started.put(channel)
        return channel

    given = config, inputs, np.dtype("float32"), "a run", connect, DEADLINES, print
    with open_programs(*given) as programs:
        channels = [started.get(timeout=30) for _ in range(2)]
        assert sorted(channel.number for channel in channels) == [2, 3]
        assert {channel.name for channel in channels} == {
            w.address.name() for w in programs.workers
        }
        told = channels[0].heard.get(timeout=30)
        assert isinstance(told, Meet)
        planner = make_planner(config)
        assert told.rows * 4 >= planner.num_requests > 0 and told.max_window == 3
        assert told.longest_tokens == config.longest_tokens
        assert (told.sampling, told.drafting) == (config.sampling, config.drafting)
        apart = [programs.apart(number) for number in range(2)]
        assert [len(x.addresses) for x in apart] == [1, 1] and apart[0] != apart[1]
        assert apart[0].planner().drafting_workers == 2
    assert all(channel.ended for channel in channels)
    assert drafters_of(config, None).apart and not drafters_of(made(RAY), None).apart
    assert not drafters_of(config, None).copies
    with open_programs(made(RAY), *given[1:]) as nothing:
        assert nothing is None
    assert take_workers(config, None, None, None, print) is None  # they are no threads

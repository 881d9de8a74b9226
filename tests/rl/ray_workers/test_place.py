"""The run's side of workers in actors, with an actor that only notes its calls."""

import gc
import weakref
from concurrent.futures import Future

import numpy as np
import pytest
from tiny_team import KEY, PARAMS, SAMPLING

from reprise.rl.engine.rollout_spec import RolloutSpec, no_drafts
from reprise.rl.ray_workers.place import Measured, RayPlace, Reply, Shared
from reprise.rl.records.stats import EngineStats
from reprise.rl.runtime.waits import ProgramLost
from reprise.rl.speculation.sources import StepDrafts
from reprise.rl.workers.messages import Prepare, Remove, Report, WorkerLimits
from reprise.spec.eagle_training.training_data import HiddenStates, RequestSample

HANG_LIMIT_S, COMPILE_S = 600.0, 3600.0
LIMITS = WorkerLimits(60, 4, 60)


class NotedActor:
    """Calls wait until `answer` is called."""

    where, fatal_error, is_there, num_starts = "far away", None, True, 1

    def __init__(self):
        self.calls = []

    def call(self, method, *args, limit_s=60.0, is_work=True):
        self.calls.append((method, args, limit_s, Future()))
        return self.calls[-1][-1]

    def answer(self, result):
        self.calls[-1][-1].set_result(result)


@pytest.fixture
def place():
    shared = Shared(lambda value: value)
    limits = {"call_limit_s": HANG_LIMIT_S, "compile_s": COMPILE_S}
    said = []
    found = RayPlace(0, NotedActor(), shared, report=said.append, **limits)
    found.said = said
    return found


def spec_of(sink=None):
    return RolloutSpec(PARAMS, SAMPLING, KEY, (), policy_version=0, drafts=no_drafts, sink=sink)


class Sink:
    def __init__(self):
        self.sample, self.got = RequestSample(0, 0, 1.0), []

    def add(self, states):
        self.got.append(states)


def reply(**fields):
    report = Report(0, (), EngineStats(), True)
    return Reply(
        **{"rollout": 1, "states": [], "remarks": [], "bandit": None} | fields, report=report
    )


def test_a_call_may_take_as_long_as_a_worker_may_hang(place):
    """A rollout may be opened, and its weights fetched, in a later call than its `Prepare`."""
    place.join(LIMITS)
    place.call([Prepare(0, spec_of(), 0)])
    place.call([Remove(0)])
    place.leave(abort=False)
    assert [limit_s for _, _, limit_s, _ in place.actor.calls] == [HANG_LIMIT_S] * 4


@pytest.mark.fault
@pytest.mark.parametrize("how", ["gone", "again"])
def test_calls_of_a_lost_program_wait_for_no_other_one(place, how):
    """A rollout and its end would wait for its start."""
    place.join(LIMITS)
    place.actor.is_there, place.actor.num_starts = how == "again", 2
    waiting = place.call([Remove(0)]), place.leave(abort=False)
    assert all(isinstance(f.exception(0), ProgramLost) for f in waiting)
    with pytest.raises(ProgramLost):
        place.gradients(PARAMS, 0, {}, {})
    assert len(place.actor.calls) == 1


@pytest.mark.fault
def test_a_worker_gets_the_newest_drafter_in_each_session(place, monkeypatch):
    """Also if the call with it failed, or a program that is not prepared took its place."""
    monkeypatch.setattr(
        place._shared, "drafter", lambda have: None if have == 3 else (3, "weights")
    )
    for _ in range(2):
        place.join(LIMITS)
        sent = [place.call([]) and place.actor.calls[-1][1][-1] for _ in range(2)]
        assert sent == [(3, "weights"), None]


def test_hidden_states_reach_the_sink_of_their_step(place):
    """The first two steps of a pipeline have the same policy."""
    sinks = [Sink() for _ in range(4)]
    place.join(LIMITS)
    for step, sink in enumerate(sinks):
        place.call([Prepare(step, spec_of(sink), 0)])
    numbers = [args[0][0].spec.sink for method, args, *_ in place.actor.calls if method == "step"]
    states = HiddenStates(np.zeros(3, np.int32), 1, np.zeros((2, 4), np.float32), 0)
    place.actor.answer(reply(states=[(numbers[3], states), (numbers[2], states)]))
    assert [len(sink.got) for sink in sinks] == [0, 0, 1, 1]


@pytest.mark.fault
def test_a_program_that_cannot_prepare_is_given_up(place):
    """It would try again for as long as the run lasts."""
    bounds, measured = object(), Measured("{}", "", 0.0)
    place.prepare(bounds, None)
    place.actor.answer(measured)
    assert place.is_ready and place.may_return
    place.actor.num_starts = 2  # it was lost
    assert not place.is_ready
    place.actor.calls[-1][-1].set_exception(ProgramLost("and again"))
    assert not place.is_ready and len(place.actor.calls) == 3
    place.actor.calls[-1][-1].set_exception(MemoryError("no room"))
    assert not place.is_ready and not place.may_return
    assert not place.is_ready and len(place.actor.calls) == 3
    assert place.said == ["worker 0 cannot prepare, and is given up: MemoryError: no room"]


def test_drafts_of_a_rollout_have_one_name_and_are_not_kept(place):
    """They have the history of its prompts."""

    class Drafts(StepDrafts):
        def __init__(self):
            object.__setattr__(self, "keys", ())

    first, second = Drafts(), Drafts()
    name = place._shared._name
    assert name(first) == name(first) != name(second) == name(second)
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None

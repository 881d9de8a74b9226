"""A run in a worker's program: what it is given in which order, and what it says of it."""

import contextlib
import time

import numpy as np
import pytest
import rollouts
from tiny_team import CONFIG, KEY, MODEL, PARAMS, REQUESTS, SAMPLING, STOP

from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from rl.remote.messages import Job
from rl.remote.run_messages import Answered, ChunkEnded, Copied, Dropped, Give, Parked
from rl.remote.worker_run import WorkerRun
from rl.trajectory import PartialRequest
from sched.request import COPIES

LIMIT_S = 60.0
FIRST, SECOND = REQUESTS[:2]


def job():
    key = np.zeros(2, np.uint32)
    return Job("a", 1, SAMPLING, key, STOP, 0, 4, 32, 128, None, None, None)


def spec():
    return contextlib.nullcontext(RolloutSpec(PARAMS, SAMPLING, KEY, STOP))


@pytest.fixture(scope="module")
def engine():
    return Engine(MODEL, CONFIG)


@pytest.fixture(scope="module")
def alone(engine):
    done = rollouts.run(engine, PARAMS, REQUESTS, SAMPLING, KEY, STOP)
    return {t.request_id: t for t in done}


@pytest.fixture
def run(engine):
    made = WorkerRun(1, job(), engine, spec)
    yield made
    assert made.abort(LIMIT_S) or not made._thread.ident


def give(run, *starts, closed=False, **news):
    run.give(Give(1, starts, news.pop("grants", {}), closed, **news))


def events(run, until):
    """What is told, up to the first event of a kind; with None up to the end of the run."""
    found, until_s = [], time.monotonic() + LIMIT_S
    while not any(isinstance(e, until) for e in found) if until else True:
        assert time.monotonic() < until_s
        report = run.report(0.05)
        found += report.events
        if report.stats is not None:
            break
    return found


def answered(found):
    return [e.trajectory.request_id for e in found if isinstance(e, Answered)]


def test_what_is_dropped_ends_and_that_is_said(run, alone):
    give(run, PartialRequest(FIRST, max_tokens=2), PartialRequest(SECOND))
    run.start()
    assert ChunkEnded(FIRST.request_id, 2) in events(run, ChunkEnded)
    give(run, drops=(FIRST.request_id,))  # instead of a grant, which is waited for
    found = events(run, Dropped)
    left = [e.request_id for e in found if isinstance(e, Parked)]
    assert left == [FIRST.request_id]
    assert found.index(Dropped(FIRST.request_id)) > [type(e) for e in found].index(Parked)
    give(run, closed=True)
    found += events(run, None)
    assert answered(found) == [SECOND.request_id]
    (got,) = [e.trajectory for e in found if isinstance(e, Answered)]
    assert got.response_ids.tolist() == alone[SECOND.request_id].response_ids.tolist()


@pytest.mark.parametrize("together", [True, False])
def test_a_number_that_is_dropped_may_be_given_again(run, alone, together):
    """What is said before the drop is of the first one, what comes behind it of the second."""
    number = FIRST.request_id
    give(run, PartialRequest(FIRST, max_tokens=2))
    if together:
        give(run, PartialRequest(FIRST), drops=(number,), closed=True)
        run.start()
    else:
        run.start()
        events(run, ChunkEnded)
        give(run, drops=(number,))
        give(run, PartialRequest(FIRST), closed=True)
    found = events(run, None)
    at = found.index(Dropped(number))
    assert answered(found[:at]) == [] and answered(found[at:]) == [number]
    (got,) = [e.trajectory for e in found if isinstance(e, Answered)]
    assert got.response_ids.tolist() == alone[number].response_ids.tolist()


def test_a_grant_of_what_was_dropped_is_not_that_of_its_successor(run):
    number = FIRST.request_id
    give(run, PartialRequest(FIRST, max_tokens=2))
    run.start()
    events(run, ChunkEnded)
    give(run, drops=(number,))
    events(run, Dropped)
    give(run, PartialRequest(FIRST, max_tokens=2))
    assert events(run, ChunkEnded) == [ChunkEnded(number, 2)]
    assert run.report(0.2).events == (), "it waits for a grant of its own"
    give(run, grants={number: 99}, closed=True)
    assert answered(events(run, None)) == [number]


def test_copies_of_what_runs_are_handed_over_and_it_goes_on(run, alone):
    number = FIRST.request_id
    give(run, PartialRequest(FIRST, max_tokens=4))
    run.start()
    events(run, ChunkEnded)
    asked = ((number, number + COPIES), (SECOND.request_id, SECOND.request_id + COPIES))
    give(run, grants={number: 99}, copies=asked)
    found = events(run, Copied)
    while sum(isinstance(e, Copied) for e in found) < 2:
        found += events(run, Copied)
    give(run, closed=True)
    found += events(run, None)
    copies = {e.number: e for e in found if isinstance(e, Copied)}
    missing = copies[SECOND.request_id + COPIES]
    assert (missing.prefix, missing.kv) == (None, None), "it is not here"
    copy, wanted = copies[number + COPIES], alone[number].response_ids
    tokens = copy.prefix.response_ids.tolist() if copy.prefix is not None else []
    assert tokens == wanted[: len(tokens)].tolist() and len(tokens) >= 4
    assert copy.kv.num_tokens == len(FIRST.prompt_ids) + len(tokens) - 1
    assert answered(found) == [number]


def test_who_waits_for_requests_hears_of_drops(run):
    """A worker that has nothing to do says at once that a drop is done."""
    run.start()
    time.sleep(0.1)  # it waits by now
    give(run, drops=(7,), copies=((7, 7 + COPIES),))
    dropped, copied = events(run, Copied)
    assert dropped == Dropped(7)
    assert (copied.number, copied.prefix, copied.kv) == (7 + COPIES, None, None)

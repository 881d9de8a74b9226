"""The driver, over workers whose calls end in any order."""

import collections
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manual_workers import arrays, manual_driver

from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.rl.runtime.waits import ProgramLost
from reprise.rl.workers.messages import Deferred, Returned, WorkerError
from reprise.sched.policies.divided import make_scheduler
from reprise.sched.policies.fastest_of_n import FastestOfN
from reprise.sched.policies.histopipe import HistoPipe, HistoPipeConfig
from reprise.sched.policies.steps import Ahead, StepOrder
from reprise.sched.protocol import ChunkDone, Copy, Drop, Start, WorkerLost
from reprise.sched.request import Kv
from reprise.spec.config import SamplingConfig

SPEC = RolloutSpec(None, SamplingConfig(max_new_tokens=40), None)
CHUNK = 4


def requests_of(count, first=0):
    return [Request(first + i, (1, 2), (first + i) // 4, i % 4) for i in range(count)]


def results_of(driver):
    found = []
    while (result := driver.next_result(0.0)) is not None:
        found.append(result)
    return found


def play(driver, places, choose, submitted, losses=0, on_result=lambda result: None):
    """Run calls as `choose` picks them until all requests are answered; return the results."""
    done = collections.Counter()
    for _ in range(20_000):
        driver.run_once(0.0)
        for result in (results := results_of(driver)):
            on_result(result)
            if isinstance(result, Trajectory):
                done[result.request_id] += 1
                ids, *_ = arrays(SimpleNamespace(request_id=result.request_id), result.num_tokens)
                assert result.response_ids.tolist() == ids.tolist()
        if len(done) == len(submitted):
            break
        waiting = [place for place in places if place.calls]
        if results and not waiting:
            continue  # another step was submitted
        assert waiting, "requests wait, and nothing runs"
        place = waiting[choose(len(waiting))]
        if losses and choose(20) == 0:
            losses -= 1
            place.lose()
        else:
            place.run()
    assert set(done) == {r.request_id for r in submitted} and set(done.values()) == {1}
    table = driver._driver.requests
    assert table.num_bytes == 0 and not len(table) and not table._tickets
    return done


def scheduler_of(policy):
    return make_scheduler(policy, seed=0, chunk_tokens=CHUNK)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["group_fifo", "divided_fifo", "seer", "copies"]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([0, 100, 2**30]),
    st.integers(0, 2**32 - 1),
)
def test_each_request_is_answered_once_and_whole(policy, count, losses, pool_bytes, seed):
    """Whatever the order of reports, the losses, and the room for keys and values."""
    rng = np.random.default_rng(seed)
    requests = requests_of(24)
    lengths = rng.integers(1, 30, len(requests)).tolist()
    scheduler = scheduler_of("seer" if policy == "copies" else policy)
    if policy == "copies":
        scheduler = FastestOfN(scheduler, num_methods=2, max_copies=3, worth=lambda *_: True)
    driver, places = manual_driver(scheduler, lengths, count, pool_bytes=pool_bytes)
    driver.submit(0, SPEC, requests)
    play(driver, places, lambda n: int(rng.integers(n)), requests, losses=losses)
    stats = driver.stats(0)
    assert stats.tokens >= sum(lengths) and driver.num_tokens(0) == stats.tokens


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["one_step_off", "histopipe"]), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_steps_of_a_pipeline_are_answered_once_and_whole(policy, count, seed):
    """Also requests that HistoPipe defers into the next step."""
    rng = np.random.default_rng(seed)
    steps = [requests_of(16, 16 * s) for s in range(3)]
    lengths = rng.integers(1, 30, 48).tolist()
    past = {g: tuple(rng.integers(1, 30, 4).tolist()) for g in range(12)}
    scheduler = StepOrder(scheduler_of("seer"), "one_step_off")
    if policy == "histopipe":
        scheduler = HistoPipe(HistoPipeConfig(3, check_tokens=CHUNK, epoch_prompts=4))
    driver, places = manual_driver(scheduler, lengths, count)
    missing = [len(step) for step in steps]
    step_of = {r.request_id: s for s, step in enumerate(steps) for r in step}
    trained = [0]

    def note(result):
        step = step_of[result.request_id]
        missing[step] -= 1
        if isinstance(result, Deferred):
            missing[step + 1] += 1
            step_of[result.request_id] += 1
        while trained[0] < 3 and not missing[trained[0]]:
            driver.trained(trained[0])
            trained[0] += 1
            if trained[0] + 1 < 3:
                driver.submit(trained[0] + 1, SPEC, steps[trained[0] + 1], past)

    for s in range(2):
        driver.submit(s, SPEC, steps[s], past)
    play(
        driver,
        places,
        lambda n: int(rng.integers(n)),
        [r for s in steps for r in s],
        on_result=note,
    )


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 200),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
def test_requests_begun_ahead_come_back_whole_or_as_far_as_they_came(
    count, num_calls, is_helping, losses, seed
):
    """Also if workers are lost, and idle ones answer others' requests again."""
    rng = np.random.default_rng(seed)
    now, ahead = requests_of(8), requests_of(8, 8)
    lengths = rng.integers(1, 30, 16).tolist()
    present = scheduler_of("seer")
    if is_helping:
        present = FastestOfN(present, num_methods=2, max_copies=3, worth=lambda *_: True)
    scheduler = Ahead(present, chunk_tokens=CHUNK)
    driver, places = manual_driver(scheduler, lengths, count, has_steps_apart=True)
    driver.submit(0, SPEC, now)
    driver.submit(1, SPEC, ahead, is_ahead=True, oldest=0)
    choose, came = (lambda n: int(rng.integers(n))), dict[int, int]()
    answered, left = set[int](), [losses]

    def take():
        driver.run_once(0.0)
        for result in results_of(driver):
            if isinstance(result, Returned):
                number, tokens = result.partial.request.request_id, result.partial.num_tokens
            else:
                number, tokens = result.request_id, result.num_tokens
                assert tokens == lengths[number]
            (answered.add(number) if number < 8 else came.update({number: tokens}))

    def run_one():
        take()
        waiting = [place for place in places if place.calls]
        if waiting:
            place = waiting[choose(len(waiting))]
            if left[0] and choose(20) == 0:
                left[0] -= 1
                place.lose()
            else:
                place.run()

    while len(answered) < 8 or num_calls > 0:
        run_one()
        num_calls -= 1
    driver.recall()
    for _ in range(200):
        run_one()
    assert answered == set(range(8)) and set(came) == set(range(8, 16))
    assert not len(driver._driver.requests)


def one(actions):
    """A scheduler that returns the next of these lists of actions for each event."""
    left = iter(actions)
    return SimpleNamespace(handle=lambda event, now_s: next(left, ()), num_unfinished=1)


def begin(number, worker, chunk=1, tokens=4, kv=Kv.PREFILL):
    return Start(number, worker, chunk, tokens, 0, kv)


def test_a_start_elsewhere_waits_for_the_state_that_leaves():
    """Its keys and values come with the start, once the first worker has returned them."""
    moved = begin(0, 1, 2, kv=Kv.POOL)
    driver, (first, second) = manual_driver(one([[], [], [begin(0, 0)], [moved]]), [9], 2)
    driver.submit(0, SPEC, requests_of(1))
    driver.run_once(0.0)
    for _ in range(4):
        assert not second.calls
        first.run()  # rounds; the last one ends the chunk
        driver.run_once(0.0)
    assert not second.calls, "it is not there yet"
    first.run()
    driver.run_once(0.0)
    assert driver._driver.requests.num_bytes == 0
    second.run()
    assert [row.tokens for row in second.worker.engine.rows.values()] == [5]


@pytest.mark.fault
def test_a_start_whose_state_is_lost_computes_it_again():
    """The tokens that the lost worker had reported are generated again."""
    moved = begin(0, 1, 2, kv=Kv.POOL)
    driver, (first, second) = manual_driver(one([[], [], [begin(0, 0)], [moved]]), [9], 2)
    driver.submit(0, SPEC, requests_of(1))
    driver.run_once(0.0)
    for _ in range(4):
        first.run()
        driver.run_once(0.0)
    first.lose()
    driver.run_once(0.0)
    second.run()
    [row] = second.worker.engine.rows.values()
    assert row.partial.prefix is None and row.until == 8


def test_events_of_a_dropped_request_are_ignored():
    """Also if its number was given again meanwhile."""
    copy = begin(2**58, 1)
    driver, (first, second) = manual_driver(
        one([[], [], [begin(0, 0)], [Copy(0, 0, copy)], [Drop(2**58, 1)]]), [9], 2
    )
    driver.submit(0, SPEC, requests_of(1))
    driver.run_once(0.0)
    driver.trained(0)  # any event: the copy is asked for
    driver.run_once(0.0)
    first.run()
    driver.run_once(0.0)
    first.run()  # the state of the copy
    driver.run_once(0.0)
    second.run()
    driver.trained(1)  # it is dropped
    driver.run_once(0.0)
    while second.calls:
        second.run()
        driver.run_once(0.0)
    assert not second.worker.engine.rows
    chunks = [d.event for d in driver.decisions if isinstance(d.event, ChunkDone)]
    assert not chunks and list(driver._driver.requests._live) == [0]


@pytest.mark.fault
def test_the_last_worker_s_error_ends_the_session():
    driver, [place] = manual_driver(scheduler_of("seer"), [9] * 4, 1)
    driver._driver._can_restart = False
    driver.submit(0, SPEC, requests_of(4))
    driver.run_once(0.0)
    place.lose()
    with pytest.raises(WorkerError, match=r"worker 0 failed on requests 0, 1, 2, 3: .*gone"):
        driver.run_once(0.0)


@pytest.mark.fault
def test_a_worker_that_fails_again_and_again_is_not_replaced():
    driver, places = manual_driver(scheduler_of("group_fifo"), [9] * 4, 1)
    driver.submit(0, SPEC, requests_of(4))
    with pytest.raises(WorkerError, match="a device is gone"):
        for _ in range(10):
            driver.run_once(0.0)
            places[0].lose()
    lost = [d.event for d in driver.decisions if isinstance(d.event, WorkerLost)]
    assert lost == [WorkerLost(0), WorkerLost(1), WorkerLost(2)]


@pytest.mark.fault
def test_a_worker_that_is_given_up_is_no_end_while_others_are_there():
    driver, (first, second) = manual_driver(scheduler_of("divided_fifo"), [9] * 4, 2)
    driver._driver._can_restart = False
    first.may_return = False  # its actor is given up, as its calls fail
    driver.submit(0, SPEC, requests_of(4))
    driver.run_once(0.0)
    first.is_ready = False
    first.lose(ProgramLost("it is given up"))
    play(driver, [second], lambda n: 0, requests_of(4))
    second.is_ready = False
    driver.submit(1, SPEC, requests_of(4))
    driver.run_once(0.0)
    second.lose(ProgramLost("it is given up, too"))
    with pytest.raises(WorkerError, match="given up, too"):
        driver.run_once(0.0)


@pytest.mark.fault
def test_tokens_that_were_lost_count_where_a_request_is_released():
    """A worker lost four tokens of it; the next one is called back after one."""
    driver, (first, second) = manual_driver(
        Ahead(scheduler_of("seer"), chunk_tokens=CHUNK), [30, 30], 2, has_steps_apart=True
    )
    second.is_ready = False
    driver.submit(0, SPEC, requests_of(1), is_ahead=True)
    driver.run_once(0.0)
    for _ in range(CHUNK):
        first.run()
        driver.run_once(0.0)
    first.is_ready, second.is_ready = False, True
    first.lose()
    driver.run_once(0.0)
    second.run()
    driver.run_once(0.0)
    driver.recall()
    while True:
        driver.run_once(0.0)
        if not second.calls:
            break
        second.run()
    [returned] = results_of(driver)
    assert isinstance(returned, Returned) and 0 < returned.partial.num_tokens < CHUNK


@pytest.mark.fault
def test_a_session_without_workers_to_come_ends():
    driver, [place] = manual_driver(scheduler_of("seer"), [9] * 4, 1)
    place.is_ready = False
    place.may_return = True
    driver.run_once(0.0)  # it may start
    place.may_return = False
    with pytest.raises(ProgramLost, match="no worker is there: worker 0 is given up"):
        driver.run_once(0.0)


@pytest.mark.fault
def test_an_error_at_the_end_of_a_session_is_raised():
    driver, [place] = manual_driver(scheduler_of("seer"), [], 1)

    def leave(*, abort):
        raise OSError("no way out")

    place.leave = leave
    with pytest.raises(OSError, match="no way out"), driver:
        pass


def test_requests_wait_until_a_worker_is_there():
    """HistoPipe gives a step's requests to workers that it knows."""
    driver, [place] = manual_driver(HistoPipe(HistoPipeConfig(1)), [3] * 4, 1)
    place.is_ready, place.may_return = False, True
    driver.submit(0, SPEC, requests_of(4))
    driver.run_once(0.0)
    place.is_ready = True
    play(driver, [place], lambda n: 0, requests_of(4))


@pytest.mark.fault
def test_a_loss_names_the_place_where_the_worker_was():
    """Its successor may be elsewhere by then."""
    driver, [place] = manual_driver(scheduler_of("seer"), [9] * 4, 1)
    driver.submit(0, SPEC, requests_of(4))
    driver.run_once(0.0)
    place.where = "there"
    place.lose()
    driver.run_once(0.0)
    assert [(e.kind, e.place) for e in driver.new_events()] == [
        ("joined", "here"),
        ("raised", "here"),
        ("joined", "there"),
    ]

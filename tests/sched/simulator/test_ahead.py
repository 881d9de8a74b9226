"""Training steps that are begun ahead, on a virtual clock: by hand."""

from __future__ import annotations

import pytest

from sched.policies.ahead import Ahead
from sched.policies.divided import Divided
from sched.policies.orders import Fifo
from sched.policies.step_order import StepOrder
from sched.request import RequestSpec
from sched.simulator.ahead import AheadSimulation, BegunDrafts, BegunStart
from sched.simulator.cluster import Cluster, Simulation
from tests.support.steady_rounds import STEADY

LENGTHS = {0: 10, 1: 10, 2: 10, 3: 10}


def steps_of(*sizes):
    numbers = iter(range(sum(sizes)))
    return [
        [RequestSpec(n, n, 5, 100, step=step) for n in (next(numbers) for _ in range(size))]
        for step, size in enumerate(sizes)
    ]


def play(steps, stands, *, workers=1, train_s=5.0, lengths=LENGTHS):
    scheduler = Ahead(Divided(Fifo(), chunk_tokens=100), chunk_tokens=100)
    simulation = AheadSimulation(scheduler, Cluster(STEADY, workers, 8, 10**6), lengths)
    record = simulation.run_ahead(steps, [train_s] * len(steps), stands)
    return record, simulation


def test_an_update_leaves_time_to_begin_the_next_step():
    steps = steps_of(1, 1)
    sync = StepOrder(Divided(Fifo(), chunk_tokens=100), "sync")
    plain = Simulation(sync, Cluster(STEADY, 1, 8, 10**6), LENGTHS).run_steps(steps, [5.0] * 2)
    assert plain.trained_s == pytest.approx([16.0, 32.0])
    # its prompt takes a second of the five, and four tokens come; a pass verifies them
    record, simulation = play(steps, lambda request, begun: begun)
    assert record.trained_s == pytest.approx([16.0, 28.0])
    assert (simulation.begun_tokens, simulation.kept_tokens) == (4, 4)
    record, simulation = play(steps, lambda request, begun: 1)
    assert record.trained_s == pytest.approx([16.0, 31.0])
    assert record.tokens == 20 and simulation.kept_tokens == 1


def test_a_response_that_was_begun_whole_still_has_its_end_to_verify():
    record, simulation = play(steps_of(1, 1), lambda request, begun: begun, train_s=20.0)
    assert simulation.begun_tokens == 10 and simulation.kept_tokens == 9
    assert record.trained_s == pytest.approx([31.0, 31.0 + 2.0 + 20.0])


def test_workers_that_run_dry_begin_in_the_tail_and_yield():
    """Worker 1 has one request of two tokens; worker 0 goes on to its tenth."""
    lengths = {0: 10, 1: 2, 2: 10, 3: 10}
    record, simulation = play(
        steps_of(2, 2), lambda request, begun: begun, workers=2, lengths=lengths
    )
    # dry at 3: two prompts take a second each, and all tokens are there at 15, in the update
    assert (simulation.begun_tokens, simulation.kept_tokens) == (20, 18)
    assert record.trained_s == pytest.approx([16.0, 16.0 + 2.0 + 5.0])


def test_behind_the_first_difference_what_was_begun_drafts():
    """One of four begun tokens stands; those behind it are drafted two a round, all accepted."""
    scheduler = Ahead(Divided(Fifo(), chunk_tokens=4), chunk_tokens=100)
    rounds = BegunDrafts(STEADY, num_drafts=2, accepted=1.0)
    assert rounds.plan(0, (3, 1), 0.0).tokens_per_round == (1.0, 3.0)
    simulation = AheadSimulation(
        scheduler, Cluster(STEADY, 1, 8, 10**6), LENGTHS, round_model=rounds
    )
    record = simulation.run_ahead(steps_of(1, 1), [5.0] * 2, lambda request, begun: 1)
    # chunks of four: behind the one that stands one of them at three tokens a round, then plain
    assert record.trained_s == pytest.approx([16.0, 16.0 + 1.0 + 5 / 3 + 4.0 + 5.0])
    assert not rounds.drafting, "the text that was begun is used up"


@pytest.mark.parametrize(
    ("kept_tokens", "dropped_s"), [(0, 6.0), (4, 6.0), (6, 4.0), (7, 2.0), (8, 0.0), (20, 0.0)]
)
def test_seconds_of_begun_tokens_that_are_not_kept(kept_tokens, dropped_s):
    """Of the tokens 5, 6 and 7, each of which took 2 s."""
    assert BegunStart(5, 8, 6.0).dropped_s(kept_tokens) == pytest.approx(dropped_s)


@pytest.mark.parametrize("kept_tokens", [0, 5, 9])
def test_seconds_that_brought_no_token_are_all_dropped(kept_tokens):
    assert BegunStart(5, 5, 2.0).dropped_s(kept_tokens) == 2.0

"""Training steps on a virtual clock, in turn and begun ahead: by hand."""

from __future__ import annotations

import pytest

from benchmarks.simulator.steps import AheadSimulation, BegunDrafts, BegunStart, StepSimulation
from reprise.sched.policies.divided import Divided, Fifo
from reprise.sched.policies.group_fifo import GroupFifo
from reprise.sched.policies.histopipe import HistoPipe, HistoPipeConfig, Pace, tau_of
from reprise.sched.policies.steps import Ahead, StepOrder
from reprise.sched.request import RequestSpec
from reprise.sched.simulator.cluster import Cluster
from reprise.sched.simulator.measured_costs import MeasuredCosts
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
    plain = StepSimulation(sync, Cluster(STEADY, 1, 8, 10**6), LENGTHS).run_steps(steps, [5.0] * 2)
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


def test_steps_overlap_with_the_update_before_as_their_mode_says():
    steps = [[RequestSpec(number, number, 5, 100, step=number)] for number in range(3)]
    lengths = {0: 9, 1: 9, 2: 9}

    def run(mode):
        cluster = Cluster(STEADY, 1, 10, 1000)
        simulation = StepSimulation(StepOrder(GroupFifo(seed=0), mode), cluster, lengths)
        return simulation.run_steps(steps, [4.0] * 3)

    # a prefill and 9 rounds of a second each, then an update of four
    assert run("sync").trained_s == pytest.approx([14.0, 28.0, 42.0])
    assert run("one_step_off").trained_s == pytest.approx([14.0, 24.0, 34.0])


def test_histopipe_fills_up_what_one_step_leaves_empty():
    """Two workers, a long and a short group each step: together they have the same to do."""
    past, lengths, steps = {0: 10, 1: 30}, {}, []
    for number in range(4):
        requests = []
        for prompt, tokens in past.items():
            n = 2 * number + prompt
            lengths[n] = tokens
            requests.append(RequestSpec(n, n, 5, 100, None, (tokens,), number))
        steps.append(requests)

    def run(scheduler):
        return StepSimulation(scheduler, Cluster(STEADY, 2, 10, 1000), lengths).run_steps(
            steps, [0.0] * 4
        )

    barrier = run(StepOrder(GroupFifo(seed=0), "one_step_off"))
    piped = run(HistoPipe(HistoPipeConfig(4, num_ranking_groups=2)))
    assert barrier.trained_s == pytest.approx([31.0, 62.0, 93.0, 124.0])
    assert piped.trained_s == pytest.approx([31.0, 42.0, 73.0, 84.0])


def test_deferred_requests_count_for_the_next_step():
    requests = [
        [RequestSpec(2 * s + p, 2 * s + p, 5, 1000, None, (10 + 90 * p,), s) for p in range(2)]
        for s in range(2)
    ]
    lengths = {0: 10, 1: 500, 2: 10, 3: 100}
    simulation = StepSimulation(
        HistoPipe(HistoPipeConfig(2, num_ranking_groups=2)), Cluster(STEADY, 2, 10, 10**4), lengths
    )
    record = simulation.run_steps(requests, [0.0] * 2)
    assert record.deferred == 1
    # step 0 ends without request 1, which ran to 111 of its 500 tokens in 112 s
    assert record.trained_s[0] == pytest.approx(112.0)
    assert record.finish_s[1] == pytest.approx(record.trained_s[1]) and record.trained_s[1] > 500


@pytest.mark.parametrize(("request_s", "least_gain"), [(0.5, 1.5), (0.02, 1.0)])
def test_the_second_tier_fills_the_gaps_that_a_few_long_responses_leave(request_s, least_gain):
    """By the τ of a real run: from the seconds of rounds that an engine measured."""
    rounds = {(n, n, s): 0.5 + request_s * n for n in (1, 2, 4, 6, 8, 12, 16) for s in (64, 512)}
    costs = MeasuredCosts(rounds, {512: (1e-3, 1e-3)})
    lengths, steps = {}, list[list[RequestSpec]]()
    groups = (10, 15, 20, 30, 40, 60, 100, 250)
    for number in range(6):
        steps.append([])
        for tokens in [length for length in groups for _ in range(8)]:
            request = len(lengths)
            lengths[request] = tokens
            steps[-1].append(
                RequestSpec(request, request, 5, 800, past_tokens=(tokens,), step=number)
            )

    def seconds(tau):
        config = HistoPipeConfig(len(steps), num_ranking_groups=len(groups), tau=tau)
        simulation = StepSimulation(HistoPipe(config), Cluster(costs, 24, 64, 10**6), lengths)
        return simulation.run_steps(steps, [1.0] * len(steps)).trained_s[-1]

    one_tier = seconds(None)
    two_tiers = seconds(lambda: tau_of(costs.round_seconds, 10**6, 5, Pace()))
    assert one_tier / two_tiers >= least_gain

"""Training steps on a virtual clock, by hand."""

from __future__ import annotations

import pytest

from benchmarks.simulator.steps import StepSimulation
from sched.policies.group_fifo import GroupFifo
from sched.policies.histopipe import HistoPipe, HistoPipeConfig, Pace, tau_of
from sched.policies.steps import StepOrder
from sched.request import RequestSpec
from sched.simulator.cluster import Cluster
from sched.simulator.measured_costs import MeasuredCosts
from tests.support.steady_rounds import STEADY


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

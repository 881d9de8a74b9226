"""The simulator: by hand, against a loop over single rounds, and its books."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from sched.policies.divided import Divided
from sched.policies.group_fifo import GroupFifo
from sched.policies.histopipe import HistoPipe, HistoPipeConfig
from sched.policies.histopipe_allocation import Pace, tau_of
from sched.policies.orders import Fifo
from sched.policies.registry import POLICIES, make_scheduler
from sched.policies.step_order import StepOrder
from sched.protocol import Start, Submitted, WorkerJoined
from sched.request import Kv, RequestSpec
from sched.simulator.cluster import Cluster, Simulation
from sched.simulator.measured_costs import MeasuredCosts
from sched.simulator.roofline import Accelerator, Efficiency, Instance, ModelShape
from sched.simulator.worker import RoundModel, RoundPlan
from sched.simulator.workloads import Workload, draw_lengths, make_requests
from tests.support.steady_rounds import STEADY


def simulate(scheduler, requests, lengths, *, workers=1, kv_tokens=10**6, max_requests=100, **more):
    cluster = Cluster(more.pop("instance", STEADY), workers, max_requests, kv_tokens)
    return Simulation(scheduler, cluster, lengths, keep_samples=True, **more).run(requests)


def fifo(chunk=10**6):
    return Divided(Fifo(), chunk_tokens=chunk)


def test_rounds_of_a_second_each_by_hand():
    requests = [RequestSpec(0, 0, 5, 100), RequestSpec(1, 0, 5, 100), RequestSpec(2, 1, 5, 100)]
    record = simulate(fifo(), requests, {0: 10, 1: 4, 2: 7})
    # two prompts are computed, one after the other, before the first round; a group's once
    assert record.finish_s == pytest.approx({1: 6.0, 2: 9.0, 0: 12.0})
    assert record.tokens == 21 and record.completion_s == pytest.approx(12.0)
    assert record.workers[0].prefilled_tokens == 10
    assert record.idle_fraction == pytest.approx(0.0)
    assert record.tokens_per_s == pytest.approx(21 / 12)


def test_a_worker_that_has_nothing_left_is_idle():
    requests = [RequestSpec(0, 0, 5, 100), RequestSpec(1, 1, 5, 100)]
    record = simulate(fifo(), requests, {0: 9, 1: 4}, workers=2)
    assert record.finish_s == pytest.approx({1: 5.0, 0: 10.0})
    assert record.idle_fraction == pytest.approx(5 / 20)


def test_the_tail_is_when_only_the_last_tenth_runs():
    requests = [RequestSpec(i, i, 5, 1000) for i in range(20)]
    record = simulate(fifo(), requests, {i: 10 * (i + 1) for i in range(20)})
    assert record.tail_s == pytest.approx(20.0)  # from the 18th end to the 20th


def test_chunks_move_to_where_room_is_and_come_from_the_pool():
    requests = [RequestSpec(0, 0, 5, 100), RequestSpec(1, 1, 5, 100), RequestSpec(2, 2, 5, 100)]
    record = simulate(fifo(chunk=6), requests, {0: 20, 1: 3, 2: 20}, workers=2, kv_tokens=30)
    # the short one leaves its worker empty: one of the others moves there, and both stay
    assert record.migrations == 1
    assert sum(w.copied_tokens for w in record.workers) == 5 + 6
    assert sum(w.prefilled_tokens for w in record.workers) == 15


def test_without_room_the_latest_is_preempted_and_its_tokens_are_computed_again():
    requests = [RequestSpec(0, 0, 10, 100), RequestSpec(1, 1, 10, 100)]
    record = simulate(GroupFifo(seed=0), requests, {0: 30, 1: 30}, kv_tokens=50)
    # together they have 50 positions after 15 rounds each; then one waits for the other
    assert record.preemptions == 1
    assert record.workers[0].prefilled_tokens == 20 + 25
    ends = sorted(record.finish_s.values())
    # 2 prefills, 15 rounds, 15 of the first; a prefill, and 15 of the other
    assert ends == pytest.approx([2 + 30, 2 + 30 + 1 + 15])
    assert max(s.positions for s in record.samples) <= 50 + 1e-6


def test_lanes_run_at_their_own_speed():
    class TwoLanes(RoundModel):
        num_lanes = 2

        def lane(self, request_id, finished_siblings):
            return request_id

        def plan(self, worker_id, counts, positions):
            return RoundPlan(STEADY.round_cost(sum(counts)), (1.0, 2.5))

    requests = [RequestSpec(0, 0, 5, 100), RequestSpec(1, 0, 5, 100)]
    record = simulate(fifo(), requests, {0: 20, 1: 20}, round_model=TwoLanes(STEADY))
    assert record.finish_s == pytest.approx({1: 9.0, 0: 21.0})


def round_by_round(instance, requests, lengths, kv_tokens):
    """One worker that admits all at once, a round at a time: what the fluid stands for."""
    left, positions = dict(lengths), sum(a.prompt_tokens for a in requests)
    total = {a.request_id: a.prompt_tokens for a in requests}
    now_s = sum(instance.prefill_seconds(a.prompt_tokens) for a in requests)
    finish_s = {}
    while left:
        now_s += instance.round_seconds(len(left), positions)
        for number in list(left):
            left[number] -= 1
            total[number] += 1
            positions += 1
            if not left[number]:
                del left[number]
                positions -= total[number]
                finish_s[number] = now_s
    assert max(total.values()) < kv_tokens
    return finish_s


@pytest.mark.parametrize("seed", range(5))
def test_the_fluid_agrees_with_single_rounds(seed):
    rng = np.random.default_rng(seed)
    instance = Instance(
        Accelerator("mixed", 3000.0, 500.0, 1e9, 1e30, 1e30),
        ModelShape("mixed", 20.0, 100.0, 2, 0.5, float(rng.uniform(0.1, 3)), 0),
        1,
        Efficiency(1, 1, 0.01, 0, 1),
    )
    requests = [RequestSpec(i, i, 7, 1000) for i in range(12)]
    lengths = {i: int(n) for i, n in enumerate(rng.integers(1, 400, 12))}
    record = simulate(fifo(), requests, lengths, instance=instance)
    wanted = round_by_round(instance, requests, lengths, 10**6)
    assert record.finish_s == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_finishes_all_within_memory_and_repeats(name):
    workload = Workload(30, 4, 60, 400, prompt_tokens=10)
    lengths = draw_lengths(workload, seed=1)
    requests, by_number = make_requests(workload, lengths, known=True)

    def run():
        scheduler = make_scheduler(name, seed=3, chunk_tokens=50)
        return simulate(scheduler, requests, by_number, workers=3, kv_tokens=1000)

    record, again = run(), run()
    assert record.finish_s == again.finish_s
    assert record.finish_s.keys() == by_number.keys()
    assert record.tokens == sum(by_number.values())
    assert sum(w.tokens for w in record.workers) >= record.tokens - 1e-3
    assert max(s.positions for s in record.samples) <= 1000 + 1e-6
    assert (record.preemptions > 0) == (name == "group_fifo")


def test_a_scheduler_that_loses_requests_is_found():
    class Lazy:
        num_unfinished = 1

        def handle(self, event, now_s):
            return []

    with pytest.raises(RuntimeError, match="1 requests wait and nothing runs"):
        simulate(Lazy(), [RequestSpec(0, 0, 5, 10)], {0: 5})


def test_lengths_have_the_mean_that_was_asked_for_and_groups_are_alike():
    workload = Workload(400, 8, 500, 4000, sigma=0.9, group_share=0.8)
    lengths = draw_lengths(workload, seed=0)
    assert lengths.shape == (400, 8) and lengths.mean() == pytest.approx(500, rel=0.01)
    assert lengths.min() >= 1 and lengths.max() <= 4000
    logs = np.log(lengths)
    between = logs.mean(axis=1).var() - logs.var(axis=1, ddof=1).mean() / 8
    assert between / (between + logs.var(axis=1, ddof=1).mean()) == pytest.approx(0.8, abs=0.05)
    assert (draw_lengths(workload, seed=0) == lengths).all()
    assert (draw_lengths(workload, seed=1) != lengths).any()
    requests, by_number = make_requests(workload, lengths)
    assert [a.group_id for a in requests[:3]] == [0, 1, 2] and requests[0].expected_tokens is None
    assert by_number[8 * 5 + 3] == lengths[5, 3]
    assert collections.Counter(a.group_id for a in requests) == dict.fromkeys(range(400), 8)


@pytest.mark.parametrize(("mean", "limit", "share"), [(4000, 32768, 0.01), (22386, 65536, 0.033)])
def test_lengths_reach_their_limit_as_often_as_was_asked_for(mean, limit, share):
    workload = Workload(20_000, 8, mean, limit, group_share=0.5, limit_share=share)
    lengths = draw_lengths(workload, seed=0)
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert (lengths == limit).mean() == pytest.approx(share, rel=0.05)
    # the law is a lognormal below the limit: quantiles of log-lengths are those of a normal
    q10, q50, q90 = np.log(np.quantile(lengths, (0.1, 0.5, 0.9)))
    assert q90 - q50 == pytest.approx(q50 - q10, rel=0.03)


def test_impossible_workloads_are_refused():
    with pytest.raises(ValueError, match="limit_share < mean_tokens / limit_tokens"):
        Workload(1, 1, 5, 50, limit_share=0.1)
    with pytest.raises(ValueError, match="mean_tokens < limit_tokens"):
        Workload(1, 1, 50, 50)
    with pytest.raises(ValueError, match="group_share in 0"):
        Workload(1, 1, 5, 50, group_share=2)


def test_starts_without_a_reservation_wait_on_the_worker():
    scheduler = GroupFifo(seed=0)
    requests = tuple(RequestSpec(i, i, 40, 100) for i in range(3))
    scheduler.handle(WorkerJoined(0, 100, 10), 0.0)
    actions = scheduler.handle(Submitted(requests), 0.0)
    assert sorted(a.request_id for a in actions) == [0, 1, 2]
    assert all(isinstance(a, Start) and a.reserved_tokens == 0 for a in actions)
    assert {a.kv for a in actions} == {Kv.PREFILL}
    assert RoundModel(STEADY).plan(0, (2,), 5.0).tokens_per_round == (1.0,)


def test_ranks_read_the_experts_that_the_requests_of_their_instance_meet():
    shape = ModelShape("experts", 0.0, 100, 1, 1.0, 0.0, 0, 80, 4, 1)
    device = Accelerator("x", 1e30, 10.0, 1e6, 1e30)
    round_model = RoundModel(Instance(device, shape, 1, Efficiency(1, 1, 0, 0, 1), num_ranks=2))
    for worker_id, running in ((0, 1), (1, 3), (2, 5)):
        round_model.changed(worker_id, running)
    # ranks 0 and 1 are one instance: half of the experts that four requests meet
    assert round_model.plan(0, (1,), 0.0).cost(0.0) == pytest.approx((20 + 40 * (1 - 0.75**4)) / 10)
    round_model.changed(1, 0)
    assert round_model.plan(0, (1,), 0.0).cost(0.0) == pytest.approx((20 + 40 * 0.25) / 10)


# --- steps of training ------------------------------------------------------------------


def test_steps_overlap_with_the_update_before_as_their_mode_says():
    steps = [[RequestSpec(number, number, 5, 100, step=number)] for number in range(3)]
    lengths = {0: 9, 1: 9, 2: 9}

    def run(mode):
        cluster = Cluster(STEADY, 1, 10, 1000)
        simulation = Simulation(StepOrder(GroupFifo(seed=0), mode), cluster, lengths)
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
        return Simulation(scheduler, Cluster(STEADY, 2, 10, 1000), lengths).run_steps(
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
    simulation = Simulation(
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
        simulation = Simulation(HistoPipe(config), Cluster(costs, 24, 64, 10**6), lengths)
        return simulation.run_steps(steps, [1.0] * len(steps)).trained_s[-1]

    one_tier = seconds(None)
    two_tiers = seconds(lambda: tau_of(costs.round_seconds, 10**6, 5, Pace()))
    assert one_tier / two_tiers >= least_gain

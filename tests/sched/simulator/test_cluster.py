"""The simulator: by hand, against a loop over single rounds, and its books."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from reprise.sched.policies.divided import POLICIES, Divided, Fifo, make_scheduler
from reprise.sched.policies.group_fifo import GroupFifo
from reprise.sched.protocol import Start, Submitted, WorkerJoined
from reprise.sched.request import Kv, RequestSpec
from reprise.sched.simulator.cluster import Cluster, Simulation
from reprise.sched.simulator.roofline import Accelerator, Efficiency, Instance, ModelShape
from reprise.sched.simulator.worker import RoundModel, RoundPlan
from reprise.sched.simulator.workloads import Workload, draw_lengths, make_requests
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

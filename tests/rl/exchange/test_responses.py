"""Responses between processes, which threads play: who answers what, and what all hear."""

from __future__ import annotations

import dataclasses
import itertools
import os

import numpy as np
import pytest

from reprise.rl.cluster.processes import ALONE, Diverged, Processes
from reprise.rl.exchange import responses
from reprise.rl.exchange.responses import (
    UNSCORED,
    Part,
    Partition,
    PeerFailed,
    Responses,
    in_order,
    read_part,
)
from reprise.rl.records.stats import CachedCounts, EngineStats, PoolCounts, RoundRecord
from reprise.rl.records.trajectory import FinishReason, Request, Trajectory
from reprise.rl.rewards.process import RewardWorkerError
from reprise.rl.rewards.scores import Score
from reprise.rl.runtime.signals import Stopped
from reprise.spec.config import SamplingConfig
from tests.support.stores import play

GROUPS, SIZE = 5, 2


def requests(prompt: int = 7) -> list[Request]:
    own = SamplingConfig(temperature=0.5)
    return [
        Request(g * SIZE + i, (prompt, g), g, i, sampling=own if g == 1 else None)
        for i in range(SIZE)
        for g in range(GROUPS)
    ]


def response(r: Request) -> Trajectory:
    """As many tokens as its number says, and none of two alike."""
    n = 1 + r.request_id % 3
    logprobs = -np.arange(1, n + 1, dtype=np.float32) / (r.request_id + 2)
    return Trajectory(
        r.request_id,
        r.group_id,
        r.sample_index,
        np.asarray(r.prompt_ids, np.int32),
        np.arange(n, dtype=np.int32) + 10 * r.request_id,
        logprobs,
        np.full(n, 3, np.int32),
        np.full(n, r.request_id % 4, np.uint8),
        FinishReason.LENGTH if r.group_id == 2 else FinishReason.STOP,
        reward=r.request_id / 4,
        sampling=r.sampling,
        emission_logprobs=logprobs - 1,
    )


def counts(request_ids: list[int]) -> EngineStats:
    """The counts of a rollout of one round."""
    ids = np.array(request_ids, np.int64)
    record = RoundRecord(
        *(0.5, 1.5, 2.0, 2.5, 3.0, 4.0),
        num_slots=8,
        num_nodes=16,
        num_positions=64,
        request_ids_A=ids,
        cached_tokens_A=ids * 2,
        rounds_A=np.ones_like(ids),
        emitted_A=ids + 1,
        cached_nodes=3,
        prompt_tokens=9,
    )
    pool = PoolCounts(30, 20, 2)
    stats = EngineStats(1, len(ids), 9, 0, CachedCounts(2, 1, 10, 7), timeline=[record], pool=pool)
    stats.drafted_by_source[2], stats.accepted_by_source[2] = 6, 4
    stats.rounds[8, 16, 64] = 1
    return stats


def answered(own: list[Request], partition: Partition) -> Responses:
    ts = sorted((response(r) for r in own), key=lambda t: (t.group_id, t.sample_index))
    here = [partition.scores(t.group_id) for t in ts]
    failure = "digits/raised: ü"
    scores = [
        Score({"digits": t.reward, "other": None}, t.reward, failure if t.group_id == 3 else None)
        if mine
        else UNSCORED
        for t, mine in zip(ts, here, strict=True)
    ]
    texts = [f"ü{t.request_id}" if mine else "" for t, mine in zip(ts, here, strict=True)]
    ts = [dataclasses.replace(t, reward=s.total) for t, s in zip(ts, scores, strict=True)]
    return Responses(ts, scores, texts, counts([r.request_id for r in own]))


def exchanged(
    p: Processes, *, way: tuple[bool, bool] = (True, False), asked: list[Request] | None = None
):
    partition, asked = Partition(p, *way), asked or requests()
    own = [r for r in asked if partition.answers(r.group_id)]
    return partition.exchange("step 1", asked, lambda: answered(own, partition))


def same(one: Responses, other: Responses) -> bool:
    pairs = zip(one.trajectories, other.trajectories, strict=True)
    fields = [f.name for f in dataclasses.fields(Trajectory)]
    equal = all(np.array_equal(getattr(a, f), getattr(b, f)) for a, b in pairs for f in fields)
    return equal and one.scores == other.scores and one.texts == other.texts


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize(
    "way", [(True, False), (False, False), (True, True)], ids=["split", "all", "first"]
)
def test_all_processes_come_to_have_what_one_would(count: int, way: tuple[bool, bool]) -> None:
    """Where each answers its share, where all answer all, and where process 0 answers all."""
    whole = exchanged(ALONE)
    found = play(count, lambda p: exchanged(p, way=way))
    assert all(isinstance(one, Responses) and same(one, whole) for one in found)
    assert [t.dtype for t in found[0].trajectories[3].__dict__.values() if hasattr(t, "dtype")] == [
        t.dtype for t in whole.trajectories[3].__dict__.values() if hasattr(t, "dtype")
    ]


def test_counts_of_the_processes_add_up() -> None:
    first, second = play(2, exchanged)
    assert isinstance(first, Responses) and isinstance(second, Responses)
    for stats in (first.stats, second.stats):
        assert stats.tokens == GROUPS * SIZE
        assert stats.cached == CachedCounts(4, 2, 20, 14)
        assert stats.pool == PoolCounts(60, 40, 4)
        assert stats.rounds == {(8, 16, 64): 2}
        assert stats.drafted_by_source[2] == 12 and stats.accepted_by_source[2] == 8
        by_process = [sorted(r.request_ids_A.tolist()) for r in stats.timeline]
        assert sorted(itertools.chain(*by_process)) == list(range(GROUPS * SIZE))
        assert vars(stats.timeline[0]).keys() == vars(counts([1]).timeline[0]).keys()


def test_responses_of_two_passes_are_one() -> None:
    wanted = requests()
    first, second = ([r for r in wanted if (r.group_id > 2) == late] for late in (False, True))
    alone = Partition(ALONE)
    both = answered(first, alone) + answered(second, alone)
    whole = answered(wanted, alone)
    assert same(both, whole)
    assert both.stats.tokens == whole.stats.tokens and both.stats.fetches == 2


def test_a_failed_reward_makes_no_group_informative() -> None:
    rewards = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 1.0, (1, 1): 1.0, (2, 0): 1.0, (2, 1): 0.0}
    rows = []
    for (group, sample), reward in rewards.items():
        r = Request(2 * group + sample, (7,), group, sample)
        t = dataclasses.replace(response(r), reward=reward)
        failure = "f/raised: E" if (group, sample) == (2, 1) else None
        rows.append((t, Score({"f": reward}, reward, failure), ""))
    assert in_order(reversed(rows), EngineStats()).informative == {0}


def test_every_group_is_answered_by_one_and_nobody_has_many_more() -> None:
    for count in (1, 2, 3, 8):
        partition = [
            Partition(Processes(i, count, object() if count > 1 else None)) for i in range(count)
        ]  # type: ignore[arg-type]
        held = [[g for g in range(GROUPS) if one.answers(g)] for one in partition]
        assert sorted(itertools.chain(*held)) == list(range(GROUPS))
        assert max(map(len, held)) == partition[0].max_groups(GROUPS)


def test_process_0_answers_and_scores_all_where_it_speaks_for_workers() -> None:
    partition = [Partition(Processes(i, 3, object()), is_central=True) for i in range(3)]  # type: ignore[arg-type]
    assert [one.scores_any for one in partition] == [True, False, False]
    for one in partition:
        assert one.max_groups(GROUPS) == GROUPS
        assert {one.answers(g) for g in range(GROUPS)} == {one.processes.is_first}
    assert all(Partition(p).scores_any for p in (ALONE, partition[1].processes))


def test_who_has_other_prompts_is_named() -> None:
    found = play(3, lambda p: exchanged(p, asked=requests(prompt=8 if p.index == 2 else 7)))
    for one in found:
        assert isinstance(one, Diverged)
        assert str(one).startswith("step 1: process 2 differs in 10 of 10: request 0: ")


def test_a_token_of_another_kind_on_one_process_is_named() -> None:
    """Where one engine spans the processes: each has drawn all tokens itself."""

    def work(p: Processes) -> Responses:
        partition = Partition(p, splits=False)

        def answer() -> Responses:
            own = answered(requests(), partition)
            if p.index == 1:
                own.trajectories[4].response_ids[0] += 1
            return own

        return partition.exchange("step 9", requests(), answer)

    wrong = answered(requests(), Partition(ALONE)).trajectories[4].request_id
    for one in play(4, work):
        assert isinstance(one, Diverged)
        assert str(one).startswith(f"step 9: process 1 differs in 1 of 10: request {wrong}: ")


def test_a_stop_of_one_is_a_stop_of_all() -> None:
    def work(p: Processes) -> Responses:
        def answer() -> Responses:
            if p.index == 1:
                raise Stopped
            return answered([r for r in requests() if r.group_id % 3 == p.index], Partition(p))

        return Partition(p).exchange("step 1", requests(), answer)

    assert [type(one) for one in play(3, work)] == [Stopped, Stopped, Stopped]


def test_what_fails_in_one_ends_all_alike() -> None:
    def work(p: Processes) -> Responses:
        def answer() -> Responses:
            if p.index == 0:
                raise RewardWorkerError("no scorer starts")
            return answered([], Partition(p))

        return Partition(p).exchange("step 1", requests(), answer)

    first, second = play(2, work)
    assert isinstance(first, RewardWorkerError)
    assert isinstance(second, PeerFailed)
    assert str(second) == "process 0 failed: no scorer starts"


class Planted:
    def __reduce__(self):
        return os.getcwd, ()


@pytest.mark.parametrize("planted", [Planted(), Part(0.0, Planted())])
def test_a_part_calls_nothing_but_the_classes_of_responses(planted):
    with pytest.raises(
        responses.pickle.UnpicklingError, match="expected parts of responses, got posix.getc"
    ):
        read_part(responses.pickle.dumps(planted))
    with pytest.raises(
        responses.pickle.UnpicklingError, match="expected a part of responses, got dict"
    ):
        read_part(responses.pickle.dumps({}))

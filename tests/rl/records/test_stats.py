"""Counts of a phase and its written timeline, by hand."""

import dataclasses
import json

import numpy as np
import pytest

from reprise.rl.records.stats import (
    EngineStats,
    RoundRecord,
    host_share,
    joined,
    load_timeline,
    save_timeline,
    seconds_saved,
    speculation_metrics,
    tail_seconds,
    undisturbed,
)
from reprise.rl.reports import timeline_plot
from reprise.rl.runtime.run_files import TIMELINE_FILE
from reprise.spec.drafter import Source
from reprise.spec.round_times import RoundTimes


def record(began_s, nodes, ids, emitted):
    """A round of 10 s: 1 of prompts, 2 of drafting, 1 of the call, 5 of the device, 1 of commit."""
    marks = np.cumsum([began_s, 1, 2, 1, 5, 1]).astype(float).tolist()
    n, emitted_A = len(ids), np.array(emitted)
    rounds_A = np.ones(n, int) if nodes > 1 else emitted_A
    return RoundRecord(*marks, 4, 4 * nodes, 64, np.array(ids), np.full(n, 7), rounds_A, emitted_A)


def example():
    stats = EngineStats(tokens=20)
    stats.drafted_by_source[Source.GROUP], stats.accepted_by_source[Source.GROUP] = 8, 4
    stats.drafted_by_source[Source.OWN], stats.accepted_by_source[Source.OWN] = 2, 1
    stats.timeline += [
        record(0, 1, [5, 6, 9], [4, 4, 4]),
        record(10, 4, [5, 6, 9], [3, 1, 2]),
        record(20, 4, [6], [2]),
    ]
    return stats


def test_metrics_are_those_of_rounds_with_drafts():
    metrics = speculation_metrics(example())
    assert metrics == pytest.approx(
        {
            "spec/accept_rate": 5 / 10,
            "spec/tokens_per_round": 8 / 4,
            "spec/drafted_per_round": 10 / 4,
            "spec/speculated_fraction": 5 / 20,
            "spec/wasted_nodes": 5,
            "spec/draft_seconds": 4,
            "spec/verify_seconds": 10,
            "spec/host_share": 8 / 18,
            "spec/group/accept_rate": 4 / 8,
            "spec/group/speculated_fraction": 4 / 20,
            "spec/own/accept_rate": 1 / 2,
            "spec/own/speculated_fraction": 1 / 20,
        }
    )


def test_accepted_tokens_are_those_of_drafters():
    stats = example()
    stats.drafted_by_source[Source.CACHED] = stats.accepted_by_source[Source.CACHED] = 30
    times = RoundTimes({(4, 4, 64): 1.0})
    assert speculation_metrics(stats, times)["spec/accepted_tokens"] == 5


def test_seconds_saved_are_those_of_plain_rounds_less_those_of_rounds_with_drafts():
    """By hand: records of 10 s, of which 9 s after admission; plain rounds of 7 s."""
    stats, times = example(), RoundTimes({(4, 4, 64): 7.0, (4, 16, 64): 1.0})
    plain, all_three, alone = stats.timeline
    assert seconds_saved([all_three], times) == pytest.approx((3 + 1 + 2) / 3 * 7 - 9)
    assert seconds_saved([alone], times) == pytest.approx(2 * 7 - 9)
    assert seconds_saved([plain], times) == -2  # it drafted, and then verified nothing
    assert seconds_saved([], times) == 0
    # another row joins for the next round; of the prompt that it has now plain rounds have no less
    joined = dataclasses.replace(
        record(20, 4, [6, 8], [2, 0]), rounds_A=np.array([1, 0]), prompt_tokens=12
    )
    assert seconds_saved([joined], times) == pytest.approx(2 * 7 - (9 - 5) - 1)
    only_plain = RoundTimes({(4, 4, 64): 7.0})
    assert seconds_saved([joined], only_plain) == pytest.approx(2 * 7 - 9)
    metrics = speculation_metrics(stats, times)
    assert metrics["spec/seconds_saved"] == pytest.approx(14 - 9 + 14 - 9 - 2)
    assert metrics["spec/accepted_tokens"] == 5
    assert metrics.keys() - speculation_metrics(stats).keys() == {
        "spec/seconds_saved",
        "spec/disturbed_seconds",
        "spec/accepted_tokens",
    }
    stats.timeline.append(dataclasses.replace(all_three, cached_nodes=3))
    again = speculation_metrics(stats, times)["spec/seconds_saved"]
    assert again == metrics["spec/seconds_saved"], "cached responses are no drafts"


def test_the_tail_begins_with_the_end_of_nine_tenths_of_the_requests():
    assert tail_seconds(example().timeline) == 30 - 20, "the last of three is their tenth"
    rounds = [record(10 * i, 1, list(range(i, 20)), [1] * (20 - i)) for i in range(20)]
    assert tail_seconds(rounds) == 20, "each ends after 10 s more: the last two of twenty"
    assert tail_seconds([]) == tail_seconds(rounds[-1:]) == 0


def test_a_run_that_may_draft_says_what_looking_for_drafts_cost():
    stats = EngineStats(tokens=12)
    stats.timeline.append(record(0, 1, [1], [4]))
    metrics = speculation_metrics(stats, RoundTimes({}))
    assert metrics == {
        "spec/accepted_tokens": 0,
        "spec/seconds_saved": -2,
        "spec/disturbed_seconds": 0,
    }


def test_rounds_that_waited_for_a_program_have_no_part_in_any_price():
    stats, times = example(), RoundTimes({(4, 4, 64): 7.0, (4, 16, 64): 1.0})
    without = speculation_metrics(stats, times)
    plain, drafted, _ = stats.timeline
    waited = [slow(dataclasses.replace(r, num_compiled=2), 1000.0) for r in (plain, drafted)]
    stats.timeline += waited
    assert undisturbed(stats.timeline, times) == stats.timeline[:3]
    metrics = speculation_metrics(stats, times)
    for name in ("spec/seconds_saved", "spec/host_share", "spec/draft_seconds"):
        assert metrics[name] == without[name]
    assert metrics["spec/disturbed_seconds"] == 2 * 1010


def slow(r, more_s, phase="drafted_s"):
    """Return the round with one of its phases longer."""
    names = [name for name in vars(r) if name.endswith("_s")]
    late = names[names.index(phase) :]
    return dataclasses.replace(r, **{name: getattr(r, name) + more_s for name in late})


@pytest.mark.parametrize("phase", ["drafted_s", "called_s", "fetched_s", "ended_s"])
def test_a_pause_is_left_out_wherever_it_fell(phase):
    """Fetches take 9 s after admission."""
    rounds = [record(10 * i, 4, [5], [2]) for i in range(8)]
    assert len(undisturbed([*rounds, slow(rounds[0], 26.0, phase)])) == 9
    assert undisturbed([slow(rounds[0], 28.0, phase), *rounds]) == rounds


def test_a_longer_fetch_is_no_pause_and_rounds_of_other_kinds_are_compared_apart():
    short = [record(0, 1, [5], [1])] * 6
    long = slow(record(0, 1, [5], [16]), 100.0, "fetched_s")
    assert undisturbed([*short, long]) == [*short, long]
    others = [
        slow(dataclasses.replace(short[0], **more), 100.0)
        for more in ({"prompt_tokens": 9}, {"cached_in_chunks": 9}, {"cached_nodes": 2})
    ]
    assert undisturbed([*short, *others]) == [*short, *others]
    assert undisturbed([*short, slow(short[0], 100.0)]) == short


def test_a_lone_round_is_compared_with_its_measured_seconds_at_the_pace_of_the_others():
    plain, times = [record(0, 1, [5], [1])] * 6, RoundTimes({(4, 4, 64): 3.0, (4, 16, 64): 6.0})
    drafted = record(0, 4, [5], [2])  # 9 s where plain rounds take three times the table's
    for more_s, num_left in ((60.0, 7), (65.0, 6)):
        assert len(undisturbed([*plain, slow(drafted, more_s)], times)) == num_left
    assert len(undisturbed([*plain, slow(drafted, 1000.0)])) == 7, "nothing to compare it with"


def test_a_rollout_without_drafts_has_no_speculation_metrics():
    stats = EngineStats(tokens=12)
    stats.timeline.append(record(0, 1, [1], [4]))
    assert speculation_metrics(stats) == {}
    assert host_share([]) == 0.0


def test_a_written_timeline_comes_back_and_the_newest_stays(tmp_path):
    assert load_timeline(tmp_path) == (0, [])
    save_timeline(tmp_path, 1, example().timeline[:1])
    save_timeline(tmp_path, 2, example().timeline)
    step, rounds = load_timeline(tmp_path)
    assert step == 2 and [path.name for path in tmp_path.iterdir()] == [TIMELINE_FILE]
    for a, b in zip(rounds, example().timeline, strict=True):
        assert {k: np.asarray(v).tolist() for k, v in vars(a).items()} == {
            k: np.asarray(v).tolist() for k, v in vars(b).items()
        }


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 1, "rounds": [{"began_s": 0}]}', "{}"])
def test_a_foreign_timeline_is_named(tmp_path, text):
    (tmp_path / TIMELINE_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"timeline\.json is not a timeline that a run wrote"):
        load_timeline(tmp_path)


def test_the_file_is_strict_json(tmp_path):
    save_timeline(tmp_path, 3, example().timeline)
    rows = json.loads((tmp_path / TIMELINE_FILE).read_text())
    assert rows["rounds"][1]["emitted_A"] == [3, 1, 2]


def test_counts_of_rollouts_are_added():
    one, other = example(), EngineStats(fetches=3, tokens=5, prefilled_tokens=7)
    other.rounds[(4, 1, 64)] = 2
    other.cached.add(6, 4)
    assert joined([one]) is one
    total = joined([one, other])
    assert (total.fetches, total.tokens, total.prefilled_tokens) == (one.fetches + 3, 25, 7)
    assert total.rounds == one.rounds + other.rounds and len(total.timeline) == 3
    assert (total.drafted_nodes, total.accepted_tokens) == (10, 5)
    assert (total.cached.responses, total.cached.tokens, total.cached.kept_tokens) == (
        1,
        6,
        4,
    )
    assert one.tokens == 20 and other.tokens == 5 and len(one.timeline) == 3


def test_rounds_of_several_workers_are_sorted_by_their_start():
    one, other = EngineStats(tokens=1), EngineStats(tokens=2)
    one.timeline += [record(0, 1, [1, 2], [1, 1]), record(20, 1, [1], [1])]
    other.timeline += [record(5, 1, [3], [1]), record(25, 1, [2], [1])]
    stats = joined([one, other])
    assert [r.began_s for r in stats.timeline] == [0, 5, 20, 25]
    assert stats.tokens == 3
    # request 2 goes on at the other worker: it is alive in between
    times_s, heartbeat = timeline_plot.requests_alive(stats.timeline)
    assert times_s == [0, 5, 15, 30, 35]
    assert heartbeat == [2, 3, 2, 1, 0]

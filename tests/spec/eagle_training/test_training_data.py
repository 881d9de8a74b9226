"""The DataBuffer: what is evicted, what is drawn, random additions, threads, a checkpoint."""

from __future__ import annotations

import dataclasses
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from caught_by_hand import buffer, bytes_of, drawn, equal, held, lengths, mixed, sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.rl.checkpoint import contents
from reprise.spec.eagle.config import DataBufferConfig
from reprise.spec.eagle_training import training_data
from reprise.spec.eagle_training.training_data import RequestSample


def test_sequences_are_copied_and_cannot_be_written_to():
    kept, given_ = buffer(), sequence(6)
    kept.add(given_, 0)
    given_.tokens_T[:] = -1
    given_.hidden_TW[:] = -1
    [got] = drawn(kept, 1, 0, 0)
    assert equal(got, sequence(6))
    for array in (got.tokens_T, got.hidden_TW):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_every_size_is_wanted_before_the_first_sequence():
    kept = buffer(bytes_of(5))
    assert kept.wants(20, 0)  # 80 bytes of tokens
    kept.add(sequence(2), 0)
    assert not kept.wants(20, 0)


def test_another_width_or_dtype_is_refused_while_any_is_held():
    kept = buffer()
    kept.add(sequence(5), 0)
    with pytest.raises(ValueError, match="width 4 in float32, .* got width 8 in float32"):
        kept.add(sequence(5, width=8), 0)
    with pytest.raises(ValueError, match="got width 4 in bfloat16"):
        kept.add(sequence(5, dtype=jnp.bfloat16), 1)
    assert held(kept) == [(0, 5)] and kept.dropped == 0
    kept.drop_before(1)
    kept.add(sequence(5, width=8), 1)
    assert kept.num_bytes == sequence(5, width=8).num_bytes


def test_states_that_do_not_fit_their_tokens_are_refused():
    kept, given_ = buffer(), sequence(5)
    with pytest.raises(ValueError, match="states of 4 tokens .* got 3 and"):
        kept.add(dataclasses.replace(given_, hidden_TW=given_.hidden_TW[1:]), 0)
    with pytest.raises(ValueError, match="prompt of at most 5, got 4 and 6"):
        kept.add(dataclasses.replace(given_, prompt_tokens=6), 0)
    assert held(kept) == []


def test_configurations():
    with pytest.raises(ValueError, match="expected max_bytes >= 1, got 0"):
        DataBufferConfig(0)


# -- which requests are collected ------------------------------------------------------


def test_a_sample_of_requests_is_theirs_alone():
    def chosen(seed, step, share):
        return {r for r in range(2000) if r in RequestSample(seed, step, share)}

    some = chosen(1, 5, 0.25)
    assert some == chosen(1, 5, 0.25) and abs(len(some) - 500) < 80
    assert some < chosen(1, 5, 0.5), "those of a smaller share stay in a larger one"
    for other in (chosen(2, 5, 0.25), chosen(1, 6, 0.25)):
        assert abs(len(some & other) - 125) < 50, "drawn anew for each seed and step"
    assert len(chosen(1, 5, 1.0)) == 2000


def test_as_many_requests_are_collected_as_a_steps_part_of_the_buffer_holds():
    kept = buffer(40_000)  # a step's part: 20,000
    assert kept.share_for(1, 4, 50, 100) == 1.0, "4 · 50 · 100 bytes"
    assert kept.share_for(1, 8, 50, 100) == 0.5
    for length in (10, 20, 30):
        kept.add(sequence(length), 1)
    kept.add(sequence(5), 2)
    assert kept.share_for(1, 8, 50, 100) == 0.5, "the step itself does not count"
    assert kept.share_for(2, 20, 50, 100) == 0.5, "20 of step 1's mean of 20 tokens"
    assert kept.share_for(3, 20, 50, 100) == 1.0


# -- what is drawn ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_half_of_the_tokens_are_of_long_ones_of_the_step_before(seed):
    got = lengths(drawn(mixed(), 60, 2, seed))
    before, now = [n for n in got if n > 20], [n for n in got if n <= 20]
    assert len(set(got)) == len(got)
    assert sum(before[:-1]) < 30 <= sum(before), "the fewest that make half of 60"
    wanted = max(60 - sum(before), 0)
    assert sum(now[:-1]) < max(wanted, 1) and sum(now) >= min(wanted, 35)
    assert set(now) <= {4, 5, 6, 20}, "nothing of the step before that is as short"


def test_one_side_fills_up_the_other(monkeypatch):
    """Long ones first; those of the step before that are short come last."""
    got = lengths(drawn(mixed(), 10**6, 2, 0))
    assert sorted(got) == [4, 5, 6, 10, 20, 20, *range(30, 110, 10)]
    assert set(got[-2:]) == {10, 20}
    only_now = mixed()
    only_now.drop_before(2)
    assert sorted(lengths(drawn(only_now, 10**6, 2, 0))) == [4, 5, 6, 20]
    # at the beginning of a step nothing of it has finished, and any length is long
    got = lengths(drawn(mixed(), 200, 2 + 1, 0))
    assert set(got) <= {4, 5, 6, 20}
    monkeypatch.setattr(training_data, "LONG_SHARE", 0.0)
    kept = buffer()
    kept.add(sequence(50), 1)
    assert lengths(drawn(kept, 20, 2, 0)) == [50]


def test_neither_too_old_nor_of_later_steps():
    kept = buffer()
    for step in range(4):
        kept.add(sequence(10 + step), step)
    assert sorted(lengths(drawn(kept, 10**6, 2, 0))) == [12]
    assert sorted(lengths(drawn(kept, 10**6, 3, 0))) == [12, 13]
    assert drawn(kept, 10**6, 9, 0) == []
    assert drawn(kept, 0, 3, 0) == []


@pytest.mark.parametrize(("share", "from_before"), [(0.0, 0), (0.25, 25), (0.5, 50), (1.0, 100)])
def test_shares(share, from_before, monkeypatch):
    monkeypatch.setattr(training_data, "LONG_SHARE", share)
    kept = buffer()
    for name in range(200):
        kept.add(sequence(2, name=name), 1)
        kept.add(sequence(1, name=name), 2)
    got = lengths(drawn(kept, 100, 2, 0))
    assert got.count(2) * 2 == from_before + from_before % 2 and sum(got) in (100, 101)


@pytest.mark.statistical
def test_probs_are_lengths(monkeypatch):
    """First draws of lengths 10, 20, 30, 40 by multinomial counts; false alarm rate 1e-6.

    Each count is within z = 5.2 standard deviations with probability 1 − 2e-7, and there are four.
    """
    monkeypatch.setattr(training_data, "LONG_SHARE", 1.0)
    kept = buffer()
    for length in (10, 20, 30, 40):
        kept.add(sequence(length), 0)
    rng, rounds = np.random.default_rng(7), 4000
    first = [lengths(kept.sample(1, 1, rng))[0] for _ in range(rounds)]
    for length in (10, 20, 30, 40):
        p = length / 100
        assert abs(first.count(length) - rounds * p) < 5.2 * (rounds * p * (1 - p)) ** 0.5


class Slow:
    """The rules once more, by sorting everything at every addition."""

    def __init__(self, max_bytes):
        self.max_bytes, self.max_age = max_bytes, 1
        self.all, self.newest, self.count = [], -1, 0

    def add(self, length, step):
        self.newest = max(self.newest, step)
        self.count += 1
        newcomer = (step, length, self.count)
        self.all = [x for x in self.all if x[0] >= self.newest - self.max_age]
        everyone = sorted(
            [*self.all, newcomer], key=lambda x: (x[0], x[1] * (x[0] < self.newest), x[2])
        )
        while everyone and sum(bytes_of(x[1]) for x in everyone) > self.max_bytes:
            if everyone.pop(0) == newcomer:
                return False
        if step < self.newest - self.max_age:
            return False
        self.all = everyone
        return True


adds = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), max_size=40)


@settings(deadline=None)
@given(adds, st.integers(1, 2500))
def test_the_bound_holds_and_who_stays_is_who_should(added, max_bytes):
    kept, slow = buffer(max_bytes), Slow(max_bytes)
    for length, step in added:
        dropped, wanted = kept.dropped, kept.wants(length, step)
        stays = slow.add(length, step)
        kept.add(sequence(length), step)
        assert kept.dropped == dropped + (not stays)
        assert wanted == stays or kept.evicted + kept.num_sequences + kept.dropped == 1
        assert kept.num_bytes == sum(bytes_of(n) for _, n in held(kept)) <= max_bytes
        assert sorted(held(kept)) == sorted(x[:2] for x in slow.all)
    assert kept.num_sequences + kept.evicted + kept.dropped == len(added)


@settings(deadline=None)
@given(adds, adds, st.integers(1, 2500))
def test_additions_since_a_mark_can_be_undone(before, since, max_bytes):
    """And what had to go for it is there again."""
    kept = buffer(max_bytes)

    def add(pairs, first):
        for name, (length, step) in enumerate(pairs, first):
            kept.add(sequence(length, name), step)

    add(before, 0)
    kept.mark()
    was, num_bytes = kept.state(), kept.num_bytes
    for _ in range(2):  # a mark holds until the next
        add(since, 100)
        kept.undo()
        now = kept.state()
        arrays = [[x.tobytes() for x in s.pop("tokens") + s.pop("caught")] for s in (was, now)]
        assert arrays[0] == arrays[1] and was == now and kept.num_bytes == num_bytes
        was = kept.state()


@settings(deadline=None, max_examples=40)
@given(adds, st.integers(200, 2500), st.integers(0, 5), st.sampled_from([np.float32, jnp.bfloat16]))
def test_a_checkpoint_changes_nothing(tmp_path_factory, added, max_bytes, step, dtype):
    kept, other = buffer(max_bytes), buffer(max_bytes)
    for name, (length, s) in enumerate(added):
        kept.add(sequence(length, name, dtype), s)
    folder = tmp_path_factory.mktemp("host")
    contents.write_host(folder, contents.encode_host({"buffer": kept.state()}))
    other.add(sequence(3, 77, np.float16), 99)  # is gone afterwards
    other.load_state(contents.read_host(folder)["buffer"])
    for name in ("num_bytes", "num_sequences", "dropped", "evicted"):
        assert getattr(kept, name) == getattr(other, name)
    for _ in range(2):
        a, b = drawn(kept, 60, step, 5), drawn(other, 60, step, 5)
        assert len(a) == len(b) and all(map(equal, a, b))
        for both in (kept, other):  # and behaves as it would have
            both.add(sequence(12, 500, dtype), step)
    assert held(kept) == held(other)


def test_a_checkpoint_under_a_tighter_bound(monkeypatch):
    kept, tight = mixed(), buffer(2 * bytes_of(100))
    with monkeypatch.context() as younger:
        younger.setattr(training_data, "MAX_AGE_STEPS", 0)
        tight.load_state(kept.state())
    assert held(tight) == [(2, 4), (2, 20), (2, 5), (2, 6)]
    tight = buffer(bytes_of(100) + bytes_of(20))
    tight.load_state(kept.state())
    assert tight.num_bytes <= tight.config.max_bytes and held(tight)[-4:] == held(kept)[-4:]


def in_threads(work):
    errors = []

    def guarded(name):
        try:
            work(name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_several_threads():
    kept = buffer(20 * bytes_of(20))

    def work(name):
        rng = np.random.default_rng(name)
        for i in range(200):
            kept.add(sequence(int(rng.integers(1, 30)), name), i // 50)
            for got in kept.sample(50, i // 50, rng):
                assert equal(got, sequence(len(got.tokens_T), got.policy_version))

    in_threads(work)
    assert kept.num_sequences + kept.dropped + kept.evicted == 800
    assert kept.num_bytes == sum(bytes_of(n) for _, n in held(kept)) <= kept.config.max_bytes


def test_room_is_made_and_filled_under_one_lock(monkeypatch):
    kept, owned, seen = buffer(2 * bytes_of(10)), training_data._owned, []

    def noted(caught):
        seen.append((kept._lock.locked(), kept.num_bytes + bytes_of(10)))
        return owned(caught)

    monkeypatch.setattr(training_data, "_owned", noted)
    for name in range(4):
        kept.add(sequence(10, name), 0)
    assert len(seen) == 4
    assert all(locked and num_bytes <= 2 * bytes_of(10) for locked, num_bytes in seen)

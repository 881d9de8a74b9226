"""The DataBuffer under random additions, threads, and a checkpoint in between."""

import threading
import time

import jax.numpy as jnp
import numpy as np
from caught_by_hand import buffer, bytes_of, drawn, equal, held, mixed, sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.checkpoint import contents
from spec.eagle import data_buffer


class Slow:
    """The rules once more, by sorting everything at every addition."""

    def __init__(self, max_bytes, max_age):
        self.max_bytes, self.max_age = max_bytes, max_age
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
@given(adds, st.integers(1, 2500), st.integers(0, 2))
def test_the_bound_holds_and_who_stays_is_who_should(added, max_bytes, max_age):
    kept, slow = buffer(max_bytes, max_age_steps=max_age), Slow(max_bytes, max_age)
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
@given(adds, adds, st.integers(1, 2500), st.integers(0, 2))
def test_additions_since_a_mark_can_be_undone(before, since, max_bytes, max_age):
    """And what had to go for it is there again."""
    kept = buffer(max_bytes, max_age_steps=max_age)

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


def test_the_bound_holds_while_a_sequence_is_copied(monkeypatch):
    """Room is made before the copy."""
    kept, seen = buffer(3 * bytes_of(10)), []
    copy = np.array

    def watched(array, *args, **kwargs):
        seen.append(kept.num_bytes + bytes_of(10))
        return copy(array, *args, **kwargs)

    monkeypatch.setattr("spec.eagle.data_buffer.np.array", watched)
    for _ in range(5):
        kept.add(sequence(10), 0)
    assert len(seen) == 10 and max(seen) == kept.config.max_bytes


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


def test_a_checkpoint_under_a_tighter_bound():
    kept, tight = mixed(), buffer(2 * bytes_of(100), max_age_steps=0)
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
    """Others come while a sequence is copied, and find the bound as tight as it is."""
    kept, owned, seen = buffer(2 * bytes_of(10)), data_buffer._owned, []

    def slowly(caught):
        time.sleep(0.001)
        return owned(caught)

    monkeypatch.setattr(data_buffer, "_owned", slowly)

    def work(name):
        for _ in range(10):
            kept.add(sequence(10, name), 0)
            seen.append(kept.num_bytes)

    in_threads(work)
    assert max(seen) == 2 * bytes_of(10) and (kept.num_sequences, kept.evicted) == (2, 38)

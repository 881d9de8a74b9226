"""Deltas: hand-computed forms, round trips in every bit, and bytes that are none."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.rl.weights import delta

DTYPES = (np.uint8, np.uint16, np.uint32, np.uint64)


def words(values, dtype=np.uint16):
    return np.array(values, dtype)


def test_equal_arrays_have_an_empty_delta():
    a = words(range(100))
    assert delta.encode(a, a.copy()).size == 0
    delta.apply(a, np.empty(0, np.uint8))
    assert a.tolist() == list(range(100))
    empty = words([])
    assert delta.encode(empty, empty).size == 0


def test_gaps_by_hand():
    """Of 600 elements 3 and 4 change in their lower byte, 590 in the upper one alone."""
    old = np.full(600, 0x1234, np.uint16)
    new = old.copy()
    new[3], new[4], new[590] = 0x1235, 0x12FF, 0x0034
    expected = [1, 2, 0, 2, 0, 3, 0, 0x35, 0xFF]  # form, count, size of gaps, gaps, values
    expected += [1, 1, 0, 3, 0, 255, 255, 80, 0x00]  # 590 = 255 + 255 + 80
    assert delta.encode(old, new).tolist() == expected


def test_bitmap_and_all_bytes_by_hand():
    old = np.zeros(64, np.uint8)
    half = old.copy()
    half[::4] = 7  # 16 gaps and a header of four take more than a bitmap of 8 with one of two
    found = delta.encode(old, half).tolist()
    assert found == [2, 16, 0, *[0b00010001] * 8, *[7] * 16]
    every = np.arange(64, dtype=np.uint8) + 1
    assert delta.encode(old, every).tolist() == [3, *every.tolist()]


def test_a_block_that_did_not_change_takes_a_byte_a_plane():
    old = np.zeros(3 * delta.BLOCK, np.uint32)
    new = old.copy()
    new[delta.BLOCK] = 1
    assert delta.encode(old, new).tolist() == [*[0] * 4, 1, 1, 0, 1, 0, 0, 1, *[0] * 3, *[0] * 4]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_signs_of_zero_and_payloads_of_nan_survive(dtype):
    word = f"u{np.dtype(dtype).itemsize}"
    special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0], dtype).view(word)
    other_nan = special[2:3] | 1
    old = np.concatenate([special, other_nan, special])
    new = np.concatenate([other_nan, special[::-1], special])
    found = old.copy()
    delta.apply(found.view(dtype), delta.encode(old.view(dtype), new.view(dtype)))
    assert found.tolist() == new.tolist()


@st.composite
def changes(draw):
    """Two arrays, of sizes around those of blocks and chunks, that differ in a share of places."""
    dtype = draw(st.sampled_from(DTYPES))
    block = delta.BLOCK
    size = draw(st.sampled_from([0, 1, 7, 300, block - 1, block, block + 1, 64 * block + 5]))
    share = draw(st.sampled_from([0.0, 1e-4, 0.02, 0.3, 0.9, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
    new = old.copy()
    at = rng.random(size) < share
    most = draw(st.sampled_from([2, 200, 70_000]))  # how far values move: one byte, or more
    new[at] += rng.integers(0, most, at.sum()).astype(dtype)
    return old, new


@given(changes())
def test_round_trip_in_every_bit_and_idempotent(pair):
    old, new = pair
    encoded = delta.encode(old, new)
    assert encoded.size <= delta.most_bytes(old.size, old.itemsize)
    found = old.copy()
    for _ in range(2):
        delta.apply(found, encoded)
        assert np.array_equal(found, new)


@given(st.integers(0, 2**32), st.integers(0, 2**62), st.integers(1, 255))
def test_a_changed_byte_never_writes_outside(seed, place, mask):
    """It is refused, or writes some bytes of the array: the checksum is what tells."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 2**16, 700).astype(np.uint16)
    new = old.copy()
    new[rng.random(700) < 0.1] += 1
    encoded = delta.encode(old, new)
    encoded[place % encoded.size] ^= mask
    around = np.full(700 + 2000, 0xABCD, np.uint16)
    inside = around[1000:1700]
    inside[:] = old
    try:
        delta.apply(inside, encoded)
    except delta.DamagedDelta:
        pass
    assert (around[:1000] == 0xABCD).all() and (around[1700:] == 0xABCD).all()


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d[:-1],
        lambda d: np.append(d, np.uint8(0)),
        lambda d: np.full_like(d, 9),
        lambda d: d[:3],
    ],
)
def test_too_short_too_long_or_of_no_form(damage):
    old = np.zeros(500, np.uint16)
    new = old.copy()
    new[::3] += 1
    with pytest.raises(delta.DamagedDelta, match="expected a delta of 500 elements of 2 bytes"):
        delta.apply(old, damage(delta.encode(old, new)))


def test_more_elements_than_int32_counts():
    """Memory that nobody touches takes no room: a delta of the last of 131,073 blocks."""
    target = np.zeros(2**31 + 100, np.uint8)
    old, new = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    new[[0, 99]] = 5
    unchanged = np.zeros(2**31 // delta.BLOCK, np.uint8)
    delta.apply(target, np.concatenate([unchanged, delta.encode(old, new)]))
    assert target[-1] == 5 and target[2**31] == 5
    assert not target[:1000].any() and not target[-99:-1].any()

"""Packed rows: each entry is one of its source, each response token counts once."""

import collections
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.spec.eagle_training.training_data import HiddenStates, pack

WIDTH = 3


def sequence(name, length, prompt):
    """Token i of sequence n is 1000 n + i; its states are that number, its half, and a third."""
    tokens = 1000 * name + np.arange(length, dtype=np.int32)
    states = tokens[:-1, None] / np.arange(1, WIDTH + 1)
    return HiddenStates(tokens, prompt, states.astype(np.float32), 0)


def test_by_hand():
    sequences = [sequence(1, 5, 3), sequence(2, 3, 2), sequence(3, 6, 0)]
    [batch] = pack(sequences, 2, 8)
    assert batch.tokens_BT.tolist() == [
        [3000, 3001, 3002, 3003, 3004, 3005, 0, 0],
        [1000, 1001, 1002, 1003, 1004, 2000, 2001, 2002],
    ]
    assert batch.sequence_BT.tolist() == [[1] * 6 + [0] * 2, [1] * 5 + [2] * 3]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 4, 5, 0, 0], [0, 1, 2, 3, 4, 0, 1, 2]]
    # x_{t+2} of the response: from 3003 on all that have two before; 1003 and 1004; 2002
    assert batch.counts_BT.astype(int).tolist() == [
        [1, 1, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 1, 0, 0],
    ]
    assert batch.hidden_BTW[:, :, 0].tolist() == [
        [3000, 3001, 3002, 3003, 3004, 0, 0, 0],
        [1000, 1001, 1002, 1003, 0, 2000, 2001, 0],
    ]
    assert batch.hidden_BTW.dtype == np.float32 and batch.counts_BT.dtype == bool


def test_sequences_without_entries_that_count_take_no_room():
    """A prompt alone, two tokens, one token; and the windows of a prompt."""
    assert pack([sequence(1, 6, 6), sequence(2, 2, 1), sequence(3, 1, 1)], 2, 8) == []
    assert pack([], 2, 8) == []
    [batch] = pack([sequence(1, 20, 18)], 2, 8)
    assert batch.positions_BT[:, 0].tolist() == [12, 0] and batch.counts_BT.sum() == 2


def check(sequences, batches, num_rows, row_tokens):
    """Each counted entry is one of its source, at its position; returns how often tokens count."""
    by_name = {int(s.tokens_T[0]) // 1000: s for s in sequences}
    times = collections.Counter()
    for batch in batches:
        shape = (num_rows, row_tokens)
        for field in ("tokens_BT", "positions_BT", "sequence_BT", "counts_BT"):
            assert getattr(batch, field).shape == shape
        assert batch.hidden_BTW.shape == (*shape, WIDTH)
        padding = batch.sequence_BT == 0
        assert not batch.counts_BT[padding].any()
        assert not batch.hidden_BTW[padding].any() and not batch.positions_BT[padding].any()
        for b, t in zip(*np.nonzero(batch.counts_BT), strict=True):
            assert t + 2 < row_tokens
            assert len(set(batch.sequence_BT[b, t : t + 3].tolist())) == 1
            name, i = divmod(int(batch.tokens_BT[b, t]), 1000)
            source = by_name[name]
            assert source.prompt_tokens <= i + 2
            assert (batch.tokens_BT[b, t : t + 3] == source.tokens_T[i : i + 3]).all()
            assert (batch.hidden_BTW[b, t : t + 2] == source.hidden_TW[i : i + 2]).all()
            assert batch.positions_BT[b, t] == i
            times[name, i + 2] += 1
        for row, numbers in zip(batch.positions_BT, batch.sequence_BT, strict=True):
            for number in set(numbers.tolist()) - {0}:
                [at] = np.nonzero(numbers == number)
                assert (np.diff(at) == 1).all() and (np.diff(row[at]) == 1).all()
    return times


shapes = st.tuples(st.integers(1, 40), st.integers(0, 40))
many = st.lists(shapes.map(lambda s: (s[0], min(s))), max_size=25)


@settings(deadline=None)
@given(many, st.integers(1, 4), st.integers(3, 45))
def test_every_response_token_counts_exactly_once(drawn, num_rows, row_tokens):
    """Rows that are long enough, and shorter ones: windows overlap by what an entry needs."""
    sequences = [sequence(n, length, prompt) for n, (length, prompt) in enumerate(drawn, 1)]
    times = check(sequences, pack(sequences, num_rows, row_tokens), num_rows, row_tokens)
    should = {(n, i) for n, (length, p) in enumerate(drawn, 1) for i in range(max(p, 2), length)}
    assert set(times) == should and set(times.values()) <= {1}


def test_the_check_finds_faults():
    """Planted: an entry across two sequences, states of a neighbour."""
    sequences = [sequence(1, 5, 3), sequence(2, 5, 3)]
    [batch] = pack(sequences, 1, 12)
    assert sum(check(sequences, [batch], 1, 12).values()) == 4
    counts_BT, hidden_BTW = batch.counts_BT.copy(), batch.hidden_BTW.copy()
    counts_BT[0, 3], hidden_BTW[0, 6] = True, hidden_BTW[0, 5]
    for fault in ({"counts_BT": counts_BT}, {"hidden_BTW": hidden_BTW}):
        with pytest.raises(AssertionError):
            check(sequences, [dataclasses.replace(batch, **fault)], 1, 12)


def test_batches_have_long_and_short_rows():
    """Later batches have as many entries that count as the first."""
    sequences = [sequence(n, 3 + n, 0) for n in range(1, 61)]
    counted = [int(b.counts_BT.sum()) for b in pack(sequences, 6, 64)]
    assert len(counted) == 6 and max(counted) < 1.5 * min(counted)


def test_the_policys_dtype_is_kept():
    source = sequence(1, 5, 0)
    source = dataclasses.replace(source, hidden_TW=source.hidden_TW.astype(jnp.bfloat16))
    [batch] = pack([source], 1, 8)
    assert batch.hidden_BTW.dtype == jnp.bfloat16


def test_the_emptiest_rows_beyond_max_batches_are_left_out():
    sequences = [sequence(n, n, 2) for n in (9, 8, 7, 3)]
    [batch] = pack(sequences, num_rows=2, row_tokens=10, max_batches=1)
    assert sorted((batch.sequence_BT > 0).sum(axis=1).tolist()) == [9, 10]
    assert len(pack(sequences, num_rows=2, row_tokens=10)) == 2

"""Ends of responses against a reading of the whole text for every token."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.models.text.token_bytes import TokenBytes
from reprise.rl.slots.ending import Endings, padded_ids
from reprise.spec.config import SamplingConfig

PIECES = (b"a", b"b", b"ab", b"ba", b"", "ß".encode()[:1], "ß".encode()[1:], "😀".encode())
WORDS = TokenBytes(
    np.frombuffer(b"".join(PIECES), np.uint8), np.cumsum([0, *map(len, PIECES)], dtype=np.int64)
)
END, OUTSIDE = 3, 11  # an end token of all requests; a token beyond the tokenizer's
tokens_of = st.lists(st.integers(0, 11), max_size=12)
texts = st.lists(st.text("abß😀", min_size=1, max_size=4), max_size=4, unique=True)


def first_end(tokens, ids, stops):
    for n in range(1, len(tokens) + 1):
        text = b"".join(PIECES[i] for i in tokens[:n] if i < len(PIECES)).decode(errors="replace")
        if tokens[n - 1] in ids or any(stop in text for stop in stops):
            return n, True
    return len(tokens), False


@settings(max_examples=300, deadline=None)
@given(tokens=tokens_of, stops=texts, own=texts, cuts=st.integers(1, 5))
def test_a_response_ends_where_its_whole_text_first_holds_a_stop(tokens, stops, own, cuts):
    sampling = SamplingConfig(stop=tuple(stops), stop_ids=(OUTSIDE,))
    endings = Endings(sampling, (END,), WORDS)
    own_sampling = SamplingConfig(stop=tuple(own), stop_ids=(1,))
    wants = [
        first_end(tokens, (END, OUTSIDE), stops),
        first_end(tokens, (END, OUTSIDE, 1), [*stops, *own]),
    ]
    rules = np.array([endings.enter(None), endings.enter(own_sampling)], np.int32)
    for number, want in zip(rules.tolist(), wants, strict=True):
        assert endings.read(number, np.array(tokens, np.int32))[::2] == want
    # the same, a few tokens at a time, two rows together
    state_B = np.array([endings.read(r, np.empty(0, np.int32))[1] for r in rules], np.int32)
    stopped_B, total_B = np.zeros(2, bool), np.zeros(2, np.int32)
    for at in range(0, len(tokens), cuts):
        tokens_BN = np.array([tokens[at : at + cuts]] * 2, np.int32)
        count_B = np.where(stopped_B, 0, tokens_BN.shape[1]).astype(np.int32)
        endings.cut(tokens_BN, count_B, rules, state_B, stopped_B)
        total_B += count_B
    assert [(int(n), bool(s)) for n, s in zip(total_B, stopped_B, strict=True)] == wants


samplings = st.builds(
    lambda stop, ids, limit: SamplingConfig(stop=tuple(stop), stop_ids=ids, max_new_tokens=limit),
    texts,
    st.lists(st.integers(0, 11), max_size=2, unique=True).map(tuple),
    st.integers(1, 99),
)


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(st.tuples(samplings, tokens_of), min_size=1, max_size=12),
    row_of=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_rules_that_come_and_go_end_each_request_where_its_own_do(requests, row_of):
    """Four rows get a token at a time; a new request takes a row while the others go on."""
    endings, rows = Endings(SamplingConfig(), (END,), WORDS), {}
    rule_B, state_B = np.zeros(4, np.int32), np.zeros(4, np.int32)

    def advance():
        tokens_BN, count_B = np.zeros((4, 1), np.int32), np.zeros(4, np.int32)
        for b, (_, tokens, at, is_over) in rows.items():
            if at < len(tokens) and not is_over:
                tokens_BN[b], count_B[b] = tokens[at], 1
        stopped_B = np.zeros(4, bool)
        endings.cut(tokens_BN, count_B, rule_B, state_B, stopped_B)
        for b, row in rows.items():
            row[2:] = row[2] + int(count_B[b]), row[3] or bool(stopped_B[b])

    for (sampling, tokens), b in zip(requests, row_of, strict=False):
        if b in rows:
            endings.leave(int(rule_B[b]))
        rule_B[b], state_B[b] = endings.enter(sampling), 0
        rows[b] = [sampling, tokens, 0, False]
        advance()
    for _ in range(12):
        advance()
    for sampling, tokens, at, is_over in rows.values():
        assert (at, is_over) == first_end(tokens, (END, *sampling.stop_ids), sampling.stop)


def test_rules_take_the_memory_of_the_requests_that_run():
    """Ten thousand requests, ordinary stops with a limit of each, then other stops of each."""
    endings = Endings(SamplingConfig(), (END,), WORDS)
    rows = []
    sizes = []
    made = []
    for i in range(10_000):
        strings = ("\n\nQuestion:", "</answer>") if i < 9_900 else (f"{i}", "</answer>")
        rows.append(endings.enter(SamplingConfig(max_new_tokens=i + 1, stop=strings)))
        made.append(max(rows))
        if len(rows) > 8:
            endings.leave(rows.pop(0))
        sizes.append(endings.num_bytes)
    assert set(sizes[:9_900]) == {sizes[0]} and set(made[:9_900]) == {1}
    assert max(sizes) < 10 * sizes[0] and max(made) <= 10


def test_strings_need_the_text_of_tokens():
    with pytest.raises(ValueError, match="'x'.*expected a tokenizer"):
        Endings(SamplingConfig(stop=("x",)))
    endings = Endings(SamplingConfig())
    with pytest.raises(ValueError, match="'y'.*expected a tokenizer"):
        endings.enter(SamplingConfig(stop=("y",)))


def test_the_device_knows_the_ends_of_all_requests():
    sampling = SamplingConfig(stop_ids=(7,))
    assert not Endings(sampling, (END,)).unknown_to_device
    for change in ({"stop_ids": (7, 8)}, {"stop": ("a",)}):
        endings = Endings(sampling, (END,), WORDS)
        endings.enter(dataclasses.replace(sampling, **change))
        assert endings.unknown_to_device


def test_few_shapes_of_end_tokens():
    assert padded_ids((5, 2, 5)).tolist() == [2, 5, *[-1] * 6]
    assert len(padded_ids(())) == len(padded_ids(range(8))) == 8
    assert len(padded_ids(range(9))) == 16

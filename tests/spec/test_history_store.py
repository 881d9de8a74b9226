"""What prompts were answered last time: kept, capped, spilled, damaged, put into checkpoints."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.history_store import HistoryFileError, HistoryStore, Responses, decode, encode, of_group


def responses(seed, num=3, length=50):
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, 100, length + i).astype(np.int32) for i in range(num)]
    return of_group(tokens, [0.5, None, 1.0][:num])


def equal(a: Responses | None, b: Responses | None) -> bool:
    assert a is not None and b is not None
    same = [np.array_equal(x, y) for x, y in zip(a.tokens, b.tokens, strict=True)]
    return all(same) and a.rewards == b.rewards


@given(
    st.text(),
    st.lists(st.lists(st.integers(0, 2**31 - 1))),
    st.data(),
)
def test_a_blob_gives_back_what_it_was_made_of(key, lists, data):
    rewards = data.draw(
        st.lists(st.floats(allow_nan=False), min_size=len(lists), max_size=len(lists))
    )
    given_ = Responses(tuple(np.asarray(t, np.int32) for t in lists), tuple(rewards))
    assert equal(decode(encode(key, given_), key), given_)


def test_any_flipped_byte_is_found():
    blob = bytearray(encode("a", responses(0, num=1, length=5)))
    for i in range(len(blob)):
        blob[i] ^= 1
        with pytest.raises(HistoryFileError):
            decode(bytes(blob), "a")
        blob[i] ^= 1
    for cut in (0, 3, 11, len(blob) - 1):
        with pytest.raises(HistoryFileError):
            decode(bytes(blob[:cut]), "a")
    with pytest.raises(HistoryFileError, match="expected the history of 'b', got that of 'a'"):
        decode(bytes(blob), "b")


def test_a_missing_reward_counts_nothing():
    assert responses(0).rewards == (0.5, 0.0, 1.0)


def test_replaced_and_unknown():
    store = HistoryStore()
    assert store.get("p") is None and store.problems == []
    store.replace("p", responses(0))
    store.replace("p", responses(1))
    assert equal(store.get("p"), responses(1)) and len(store) == 1


def test_the_least_recently_needed_go_to_disk_and_come_back(tmp_path):
    size = len(encode("p0", responses(0)))
    store = HistoryStore(int(2.5 * size), tmp_path / "history")
    for i in range(2):
        store.replace(f"p{i}", responses(i))
    store.get("p0")
    store.replace("p2", responses(2))  # p1 was needed longest ago
    assert len(list((tmp_path / "history").iterdir())) == 1
    assert store.num_bytes <= store.memory_bytes and len(store) == 3
    assert all(equal(store.get(f"p{i}"), responses(i)) for i in (1, 0, 2, 1))
    assert store.problems == []
    store.replace("p0", responses(7))
    assert equal(store.get("p0"), responses(7)) and len(store) == 3


@pytest.mark.parametrize("damage", ["flipped", "foreign", "gone"])
def test_a_damaged_file_is_named_and_skipped(tmp_path, damage):
    store = HistoryStore(1, tmp_path)
    for name in ("p", "q"):
        store.replace(name, responses(0))
    path = store._path("p")
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] + b"?" if damage == "flipped" else b"not ours at all")
    assert store.get("p") is None
    assert len(store.problems) == 1 and "'p'" in store.problems[0]
    assert equal(store.get("q"), responses(0))
    store.replace("p", responses(3))  # and the prompt may have a history again
    assert equal(store.get("p"), responses(3))


@pytest.mark.parametrize("cap", [2**30, 1000])
def test_a_checkpoint_holds_all_of_it(tmp_path, cap):
    store = HistoryStore(cap, tmp_path / "one")
    for i in range(5):
        store.replace(f"p{i}", responses(i))
    other = HistoryStore(cap, tmp_path / "two")
    other.replace("old", responses(9))
    other.load_state(store.state())
    assert len(other) == 5 and other.get("old") is None
    assert all(equal(other.get(f"p{i}"), responses(i)) for i in range(5))

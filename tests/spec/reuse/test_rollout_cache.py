"""What prompts were answered last time: kept, capped, spilled, damaged, put into checkpoints."""

import json
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.spec.reuse.agreement import Agreement
from reprise.spec.reuse.rollout_cache import (
    MAGIC,
    CachedGroup,
    CachedResponse,
    CacheFileError,
    RolloutCache,
    Scores,
    decode,
    encode,
    of_group,
)


def group(seed, num=3, length=50):
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, 100, length + i).astype(np.int32) for i in range(num)]
    return of_group(tokens, [0.5, None, 1.0][:num])


def scored(seed, lengths=(5, 0, 7)):
    rng = np.random.default_rng(seed)

    def response(i, n):
        floats = rng.normal(size=(2, n)).astype(np.float32)
        scores = Scores(*floats, rng.integers(0, 9, n).astype(np.int32))
        tokens = rng.integers(0, 99, n).astype(np.int32)
        agreement = Agreement(i, i + seed % 2) if i else None
        return CachedResponse(i, tokens, float(i), scores, agreement)

    prompt = rng.integers(0, 99, 4).astype(np.int32)
    responses = tuple(response(i, n) for i, n in enumerate(lengths))
    return CachedGroup(prompt, responses, taught=bool(seed % 2), renewals=seed)


def equal(a: CachedGroup | None, b: CachedGroup | None) -> bool:
    assert a is not None and b is not None
    if not np.array_equal(a.prompt_ids, b.prompt_ids) or len(a.responses) != len(b.responses):
        return False

    def same(x: CachedResponse, y: CachedResponse) -> bool:
        if (x.sample_index, x.reward, x.agreement) != (y.sample_index, y.reward, y.agreement):
            return False
        parts = [(x.tokens, y.tokens)]
        if x.scores is not None and y.scores is not None:
            parts += list(zip(vars(x.scores).values(), vars(y.scores).values(), strict=True))
        elif x.scores is not y.scores:
            return False
        return all(p.dtype == q.dtype and np.array_equal(p, q) for p, q in parts)

    kept = (a.taught, a.renewals) == (b.taught, b.renewals)
    return kept and all(map(same, a.responses, b.responses))


@given(
    st.text(),
    st.lists(st.lists(st.integers(0, 2**31 - 1))),
    st.data(),
)
def test_decoding_a_blob_returns_the_encoded_group(key, lists, data):
    rewards = data.draw(
        st.lists(st.floats(allow_nan=False), min_size=len(lists), max_size=len(lists))
    )
    given_ = of_group([np.asarray(t, np.int32) for t in lists], rewards)
    assert equal(decode(encode(key, given_), key), given_)


@pytest.mark.parametrize("lengths", [(5, 0, 7), (), (0,), (3,)])
def test_scores_prompt_and_policy_come_back_bit_by_bit(lengths):
    given_ = scored(0, lengths)
    assert equal(decode(encode("p", given_, "tiny"), "p", "tiny"), given_)
    with pytest.raises(CacheFileError, match="policy and tokenizer like 'large', got 'tiny'"):
        decode(encode("p", given_, "tiny"), "p", "large")


def test_any_flipped_byte_is_found():
    blob = bytearray(encode("a", scored(0, (5,))))
    for i in range(len(blob)):
        blob[i] ^= 1
        with pytest.raises(CacheFileError):
            decode(bytes(blob), "a")
        blob[i] ^= 1
    for cut in (0, 3, 11, len(blob) - 1):
        with pytest.raises(CacheFileError):
            decode(bytes(blob[:cut]), "a")
    with pytest.raises(CacheFileError, match="expected the responses to 'b', got those to 'a'"):
        decode(bytes(blob), "b")


def test_a_missing_reward_counts_nothing():
    given_ = group(0)
    assert [r.reward for r in given_.responses] == [0.5, 0.0, 1.0]
    assert given_.num_tokens == 153


def test_replaced_and_unknown():
    cache = RolloutCache()
    assert cache.get("p") is None and cache.problems == []
    cache.replace("p", group(0))
    cache.replace("p", group(1))
    assert equal(cache.get("p"), group(1)) and len(cache) == 1


@pytest.mark.parametrize("cap", [2**30, 1])
def test_two_epochs(tmp_path, cap):
    cache = RolloutCache(cap, tmp_path / "one", epochs=2)
    cache.replace("p", group(0))
    assert cache.get("p", back=1) is None
    for i in (1, 2):
        cache.replace("p", group(i))
    other = RolloutCache(cap, tmp_path / "two", epochs=2)
    other.load_state(cache.state(), cache.folder)
    for kept in (cache, other):
        assert equal(kept.get("p"), group(2)) and equal(kept.get("p", back=1), group(1))
        assert len(kept) == 2 and kept.problems == []


def test_the_least_recently_needed_go_to_disk_and_come_back(tmp_path):
    size = len(encode("p0", group(0)))
    cache = RolloutCache(int(2.5 * size), tmp_path / "rollouts")
    for i in range(2):
        cache.replace(f"p{i}", group(i))
    cache.get("p0")
    cache.replace("p2", group(2))  # p1 was needed longest ago
    assert len(list((tmp_path / "rollouts").iterdir())) == 1
    assert cache.num_bytes <= cache.memory_bytes and len(cache) == 3
    assert all(equal(cache.get(f"p{i}"), group(i)) for i in (1, 0, 2, 1))
    assert cache.problems == []
    cache.replace("p0", group(7))
    assert equal(cache.get("p0"), group(7)) and len(cache) == 3


@pytest.mark.parametrize("damage", ["flipped", "foreign", "gone", "another policy"])
def test_a_damaged_or_foreign_file_is_named_and_skipped(tmp_path, damage):
    cache = RolloutCache(1, tmp_path)
    for name in ("p", "q"):
        cache.replace(name, group(0))
    path = tmp_path / cache.spilled()["p"].name
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "another policy":
        path.write_bytes(encode("p", group(0), "another"))
    else:
        path.write_bytes(data[:-1] + b"?" if damage == "flipped" else b"not ours at all")
    assert cache.get("p") is None
    assert len(cache.problems) == 1 and "'p'" in cache.problems[0]
    assert equal(cache.get("q"), group(0))
    cache.replace("p", group(3))  # and the prompt may have a history again
    assert equal(cache.get("p"), group(3))


@pytest.mark.parametrize("limit", [2**30, 1000])
def test_a_checkpoint_holds_all_of_it(tmp_path, limit):
    cache = RolloutCache(limit, tmp_path / "one")
    for i in range(5):
        cache.replace(f"p{i}", group(i))
    other = RolloutCache(limit, tmp_path / "two")
    other.replace("old", group(9))
    other.load_state(cache.state(), cache.folder)
    assert len(other) == 5 and other.get("old") is None
    assert all(equal(other.get(f"p{i}"), group(i)) for i in range(5))


def forged(header: dict, body: bytes = b"", *, deflate: bool = True) -> bytes:
    """A blob with a right checksum around whatever is in it."""
    text = json.dumps(header).encode()
    packed = zlib.compress(body) if deflate else body
    inner = len(text).to_bytes(4, "little") + text + packed
    return MAGIC + zlib.crc32(inner).to_bytes(4, "little") + inner


GOOD = {
    **{"key": "p", "policy": "", "samples": [0, 1], "lengths": [2, 1]},
    **{"rewards": [1.0, 0.0], "scored": False, "taught": True, "renewals": 3},
    "agreements": [[2, 3], None],
}
TOKENS = np.arange(4, dtype="<i4").tobytes()  # one of the prompt
FORGED = {
    "no header": forged({}, TOKENS),
    "a list": MAGIC + zlib.crc32(b"\2\0\0\0[]").to_bytes(4, "little") + b"\2\0\0\0[]",
    "deep": forged(GOOD | {"samples": json.loads("[" * 500 + "]" * 500)}, TOKENS),
    "lengths of nothing": forged(GOOD | {"lengths": None}, TOKENS),
    "negative lengths": forged(GOOD | {"lengths": [4, -1]}, TOKENS),
    "lengths that are huge": forged(GOOD | {"lengths": [2**31 - 1, 2**31 - 1]}, TOKENS),
    "lengths as text": forged(GOOD | {"lengths": ["2", "1"]}, TOKENS),
    "too many lengths": forged(GOOD | {"lengths": [1, 1, 1]}, TOKENS),
    "samples as floats": forged(GOOD | {"samples": [0.5, 1]}, TOKENS),
    "a sample twice": forged(GOOD | {"samples": [1, 1]}, TOKENS),
    "rewards of nothing": forged(GOOD | {"rewards": [None, 1.0]}, TOKENS),
    "rewards as text": forged(GOOD | {"rewards": ["1", "2"]}, TOKENS),
    "scored as text": forged(GOOD | {"scored": "false"}, TOKENS),
    "taught as text": forged(GOOD | {"taught": "false"}, TOKENS),
    "more kept than decided": forged(GOOD | {"agreements": [[3, 2], None]}, TOKENS),
    "a part of a kept token": forged(GOOD | {"agreements": [[1.5, 2], None]}, TOKENS),
    "an agreement too few": forged(GOOD | {"agreements": [None]}, TOKENS),
    "too many renewals": forged(GOOD | {"renewals": 2**26}, TOKENS),
    "negative renewals": forged(GOOD | {"renewals": -1}, TOKENS),
    "scores left out": forged(GOOD | {"scored": True}, TOKENS),
    "not deflated": forged(GOOD, TOKENS, deflate=False),
    "too short": forged(GOOD, TOKENS[:8]),
    "a part of a number": forged(GOOD, TOKENS + b"?"),
    "negative tokens": forged(GOOD, np.full(4, -1, "<i4").tobytes()),
    "beyond the vocabulary": forged(GOOD, np.full(4, 100, "<i4").tobytes()),
    "a bomb": forged(GOOD, bytes(2**25)),
}


@pytest.mark.parametrize("blob", FORGED.values(), ids=FORGED)
def test_a_forged_blob_is_named_and_skipped(tmp_path, blob):
    assert decode(forged(GOOD, TOKENS), "p", "", vocab_size=100).num_tokens == 3
    with pytest.raises(CacheFileError):
        decode(blob, "p", "", vocab_size=100)
    cache = RolloutCache(1, tmp_path, vocab_size=100)
    cache.replace("p", group(0))
    (tmp_path / cache.spilled()["p"].name).write_bytes(blob)
    assert cache.get("p") is None and len(cache.problems) == 1


def test_undo_restores_the_groups_before_a_step(tmp_path):
    """Also of the epoch before, and of files."""
    cache = RolloutCache(1, tmp_path, epochs=2)
    for value in (1, 2):
        cache.replace("a", of_group([np.full(9, value, np.int32)], [0.0]))
    cache.mark()
    for key in ("a", "a", "b"):
        cache.replace(key, of_group([np.full(9, 7, np.int32)], [0.0]))
    assert cache.get("a").responses[0].tokens[0] == 7 and cache.get("b") is not None
    cache.undo()
    assert [cache.get("a", back).responses[0].tokens[0] for back in (0, 1)] == [2, 1]
    assert cache.get("b") is None
    cache.undo()  # nothing is left to be taken back
    assert cache.get("a").responses[0].tokens[0] == 2


@pytest.mark.parametrize("epochs", [1, 2])
def test_another_caches_groups_are_taken_over_as_if_they_were_replaced(epochs):
    plain, cache, late = (RolloutCache(epochs=n, policy="p") for n in (epochs, epochs, 1))
    for seed, keys in ((0, "ab"), (1, "bc")):
        for key in keys:
            plain.replace(key, scored(seed))
            late.replace(key, scored(seed))
        cache.mark()
        cache.take_over(late)
        assert len(late) == 0 and late.num_bytes == 0
    assert cache.state()["keys"] == plain.state()["keys"]
    assert (cache.state()["blobs"] == plain.state()["blobs"]).all()
    cache.undo()
    assert cache.get("c") is None and equal(cache.get("b"), scored(0))

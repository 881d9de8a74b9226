"""Headers of GGUF files: what is written is read, and no lie costs more than a sentence."""

import os
import random
import struct
import tracemalloc

import gguf_by_hand as by_hand
import numpy as np
import pytest

from reprise.models.config import ModelConfig
from reprise.models.formats import gguf_header, hf, hf_files
from reprise.models.text import gguf_tokenizer

UINT8, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 6, 7, 8, 9, 10
F32, Q8_0 = 0, 8
HUGE = 2**64 - 1


def text(value, length=None):
    content = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(content) if length is None else length) + content


def pair(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def array(kind, count, content):
    return struct.pack("<IQ", kind, count) + content


def tensor(name="w", shape=(8,), kind=F32, offset=0):
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def raw(pairs=(), tensors=(), data=b"", counts=None, version=3, magic=b"GGUF", order="<"):
    counts = (len(tensors), len(pairs)) if counts is None else counts
    head = magic + struct.pack(f"{order}IQQ", version, *counts) + b"".join((*pairs, *tensors))
    return head + bytes(-len(head) % 32) + data


def read(tmp_path, content):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    return gguf_header.read(path)


def test_what_is_written_is_read(tmp_path):
    pairs = [
        pair("a.text", STRING, text("é\n")),
        pair("a.number", UINT64, struct.pack("<Q", 2**40)),
        pair("a.half", FLOAT32, struct.pack("<f", 0.5)),
        pair("a.yes", BOOL, b"\1"),
        pair("a.words", ARRAY, array(STRING, 2, text("x") + text(""))),
        pair("a.numbers", ARRAY, array(UINT32, 2, struct.pack("<II", 1, 2**32 - 1))),
    ]
    data = np.arange(8, dtype=np.float32).tobytes()
    entries = [tensor("w", (4, 2)), tensor("v", (32,), Q8_0, 32)]
    content = raw(pairs, entries, data + bytes(34))
    header = read(tmp_path, content)
    assert header.metadata == {
        "a.text": "é\n",
        "a.number": 2**40,
        "a.half": 0.5,
        "a.yes": True,
        "a.words": ["x", ""],
        "a.numbers": [1, 2**32 - 1],
    }
    w, v = header.tensors["w"], header.tensors["v"]
    assert w.shape == (2, 4) and (w.num_bytes, v.num_bytes) == (32, 34)
    assert content[w.offset : w.offset + w.num_bytes] == data
    assert v.offset == w.offset + 32


def test_another_alignment(tmp_path):
    pairs = [pair("general.alignment", UINT32, struct.pack("<I", 64))]
    head = raw(pairs, [tensor(shape=(2,)), tensor("v", (2,), offset=64)])
    content = head + bytes(-len(head) % 64) + bytes(64 + 8)
    header = read(tmp_path, content)
    assert [t.offset % 64 for t in header.tensors.values()] == [0, 0]
    with pytest.raises(ValueError, match="tensor v at a multiple of 32 after w .* 4 bytes at 4 "):
        read(tmp_path, raw([], [tensor(shape=(1,)), tensor("v", (1,), offset=4)], bytes(64)))


LIES = {
    "nothing": (b"", "word GGUF in 4 bytes, got the last 0"),
    "another file": (b"PK\3\4" + bytes(60), "word GGUF .* got b'PK"),
    "version 99": (raw(version=99), "got b.GGUF. and 0x63;"),
    "big endian": (raw(order=">"), "little-endian order, got b.GGUF. and 0x3000000;"),
    "tensors without end": (raw(counts=(HUGE, 0)), "at most 131072 tensors, got 18446"),
    "pairs without end": (raw(counts=(0, HUGE)), "at most 65536 key-value pairs, got 18446"),
    "a key without end": (raw([text("a", 60_000)]), "a key in 60000 bytes, got the last"),
    "a key twice": (raw([pair("a", BOOL, b"\0")] * 2), "every key once, got 'a' twice"),
    "neither true nor false": (raw([pair("a", BOOL, b"\2")]), "as 0 or 1, got 2"),
    "an unknown type": (
        raw([pair("a", 13, b"\0")]),
        "value of a as numbers or strings, got type 13",
    ),
    "a text without end": (raw([pair("a", STRING, text("", 2**20))]), "in 1048576 bytes, got"),
    "strings without end": (
        raw([pair("a", ARRAY, array(STRING, HUGE, b""))]),
        "at most 4194304 elements in the value of a, got 18446",
    ),
    "an array of arrays": (
        raw([pair("a", ARRAY, array(ARRAY, 1, array(ARRAY, HUGE, b"")))]),
        "numbers or strings, got type 9",
    ),
    "a tensor without axes": (raw([], [tensor(shape=())]), "w with 1 to 4 axes, got 0"),
    "an axis of nothing": (raw([], [tensor(shape=(0, 4))]), "axes of at least 1"),
    "a huge shape": (
        raw([], [tensor(shape=(2**40, 2**40))]),
        "before the file's end, got 4835703278458516698824704 bytes",
    ),
    "an unknown quantization": (raw([], [tensor(kind=1000)]), "package knows, got type 1000"),
    "a broken block": (raw([], [tensor(shape=(33,), kind=Q8_0)]), "a multiple of 32, got .33."),
    "an offset that overflows": (
        raw([], [tensor(offset=HUGE - 31)], bytes(32)),
        "before the file's end",
    ),
    "a tensor cut off": (
        raw([], [tensor()], bytes(31)),
        "w .* before the file's end, got 32 bytes at 0 after the header's 64",
    ),
    "a tensor in another": (
        raw([], [tensor(shape=(16,)), tensor("v", offset=32)], bytes(64)),
        "tensor v at a multiple of 32 after w .* 32 bytes at 32 ",
    ),
    "a tensor twice": (raw([], [tensor(), tensor(offset=32)], bytes(64)), "'w' twice"),
    "an alignment of zero": (
        raw([pair("general.alignment", UINT32, bytes(4))]),
        "alignment as a power of two, got 0",
    ),
    "terminal codes": (raw([pair("\x1b[2J", 13, b"")]), r"the value of \\x1b\[2J as numbers"),
}


def refused(path):
    """The one sentence that a file is refused with, with the peak of memory; None if it is not."""
    tracemalloc.start()
    try:
        gguf_tokenizer.parts(gguf_header.read(path))
        hf.check(path)
        return None
    except ValueError as error:
        assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 1500
        return str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * 2**20


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_a_sentence(lie, tmp_path):
    content, message = LIES[lie]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    gguf_header.package()
    assert refused(path) is not None
    with pytest.raises(ValueError, match=message):
        gguf_header.read(path)


def test_room_in_the_file_is_not_enough(tmp_path):
    """A file of 64 GiB (of holes) could hold what these say: the header has bounds of its own."""
    path = tmp_path / "a.gguf"
    for value, message in (
        (pair("a", STRING, text("", 2**35)), "header of at most 67108864 bytes"),
        (pair("a", ARRAY, array(UINT8, 2**35, b"")), "at most 4194304 elements"),
        (pair("a", ARRAY, array(STRING, 2**33, b"")), "at most 4194304 elements"),
    ):
        path.write_bytes(raw([value]))
        os.truncate(path, 2**36)
        assert message in refused(path)


def test_what_is_no_file(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(FileNotFoundError, match="which is not a file"):
            gguf_header.read(path)
    assert hf_files.is_gguf(tmp_path / "none.gguf") and not hf_files.is_gguf(tmp_path)


def test_without_the_package_one_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[gguf\]'"):
        read(tmp_path, raw())


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def good(tmp_path_factory, request):
    config = ModelConfig("llama", 268, 32, 1, 2, 1, 16, 32, tied_embeddings=True, max_positions=64)
    path = tmp_path_factory.mktemp("good") / "a.gguf"
    words = by_hand.byte_vocabulary(config.vocab_size)
    if request.param == "llama":
        scores = [-float(i) for i in range(config.vocab_size)]
        words |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
    by_hand.write(path, config, by_hand.random_weights(config), by_hand.KINDS.Q8_0, words)
    assert refused(path) is None
    return path


def damaged(content, end, draw):
    """One to three changes among the first `end` bytes: bits, numbers, cuts, insertions."""
    content = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(min(end, len(content) - 8))
        kind = draw.randrange(5)
        if kind == 0:
            content[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            content[at] = draw.randrange(256)
        elif kind == 2:
            value = draw.choice([0, 1, 2**31, 2**32, 2**62, HUGE, draw.getrandbits(64)])
            content[at : at + 8] = struct.pack("<Q", value)
        elif kind == 3:
            del content[at : at + draw.choice([1, 4, 8, len(content)])]
        else:
            content[at:at] = draw.randbytes(draw.choice([1, 4, 8]))
        if len(content) < 16:
            break
    return bytes(content)


def test_damage_costs_a_sentence_or_nothing(good, tmp_path):
    header, content = gguf_header.read(good), good.read_bytes()
    start = min(t.offset for t in header.tensors.values())
    path, draw, refusals = tmp_path / "b.gguf", random.Random(0), 0
    for i in range(250):
        end = (120, 900, start)[i % 3]  # the beginning, where the numbers are, more often
        path.write_bytes(damaged(content, end, draw))
        refusals += refused(path) is not None
    assert refusals > 150

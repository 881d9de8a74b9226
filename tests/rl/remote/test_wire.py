"""Messages: what is written comes back, and nothing else is read."""

import dataclasses
import json
import math
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_workers import hello
from tiny_team import CONFIG, MODEL

from models.kv_cache import KVCache
from rl.engine.stats import EngineStats, RoundRecord
from rl.remote import messages, records
from rl.remote.messages import CODEC
from rl.remote.run_messages import Answered, ChunkEnded, Copied, Dropped, Parked
from rl.remote.wire import Codec, WireError
from rl.speculation.config import SpeculationConfig
from rl.trajectory import FinishReason, HostKv, PartialRequest, Prefix, Request, Trajectory
from sched.request import COPIES, MAX_COPIES
from spec.budget.config import TunerConfig
from spec.config import SamplingConfig
from spec.reuse.prefix_rule import PrefixRule, ReuseMode
from spec.reuse.rollout_cache import CachedGroup, CachedResponse, Scores

ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)
floats = st.floats(-100, 0, width=32)


def same(a, b):
    """Equal in value and type, down to the arrays."""
    if dataclasses.is_dataclass(a):
        assert type(a) is type(b)
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, tuple):
        return type(b) is tuple and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@st.composite
def scored(draw):
    """The arrays of a response's tokens."""
    tokens = draw(ids)
    n = len(tokens)

    def column(values, dtype):
        return np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype)

    return {
        "response_ids": np.array(tokens, np.int32),
        "logprobs": column(floats, np.float32),
        "emission_logprobs": column(floats, np.float32),
        "policy_versions": column(st.integers(0, 9), np.int32),
        "origins": column(st.integers(0, 3), np.uint8),
    }


@st.composite
def requests(draw):
    prefix = draw(scored())
    cached = None
    if draw(st.booleans()):
        scores = Scores(*(prefix[n] for n in ("logprobs", "emission_logprobs", "policy_versions")))
        cached = CachedResponse(1, prefix["response_ids"], draw(st.floats(0, 1)), scores)
    sampling = draw(st.sampled_from([None, SamplingConfig(0.5, stop=("\n", "ä"), stop_ids=(3,))]))
    limit = draw(st.none() | st.integers(1, 99))
    ids_ = tuple(draw(ids))
    return Request(draw(st.integers(0, 2**31 - 1)), ids_, 3, 1, limit, cached, sampling)


@st.composite
def partials(draw):
    request, kv, prefix = draw(requests()), None, None
    if draw(st.booleans()):
        prefix = Prefix(**draw(scored()), reused_tokens=1, finish_reason=None)
        dtype = np.dtype(draw(st.sampled_from(["float32", "bfloat16"])))
        keys, values = np.ones((1, 4, 3)).astype(dtype), np.zeros((1, 3, 4)).astype(dtype)
        kv = HostKv(KVCache((keys,) * 2, (values,) * 2))
    return PartialRequest(request, prefix, kv, draw(st.none() | st.integers(1, 9)))


@st.composite
def reports(draw):
    reason = draw(st.sampled_from(FinishReason))
    prompt = np.array(draw(ids), np.int32)
    t = Trajectory(1, 2, 3, prompt, finish_reason=reason, reward=None, **draw(scored()))
    parked = draw(partials())
    copied = parked.prefix if parked.kv is not None else None, parked.kv
    events = (
        ChunkEnded(1, 2),
        Answered(t),
        Parked(4, parked.prefix, parked.kv),
        Copied(4 + COPIES, *copied),
        Dropped(draw(st.integers(0, 2**61))),
    )
    told = draw(st.permutations(events))[: draw(st.integers(0, 5))]
    return messages.Report(7, tuple(told), 5, 6, draw(st.none() | st.just(a_stats())))


def a_stats():
    stats = EngineStats(fetches=1, tokens=7)
    stats.rounds[4, 8, 64] = 3
    columns = [np.arange(2) + i for i in range(4)]
    stats.timeline.append(RoundRecord(0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4, 8, 64, *columns, 1, 9))
    stats.timeline.append(RoundRecord(*[4.0] * 6, 4, 4, 64, *[np.zeros(0, int)] * 4))
    return records.of_stats(stats)


def a_job():
    response = CachedResponse(0, np.arange(3, dtype=np.int32), 1.0)
    drafting = messages.Drafting(
        ("q1",),
        ((1, 2),),
        {5: np.arange(2, dtype=np.int32)},
        0,
        8,
        {"q1": CachedGroup(np.arange(2, dtype=np.int32), (response,))},
        methods=("model", "own"),
    )
    words = messages.Text(np.arange(4, dtype=np.uint8), np.array([0, 1, 4]))
    rule = PrefixRule(ReuseMode("lenient", math.inf), math.inf, 3, 2)
    sampling = SamplingConfig(by_task=("gsm: temperature=0.6",))
    key = np.array([1, 2], np.uint32)
    return messages.Job("a", 1, sampling, key, (3,), 2, 4, 64, 256, drafting, rule, words)


OTHERS = [
    messages.Begin(3, a_job()),
    messages.Hello(
        *({"configuration": "a\n"}, "policies/tiny", 2, MODEL, CONFIG, "bfloat16", 1),
        *(5.0, SpeculationConfig(), TunerConfig(), 7),
    ),
    messages.Weights(2, (np.zeros((0, 3), np.float32), np.array(2.5, np.dtype("bfloat16")))),
    messages.Compile(SamplingConfig(), 8, 64, True, False, {4: (8, 16)}),
    messages.DraftSync("a", 8, (messages.Piece(1, 2, 3, np.arange(3, dtype=np.int32)),), ((1, 2),),
                       {1: {2: 3}}),
    messages.Failed("ValueError", "ä\0\n"),
]  # fmt: skip


@pytest.mark.parametrize("record", OTHERS, ids=lambda record: type(record).__name__)
def test_a_message_comes_back(record):
    assert same(CODEC.decode(CODEC.encode(record)), record)


def _report(stats):
    return messages.Report(1, (), 2, 3, stats)


def report_of(*events):
    return messages.Report(1, events, 2, 3, None)


A_PREFIX = Prefix(*[np.zeros(2, t) for t in ("i4", "f4", "f4", "i4", "u1")], 0, None)


@settings(max_examples=50)
@given(
    st.lists(partials(), max_size=3),
    st.dictionaries(st.integers(0, 99), st.integers(0, 9)),
    st.lists(st.integers(0, 2**61), max_size=3),
    st.lists(st.tuples(st.integers(0, 2**31), st.integers(1, MAX_COPIES)), max_size=3),
)
def test_requests_come_back(starts, grants, drops, copies):
    asked = tuple((r, r + n * COPIES) for r, n in copies)
    record = messages.Give(3, tuple(starts), grants, True, drops=tuple(drops), copies=asked)
    assert same(CODEC.decode(CODEC.encode(record)), record)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (messages.Give(1, (), {}, False, copies=((3, 4),)), "numbers of copies of requests"),
        (messages.Give(1, (), {}, False, copies=((3, 3),)), "numbers of copies of requests"),
        (messages.Give(1, (), {}, False, copies=((3, 4 + COPIES),)), "numbers of copies of req"),
        (report_of(Copied(4, None, None)), "the number of a copy"),
        (report_of(Copied(4 + COPIES, A_PREFIX, None)), "keys and values of a response's tokens"),
    ],
)
def test_copies_that_are_none_are_refused(record, message):
    with pytest.raises(WireError, match=message):
        CODEC.decode(CODEC.encode(record))


def test_methods_of_drafting_are_known_ones():
    drafting = dataclasses.replace(a_job().drafting, methods=("telepathy",))
    record = messages.Begin(3, dataclasses.replace(a_job(), drafting=drafting))
    with pytest.raises(WireError, match="expected methods of drafting of model, learned, own"):
        CODEC.decode(CODEC.encode(record))


@settings(max_examples=50)
@given(reports())
def test_reports_come_back(record):
    assert same(CODEC.decode(CODEC.encode(record)), record)


def test_counts_come_back_and_seconds_are_on_the_clock_of_this_program():
    stats = EngineStats()
    records.enter_stats(stats, CODEC.decode(CODEC.encode(_report(a_stats()))).stats, later_s=10.0)
    assert (stats.fetches, stats.tokens, stats.rounds) == (1, 7, {(4, 8, 64): 3})
    first, second = stats.timeline
    assert (first.began_s, first.ended_s, first.prompt_tokens) == (10.5, 13.0, 9)
    assert first.emitted_A.tolist() == [3, 4] and not len(second.rounds_A)


HOSTILE = messages.Report(
    3,
    (Parked(1, A_PREFIX, HostKv(KVCache((np.zeros((1, 4, 3), np.float32),),
                                        (np.zeros((1, 3, 4), np.float32),)))),),
    4,
    5,
    a_stats(),
)  # fmt: skip


@settings(max_examples=200)
@given(st.data())
def test_damaged_bytes_are_refused_or_are_another_message(data):
    """Nothing but WireError is raised, whatever comes; the memory stays that of the message."""
    message = bytearray(CODEC.encode(HOSTILE))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(message)))
    for bad in (bytes(message), bytes(message[:cut])):
        try:
            CODEC.decode(bad)
        except WireError as error:
            assert len(str(error)) < 2000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=200)
@given(st.data())
def test_headers_of_other_types_are_refused_with_the_field(data):
    """One value of the header is another one: refused by its path, or of the same type."""
    fields, arrays = parsed(CODEC.encode(HOSTILE))
    path = data.draw(st.sampled_from(sorted(paths([fields, arrays]), key=str)))
    other = data.draw(json_values)
    changed = replaced([fields, arrays], path, other)
    try:
        CODEC.decode(built(HOSTILE, *changed))
    except WireError as error:
        assert "expected" in str(error) or "Report" in str(error)


def parsed(message):
    (length,) = struct.unpack_from("<I", message, 4)
    _, fields, arrays = json.loads(message[8 : 8 + length])
    return fields, arrays


def built(record, fields, arrays, *, name=None):
    message = CODEC.encode(record)
    (length,) = struct.unpack_from("<I", message, 4)
    start = 8 + length
    header = json.dumps([name or type(record).__name__, fields, arrays]).encode()
    header += b" " * ((start - 8 - len(header)) % 8)
    return message[:4] + struct.pack("<I", len(header)) + header + message[start:]


def paths(value, here=()):
    yield here
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from paths(inner, (*here, key))


def replaced(value, path, other):
    if not path:
        return other if isinstance(other, list) and len(other) == 2 else [other, []]
    key, *rest = path
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[key] = replaced(value[key], rest, other) if rest else other
    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(run="x"), r"Report.run: expected a whole number of 64 bits, got 'x'"),
        (lambda f: f.update(run=2**63), r"Report.run: expected a whole number"),
        (lambda f: f.update(run=True), r"Report.run: expected a whole number"),
        (lambda f: f.pop("run"), r"Report: expected the fields run, events"),
        (lambda f: f["events"].append(["Abort", {}]), r"events\[1\]: expected one of ChunkEnded"),
        (lambda f: f["events"][0][1].update(kv=3), r"Parked.kv: expected the fields entries"),
        (lambda f: f["events"][0][1]["prefix"].update(logprobs=0), r"logprobs: .*float32 of 1 ax"),
        (lambda f: f["events"][0][1]["prefix"].update(logprobs=99), r"logprobs: .*array below"),
        (lambda f: f["events"][0][1]["prefix"].update(reused_tokens=3), r"reused tokens of at mos"),
        (lambda f: f["stats"].update(offsets=f["stats"]["drafted_by_source"]), r"requests of each"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(change, message):
    fields, arrays = parsed(CODEC.encode(HOSTILE))
    assert same(CODEC.decode(built(HOSTILE, fields, arrays)), HOSTILE)
    change(fields)
    with pytest.raises(WireError, match=message):
        CODEC.decode(built(HOSTILE, fields, arrays))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (["float32", [2**60]], "sizes of 0 or more"),
        (["float32", [2**35, 2**35]], "its end within"),
        (["float32", [-1]], "sizes of 0 or more"),
        (["float32", [1] * 99], "at most 8 axes"),
        (["object", [1]], "a dtype of bool"),
        (["V8", [1]], "a dtype of bool"),
        ("float32", "a dtype of bool"),
        (["float32", [1]], "bytes of header and arrays"),
    ],
)
def test_arrays_beyond_the_message_are_refused_before_they_are_made(entry, message):
    fields, arrays = parsed(CODEC.encode(HOSTILE))
    with pytest.raises(WireError, match=message):
        CODEC.decode(built(HOSTILE, fields, [*arrays[:-1], entry]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected 8 to"),
        (b"\x80\x04K\x01.....", "begins with"),
        (b"RPW1\xff\xff\xff\xff12345678", "a header within"),
        (b"RPW1\x04\0\0\0[[[[", "in JSON"),
        (b"RPW1\x02\0\0\0[]", "a name, fields and arrays"),
        (b'RPW1\x0d\0\0\0["Boom",{},0]', "a message of Hello"),
        (b"RPW1" + struct.pack("<I", 200_000) + b"[" * 200_000, "in JSON"),
    ],
)
def test_what_is_no_message_is_refused(data, message):
    with pytest.raises(WireError, match=message):
        CODEC.decode(data)


def test_a_record_that_is_no_message_is_not_written():
    with pytest.raises(AssertionError, match="is not a message"):
        CODEC.encode(SamplingConfig())

    @dataclasses.dataclass(frozen=True)
    class Odd:
        field: set[int]

    with pytest.raises(TypeError, match="no messages of"):
        Codec((Odd,)).encode(Odd({1}))


def test_the_first_messages_may_be_written_by_several_threads():
    meets = threading.Barrier(4)

    def encode(codec):
        meets.wait(30)
        return codec.encode(hello(0))

    with ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            codec = Codec(CODEC.records, CODEC.arrays, CODEC.checks)
            assert len(set(threads.map(encode, [codec] * 4))) == 1

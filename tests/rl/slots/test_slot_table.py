"""The table of slots on the device: its columns, and when it is made anew."""

import numpy as np
from drive import RequestSource, drive

from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.trajectory import PartialRequest, Request
from reprise.rl.slot_memory.cache_ops import COLUMNS
from reprise.rl.slots.config import EngineConfig
from reprise.rl.slots.ending import Endings
from reprise.rl.slots.slot_table import SlotTable
from reprise.spec.config import SamplingConfig
from reprise.spec.verification.sampling import step_key
from tests.support import symbolic_device
from tests.support.symbolic_device import MODEL, SymbolicEngine


def test_two_requests_may_have_the_same_noise():
    """Of one example in two steps of a pipeline: the device knows names of noise alone."""
    table = SlotTable(2, 16, Endings(SamplingConfig(max_new_tokens=8)))
    ids = [2, 5 * 2**31 + 2]
    for row, request_id in enumerate(ids):
        table.enter(row, PartialRequest(Request(request_id, (1, 2, 3))))
    assert table.device_columns()[:, COLUMNS.index("request_id")].tolist() == [2, 2]
    assert table.live().request_ids_A.tolist() == ids


def test_rows_of_expired_requests_are_the_oldest():
    table = SlotTable(3, 16, Endings(SamplingConfig(max_new_tokens=8)), keeps_responses=True)
    for row in range(3):
        table.enter(row, PartialRequest(Request(row, (1, 2, row))))
    for row in (0, 2):
        table.leave(row, 0)
    table.expire([1, 2, 9])
    assert table.entered_B.tolist() == [1, 2, 0]  # request 1 still runs


def test_the_seed_of_a_request_is_a_column_and_ends_with_it():
    table = SlotTable(1, 16, Endings(SamplingConfig(max_new_tokens=8)))
    seeds = []
    for request in (Request(0, (1,), seed=7), Request(1, (1,))):
        table.enter(0, PartialRequest(request))
        seeds.append(table.device_columns()[0, COLUMNS.index("seed")])
        table.leave(0, 0)
        seeds.append(table.device_columns()[0, COLUMNS.index("seed")])
    assert seeds == [7, -1, -1, -1]


def test_the_response_of_a_request_is_read_from_a_token_on():
    table = SlotTable(2, 16, Endings(SamplingConfig(max_new_tokens=8)))
    table.enter(1, PartialRequest(Request(4, (1, 2, 3))))
    tokens_BN = np.array([[0, 0], [7, 8]], np.int32)
    logprobs_BN = np.array([[0, 0], [-1, -2]], np.float32)
    none_B = np.zeros(2, np.int32)
    table.commit(tokens_BN, logprobs_BN, np.array([0, 2], np.int32), none_B > 0, none_B)
    for first, expected in ((0, [7, 8]), (1, [8]), (2, [])):
        assert table.response(4, first)[0].tolist() == expected
    assert table.response(4, 1)[1].tolist() == [-2]
    assert not len(table.response(5)[0])


def test_arrays_of_live_rows_are_the_same_objects_until_the_rows_change():
    table = SlotTable(2, 16, Endings(SamplingConfig(max_new_tokens=8)))
    table.enter(0, PartialRequest(Request(4, (1, 2, 3))))
    before = table.live()
    tokens_BN, count_B = np.array([[7], [0]], np.int32), np.array([1, 0], np.int32)
    logprobs_BN, none_B = np.zeros((2, 1), np.float32), np.zeros(2, np.int32)
    table.commit(tokens_BN, logprobs_BN, count_B, none_B > 0, none_B)
    after = table.live()
    assert after.request_ids_A is before.request_ids_A
    assert after.total_tokens_A.tolist() == [4]
    assert after.remaining_tokens_A.tolist() == [7]
    assert after.response(0).tolist() == [7]

    def ids():
        return table.live().request_ids_A.tolist()

    table.enter(1, PartialRequest(Request(5, (1, 2))))
    assert ids() == [4, 5]
    table.keep([1, 0])
    assert ids() == [5, 4]
    table.widen(4)
    assert table.live().tokens_BL is table.tokens_BL
    table.leave(0, 0)
    assert ids() == [4]
    table.enter(0, PartialRequest(Request(6, (1, 2))))
    table.leave(0, 0)
    table.enter(0, PartialRequest(Request(7, (1, 2))))
    assert ids() == [7, 4]


class Whole(RequestSource):
    """Sends all requests at once; responses come in chunks that are extended or end."""

    longest_tokens = 40

    def __init__(self, waiting):
        self.waiting, self.num_chunks = waiting, 0

    def take(self, *, wait):
        waiting, self.waiting = self.waiting, []
        return waiting or None

    def chunk_ended(self, request_id, response_tokens):
        self.num_chunks += 1
        return 7


def test_only_a_change_of_the_table_makes_the_devices_copy_anew(monkeypatch):
    """Fetches without one leave the copy that rounds advance, though the loop runs after each."""
    config = EngineConfig(slots=4, min_slots=4, rounds_per_fetch=1, max_nodes=1, page_tokens=4)
    engine = SymbolicEngine(MODEL, config, dtype=np.float32)
    requests = [Request(i, (1, 2, 3 + i), i, i, max_new_tokens=30) for i in range(2)]
    made = []
    monkeypatch.setattr(engine._rows, "changed", lambda: made.append(changed()))
    changed = type(engine._rows).changed.__get__(engine._rows)
    source, done = Whole([PartialRequest(r, max_tokens=9) for r in requests]), []
    spec = RolloutSpec(None, SamplingConfig(max_new_tokens=32), step_key(0, 0))
    with symbolic_device.device():
        drive(engine, spec, source, on_finish=done.append)
    assert sorted(t.request_id for t in done) == [0, 1]
    for t in done:
        assert t.response_ids.tolist() == symbolic_device.response(requests[t.request_id])[0]
    assert source.num_chunks and engine.stats.fetches > 20
    assert len(made) == 1 + source.num_chunks  # requests came, and each extension

"""States of unfinished requests between two workers; counts of their keys and values."""

from types import SimpleNamespace

from reprise.rl.records.stats import PoolCounts
from reprise.rl.records.trajectory import PartialRequest, Request
from reprise.rl.sessions.request_table import RequestTable
from reprise.sched.protocol import Start
from reprise.sched.request import Kv


def test_keys_and_values_that_move_or_are_dropped_are_counted():
    table = RequestTable(pool_bytes=150)
    requests = [Request(i, (1, 2)) for i in range(3)]
    for request in requests:
        table.add(0, request)
        kv = SimpleNamespace(num_bytes=70, num_tokens=7)
        table.keep(table[request.request_id], PartialRequest(request, kv=kv))
    assert table.counts == PoolCounts(210, 70, 7), "two of three fit"
    assert table.num_bytes == 140

    def started(request_id, kv):
        start = Start(request_id, 0, chunk=1, max_tokens=4, reserved_tokens=0, kv=kv)
        return table.start(table[request_id], start)

    assert started(0, Kv.POOL).kv.num_tokens == 7
    assert table.counts == PoolCounts(280, 70, 7) and table.num_bytes == 70
    assert started(1, Kv.PREFILL).kv is None
    assert table.counts == PoolCounts(280, 140, 14), "the scheduler has it recomputed"
    assert started(2, Kv.POOL).kv is None, "it was dropped as it came"
    assert table.counts.since(PoolCounts(280, 140, 14)) == PoolCounts()
    assert table.num_bytes == 0

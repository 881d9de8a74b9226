"""What the device knows of a row."""

from rl.engine.cache_ops import COLUMNS
from rl.engine.ending import Endings
from rl.engine.slot_table import SlotTable
from rl.trajectory import PartialRequest, Request
from spec.config import SamplingConfig


def test_two_requests_may_have_the_same_noise():
    """Of one example in two steps of a pipeline: the device knows names of noise alone."""
    table = SlotTable(2, 16, Endings(SamplingConfig(max_new_tokens=8)))
    ids = [2, 5 * 2**31 + 2]
    for row, request_id in enumerate(ids):
        table.enter(row, PartialRequest(Request(request_id, (1, 2, 3))))
    assert table.device_columns()[:, COLUMNS.index("request_id")].tolist() == [2, 2]
    assert table.live().request_ids_A.tolist() == ids

"""The digest of what an engine launches changes with everything that processes must share."""

import numpy as np
import pytest
from shapes import TINY

from reprise.rl.records.trajectory import PartialRequest, Request
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.slots.lockstep import LaunchRecord
from reprise.rl.slots.slot_table import SlotTable


class Heard(list):
    """An observer that keeps what it hears."""

    def launched(self, digest, what):
        self.append((digest, str(what)))


def table(request_id=7, prompt=(1, 2, 3)):
    made = SlotTable(2, 8)
    made.enter(1, PartialRequest(Request(request_id, prompt, max_new_tokens=4)))
    return made


def digests(*launches):
    heard = Heard()
    record = LaunchRecord(heard)
    for program, sizes, of, *inputs in launches:
        record.note(program, sizes, of, *inputs)
    return [digest for digest, _ in heard]


NODES = np.arange(10, dtype=np.int32).reshape(5, 2)
SAME = ("a round", (2, 4, 8), table(), NODES, None)
OTHERS = {
    "program": ("plain rounds", *SAME[1:]),
    "sizes": ("a round", (2, 8, 8), *SAME[2:]),
    "request": (*SAME[:2], table(8), *SAME[3:]),
    "tokens of a request": (*SAME[:2], table(prompt=(1, 2)), *SAME[3:]),
    "nodes": (*SAME[:3], np.where(NODES == 9, 8, NODES), None),
    "chunks": (*SAME[:4], NODES),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_differs_changes_this_digest_and_all_that_follow(name):
    same, other = digests(SAME, SAME, SAME), digests(SAME, OTHERS[name], SAME)
    assert same == digests(SAME, SAME, SAME) and len(set(same)) == 3
    assert [a == b for a, b in zip(same, other, strict=True)] == [True, False, False]


def test_a_launch_is_described_as_it_was():
    heard, of = Heard(), table()
    LaunchRecord(heard).note("a round", (2, 4, 8), of, NODES)
    [(_, what)] = heard
    assert what == "a round of 2 × 4 × 8, requests (tokens): 7 (3)"


def test_an_engine_without_an_observer_records_nothing():
    assert ModelRunner(TINY).record is None
    assert ModelRunner(TINY, lockstep=Heard()).record is not None

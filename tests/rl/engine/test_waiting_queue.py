"""Waiting requests, and the prompts of those that have not started."""

from rl.engine.admission import WaitingQueue
from rl.engine.slot_table import Prompts
from rl.trajectory import PartialRequest, Request


def requests(count):
    return [PartialRequest(Request(i, (i // 4, 7), i // 4, i % 4)) for i in range(count)]


def test_prompts_are_those_of_the_requests_that_wait():
    prompts, order = Prompts(), requests(10)
    waiting = WaitingQueue(prompts)
    waiting.add(order, is_new=True)
    while len(waiting):
        assert set(waiting.prompts) == {prompts.of(p.request.prompt_ids)[0] for p in order}
        first = waiting.first(3)
        assert waiting.take(len(first)) == first
        assert [p.request for p in first] == [p.request for p in order[:3]]
        order = order[3:]
    assert not waiting.prompts and not waiting.first(3)


def test_what_was_brought_comes_before_what_waits_from_the_start():
    waiting = WaitingQueue(Prompts())
    waiting.add(requests(3), is_new=True)
    waiting.add(requests(2))
    brought = waiting.first(5)
    assert len(brought) == 2 and waiting.take(1) == brought[:1]
    assert waiting.first(5) == brought[1:]
    waiting.take(1)
    assert [p.request.request_id for p in waiting.first(5)] == [0, 1, 2]

"""Waiting requests, and what each round asks about their prompts."""

from rl.engine.admission import PromptNumbers
from rl.engine.waiting_queue import WaitingQueue
from rl.trajectory import PartialRequest, Request


def requests(count):
    return [Request(i, (i // 4, 7), i // 4, i % 4) for i in range(count)]


def test_prompts_are_those_of_the_requests_that_wait():
    numbers, order = PromptNumbers(), requests(10)
    waiting = WaitingQueue(numbers)
    waiting.add(order)
    while len(waiting):
        assert set(waiting.prompts) == {numbers.of(r.prompt_ids) for r in order}
        first = waiting.first(3)
        assert waiting.take(len(first)) == first
        assert [p.request for p in first] == order[:3]
        order = order[3:]
    assert not waiting.prompts and not waiting.first(3)


def test_what_was_brought_comes_before_what_waits_from_the_start():
    waiting, brought = WaitingQueue(PromptNumbers()), [PartialRequest(r) for r in requests(2)]
    waiting.add(requests(3))
    waiting.add_partial(brought)
    assert waiting.first(5) == brought
    assert waiting.take(1) == brought[:1] and waiting.first(5) == brought[1:]
    waiting.take(1)
    assert [p.request for p in waiting.first(5)] == requests(3)

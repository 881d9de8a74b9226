"""Waiting requests, and what each round asks about their prompts."""

from rl.engine.waiting_queue import WaitingQueue
from rl.trajectory import Request


class Prompt(tuple):
    """A prompt that counts how often it is hashed."""

    hashed = 0

    def __hash__(self):
        Prompt.hashed += 1
        return super().__hash__()


def requests(count):
    return [Request(i, Prompt((i // 4, 7)), i // 4, i % 4) for i in range(count)]


def test_prompts_are_those_of_the_requests_that_wait():
    waiting, order = WaitingQueue(), requests(10)
    waiting.add(order)
    while len(waiting):
        assert set(waiting.prompts) == {r.prompt_ids for r in order}
        assert [p.request for p in waiting.take_new(3)] == order[:3]
        order = order[3:]
    assert not waiting.prompts and not waiting.take_new(3)


def test_rounds_do_not_hash_the_prompts_that_wait():
    waiting = WaitingQueue()
    waiting.add(requests(1000))
    Prompt.hashed = 0
    for _ in range(100):
        assert (3, 7) in waiting.prompts and (1000, 7) not in waiting.prompts
    assert Prompt.hashed == 0
    waiting.take_new(10)
    assert Prompt.hashed < 100

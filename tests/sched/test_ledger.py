"""What schedulers keep over many steps: their books do not grow with the run."""

from __future__ import annotations

import collections

import pytest

from reprise.sched.policies.divided import make_scheduler
from reprise.sched.policies.histopipe import HistoPipe, HistoPipeConfig
from reprise.sched.policies.steps import StepOrder
from reprise.sched.protocol import (
    ChunkDone,
    Defer,
    Finished,
    Start,
    Submitted,
    Trained,
    WorkerJoined,
)
from reprise.sched.request import RequestSpec

GROUPS, SIZE, LIMIT = 4, 3, 12
CONTAINERS = list | tuple | set | frozenset | collections.deque


def held_entries(value, seen):
    """The entries of all containers of a scheduler, however deep; other rooms' things are one."""
    if id(value) in seen or isinstance(value, str | int | float | type(None)):
        return 0
    seen.add(id(value))
    if isinstance(value, dict):
        return len(value) + sum(held_entries(x, seen) for x in value.values())
    if isinstance(value, CONTAINERS):
        return len(value) + sum(held_entries(x, seen) for x in value)
    if type(value).__module__.startswith("reprise.sched.") and hasattr(value, "__dict__"):
        return sum(held_entries(x, seen) for x in vars(value).values())
    return 0


def requests(step):
    first = step * GROUPS
    return tuple(
        RequestSpec(g * SIZE + i, g, 2, LIMIT, past_tokens=(3, 4, 5), step=step)
        for g in range(first, first + GROUPS)
        for i in range(SIZE)
    )


def play(scheduler, steps):
    """Answer each step and train on it; the scheduler's size after each."""
    tokens, sizes, waiting = collections.Counter(), [], collections.deque()

    def tell(event):
        waiting.extend(a for a in scheduler.handle(event, 0.0) if isinstance(a, Start | Defer))

    for worker in range(2):
        tell(WorkerJoined(worker, 100, 4))
    for step in range(steps):
        tell(Submitted(requests(step)))
        while waiting:
            start = waiting.popleft()
            if isinstance(start, Defer):
                continue
            r, length = start.request_id, 3 + start.request_id % 9
            names = (r, start.worker_id, start.chunk)
            tokens[r] = min(tokens[r] + start.max_tokens, length)
            if tokens[r] == length:
                tell(Finished(*names, length))
            else:
                tell(ChunkDone(*names, tokens[r], pooled=True))
        tell(Trained(step))
        sizes.append(held_entries(scheduler, set()))
    assert scheduler.num_unfinished <= GROUPS * SIZE
    return sizes


def histopipe():
    config = HistoPipeConfig(
        200, num_ranking_groups=2, last_share=0.5, check_tokens=2, epoch_prompts=8
    )
    return HistoPipe(config)


@pytest.mark.parametrize("name", ["group_fifo", "divided_fifo", "seer", "steps", "histopipe"])
def test_the_books_of_a_scheduler_do_not_grow_with_the_steps(name):
    if name == "histopipe":
        scheduler = histopipe()
    elif name == "steps":
        scheduler = StepOrder(make_scheduler("seer", seed=0, chunk_tokens=4), "one_step_off")
    else:
        scheduler = make_scheduler(name, seed=0, chunk_tokens=4)
    sizes = play(scheduler, 100)
    assert max(sizes[50:]) <= 1.2 * max(sizes[5:50]), sizes

"""Admission by hand, and for any table: every row is filled with its own prompt; the queue."""

from hypothesis import given
from hypothesis import strategies as st

from reprise.rl.records.trajectory import PartialRequest, Request
from reprise.rl.slots import admission
from reprise.rl.slots.admission import WaitingQueue
from reprise.rl.slots.ending import Endings
from reprise.rl.slots.slot_table import Prompts, SlotTable
from reprise.spec.config import SamplingConfig
from reprise.spec.page_table import PageTable

A, B, C, D = range(4)
PROMPTS = [(number, 7, 7, 7) for number in range(6)]
PAGE = 2
SLOT_PAGES = 3


def assign(prompts, free_rows, held, wanted_later=(), entered=None):
    """Rows for requests with these prompts; `held` has the prompt of each row. Pages suffice.

    `entered` has the order in which the last requests of rows entered.
    """
    table = SlotTable(len(held), 8, Endings(SamplingConfig(max_new_tokens=2)))
    pages = PageTable(len(held), SLOT_PAGES, SLOT_PAGES * len(held), PAGE)
    requests = [Request(number, prompt) for number, prompt in enumerate(PROMPTS)]
    assert [table.known_prompts.of(r).number for r in requests] == list(range(6))
    if entered is not None:
        table.entered_B[:] = entered
    for row, prompt in enumerate(held):
        table.prompts[row] = prompt
        table.busy_B[row] = row not in free_rows
        if prompt is not None:
            assert pages.reserve(row, len(PROMPTS[prompt]) - 1)
    waiting = [PartialRequest(requests[prompt]) for prompt in prompts]
    return admission.assign(waiting, table, pages, 1, wanted_later)


def fills(lacking, held, parts=None, is_busy=None):
    """By default rows of one part, all busy."""
    return admission.fills(lacking, held, parts or [0] * len(held), is_busy or [True] * len(held))


def enter(prompts, held, free_rows, later=()):
    """The rows of these prompts; `held` is then what is whole."""
    rows = assign(prompts, free_rows, held, later)
    for row, prompt in zip(rows, prompts, strict=True):
        held[row] = prompt if held[row] == prompt else None
    return rows


def fill(rows, prompts, held):
    """Carry out all copies and computations; return the prompts that were computed, in order."""
    lacking = {r: p for r, p in zip(rows, prompts, strict=True) if held[r] is None}
    computed = []
    while lacking:
        copies, now = fills(lacking, held)
        assert copies or now
        assert not {s for s, _ in copies} & {t for _, t in copies} and not set(now) & {
            t for _, t in copies
        }
        before = list(held)
        for source, target in copies:
            held[target] = before[source]
        for row in now[:1]:  # the others have to wait
            held[row] = lacking[row]
            computed.append(lacking[row])
        lacking = {r: p for r, p in lacking.items() if held[r] is None}
    return computed


def test_a_prompt_is_copied_from_the_own_part_first_and_from_a_busy_row_there():
    held = [A, A, None, A, A, None]
    assert fills({2: A, 5: A}, held, [0, 0, 0, 1, 1, 1]) == ([(1, 2), (4, 5)], [])
    is_busy = [True, False, True, False, True, True]
    assert fills({2: A, 5: A}, held, [0, 0, 0, 1, 1, 1], is_busy) == ([(0, 2), (4, 5)], [])
    assert fills({5: A}, held[:3] + [None] * 3, [0, 0, 0, 1, 1, 1]) == ([(1, 5)], [])


def test_a_free_row_that_holds_the_prompt_is_taken():
    assert assign([A, B], [0, 1, 2], [C, B, A]) == [2, 1]
    assert assign([A, A], [0, 1], [A, B]) == [0, 1]


def test_rows_wanted_later_are_overwritten_last():
    assert assign([C], [0, 1, 2], [A, B, None], wanted_later=frozenset([A, B])) == [2]
    assert assign([C], [0, 1], [A, B], wanted_later=frozenset([A])) == [1]


def test_a_free_row_with_a_wanted_prompt_is_not_given_to_another():
    # row 0 holds what the second request wants; the first must not be put there
    assert assign([D, A], [0, 1], [A, None]) == [1, 0]


def test_a_row_that_a_waiting_request_reuses_is_kept_before_one_that_a_later_request_wants():
    assert assign([D, A], [0, 1], [A, B], wanted_later={B}, entered=[1, 2]) == [1, 0]
    assert assign([D, A, A], [0, 1, 2], [A, A, B], wanted_later={B}, entered=[1, 2, 3]) == [2, 0, 1]


def test_of_equal_rows_the_one_with_the_oldest_last_request_is_taken():
    """A server keeps the rows of the dialogues that went on last."""
    assert assign([D], [0, 1, 2], [A, B, C], entered=[3, 1, 2]) == [1]
    assert assign([D, D], [0, 1, 2], [A, B, C], wanted_later={B}, entered=[3, 1, 2]) == [2, 0]


PROMPT = st.integers(0, 5)


@st.composite
def tables(draw):
    held = draw(st.lists(st.none() | PROMPT, min_size=1, max_size=8))
    free = draw(st.lists(st.sampled_from(range(len(held))), unique=True, min_size=0))
    prompts = draw(st.lists(PROMPT, max_size=len(free)))
    return prompts, free, held, frozenset(draw(st.lists(PROMPT, max_size=3)))


@given(tables())
def test_every_request_gets_its_prompt_in_any_table(table):
    prompts, free, before, later = table
    held = list(before)
    rows = enter(prompts, held, free, later)
    assert len(set(rows)) == len(prompts) and set(rows) <= set(free)
    computed = fill(rows, prompts, held)
    assert [held[r] for r in rows] == prompts
    # untouched unless assigned
    assert all(held[r] == before[r] for r in range(len(held)) if r not in rows)
    # a prompt is computed once, and only where no row holds it
    assert len(set(computed)) == len(computed)
    assert set(computed) == set(prompts) - set(before)


@given(
    num_groups=st.integers(1, 5),
    group_size=st.integers(1, 5),
    num_slots=st.integers(1, 6),
    data=st.data(),
)
def test_groups_in_order_are_computed_once_each(num_groups, group_size, num_slots, data):
    """Requests end in any order, slots are refilled at once: each prompt is computed once."""
    queue = [g for g in range(num_groups) for _ in range(group_size)]
    held, busy, computed = [None] * num_slots, set(), []
    while queue or busy:
        free = [r for r in range(num_slots) if r not in busy]
        entering, queue = queue[: len(free)], queue[len(free) :]
        rows = enter(entering, held, free, frozenset(queue))
        computed += fill(rows, entering, held)
        busy |= set(rows)
        ended = data.draw(st.sets(st.sampled_from(sorted(busy)), min_size=1))
        busy -= ended
    assert sorted(computed) == list(range(num_groups))


# --- the queue --------------------------------------------------------------------------


def requests(count):
    return [PartialRequest(Request(i, (i // 4, 7), i // 4, i % 4)) for i in range(count)]


def test_prompts_are_those_of_the_requests_that_wait():
    prompts, order = Prompts(), requests(10)
    waiting = WaitingQueue(prompts)
    waiting.add(order, is_new=True)
    while len(waiting):
        assert set(waiting.prompts) == {prompts.of(p.request)[0] for p in order}
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

"""Admission by hand, and for any table: rows hold the right prompts after the plan."""

from hypothesis import given
from hypothesis import strategies as st

from rl.engine.admission import AdmissionPlan, plan

A, B, C, D = (1,), (2, 2), (3,), (4,)


def after(plan: AdmissionPlan, held, free_rows):
    """What each row holds once the plan is carried out, copies before inserts."""
    rows = list(held)
    for source, target in plan.copies:
        assert target in free_rows
        rows[target] = rows[source]
    for index, target in plan.inserts:
        assert target in free_rows
        rows[target] = plan.prefill[index]
    return rows


def test_a_group_in_an_empty_table_is_computed_once():
    got = plan([A, A, A], [0, 1, 2, 3], [None] * 4)
    assert got == AdmissionPlan(
        rows=(0, 1, 2), prefill=(A,), inserts=((0, 0), (0, 1), (0, 2)), copies=()
    )


def test_prompts_are_computed_in_the_order_of_their_first_request():
    got = plan([B, A, B], [3, 1, 0], [None] * 4)
    assert got == AdmissionPlan(
        rows=(0, 1, 3), prefill=(B, A), inserts=((0, 0), (1, 1), (0, 3)), copies=()
    )


def test_siblings_copy_from_a_busy_row():
    got = plan([A, B], [1, 2], [A, None, C])
    assert got == AdmissionPlan(rows=(1, 2), prefill=(B,), inserts=((0, 2),), copies=((0, 1),))


def test_a_free_row_that_holds_the_prompt_needs_nothing():
    got = plan([A, B], [0, 1, 2], [C, B, A])
    assert got == AdmissionPlan(rows=(2, 1), prefill=(), inserts=(), copies=())


def test_siblings_copy_from_the_row_that_was_kept():
    got = plan([A, A], [0, 1], [A, B])
    assert got == AdmissionPlan(rows=(0, 1), prefill=(), inserts=(), copies=((0, 1),))


def test_rows_wanted_later_are_overwritten_last():
    got = plan([C], [0, 1, 2], [A, B, None], wanted_later=frozenset([A, B]))
    assert got.rows == (2,)
    got = plan([C], [0, 1], [A, B], wanted_later=frozenset([A]))
    assert got.rows == (1,)


def test_a_free_row_with_a_wanted_prompt_is_not_given_to_another():
    # row 0 holds what the second request wants; the first must not be put there
    got = plan([D, A], [0, 1], [A, None])
    assert got == AdmissionPlan(rows=(1, 0), prefill=(D,), inserts=((0, 1),), copies=())


def test_nothing_to_admit():
    assert plan([], [0], [A]) == AdmissionPlan((), (), (), ())


PROMPT = st.sampled_from([A, B, C, D, (5, 5), (6,)])


@st.composite
def tables(draw):
    held = draw(st.lists(st.none() | PROMPT, min_size=1, max_size=8))
    free = draw(st.lists(st.sampled_from(range(len(held))), unique=True, min_size=0))
    prompts = draw(st.lists(PROMPT, max_size=len(free)))
    return prompts, free, held, frozenset(draw(st.lists(PROMPT, max_size=3)))


@given(tables())
def test_every_request_gets_its_prompt_in_any_table(table):
    prompts, free, held, later = table
    got = plan(prompts, free, held, later)
    assert len(got.rows) == len(prompts) and len(set(got.rows)) == len(prompts)
    assert set(got.rows) <= set(free)
    rows = after(got, held, free)
    assert [rows[r] for r in got.rows] == prompts
    # untouched unless assigned
    assert all(rows[r] == held[r] for r in range(len(held)) if r not in got.rows)
    # copies and inserts are safe in any order
    written = [t for _, t in got.copies] + [t for _, t in got.inserts]
    assert len(written) == len(set(written))
    assert not {s for s, _ in got.copies} & set(written)
    # a prompt is computed once, and only where no row holds it
    assert len(set(got.prefill)) == len(got.prefill)
    assert set(got.prefill) == set(prompts) - set(held)
    assert {i for i, _ in got.inserts} == set(range(len(got.prefill)))


@given(
    num_groups=st.integers(1, 5),
    group_size=st.integers(1, 5),
    num_slots=st.integers(1, 6),
    data=st.data(),
)
def test_groups_in_order_are_computed_once_each(num_groups, group_size, num_slots, data):
    """Requests end in any order, slots are refilled at once: one prefill a prompt all the same."""
    queue = [(g,) for g in range(num_groups) for _ in range(group_size)]
    held, busy, prefilled = [None] * num_slots, set(), []
    while queue or busy:
        free = [r for r in range(num_slots) if r not in busy]
        entering, queue = queue[: len(free)], queue[len(free) :]
        got = plan(entering, free, held, frozenset(queue))
        held = after(got, held, free)
        prefilled += got.prefill
        busy |= set(got.rows)
        ended = data.draw(st.sets(st.sampled_from(sorted(busy)), min_size=1))
        busy -= ended
    assert sorted(prefilled) == [(g,) for g in range(num_groups)]

"""Hidden states from a verifying worker's cache to the rows of a drafting worker, by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from parity_model import BASE, MODEL

from rl.engine.engine import Engine
from spec.decoupled import states as states_module
from spec.decoupled.messages import States
from spec.decoupled.states import StateReader, StateRows, reading_programs
from spec.drafter import LiveSlots

WIDTH = 3
SLOTS, POSITIONS, ROWS = 4, 64, 2
# the state of row b at position s is (b, s, 1)
FEATURES = np.ones((SLOTS, 1, POSITIONS, WIDTH), np.float32)
FEATURES[..., 0], FEATURES[..., 1] = np.arange(SLOTS)[:, None, None], np.arange(POSITIONS)


@pytest.fixture(params=[256, 4])
def pass_tokens(request, monkeypatch):
    """States of a pass: enough for all, and so few that requests have parts of several."""
    monkeypatch.setattr(states_module, "PASS_TOKENS", request.param)


@pytest.fixture
def engine():
    made = Engine(MODEL, dataclasses.replace(BASE, slots=ROWS, min_slots=ROWS, min_positions=32))
    made.expect(ROWS, 100)
    return made


def live_of(*lengths, rows):
    """Requests of so many tokens in these rows of the verifying worker."""
    ids, total_A = np.arange(len(rows)), np.array(lengths, np.int32)
    given = np.array(rows), ids, ids, ids, np.ones(len(rows), np.int32), total_A
    return LiveSlots(*given, np.full(len(rows), 9), np.zeros((SLOTS, POSITIONS), np.int32))


def read(live, first, engine):
    return StateReader(lambda: jnp.asarray(FEATURES), engine).before(live, first)


def plain(parts):
    """(position, row, position of the state) of each state that a request was read."""
    found = []
    for part in parts:
        some = np.asarray(part.states_TW)[part.at : part.at + part.size]
        assert (some[:, 2] == 1).all()
        numbers = range(part.first, part.first + part.size)
        found += [(n, int(b), int(s)) for n, (b, s, _) in zip(numbers, some, strict=True)]
    return found


def test_states_in_front_of_what_is_new(engine, pass_tokens):
    live = live_of(3, 9, 2, rows=[2, 0, 3])
    whole, more, first = read(live, {0: 0, 1: 7, 2: 1}, engine)
    assert plain(whole) == [(0, 2, 0), (1, 2, 1)], "the last token's own comes with the next round"
    assert plain(more) == [(6, 0, 6), (7, 0, 7)]
    assert plain(first) == [(0, 3, 0)]


def test_some_requests_only_and_one_of_a_token(engine, pass_tokens):
    live = live_of(3, 1, 2, rows=[2, 0, 3])
    (lone, last) = read(live, {1: 0, 2: 0}, engine)
    assert lone == () and plain(last) == [(0, 3, 0)]


def test_what_is_read_lies_in_the_rows_where_it_was(engine, pass_tokens):
    """Also once the rows have grown, and beside what other requests are told."""
    rows = StateRows(engine, ROWS, WIDTH)
    live = live_of(5, 60, rows=[3, 1])
    short, long = read(live, {0: 0, 1: 0}, engine)
    rows.put([(1, part) for part in short])
    assert rows.array().shape == (ROWS, 1, 32, WIDTH)
    rows.put([(0, part) for part in long])
    assert rows.array().shape[2] >= 59
    got = np.asarray(rows.array())
    assert (got[1, 0, :4] == FEATURES[3, 0, :4]).all() and (got[1, 0, 4:] == 0).all()
    assert (got[0, 0, :59] == FEATURES[1, 0, :59]).all() and (got[0, 0, 59:] == 0).all()
    more = live_of(8, rows=[3])
    rows.put([(1, part) for part in read(more, {0: 5}, engine)[0]])
    assert (np.asarray(rows.array())[1, 0, :7] == FEATURES[3, 0, :7]).all()
    assert (np.asarray(rows.array())[0] == got[0]).all()


def test_a_planted_fault_is_found(engine):
    """A state that lies one position off is not what it is taken for."""
    rows = StateRows(engine, ROWS, WIDTH)
    live = live_of(5, rows=[3])
    rows.put([(0, States(*p[:2], p.first + 1, p.size)) for p in read(live, {0: 0}, engine)[0]])
    assert not (np.asarray(rows.array())[0, 0, :4] == FEATURES[3, 0, :4]).all()


def test_programs_are_those_that_are_run(engine):
    rows, found = StateRows(engine, ROWS, WIDTH), []
    for step, arguments in [
        *rows.programs(),
        *reading_programs(
            engine, lambda: engine.zero_rows((SLOTS, 1, POSITIONS, WIDTH), engine.dtype)
        ),
    ]:
        args, options = arguments()
        step(*args, **options)
        found.append(step)
    before = [step._cache_size() for step in found]
    live = live_of(90, rows=[3])
    features = engine.zero_rows((SLOTS, 1, POSITIONS, WIDTH), engine.dtype)
    (parts,) = StateReader(lambda: features, engine).before(live, {0: 0})
    rows.put([(1, part) for part in parts])
    assert rows.array().shape[2] > 64
    assert [step._cache_size() for step in found] == before

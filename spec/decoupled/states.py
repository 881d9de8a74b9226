"""The policy's hidden states, from verifying workers to drafting workers that read them (EAGLE).

    verifying worker   before a round: the states in front of new tokens → `States` of commits
    drafting worker    `StateRows.put` → the positions of each request's row, as an engine has them

They go from device to device, and no host waits for them. B = slots of the verifying worker, R =
rows of the drafting worker, S = positions, T = states of a pass, W = width of a state.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from models.kv_cache import FEATURES, state_windows
from models.layout import FEATURE_AXES
from models.sharding import constrain
from spec import cache_rows
from spec.decoupled.messages import States
from spec.draft_cache.cache import Runner
from spec.drafter import Arguments, LiveSlots, Program

PASS_TOKENS = 256  # states that are read, or written, at a time


@jax.jit
def read_states(states: Any, place_2T: jax.Array) -> jax.Array:
    """Return the states at these slots and positions, [T, W]."""
    row_T, position_T = place_2T
    return constrain(state_windows(states, row_T, position_T, 1)[:, 0], None, "features")


@partial(jax.jit, donate_argnames="states_R1SW")
def write_states(states_R1SW: jax.Array, states_TW: jax.Array, place_2T: jax.Array) -> jax.Array:
    """Write states to these rows and positions; those of row R are dropped."""
    row_T, position_T = place_2T
    states_TW = states_TW.astype(states_R1SW.dtype)
    return states_R1SW.at[row_T, 0, position_T].set(states_TW, mode="drop")


class StateReader:
    """Reads states from a verifying worker's cache, as `states` returns them."""

    def __init__(self, states: Callable[[], Any], runner: Runner) -> None:
        self._states, self._runner = states, runner

    def before(self, live: LiveSlots, first: Mapping[int, int]) -> list[tuple[States, ...]]:
        """Return the states in front of the tokens from `first` on, of requests by their place.

        The first token of a request has none in front of it.
        """
        places = np.array(list(first), np.int64)
        start_A = np.maximum(np.array(list(first.values()), np.int64) - 1, 0)
        count_A = live.total_tokens_A[places] - 1 - start_A
        row_T = np.repeat(live.rows_A[places], count_A)
        nth_T = np.arange(count_A.sum()) - np.repeat(np.cumsum(count_A) - count_A, count_A)
        position_T = np.repeat(start_A, count_A) + nth_T
        states = self._states() if len(row_T) else None
        passes = [
            self._read(states, row_T[at : at + PASS_TOKENS], position_T[at : at + PASS_TOKENS])
            for at in range(0, len(row_T), PASS_TOKENS)
        ]
        found, at = [], 0
        for start, count in zip(start_A.tolist(), count_A.tolist(), strict=True):
            found.append(tuple(_parts(passes, at, start, count)))
            at += count
        return found

    def _read(self, states: Any, row_T: np.ndarray, position_T: np.ndarray) -> jax.Array:
        place_2T = np.zeros((2, PASS_TOKENS), np.int32)
        place_2T[:, : len(row_T)] = row_T, position_T
        return read_states(states, self._runner.argument(place_2T))


def _parts(passes: Sequence[jax.Array], at: int, first: int, count: int) -> Iterator[States]:
    """Yield the parts of `count` states that begin at `at` of all that were read."""
    while count:
        nth, offset = divmod(at, PASS_TOKENS)
        some = min(count, PASS_TOKENS - offset)
        yield States(passes[nth], offset, first, some)
        at, first, count = at + some, first + some, count - some


def reading_programs(runner: Runner, empty: Callable[[], Any]) -> Iterator[Program]:
    """Yield what `StateReader` runs on states like those that `empty` returns."""

    def read() -> Arguments:
        return (empty(), runner.argument(np.zeros((2, PASS_TOKENS), np.int32))), {}

    yield read_states, read


class StateRows:
    """The states of a drafting worker's requests, by row; they grow with the longest request."""

    def __init__(self, runner: Runner, num_rows: int, width: int) -> None:
        self._runner, self._num_rows, self._width = runner, num_rows, width
        self._states: jax.Array | None = None

    def array(self) -> jax.Array:
        """Return [R, 1, S, W], until the next `put`."""
        if self._states is None:
            self._states = self._empty(self._runner.position_sizes(self._num_rows)[0])
        return self._states

    def empty(self, num_slots: int, num_positions: int) -> jax.Array:
        """Return zeroed states, to compile programs with."""
        assert num_slots == self._num_rows, (num_slots, self._num_rows)
        return self._empty(num_positions)

    def put(self, read: Sequence[tuple[int, States]]) -> None:
        """Write what verifying workers have read, each to a row."""
        if not read:
            return
        self._grow(max(states.first + states.size for _, states in read))
        passes = collections.defaultdict[int, list[tuple[int, States]]](list)
        for row, states in read:
            passes[id(states.states_TW)].append((row, states))
        for some in passes.values():
            place_2T = self._nowhere()
            for row, (_, at, first, size) in some:
                place_2T[0, at : at + size] = row
                place_2T[1, at : at + size] = first + np.arange(size)
            states_TW = self._runner.put(some[0][1].states_TW)
            args = states_TW, self._runner.argument(place_2T)
            self._states = write_states(self.array(), *args)

    def programs(self) -> Iterator[Program]:
        """Yield what `put` runs, in all buckets of positions."""
        sizes = self._runner.position_sizes(self._num_rows)
        for S, more in zip(sizes, [*sizes[1:], None], strict=True):

            def write(S: int = S) -> Arguments:
                states_TW = np.zeros((PASS_TOKENS, self._width), self._runner.dtype)
                args = self._runner.put(states_TW), self._runner.argument(self._nowhere())
                return (self._empty(S), *args), {}

            def grow(S: int = S, more: int | None = more) -> Arguments:
                return (self._empty(S), self._rows()), {"num_positions": more, "kind": FEATURES}

            yield write_states, write
            if more is not None:
                yield cache_rows.resize_layer, grow

    def _grow(self, num_positions: int) -> None:
        sizes = self._runner.position_sizes(self._num_rows)
        while (now := self.array().shape[2]) < num_positions:
            more = next(S for S in sizes if S > now)
            old, rows = self.array(), self._rows()
            self._states = cache_rows.resize_layer(old, rows, num_positions=more, kind=FEATURES)
            old.delete()

    def _empty(self, num_positions: int) -> jax.Array:
        shape = self._num_rows, 1, num_positions, self._width
        return self._runner.zero_rows(shape, self._runner.dtype, FEATURE_AXES)

    def _rows(self) -> jax.Array:
        return self._runner.put(np.arange(self._num_rows, dtype=np.int32))

    def _nowhere(self) -> np.ndarray:
        place_2T = np.zeros((2, PASS_TOKENS), np.int32)
        place_2T[0] = self._num_rows
        return place_2T

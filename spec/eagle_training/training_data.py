"""Training data for drafters: sequences with policy hidden states, packed and buffered.

A sequence longer than a row is cut into windows that overlap by two tokens. An entry spans three
columns, so each response token counts once. Windows keep the rotary positions of the sequence, but
their entries attend only within the window. Windows without a counted entry are left out.

While the long responses of a step are being generated, only short responses have finished. So
drafters learn from these and from long sequences of the previous step (one-step offset sampling).
The `DataBuffer` never holds more than `max_bytes`; for `undo` it also keeps sequences evicted since
`mark`, at most another `max_bytes`. Source: TLT, section 4.2.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from flax import struct

from reprise.spec.eagle.config import DataBufferConfig

LONG_SHARE = 0.5  # of the tokens of a sample, from earlier steps
MAX_AGE_STEPS = 1  # of a sequence in the buffer


@dataclasses.dataclass(frozen=True, eq=False)
class HiddenStates:
    """One prompt and response, with policy hidden states at all tokens but the last.

    `hidden_TW` [T − 1, W] has the policy dtype; W is `EagleConfig.hidden_width`.
    """

    tokens_T: np.ndarray
    prompt_tokens: int
    hidden_TW: np.ndarray
    policy_version: int

    @property
    def num_bytes(self) -> int:
        return self.tokens_T.nbytes + self.hidden_TW.nbytes


class HiddenStateSink(Protocol):
    """A receiver of rollout sequences. Any thread may call its methods."""

    def wants(self, request_id: int, num_tokens: int) -> bool:
        """Return whether a request sequence of this length is worth a copy from the device."""
        ...

    def add(self, sequence: HiddenStates) -> None: ...


@struct.dataclass
class DrafterBatch:
    """Rows of concatenated sequences; arrays are [B, T], hidden states [B, T, W].

    `sequence_BT` numbers the sequences of a row from 1 (0: padding), `positions_BT` the tokens of a
    sequence from 0. Entry t (spec.eagle.model) spans the columns t … t + 2. `counts_BT` marks the
    entries that count in the loss. Such an entry is within one sequence, and its x_{t+2} is a
    response token. The hidden states in the last column of a sequence are zero.
    """

    tokens_BT: Any
    hidden_BTW: Any
    positions_BT: Any
    sequence_BT: Any
    counts_BT: Any


OVERLAP_TOKENS = 2  # of adjacent windows: entry t spans the columns t … t + 2


@dataclasses.dataclass(frozen=True)
class _Window:
    """Tokens `start` … `stop` − 1 of sequence `index`; a sequence that fits is one window."""

    index: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def pack(
    sequences: Sequence[HiddenStates],
    num_rows: int,
    row_tokens: int,
    max_batches: int | None = None,
) -> list[DrafterBatch]:
    """Pack sequences into few rows: the longest first, each into the first row with room.

    Returns numpy batches [num_rows, row_tokens] with each sequence once. Rows are dealt to the
    batches round-robin, so that each batch has long and short sequences. With `max_batches`, the
    emptiest rows beyond this limit are left out. Raises ValueError if windows would not advance.
    """
    windows = _windows(sequences, row_tokens)
    windows.sort(key=lambda w: -w.num_tokens)
    free = np.full(len(windows), row_tokens)
    rows: list[list[_Window]] = []
    for window in windows:
        r = int(np.argmax(free >= window.num_tokens))  # an empty row always has room
        if r == len(rows):
            rows.append([])
        rows[r].append(window)
        free[r] -= window.num_tokens
    if max_batches is not None:
        fullest = np.argsort(free[: len(rows)], kind="stable")[: max_batches * num_rows]
        rows = [rows[r] for r in sorted(fullest.tolist())]
    num_batches = -(-len(rows) // num_rows)
    return [
        _batch(sequences, rows[i::num_batches], num_rows, row_tokens) for i in range(num_batches)
    ]


def _windows(sequences: Sequence[HiddenStates], row_tokens: int) -> list[_Window]:
    if row_tokens <= OVERLAP_TOKENS:
        raise ValueError(
            f"expected row_tokens above {OVERLAP_TOKENS}, since a prediction takes three tokens, "
            f"got {row_tokens}"
        )
    windows = []
    for index, sequence in enumerate(sequences):
        num_tokens = len(sequence.tokens_T)
        for start in range(0, num_tokens - OVERLAP_TOKENS, row_tokens - OVERLAP_TOKENS):
            stop = min(start + row_tokens, num_tokens)
            if stop > sequence.prompt_tokens:
                windows.append(_Window(index, start, stop))
    return windows


def _batch(
    sequences: Sequence[HiddenStates], rows: list[list[_Window]], num_rows: int, row_tokens: int
) -> DrafterBatch:
    shape = (num_rows, row_tokens)
    states = sequences[0].hidden_TW
    tokens_BT, positions_BT, sequence_BT = (np.zeros(shape, np.int32) for _ in range(3))
    hidden_BTW = np.zeros((*shape, states.shape[1]), states.dtype)
    counts_BT = np.zeros(shape, np.bool_)
    for b, row in enumerate(rows):
        end = 0
        for number, window in enumerate(row, 1):
            source = sequences[window.index]
            begin = end
            end = end + window.num_tokens
            tokens_BT[b, begin:end] = source.tokens_T[window.start : window.stop]
            # hidden states of the last column are not used, even if a cut window has them
            hidden_BTW[b, begin : end - 1] = source.hidden_TW[window.start : window.stop - 1]
            positions_BT[b, begin:end] = np.arange(window.start, window.stop)
            sequence_BT[b, begin:end] = number
            # the first entry t with a response token x_{t+2} in this window
            first = max(window.start, source.prompt_tokens - OVERLAP_TOKENS)
            counts_BT[b, begin + first - window.start : end - OVERLAP_TOKENS] = True
    return DrafterBatch(tokens_BT, hidden_BTW, positions_BT, sequence_BT, counts_BT)


_SAMPLE_STREAM = 1  # random stream, separate from the stream of training


@dataclasses.dataclass(frozen=True)
class RequestSample:
    """A random share of the requests in a step, the same for all callers."""

    seed: int
    step: int
    share: float

    def __contains__(self, request_id: int) -> bool:
        name = [_SAMPLE_STREAM, self.seed, self.step, request_id]
        return self.share >= 1 or np.random.default_rng(name).random() < self.share


class DataBuffer:
    """A buffer of sequences by RL step; several threads may add sequences and sample.

    The newest step with a sequence is the current step. Sequences of the oldest step are evicted
    first. Within an earlier step, the shortest sequences go first, since the current step lacks
    long sequences; within the current step, the oldest go first. A new sequence is dropped if it
    would be evicted first. Arrays are read-only.
    """

    def __init__(self, config: DataBufferConfig) -> None:
        self.config = config
        self.dropped = 0  # sequences larger than the bound, too old, or first to be evicted
        self.evicted = 0  # sequences evicted for room or by age
        self._lock = threading.Lock()
        # in the order of eviction: by length, in the current step by age
        self._steps: dict[int, list[HiddenStates]] = {}
        self._newest_step = -1
        self._num_bytes = 0
        self._width = 0
        self._dtype = np.dtype(np.float32)  # of the newest sequence
        self._marked = self._books()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_sequences(self) -> int:
        with self._lock:
            return sum(map(len, self._steps.values()))

    def share_for(
        self, step: int, num_requests: int, max_total_tokens: int, token_bytes: int
    ) -> float:
        """Return the share of requests to collect in a step, each drawn before it runs.

        Each step has an equal part of `max_bytes`. Requests are expected to be as long as the
        sequences held from the newest earlier step. Without such a step, they are expected to have
        `max_total_tokens` tokens.
        """
        with self._lock:
            newest = max((s for s in self._steps if s < step), default=None)
            lengths = [max_total_tokens] if newest is None else map(_length, self._steps[newest])
            expected_tokens = num_requests * float(np.mean([*lengths]))
        room_bytes = self.config.max_bytes / (1 + MAX_AGE_STEPS)
        return min(1.0, room_bytes / (expected_tokens * token_bytes))

    def wants(self, num_tokens: int, step: int) -> bool:
        """Return whether a sequence of `num_tokens` tokens from this step would be kept now."""
        with self._lock:
            num_bytes = _num_bytes(num_tokens, self._width, self._dtype)
            return self._evicted_for(num_tokens, num_bytes, step) is not None

    def add(self, sequence: HiddenStates, step: int) -> None:
        """Copy a sequence of RL step `step` into the buffer, or count it in `dropped`.

        Raises ValueError if its hidden states do not fit its tokens or the states already held.
        """
        step = int(step)  # a checkpoint rejects numpy integers
        T = len(sequence.tokens_T)
        if len(sequence.hidden_TW) != T - 1 or not 0 <= sequence.prompt_tokens <= T:
            raise ValueError(
                f"expected states of {T - 1} tokens and a prompt of at most {T}, got "
                f"{len(sequence.hidden_TW)} and {sequence.prompt_tokens}"
            )
        num_tokens = len(sequence.tokens_T)
        width = sequence.hidden_TW.shape[1]
        dtype = sequence.hidden_TW.dtype
        num_bytes = _num_bytes(num_tokens, width, dtype)
        with self._lock:
            if self._steps and (width, dtype) != (self._width, self._dtype):
                raise ValueError(
                    f"expected hidden states of width {self._width} in {self._dtype}, as the "
                    f"buffer holds, got width {width} in {dtype}: use a buffer for each policy"
                )
            self._width = width
            self._dtype = dtype
            self._move_on(step)
            evicted = self._evicted_for(num_tokens, num_bytes, step)
            if evicted is None:
                self.dropped += 1
                return
            for held_step, count in evicted.items():
                self._evict(held_step, count)
            # make room before the copy, so that the bound holds at every moment
            own = _owned(sequence)
            held = self._steps.setdefault(step, [])
            if step < self._newest_step:
                bisect.insort(held, own, key=_length)
            else:
                held.append(own)
            self._num_bytes += num_bytes

    def mark(self) -> None:
        """Remember the current contents for `undo`."""
        with self._lock:
            self._marked = self._books()

    def undo(self) -> None:
        """Restore the contents at the last `mark`."""
        with self._lock:
            vars(self).update(self._marked)
            self._marked = self._books()

    def drop_before(self, step: int) -> None:
        """Evict all sequences of steps before `step`."""
        with self._lock:
            self._drop_before(step)

    def sample(self, num_tokens: int, step: int, rng: np.random.Generator) -> list[HiddenStates]:
        """Draw sequences with `num_tokens` tokens or slightly more, to train a drafter in `step`.

        1. A share `LONG_SHARE` of the tokens comes from earlier steps. Sequences are drawn without
        replacement, in proportion to their lengths, among the sequences longer than the longest of
        `step`, or among all if no sequence is longer. 2. The rest is drawn uniformly from `step`.
        3. If these are too few, more sequences of 1 follow, then the other sequences of earlier
        steps. The result depends only on the contents and `rng`. Source: TLT, section 4.2, which
        gives long sequences priority; shares and weights are ours.
        """
        with self._lock:
            now = list(self._steps.get(step, ()))
            ages = range(MAX_AGE_STEPS, 0, -1)
            before = [c for age in ages for c in self._steps.get(step - age, ())]
        max_length = max(map(_length, now), default=0)
        lengths = np.asarray(list(map(_length, before)), np.float64)
        # sorting by log(weight) + Gumbel noise gives draws proportional to weight, without
        # replacement
        order = np.argsort(-(np.log(lengths) + rng.gumbel(size=len(before))), kind="stable")
        min_length = max_length if (lengths > max_length).any() else 0
        long = [before[i] for i in order if lengths[i] > min_length]
        others = [before[i] for i in order if lengths[i] <= min_length]
        now = [now[i] for i in rng.permutation(len(now))]
        chosen = _first(long, LONG_SHARE * num_tokens)
        long = long[len(chosen) :]
        for more in (now, long, others):
            chosen += _first(more, num_tokens - sum(map(_length, chosen)))
        return chosen

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint (rl.checkpoint.contents), without copies."""
        with self._lock:
            pairs = [(s, c) for s in sorted(self._steps) for c in self._steps[s]]
            return {
                "newest_step": self._newest_step,
                "dropped": self.dropped,
                "evicted": self.evicted,
                "width": self._width,
                "dtype": self._dtype.name,  # npz stores bytes, but not every policy dtype
                "steps": [step for step, _ in pairs],
                "prompt_tokens": [c.prompt_tokens for _, c in pairs],
                "policy_versions": [c.policy_version for _, c in pairs],
                "tokens": [c.tokens_T for _, c in pairs],
                "caught": [c.hidden_TW.view(np.uint8) for _, c in pairs],
            }

    def load_state(self, state: dict[str, Any]) -> None:
        """Replace the contents with a `state`; a tighter bound or age evicts sequences."""
        dtype = np.dtype(state["dtype"])
        with self._lock:
            self._steps.clear()
            self._num_bytes = 0
            self._newest_step = -1
            self._width = state["width"]
            self._dtype = dtype
        self.dropped = state["dropped"]
        self.evicted = state["evicted"]
        names = ("tokens", "prompt_tokens", "caught", "policy_versions", "steps")
        for tokens, prompt, raw, version, step in zip(*(state[n] for n in names), strict=True):
            self.add(HiddenStates(tokens, prompt, raw.view(dtype), version), step)
        with self._lock:
            self._move_on(state["newest_step"])

    # -- under the lock ----------------------------------------------------------

    def _books(self) -> dict[str, Any]:
        """Return copies of all attributes that `add` changes; sequences never change."""
        names = ("dropped", "evicted", "_newest_step", "_num_bytes", "_width", "_dtype")
        steps = {step: list(held) for step, held in self._steps.items()}
        return {name: getattr(self, name) for name in names} | {"_steps": steps}

    def _evicted_for(self, num_tokens: int, num_bytes: int, step: int) -> dict[int, int] | None:
        """Return the evictions per step that make room for a new sequence; None: drop it."""
        if step < self._newest_step - MAX_AGE_STEPS:
            return None
        over = self._num_bytes + num_bytes - self.config.max_bytes
        evicted: dict[int, int] = {}
        for held_step in sorted({*self._steps, step}):
            for held in self._steps.get(held_step, ()):
                longer = held_step == step < self._newest_step and _length(held) > num_tokens
                if over <= 0 or longer:
                    break
                over -= held.num_bytes
                evicted[held_step] = evicted.get(held_step, 0) + 1
            if over > 0 and held_step == step:
                return None
        return evicted

    def _move_on(self, step: int) -> None:
        """Make `step` the current step unless a newer step exists."""
        if step > self._newest_step:
            if self._newest_step in self._steps:
                self._steps[self._newest_step].sort(key=_length)
            self._newest_step = step
            self._drop_before(step - MAX_AGE_STEPS)

    def _drop_before(self, step: int) -> None:
        for held_step in [s for s in self._steps if s < step]:
            self._evict(held_step, len(self._steps[held_step]))

    def _evict(self, step: int, count: int) -> None:
        held = self._steps[step]
        self._num_bytes -= sum(sequence.num_bytes for sequence in held[:count])
        self.evicted += count
        del held[:count]
        if not held:
            del self._steps[step]


def _length(sequence: HiddenStates) -> int:
    return len(sequence.tokens_T)


def _num_bytes(num_tokens: int, width: int, dtype: np.dtype) -> int:
    return 4 * num_tokens + max(num_tokens - 1, 0) * width * dtype.itemsize


def _first(sequences: Sequence[HiddenStates], num_tokens: float) -> list[HiddenStates]:
    """Return the fewest leading sequences with `num_tokens` tokens, or all sequences."""
    count = 0
    total = 0
    while count < len(sequences) and total < num_tokens:
        total += _length(sequences[count])
        count += 1
    return list(sequences[:count])


def _owned(sequence: HiddenStates) -> HiddenStates:
    """Return a read-only copy."""
    tokens_T = np.array(sequence.tokens_T, np.int32, order="C")
    hidden_TW = np.array(sequence.hidden_TW, order="C")
    tokens_T.setflags(write=False)
    hidden_TW.setflags(write=False)
    prompt_tokens = int(sequence.prompt_tokens)
    version = int(sequence.policy_version)
    return HiddenStates(tokens_T, prompt_tokens, hidden_TW, version)

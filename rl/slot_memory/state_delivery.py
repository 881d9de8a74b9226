"""Delivery of hidden states from the device to a sink, while rounds run.

When a response finishes, its states are copied on the device, so that the next round may overwrite
the row. A thread waits for the transfer and passes sequences to the sink in order of completion.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import jax
import numpy as np

from reprise.spec.eagle_training.training_data import HiddenStates, HiddenStateSink

MAX_WAITING_BYTES = 2**30  # beyond one sequence; on the device and on the host


@dataclasses.dataclass(frozen=True, eq=False)
class Ended:
    """A finished response with its tokens, and with copies of the states of all but the last token.

    A copy is (first position, [C, W]); the last copy may reach beyond the states.
    """

    tokens_T: np.ndarray
    prompt_tokens: int
    copies: Sequence[tuple[int, jax.Array]]
    policy_version: int

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes for _, copy in self.copies)

    def states(self) -> HiddenStates:
        """Wait for the device; return the whole sequence on the host."""
        T = len(self.tokens_T)
        _, first_CW = self.copies[0]
        hidden_TW = np.empty((T - 1, first_CW.shape[1]), first_CW.dtype)
        for start, copy_CW in self.copies:
            part_TW = np.asarray(copy_CW)[: T - 1 - start]
            hidden_TW[start : start + len(part_TW)] = part_TW
        return HiddenStates(self.tokens_T, self.prompt_tokens, hidden_TW, self.policy_version)


class StateDelivery:
    """A context manager that passes sequences to a sink.

    On exit all sequences have arrived, or the error of the sink is raised; if a rollout fails,
    waiting sequences are dropped. With `in_turn`, `wants` waits for sequences that were sent, so
    that answers do not depend on timing.
    """

    def __init__(self, sink: HiddenStateSink, *, in_turn: bool = False) -> None:
        self._sink = sink
        self._in_turn = in_turn
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hidden states")
        self._waiting: collections.deque[tuple[Future[None], int]] = collections.deque()
        self._waiting_bytes = 0

    def wants(self, request_id: int, num_tokens: int) -> bool:
        """Return whether the sink wants the sequence of a request, of `num_tokens` tokens."""
        while self._in_turn and self._waiting:
            self._wait_for_first()
        return self._sink.wants(request_id, num_tokens)

    def send(self, ended: Ended) -> None:
        """Start the transfer; queue it once there is room, raising errors of earlier sequences."""
        for _, copy_CW in ended.copies:
            copy_CW.copy_to_host_async()
        room = MAX_WAITING_BYTES - ended.num_bytes
        while self._waiting and (self._waiting[0][0].done() or self._waiting_bytes > room):
            self._wait_for_first()
        self._waiting.append((self._thread.submit(self._deliver, ended), ended.num_bytes))
        self._waiting_bytes += ended.num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while kind is None and self._waiting:
                self._wait_for_first()
        finally:
            self._thread.shutdown(cancel_futures=True)

    def _wait_for_first(self) -> None:
        future, num_bytes = self._waiting.popleft()
        self._waiting_bytes -= num_bytes
        future.result()

    def _deliver(self, ended: Ended) -> None:
        self._sink.add(ended.states())

"""The results of a session of workers: responses, and requests that go on elsewhere; errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rl.trajectory import PartialRequest, Trajectory
from sched.request import copy_of


class WorkerError(RuntimeError):
    """A worker raised, or hangs; the message names the requests that ran there."""

    def __init__(self, worker_id: int, request_ids: Sequence[int], error: BaseException) -> None:
        originals = dict.fromkeys(copy_of(r)[0] for r in request_ids)
        shown = ", ".join(map(str, originals)) or "none"
        super().__init__(
            f"worker {worker_id} failed on requests {shown}: {type(error).__name__}: {error}"
        )
        self.worker_id, self.__cause__ = worker_id, error


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A request was deferred into the next step, unfinished."""

    request_id: int


@dataclasses.dataclass(frozen=True, eq=False)
class Returned:
    """A request that was begun ahead of its step has left its worker, unfinished."""

    partial: PartialRequest


Result = Trajectory | Deferred | Returned | BaseException

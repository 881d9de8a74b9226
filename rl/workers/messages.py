"""The messages of a rollout: what the coordinator sends to workers, and gives to its owner."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Sequence

from rl.trajectory import Trajectory
from sched.protocol import Copy, Drop, Start
from sched.request import copy_of

LET_GO = (-1, None)  # in an inbox: all requests that came before it leave
# (step, start), in order, or what is to be done with a request that was started; None: nothing more
# will come
Message = tuple[int, Start | Copy | Drop | None]
Inbox = queue.SimpleQueue[Message | None]


class WorkerError(RuntimeError):
    """A worker's thread raised, or hangs; the message names the requests that ran there."""

    def __init__(self, worker_id: int, request_ids: Sequence[int], error: BaseException) -> None:
        originals = dict.fromkeys(copy_of(r)[0] for r in request_ids)
        shown = ", ".join(map(str, originals)) or "none"
        super().__init__(
            f"worker {worker_id} failed on requests {shown}: {type(error).__name__}: {error}"
        )
        self.worker_id, self.__cause__ = worker_id, error
        self.num_requests = len(request_ids)


class Aborted(Exception):
    """The rollout was aborted while this worker ran, or this worker was declared lost."""


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A request was deferred into the next step, unfinished."""

    request_id: int


@dataclasses.dataclass(frozen=True)
class Returned:
    """A request that was begun ahead of its step has left its worker, unfinished."""

    request_id: int


Result = Trajectory | Deferred | Returned | WorkerError

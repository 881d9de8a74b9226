"""TensorBoard events of a run, written in the calling thread.

The `SummaryWriter` of tensorboardX has a thread that exits with a traceback at the first disk
error; its queue then fills, and blocks the run forever.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventFile:
    """An event file in a folder; from `purge_step` on, TensorBoard hides events of older files.

    Raises OSError.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        # without the suffix, two writers in the same second would share and truncate one file
        self._file: Any = EventsWriter(str(folder / "events"), f".{uuid.uuid4().hex[:8]}")
        if purge_step is not None:
            self._add(purge_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of a step."""
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._add(step, wall_time=time.time(), summary=scalar(name, value))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write_event(Event(step=step, **fields))

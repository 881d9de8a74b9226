"""A program that answers messages: what brings them (Ray, a test) calls `answer`."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl.remote.messages import Failed
from rl.remote.wire import Codec, WireError
from rl.runtime.progress import say

LOOK_S = 1.0  # between two looks at how long nobody has spoken


class MessageProgram:
    """Answers messages, from any number of threads, by the function that `answers` has for a type.

    `leave` is called with a line where nobody has spoken for the seconds of `end_after_silence`.
    """

    def __init__(
        self,
        codec: Codec,
        leave: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._codec, self._leave, self._clock = codec, leave, clock
        self._heard_s, self._watches = clock(), False
        self.answers: Mapping[type, Callable[[Any], Any]] = {}

    def answer(self, message: bytes) -> bytes:
        """Return the answer to a message; `Failed` for what cannot be done or read."""
        self._heard_s = self._clock()
        try:
            asked = self._codec.decode(message)
            if type(asked) not in self.answers:
                known = ", ".join(kind.__name__ for kind in self.answers)
                raise WireError(f"expected one of {known}, got {type(asked).__name__}")
            return self._codec.encode(self.answers[type(asked)](asked))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f" ({Path(where.filename).name}:{where.lineno})"
            text = f"{str(error)[:2000]}{'' if isinstance(error, WireError) else place}"
            return self._codec.encode(Failed(type(error).__name__, text))

    def end_after_silence(self, limit_s: float) -> None:
        """Call `leave` once nobody has spoken for `limit_s`; a second call changes nothing."""
        if self._leave is not None and not self._watches:
            self._watches = True
            settings = self._leave, limit_s
            threading.Thread(
                target=self._watch_silence, args=settings, name="silence", daemon=True
            ).start()

    def _watch_silence(self, leave: Callable[[str], None], limit_s: float) -> None:
        while (silent_s := self._clock() - self._heard_s) < limit_s:
            time.sleep(min(LOOK_S, limit_s / 4))
        leave(f"nobody has spoken to this program for {silent_s:.1f} s: it ends")


def end_process(why: str) -> None:
    """End this program at once, with a line."""
    say(why)
    os._exit(1)

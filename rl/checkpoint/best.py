"""The best checkpoint of a run by evaluation, recorded in `evaluation.json` and never pruned."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reprise.models.folder import Folder, held
from reprise.rl.checkpoint.folders import list_steps
from reprise.rl.runtime.run_files import CHECKPOINTS, EVALUATION_FILE


@dataclasses.dataclass(frozen=True)
class Best:
    """The step with the highest evaluation, the metric, and its value."""

    step: int
    metric: str
    value: float


def read_best(run: Path | str) -> Best | None:
    """Return the recorded best step of a run, or None. Raises ValueError for a damaged record."""
    with held(run) as folder:
        result = read_record(folder).get("best")
    return None if result is None else Best(**result)


def read_record(folder: Folder) -> dict[str, Any]:
    """Return the checked `evaluation.json` of a run; {} if missing. ValueError if damaged."""
    if not folder.exists(EVALUATION_FILE):
        return {}
    where = folder.path / EVALUATION_FILE
    try:
        record = json.loads(folder.read(EVALUATION_FILE))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected JSON: {error}; delete the file to continue") from error
    if not isinstance(record, dict) or type(record.get("asked")) is not str:
        raise ValueError(f"{where} is not what a run writes; delete the file to continue")
    match record.get("best"):
        case None:
            return record
        case {"step": int(step), "metric": str(), "value": int() | float() as value, **more}:
            is_number = type(value) is not bool and -1e300 < value < 1e300
            if type(step) is int and step >= 0 and is_number and not more:
                return record
    best = str(record["best"])[:80]
    raise ValueError(f"{where}: expected a best step, got {best!r}; delete the file")


def chosen_step(run: Path | str, text: str) -> int | None:
    """Return the step for `newest` (None), `best` or a number. Raises ValueError if missing."""
    if text == "newest":
        return None
    steps = list_steps(Path(run) / CHECKPOINTS)
    if text == "best":
        best = read_best(run)
        if best is None:
            raise ValueError(
                f"{run} records no best step: expected a run that has been evaluated while it "
                f"trained (Eval.every_steps); name one of its steps: {steps or 'none is kept'}"
            )
        step = best.step
    elif text.isdecimal() and len(text) < 16:
        step = int(text)
    else:
        raise ValueError(f"expected a step, newest or best, got {text[:80]!r}")
    if step not in steps:
        raise ValueError(
            f"{run} has no checkpoint of step {step}: expected one of {steps or 'none is kept'}"
        )
    return step


class BestRecord:
    """The record of the best step, written once its checkpoint is whole; thread-safe.

    A record of other questions or sampling is not continued. With several processes, process 0
    `writes`; `from_first` sends the result that process 0 computes to the others.
    """

    def __init__(
        self,
        folder: Folder,
        asked: str,
        *,
        writes: bool = True,
        from_first: Callable[[Callable[[], bytes]], bytes] = lambda compute: compute(),
    ) -> None:
        self._folder = folder
        self._asked = asked
        self._writes = writes
        self._from_first = from_first
        self._lock = threading.Lock()
        self._committed: set[int] = set()
        self._candidate: Best | None = None
        self._written: Best | None = None

    @property
    def best(self) -> Best | None:
        """The best step so far, even if its checkpoint is not whole yet."""
        return self._candidate or self._written

    def begin(self, step: int, evaluated: Sequence[Best]) -> bool:
        """Continue with the best `evaluated` step that has a checkpoint; False for a new record."""
        shared = json.loads(self._from_first(self._there))
        same = shared["record"].get("asked") == self._asked
        steps = shared["kept"]
        last_saved = [b for b in evaluated if same and b.step <= step and b.step in steps]
        with self._lock:
            self._committed.update(steps)
            self._written = max(last_saved, key=lambda b: (b.value, -b.step), default=None)
            self._write()
        return same

    def keep(self) -> None:
        """Keep the record unchanged, since the run is not evaluated (any more)."""
        best = json.loads(self._from_first(self._there))["record"].get("best")
        if best is not None:
            self._written = Best(**best)

    def _there(self) -> bytes:
        """Return the record and the steps that are kept, before either is changed."""
        steps = list_steps(self._folder.path / CHECKPOINTS)
        return json.dumps({"record": read_record(self._folder), "kept": steps}).encode()

    def found(self, best: Best) -> None:
        """Record a better step; its checkpoint may be saved later."""
        with self._lock:
            self._candidate = best
            self._settle()

    def committed(self, step: int) -> None:
        """Record that the checkpoint of a step is whole."""
        with self._lock:
            self._committed.add(step)
            self._settle()

    def spared(self) -> set[int]:
        """Return the steps that must not be pruned."""
        with self._lock:
            return {best.step for best in (self._written, self._candidate) if best is not None}

    def _settle(self) -> None:
        if self._candidate is not None and self._candidate.step in self._committed:
            self._written = self._candidate
            self._candidate = None
            self._write()

    def _write(self) -> None:
        if not self._writes:
            return
        best = None if self._written is None else dataclasses.asdict(self._written)
        record = {"asked": self._asked, "best": best}
        self._folder.replace(EVALUATION_FILE, json.dumps(record, indent=2) + "\n")

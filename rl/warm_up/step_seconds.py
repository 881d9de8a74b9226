"""The record of seconds by step, `step_seconds.jsonl`, so that a resumed run decides as before.

All processes of a run use the record of process 0.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reprise.models.folder import Folder
from reprise.rl.cluster.processes import ALONE, Processes
from reprise.rl.records.stats import RoundRecord, seconds_saved, undisturbed, without_reuse
from reprise.rl.runtime.run_files import SECONDS_FILE
from reprise.rl.speculation.reuse_seconds import NO_REUSE, reuse_loss_text, reuse_saved_s
from reprise.spec.budget.goodput import DEVICE_SOURCES
from reprise.spec.reuse.prefix_rule import ReuseMode
from reprise.spec.round_times import Bucket, RoundTimes, RunSeconds, StepSeconds

if TYPE_CHECKING:  # the import loads the engine
    from reprise.rl.speculation.sources import Speculation

MAX_BYTES = 2**28  # of the file that is read; a step takes about 500 bytes
MAX_SECONDS = 1e12  # of all rounds of a step, on all workers
WHAT = "seconds of steps"


def step_seconds(
    rounds: Sequence[RoundRecord], times: RoundTimes, has_history: bool
) -> StepSeconds:
    """Return the seconds of the rounds of a step, and the seconds that drafts saved at its pace.

    Budgets decided by `times`. Disturbed rounds are left out; savings of reuse are separate.
    """
    rounds = undisturbed(rounds, times)
    own_pace = at_its_pace(rounds, times)
    return StepSeconds(
        sum(r.ended_s - r.began_s for r in rounds),
        seconds_saved(without_reuse(rounds), own_pace),
        _by_bucket(rounds, times),
        has_history,
        reuse_saved_s(rounds, own_pace),
    )


def at_its_pace(rounds: Sequence[RoundRecord], times: RoundTimes) -> RoundTimes:
    """Return the table corrected only by these rounds, since a busy machine slows a whole step."""
    step = RunSeconds()
    clean = undisturbed(rounds, times)
    step.played(StepSeconds(0.0, 0.0, _by_bucket(clean, times), True))
    return step.corrected(times)


def _by_bucket(rounds: Sequence[RoundRecord], times: RoundTimes) -> dict[Bucket, tuple[int, float]]:
    """Return the number of rounds of each bucket, and their median seconds, scaled to half full.

    Rounds with chunks and rounds that draft on the device are not in a bucket.
    """
    is_apart = any(map(times.draft_depths, DEVICE_SOURCES))
    fetches: dict[Bucket, list[tuple[int, float]]] = {}
    for r in rounds:
        count = int(r.rounds_A.max(initial=0))
        has_chunks = r.prompt_tokens or r.cached_in_chunks
        if has_chunks or not count or (r.drafted and count > 1):
            continue
        start_s = r.ready_s if r.drafted and not is_apart else r.drafted_s
        bucket = r.num_slots, r.num_nodes, r.num_positions
        table_s = times(r.num_slots, r.num_nodes, r.num_positions)
        own_s = r.seconds_in(times, r.num_nodes)
        half_full = table_s / own_s if table_s and own_s else 1.0
        fetches.setdefault(bucket, []).append((count, half_full * (r.ended_s - start_s) / count))

    def median(some: Sequence[tuple[int, float]]) -> tuple[int, float]:
        counts, seconds = zip(*some, strict=True)
        return sum(counts), max(float(np.median(np.repeat(seconds, counts))), 1e-9)

    return {bucket: median(both) for bucket, both in sorted(fetches.items())}


class SecondsRecord:
    """The recorded steps in the folder of a run; steps are appended as they finish."""

    def __init__(self, folder: Folder, processes: Processes = ALONE) -> None:
        """Read the file if it exists. Raises ValueError for a file that no run wrote."""
        self._folder = folder
        self._processes = processes
        text = processes.from_first(WHAT, lambda: _whole_lines(folder))
        self._steps = _parsed(text, folder)

    def upto(self, step: int) -> list[StepSeconds]:
        """Return the recorded steps up to `step`, in order."""
        return [seconds for at, seconds in sorted(self._steps.items()) if at <= step]

    def of(self, step: int, measure: Callable[[], StepSeconds]) -> StepSeconds:
        """Return the record of a step; without a record, call `measure` and append the result."""
        if step not in self._steps:
            line = self._processes.from_first(WHAT, lambda: _line(step, measure()))
            self._steps |= _parsed(line, self._folder)
            if self._processes.is_first:
                with self._folder.append(SECONDS_FILE) as file:
                    file.write(line)
        return self._steps[step]


def go_on(speculation: Speculation, record: SecondsRecord, step: int) -> None:
    """Replay the record, so that budgets decide as they did after this step."""
    for seconds in record.upto(step):
        speculation.seconds.played(seconds)


def after_step(
    speculation: Speculation,
    record: SecondsRecord,
    step: int,
    rounds: Sequence[RoundRecord],
    say: Callable[[str], object],
    mode: ReuseMode = NO_REUSE,
) -> dict[str, float]:
    """Add the seconds of the rounds of a step; report if drafts or reuse lose time.

    Returns the metric of the step. `mode` is the reuse mode of the run.
    """
    is_enabled = speculation.config.enabled
    if not is_enabled and not mode.enabled:
        return {}
    metric = {"spec/turned_off": float(speculation.is_off)} if is_enabled else {}
    seconds = speculation.seconds
    times = speculation.times_now
    has_history = speculation.has_history
    lost_before = seconds.is_off(has_history)
    reuse_lost_before = seconds.reuse_is_off

    def measure() -> StepSeconds:
        if times is None:
            return StepSeconds(0.0, 0.0, {}, has_history)
        found = step_seconds(rounds, times, has_history)
        return found if is_enabled else dataclasses.replace(found, saved_s=0.0)

    seconds.played(record.of(step, measure))
    if seconds.is_off(has_history) and not lost_before:
        steps = speculation.config.losing_steps
        until = "until the second epoch" if speculation.keeps_history else "for the rest of the run"
        end = f"turned off {until}" if speculation.is_off else "kept as configured"
        say(
            f"{loss_text(seconds, has_history)} in the last {steps} steps: they are {end} "
            "(Speculation.losing_steps)"
        )
    if seconds.reuse_is_off and not reuse_lost_before:
        say(f"{reuse_loss_text(seconds.lost_reuse, mode)} (Speculation.losing_steps)")
    return metric


def loss_text(seconds: RunSeconds, has_history: bool) -> str:
    """Return how much the drafts of the latest losing steps have cost."""
    lost_s, rollout_s = seconds.lost(has_history)
    return f"drafts have cost about {lost_s / rollout_s:.1%} of {rollout_s:.1f} s of rounds"


def _whole_lines(folder: Folder) -> bytes:
    """Return the lines of the file, after cutting off a torn last line."""
    if not folder.is_file(SECONDS_FILE) or folder.size_bytes(SECONDS_FILE) > MAX_BYTES:
        return b""
    text = folder.read(SECONDS_FILE)
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        folder.replace(SECONDS_FILE, whole)
    return whole


def _line(step: int, seconds: StepSeconds) -> bytes:
    row = {
        "step": step,
        "rollout_s": seconds.rollout_s,
        "saved_s": seconds.saved_s,
        "reuse_saved_s": seconds.reuse_saved_s,
        "has_history": seconds.has_history,
        "rounds": [[*bucket, *both] for bucket, both in seconds.rounds.items()],
    }
    return json.dumps(row).encode() + b"\n"


def _parsed(text: bytes, folder: Folder) -> dict[int, StepSeconds]:
    try:
        return dict(map(_step, text.splitlines()))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{folder.path / SECONDS_FILE} is not what a run wrote ({error}): delete it; budgets "
            "then decide by the table of seconds alone"
        ) from error


def _step(line: bytes) -> tuple[int, StepSeconds]:
    row: dict[str, Any] = json.loads(line)
    rounds = {}
    for *bucket, count, mean_s in row["rounds"]:
        slots, nodes, positions = map(_count, bucket)
        rounds[slots, nodes, positions] = _count(count), _seconds(mean_s, 0.0)
    step = StepSeconds(
        rollout_s=_seconds(row["rollout_s"], 0.0),
        saved_s=_seconds(row["saved_s"], -MAX_SECONDS),
        rounds=rounds,
        has_history=_bool(row["has_history"]),
        reuse_saved_s=_seconds(row["reuse_saved_s"], -MAX_SECONDS),
    )
    return _count(row["step"]), step


def _count(value: Any) -> int:
    if type(value) is not int or not 1 <= value < 2**53:
        raise ValueError(f"expected a count, got {str(value)[:40]!r}")
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"expected true or false, got {str(value)[:40]!r}")
    return value


def _seconds(value: Any, least: float) -> float:
    if type(value) not in (int, float) or not least <= value < MAX_SECONDS:
        raise ValueError(f"expected seconds, got {str(value)[:40]!r}")
    return float(value)

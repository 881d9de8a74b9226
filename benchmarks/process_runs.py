"""One process of `benchmarks.processes`: runs of `rl.train`, one after the other, recorded.

    python -m benchmarks.process_runs CALL.json

The whole of `rl.train.main` runs, arguments to exit status; the processes join once and each run
has its own part of their store. What is recorded, and what is planted, is put around functions of
the product from here: the product knows nothing of it.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.save_memory import memory_mib
from rl import train
from rl.cluster import join
from rl.engine import rounds
from rl.loop import exchange, setup, train_loop
from rl.runtime import host_memory
from rl.runtime.signals import leave
from spec.round_times import RoundTimes

TYPES_SHOWN = 6


class PartOfStore(join.JobStore):
    """The part of the job's store that one run has; keys of an earlier one are not seen."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self._prefix = f"run-{PartOfStore.runs}/"

    def set(self, key: str, value: bytes) -> None:
        super().set(self._prefix + key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        return super().get(self._prefix + key, timeout_s)

    def entries(self, prefix: str) -> Mapping[str, bytes]:
        found = super().entries(self._prefix + prefix)
        return {key.removeprefix(self._prefix): value for key, value in found.items()}

    def delete(self, key: str) -> None:
        super().delete(self._prefix + key)


def plant(where: Any, name: str, what: Any) -> None:
    """Put something in the place of a part of the product, for as long as this process lives."""
    mock.patch.object(where, name, what).start()


def join_once() -> None:
    """Let the runs of this process share one job: they join in the first and leave at the end."""
    initialize, meet = join._initialize, join.meet

    def once(work: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: work(*args) if PartOfStore.runs == 0 else None

    plant(join, "_initialize", once(initialize))
    plant(join, "meet", once(meet))
    plant(join, "JobStore", PartOfStore)
    plant(join, "leave", lambda: None)


class Recorder:
    """What all processes have after each exchange, and what it took once all had answered."""

    def __init__(self) -> None:
        self.passes: list[dict[str, Any]] = []
        self._exchange = exchange.Shares.exchange

    def install(self) -> None:
        recorder = self

        def recorded(
            shares: exchange.Shares, what: str, requests: Any, answer: Any, *rest: Any
        ) -> exchange.Responses:
            taken: dict[str, float] = {}

            def timed() -> exchange.Responses:
                began_s = time.perf_counter()
                own = answer()
                answered_s = time.perf_counter()
                # what is waited for until the slowest has answered is no cost of the exchange
                shares.processes.barrier("all have answered")
                taken["answer_s"], taken["since_s"] = answered_s - began_s, time.perf_counter()
                return own

            found = recorder._exchange(shares, what, requests, timed, *rest)
            exchange_s = time.perf_counter() - taken.pop("since_s")
            recorder.passes.append(
                {
                    "what": what,
                    "exchange_s": exchange_s,
                    **taken,
                    "prompts": [t.prompt_ids.tolist() for t in found.trajectories],
                    "tokens": [t.response_ids.tolist() for t in found.trajectories],
                    "rewards": [t.reward for t in found.trajectories],
                    "drafted": int(found.stats.drafted_by_source.sum()),
                    "accepted": int(found.stats.accepted_by_source.sum()),
                }
            )
            return found

        plant(exchange.Shares, "exchange", recorded)


class Growth:
    """Memory, objects and keys of the store after every so many steps."""

    def __init__(self, every_steps: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self._every_steps = every_steps
        self._kinds: list[collections.Counter[str]] = []

    def install(self) -> None:
        step_of = train_loop.train_step

        def watched(system: Any, state: Any, position: Any, *rest: Any) -> Any:
            result = step_of(system, state, position, *rest)
            if (position.step + 1) % self._every_steps == 0:
                self._look(system, position.step + 1)
            return result

        plant(train_loop, "train_step", watched)

    def _look(self, system: Any, step: int) -> None:
        import jax

        gc.collect()
        host_memory.give_back()
        kinds = collections.Counter(
            f"{type(x).__module__}.{type(x).__qualname__}" for x in gc.get_objects()
        )
        self._kinds.append(kinds)
        store = system.processes
        keys = 0 if store.alone else len(store.store.entries("reprise/"))
        self.rows.append(
            {
                "step": step,
                "resident_mib": round(memory_mib("VmRSS"), 2),
                "objects": sum(kinds.values()),
                "device_arrays": len(jax.live_arrays()),
                "keys": keys,
            }
        )

    def grown(self) -> dict[str, int]:
        """Return the kinds of objects that grew most in the last half, and by how many."""
        half, last = self._kinds[len(self._kinds) // 2], self._kinds[-1]
        grown = {kind: count - half[kind] for kind, count in last.items() if count > half[kind]}
        return dict(sorted(grown.items(), key=lambda pair: -pair[1])[:TYPES_SHOWN])


# --- faults, on one process, from one step on --------------------------------------------


class Fault:
    """What is planted, and when it happened; `at` is called as soon as the step begins."""

    def __init__(self, name: str, step: int, note: Path) -> None:
        self.name, self.step, self._note = name, step, note
        self.on = False

    def planted(self) -> None:
        """Note the moment, once."""
        if not self._note.exists():
            self._note.write_text(json.dumps(time.time()))

    def install(self) -> None:
        {"token": self._token, "gathered": self._gathered, "order": self._order}.get(
            self.name, lambda: None
        )()
        step_of = train_loop.train_step

        def watched(system: Any, state: Any, position: Any, *rest: Any) -> Any:
            if position.step + 1 == self.step:
                self.on = True
                if self.name == "clock":
                    self._clock(system)
            return step_of(system, state, position, *rest)

        plant(train_loop, "train_step", watched)

    def _token(self) -> None:
        """A token is another one behind the first fetch of the step."""
        fetched = rounds.Rounds._fetched

        def wrong(runner: Any, *rest: Any) -> Any:
            drawn = fetched(runner, *rest)
            if self.on and isinstance(drawn, tuple):
                self.on = False
                tokens = np.array(drawn[0])
                tokens[..., 0] ^= 1
                self.planted()
                return (tokens, *drawn[1:])
            return drawn

        plant(rounds.Rounds, "_fetched", wrong)

    def _gathered(self) -> None:
        """A token of a response that another process sent is another one."""
        received = exchange.received

        def wrong(*args: Any) -> exchange.Responses:
            found = received(*args)
            if self.on and found.trajectories:
                self.on = False
                first = found.trajectories[0]
                ids = first.response_ids.copy()
                ids[0] ^= 1
                found.trajectories[0] = dataclasses.replace(first, response_ids=ids)
                self.planted()
            return found

        plant(exchange, "received", wrong)

    def _order(self) -> None:
        """The data order is that of another `Run.seed`."""
        right = setup.DataOrder
        fault = self

        class Wrong(right):  # type: ignore[misc, valid-type]
            def indices(self, cursor: int, count: int) -> np.ndarray:
                if not fault.on:
                    return super().indices(cursor, count)
                fault.planted()
                return right(self.num_examples, self.seed + 1).indices(cursor, count)

        plant(setup, "DataOrder", Wrong)

    def _clock(self, system: Any) -> None:
        """Its own table of seconds says that rounds with drafts take a thousandth."""
        times = system.speculation.times
        assert times is not None, "budgets that decide by seconds have a table"
        less = {bucket: s / 1000 for bucket, s in times.rounds.items() if bucket[1] > bucket[0]}
        times.put(RoundTimes(less))
        self.planted()


def main(path: str) -> int:
    call = json.loads(Path(path).read_text())
    index, folder = call["index"], Path(call["folder"])
    join_once()
    recorder = Recorder()
    growth = Growth(call["look_every_steps"]) if call.get("look_every_steps") else None
    if growth is None:
        recorder.install()
    else:  # what is recorded would grow as well
        growth.install()
    if (fault := call.get("fault")) and index == fault["index"]:
        Fault(fault["name"], fault["step"], folder / "planted.json").install()
    for run in call["runs"]:
        recorder.passes.clear()
        began_s = time.perf_counter()
        status = train.main([*call["arguments"], *run["arguments"]])
        PartOfStore.runs += 1
        result = {
            "status": status,
            "seconds": time.perf_counter() - began_s,
            "passes": recorder.passes,
            "growth": growth and {"rows": growth.rows, "objects": growth.grown()},
        }
        (folder / f"{run['name']}-{index}.json").write_text(json.dumps(result))
        if status:
            return status
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1]))

"""Processes that a test starts together, and those that scorers leave behind.

`launch` runs a function of a test-support module in several processes of one `jax.distributed` job,
`run_commands` any commands side by side. Nothing outlives the call: all are killed (SIGKILL, since
processes of `jax.distributed` catch SIGTERM) at the time limit, or as soon as one fails.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
POLL_S = 0.05
SHOWN_CHARACTERS = 4000
# only process 0 would load programs, and those exchange in another order than compiled ones
NO_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
FROM_LAUNCHERS = ("OMPI_", "SLURM_", "JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


class ProcessFailed(AssertionError):
    """A process failed, or did not end in time; `outcomes` has what there is of each."""

    def __init__(self, message: str, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A process that has ended: `returncode` is None where it was still running when killed.

    `output` has stdout and stderr. `result` is what the function of `launch` returned, None where
    it did not.
    """

    returncode: int | None
    output: str
    result: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """Which process this is of how many; the coordinator's `HOST:PORT`; a folder shared by all."""

    index: int
    count: int
    coordinator: str
    folder: Path


def launch(
    function: str,
    count: int,
    folder: Path,
    *,
    devices: int = 1,
    arguments: Mapping[str, Any] | None = None,
    limit_s: float = 120.0,
    join: bool = True,
    stop_at_failure: bool = True,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Call `module:function` of tests/support in `count` processes of `devices` CPU devices each.

    It is called with its `Place` and the `arguments` (JSON), and returns a dictionary of JSON
    values and numpy arrays. `join` has jax.distributed initialized before. Raises ProcessFailed;
    without `stop_at_failure` only at the time limit: a process that has died is an outcome then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    call = {"function": function, "arguments": dict(arguments or {}), "join": join}
    call |= {"count": count, "coordinator": f"127.0.0.1:{free_port()}", "folder": str(folder)}
    commands = []
    for index in range(count):
        text = json.dumps(call | {"index": index, "limit_s": limit_s})
        commands.append([sys.executable, __file__, text])
    outcomes = run_commands(
        commands,
        folder,
        devices=devices,
        limit_s=limit_s,
        stop_at_failure=stop_at_failure,
        environment=(NO_CACHE if join else {}) | dict(environment or {}),
        done=lambda index: (folder / f"result-{index}.json").exists(),
    )
    return [dataclasses.replace(o, result=_result(folder, i)) for i, o in enumerate(outcomes)]


def run_commands(
    commands: Sequence[Sequence[str]],
    folder: Path,
    *,
    devices: int = 1,
    limit_s: float = 120.0,
    stop_at_failure: bool = True,
    environment: Mapping[str, str] | None = None,
    done: Any = lambda index: False,
) -> list[Outcome]:
    """Run commands side by side from the project's root until all have ended.

    Their outputs go to `output-INDEX.txt` in `folder`. A process for which `done` says so counts as
    ended, and is killed with the rest once all are. Raises ProcessFailed as `launch` does.
    """
    variables = child_environment(devices) | dict(environment or {})
    outputs = [folder / f"output-{index}.txt" for index in range(len(commands))]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command, path in zip(commands, outputs, strict=True):
            with path.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            started.append(process)
        wrong = _wait(started, limit_s, stop_at_failure, done)
    finally:
        codes = [process.poll() for process in started]
        _kill(started)
    outcomes = [
        Outcome(0 if code is None and done(index) else code, _read(path))
        for index, (code, path) in enumerate(zip(codes, outputs, strict=True))
    ]
    if wrong:
        shown = "\n".join(
            f"--- process {i}, exit status {o.returncode}:\n{o.output[-SHOWN_CHARACTERS:]}"
            for i, o in enumerate(outcomes)
        )
        raise ProcessFailed(f"{wrong}\n{shown}", outcomes)
    return outcomes


def child_environment(devices: int) -> dict[str, str]:
    """Return the variables of a process with this many virtual CPU devices, outside any cluster.

    No compiled program is kept: one of several processes that was loaded hangs in its collectives
    with those that others have compiled (see `rl.cluster.join`).
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FROM_LAUNCHERS)}
    flags = re.sub(rf"{DEVICE_COUNT_FLAG}=\d+", "", kept.get("XLA_FLAGS", ""))
    return kept | {
        "XLA_FLAGS": f"{flags} {DEVICE_COUNT_FLAG}={devices}".strip(),
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]),
    }


def free_port() -> int:
    """Return a port of the loopback device that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def runs(pid: int) -> bool:
    """Return whether a process runs; an unreaped zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def descendants(pid: int) -> set[int]:
    """Return the numbers of a process and of all that it, and they, have started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = {pid}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _wait(
    started: Sequence[subprocess.Popen[bytes]], limit_s: float, stop_at_failure: bool, done: Any
) -> str | None:
    """Wait until all have ended; return what is wrong, None where nothing is."""
    until_s = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in started]
        failed = [i for i, code in enumerate(codes) if code]
        if failed and stop_at_failure:
            time.sleep(POLL_S)  # those that fail together are told together
            return f"processes {failed} of {len(started)} failed"
        running = [i for i, code in enumerate(codes) if code is None and not done(i)]
        if not running:
            return None
        if time.monotonic() > until_s:
            return f"processes {running} of {len(started)} did not end in {limit_s} s"
        time.sleep(POLL_S)


def _kill(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _result(folder: Path, index: int) -> dict[str, Any] | None:
    path = folder / f"result-{index}.json"
    if not path.exists():
        return None
    with np.load(path.with_suffix(".npz")) as arrays:
        return json.loads(path.read_text()) | dict(arrays)


def _keep_result(folder: Path, index: int, result: Mapping[str, Any]) -> None:
    """Write what the function returned; the last rename says that it is whole."""
    path = folder / f"result-{index}.json"
    arrays = {name: x for name, x in result.items() if isinstance(x, np.ndarray)}
    np.savez(path.with_suffix(".npz"), **arrays)
    working = path.with_suffix(".part")
    working.write_text(json.dumps({n: x for n, x in result.items() if n not in arrays}))
    working.rename(path)


def _child(text: str) -> None:
    """Call the function, keep what it returns and wait to be killed.

    So that no process leaves the job while another still needs it, and no shutdown is waited for.
    """
    call = json.loads(text)
    place = Place(call["index"], call["count"], call["coordinator"], Path(call["folder"]))
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.9 * call["limit_s"])  # where a process hangs
    try:
        if call["join"]:
            join(place, call["limit_s"])
        module, _, name = call["function"].partition(":")
        result = getattr(importlib.import_module(module), name)(place, **call["arguments"])
        _keep_result(place.folder, place.index, result or {})
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(call["limit_s"])


def join(place: Place, limit_s: float) -> None:
    """Join the job; what jax would do about a lost process is left to the test for `limit_s`."""
    import jax

    jax.distributed.initialize(
        place.coordinator,
        place.count,
        place.index,
        initialization_timeout=int(limit_s),
        heartbeat_timeout_seconds=int(limit_s),
        coordinator_bind_address=place.coordinator,
    )


if __name__ == "__main__":
    from processes import _child  # by its name: what the function imports is this very module

    _child(sys.argv[1])

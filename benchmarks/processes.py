"""Several processes of one run against one process: tokens, weights, faults, memory, seconds.

    python -m benchmarks.processes --json --output benchmarks/results/processes.json

A small policy trains for ten steps with drafts from history, siblings and own text, on meshes that
lie across 2 and 4 processes of a CPU device each; with an engine in each process (`local`) and with
one over all (`mesh`). It is compared with one process of as many devices: one whose collectives are
those between processes (gloo adds numbers in another order), and a plain one. Four processes'
checkpoint goes on in two and in one. Something else is planted on one process of four. And two
processes take `--steps` steps, after which nothing should have grown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors.numpy import load_file

from benchmarks import environment, tiny_run

STEPS, HALF, PROMPTS, GROUP = 10, 5, 8, 4
LIMIT_S = 1200.0  # of a launch: four processes compile on however few cores there are
ENDS = signal.SIGTERM, signal.SIGHUP
FAULT_STEP = 4
MODEL = dataclasses.replace(tiny_run.MODEL, d_model=32, num_heads=4, num_kv_heads=4, d_ff=64)
# compiling is most of the time: all that is compared is compiled alike, and fast
FAST_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
MESHES: dict[int, dict[str, dict[str, int]]] = {
    2: {"data=2": {"data": 2}, "fsdp=2": {"fsdp": 2}, "tensor=2": {"tensor": 2}},
    4: {
        "data=4": {"data": 4},
        "fsdp=4": {"fsdp": 4},
        "tensor=4": {"tensor": 4},
        "data=2 × tensor=2": {"data": 2, "tensor": 2},
    },
}
LOCAL_OF_FOUR = ("data=4",)  # engines of their own know nothing of the other axes
SHAPE = (
    *("Rollout.prompts_per_step=4", f"Rollout.group_size={GROUP}", "Sampling.max_new_tokens=24"),
    *("Engine.slots=16", "Engine.min_slots=16", "Engine.min_positions=64", "Engine.max_nodes=2"),
    *("Trainer.micro_batch_tokens=256", "Rollout.cache_bytes=65536"),
    *("Speculation.budget='fixed:1'", "Speculation.sources=('history', 'group', 'own')"),
)
# name: rollouts, budget, where the fault is noticed
FAULTS = {
    "token": ("mesh", "fixed:1", "a token is another one behind a fetch of one engine over all"),
    "clock": ("mesh", "goodput", "a table of seconds says that drafts cost next to nothing"),
    "order": ("local", "fixed:1", "the data order is that of another seed"),
    "gathered": ("local", "fixed:1", "a token of a response from elsewhere is another one"),
}
PARTS = "same", "resume", "faults", "memory"


def make_inputs(folder: Path) -> Path:
    """The inputs of the smallest run, with a policy whose heads four devices can share."""
    with mock.patch.object(tiny_run, "MODEL", MODEL):
        config = tiny_run.make_inputs(folder)
    prompts = (*tiny_run.PROMPTS, "9+9=", "4=")
    rows = [{"prompt": p, "answer": str(i)} for i, p in enumerate(prompts)]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


def run_of(
    name: str, folder: Path, mesh: Mapping[str, int], *more: str, steps: int = STEPS
) -> dict[str, Any]:
    """One run: its name, and what `rl.train` is told."""
    axes = {"data": 1} | dict(mesh)
    told = [f"Run.directory={str(folder / name)!r}", f"Run.steps={steps}"]
    told += [f"Checkpoint.every_steps={HALF}", *(f"Mesh.{k}={v}" for k, v in axes.items())]
    resume = ["--resume"] if "--resume" in more else []
    gin = [*told, *(x for x in more if x != "--resume")]
    return {"name": name, "arguments": [*resume, *(f"--gin.{x}" for x in gin)]}


class Launch:
    """Processes of one job that do runs one after the other; `results` by run and process."""

    def __init__(
        self,
        folder: Path,
        config: Path,
        count: int,
        runs: Sequence[Mapping[str, Any]],
        *,
        devices: int,
        kind: str = "spmd",
        **call: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.count, self.runs = folder, count, runs
        arguments = [f"--gin_file={config}", *(f"--gin.{x}" for x in SHAPE)]
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        began_s = time.time()
        self._started, self._logs = [], []
        for index in range(count):
            cluster = []
            if kind == "spmd":
                told = f"coordinator='{address}'", f"num_processes={count}", f"process_id={index}"
                cluster = ["kind='spmd'", *told, "deadline_s=20"]
            own = {"index": index, "folder": str(folder), "runs": list(runs)} | call
            own["arguments"] = [*arguments, *(f"--gin.Cluster.{x}" for x in cluster)]
            told_in, log = folder / f"call-{index}.json", folder / f"output-{index}.txt"
            told_in.write_text(json.dumps(own))
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.process_runs", str(told_in)],
                    cwd=tiny_run.ROOT,
                    env=variables(devices, gloo=kind == "spmd"),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._started.append(process)
            self._logs.append(log)
        try:
            self.statuses, self.ended_s = self._wait(began_s + LIMIT_S)
        finally:
            for process in self._started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _wait(self, until_s: float) -> tuple[list[int | None], list[float]]:
        ended_s: dict[int, float] = {}
        while len(ended_s) < self.count and time.time() < until_s:
            for index, process in enumerate(self._started):
                if process.poll() is not None:
                    ended_s.setdefault(index, time.time())
            time.sleep(0.02)
        statuses = [process.poll() for process in self._started]
        return statuses, [ended_s.get(i, until_s) for i in range(self.count)]

    def output(self, index: int) -> str:
        return self._logs[index].read_text(errors="replace")

    def lines(self, index: int) -> list[str]:
        """What a process said of errors."""
        return [x for x in self.output(index).splitlines() if "error" in x.lower()]

    def result(self, name: str, index: int = 0) -> dict[str, Any]:
        path = self.folder / f"{name}-{index}.json"
        if self.statuses[index] != 0 or not path.exists():
            raise RuntimeError(f"{name}: {self.statuses}\n{self.output(index)[-4000:]}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def variables(devices: int, *, gloo: bool) -> dict[str, str]:
    flag = "--xla_force_host_platform_device_count"
    flags = re.sub(rf"{flag}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    more = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"} if gloo else {}
    return (
        tiny_run.environment() | more | {"XLA_FLAGS": f"{flags} {FAST_COMPILES} {flag}={devices}"}
    )


# --- (a) the same as one process -----------------------------------------------------------


def same(folder: Path, config: Path, count: int) -> list[dict[str, Any]]:
    """Return a row for each mesh and kind of rollouts."""
    meshes = MESHES[count]
    many, one, plain = (folder / f"{count}-{name}" for name in ("processes", "gloo", "plain"))
    pairs = [
        (rollouts, name)
        for rollouts in ("local", "mesh")
        for name in meshes
        if rollouts == "mesh" or count == 2 or name in LOCAL_OF_FOUR
    ]
    runs = [
        run_of(f"{rollouts} {name}", many, meshes[name], f"Cluster.rollouts='{rollouts}'")
        for rollouts, name in pairs
    ]
    together = Launch(many, config, count, runs, devices=1)
    for where, kind in ((one, "spmd"), (plain, "local")):
        alone = [run_of(name, where, mesh) for name, mesh in meshes.items()]
        launched = Launch(where, config, 1, alone, devices=count, kind=kind)
        assert launched.statuses == [0], launched.output(0)[-4000:]
    rows = []
    for rollouts, name in pairs:
        run = f"{rollouts} {name}"
        found = together.result(run)["passes"]
        others = [together.result(run, i)["passes"] for i in range(1, count)]
        row: dict[str, Any] = {"processes": count, "mesh": name, "rollouts": rollouts}
        row |= {"steps": len(found), "tokens": num_tokens(found)}
        row["accepted_draft_tokens"] = sum(p["accepted"] for p in found)
        row["tokens_that_differ_between_processes"] = sum(
            different_tokens(found, other) for other in others
        )
        for against, where in (("gloo", one), ("plain", plain)):
            wanted = json.loads((where / f"{name}-0.json").read_text())["passes"]
            row[against] = {
                "tokens_that_differ": different_tokens(found, wanted),
                "rewards_that_differ": different_rewards(found, wanted),
            } | different_weights(many / run, where / name)
        rows.append(row | costs(found))
    return rows


def num_tokens(passes: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(ids) for p in passes for ids in p["tokens"])


def different_tokens(passes: Sequence[Any], wanted: Sequence[Any]) -> int:
    """Return how many tokens differ, prompts' included; what only one has differs."""
    total = 0
    for name in ("prompts", "tokens"):
        rows = [[ids for p in some for ids in p[name]] for some in (passes, wanted)]
        for a, b in zip(*rows, strict=True):
            total += sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
    return total


def different_rewards(passes: Sequence[Any], wanted: Sequence[Any]) -> int:
    rows = [[r for p in some for r in p["rewards"]] for some in (passes, wanted)]
    return sum(a != b for a, b in zip(*rows, strict=True))


def different_weights(run: Path, other: Path) -> dict[str, Any]:
    """Return whether the trained weights have equal bits, and the largest difference."""
    a, b = (load_file(folder / "policy" / "model.safetensors") for folder in (run, other))
    start = load_file(run.parents[1] / "policy" / "model.safetensors")
    assert a.keys() == b.keys() and any(np.any(a[n] != start[n]) for n in a), "it has learnt"
    largest = max(float(np.abs(a[n] - b[n]).max()) for n in a)
    equal = all(a[n].tobytes() == b[n].tobytes() for n in a)
    return {"weights_have_equal_bits": equal, "largest_weight_difference": largest}


def costs(passes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median milliseconds of a step's exchange, all having answered, and seconds of rollouts."""
    later = passes[2:]
    return {
        "exchange_ms": round(1e3 * statistics.median(p["exchange_s"] for p in later), 2),
        "rollout_ms": round(1e3 * statistics.median(p["answer_s"] for p in later), 1),
    }


# --- (b) going on with another number of processes -------------------------------------------


def resume(folder: Path, config: Path) -> list[dict[str, Any]]:
    """Four processes stop after half of the steps; two, and one, go on from there."""
    rows, where = [], folder / "resume"
    mesh = MESHES[4]["data=4"]
    runs = [run_of("whole", where, mesh), run_of("half", where, mesh, steps=HALF)]
    four = Launch(where, config, 4, runs, devices=1)
    whole = four.result("whole")["passes"]
    four.result("half")
    for count in (2, 1):
        name = f"in {count}"
        shutil.copytree(where / "half", where / name)
        go_on = [run_of(name, where, mesh, "--resume")]
        launch = Launch(where, config, count, go_on, devices=4 // count)
        found = launch.result(name)["passes"]
        assert [p["what"] for p in found] == [p["what"] for p in whole[HALF:]]
        asked = [[p["prompts"] for p in some] for some in (found, whole[HALF:])]
        rows.append(
            {
                "processes": count,
                "steps": len(found),
                "tokens": num_tokens(found),
                "order_is_equal": asked[0] == asked[1],
                "tokens_that_differ": different_tokens(found, whole[HALF:]),
                "rewards_that_differ": different_rewards(found, whole[HALF:]),
            }
            | different_weights(where / name, where / "whole")
        )
    return rows


# --- (c) something else on one process of four ----------------------------------------------


def fault(folder: Path, config: Path, name: str, index: int = 2) -> dict[str, Any]:
    """Plant one thing on process `index` in step FAULT_STEP, and see what becomes of the run."""
    rollouts, budget, words = FAULTS[name]
    where = folder / f"fault-{name}"
    more = f"Cluster.rollouts='{rollouts}'", f"Speculation.budget='{budget}'"
    # every whole step is kept, so that the newest one says how far the run has come
    run = run_of(name, where, MESHES[4]["data=4"], *more, "Checkpoint.every_steps=1")
    planted = {"name": name, "index": index, "step": FAULT_STEP}
    launch = Launch(where, config, 4, [run], devices=1, fault=planted)
    note = where / "planted.json"
    if not note.exists():
        raise RuntimeError(f"{name}: nothing was planted\n{launch.output(index)[-4000:]}")
    planted_s = json.loads(note.read_text())
    said = [next(iter(launch.lines(i)), "nothing") for i in range(4)]
    said = [line.replace(str(folder), "FOLDER") for line in said]
    metrics = where / name / "metrics.jsonl"
    steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    named = [bool(re.search(rf"process {index}\b", x.partition(" ends: ")[2])) for x in said]
    return {
        "fault": name,
        "what": words,
        "rollouts": rollouts,
        "planted_in_step": FAULT_STEP,
        "last_whole_step": steps,
        "exit_statuses": launch.statuses,
        "seconds": round(max(launch.ended_s) - planted_s, 2),
        "said": said,
        "lines_a_process": max(len(launch.lines(i)) for i in range(4)),
        "stopped_within_the_step": steps == FAULT_STEP - 1 and set(launch.statuses) == {1},
        "named": all(named),
    }


# --- (d) what stays in memory ---------------------------------------------------------------


def memory(folder: Path, config: Path, steps: int) -> list[dict[str, Any]]:
    """What two processes have more of, from a third of the steps on, with each kind of rollouts."""
    where, rows = folder / "memory", []
    runs = [run_of("local", where, MESHES[2]["data=2"], "Cluster.rollouts='local'", steps=steps)]
    runs[0]["arguments"] += ["--gin.Checkpoint.every_steps=50", "--gin.Sampling.max_new_tokens=8"]
    launch = Launch(where, config, 2, runs, devices=1, look_every_steps=max(1, steps // 12))
    for index in range(2):
        found = launch.result("local", index)["growth"]
        looks = found["rows"]
        first, last = looks[len(looks) // 3], looks[-1]
        names = "resident_mib", "objects", "device_arrays", "keys"
        row = {"process": index, "from_step": first["step"], "to_step": last["step"]}
        row |= {f"{name}_more": round(last[name] - first[name], 2) for name in names}
        rows.append(row | {"looks": looks, "objects_that_grew_in_the_last_half": found["objects"]})
    return rows


# --- all of it ------------------------------------------------------------------------------


def measure(parts: Sequence[str], counts: Sequence[int], steps: int) -> dict[str, Any]:
    result: dict[str, Any] = {"seconds": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = make_inputs(folder)

        def timed(part: str, work: Any) -> Any:
            began_s = time.monotonic()
            found = work()
            result["seconds"][part] = round(time.monotonic() - began_s, 1)
            return found

        if "same" in parts:
            result["same"] = []
            for count in counts:
                work = partial(same, folder, config, count)
                result["same"] += timed(f"same, {count}", work)
        if "resume" in parts:
            result["resume"] = timed("resume", lambda: resume(folder, config))
        if "faults" in parts:
            result["faults"] = timed(
                "faults", lambda: [fault(folder, config, name) for name in FAULTS]
            )
        if "memory" in parts:
            result["memory"] = timed("memory", lambda: memory(folder, config, steps))
    return result


def figures_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that the table of results shows."""
    figures: dict[str, Any] = {}
    if rows := result.get("same"):
        one_engine = [row for row in rows if row["rollouts"] == "mesh"]
        figures |= {
            "configurations": len(rows),
            "tokens_compared": sum(row["tokens"] for row in rows),
            "tokens_that_differ": sum(row["gloo"]["tokens_that_differ"] for row in rows),
            "rewards_that_differ": sum(row["gloo"]["rewards_that_differ"] for row in rows),
            "one_engine_configurations": len(one_engine),
            "one_engine_equal_weights": sum(
                row["gloo"]["weights_have_equal_bits"] for row in one_engine
            ),
            "largest_weight_difference": max(
                row["gloo"]["largest_weight_difference"] for row in rows
            ),
            "largest_weight_difference_from_plain": max(
                row["plain"]["largest_weight_difference"] for row in rows
            ),
        }
        for count in sorted({row["processes"] for row in rows}):
            spent = [row["exchange_ms"] for row in rows if row["processes"] == count]
            figures[f"exchange_ms_of_{count}"] = statistics.median(spent)
    if rows := result.get("resume"):
        figures["resumed_tokens_that_differ"] = sum(row["tokens_that_differ"] for row in rows)
        figures["resumed_orders_that_differ"] = sum(not row["order_is_equal"] for row in rows)
    if rows := result.get("faults"):
        figures["faults"] = len(rows)
        figures["faults_stopped_and_named"] = sum(
            row["stopped_within_the_step"] and row["named"] for row in rows
        )
        figures["longest_fault_s"] = max(row["seconds"] for row in rows)
    if rows := result.get("memory"):
        figures["most_mib_more"] = max(row["resident_mib_more"] for row in rows)
        figures["most_keys_more"] = max(row["keys_more"] for row in rows)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes", description=__doc__)
    environment.add_output_flags(parser)
    parser.add_argument("--only", choices=PARTS, action="append", help="(again for more than one)")
    parser.add_argument("--counts", type=int, nargs="+", choices=tuple(MESHES), default=[2, 4])
    parser.add_argument("--steps", type=int, default=300, help="of the run whose memory is watched")
    args = parser.parse_args()
    for number in ENDS:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    result = measure(args.only or PARTS, args.counts, args.steps)
    figures = figures_of(result)
    record = environment.record("benchmarks.processes", ("jax", "jaxlib", "numpy"))
    environment.show(record | figures | result, args, figures)
    wrong = [name for name, value in figures.items() if name.endswith("that_differ") and value]
    return int(bool(wrong) or figures.get("faults") != figures.get("faults_stopped_and_named"))


if __name__ == "__main__":
    sys.exit(main())

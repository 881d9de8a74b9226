"""Runs of several programs: rollout workers on Ray that are lost, and processes of one mesh.

Responses are read from samples.jsonl; the policy's tokens are characters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.soak import runs
from benchmarks.soak.memory import growth, programs_of, watch
from benchmarks.soak.runs import TIMEOUT_S, RunFailed, output_of, run_until, started
from policies.make.characters import save_character_tokenizer
from reprise.rl.metrics.writer import read_samples
from tests.support import tiny_run

# --- workers on Ray -----------------------------------------------------------------------

WORKERS = """
Sched.workers = 3
Sched.policy = "seer"
Sched.chunk_tokens = 4
Sched.on_error = "restart"
Engine.slots = 4
Engine.min_slots = 4
Rollout.prompts_per_step = 6
Rollout.group_size = 8
Sampling.max_new_tokens = 24
Speculation.budget = "fixed:1"
Speculation.sources = ("history", "group", "own")
Algorithm.old_logprobs = "recomputed"
Cluster.deadline_s = 20.0
Run.hang_limit_s = 60.0
"""
ROLE = "ray::WorkerActor"
SETTLED_S = 10.0  # after which a worker has been compiling, or runs


def lose(folder: Path, count: int = 20) -> dict[str, Any]:
    """Kill `count` rollout workers at random moments, and stop one; compare with threads."""
    config = tiny_run.make_inputs(folder)
    _show_all_ids(folder)
    steps = 20 * count
    config.write_text(f"{config.read_text()}Run.steps = {steps}\n{WORKERS}")
    reference, run, log = folder / "threads", folder / "run", folder / "run.log"
    env = tiny_run.environment(folder / "compiled")
    run_until(config, reference, env, None)
    rng, sent = random.Random(0), list[signal.Signals]()
    marked = env | {"REPRISE_SOAK": str(folder)}
    command = tiny_run.command(config, run, "--gin.Cluster.kind='ray'")
    with started(command, marked, log) as process:
        seen_s, deadline_s = dict[int, float](), time.monotonic() + 10 * TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(rng.uniform(0.1, 2.0))
            now_s = time.monotonic()
            seen_s = {p: seen_s.get(p, now_s) for p in programs_of(str(folder), ROLE)}
            settled = [p for p, since_s in seen_s.items() if now_s - since_s > SETTLED_S]
            # A worker that is lost again and again before its first round is given up.
            if len(settled) < 2 or len(sent) > count or not (run / "metrics.jsonl").exists():
                continue
            number = signal.SIGSTOP if len(sent) == count else signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(settled), number)
                sent.append(number)
        code = process.wait(TIMEOUT_S)
    if code or len(sent) <= count:
        raise RunFailed(f"{len(sent)} signals, exit status {code}:\n{output_of(log)[-4000:]}")
    return {
        "kills": sent.count(signal.SIGKILL),
        "stopped": sent.count(signal.SIGSTOP),
        "steps": steps,
        "tokens_compared": num_tokens(reference),
        "tokens_that_differ_with_losses": differing_tokens(run, reference),
        "parameters_equal": runs.final_state(run) == runs.final_state(reference),
    }


def _show_all_ids(folder: Path) -> None:
    """Give the vocabulary's padding characters: completions then have one for each token."""
    save_character_tokenizer(folder / "policy", f"{tiny_run.CHARACTERS}defghi")


def num_tokens(run: Path) -> int:
    return sum(sample["num_tokens"] for sample in read_samples(run))


def name_of(sample: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(sample[name] for name in ("step", "example_id", "sample_index"))


def differing_tokens(run: Path, reference: Path) -> int:
    """Return how many tokens differ; all tokens of a response that only one run has do."""
    responses = [{name_of(s): s["completion"] for s in read_samples(x)} for x in (run, reference)]
    total = 0
    for name in responses[0].keys() | responses[1].keys():
        a, b = (found.get(name, "") for found in responses)
        total += sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
    return total


# --- processes of one mesh ----------------------------------------------------------------

STEPS, HALF = 10, 5
MODEL = dataclasses.replace(tiny_run.MODEL, d_model=32, num_heads=4, num_kv_heads=4, d_ff=64)
# Compiling takes most of the time; all runs that are compared compile alike.
FAST_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SETTINGS = f"""
Run.steps = {STEPS}
Checkpoint.every_steps = {HALF}
Rollout.prompts_per_step = 4
Sampling.max_new_tokens = 24
Engine.slots = 16
Engine.min_slots = 16
Trainer.micro_batch_tokens = 256
Rollout.cache_bytes = 65536
Speculation.budget = "fixed:1"
Speculation.sources = ("history", "group", "own")
"""
# (processes, axes of the mesh, kind of rollouts); local engines see the axis `data` only
CONFIGURATIONS: tuple[tuple[int, Mapping[str, int], str], ...] = (
    *((2, {axis: 2}, kind) for axis in ("data", "fsdp", "tensor") for kind in ("local", "mesh")),
    *((4, {axis: 4}, "mesh") for axis in ("data", "fsdp", "tensor")),
    (4, {"data": 2, "tensor": 2}, "mesh"),
    (4, {"data": 4}, "local"),
)


def launch(
    config: Path, run: Path, count: int, devices: int, *settings: str, resume: bool = False
) -> list[dict[str, Any]]:
    """Run the processes of a job to their end; return looks at their memory."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    flags = f"{FAST_COMPILES} --xla_force_host_platform_device_count={devices}"
    env = tiny_run.environment() | {"XLA_FLAGS": flags}
    env["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    cluster = ("kind='spmd'", f"coordinator='{address}'", f"num_processes={count}", "deadline_s=20")
    common = [*settings, *(f"Cluster.{x}" for x in cluster)]
    logs = [run.with_name(f"{run.name}-{i}.log") for i in range(count)]
    with contextlib.ExitStack() as stack:
        processes = []
        for index, log in enumerate(logs):
            gin = [f"--gin.{x}" for x in (*common, f"Cluster.process_id={index}")]
            command = tiny_run.command(config, run, *gin, *(["--resume"] if resume else []))
            processes.append(stack.enter_context(started(command, env, log)))
        looks = watch(processes[0], run, lambda: {"process": [p.pid for p in processes]})
        codes = [process.wait(TIMEOUT_S) for process in processes]
    if any(codes):
        raise RunFailed(f"{codes}\n" + "\n".join(output_of(log)[-2000:] for log in logs))
    return looks


def mesh_settings(axes: Mapping[str, int]) -> list[str]:
    return [f"Mesh.{axis}={size}" for axis, size in ({"data": 1} | dict(axes)).items()]


def compare_processes(folder: Path, count: int = 300) -> dict[str, Any]:
    """Compare with one process of as many devices; resume with fewer; watch memory."""
    config = tiny_run.make_inputs(folder, model=MODEL)
    _show_all_ids(folder)
    with (folder / "task.jsonl").open("a") as file:
        file.write('{"prompt": "9+9=", "answer": "6"}\n{"prompt": "4=", "answer": "7"}\n')
    config.write_text(config.read_text() + SETTINGS)
    same = [_same(folder, config, *configuration) for configuration in CONFIGURATIONS]
    one_engine = [row for row in same if row["rollouts"] == "mesh"]
    resumed = _resumed(folder, config)
    memory = ["Mesh.data=2", f"Run.steps={count}", "Checkpoint.every_steps=50"]
    memory.append("Sampling.max_new_tokens=8")
    grown = growth(launch(config, folder / "memory", 2, 1, *memory))
    return {
        "configurations": len(same),
        "tokens_compared": sum(row["tokens"] for row in same),
        "tokens_that_differ": sum(row["tokens_that_differ"] for row in same),
        "one_engine_configurations": len(one_engine),
        "one_engine_equal_weights": sum(row["weights_have_equal_bits"] for row in one_engine),
        "largest_weight_difference": max(row["largest_weight_difference"] for row in same),
        "resumed_tokens_that_differ": sum(row["tokens_that_differ"] for row in resumed),
        "resumed_orders_that_differ": sum(not row["order_is_the_same"] for row in resumed),
        "most_mib_more": max(row["mib_more"] for row in grown),
        "same": same,
        "resume": resumed,
        "memory": grown,
    }


def _same(
    folder: Path, config: Path, count: int, axes: Mapping[str, int], kind: str
) -> dict[str, Any]:
    """Compare one configuration with one process, whose collectives are gloo's too."""
    mesh = " × ".join(f"{axis}={size}" for axis, size in axes.items())
    run, reference = folder / f"{count} {mesh} {kind}", folder / f"one {mesh}"
    settings = mesh_settings(axes)
    if not reference.exists():
        launch(config, reference, 1, count, *settings)
    launch(config, run, count, 1, *settings, f"Cluster.rollouts='{kind}'")
    return {
        "processes": count,
        "mesh": mesh,
        "rollouts": kind,
        "tokens": num_tokens(run),
        "tokens_that_differ": differing_tokens(run, reference),
        **_weights(run, reference),
    }


def _weights(run: Path, reference: Path) -> dict[str, Any]:
    """Return whether the trained weights have equal bits, and their largest difference."""
    a, b = (load_file(folder / "policy" / "model.safetensors") for folder in (run, reference))
    return {
        "weights_have_equal_bits": all(a[n].tobytes() == b[n].tobytes() for n in a),
        "largest_weight_difference": max(float(np.abs(a[n] - b[n]).max()) for n in a),
    }


def _resumed(folder: Path, config: Path) -> list[dict[str, Any]]:
    """Stop four processes after half of the steps; continue with two, and with one."""
    settings, whole, half = mesh_settings({"data": 4}), folder / "whole", folder / "half"
    launch(config, whole, 4, 1, *settings)
    launch(config, half, 4, 1, *settings, f"Run.steps={HALF}")
    rows = []
    for count in (2, 1):
        run = folder / f"resumed in {count}"
        shutil.copytree(half, run)
        launch(config, run, count, 4 // count, *settings, resume=True)
        orders = [[name_of(s) for s in read_samples(x)] for x in (run, whole)]
        row = {"processes": count, "tokens_that_differ": differing_tokens(run, whole)}
        rows.append(row | {"order_is_the_same": orders[0] == orders[1]} | _weights(run, whole))
    return rows

"""A server that is sent hostile requests, and servers that are killed or whose disk is full."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.soak.runs import output_of, started
from tests.hostile import server_sequences
from tests.hostile.server_client import Client, Gone
from tests.support import idle_server, tiny_run

SIZES = (
    *("Policy.lora_rank=4", "Mesh.data=1", "Engine.slots=8", "Engine.min_slots=8"),
    *("Rollout.max_prompt_tokens=16", "Sampling.max_new_tokens=16"),
    *("Trainer.micro_batch_tokens=128", "Engine.max_nodes=4", "Engine.prefill_chunk_tokens=16"),
)
NAME = "tiny"
START_S = 600.0
MEGABYTES_ABOVE = 200  # of memory, above what a server takes at rest and its account


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Serve the smallest policy in a process of its own; yields it and its address."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "rl.serve", "--policy", str(folder / "policy")]
    command += ["--name", NAME, "--port", "0", "--folder", str(folder / "server")]
    env = tiny_run.environment(folder / "compiled")
    with started([*command, *(f"--gin.{x}" for x in SIZES)], env, log) as process:
        deadline_s = time.monotonic() + START_S
        while b"serving " not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the server did not start:\n{output_of(log)}")
            time.sleep(0.1)
        [line] = [x for x in output_of(log).splitlines() if x.startswith("serving ")]
        address = line.partition(" at ")[2].partition(";")[0]
        client = Client(address, collections.Counter[str]())
        while True:
            with contextlib.suppress(Gone):  # it has the port, and does not answer yet
                client.call("healthz", method="GET")
                break
            time.sleep(0.1)
        yield process, address


def fuzz(folder: Path, count: int = 5000) -> dict[str, Any]:
    """Send `count` hostile bodies and a sequence of operations for every 25 of them."""
    from reprise.rl.http import account, answers
    from reprise.rl.server import records

    tiny_run.make_inputs(folder)
    with serving(folder) as (process, address):
        warm = server_sequences.play(address, NAME, 20, 2, seed=1)
        before, began_s = _memory(process.pid), time.monotonic()
        found, expected, examples = server_sequences.play(address, NAME, count, count // 25)
        seconds, peak = time.monotonic() - began_s, _memory(process.pid, "VmHWM")
        process.kill()
        process.wait()
    for example in [*warm[2], *examples]:
        environment.progress(example.encode("ascii", "backslashreplace").decode())
    log = output_of(folder / "server.log")
    with contextlib.closing(records.Records(folder / "server")) as again:
        found["lost_records"] += len(expected - again.checkpoints.keys())
    allowed = account.MAX_BYTES + answers.MAX_BYTES + 4 * records.MAX_BYTES
    above = peak - before - allowed / 2**20
    return found | {
        "failures": int(above > MEGABYTES_ABOVE),
        "tracebacks": log.count("Traceback"),
        "mib_before": round(before),
        "mib_at_most": round(peak),
        "mib_of_the_account": allowed // 2**20,
        "seconds": round(seconds, 1),
    }


def _memory(pid: int, name: str = "VmRSS") -> float:
    """Return the MiB of memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [kib] = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(kib) / 1024


# --- kills and full disks -----------------------------------------------------------------

CLIENTS = 3
CHECKPOINT_BYTES = 3000
ROOM_BYTES = 25_000  # of a full disk: some seven checkpoints
SHORT_S = 0.4  # until a kill, at most
LONGER_S = 1.5  # until the kill of a server whose disk is full
Version = int | None  # of a checkpoint; None: there is none


def faults(folder: Path, count: int = 200) -> dict[str, Any]:
    """Kill `count` servers at random moments, half of them with a full disk; compare records.

    Each client saves, saves again and deletes checkpoints of a few names, whose metadata is a
    number. After the kill each must have its last number that was answered, or the one that was
    on its way.
    """
    totals = collections.Counter[str](dict.fromkeys((*LOST, "failures"), 0))
    for number in range(count):
        rng = random.Random(number)
        state = folder / f"{number}"
        state.mkdir()
        try:
            totals.update(_one_state(state, rng, is_full=bool(number % 2)))
        except Exception as error:  # each of them is a failure
            totals["failures"] += 1
            environment.progress(f"{number}: {type(error).__name__}: {error}"[:500])
        totals["tracebacks"] += output_of(state.with_suffix(".log")).count("Traceback")
        if not number % 20:
            environment.progress(f"{number} of {count} servers killed")
    return {"states": count, **totals}


LOST = ("answers_that_differ", "folders_that_differ")


def _one_state(folder: Path, rng: random.Random, is_full: bool) -> Mapping[str, int]:
    """Play clients against a server, kill it, and compare its records with their answers."""
    found = collections.Counter[str](states=1, full_disks=int(is_full))
    pid, address = _forked(folder, ROOM_BYTES if is_full else None)
    try:
        writers = [
            Writer(address, found, random.Random(f"{i} {rng.random()}"), i) for i in range(CLIENTS)
        ]
        threads = [threading.Thread(target=one.run, daemon=True) for one in writers]
        for thread in threads:
            thread.start()
        time.sleep(rng.uniform(0.02, LONGER_S if is_full else SHORT_S))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for thread in threads:
        thread.join(60)
        found["failures"] += thread.is_alive()
    return found + _compared(folder, writers)


def _compared(folder: Path, writers: list[Writer]) -> collections.Counter[str]:
    from reprise.rl.server.records import CHECKPOINTS, Records

    found = collections.Counter[str]()
    with contextlib.closing(Records(folder)) as records:
        for writer in writers:
            for path, allowed in writer.versions.items():
                record = records.checkpoints.get(path)
                version = None if record is None else int(record["user_metadata"]["v"])
                found["answers_compared"] += 1
                if version not in allowed:
                    found["answers_that_differ"] += 1
                    environment.progress(f"{path}: {version}, expected one of {allowed}")
            found["answers_that_differ"] += len(writer.sessions - records.sessions.keys())
            found["answers_compared"] += len(writer.sessions)
        known = {record["folder"] for record in records.checkpoints.values()}
        there = {path.name for path in (folder / CHECKPOINTS).glob("*")}
        whole = {
            name
            for name in known
            if (folder / CHECKPOINTS / name / "weights").stat().st_size == CHECKPOINT_BYTES
        }
        found["folders_that_differ"] += len(known ^ there) + len(known - whole)
    return found


class Writer:
    """A client whose checkpoints have a version in their metadata; `versions` may be there."""

    def __init__(self, address: str, found: Any, rng: random.Random, number: int) -> None:
        self.client, self.rng = Client(address, found), rng
        self.found, self.number = found, 0
        self.versions: dict[str, set[Version]] = {}
        self.sessions = set[str]()

    def run(self) -> None:
        """Play until the server has ended; a wrong answer is a failure."""
        try:
            with contextlib.suppress(Gone):
                self._play()
        except Exception as error:
            self.found["failures"] += 1
            environment.progress(f"{type(error).__name__}: {error}"[:500])

    def _play(self) -> None:
        while (session := self._session()) is None:
            time.sleep(0.01)
        made = {"session_id": session, "model_seq_id": 0, "base_model": idle_server.NAME}
        body = made | {"lora_config": {"rank": 4}}
        while (model := self.client.finish("create_model", body)) is None:
            time.sleep(0.01)
        run, sequence = model["model_id"], 0
        while True:
            path = f"tinker://{run}/weights/{self.rng.randrange(4)}"
            kind = self.rng.randrange(10)
            if kind < 6:
                sequence += 1
                self._save(run, sequence, path)
            elif kind < 9:
                self._delete(path)
            else:
                self._session()

    def _session(self) -> str | None:
        status, _ = answer = self.client.call("create_session", {})
        if status != 200:
            self._refused(*answer)
            return None
        session: str = json.loads(answer[1])["session_id"]
        self.sessions.add(session)
        return session

    def _save(self, run: str, sequence: int, path: str) -> None:
        before = self.versions.get(path, {None})
        self.number += 1
        self.versions[path] = before | {self.number}
        body = {"model_id": run, "seq_id": sequence, "path": path.rpartition("/")[2]}
        body |= {"overwrite": True, "user_metadata": {"v": self.number}}
        result = self.client.finish("save_weights", body)
        if result is None or "error" in result:
            assert result is not None and "no space left" in result["error"], result
            self.versions[path] = before
            self.found["saves_without_room"] += 1
        else:
            self.versions[path] = {self.number}
            self.found["saves"] += 1

    def _delete(self, path: str) -> None:
        before = self.versions.get(path, {None})
        self.versions[path] = before | {None}
        run = path.removeprefix("tinker://").partition("/")[0]
        name = path.rpartition("/")[2]
        url = f"training_runs/{run}/checkpoints/weights/{name}"
        status, answer = self.client.call(url, method="DELETE")
        if status == 404:
            assert before == {None}, (path, before, answer)
        assert status in (200, 404), (status, answer)
        self.versions[path] = {None}
        self.found["deletions"] += status == 200

    def _refused(self, status: int, answer: bytes) -> None:
        assert status == 507 and b"no space left" in answer, (status, answer)
        self.found["answers_of_other_statuses"] -= 1  # 507 is the right one
        self.found["records_without_room"] += 1


def _forked(folder: Path, room_bytes: int | None) -> tuple[int, str]:
    """Serve a policy that does nothing in a fork, which needs no start-up; its id and address."""
    sock = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{sock.getsockname()[1]}"
    pid = os.fork()
    if not pid:
        try:
            output = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if room_bytes is not None:
                idle_server.limit_disk(folder, room_bytes)
            idle_server.serve_on(sock, folder, CHECKPOINT_BYTES)
        finally:
            os._exit(1)
    sock.close()
    return pid, address

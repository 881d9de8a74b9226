"""Hostile sequences of operations on a server, beside a client that must not notice.

`play` sends bodies and sequences to a server that runs, and counts what must not happen; tests play
few of them, `benchmarks.soak server` many.
"""

from __future__ import annotations

import collections
import contextlib
import math
import random
import threading
from typing import Any

from tests.hostile import server_bodies
from tests.hostile.server_client import Client, Gone, sampled, training

WRONG = ("answers_of_other_statuses", "internal_errors", "hangs", "samples_that_differ")
WRONG += ("lost_records",)
STEPS = 20  # of a sequence
SEEDS = range(4)
RATES = (1e-2, 0.0, -1.0, 1e25, 1e38, 1e300, 10**400, math.nan)
TTLS = (None, 0, 1, 3600, 2**31, 2**40, 2**60, 10**400, -1)
NAMES = ("a", "b", "unnamed-final", "unnamed~1", "../x", "", "x" * 200, "a/b")


class Bystander:
    """A client that samples the policy and an adapter of its own; its samples never change."""

    def __init__(self, client: Client, model: str) -> None:
        self.client = client
        session = client.ask("create_session", {})["session_id"]
        lora = {"rank": 4, "seed": 3}
        made = {"session_id": session, "model_seq_id": 0, "base_model": model, "lora_config": lora}
        run = client.finish("create_model", made)["model_id"]
        client.finish("forward_backward", training(run, 1))
        adam = {"learning_rate": 0.05}
        client.finish("optim_step", {"model_id": run, "seq_id": 2, "adam_params": adam})
        saved = {"model_id": run, "seq_id": 3, "path": "own"}
        self.path = client.finish("save_weights_for_sampler", saved)["path"]
        at = {"session_id": session, "sampling_session_seq_id": 0}
        self._samplers = [
            client.ask("create_sampling_session", at | more)["sampling_session_id"]
            for more in ({"base_model": model}, {"model_path": self.path} | {SEQ: 1})
        ]
        self._number = 0
        self._ended = threading.Event()
        self._expected = [self._look(seed) for seed in SEEDS]
        assert all(x for some in self._expected for x in some)

    def _look(self, seed: int) -> list[Any]:
        """Return the samples of both samplers."""
        results = []
        for sampler in self._samplers:
            self._number += 1
            body = asked(sampler, self._number, {"max_tokens": 8, "seed": seed}, 2)
            results.append(sampled(self.client.finish("asample", body)))
        return results

    def look(self, seed: int) -> None:
        self.client.found["samples_compared"] += 1
        found = self._look(seed)
        if found != self._expected[seed]:
            self.client.found["samples_that_differ"] += 1
            expected = self._expected[seed]
            self.client.examples.append(f"expected {expected!r:.300}, got {found!r:.300}")

    @contextlib.contextmanager
    def looking(self) -> Any:
        """Look again and again, in a thread."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(300)
            if thread.is_alive():
                self.client.found["hangs"] += 1
        for seed in SEEDS:
            self.look(seed)

    def _run(self) -> None:
        seed = 0
        while not self._ended.wait(0.02):
            try:
                self.look(seed)
            except Gone:
                return
            seed = (seed + 1) % len(SEEDS)


SEQ = "sampling_session_seq_id"


def asked(sampler: str, seq: int, params: Any, n: Any = 1, ids: Any = (5, 6, 7)) -> dict[str, Any]:
    chunks = {"chunks": [{"type": "encoded_text", "tokens": list(ids)}]}
    body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": n, "prompt": chunks}
    return body | {"sampling_params": params}


class Sequence:
    """The operations of one hostile client; `records` are the checkpoints that it should have."""

    def __init__(self, client: Client, model: str, rng: random.Random, records: set[str]) -> None:
        self.client = client
        self.model = model
        self.rng = rng
        self.records = records
        self.session = client.ask("create_session", {})["session_id"]
        self.runs: list[str] = []
        self.numbers = collections.Counter[str]()
        self.samplers = [""]
        self.pending: list[str] = []

    def play(self) -> None:
        """Play some steps, end the session, and wait for the results of all operations."""
        steps = (
            *(self.make, self.train, self.train, self.step, self.step, self.save, self.save),
            *(self.save_sampler, self.sample, self.sample, self.sample, self.gap, self.gap),
            *(self.repeat, self.change, self.drop, self.load, self.hang_up, self.look),
        )
        self.make()
        for _ in range(STEPS):
            self.rng.choice(steps)()
        self.client.call(f"sessions/{self.session}/finish")
        if any(self.client.result(request_id) is None for request_id in self.pending):
            self.client.found["hangs"] += 1

    def _next(self, run: str) -> int:
        self.numbers[run] += 1
        return self.numbers[run]

    def _run(self) -> str:
        return self.rng.choice(self.runs) if self.runs else "none"

    def make(self) -> None:
        number = len(self.runs) + self.rng.choice([0, 1])
        lora = {"rank": self.rng.choice([1, 4, 4, 99]), "seed": self.rng.choice([1, 2**63, -1])}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": self.model}
        result = self.client.finish("create_model", body | {"lora_config": lora})
        if result and "model_id" in result:
            self.runs.append(result["model_id"])

    def train(self) -> None:
        run = self._run()
        inputs = {"weights": [self.rng.choice([1.0, 1e38, math.nan, 0.0])] * 3}
        self._operation(run, "forward_backward", training(run, self._next(run), **inputs))

    def step(self) -> None:
        run = self._run()
        adam = {"learning_rate": self.rng.choice(RATES)}
        if self.rng.random() < 0.3:
            adam |= {self.rng.choice(["beta1", "beta2", "eps", "weight_decay"]): 1 - 1e-12}
        body = {"model_id": run, "seq_id": self._next(run), "adam_params": adam}
        self._operation(run, "optim_step", body)

    def _operation(self, run: str, path: str, body: Any) -> Any:
        result = self.client.finish(path, body)
        if result is None:  # it was refused, so that its number is free
            self.numbers[run] -= 1
        return result

    def save(self) -> None:
        run, ttl_s = self._run(), self.rng.choice(TTLS)
        path = self.rng.choice(["save_weights", "save_weights_for_sampler"])
        body = {"model_id": run, "seq_id": self._next(run), "path": self.rng.choice(NAMES)}
        body |= {"overwrite": self.rng.random() < 0.5, "ttl_seconds": ttl_s}
        result = self._operation(run, path, body)
        if result and "path" in result:
            at = {"session_id": self.session, SEQ: self.rng.randrange(1000)}
            found = self.client.ask("create_sampling_session", at | {"model_path": result["path"]})
            self.samplers += [found["sampling_session_id"]] if found else []
            if ttl_s is None:
                self.records.add(result["path"])
            else:
                self.records.discard(result["path"])

    def save_sampler(self) -> None:
        run = self._run()
        body = {"model_id": run, "seq_id": self._next(run), SEQ: self.rng.randrange(1000)}
        result = self._operation(run, "save_weights_for_sampler", body)
        if result and "sampling_session_id" in result:
            self.samplers.append(result["sampling_session_id"])

    def sample(self) -> None:
        params = {"max_tokens": self.rng.choice([1, 8, 8, 0, 2**62, 10**400])}
        name = self.rng.choice(["temperature", "top_k", "top_p", "stop", "seed"])
        params[name] = self.rng.choice([0, 1, 0.5, 2**31, 10**400, 1e-300, ["x"] * 17, "ab", None])
        n = self.rng.choice([1, 2, 4, 0, -1, 1025, 2**70])
        ids = [self.rng.choice([5, 6, 23, 24, -1])] * self.rng.choice([1, 3, 8, 100])
        body = asked(self.rng.choice(self.samplers), self.rng.randrange(10**6), params, n, ids)
        body["prompt_logprobs"] = self.rng.random() < 0.3
        self.client.finish("asample", body)

    def gap(self) -> None:
        """Send an operation whose predecessor never comes."""
        number = self.rng.choice([3, 100, 4095, 10**6])
        body = {"model_id": self._run(), "seq_id": self.numbers[self._run()] + number}
        queued = self.client.ask("optim_step", body | {"adam_params": {}})
        if queued:
            self.pending.append(queued["request_id"])

    def repeat(self) -> None:
        run = self._run()
        body = {"model_id": run, "seq_id": self.numbers[run], "adam_params": {}}
        self.client.call("optim_step", body)

    def change(self) -> None:
        path = self._path()
        ttl_s = self.rng.choice([x for x in TTLS if x not in (0, 1)])
        status, _ = self.client.call(f"{path}/ttl", {"ttl_seconds": ttl_s}, "PUT")
        if status == 200 and ttl_s is not None:
            self.records.discard(self._name(path))
        self.client.call(f"{path}/publish", method=self.rng.choice(["POST", "DELETE"]))

    def drop(self) -> None:
        path = self._path()
        if self.client.call(path, method="DELETE")[0] == 200:
            self.records.discard(self._name(path))

    def _path(self) -> str:
        kind = self.rng.choice(["weights", "sampler_weights"])
        return f"training_runs/{self._run()}/checkpoints/{kind}/{self.rng.choice(NAMES[:3])}"

    @staticmethod
    def _name(path: str) -> str:
        return path.replace("training_runs/", "tinker://").replace("checkpoints/", "")

    def load(self) -> None:
        run, path = self._run(), f"tinker://{self._run()}/weights/{self.rng.choice(NAMES)}"
        body = {"model_id": run, "seq_id": self._next(run), "path": path, "optimizer": True}
        self._operation(run, "load_weights", body)

    def hang_up(self) -> None:
        data = self.rng.choice([b"", b'{"a"', b"[" * 100_000])
        self.client.hang_up(self.rng.choice(server_bodies.POSTED), data, 200_000)

    def look(self) -> None:
        for path in ("checkpoints", "training_runs", "sessions?limit=1000", f"sessions/{SEQ}"):
            self.client.call(path, method="GET")


def listed(client: Client) -> set[str]:
    """Return the paths of all checkpoints."""
    found, total = set[str](), 1
    while len(found) < total:
        page = client.ask(f"checkpoints?limit=1000&offset={len(found)}", method="GET")
        total = page["cursor"]["total_count"]
        found |= {c["tinker_path"] for c in page["checkpoints"]}
    return found


def play(
    address: str, model: str, bodies: int, sequences: int, key: str = "", seed: int = 0
) -> tuple[dict[str, int], set[str], list[str]]:
    """Return counts, the checkpoints that must be there afterwards, and examples of failures."""
    found = collections.Counter[str](dict.fromkeys(WRONG, 0))
    client = Client(address, found, key)
    watched = Client(address, found, key)
    bystander = Bystander(watched, model)
    records, rng = {bystander.path}, random.Random(seed)
    session = client.ask("create_session", {})["session_id"]
    lora = {"rank": 4, "seed": 1}
    made = {"session_id": session, "model_seq_id": 0, "base_model": model, "lora_config": lora}
    run = client.finish("create_model", made)["model_id"]
    known = {"session_id": session, "model_id": run, "base_model": model}
    with bystander.looking():
        for i in range(max(bodies, sequences)):
            if i < bodies:
                client.call(*server_bodies.request(rng, known))
            if i < sequences:
                Sequence(client, model, random.Random(f"{seed} {i}"), records).play()
    found["lost_records"] = len(records - listed(client))
    found["bodies"], found["sequences"] = bodies, sequences
    return dict(found), records, client.examples + watched.examples

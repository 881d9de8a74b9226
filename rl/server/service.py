"""Sessions, models, samplers and checkpoints of one policy, and the operations on them.

Everything here runs in the event loop, but for the operations that `rl.server.worker` calls.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from rl.api import Datum, Policy
from rl.sampler import Sample
from rl.server import bodies, wire
from rl.server.answers import Answers
from rl.server.bodies import SHORT, Unknown, field, number, texts
from rl.server.listings import Listings
from rl.server.records import SAMPLER, TRAINING, CheckpointPath, Record, Records
from rl.server.weights import NO_NAME, Weights
from rl.server.worker import Result, Worker
from rl.stream import SampleRequest

MAX_MODELS = 16  # adapters in training, with their optimizer states
MAX_AHEAD = 4096  # operations of a model whose predecessors have not come
MAX_WAITING = 8192  # results to come
IDLE_S = 3600.0  # after which a session without a heartbeat gives up its models


class Gone(Exception):
    """The session has ended."""


class Busy(Exception):
    """There are too many requests already."""


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """The policy of a server, and its name and its tokenizer's for clients."""

    policy: Policy
    name: str
    tokenizer: str


@dataclasses.dataclass(eq=False)
class Model:
    """A model in training: its adapter once it is made, and operations by their numbers."""

    run: str
    session: str
    policy: Policy | None = None
    next_number: int = 1
    ahead: dict[int, Callable[[], None]] = dataclasses.field(default_factory=dict)


class Service:
    """The state of a server; `now_s` is the time, for expiry and idle sessions."""

    def __init__(
        self,
        served: Served,
        records: Records,
        worker: Worker,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        assert served.policy.model.lora is not None
        self.policy, self.name, self.tokenizer = served.policy, served.name, served.tokenizer
        self.records, self.answers = records, Answers()
        self._worker, self._now_s = worker, now_s
        self.listings = Listings(records, served.name, now_s)
        self.models: dict[str, Model] = {}
        self._heartbeats: dict[str, float] = {}
        self.weights = Weights(served.policy, records, now_s)

    # -- sessions --------------------------------------------------------------------------

    def create_session(self, body: Mapping[str, Any]) -> Record:
        session = f"{len(self.records.sessions):06d}-{int(self._now_s() * 1e3):x}"
        self.records.put("sessions", session, {"finished": False})
        self._heartbeats[session] = self._now_s()
        return {"session_id": session}

    def heartbeat(self, body: Mapping[str, Any]) -> Record:
        self._live(field(body, "session_id", str))
        return {}

    def finish(self, session: str) -> None:
        """End a session: its models are gone, and its checkpoints without a name."""
        if session not in self.records.sessions:
            raise Unknown(f"found no session {session!r:.100}")
        self.records.change("sessions", session, finished=True)
        self._drop_models(session)
        for run in [run for run, r in self.records.runs.items() if r["session"] == session]:
            self.weights.drop_unnamed(run, 0)

    def _live(self, session: str) -> None:
        """Record a heartbeat of a session. Raises Gone, or Unknown."""
        record = self.records.sessions.get(session)
        if record is None:
            raise Unknown(f"found no session {session!r:.100}")
        if record["finished"]:
            raise Gone(f"session {session} has finished")
        self._heartbeats[session] = self._now_s()

    def _drop_models(self, session: str) -> None:
        for run in [m.run for m in self.models.values() if m.session == session]:
            del self.models[run]

    # -- models ----------------------------------------------------------------------------

    def create_model(self, body: Mapping[str, Any]) -> Record:
        """Queue a new adapter with the rank and seed of the request."""
        self._check_base(field(body, "base_model", str))
        lora = field(body, "lora_config", dict)
        rank, seed = number(lora, "rank", 32), number(lora, "seed", 0, 2**63)
        assert self.policy.model.lora is not None
        if not 1 <= rank <= (max_rank := self.policy.model.lora.rank):
            raise ValueError(
                f"lora_config: expected a rank of 1 to {max_rank}, got {rank}: start the server "
                f"with --gin.Policy.lora_rank={rank} for more"
            )
        targets = [t for short, t in SHORT.items() if field(lora, f"train_{short}", bool, True)]
        if not targets:
            raise ValueError("lora_config: expected a part to train, got none")

        def make() -> Policy:
            return self.policy.with_new_adapter(seed % 2**31, rank, targets)

        return self._make_model(body, rank, targets, make)

    def create_from(self, body: Mapping[str, Any]) -> Record:
        """Queue a model that continues from a checkpoint."""
        path, with_optimizer = self._training_path(body), field(body, "optimizer", bool)
        source = self.records.runs[self.records.checkpoints[path]["run"]]
        folder = self.records.checkpoint_folder(path)

        def make() -> Policy:
            policy = self.policy.with_new_adapter()
            policy.load_state(folder, with_optimizer=with_optimizer)
            return policy

        return self._make_model(body, source["rank"], source["targets"], make)

    def _make_model(
        self, body: Mapping[str, Any], rank: int, targets: list[str], make: Callable[[], Policy]
    ) -> Record:
        """Queue a new model, unless it was requested before."""
        session = field(body, "session_id", str)
        self._live(session)
        run = f"{session}:train:{number(body, 'model_seq_id')}"
        request_id = f"{run}:create"
        if request_id in self.answers:
            return {"request_id": request_id}
        if run in self.records.runs:
            raise ValueError(f"{run} was made before the server started: load a checkpoint of it")
        self._drop_idle()
        if len(self.models) >= MAX_MODELS:
            raise ValueError(f"expected at most {MAX_MODELS} models in training: finish a session")
        record = {"session": session, "rank": rank, "targets": targets, "last_s": self._now_s()}
        record["user_metadata"] = texts(body)
        answer, model = self._open(request_id), Model(run, session)
        self.models[run] = model
        self.records.put("runs", run, record)

        def do() -> Result:
            model.policy = make()
            return {"model_id": run}

        def done(result: Result) -> None:
            if model.policy is None:  # it failed, and takes no room
                self.models.pop(run, None)
            answer(result)

        self._worker.do(do, done)
        return {"request_id": request_id}

    def _drop_idle(self) -> None:
        limit_s = self._now_s() - IDLE_S
        for session in {model.session for model in self.models.values()}:
            if self._heartbeats.get(session, 0.0) < limit_s:
                self._drop_models(session)

    def get_info(self, body: Mapping[str, Any]) -> Record:
        run = field(body, "model_id", str)
        self._model(run)
        data = {"arch": "reprise", "model_name": self.name, "tokenizer_id": self.tokenizer}
        rank = self.records.runs[run]["rank"]
        info = {"model_id": run, "model_data": data, "is_lora": True, "lora_rank": rank}
        return info | {"model_name": self.name}

    def _model(self, run: str) -> Model:
        if run not in self.models:
            raise Unknown(
                f"found no model {run!r:.100} in training: it has finished, was idle, or the "
                "server was started again; continue from a checkpoint"
            )
        return self.models[run]

    def _check_base(self, base: str) -> None:
        if base != self.name:
            raise ValueError(f"expected the model {self.name!r}, got {base!r:.100}")

    # -- operations on a model -------------------------------------------------------------

    def train(self, data: bytes) -> Record:
        """Queue a forward or a forward and backward pass of a protocol-buffer body."""
        message = wire.parse("ForwardBackwardRequest", data)

        def run(policy: Policy) -> Result:
            settings, loss = bodies.loss_settings(message), message.loss_fn
            data = [bodies.parse_datum(x, loss) for x in message.data]
            if message.forward_only:
                return bodies.trained(policy.evaluate(data, loss, settings))
            return bodies.trained(policy.forward_backward(data, loss, settings))

        return self._in_turn(message.model_id, message.seq_id, run)

    def optim_step(self, body: Mapping[str, Any]) -> Record:
        def run(policy: Policy) -> Result:
            return {"metrics": {"grad_norm": policy.optim_step(bodies.parse_adam(body))}}

        return self._queue(body, run)

    def load(self, body: Mapping[str, Any]) -> Record:
        """Queue loading of a checkpoint: into a model, or into a new one."""
        if body.get("model_id") is None:
            return self.create_from(body)

        def run(policy: Policy) -> Result:
            path = self._training_path(body)
            folder = self.records.checkpoint_folder(path)
            policy.load_state(folder, with_optimizer=field(body, "optimizer", bool))
            return {"path": path}

        return self._queue(body, run)

    def save(self, body: Mapping[str, Any]) -> Record:
        """Queue a checkpoint to continue from."""
        return self._queue(body, partial(self._save_as, body, TRAINING))

    def save_sampler(self, body: Mapping[str, Any]) -> Record:
        """Queue a checkpoint to sample from; without a name it opens a sampling session."""
        if body.get("path") is not None:
            return self._queue(body, partial(self._save_as, body, SAMPLER))

        def run(policy: Policy) -> Result:
            at = self._checkpoint(body, SAMPLER, f"{NO_NAME}{number(body, 'seq_id')}")
            session = self.records.runs[at.run]["session"]
            key = f"{session}:sample:{number(body, 'sampling_session_seq_id')}"
            self.weights.save(body, at, policy)
            self.records.put("samplers", key, {"session": session, "path": str(at)})
            return {"sampling_session_id": key}

        return self._queue(body, run)

    def _save_as(self, body: Mapping[str, Any], kind: str, policy: Policy) -> Result:
        at = self._checkpoint(body, kind, field(body, "path", str))
        self.weights.save(body, at, policy)
        return {"path": str(at)}

    def _checkpoint(self, body: Mapping[str, Any], kind: str, name: str) -> CheckpointPath:
        return CheckpointPath(field(body, "model_id", str), kind, bodies.check_name(name))

    def _training_path(self, body: Mapping[str, Any]) -> str:
        at = CheckpointPath.parse(field(body, "path", str))
        if at.kind != TRAINING:
            raise ValueError(f"expected a checkpoint of training, got {at}")
        self.records.checkpoint_folder(str(at))
        return str(at)

    def _queue(self, body: Mapping[str, Any], run: Callable[[Policy], Result]) -> Record:
        """Queue an operation, which checks the other fields of its body in its turn.

        A client goes on with the next number after a 400: the rest would wait for this one.
        """
        return self._in_turn(field(body, "model_id", str), number(body, "seq_id"), run)

    def _in_turn(self, run: str, seq: int, operation: Callable[[Policy], Result]) -> Record:
        """Queue an operation on a model after the ones with lower numbers."""
        model, request_id = self._model(run), f"{run}:{seq}"
        if request_id in self.answers:
            return {"request_id": request_id}
        if not model.next_number <= seq < model.next_number + MAX_AHEAD:
            raise ValueError(f"expected seq_id {model.next_number} or a later one, got {seq}")
        on_result = self._open(request_id)

        def do() -> Result:
            if model.policy is None:
                raise ValueError(f"{run} was not made")
            return operation(model.policy)

        model.ahead[seq] = lambda: self._worker.do(do, on_result)
        while model.next_number in model.ahead:
            model.ahead.pop(model.next_number)()
            model.next_number += 1
        self.records.runs[run]["last_s"] = self._now_s()
        return {"request_id": request_id}

    def _open(self, request_id: str) -> Callable[[Result], None]:
        """Open an answer; returns what sets it."""
        if self.answers.num_waiting >= MAX_WAITING:
            raise Busy("too many requests wait")
        self.answers.open(request_id)
        return partial(self.answers.set, request_id)

    # -- samples ---------------------------------------------------------------------------

    def create_sampler(self, body: Mapping[str, Any]) -> Record:
        session = field(body, "session_id", str)
        self._live(session)
        path = field(body, "model_path", str, None)
        if path is not None:
            self.records.checkpoint_folder(str(CheckpointPath.parse(path)))
        elif (base := field(body, "base_model", str, None)) is not None:
            self._check_base(base)
        else:
            raise ValueError("expected base_model or model_path")
        key = f"{session}:sample:{number(body, 'sampling_session_seq_id')}"
        self.records.put("samplers", key, {"session": session, "path": path})
        return {"sampling_session_id": key}

    def sampler(self, key: str) -> Record:
        record = self._sampler_record(key)
        return {"sampler_id": key, "base_model": self.name, "model_path": record["path"]}

    def _sampler_record(self, key: str) -> Record:
        if key not in self.records.samplers:
            raise Unknown(f"found no sampler {key!r:.100}")
        return self.records.samplers[key]

    def sample(self, body: Mapping[str, Any]) -> Record:
        """Queue a request for samples."""
        key, seq = field(body, "sampling_session_id", str), number(body, "seq_id")
        path, request_id = self._sampler_record(key)["path"], f"{key}:{seq}"
        n = number(body, "num_samples", 1, bodies.MAX_SAMPLES)
        ids = [f"{request_id}:{i}" for i in range(n)]
        answer = {"request_id": request_id, "sample_sequence_ids": ids}
        if request_id in self.answers:
            return answer
        wants_prompt = field(body, "prompt_logprobs", bool, False)
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            if number(body, name, 0):
                raise ValueError(f"{name}: this server returns log-probs of drawn tokens alone")
        params, prompt = (field(body, name, dict) for name in ("sampling_params", "prompt"))
        seed = number(params, "seed", None)
        tokens, limit = bodies.prompt_ids(prompt), self.policy.config.longest_tokens
        sampling = bodies.parse_sampling(params, len(tokens), limit)
        noise = request_id if seed is None else f"seed {seed}"

        def request() -> SampleRequest:
            return SampleRequest(self.weights.sampler(path), tokens, n, sampling, noise)

        def finish(samples: list[Sample]) -> Result:
            prompt_logps = None
            if wants_prompt:
                prompt_logps = np.zeros(0, np.float32)
                if len(tokens) > 1:
                    [prompt_logps] = self.weights.sampler(path).forward(
                        [Datum(tokens[:-1], tokens[1:])]
                    )
            return bodies.sampled(samples, prompt_logps)

        self._worker.sample(request, finish, self._open(request_id))
        return answer

    def capabilities(self) -> Record:
        limit = self.policy.config.longest_tokens
        model = {"model_name": self.name, "max_context_length": limit}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

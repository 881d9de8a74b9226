"""Sessions, models, samplers and checkpoints of one policy, and operations on these.

All code here runs in the event loop, except the operations that `rl.server.worker` calls.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from reprise.rl.http import wire
from reprise.rl.http.account import Account
from reprise.rl.http.account import Busy as Busy
from reprise.rl.http.answers import Answers
from reprise.rl.python.api import Datum, Policy
from reprise.rl.python.sampler import Sample, Sampler
from reprise.rl.python.stream import OnTokens, SampleRequest
from reprise.rl.server import bodies
from reprise.rl.server.bodies import SHORT, Unknown, field, number, texts
from reprise.rl.server.listings import Listings
from reprise.rl.server.records import SAMPLER, TRAINING, Change, CheckpointPath, Record, Records
from reprise.rl.server.turns import Model, Operation
from reprise.rl.server.weights import Weights
from reprise.rl.server.worker import Result, Worker

MAX_MODELS = 16  # adapters in training, with their optimizer states
MAX_SESSIONS = 10_000  # then the oldest sessions without a client or a checkpoint are dropped
FORGOTTEN = 100  # sessions dropped in one call
SAMPLE_BYTES = 2048  # of memory for a pending response
IDLE_S = 3600.0  # after which a session without a heartbeat may lose its models
SILENT_S = 300.0  # after which a session without a heartbeat may be dropped


class Gone(Exception):
    """The session has ended."""


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """The policy of a server, with the policy and tokenizer names that clients see."""

    policy: Policy
    name: str
    tokenizer: str


class Service:
    """The state of a server; time comes from the clock of `records`."""

    def __init__(
        self, served: Served, records: Records, worker: Worker, account: Account | None = None
    ) -> None:
        assert served.policy.model.lora is not None
        self.policy = served.policy
        self.name = served.name
        self.tokenizer = served.tokenizer
        self.records = records
        self.account = account or Account()
        self.answers = Answers(self.account)
        self._worker = worker
        self._now_s = records.now_s
        self.listings = Listings(records, served.name)
        self.models: dict[str, Model] = {}
        self._heartbeats: dict[str, float] = {}
        self.weights = Weights(served.policy, records)
        self._num_sessions = len(records.sessions)

    def tick(self) -> None:
        """Delete expired checkpoints, and answer operations that have waited too long."""
        self.records.expire()
        for model in self.models.values():
            model.turns.expire(self._now_s())

    # -- sessions --------------------------------------------------------------------------

    def create_session(self, body: Mapping[str, Any]) -> Record:
        if len(self.records.sessions) >= MAX_SESSIONS or self.records.is_nearly_full:
            self._forget_sessions()
        if len(self.records.sessions) >= MAX_SESSIONS:
            raise Busy(f"the server has {MAX_SESSIONS:,} sessions: finish some")
        session = f"{self._num_sessions:06d}-{int(self._now_s() * 1e3):x}"
        self._num_sessions += 1
        self.records.put("sessions", session, {"finished": False})
        self._heartbeats[session] = self._now_s()
        return {"session_id": session}

    def heartbeat(self, body: Mapping[str, Any]) -> Record:
        self._live(field(body, "session_id", str))
        return {}

    def finish(self, session: str) -> None:
        """Finish a session, and drop its models and unnamed checkpoints."""
        if session not in self.records.sessions:
            raise Unknown(f"found no session {session!r:.100}")
        self.records.change("sessions", session, finished=True)
        self._drop_models(session, f"session {session} has finished")
        for run in self.records.of_session("runs", session):
            self.weights.drop_unnamed(run, 0)

    def _forget_sessions(self) -> None:
        """Drop the oldest sessions that have neither a client nor a checkpoint."""
        limit_s = self._now_s() - SILENT_S
        records = self.records
        kept = {model.session for model in self.models.values()}
        kept |= {r["session"] for run, r in records.runs.items() if records.run_checkpoints(run)}

        def is_live(session: str) -> bool:
            is_finished = records.sessions[session]["finished"]
            return not is_finished and self._heartbeats.get(session, 0.0) >= limit_s

        candidates = (s for s in records.sessions if s not in kept and not is_live(s))
        forgotten = set(itertools.islice(candidates, FORGOTTEN))
        changes: list[Change] = [("sessions", session, None) for session in forgotten]
        for table in ("samplers", "runs"):
            entries = list(getattr(records, table).items())
            changes += [(table, k, None) for k, r in entries if r["session"] in forgotten]
        if changes:
            records.write(changes)
        for session in forgotten:
            self._heartbeats.pop(session, None)

    def _live(self, session: str) -> None:
        """Record a heartbeat of a session. Raises Gone, or Unknown."""
        record = self.records.sessions.get(session)
        if record is None:
            raise Unknown(f"found no session {session!r:.100}")
        if record["finished"]:
            raise Gone(f"session {session} has finished")
        self._heartbeats[session] = self._now_s()

    def _drop_models(self, session: str, why: str) -> None:
        """Free the models of a session; pending operations fail."""
        for model in [m for m in self.models.values() if m.session == session]:
            self._drop_model(model, f"{model.run}: {why}")

    def _drop_model(self, model: Model, why: str) -> None:
        self.models.pop(model.run, None)
        model.end(model.ended or why)

    # -- models ----------------------------------------------------------------------------

    def create_model(self, body: Mapping[str, Any]) -> Record:
        """Queue a new adapter with the rank and seed of the request."""
        self._check_base(field(body, "base_model", str))
        lora = field(body, "lora_config", dict)
        rank = number(lora, "rank", 32)
        seed = number(lora, "seed", 0, high=2**63)
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
        path = self._training_path(body)
        with_optimizer = field(body, "optimizer", bool)
        source = self.records.runs[self.records.checkpoint(path)["run"]]

        def make() -> Policy:
            policy = self.policy.with_new_adapter()
            with self.weights.reading(path) as (_, folder):
                policy.load_state(folder, with_optimizer=with_optimizer)
            return policy

        return self._make_model(body, source["rank"], source["targets"], make)

    def _make_model(
        self, body: Mapping[str, Any], rank: int, targets: list[str], make: Callable[[], Policy]
    ) -> Record:
        """Queue the creation of a model, unless the same request is already known."""
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
        answer = self._open(request_id)
        model = Model(run, session)
        try:
            self.records.put("runs", run, record)
        except (Busy, OSError):
            self.answers.close(request_id)
            raise
        self.models[run] = model

        def do() -> Result:
            if model.ended is None:
                model.policy = make()
            model.live_policy()
            return {"model_id": run}

        def done(result: Result) -> None:
            if model.policy is None or model.ended is not None:  # failed or dropped
                self._drop_model(model, f"{run} was not made")
            answer(result)

        self._worker.do(do, done)
        return {"request_id": request_id}

    def _drop_idle(self) -> None:
        limit_s = self._now_s() - IDLE_S
        for session in {model.session for model in self.models.values()}:
            if self._heartbeats.get(session, 0.0) < limit_s:
                self._drop_models(session, "the session was idle, and another one needs the room")

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

    def train(self, operation: Any, body: bytes) -> Record:
        """Queue a forward pass, or forward and backward; the body is parsed when the pass runs.

        An error in the body becomes the result, because the client then sends the next number.
        """

        def run(policy: Policy) -> Result:
            wire.check_fields("ForwardBackwardRequest", body)
            message = wire.parse("ForwardBackwardRequest", body)
            settings = bodies.loss_settings(message)
            loss = message.loss_fn
            data = [bodies.parse_datum(x, loss) for x in message.data]
            if message.forward_only:
                return bodies.trained(policy.evaluate(data, loss, settings))
            return bodies.trained(policy.forward_backward(data, loss, settings))

        return self._in_turn(operation.model_id, operation.seq_id, run)

    def optim_step(self, body: Mapping[str, Any]) -> Record:
        def run(policy: Policy) -> Result:
            return {"metrics": {"grad_norm": policy.optim_step(bodies.parse_adam(body))}}

        return self._queue(body, run)

    def load(self, body: Mapping[str, Any]) -> Record:
        """Queue loading of a checkpoint into an existing or a new model."""
        if body.get("model_id") is None:
            return self.create_from(body)

        def run(policy: Policy) -> Result:
            path = self._training_path(body)
            with self.weights.reading(path) as (_, folder):
                policy.load_state(folder, with_optimizer=field(body, "optimizer", bool))
            return {"path": path}

        return self._queue(body, run)

    def save(self, body: Mapping[str, Any]) -> Record:
        """Queue a checkpoint to continue from."""
        return self._queue(body, partial(self._save_as, body, TRAINING))

    def save_sampler(self, body: Mapping[str, Any]) -> Record:
        """Queue a checkpoint to sample from; without a name, this opens a sampling session."""
        if body.get("path") is not None:
            return self._queue(body, partial(self._save_as, body, SAMPLER))

        def run(policy: Policy) -> Result:
            model_id = field(body, "model_id", str)
            # no client can choose this name, because names of clients have no "~"
            at = CheckpointPath(model_id, SAMPLER, f"unnamed~{number(body, 'seq_id')}")
            session = self.records.runs[model_id]["session"]
            key = f"{session}:sample:{number(body, 'sampling_session_seq_id')}"
            self.weights.save(body, at, policy, key)
            return {"sampling_session_id": key}

        return self._queue(body, run)

    def _save_as(self, body: Mapping[str, Any], kind: str, policy: Policy) -> Result:
        name = bodies.check_name(field(body, "path", str))
        at = CheckpointPath(field(body, "model_id", str), kind, name)
        self.weights.save(body, at, policy)
        return {"path": str(at)}

    def _training_path(self, body: Mapping[str, Any]) -> str:
        at = CheckpointPath.parse(field(body, "path", str))
        if at.kind != TRAINING:
            raise ValueError(f"expected a checkpoint of training, got {at}")
        self.records.checkpoint(str(at))
        return str(at)

    def _queue(self, body: Mapping[str, Any], run: Callable[[Policy], Result]) -> Record:
        """Queue an operation, which checks other fields of the body only when it runs.

        After a 400, the client would send the next number, and that operation would wait for the
        missing number.
        """
        return self._in_turn(field(body, "model_id", str), number(body, "seq_id"), run)

    def _in_turn(self, run: str, seq: int, operation: Callable[[Policy], Result]) -> Record:
        """Queue an operation on a model after all operations with lower numbers."""
        model = self._model(run)
        request_id = f"{run}:{seq}"
        if request_id in self.answers:
            return {"request_id": request_id}
        model.turns.check(seq)
        on_result = self._open(request_id)

        def do() -> Result:
            return operation(model.live_policy())

        queued = Operation(lambda: self._worker.do(do, on_result), on_result)
        model.turns.add(seq, queued, self._now_s())
        self.records.runs[run]["last_s"] = self._now_s()
        return {"request_id": request_id}

    def _open(self, request_id: str, num_bytes: int = 0) -> Callable[[Result], None]:
        """Open an answer, and return a function that sets it. Raises Busy."""
        self.answers.open(request_id, num_bytes)
        return partial(self.answers.set, request_id)

    # -- samples ---------------------------------------------------------------------------

    def create_sampler(self, body: Mapping[str, Any]) -> Record:
        session = field(body, "session_id", str)
        self._live(session)
        path = field(body, "model_path", str, None)
        if path is not None:
            self.records.checkpoint(str(CheckpointPath.parse(path)))
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
        key = field(body, "sampling_session_id", str)
        seq = number(body, "seq_id")
        path = self._sampler_record(key)["path"]
        request_id = f"{key}:{seq}"
        n = number(body, "num_samples", 1, low=1, high=bodies.MAX_SAMPLES)
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
        tokens = bodies.prompt_ids(prompt)
        limit = self.policy.config.longest_tokens
        sampling = bodies.parse_sampling(params, len(tokens), limit)
        noise = request_id if seed is None else f"seed {seed}"

        def request(sampler: Sampler) -> SampleRequest:
            return SampleRequest(sampler, tokens, n, sampling, noise)

        def finish(sampler: Sampler, samples: list[Sample]) -> Result:
            prompt_logps = prompt_logprobs(sampler, tokens) if wants_prompt else None
            return bodies.sampled(samples, prompt_logps)

        self.draw(path, request, finish, self._open(request_id, SAMPLE_BYTES * n))
        return answer

    def draw(
        self,
        path: str | None,
        request: Callable[[Sampler], SampleRequest],
        finish: Callable[[Sampler, list[Sample]], Any],
        on_result: Callable[[Any], None],
        on_tokens: OnTokens | None = None,
    ) -> Callable[[], None]:
        """Queue a request for samples from a checkpoint, None for the plain policy.

        `on_result` gets the result of `finish`, or an object with `error` and `category`. Return a
        function that drops the request.
        """
        used = list[Sampler]()  # kept even if the checkpoint is deleted or replaced later

        def make() -> SampleRequest:
            used.append(self.weights.sampler(path))
            return request(used[0])

        return self._worker.sample(
            make, lambda samples: finish(used[0], samples), on_result, on_tokens
        )

    def capabilities(self) -> Record:
        limit = self.policy.config.longest_tokens
        model = {"model_name": self.name, "max_context_length": limit}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}


def prompt_logprobs(sampler: Sampler, tokens: tuple[int, ...]) -> np.ndarray:
    """Return the log-probs of all tokens of a prompt but the first, float32 [T − 1]."""
    if len(tokens) < 2:
        return np.zeros(0, np.float32)
    [logps] = sampler.forward([Datum(tokens[:-1], tokens[1:])])
    return logps

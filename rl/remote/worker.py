"""A rollout worker's program: an engine on its own devices that answers messages.

What brings the messages (Ray, a test) calls `answer`, from any number of threads. The engine, its
drafters and its compiled programs are those that a worker's thread has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from models import transformer
from models.sharding import param_shardings, rollout_mesh
from models.token_text import TokenBytes
from rl.cluster.join import identity_of, mismatch
from rl.drafting.actors import DraftsApart, RemoteDrafts
from rl.engine.engine import Engine
from rl.engine.rollout_spec import DrafterFactory, RolloutSpec
from rl.remote import messages
from rl.remote.drafter_messages import NO_DRAFTERS, Tuner, of_tuner, tuner_state
from rl.remote.history_fetch import AskAt, compile_join, history_index
from rl.remote.messages import CODEC, Done, Drafting, Hello, Job
from rl.remote.program import MessageProgram
from rl.remote.weights import MessageCarrier
from rl.remote.wire import WireError
from rl.remote.worker_drafters import WorkerDrafters, folder_here
from rl.remote.worker_run import WorkerRun, check_kv
from rl.speculation.sources import Speculation, history_rule
from rl.warm_up import compile_buckets, transfer_times
from rl.warm_up.host_kernels import compile_host_kernels
from rl.warm_up.rollout_programs import Reach
from rl.warm_up.round_times import load_or_measure
from rl.weights.pieces import names_of
from rl.weights.subscriber import Subscriber
from rl.workers.group_drafts import SharedDrafts
from spec.budget.bandit import BegMab
from spec.budget.budget import MANY_ROUNDS, DraftDecision
from spec.budget.config import MODEL
from spec.reuse.rollout_cache import RolloutCache
from spec.sampling import KEY_IMPL

MOST_VERSIONS = 2  # of weights that are kept on the host: two steps run in a pipeline
LEAVING_S = 5.0  # that a run has to end
MOST_WAIT_S = 60.0  # of a Poll


class WorkerProgram(MessageProgram):
    """A worker's end: `exchange` calls the draft server, if there is one, `ask_at` asks history
    workers, and `apart` returns the present drafting workers of a worker.

    `config` is the text of the run's configuration that this program was started for. `leave` is
    called where nobody has spoken for the deadline that `Hello` names.
    """

    def __init__(
        self,
        config: str = "",
        exchange: Callable[..., Any] | None = None,
        ask_at: AskAt | None = None,
        apart: Callable[[int], DraftsApart] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        leave: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(CODEC, leave, clock)
        self._config, self._exchange, self._ask_at, self._apart = config, exchange, ask_at, apart
        self._lock = threading.Lock()
        self._hello: Hello | None = None
        self._engine: Engine | None = None
        self._speculation: Speculation | None = None
        self._drafters = WorkerDrafters(NO_DRAFTERS)
        self._weights: dict[int, Any] = {}  # on the host, by version
        self._carrier, self._subscriber = MessageCarrier(), None  # type: tuple[Any, Any]
        self._placed: tuple[int, Any] | None = None
        self._compiled: messages.Compile | None = None
        self._run: WorkerRun | None = None
        self.remarks: list[str] = []
        self._drafting = RemoteDrafts(self.remarks.append)
        self.answers = {
            Hello: self._welcome,
            messages.Offered: self._take_offer,
            messages.Weights: self._take_weights,
            messages.DrafterWeights: self._take_drafter,
            messages.Compile: self._compile,
            messages.Measure: self._measure,
            messages.Begin: self._begin,
            messages.Give: self._give,
            messages.Poll: self._poll,
            messages.Abort: self._abort,
            messages.Ping: self._pong,
            messages.Gradient: self._gradient,
        }

    # -- before the first run ------------------------------------------------------------

    def _welcome(self, hello: Hello) -> messages.Welcome:
        mine = self._identity(hello)
        if wrong := mismatch([dict(hello.identity), mine]):
            raise WireError(wrong)
        devices = jax.local_devices()
        if hello.devices > len(devices):
            raise ValueError(
                f"expected {hello.devices} devices for Sched.devices_per_worker, got "
                f"{len(devices)} on this host"
            )
        mesh = None
        if hello.devices > 1:
            mesh = rollout_mesh(devices[: hello.devices], hello.model.num_kv_heads)
        with self._lock:
            self._hello = hello
            self._drafters = drafters = WorkerDrafters(hello.drafters)
            self._engine = Engine(
                *(hello.model, hello.engine),
                dtype=hello.dtype,
                mesh=mesh,
                number=hello.number,
                feature_layers=drafters.feature_layers,
            )
            settings = hello.speculation, RolloutCache(), drafters.by_name, hello.tuner
            self._speculation = Speculation(*settings, seed=hello.seed)
            if hello.drafters.apart:
                self._speculation.apart_elsewhere = frozenset({MODEL})
            expected = _expected(self._engine)
            self._subscriber = Subscriber(expected, self._carrier)
        self.end_after_silence(hello.deadline_s)
        return messages.Welcome(mine, socket.gethostname(), os.getpid(), self._clock())

    def _identity(self, hello: Hello) -> dict[str, str]:
        """Return what this program is; a policy folder that is not on this host is not needed."""
        policy, model = Path(hello.policy), hello.drafters.model
        draft_model = None if model is None else folder_here(model)
        there = policy if policy.exists() else Path(__file__)
        found = identity_of(self._config, there, draft_model)
        if not policy.exists():
            found |= {name: hello.identity.get(name, "") for name in found if "Policy." in name}
        return found

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise WireError("expected Hello first")
        return self._engine

    def _take_weights(self, told: messages.Weights) -> Done:
        specs = jax.tree.leaves(transformer.param_specs(self.engine.model))
        shapes = [(x.shape, x.dtype) for x in told.arrays]
        wanted = [(tuple(spec.shape), self.engine.dtype) for spec in specs]
        if shapes != wanted:
            i = next((i for i, pair in enumerate(zip(shapes, wanted, strict=False)) if
                      pair[0] != pair[1]), min(len(shapes), len(wanted)))  # fmt: skip
            raise WireError(
                f"expected {len(wanted)} arrays of the policy's shapes and {self.engine.dtype}, "
                f"got {len(shapes)}; array {i} is another one"
            )
        tree = jax.tree.structure(transformer.param_specs(self.engine.model))
        self._keep(told.version, jax.tree.unflatten(tree, told.arrays))
        return Done()

    def _take_offer(self, told: messages.Offered) -> messages.Has:
        """Stage what is offered beside what is there, and take it: no run is under way."""
        subscriber, engine = self._subscriber, self.engine
        assert subscriber is not None, "an engine is there"
        self._carrier.came(told.payloads)
        try:
            staged = subscriber.stage(told.text)
        finally:
            self._carrier.came({})
        params, specs = subscriber.swap(staged), transformer.param_specs(engine.model)
        host = [staged.host[name] for name in names_of(specs)]
        self._keep(staged.id.version, jax.tree.unflatten(jax.tree.structure(specs), host))
        with self._lock:
            self._placed = staged.id.version, engine.place(params)
        return messages.Has(staged.id.version, staged.id.fingerprint)

    def _keep(self, version: int, params: Any) -> None:
        with self._lock:
            self._weights[version] = params
            for old in sorted(self._weights)[:-MOST_VERSIONS]:
                del self._weights[old]

    def _params(self, version: int) -> Any:
        """The weights of a version, on this worker's devices."""
        with self._lock:
            if self._placed is None or self._placed[0] != version:
                if version not in self._weights:
                    kept = ", ".join(map(str, self._weights)) or "none"
                    raise WireError(f"expected weights of version {version}, got {kept}")
                self._placed = None  # the memory of one copy
                self._placed = version, self.engine.place(self._weights[version])
            return self._placed[1]

    def _newest(self) -> Any:
        return self._params(max(self._weights, default=0))

    def _reach(self) -> Reach:
        bounds = self._compiled
        if bounds is None:
            raise WireError("expected Compile first")
        nodes = bounds.nodes
        return Reach(
            bounds.max_requests,
            bounds.max_prompt_tokens,
            speculative=bounds.speculative,
            reuse=bounds.reuse,
            moves=True,
            drafters=self._drafters.here,
            nodes=None if nodes is None else lambda num_slots: nodes.get(num_slots, ()),
            alone={name: partial(_decisions, by_slots) for name, by_slots in bounds.alone.items()},
        )

    def _compile(self, bounds: messages.Compile) -> Done:
        self._compiled = bounds
        params = self._newest()
        compile_buckets.warm_up(self.engine, params, bounds.sampling, self._reach())
        if bounds.batch is not None:
            self._drafters.compile(bounds.batch, self.engine, params)
        return Done()

    def _measure(self, asked: messages.Measure) -> messages.Measured:
        bounds, hello, speculation = self._compiled, self._hello, self._speculation
        reach = self._reach()
        assert bounds is not None and hello is not None and speculation is not None
        measured = self.engine, self._newest(), bounds.sampling, reach
        rounds = moves = ""
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "moves.json"
            if asked.rounds is None:
                transfer_times.measure(*measured, path)
                moves = path.read_text()
            if reach.speculative:
                path = Path(name) / "rounds.json"
                if asked.rounds:
                    path.write_text(asked.rounds)
                speculation.times = load_or_measure(path, *measured)
                rounds = path.read_text()
                compile_host_kernels(
                    hello.speculation,
                    speculation.times,
                    *measured[:3],
                    self._drafters.by_name,
                    hello.tuner,
                    {MODEL: RemoteDrafts(print)} if hello.drafters.apart else None,
                )
                if hello.speculation.history_source is not None:
                    compile_join(history_rule(hello.speculation))
        return messages.Measured(rounds, moves)

    # -- runs ------------------------------------------------------------------------------

    def _begin(self, asked: messages.Begin) -> Done:
        job = asked.job
        key_shape = jax.random.key_data(jax.random.key(0, impl=KEY_IMPL)).shape
        if job.key.shape != key_shape:
            raise WireError(f"expected a key of {key_shape}, got {job.key.shape}")
        with self._lock:
            if self._run is not None and not self._run.ended:
                raise WireError(f"expected the end of run {self._run.number} before another")
            if asked.tuner is not None:
                self._bandit().load_state(tuner_state(asked.tuner))
            tuner = self._tuner if asked.tuner is not None else lambda: None
            self._run = WorkerRun(asked.run, job, self.engine, partial(self._spec, job), tuner)
            self._run.start()
        return Done()

    def _bandit(self) -> BegMab:
        assert self._speculation is not None, "an engine is there"
        return self._speculation.bandit(self.engine.number)

    def _tuner(self) -> Tuner:
        return of_tuner(self._bandit().state())

    @contextlib.contextmanager
    def _spec(self, job: Job) -> Iterator[RolloutSpec]:
        """Entered in the run's thread, and left when the run has ended."""
        words = None if job.words is None else TokenBytes(job.words.bytes_N, job.words.starts)
        spec = RolloutSpec(
            self._params(job.weights),
            job.sampling,
            jax.random.wrap_key_data(job.key, impl=KEY_IMPL),
            job.stop_token_ids,
            job.policy_version,
            rule=job.rule,
            words=words,
            begun=job.begun,
            times=None if self._speculation is None else self._speculation.times,
        )
        with contextlib.ExitStack() as stack:
            if job.drafting is not None:
                self._draft_apart(job.apart)
                drafts = self._drafter(job.name, job.drafting, stack)
                spec = dataclasses.replace(spec, drafts=drafts)
            yield spec

    def _draft_apart(self, is_apart: bool) -> None:
        """Have the rollout's drafts of the draft model come from drafting workers, if any."""
        speculation, hello = self._speculation, self._hello
        assert speculation is not None and hello is not None, "an engine is there"
        if hello.drafters.apart != is_apart:
            raise WireError("expected drafting workers in each job, or in none")
        if is_apart:
            assert self._apart is not None, "drafting workers can be reached"
            self._drafting.use(self._apart(self.engine.number), speculation.times)
            speculation.apart = {MODEL: self._drafting}

    def _drafter(self, job: str, asked: Drafting, stack: contextlib.ExitStack) -> DrafterFactory:
        speculation, server = self._speculation, None
        assert speculation is not None, "an engine is there"
        if MODEL in asked.methods and MODEL not in self._drafters.here:
            raise WireError("expected a draft model in Hello that drafts for copies here")
        speculation.methods_of_copies = asked.methods
        if self._exchange is not None and "group" in speculation.config.sources:
            shared = SharedDrafts(job, asked.group_size, self._exchange, self.remarks.append)
            server = stack.enter_context(shared)
        index = None
        if speculation.config.history_source is not None:
            rule, vocab_size = history_rule(speculation.config), self.engine.model.vocab_size
            index = history_index(asked, rule, vocab_size, self._ask_at, self.remarks.append)
        return speculation.drafter_factory(
            *(asked.keys, asked.prompts, asked.last),
            first_group=asked.first_group,
            group_size=asked.group_size,
            server=server,
            index=index,
        )

    def _of(self, number: int) -> WorkerRun:
        run = self._run
        if run is None or run.number != number:
            raise WireError(f"expected run {run.number if run else None}, got {number}")
        return run

    def _give(self, given: messages.Give) -> Done:
        run, engine = self._of(given.run), self.engine
        for start in given.starts:
            engine.check([start.request], run.job.sampling)
            check_kv(engine, start)
        run.give(given)
        return Done()

    def _poll(self, asked: messages.Poll) -> messages.Report:
        return self._of(asked.run).report(min(max(asked.wait_s, 0.0), MOST_WAIT_S))

    def _abort(self, asked: messages.Abort) -> Done:
        run = self._of(asked.run)
        if not run.abort(LEAVING_S):
            raise RuntimeError(f"run {run.number} does not end: {run.where()}")
        return Done()

    def _take_drafter(self, told: messages.DrafterWeights) -> Done:
        self._drafters.take(told)
        return Done()

    def _gradient(self, asked: messages.Gradient) -> messages.Gradients:
        return self._drafters.gradients(asked, self.engine, self._params(asked.policy))

    def _pong(self, _: messages.Ping) -> messages.Pong:
        remarks = tuple(self.remarks)
        del self.remarks[: len(remarks)]  # the list is that which others add to
        return messages.Pong(self._clock(), remarks)


def _decisions(
    by_slots: Mapping[int, Sequence[tuple[int, int]]], num_slots: int
) -> list[DraftDecision]:
    return [
        DraftDecision(nodes, num_rounds=MANY_ROUNDS, tree_tokens=tokens)
        for nodes, tokens in by_slots.get(num_slots, ())
    ]


def _expected(engine: Engine) -> Any:
    """The shapes of the policy's arrays, and where they lie on these devices."""
    specs = transformer.param_specs(engine.model)
    if engine.mesh is None:
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, engine.dtype), specs)
    shardings = param_shardings(engine.mesh, specs)
    return jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, engine.dtype, sharding=where),
        *(specs, shardings),
    )

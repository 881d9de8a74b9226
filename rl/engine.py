"""One worker's rounds: admit → draft → verify → commit → retire.

The host's table is the truth about every slot; the device holds the cache and a
copy of the table, made anew when the host has changed it. Shapes come from a pool
of buckets (slots, positions, nodes: powers of two), each compiled once. There is
one fetch per device call, and one device call is several rounds where no draft is
wanted. The engine owns no weights: every phase is handed its own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import kv_cache, transformer
from models.config import ModelConfig
from models.sharding import fitting_sharding
from rl import admission, cache_steps
from rl.slot_table import EngineStats, Row
from rl.trajectory import Request, Trajectory, check_requests
from spec.sampling import Draw, SamplingConfig
from spec.tree import NO_DRAFT, Draft, Drafter, DraftTree, pack
from spec.verify import Emitted, Slots, decode_rounds, verify_round

OnFinish = Callable[[Trajectory], None]
OnRound = Callable[[int, int], None]  # (responses finished, tokens emitted) so far


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How a rollout worker uses its devices; none of it changes a token.

    `slots` requests run at once; buckets of slots are `min_slots` · 2^i, of cache
    positions `min_positions` · 2^i, of prompt tokens `min_prompt_tokens` · 2^i.
    `rounds_per_fetch` rounds run on the device between two fetches where no draft
    is wanted. Prompts are computed `prefill_rows` at a time, at most
    `prefill_chunk_tokens` tokens a pass. A draft tree has at most `max_nodes`
    nodes, its root included.
    """

    slots: int = 64
    min_slots: int = 4
    min_positions: int = 64
    min_prompt_tokens: int = 32
    rounds_per_fetch: int = 8
    max_nodes: int = 32
    prefill_rows: int = 4
    prefill_chunk_tokens: int = 512

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"{field.name} must be at least 1, got {getattr(self, field.name)}"
                )
        if self.prefill_chunk_tokens < self.min_prompt_tokens:
            raise ValueError(
                f"prefill_chunk_tokens={self.prefill_chunk_tokens} must be at least "
                f"min_prompt_tokens={self.min_prompt_tokens}"
            )


@dataclasses.dataclass(frozen=True)
class Phase:
    """What stays the same over one call of `run`."""

    sampling: SamplingConfig
    key: jax.Array
    stop_ids: frozenset[int]
    stop_E: jax.Array
    policy_version: int


def bucket(size: int, smallest: int, largest: int | None = None) -> int:
    """The least of smallest · 2^i that holds `size`, at most `largest`."""
    value = smallest
    while value < size:
        value *= 2
    return value if largest is None else min(value, largest)


class Engine:
    """A replica of the policy on its devices: `run` takes requests to trajectories."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig | None = None,
        *,
        dtype: Any = jnp.float32,
        mesh: Mesh | None = None,
    ) -> None:
        self.model, self.config, self.mesh = model, config or EngineConfig(), mesh
        self.dtype = np.dtype(dtype)
        self.stats = EngineStats()
        self._rows: list[Row] = []
        self._cache: kv_cache.KVCache | None = None
        self._slots: Slots | None = None  # None: the host has changed the table

    # -- the phase ---------------------------------------------------------

    def run(
        self,
        params: transformer.Params,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        *,
        stop_token_ids: Sequence[int],
        policy_version: int = 0,
        drafter: Drafter | None = None,
        on_finish: OnFinish | None = None,
        on_round: OnRound | None = None,
    ) -> list[Trajectory]:
        """Generate every request to its end; trajectories in the order of the requests.

        `on_round` is called after every fetch; what it raises ends the phase, and the
        engine stays usable.

        Raises ValueError, before any device work, for requests that cannot run:
        empty or too long prompts, tokens outside the vocabulary, repeated ids.
        """
        check_requests(self.model, requests, sampling.max_new_tokens)
        self.stats = EngineStats()
        queue = collections.deque(requests)
        done: dict[int, Trajectory] = {}
        stop_E = self.put(np.asarray(sorted(stop_token_ids) or [-1], np.int32))
        self._phase = Phase(sampling, key, frozenset(stop_token_ids), stop_E, policy_version)
        with self.mesh_context():
            try:
                # rows of an earlier policy hold nothing that is of use
                self.allocate(self.slot_bucket(len(queue)), self.config.min_positions)
                while queue or self._busy():
                    self._round(params, queue, drafter)
                    for trajectory in self._retire_ended(drafter):
                        done[trajectory.request_id] = trajectory
                        if on_finish is not None:
                            on_finish(trajectory)
                    if on_round is not None:
                        on_round(len(done), self.stats.tokens)
            except BaseException:
                self._cache = None  # a step that failed may have consumed it
                raise
        return [done[r.request_id] for r in requests]

    # -- the beats ---------------------------------------------------------

    def _round(
        self,
        params: transformer.Params,
        queue: collections.deque[Request],
        drafter: Drafter | None,
    ) -> None:
        self._fit(queue)
        self._admit(params, queue)
        drafts = self._draft(drafter)
        if any(len(d.tokens) for d in drafts):
            self._verify(params, drafts)
        else:
            self._decode(params, len(queue), one_round=drafter is not None)

    def _admit(self, params: transformer.Params, queue: collections.deque[Request]) -> None:
        free = [i for i, row in enumerate(self._rows) if row.request is None]
        entering = [queue.popleft() for _ in range(min(len(free), len(queue)))]
        if not entering:
            return
        prompts = [r.prompt_ids for r in entering]
        longest = max(len(p) for p in prompts)
        self._grow(longest + self.config.max_nodes)
        held = [row.prompt for row in self._rows]
        plan = admission.plan(prompts, free, held, frozenset(r.prompt_ids for r in queue))
        self._fill_rows(params, plan)
        for request, index in zip(entering, plan.rows, strict=True):
            self._rows[index] = Row(
                request=request,
                prompt=request.prompt_ids,
                last_token=request.prompt_ids[-1],
                length=len(request.prompt_ids) - 1,
                limit=request.max_new_tokens or self._phase.sampling.max_new_tokens,
            )
        self._slots = None

    def _fill_rows(self, params: transformer.Params, plan: admission.Plan) -> None:
        """Put the prompts' keys and values where the plan wants them."""
        assert self._cache is not None
        if plan.copies:
            source, target = self._pairs(plan.copies)
            self._cache = cache_steps.copy_rows(self._cache, source, target, len(plan.copies))
        P = self.config.prefill_rows
        for first in range(0, len(plan.prefill), P):
            batch = plan.prefill[first : first + P]
            inserts = [(i - first, row) for i, row in plan.inserts if first <= i < first + P]
            longest = max(len(p) for p in batch) - 1
            self.stats.prefilled_tokens += sum(len(p) - 1 for p in batch)
            if not longest:
                continue
            T = bucket(longest, self.config.min_prompt_tokens, self._cache.num_positions)
            tokens_PT = np.zeros((P, T), np.int32)
            for i, prompt in enumerate(batch):
                tokens_PT[i, : len(prompt) - 1] = prompt[:-1]
            new = cache_steps.prefill(
                params,
                self.put(tokens_PT),
                **self.prefill_options(),
            )
            source, target = self._pairs(inserts)
            self._cache = cache_steps.insert_rows(self._cache, new, source, target, len(inserts))

    def _draft(self, drafter: Drafter | None) -> list[Draft]:
        """One draft a slot; slots at rest get none."""
        drafts = [NO_DRAFT] * len(self._rows)
        live = [i for i, row in enumerate(self._rows) if row.request]
        if drafter is None or not live:
            return drafts
        views = [self._rows[i].view() for i in live]
        proposals = drafter.propose(views, self.config.max_nodes - 1)
        if len(proposals) != len(live):
            raise ValueError(
                f"{type(drafter).__name__}.propose gave {len(proposals)} drafts for "
                f"{len(live)} requests: expected one each (spec.tree.NO_DRAFT for none)"
            )
        for i, draft in zip(live, proposals, strict=True):
            drafts[i] = draft
        return drafts

    def _verify(self, params: transformer.Params, drafts: list[Draft]) -> None:
        widest = max(len(d.tokens) for d in drafts) + 1
        N = bucket(widest, 2, self.config.max_nodes)
        self._grow(max(row.length for row in self._rows if row.request) + N)
        tokens_BN, parents_BN = pack(drafts, N)
        assert self._cache is not None
        tree = DraftTree(self.put(tokens_BN), self.put(parents_BN))
        self._cache, self._slots, emitted = verify_round(
            params,
            self._cache,
            self._device_slots(),
            tree,
            self._phase.stop_E,
            config=self.model,
            scheme=self._phase.sampling.draw,
        )
        self.stats.rounds[(len(self._rows), N, self._cache.num_positions)] += 1
        self.stats.drafted_nodes += sum(min(len(d.tokens), N - 1) for d in drafts)
        self._commit(emitted, [bool(len(d.tokens)) for d in drafts])

    def _decode(self, params: transformer.Params, waiting: int, one_round: bool) -> None:
        busy = self._busy()
        left = max(row.limit - len(row.tokens) for row in self._rows if row.request)
        rounds = 1 if one_round else min(self.config.rounds_per_fetch, left)
        # a slot that ends on the way writes no further
        ends = [
            row.length + min(rounds, row.limit - len(row.tokens))
            for row in self._rows
            if row.request
        ]
        self._grow(max(ends))
        # come back to the host when slots can be refilled, or the batch can shrink
        stop_after = max(1, busy // 16) if waiting else max(1, busy - len(self._rows) // 2)
        assert self._cache is not None
        self._cache, self._slots, emitted = decode_rounds(
            params,
            self._cache,
            self._device_slots(),
            self._phase.stop_E,
            np.int32(rounds),
            np.int32(stop_after),
            **self.decode_options(self._phase.sampling.draw),
        )
        ran = self._commit(emitted, [False] * len(self._rows))
        self.stats.rounds[(len(self._rows), 1, self._cache.num_positions)] += ran

    def _commit(self, emitted: Emitted, drafted: list[bool]) -> int:
        """The call's one fetch: append each slot's tokens; returns the most that a slot got."""
        tokens_BN, logprobs_BN, count_B = jax.device_get(
            (emitted.tokens_BN, emitted.logprobs_BN, emitted.count_B)
        )
        self.stats.fetches += 1
        self.stats.tokens += int(count_B.sum())
        for b, count in enumerate(count_B.tolist()):
            if count:
                tokens, logprobs = tokens_BN[b, :count].tolist(), logprobs_BN[b, :count].tolist()
                self._rows[b].commit(tokens, logprobs, drafted[b])
                self.stats.accepted_tokens += (count - 1) * drafted[b]
        return int(count_B.max())

    def _retire_ended(self, drafter: Drafter | None) -> list[Trajectory]:
        """Trajectories of the requests that the last round ended; their rows are free."""
        ended = []
        for row in self._rows:
            reason = row.finish_reason(self._phase.stop_ids) if row.request else None
            if reason is not None:
                if drafter is not None:
                    drafter.finished(row.view())
                ended.append(row.retire(reason, self._phase.policy_version))
        return ended

    # -- buckets -----------------------------------------------------------

    def allocate(self, num_slots: int, num_positions: int) -> None:
        """An empty table, over a cache of this size; the present one is kept where it fits."""
        held = self._cache
        if held is None or (held.num_slots, held.num_positions) != (num_slots, num_positions):
            self._cache = held = None  # free it before there is another
            self._cache = self.empty_cache(num_slots, num_positions)
        self._rows = [Row() for _ in range(num_slots)]
        self._slots = None

    def empty_cache(self, num_slots: int, num_positions: int) -> kv_cache.KVCache:
        cache = kv_cache.init(self.model, num_slots, num_positions, self.dtype)
        if self.mesh is None:
            return cache
        mesh = self.mesh
        return jax.tree.map(
            lambda x: jax.device_put(x, fitting_sharding(mesh, x.shape, kv_cache.AXES)), cache
        )

    def slot_bucket(self, size: int) -> int:
        return bucket(size, self.config.min_slots, max(self.config.slots, self.config.min_slots))

    def _fit(self, queue: Collection[Request]) -> None:
        """Halve the batch while what is left fits into half of it."""
        assert self._cache is not None
        while self.slot_bucket(self._busy() + len(queue)) < len(self._rows):
            wanted = {r.prompt_ids for r in queue}
            half = self.slot_bucket(-(-len(self._rows) // 2))
            # the busy rows stay, then those whose prompt a waiting request can use
            rank = [(r.request is None, r.prompt not in wanted) for r in self._rows]
            order = sorted(range(len(self._rows)), key=rank.__getitem__)[:half]
            self._cache = cache_steps.resize(
                self._cache, np.asarray(order, np.int32), self._cache.num_positions
            )
            self._rows = [self._rows[i] for i in order]
            self._slots = None

    def _grow(self, num_positions: int) -> None:
        """Double the cache's positions until `num_positions` fit."""
        assert self._cache is not None
        while self._cache.num_positions < num_positions:
            rows = np.arange(len(self._rows), dtype=np.int32)
            self._cache = cache_steps.resize(self._cache, rows, 2 * self._cache.num_positions)

    def _busy(self) -> int:
        return sum(row.request is not None for row in self._rows)

    def prefill_options(self) -> dict[str, Any]:
        """The static arguments of `cache_steps.prefill`."""
        chunk_tokens = self.config.prefill_chunk_tokens
        return {"config": self.model, "chunk_tokens": chunk_tokens, "dtype": self.dtype}

    def decode_options(self, scheme: Draw) -> dict[str, Any]:
        """The static arguments of `decode_rounds`."""
        max_rounds = self.config.rounds_per_fetch
        return {"config": self.model, "scheme": scheme, "max_rounds": max_rounds}

    # -- to the device -----------------------------------------------------

    def _device_slots(self) -> Slots:
        if self._slots is None:
            ints_BC = np.asarray([self._columns(row) for row in self._rows], np.int32)
            floats = [self._phase.sampling.temperature, self._phase.sampling.top_p]
            floats_B2 = np.tile(np.asarray(floats, np.float32), (len(self._rows), 1))
            self._slots = cache_steps.make_slots(
                self.put(ints_BC), self.put(floats_B2), self.put(self._phase.key)
            )
        return self._slots

    def _columns(self, row: Row) -> tuple[int, ...]:
        """One row of the table, in the order of `cache_steps.COLUMNS`."""
        request_id = row.request.request_id if row.request else 0
        active = int(row.request is not None)
        return (
            row.last_token,
            row.length,
            len(row.tokens),
            row.limit,
            active,
            request_id,
            self._phase.sampling.top_k,
        )

    def _pairs(self, pairs: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Sources and targets, padded to one entry a slot."""
        table = np.zeros((2, len(self._rows)), np.int32)
        table[:, : len(pairs)] = np.asarray(pairs, np.int32).T
        return table[0], table[1]

    def put(self, x: Any) -> jax.Array:
        if self.mesh is None:
            return jax.device_put(x)
        return jax.device_put(x, NamedSharding(self.mesh, PartitionSpec()))

    def mesh_context(self) -> Any:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

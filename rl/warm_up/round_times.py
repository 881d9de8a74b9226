"""The seconds of a round by bucket, measured once per device and shape, kept in the run folder.

What `goodput` and `aimd` budgets decide by. The file makes their decisions repeat in
a resumed run; delete it to measure anew.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models import transformer
from models.kv_cache import KVCache
from rl.engine import cache_ops
from rl.engine.engine import Engine
from rl.engine.rollout_spec import DrafterContext, RolloutSpec
from rl.engine.slot_table import SlotTable
from rl.speculation.device_drafters import NO_DRAFTERS, DeviceDrafters
from rl.speculation.draft_model import DraftModel
from rl.speculation.learned_drafter import LearnedDrafter
from rl.trajectory import PartialRequest, Request
from rl.warm_up import compile_buckets
from rl.warm_up.measured_run import read_rounds, write_rounds
from spec.budget.device_gate import DeviceDrafter
from spec.budget.union import DrafterUnion
from spec.config import SamplingConfig
from spec.drafter import LiveSlots, plant
from spec.retrieval.group import GroupDrafter
from spec.retrieval.ngram import NgramDrafter
from spec.round_times import RoundTimes
from spec.sampling import step_key
from spec.tree import DraftTree
from spec.verify import decode_rounds, unpack, verify_round

REPEATS = 7
LEAST_SECONDS = 1e-9


def load_or_measure(
    path: Path,
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    *,
    max_requests: int,
    max_prompt_tokens: int,
    drafters: DeviceDrafters = NO_DRAFTERS,
    nodes: compile_buckets.NodeSizes | None = None,
) -> RoundTimes:
    """The table in `path` where it was made for this device and these shapes, else a new one.

    Call it after the warm-up: what is not compiled would be timed with its compilation.
    Raises ValueError for a file that is damaged.
    """
    sizes = max_requests, max_prompt_tokens
    buckets = list(compile_buckets.round_buckets(engine, sampling, *sizes, nodes))
    made_for = _made_for(engine, buckets, drafters)
    kept = read_rounds(path, made_for)
    if kept is not None:
        return kept
    times = measure(engine, params, sampling, buckets, drafters=drafters)
    write_rounds(path, times, made_for)
    return times


def measure(
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    buckets: list[tuple[int, int, int]],
    *,
    drafters: DeviceDrafters = NO_DRAFTERS,
) -> RoundTimes:
    """Median seconds of a round of each (slots, nodes, positions), its fetch included.

    All slots are busy and half of the positions live. A plain round is timed as the
    engine runs it, several to a fetch; a round of trees with its drafting (siblings and
    own text) and committing. Tree sizes take turns: what slows the machine for a while
    slows all that a budget will compare. The draft tokens of `drafters` are timed too: one deep,
    and as deep as they get.
    """
    nodes_of: dict[tuple[int, int], list[int]] = {}
    for B, N, S in buckets:
        nodes_of.setdefault((B, S), []).append(N)
    seconds: dict[tuple[int, int, int], float] = {}
    draft_seconds: dict[str, dict[tuple[int, int, int], float]] = {}
    with engine.mesh_context():
        for (B, S), sizes in nodes_of.items():
            cache, host = engine.empty_cache(B, S), _Host(engine, B, S)
            tries: dict[int, list[float]] = {N: [] for N in sizes}
            for N in sizes * (REPEATS + 1):
                slots = _busy_slots(engine, sampling, B, S)
                jax.block_until_ready((cache, slots))
                began_s = engine.clock()
                if N > 1:
                    tree = host.draft(N)
                    cache, packed = _tree_round(engine, params, sampling, cache, slots, tree)
                    host.commit(packed)
                    rounds = 1
                else:
                    cache, rounds = _plain_rounds(engine, params, sampling, cache, slots)
                tries[N].append((engine.clock() - began_s) / rounds)
            seconds |= {(B, N, S): _median(tries[N][1:]) for N in sizes}
            for name, drafter in drafters.by_name.items():
                found = _draft_seconds(engine, params, sampling, drafter, cache, host)
                draft_seconds.setdefault(name, {}).update(found)
    return RoundTimes(seconds, draft_seconds)


def _draft_seconds(
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    made_by: LearnedDrafter | DraftModel,
    cache: KVCache,
    host: _Host,
) -> dict[tuple[int, int, int], float]:
    """Of its draft tokens for all rows of a cache, by (slots, depth, positions)."""
    spec = RolloutSpec(params, sampling, step_key(0, 0))
    context = DrafterContext(engine, spec, lambda: cache.features[0])
    drafter: DeviceDrafter = made_by.drafter_for(context)
    live, deepest, most = host.live(), drafter.depth, engine.config.max_nodes - 1
    tries: dict[int, list[float]] = {depth: [] for depth in sorted({1, deepest})}
    for depth in list(tries) * (REPEATS + 1):
        drafter.depth = depth
        began_s = engine.clock()
        drafter.propose(live, np.full(len(live), most, np.int32), most)
        tries[depth].append(engine.clock() - began_s)
    B, S = cache.num_slots, cache.num_positions
    return {(B, depth, S): _median(t[1:]) for depth, t in tries.items()}


def _median(seconds: list[float]) -> float:
    """Positive, whatever the clock did meanwhile."""
    return max(float(statistics.median(seconds)), LEAST_SECONDS)


class _Host:
    """What the host does beside a round of trees, for B requests with random texts."""

    def __init__(self, engine: Engine, num_slots: int, num_positions: int) -> None:
        B, S = num_slots, num_positions
        self._engine, self._drafter = engine, DrafterUnion((GroupDrafter(), NgramDrafter()))
        self._table = SlotTable(B, S + engine.config.max_nodes)
        for b in range(B):
            request = Request(b, (0,) * (S // 4), b // 8, b % 8, S)
            self._table.enter(b, PartialRequest(request), S)
        rng = np.random.default_rng(0)
        letters = min(16, engine.model.vocab_size)  # few, so that there is something to draft from
        self._table.tokens_BL[:] = rng.integers(0, letters, self._table.tokens_BL.shape)

    def draft(self, num_nodes: int) -> DraftTree:
        """Trees of `num_nodes` whose last node is never right, whatever was drafted."""
        live, most = self._table.live(), self._engine.config.max_nodes - 1
        drafts = self._drafter.propose(live, np.full(len(live), most, np.int32), most)
        tokens_BN, parents_BN = plant(drafts, live.rows_A, len(self._table), num_nodes)
        return DraftTree(self._engine.argument(tokens_BN), self._engine.argument(parents_BN))

    def live(self) -> LiveSlots:
        return self._table.live()

    def commit(self, packed: jax.Array) -> None:
        tokens_BN, logprobs_BN, count_B = unpack(packed)
        full = self._table.total_tokens_B.max() >= self._table.tokens_BL.shape[1] - 1
        one_B = np.zeros_like(count_B) if full else np.ones_like(count_B)
        self._table.commit(tokens_BN, logprobs_BN, one_B, count_B > 1)


def _busy_slots(engine: Engine, sampling: SamplingConfig, B: int, S: int) -> Any:
    ints_BC = np.zeros((B, len(cache_ops.COLUMNS)), np.int32)
    column = {name: i for i, name in enumerate(cache_ops.COLUMNS)}
    ints_BC[:, column["length"]] = S // 2
    ints_BC[:, column["limit"]] = 2**30
    ints_BC[:, column["active"]] = 1
    ints_BC[:, column["request_id"]] = np.arange(B)
    ints_BC[:, column["top_k"]] = sampling.top_k
    return cache_ops.make_slots(*engine.slot_arguments(ints_BC, sampling, step_key(0, 0)))


def _no_stop(engine: Engine) -> jax.Array:
    return engine.put(np.full(max(1, len(engine.model.eos_token_ids)), -1, np.int32))


def _tree_round(
    engine: Engine, params: Any, sampling: SamplingConfig, cache: Any, slots: Any, tree: DraftTree
) -> tuple[Any, jax.Array]:
    cache, _, packed = verify_round(
        params, cache, slots, tree, _no_stop(engine), **engine.verify_options(sampling.draw)
    )
    return cache, packed


def _plain_rounds(
    engine: Engine, params: Any, sampling: SamplingConfig, cache: Any, slots: Any
) -> tuple[Any, int]:
    rounds = engine.config.rounds_per_fetch
    cache, _, packed = decode_rounds(
        params,
        cache,
        slots,
        _no_stop(engine),
        np.int32(rounds),
        np.int32(slots.active.shape[0]),
        **engine.decode_options(sampling.draw),
    )
    unpack(packed)
    return cache, rounds


def _made_for(
    engine: Engine,
    buckets: list[tuple[int, int, int]],
    drafters: DeviceDrafters,
) -> dict[str, Any]:
    """What a table holds for: another device, policy shape or bucket list needs another."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "devices": jax.device_count(),
        "model": repr(engine.model),
        "dtype": str(engine.dtype),
        "rounds_per_fetch": engine.config.rounds_per_fetch,
        "drafters": {name: d.made_for for name, d in drafters.by_name.items()},
        "buckets": [list(bucket) for bucket in buckets],
    }

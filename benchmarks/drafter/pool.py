"""Memory of compiled programs for several ways of drafting: apart and shared, or fused.

Ours is what an engine compiles: rounds over trees by (slots, nodes, positions), searches by
(slots, positions, top_k). A search takes its depth as an argument, so that strategies share it;
and a bucket of slots needs only what BEG-MAB may choose for its batch sizes. The other way is that
of one captured graph a strategy and batch size: search and round in one program, whose depth,
width and nodes are constants.

Counted is what a program has for itself: generated code (where a backend does not say how much,
the serialized executable) and temporary buffers. The latter jax allocates for each call; captured
graphs keep theirs. Arguments and results are the engine's in both ways.
Source: TLT, section 5.1, Figure 10, Table 5.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads import BASE_POLICY, policy
from models import kv_cache, transformer
from models.config import ModelConfig
from models.kv_cache import KVCache, Pending
from rl.engine import cache_ops
from rl.engine.config import EngineConfig
from rl.engine.ending import padded_ids
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from rl.speculation.learned_drafter import LearnedDrafter
from spec import drawn, verify
from spec.budget.bandit import BegMab, Strategy
from spec.budget.config import BanditConfig
from spec.config import SamplingConfig
from spec.draft_cache import drafting
from spec.draft_cache.tables import END_COLUMNS, unpack_ends
from spec.drafter import no_drafts
from spec.eagle import model as eagle
from spec.eagle.config import EagleConfig, TreeConfig
from spec.eagle.drafting import TreeDrafting
from spec.eagle.model import DeviceWeights, EagleParams, EagleWeights
from spec.eagle.tree_search import Search
from spec.nodes import of_trees, pack
from spec.sampling import step_key
from spec.verify import Slots

# Four as in Table 5, of one width, which the paper fixes as well (section 6.3).
STRATEGIES = tuple(
    Strategy(f"depth{depth}_verify{tokens}", ("learned",), depth, 4, tokens)
    for tokens in (31, 15)
    for depth in (3, 6)
)
RANGES = BanditConfig(thresholds=(1, 17))  # more than 16 requests verify fewer tokens
SLOTS = (8, 16, 32)

# (`round`, slots, nodes), (`search`, slots, top_k), (`fused`, slots, which strategy)
Key = tuple[str, int, int]


@partial(
    jax.jit,
    static_argnames=("config", "search", "num_draft_tokens"),
    donate_argnames=("cache", "pending", "slots", "searched"),
)
def fused_round(
    params: transformer.Params,
    cache: KVCache,
    pending: Pending,
    slots: Slots,
    stop_E: jax.Array,
    weights: DeviceWeights,
    searched: KVCache,
    table_BX: jax.Array,
    *,
    config: ModelConfig,
    search: Search,
    num_draft_tokens: int,
) -> tuple[KVCache, Pending, Slots, KVCache, jax.Array]:
    """Search trees, then run `verify.verify_round`, as one program of one strategy."""
    M, depth, trees = num_draft_tokens, jnp.int32(search.max_depth), TreeDrafting(search)
    ends = dataclasses.replace(unpack_ends(table_BX), total_B=slots.length + 1)
    no_noise = jax.random.key(0)  # of the likeliest tokens none is drawn
    constants = weights, no_noise
    state = trees.begin((constants, cache.features), searched, ends)
    searched, found = trees.draft(constants, state, ends, depth, M)
    root_B1 = jnp.zeros((len(found.tokens_RX), 1), jnp.int32)
    tokens_BN = jnp.concatenate([root_B1, found.tokens_RX], axis=1)
    parents_BN = jnp.concatenate([root_B1 - 1, found.parents_RX + 1], axis=1)
    whole_B = jnp.full_like(root_B1[:, 0], M + 1)
    nodes, _ = of_trees(tokens_BN, parents_BN, whole_B, tokens_BN.size)
    cache, pending, slots, out = verify.verify(
        config, params, cache, pending, slots, nodes, stop_E, search.scheme, M + 1
    )
    return cache, pending, slots, searched, drawn.pack(out)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Memory that one or more programs have for themselves."""

    programs: int = 0
    code_bytes: int = 0
    temp_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.code_bytes + self.temp_bytes

    def __add__(self, other: Footprint) -> Footprint:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Footprint(*(a + b for a, b in pairs))


def footprint(compiled: Any) -> Footprint:
    found = compiled.memory_analysis()
    code_bytes = found.generated_code_size_in_bytes
    code_bytes = code_bytes or len(compiled.runtime_executable().serialize())
    return Footprint(1, code_bytes, found.temp_size_in_bytes)


def pool_memory(
    model: ModelConfig | None = None,
    params: transformer.Params | None = None,
    *,
    strategies: Sequence[Strategy] = STRATEGIES,
    ranges: BanditConfig = RANGES,
    slots: Sequence[int] = SLOTS,
    num_positions: int = 256,
) -> dict[str, Any]:
    """Bytes of fused programs of every strategy and bucket over ours: `pool_memory_ratio`.

    What of it comes of sharing alone: `…_in_ranges`, both ways with what the ranges let be chosen,
    and `…_every_bucket`, both with all strategies in all buckets, as `rl.warm_up.compile_buckets`
    compiles them without a bandit. `pool_memory_over_one_strategy` is ours over the first strategy
    alone, fused. By default of the shipped policy, with a drafter of its proportions.
    """
    if model is None or params is None:
        model, params = policy(BASE_POLICY)
    pools = needed(strategies, ranges, slots)
    keys = sorted({key for pool in pools.values() for key in pool})
    programs = Programs(model, params, tuple(strategies), num_positions)
    lowered = [programs.lower(key) for key in keys]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda low: footprint(low.compile()), lowered)
        bytes_of = dict(zip(keys, compiled, strict=True))
    sums = {name: sum((bytes_of[key] for key in pool), Footprint()) for name, pool in pools.items()}

    def ratio(over: str, under: str, what: str = "total_bytes") -> float:
        return round(getattr(sums[over], what) / getattr(sums[under], what), 3)

    return {
        "pool_memory_ratio": ratio("fused", "shared"),
        "pool_memory_ratio_in_ranges": ratio("fused_in_ranges", "shared"),
        "pool_memory_ratio_every_bucket": ratio("fused", "shared_every_bucket"),
        "pool_memory_over_one_strategy": ratio("shared", "one_strategy"),
        "pool_code_ratio": ratio("fused", "shared", "code_bytes"),
        "pool_temp_ratio": ratio("fused", "shared", "temp_bytes"),
        "pools": {
            name: dataclasses.asdict(f) | {"total_bytes": f.total_bytes} for name, f in sums.items()
        },
        "pool_strategies": [dataclasses.asdict(s) for s in strategies],
        "pool_thresholds": list(ranges.thresholds),
        "pool_slots": list(slots),
        "pool_positions": num_positions,
    }


def needed(
    strategies: Sequence[Strategy], ranges: BanditConfig, slots: Sequence[int]
) -> dict[str, set[Key]]:
    """The programs of each way, by name."""
    speculator = [s for s in strategies if s.verify_tokens]
    served = candidates(strategies, ranges, slots)

    def apart(B: int, chosen: Sequence[Strategy]) -> set[Key]:
        rounds = {("round", B, s.verify_tokens + 1) for s in chosen if s.verify_tokens}
        return rounds | {("search", B, s.top_k) for s in chosen if s.verify_tokens}

    return {
        "one_strategy": {("fused", B, strategies.index(speculator[0])) for B in slots},
        "fused": {("fused", B, strategies.index(s)) for B in slots for s in speculator},
        "fused_in_ranges": {
            ("fused", B, strategies.index(s)) for B in slots for s in served[B] if s.verify_tokens
        },
        "shared": set().union(*(apart(B, served[B]) for B in slots)),
        "shared_every_bucket": set().union(*(apart(B, speculator) for B in slots)),
    }


def candidates(
    strategies: Sequence[Strategy], ranges: BanditConfig, slots: Sequence[int]
) -> dict[int, list[Strategy]]:
    """Return the strategies that may be chosen for the batch sizes of each bucket of slots."""
    tuner = BegMab(strategies, ranges, 0)
    found = {}
    for least, B in zip((0, *sorted(slots)), sorted(slots), strict=False):
        sizes = range(least + 1, B + 1)
        found[B] = list(dict.fromkeys(s for size in sizes for s in tuner.candidates(size)))
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Makes the programs of one policy, a drafter of its proportions, and strategies."""

    model: ModelConfig
    params: transformer.Params
    strategies: tuple[Strategy, ...]
    num_positions: int
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)

    def lower(self, key: Key) -> Any:
        """Lower one program, without compiling it."""
        kind, B, x = key
        make = {"round": self._round, "search": self._search, "fused": self._fused}
        return make[kind](self._engine(B), B, x)

    @property
    def shape(self) -> EagleConfig:
        return eagle.config_for(self.model)

    def weights(self) -> EagleParams:
        return eagle.init(self.shape, jax.random.key(0), self.params.final_norm_D.dtype)

    def _engine(self, B: int) -> Engine:
        """Make an engine with room for the largest trees of all strategies."""
        most_nodes = max(s.verify_tokens for s in self.strategies) + 1
        config = EngineConfig(
            slots=B,
            min_slots=B,
            min_positions=self.num_positions,
            max_nodes=most_nodes,
            max_round_nodes=B * most_nodes,
        )
        dtype = self.params.final_norm_D.dtype
        return Engine(self.model, config, dtype=dtype, feature_layers=())

    def _rows(self, engine: Engine, B: int) -> tuple[Any, ...]:
        """Weights, cache, what waits, slots and end tokens of a round."""
        ints_BC = np.zeros((B, len(cache_ops.COLUMNS)), np.int32)
        processing_B2 = np.ones((B, 2), np.float32)
        key = engine.put(step_key(0, 0))
        slots = cache_ops.make_slots(*engine.slot_arguments(ints_BC, processing_B2, key))
        stop_E = padded_ids(self.model.eos_token_ids)
        state = engine.empty_cache(B, self.num_positions), engine.empty_pending(B), slots
        return self.params, *state, stop_E

    def _round(self, engine: Engine, B: int, num_nodes: int) -> Any:
        params, *state, stop_E = self._rows(engine, B)
        nothing = no_drafts(0, 1)
        nodes_5M = pack(nothing, nothing.count_A, np.zeros(0, np.int32), B, B * num_nodes, 1)
        options = engine.verify_options(self.sampling.scheme, B, B * num_nodes)
        return verify.verify_round.lower(params, *state, nodes_5M, stop_E, None, **options)

    def _search(self, engine: Engine, B: int, top_k: int) -> Any:
        """Lower the search that warm-up compiles, as deep as any strategy of that width goes."""
        depth = max(s.depth for s in self.strategies if s.top_k == top_k)
        learned = LearnedDrafter(EagleWeights(self.shape, self.weights()), TreeConfig(depth, top_k))
        spec = RolloutSpec(self.params, self.sampling, step_key(0, 0))
        drafter = learned.drafter_for(engine.drafter_context(spec))
        steps = dict(drafter.programs(B, self.num_positions))
        args, options = steps[drafting.draft]()
        return drafting.draft.lower(*args, **options)

    def _fused(self, engine: Engine, B: int, index: int) -> Any:
        args, options = self.fused_arguments(engine, B, self.strategies[index])
        return fused_round.lower(*args, **options)

    def fused_arguments(
        self, engine: Engine, B: int, strategy: Strategy
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `fused_round`, for rows at rest."""
        search = Search(self.shape, strategy.top_k, strategy.depth, self.sampling.scheme)
        searched = kv_cache.init(self.shape.layer, B, self.num_positions, engine.dtype)
        weights = DeviceWeights(self.weights(), eagle.frozen(self.params, None))
        table_BX = np.zeros((B, search.window_tokens + len(END_COLUMNS)), np.int32)
        args = *self._rows(engine, B), weights, searched, table_BX
        options = {"config": self.model, "search": search}
        return args, options | {"num_draft_tokens": strategy.verify_tokens}

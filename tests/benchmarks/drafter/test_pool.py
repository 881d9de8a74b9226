"""Programs of each way to draft: which are needed, equal results, and their memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.drafter import pool
from benchmarks.drafter.pool import Footprint, Programs
from models import kv_cache, transformer
from models.config import ModelConfig
from rl.engine import cache_ops
from spec import drawn, verify
from spec.budget.bandit import Strategy
from spec.budget.config import BanditConfig
from spec.draft_cache import drafting
from spec.draft_cache.tables import END_COLUMNS
from spec.drafter import Drafts
from spec.eagle.drafting import TreeDrafting
from spec.eagle.tree_search import Search
from spec.nodes import pack
from spec.sampling import step_key

MODEL = ModelConfig("qwen3", 20, 16, 1, 2, 1, 8, 16, qk_norm=True, max_positions=64)
S = 32


def strategy(depth, verify_tokens, top_k=2):
    sources = ("learned",) if verify_tokens else ()
    return Strategy(f"{depth}_{top_k}_{verify_tokens}", sources, depth, top_k, verify_tokens)


DEEP, FLAT, SMALL, PLAIN = strategy(3, 7), strategy(1, 7), strategy(2, 3), strategy(0, 0)


@pytest.fixture(scope="module")
def programs():
    params = transformer.init(MODEL, jax.random.key(0))
    return Programs(MODEL, params, (DEEP, FLAT, SMALL), S)


def test_buckets_serve_the_batch_sizes_below_them():
    strategies, ranges = (DEEP, FLAT, SMALL, PLAIN), BanditConfig((1, 5, 17))
    found = pool.candidates(strategies, ranges, (4, 8, 16, 32))
    assert found == {4: [DEEP, FLAT], 8: [SMALL], 16: [SMALL], 32: [PLAIN]}
    # one bucket serves all sizes up to its own
    assert pool.candidates(strategies, ranges, (6,)) == {6: [DEEP, FLAT, SMALL]}


def test_the_programs_of_each_way():
    wide = strategy(3, 7, top_k=4)
    found = pool.needed((DEEP, FLAT, wide, SMALL), BanditConfig((1, 5)), (4, 8))
    assert found["one_strategy"] == {("fused", 4, 0), ("fused", 8, 0)}
    assert found["fused"] == {("fused", B, i) for B in (4, 8) for i in range(4)}
    in_ranges = {("fused", 4, 0), ("fused", 4, 1), ("fused", 4, 2), ("fused", 8, 3)}
    assert found["fused_in_ranges"] == in_ranges
    # DEEP and FLAT share both of theirs, `wide` their rounds
    few = {("round", 4, 8), ("search", 4, 2), ("search", 4, 4), ("round", 8, 4), ("search", 8, 2)}
    assert found["shared"] == few
    assert found["shared_every_bucket"] == {
        *(("round", B, N) for B in (4, 8) for N in (8, 4)),
        *(("search", B, K) for B in (4, 8) for K in (2, 4)),
    }


def test_plain_decoding_needs_none_of_them():
    found = pool.needed((PLAIN, SMALL), BanditConfig((1, 5)), (4, 8))
    assert found["fused"] == {("fused", 4, 1), ("fused", 8, 1)}
    assert found["fused_in_ranges"] == {("fused", 4, 1)}
    assert found["shared"] == {("round", 4, 4), ("search", 4, 2)}


def test_footprints_add_up():
    total = Footprint(1, 10, 100) + Footprint(2, 3, 4)
    assert total == Footprint(3, 13, 104) and total.total_bytes == 117


def test_temporary_buffers_and_code_are_counted():
    def total(x):
        return jnp.sum(jnp.sort(x))  # what is sorted has to lie somewhere

    small, large = (
        pool.footprint(jax.jit(total).lower(np.zeros(n, np.float32)).compile())
        for n in (1000, 9000)
    )
    assert large.temp_bytes - small.temp_bytes == pytest.approx(4 * 8000, abs=256)
    assert small.programs == 1 and small.code_bytes > 100


def busy(programs, B, lengths):
    """Rows in the middle of their responses, with keys, values and states of some past."""
    engine = programs._engine(B)
    ints_BC = np.zeros((B, len(cache_ops.COLUMNS)), np.int32)
    column = {name: ints_BC[:, i] for i, name in enumerate(cache_ops.COLUMNS)}
    column["last_token"][:] = 5 + np.arange(B)
    column["length"][:], column["limit"][:], column["active"][:] = lengths, 16, 1
    column["request_id"][:] = np.arange(B)
    arguments = engine.slot_arguments(
        ints_BC, np.ones((B, 2), np.float32), engine.put(step_key(0, 3))
    )
    rng = np.random.default_rng(0)

    def rows():
        zeros = engine.empty_cache(B, S)
        noise = iter(rng.normal(size=x.shape).astype(np.float32) for x in jax.tree.leaves(zeros))
        return jax.tree.map(lambda _: jnp.asarray(next(noise)), zeros)

    return engine, rows(), lambda: (engine.empty_pending(B), cache_ops.make_slots(*arguments))


@pytest.mark.parametrize("chosen", [DEEP, SMALL], ids=lambda s: s.name)
def test_fused_and_apart_emit_the_same(programs, chosen):
    B = 256  # one in ten draws is drafted, by probability
    lengths = np.random.default_rng(2).integers(1, 14, B).astype(np.int32)
    engine, cache, state = busy(programs, B, lengths)
    args, options = programs.fused_arguments(engine, B, chosen)
    params, _, _, _, stop_E, weights, searched, _ = args
    # one of the policy's own tokens after each entry; its window holds the whole row
    table_BX = np.zeros((B, S + len(END_COLUMNS)), np.int32)
    column = {name: table_BX[:, S + i] for i, name in enumerate(END_COLUMNS)}
    table_BX[:, :S] = np.random.default_rng(1).integers(2, 20, (B, S))
    column["slot"][:], column["total"][:], column["most"][:] = np.arange(B), lengths + 1, 1
    column["temperature"][:] = np.ones(B, np.float32).view(np.int32)
    sharp = dataclasses.replace(weights.frozen, head_UD=20 * weights.frozen.head_UD)
    weights = dataclasses.replace(weights, frozen=sharp)  # no near ties
    copy = jax.tree.map(jnp.copy, cache)
    shared = params, copy, *state(), stop_E, weights, searched, table_BX
    *_, fused = pool.fused_round(*shared, **options)

    # the engine's own: a deeper drafter's cache, depth as an argument, trees by way of the host
    search = TreeDrafting(Search(programs.shape, chosen.top_k, max_depth=3))
    room = kv_cache.init(programs.shape.layer, B, S, engine.dtype)
    given, depth = ((weights, step_key(0, 3)), cache.features), np.int32(chosen.depth)
    _, packed = drafting.draft(given, room, table_BX, depth, drafting=search, most_tokens=7)
    tokens_BM, parents_BM, prob_BM, count_B = drafting.unpack(packed)
    sources_BM = np.zeros(tokens_BM.shape, np.uint8)
    drafts = Drafts(tokens_BM, parents_BM, prob_BM, sources_BM, count_B)
    taken_B = np.minimum(count_B, chosen.verify_tokens)
    N = chosen.verify_tokens + 1
    nodes_5M = pack(drafts, taken_B, np.arange(B), B, B * N, N)
    *_, apart, _ = verify.verify_round(
        params,
        cache,
        *state(),
        nodes_5M,
        stop_E,
        None,
        **engine.verify_options("cdf", B, nodes_5M.shape[1]),
    )
    slots_M = np.repeat(np.arange(B), chosen.verify_tokens + 1)
    tokens_BN, logprobs_BN, count_B, _ = drawn.by_slot(*drawn.unpack(fused), slots_M, B)
    wanted = drawn.by_slot(*drawn.unpack(apart), nodes_5M[1], B)
    assert count_B.tolist() == wanted[2].tolist()
    assert count_B.min() >= 1 and count_B.max() >= 3, "drafts of drafts were accepted"
    valid_BN = np.arange(tokens_BN.shape[1]) < count_B[:, None]
    assert tokens_BN[valid_BN].tolist() == wanted[0][valid_BN].tolist()
    np.testing.assert_allclose(logprobs_BN[valid_BN], wanted[1][valid_BN], rtol=1e-4, atol=1e-5)


def test_a_pool_is_the_sum_of_its_programs(programs):
    found = pool.pool_memory(
        MODEL,
        programs.params,
        strategies=(DEEP, SMALL),
        ranges=BanditConfig((1, 3)),
        slots=(2, 4),
        num_positions=S,
    )
    pools = found["pools"]
    counts = {name: pool["programs"] for name, pool in pools.items()}
    assert counts == {
        "one_strategy": 2,
        "fused": 4,
        "fused_in_ranges": 2,
        "shared": 4,
        "shared_every_bucket": 6,
    }
    assert pools["shared"]["total_bytes"] < pools["shared_every_bucket"]["total_bytes"]
    for name, over, under in (
        ("pool_memory_ratio", "fused", "shared"),
        ("pool_memory_ratio_every_bucket", "fused", "shared_every_bucket"),
        ("pool_memory_ratio_in_ranges", "fused_in_ranges", "shared"),
        ("pool_memory_over_one_strategy", "shared", "one_strategy"),
    ):
        ratio = pools[over]["total_bytes"] / pools[under]["total_bytes"]
        assert found[name] == pytest.approx(ratio, abs=1e-3)
    single = pool.footprint(programs.lower(("round", 8, 8)).compile())
    double = pool.footprint(programs.lower(("round", 16, 8)).compile())
    assert double.temp_bytes > 1.5 * single.temp_bytes
    apart = Footprint()
    for key in (("round", 2, 8), ("search", 2, 2), ("round", 4, 4), ("search", 4, 2)):
        apart += pool.footprint(programs.lower(key).compile())
    assert pools["shared"]["temp_bytes"] == apart.temp_bytes

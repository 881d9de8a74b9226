"""Tokens that another shape of pass draws otherwise: `python -m benchmarks.bf16_flips --json`.

The shipped policy in float32 and in bfloat16, over several seeds. Two measures:

forced    Every position of plain responses is drawn again by passes over N nodes that are
          given the very same tokens, so that each flip counts once.
drafted   The engine generates with drafts that are mostly right, and is compared with plain
          decoding: responses that differ anywhere, and log-probs up to where they do.

Passes over one node, plain decoding's own width, flip tokens in bfloat16 too: prompts are then
read a token at a time, and the cache has another length.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment, workloads
from reprise.models.attention import kv_cache
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.decoder.transformer import Params
from reprise.rl.engine.engine import Engine
from reprise.rl.python.generate import generate
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.rl.slots.config import EngineConfig
from reprise.spec.budget.budget import FixedBudget
from reprise.spec.config import DRAWS, SamplingConfig
from reprise.spec.verification import sampling
from reprise.spec.verification.sampling import step_key

DTYPES = ("float32", "bfloat16")
NODES = (1, 8)
NAMED = ("flips_per_million", "responses_that_differ", "responses", "tokens")
NAMED += ("mean_logprob_difference", "max_logprob_difference")
ACCEPTANCE = 0.9  # of the drafts, a token


@functools.partial(jax.jit, static_argnames=("config", "num_nodes", "scheme"))
def forced(
    config: ModelConfig,
    params: Params,
    tokens_BT: jax.Array,
    prompt_tokens_B: jax.Array,
    keys_B: jax.Array,
    *,
    num_nodes: int,
    scheme: sampling.Draw,
) -> tuple[jax.Array, ...]:
    """Return draws after each given token, and log-prob and support of the next given one, [B, T].

    Passes read `num_nodes` given tokens at a time.
    """
    B, T = tokens_BT.shape
    cache = kv_cache.init(
        config,
        num_slots=B,
        slot_pages=1,
        num_pages=B,
        page_tokens=T,
        dtype=params.final_norm_D.dtype,
        for_cpu=jax.default_backend() == "cpu",
    )
    cache = dataclasses.replace(cache, table_BN=jnp.arange(B, dtype=jnp.int32)[:, None])
    # at temperature 1, nothing cut
    one_BN = jnp.ones((B, num_nodes), jnp.float32)
    off_BN = jnp.zeros((B, num_nodes), jnp.int32)
    next_BT = jnp.roll(tokens_BT, -1, axis=1)

    def step(cache: kv_cache.KVCache, start: jax.Array) -> tuple[kv_cache.KVCache, Any]:
        at_N = start + jnp.arange(num_nodes)
        at_BN = jnp.broadcast_to(at_N, (B, num_nodes))
        start_B = jnp.full(B, start)
        tokens_BN = tokens_BT[:, at_N]
        hidden_BND, cache, _ = transformer.hidden_with_cache(
            config, params, cache, tokens_BN, at_BN, start_B
        )
        logits_BNV = transformer.head(config, params, hidden_BND)
        noise_BN = sampling.position_keys(
            keys_B, jnp.maximum(at_BN + 1 - prompt_tokens_B[:, None], 0)
        )
        processed_BNV = sampling.processed_logits(logits_BNV, one_BN, off_BN, one_BN)
        mass = sampling.masses(processed_BNV)
        drawn_BN, _ = sampling.draw(processed_BNV, noise_BN, one_BN, scheme, mass)
        given = logits_BNV, processed_BNV, mass, next_BT[:, at_N], one_BN
        return cache, (drawn_BN, *sampling.given_log_probs(*given))

    _, found_IBN = jax.lax.scan(step, cache, jnp.arange(0, T, num_nodes))
    return tuple(x.swapaxes(0, 1).reshape(B, T) for x in found_IBN)


def scores(
    config: ModelConfig,
    params: Params,
    done: Sequence[Trajectory],
    key: jax.Array,
    scheme: sampling.Draw,
    num_nodes: int = 0,
    length: int = 0,
) -> list[tuple[np.ndarray, ...]]:
    """Return draws, log-probs and support at each token of responses, as `forced`.

    Without `num_nodes` a pass reads whole texts. `length` is the least of the padded ones.
    """
    ends = [len(t.prompt_ids) + len(t.response_ids) for t in done]
    T = -(-max(*ends, length) // 64) * 64
    tokens_BT = np.zeros((len(done), T), np.int32)
    for b, t in enumerate(done):
        tokens_BT[b, : ends[b]] = [*t.prompt_ids, *t.response_ids]
    prompt_tokens_B = np.array([len(t.prompt_ids) for t in done], np.int32)
    keys_B = sampling.request_keys(key, jnp.asarray([t.request_id for t in done]))
    arrays = tokens_BT, prompt_tokens_B, keys_B
    found = jax.device_get(forced(config, params, *arrays, num_nodes=num_nodes or T, scheme=scheme))
    at = [slice(len(t.prompt_ids) - 1, end - 1) for t, end in zip(done, ends, strict=True)]
    return [tuple(x[b, at[b]] for x in found) for b in range(len(done))]


def compare_forced(
    config: ModelConfig,
    params: Params,
    plain: Sequence[Trajectory],
    key: jax.Array,
    num_nodes: int,
    scheme: sampling.Draw,
) -> dict[str, Any]:
    """Count positions of the responses at which passes of so many nodes draw another token."""
    found = scores(config, params, plain, key, scheme, num_nodes)
    pairs = list(zip(plain, found, strict=True))
    difference_T = np.concatenate([np.abs(logprob - t.logprobs) for t, (_, logprob, _) in pairs])
    return {
        "tokens": len(difference_T),
        "flips": sum(int((drawn != t.response_ids).sum()) for t, (drawn, _, _) in pairs),
        "sum_logprob_difference": float(difference_T.sum()),
        "max_logprob_difference": float(difference_T.max()),
    }


def compare_drafted(plain: Sequence[Trajectory], drafted: Sequence[Trajectory]) -> dict[str, Any]:
    """Responses that differ, and log-probs of the tokens before they do."""
    differ, differences = 0, [np.zeros(0, np.float32)]
    for a, b in zip(plain, drafted, strict=True):
        n = min(len(a.response_ids), len(b.response_ids))
        apart = np.flatnonzero(a.response_ids[:n] != b.response_ids[:n])
        differ += bool(len(apart)) or len(a.response_ids) != len(b.response_ids)
        same = int(apart[0]) if len(apart) else n
        differences.append(np.abs(a.logprobs[:same] - b.logprobs[:same]))
    difference_T = np.concatenate(differences)
    return {
        "tokens": len(difference_T),
        "responses": len(plain),
        "responses_that_differ": differ,
        "sum_logprob_difference": float(difference_T.sum()),
        "max_logprob_difference": float(difference_T.max(initial=0.0)),
    }


def total_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of several seeds as one: sums, the largest difference, and rates."""
    row: dict[str, Any] = {name: sum(r[name] for r in rows) for name in rows[0]}
    row["max_logprob_difference"] = max(r["max_logprob_difference"] for r in rows)
    tokens = max(row["tokens"], 1)
    row["mean_logprob_difference"] = row.pop("sum_logprob_difference") / tokens
    if "flips" in row:
        row["flips_per_million"] = round(1e6 * row["flips"] / tokens, 1)
    return row


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model, master = workloads.policy(workloads.BASE_POLICY)
    questions = workloads.questions(arguments.prompts)
    requests = workloads.group_requests(questions, arguments.group_size)
    slots = {"slots": len(requests), "min_slots": len(requests)}
    config = EngineConfig(**slots, max_nodes=8)
    sizes = arguments.seeds, arguments.new_tokens, tuple(arguments.draws)
    return of_policy(model, master, requests, config, *sizes)


def of_policy(
    model: ModelConfig,
    master: Params,
    requests: Sequence[Request],
    engine_config: EngineConfig,
    seeds: int,
    new_tokens: int,
    draws: Sequence[sampling.Draw],
    nodes: Sequence[int] = NODES,
) -> dict[str, Any]:
    """Return rows of one policy, by type, draw and measure, and the named figures.

    `new_tokens` are those of each response, `nodes` those of the forced passes.
    """
    rows = []
    for dtype in DTYPES:
        params = jax.tree.map(lambda p, d=dtype: p.astype(d), master)
        engine = Engine(model, engine_config, dtype=jnp.dtype(dtype))
        for scheme in draws:
            settings = SamplingConfig(max_new_tokens=new_tokens, draw=scheme)
            found: dict[str, list[dict[str, Any]]] = {}
            for seed in range(seeds):
                key = step_key(seed, 1)
                pairs = _phases(engine, params, requests, settings, key, model.vocab_size)
                found.setdefault("drafted", []).append(compare_drafted(*pairs))
                for n in nodes:
                    row = compare_forced(model, params, pairs[0], key, n, scheme)
                    found.setdefault(f"forced_{n}", []).append(row)
            for measured, of_seeds in found.items():
                row = {"dtype": dtype, "draw": scheme, "measure": measured} | total_of(of_seeds)
                rows.append(row)
                environment.progress(row)
    return {**_named(rows), "rows": rows}


def _phases(
    engine: Engine,
    params: Params,
    requests: Sequence[Request],
    settings: SamplingConfig,
    key: jax.Array,
    vocab_size: int,
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return plain responses, and drafted ones; no end token ends them, so that both are long."""
    given = engine.model, params, requests, settings
    run = functools.partial(generate, *given, key=key, engine=engine, stop_token_ids=())
    plain = run()
    known = {t.request_id: t.response_ids for t in plain}
    drafter = workloads.Replay(known, ACCEPTANCE, vocab_size)
    return plain, run(drafter=drafter, budget=FixedBudget())


def _named(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the widest passes; those of other draws than the default have its name."""
    named: dict[str, Any] = {}
    for row in rows:
        if row["measure"] in ("drafted", f"forced_{NODES[-1]}"):
            draw = [] if row["draw"] == rows[0]["draw"] else [row["draw"]]
            name = "_".join([row["dtype"], *draw, row["measure"].split("_")[0]])
            named |= {f"{name}_{k}": row[k] for k in NAMED if k in row}
    return named


if __name__ == "__main__":
    sizes = {"seeds": 5, "prompts": 16, "group_size": 4, "new_tokens": 192}
    environment.run(__doc__, measure, choices={"draws": DRAWS}, draws=("cdf", "gumbel"), **sizes)

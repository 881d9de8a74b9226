"""What the parity tests share: a tiny policy, requests, a naive reference and the checks.

The reference knows neither cache nor slots nor trees: it runs the whole sequence
through `models.decoder.transformer.logits` for every token and draws from the last row. The
checks return what they find as a list of strings, so that the tests of planted
faults can run the same checks and ask that they find something.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from shapes import SPEC, one_size

from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.rl.records.trajectory import FinishReason, Request
from reprise.spec.config import SamplingConfig
from reprise.spec.round_times import RoundTimes
from reprise.spec.verification import sampling

MODEL = ModelConfig(
    architecture="qwen3",
    vocab_size=50,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=48,
    qk_norm=True,
    max_positions=256,
)
STOP = (3, 11)
MAX_NEW = 24
OVERRUN = 8  # how far the naive reference looks beyond an end, for drafts that go there
TOLERANCE = 1e-4
STEP_KEY = sampling.step_key(5, 2)

CONFIG = dataclasses.replace(SPEC, page_tokens=8)  # prompts and responses cross ends of pages
ONE_SIZE = one_size(CONFIG)  # for tests that compile a policy of their own
POSITIONS = (40, 48, 64)  # of slots, for some of the requests, all, and the longer ones in chunks

# a round of half as many nodes as all trees may have is the best
HALF_TREES = RoundTimes({(8, 8 * n, s): 1.0 + (n > 4) for n in (1, 2, 4, 8) for s in POSITIONS})

SAMPLINGS = {
    "plain": SamplingConfig(max_new_tokens=MAX_NEW),
    "cool": SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=MAX_NEW),
    "top_k": SamplingConfig(temperature=1.3, top_k=4, max_new_tokens=MAX_NEW),
    "greedy": SamplingConfig(temperature=0.0, top_p=0.9, top_k=3, max_new_tokens=MAX_NEW),
    "gumbel": SamplingConfig(draw="gumbel", max_new_tokens=MAX_NEW),
    "blocks_cool": SamplingConfig(
        temperature=0.7, top_k=20, top_p=0.9, draw="gumbel_blocks", max_new_tokens=MAX_NEW
    ),
}


def make_params(model: ModelConfig, scale: float, seed: int = 0) -> transformer.Params:
    """Normal weights of `scale` times the initial deviation; norms differ from one."""
    rng = np.random.default_rng(seed)

    def one(spec: transformer.ParamSpec) -> jax.Array:
        noise = rng.standard_normal(spec.shape, np.float32)
        return jnp.asarray(1 + 0.3 * noise if spec.scale is None else scale * spec.scale * noise)

    return jax.tree.map(one, transformer.param_specs(model))


def make_requests() -> list[Request]:
    """26 requests: six groups of four, and a seventh group with the third's prompt."""
    rng = np.random.default_rng(1)
    lengths = (1, 2, 6, 13, 19, 20)
    prompts = [tuple(rng.integers(0, MODEL.vocab_size, n).tolist()) for n in lengths]
    pairs = [(g, s) for g in range(6) for s in range(4)] + [(6, 0), (6, 1)]
    limits = {3: 1, 5: 6}  # by i % 7; the others have the sampling's own
    return [
        Request(
            request_id=1000 * i + 7,
            prompt_ids=prompts[2 if g == 6 else g],
            group_id=g,
            sample_index=s,
            max_new_tokens=limits.get(i % 7),
        )
        for i, (g, s) in enumerate(pairs)
    ]


@dataclasses.dataclass(frozen=True)
class Golden:
    """What a request must give; `beyond` goes on after its end as if there were none."""

    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    beyond: tuple[int, ...]


@partial(jax.jit, static_argnames=("model", "scheme"))
def _naive_step(
    params, tokens_RT, length_R, ids_R, t, key, temperature, top_k, top_p, *, model, scheme
):
    """The token of response position t of every row, and its log-probability."""
    logits_RTV = transformer.logits(model, params, tokens_RT)
    last_RV = jnp.take_along_axis(logits_RTV, (length_R - 1)[:, None, None], axis=1)[:, 0]
    keys = jax.vmap(lambda r: jax.random.fold_in(jax.random.fold_in(key, r), t))(ids_R)
    fill = jnp.ones(len(ids_R), jnp.float32)
    cut_RV = sampling.processed_logits(
        last_RV, fill * temperature, jnp.full(len(ids_R), top_k), fill * top_p
    )
    token_R, logprob_R = sampling.draw(cut_RV, keys, fill * temperature, scheme)
    return tokens_RT.at[jnp.arange(len(ids_R)), length_R].set(token_R), token_R, logprob_R


def naive_rollout(
    model: ModelConfig,
    params: transformer.Params,
    requests: list[Request],
    config: SamplingConfig,
    forced: dict[int, np.ndarray] | None = None,
) -> dict[int, Golden]:
    """Every request by whole-sequence passes; by request id.

    `forced` are the first tokens of responses, by request id: they are not drawn. Their
    log-probabilities are those of the draws in their place.
    """
    forced_RT = np.full((len(requests), MAX_NEW + OVERRUN), -1, np.int32)
    for row, r in zip(forced_RT, requests, strict=True):
        prefix = (forced or {}).get(r.request_id, ())
        row[: len(prefix)] = prefix
    tokens_RT = np.zeros((len(requests), 64), np.int32)
    for row, r in zip(tokens_RT, requests, strict=True):
        row[: len(r.prompt_ids)] = r.prompt_ids
    prompt_R = np.asarray([len(r.prompt_ids) for r in requests], np.int32)
    ids_R = np.asarray([r.request_id for r in requests], np.int32)
    columns = []
    for t in range(MAX_NEW + OVERRUN):
        tokens_RT, token_R, logprob_R = _naive_step(
            params,
            tokens_RT,
            prompt_R + np.int32(t),
            ids_R,
            np.int32(t),
            STEP_KEY,
            np.float32(config.temperature),
            np.int32(config.top_k),
            np.float32(config.top_p),
            model=model,
            scheme=config.scheme,
        )
        token_R = np.where(forced_RT[:, t] >= 0, forced_RT[:, t], token_R)
        tokens_RT = tokens_RT.at[np.arange(len(ids_R)), prompt_R + t].set(token_R)
        columns.append((token_R, logprob_R))
    drawn_RT, logprobs_RT = (
        np.stack(x, axis=1) for x in zip(*jax.device_get(columns), strict=True)
    )
    return {
        r.request_id: _cut(drawn_RT[i].tolist(), logprobs_RT[i].tolist(), r, config)
        for i, r in enumerate(requests)
    }


def _cut(
    drawn: list[int], logprobs: list[float], request: Request, config: SamplingConfig
) -> Golden:
    limit = request.max_new_tokens or config.max_new_tokens
    ends = [t for t, token in enumerate(drawn[:limit]) if token in STOP]
    n = ends[0] + 1 if ends else limit
    reason = FinishReason.STOP if ends else FinishReason.LENGTH
    return Golden(tuple(drawn[:n]), tuple(logprobs[:n]), reason, tuple(drawn))


# -- the checks -----------------------------------------------------------------


def differences(golden, trajectories) -> list[str]:
    """Where trajectories differ from what their requests must give, a line each."""
    found = []
    for got in trajectories:
        want, name = golden[got.request_id], f"request {got.request_id}"
        if tuple(got.response_ids.tolist()) != want.response_ids:
            found.append(f"{name}: tokens {got.response_ids.tolist()}, not {want.response_ids}")
        elif not np.abs(got.logprobs - np.asarray(want.logprobs)).max() <= TOLERANCE:  # or NaN
            found.append(f"{name}: log-probabilities {got.logprobs}, not {want.logprobs}")
        if got.finish_reason is not want.finish_reason:
            found.append(f"{name}: finished by {got.finish_reason}, not {want.finish_reason}")
        if len({len(got.response_ids), len(got.logprobs), len(got.origins)}) != 1:
            found.append(f"{name}: columns of different lengths")
    return found


@partial(jax.jit, static_argnames="model")
def _score(params, tokens_RT, temperature, top_k, top_p, *, model):
    logits_RTV = transformer.logits(model, params, tokens_RT)[:, :-1]
    like = jnp.ones(logits_RTV.shape[:2], jnp.float32)
    return sampling.log_probs(
        logits_RTV,
        tokens_RT[:, 1:],
        like * temperature,
        top_k * like.astype(jnp.int32),
        like * top_p,
    )[0]


def misscored(params, trajectories, config: SamplingConfig, model=MODEL) -> dict[int, float]:
    """Per origin, the largest gap between recorded and fresh log-probability."""
    tokens_RT = np.zeros((len(trajectories), 64), np.int32)
    for row, t in zip(tokens_RT, trajectories, strict=True):
        row[: len(t.prompt_ids) + t.num_tokens] = np.concatenate([t.prompt_ids, t.response_ids])
    scored_RT = np.asarray(
        _score(
            params,
            tokens_RT,
            np.float32(config.temperature),
            np.int32(config.top_k),
            np.float32(config.top_p),
            model=model,
        )
    )
    worst: dict[int, float] = {}
    for row, t in zip(scored_RT, trajectories, strict=True):
        first = len(t.prompt_ids) - 1
        gap = np.abs(row[first : first + t.num_tokens] - t.logprobs)
        gap[np.isnan(gap)] = np.inf
        for origin in set(t.origins.tolist()):
            worst[origin] = max(worst.get(origin, 0.0), float(gap[t.origins == origin].max()))
    return worst

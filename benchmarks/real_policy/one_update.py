"""What one update leaves of old responses: tokens kept under the same noise, and by lenience.

Whole passes of the updated policy score responses of the policy before it. `agreement` is the share
of positions at which it draws the same token after the same text; `kept` the share of tokens before
the first difference (coupled reuse keeps these). Lenience keeps by SPEC-RL's rule. A learning rate
of 0 shows the effect of rounding alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.real_policy.acceptance import ratio
from benchmarks.real_policy.ground import Ground, cached
from models import transformer
from models.config import ModelConfig
from models.transformer import Params
from rl.trajectory import Trajectory
from spec import sampling
from spec.config import Draw
from spec.reuse.lenience import log
from spec.reuse.prefix_rule import PrefixRule, parse_mode
from spec.reuse.rollout_cache import CachedResponse

RATES = (0.0, 1e-6, 1e-5, 1e-4)
DRAWS: tuple[Draw, ...] = ("cdf", "gumbel")
ROWS = 4  # of a pass
LENIENCES = {"1": "lenient:1", "e^0_2": "lenient:e^0.2", "e^0_5": "lenient:e^0.5"}


class Scored(NamedTuple):
    """A response, and at each of its tokens the policy's log-prob, support and own draw."""

    response: CachedResponse
    logprobs: np.ndarray
    is_possible: np.ndarray
    drawn: np.ndarray


@partial(jax.jit, static_argnames=("config", "scheme"))
def _score(
    params: Params,
    tokens_RT: jax.Array,
    position_RT: jax.Array,
    ids_R: jax.Array,
    key: jax.Array,
    *,
    config: ModelConfig,
    scheme: Draw,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (log-prob, support, own draw) of each row's next token, each [R, T]."""
    logits_RTV = transformer.logits(config, params, tokens_RT)
    logits_XV = logits_RTV.reshape(-1, logits_RTV.shape[-1])
    keys_X = sampling.position_keys(sampling.request_keys(key, ids_R), position_RT).reshape(-1)
    one_X = jnp.ones(len(logits_XV))
    processed_XV = sampling.processed_logits(logits_XV, one_X, one_X.astype(jnp.int32) * 0, one_X)
    mass = sampling.masses(processed_XV)
    drawn_X, _ = sampling.draw(processed_XV, keys_X, one_X, scheme, mass)
    targets_X = jnp.roll(tokens_RT, -1, axis=1).reshape(-1)
    scores = *sampling.given_log_probs(logits_XV, processed_XV, mass, targets_X, one_X), drawn_X
    return tuple(x.reshape(tokens_RT.shape) for x in scores)


def verify(
    ground: Ground, params: Params, done: Sequence[Trajectory], draw: Draw
) -> dict[int, Scored]:
    """Score responses with whole passes, under the noise that drew them."""
    scored, key = {}, ground.rollout_spec(params, draw).key
    longest = max(len(t.prompt_ids) + t.num_tokens for t in done)
    for first in range(0, len(done), ROWS):
        some = done[first : first + ROWS]
        tokens_RT, position_RT = np.zeros((2, ROWS, longest), np.int32)
        ids_R = np.zeros(ROWS, np.int32)
        for r, t in enumerate(some):
            tokens_RT[r, : len(t.prompt_ids) + t.num_tokens] = [*t.prompt_ids, *t.response_ids]
            position_RT[r] = np.maximum(np.arange(longest) + 1 - len(t.prompt_ids), 0)
            ids_R[r] = t.request_id
        arrays = tokens_RT, position_RT, ids_R, key
        scores = jax.device_get(_score(params, *arrays, config=ground.model, scheme=draw))
        for r, t in enumerate(some):
            at = slice(len(t.prompt_ids) - 1, len(t.prompt_ids) - 1 + t.num_tokens)
            scored[t.request_id] = Scored(cached(t), *(x[r, at] for x in scores))
    return scored


def measure(ground: Ground) -> dict[str, Any]:
    """Return rows by draw and learning rate, and the figures of the update."""
    rows: dict[str, dict[str, Any]] = {draw: {} for draw in DRAWS}
    for rate in RATES:
        for draw in DRAWS:
            scored = verify(ground, ground.updated(rate), ground.responses(draw), draw)
            rows[draw][f"{rate:.0e}"] = row = coupled(ground, scored)
            if draw == DRAWS[0]:  # lenience does not depend on the draw
                row["lenient"] = {n: lenient(ground, scored, m) for n, m in LENIENCES.items()}
    return {"update": ground.update[1], "rows": rows}


def coupled(ground: Ground, scored: Mapping[int, Scored]) -> dict[str, Any]:
    """Return agreement, the share of kept tokens, and the drift of log-probs."""
    same = {i: s.drawn == s.response.tokens for i, s in scored.items()}
    drift = [np.abs(s.logprobs - s.response.scores.logprobs) for s in scored.values()]
    return {
        "agreement": _share(ground, scored, {i: int(same_L.sum()) for i, same_L in same.items()}),
        "kept": _share(ground, scored, {i: _num_leading(same_L) for i, same_L in same.items()}),
        "mean_logprob_difference": float(np.concatenate(drift).mean()),
    }


def lenient(ground: Ground, scored: Mapping[int, Scored], name: str) -> dict[str, Any]:
    """Return the share of tokens that one lenience keeps."""
    mode = parse_mode(name)
    rule, kept = PrefixRule(mode, log(mode.lenience), 0, 1), {}
    for i, s in scored.items():
        least = rule.least_logprobs(i, s.response, len(s.response.tokens))
        kept[i] = _num_leading((least == -np.inf) | (s.is_possible & (s.logprobs >= least)))
    return _share(ground, scored, kept)


def _num_leading(kept_L: np.ndarray) -> int:
    return len(kept_L) if kept_L.all() else int(np.argmin(kept_L))


def _share(
    ground: Ground, scored: Mapping[int, Scored], counts: Mapping[int, int]
) -> dict[str, Any]:
    """Return the sum of `counts` over the tokens of all responses."""
    above, below = np.zeros((2, len(ground.questions)))
    for i, s in scored.items():
        above[i // ground.sizes.group_size] += counts[i]
        below[i // ground.sizes.group_size] += len(s.response.tokens)
    return ratio(above.tolist(), below.tolist())

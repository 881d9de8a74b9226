"""What the policy of one update before has left: tokens kept under the same noise, and by lenience.

Responses that the policy drew are scored in whole passes under the policy after one update,
at several learning rates: `agreement` is the share of positions, behind the same tokens, at which
it draws the same token; `kept` the share of tokens up to the first that differs (what coupled
reuse keeps); `whole` the share of responses that stay as they are. Lenience 1 and above keep by
SPEC-RL's rule. A learning rate of 0 shows what rounding alone does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.real_policy import statistic
from benchmarks.real_policy.ground import Ground, cached
from benchmarks.real_policy.questions import set_names
from models import transformer
from models.config import ModelConfig
from models.transformer import Params
from rl.trajectory import Trajectory
from spec import sampling
from spec.config import Draw
from spec.reuse.lenience import log
from spec.reuse.prefix_rule import PrefixRule, parse_mode
from spec.reuse.rollout_cache import CachedResponse

DRAWS: tuple[Draw, ...] = ("cdf", "gumbel")
ROWS = 4  # of a pass
LENIENCES = {"1": "lenient:1", "e^0_2": "lenient:e^0.2", "e^0_5": "lenient:e^0.5"}


@dataclasses.dataclass(frozen=True, eq=False)
class Scored:
    """A policy at each token of a response: log-probability, if possible, own draw."""

    logprobs: np.ndarray
    possible: np.ndarray
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
    """What the policy says of each row's next token, with the noise of its response position."""
    logits_RTV = transformer.logits(config, params, tokens_RT)
    logits_XV = logits_RTV.reshape(-1, logits_RTV.shape[-1])
    keys_X = sampling.position_keys(sampling.request_keys(key, ids_R), position_RT).reshape(-1)
    one_X = jnp.ones(len(logits_XV))
    processed_XV = sampling.processed_logits(logits_XV, one_X, one_X.astype(jnp.int32) * 0, one_X)
    mass = sampling.masses(processed_XV)
    drawn_X, _ = sampling.draw(processed_XV, keys_X, one_X, scheme, mass)
    targets_X = jnp.roll(tokens_RT, -1, axis=1).reshape(-1)
    found = *sampling.given_log_probs(logits_XV, processed_XV, mass, targets_X, one_X), drawn_X
    return tuple(x.reshape(tokens_RT.shape) for x in found)


def verify(
    ground: Ground, params: Params, done: Sequence[Trajectory], draw: Draw
) -> dict[int, tuple[CachedResponse, Scored]]:
    """Return what whole passes of `params` say of responses, under the noise that drew them."""
    found, key = {}, ground.rollout_spec(params, draw).key
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
        scored = jax.device_get(_score(params, *arrays, config=ground.model, scheme=draw))
        for r, t in enumerate(some):
            at = slice(len(t.prompt_ids) - 1, len(t.prompt_ids) - 1 + t.num_tokens)
            found[t.request_id] = cached(t), Scored(*(x[r, at] for x in scored))
    return found


def measure(ground: Ground, rates: Sequence[float]) -> dict[str, Any]:
    """Return rows by draw and learning rate (0 in front), and the metrics of the update."""
    rows: dict[str, dict[str, Any]] = {draw: {} for draw in DRAWS}
    for rate in (0.0, *rates):
        params = ground.updated(rate) if rate else ground.params
        for draw in DRAWS:
            found = verify(ground, params, ground.responses(draw), draw)
            rows[draw][f"{rate:.0e}"] = row = coupled(ground, found)
            if draw == DRAWS[0]:  # lenience does not look at the draw
                row["lenient"] = {n: lenient(ground, found, m) for n, m in LENIENCES.items()}
    return {"update": ground.update_figures, "rows": rows}


def coupled(ground: Ground, found: Mapping[int, tuple[CachedResponse, Scored]]) -> dict[str, Any]:
    """Return agreement and kept shares over all questions, kept shares of each set, and drift."""
    kept = {i: _first_false(v.drawn == c.tokens) for i, (c, v) in found.items()}
    same = {i: int((v.drawn == c.tokens).sum()) for i, (c, v) in found.items()}
    drift = [np.abs(v.logprobs - c.scores.logprobs) for c, v in found.values() if c.scores]
    return {
        "agreement": _share(ground, found, same),
        "kept": _share(ground, found, kept),
        "whole": round(float(np.mean([kept[i] == len(found[i][0].tokens) for i in found])), 4),
        "kept_by_set": _by_set(ground, found, kept),
        "mean_logprob_difference": float(np.concatenate(drift).mean()),
    }


def lenient(
    ground: Ground, found: Mapping[int, tuple[CachedResponse, Scored]], name: str
) -> dict[str, Any]:
    """Return the share of tokens that one lenience keeps."""
    mode = parse_mode(name)
    rule = PrefixRule(mode, log(mode.lenience), 0, 1)
    kept = {}
    for i, (c, v) in found.items():
        least = rule.least_logprobs(i, c, len(c.tokens))
        kept[i] = _first_false((least == -np.inf) | (v.possible & (v.logprobs >= least)))
    return _share(ground, found, kept)


def _first_false(kept_L: np.ndarray) -> int:
    return len(kept_L) if kept_L.all() else int(np.argmin(kept_L))


def _share(
    ground: Ground,
    found: Mapping[int, tuple[CachedResponse, Scored]],
    counts: Mapping[int, int],
    chosen: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the sum of `counts` over the tokens of the responses to the chosen questions."""
    groups = range(len(ground.questions)) if chosen is None else chosen
    above, below = [], []
    for g in groups:
        ids = [i for i in found if i // ground.sizes.group_size == g]
        above.append(sum(counts[i] for i in ids))
        below.append(sum(len(found[i][0].tokens) for i in ids))
    return statistic.ratio(above, below)


def _by_set(
    ground: Ground,
    found: Mapping[int, tuple[CachedResponse, Scored]],
    counts: Mapping[int, int],
) -> dict[str, Any]:
    return {
        name: _share(
            ground,
            found,
            counts,
            [g for g, q in enumerate(ground.questions) if q.of.name == name],
        )["value"]
        for name in set_names(ground.questions)
    }


def named(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that people read."""
    shown = {}
    for draw, rows in found["rows"].items():
        for rate, row in rows.items():
            shown |= {f"{k}, {draw}, {rate}": row[k]["value"] for k in ("agreement", "kept")}
            for name, share in row.get("lenient", {}).items():
                shown[f"kept by {LENIENCES[name]}, {rate}"] = share["value"]
    return shown

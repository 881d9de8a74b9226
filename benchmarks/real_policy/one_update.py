"""What one update leaves of old responses: tokens kept under the same noise, and by lenience.

Whole passes of the updated policy score responses of the policy before it. `agreement` is the share
of positions at which it draws the same token after the same text; `kept` the share of tokens before
the first difference (coupled reuse keeps these). Lenience keeps by SPEC-RL's rule. A learning rate
of 0 shows the effect of rounding alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bf16_flips import scores
from benchmarks.real_policy.acceptance import ratio
from benchmarks.real_policy.ground import Ground, cached
from reprise.models.decoder.transformer import Params
from reprise.rl.records.trajectory import Trajectory
from reprise.spec.config import DRAWS, Draw
from reprise.spec.reuse.prefix_rule import PrefixRule, log, parse_mode
from reprise.spec.reuse.rollout_cache import CachedResponse

RATES = (0.0, 1e-6, 1e-5, 1e-4)
ROWS = 4  # of a pass
LENIENCES = {"1": "lenient:1", "e^0_2": "lenient:e^0.2", "e^0_5": "lenient:e^0.5"}


class Scored(NamedTuple):
    """A response, and at each of its tokens the policy's log-prob, support and own draw."""

    response: CachedResponse
    logprobs: np.ndarray
    is_possible: np.ndarray
    drawn: np.ndarray


def verify(
    ground: Ground, params: Params, done: Sequence[Trajectory], draw: Draw
) -> dict[int, Scored]:
    """Score responses with whole passes, under the noise that drew them."""
    scored, key = {}, ground.rollout_spec(params, draw).key
    longest = max(len(t.prompt_ids) + t.num_tokens for t in done)
    for first in range(0, len(done), ROWS):
        some = list(done[first : first + ROWS])
        rows = some + [some[-1]] * (ROWS - len(some))  # one shape
        found = scores(ground.model, params, rows, key, draw, length=longest)
        for t, (drawn, logprobs, is_possible) in zip(some, found, strict=False):
            scored[t.request_id] = Scored(cached(t), logprobs, is_possible, drawn)
    return scored


def measure(ground: Ground) -> dict[str, Any]:
    """Return rows by draw and learning rate, and the figures of the update."""
    rows: dict[str, dict[str, Any]] = {draw: {} for draw in DRAWS}
    for rate in RATES:
        for draw in DRAWS:
            scored = verify(ground, ground.updated(rate), ground.responses(draw), draw)
            rows[draw][f"{rate:.0e}"] = row = coupled(ground, scored)
            if draw == "cdf":  # lenience does not depend on the draw
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
        least = rule.min_logprobs(i, s.response, len(s.response.tokens))
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

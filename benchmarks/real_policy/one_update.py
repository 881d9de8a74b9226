"""What the policy of one update before has left: tokens kept under the same noise, and by lenience.

Responses that the policy drew are verified in packed passes under the policy after one update,
at several learning rates: `agreement` is the share of positions, behind the same tokens, at which
it draws the same token; `kept` the share of tokens up to the first that differs (what coupled
reuse keeps); `whole` the share of responses that stay as they are. Lenience 1 and above keep by
SPEC-RL's rule. A learning rate of 0 shows what rounding alone does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.real_policy import statistic
from benchmarks.real_policy.ground import Ground
from benchmarks.real_policy.questions import set_names
from models.transformer import Params
from rl.engine.prefix_verification import PrefixVerifier
from rl.engine.stats import VerifiedPrefixes
from rl.trajectory import PartialRequest, Request, Trajectory
from spec.config import Draw
from spec.reuse.lenience import log
from spec.reuse.prefix_rule import PrefixRule, Verified, parse_mode
from spec.reuse.rollout_cache import CachedResponse

DRAWS: tuple[Draw, ...] = ("cdf", "gumbel")
LENIENCES = {"1": "lenient:1", "e^0_2": "lenient:e^0.2", "e^0_5": "lenient:e^0.5"}


@dataclasses.dataclass(frozen=True)
class _Recorder(PrefixRule):
    """Keeps all of every response, and what the passes said of it."""

    found: dict[int, tuple[CachedResponse, Verified]] = dataclasses.field(default_factory=dict)

    def kept(self, request_id: int, cached: CachedResponse, verified: Verified) -> int:
        self.found[request_id] = cached, verified
        return len(cached.tokens)


def verify(
    ground: Ground, params: Params, done: Sequence[Trajectory], draw: Draw
) -> dict[int, tuple[CachedResponse, Verified]]:
    """Return what packed passes of `params` say of responses, under the noise that drew them."""
    rule = _Recorder(parse_mode("full"), 0.0, 0, 0)
    spec = ground.rollout_spec(params, draw, rule=rule)
    requests: list[Request] = ground.requests(done)
    longest = max(len(t.prompt_ids) for t in done) + ground.sizes.new_tokens
    endings = spec.endings(requests)
    verifier = PrefixVerifier(spec, ground.engine, longest, endings, VerifiedPrefixes())
    verifier.add([PartialRequest(r) for r in requests])
    while len(verifier):
        verifier.take(len(requests))
    return rule.found


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


def coupled(ground: Ground, found: Mapping[int, tuple[CachedResponse, Verified]]) -> dict[str, Any]:
    """Return agreement and kept shares over all questions, kept shares of each set, and drift."""
    rule = PrefixRule(parse_mode("coupled"), 0.0, 0, 0)
    kept = {i: rule.kept(i, *pair) for i, pair in found.items()}
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
    ground: Ground, found: Mapping[int, tuple[CachedResponse, Verified]], name: str
) -> dict[str, Any]:
    """Return the share of tokens that one lenience keeps."""
    mode = parse_mode(name)
    rule = PrefixRule(mode, log(mode.lenience), 0, 1)
    kept = {i: rule.kept(i, *pair) for i, pair in found.items()}
    return _share(ground, found, kept)


def _share(
    ground: Ground,
    found: Mapping[int, tuple[CachedResponse, Verified]],
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
    found: Mapping[int, tuple[CachedResponse, Verified]],
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

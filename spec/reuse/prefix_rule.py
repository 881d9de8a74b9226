"""Rules for the length of the prefix that is kept of a response of the last epoch (SPEC-RL).

One packed pass (`spec.reuse.packed_verify`) computes, at each token of a cached response, its
log-probability under the current policy and the token that this policy draws there. The mode
decides how many tokens are kept; the draw behind them comes from the same pass. Modes by
name: `off`, `lenient:λ`, `delayed:λ`, `random`, `full`, `coupled`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

import numpy as np

from spec.reuse.rollout_cache import CachedResponse

MODES = "off, lenient:LAMBDA, delayed:LAMBDA, random, full, coupled"
ACCEPTANCE = 0x5BEC  # separates the acceptance draws from all other streams of a seed

Name = Literal["off", "lenient", "delayed", "random", "full", "coupled"]
NAMES: dict[str, Name] = {name: name for name in get_args(Name)}


@dataclasses.dataclass(frozen=True)
class ReuseMode:
    """The response that is verified, and the rule; `lenience` is that of the first step.

    `lenient` and `delayed` keep a token with probability min(1, λ · p_new / p_old), up to the
    first that is not kept; `delayed` takes the response of the epoch before the last. λ is a
    number, `e^X`, or `inf`: 0 keeps nothing, 1 is the rule of speculative sampling (except for
    the token behind the prefix, which is drawn from the whole new policy), `inf` keeps all.
    `random` keeps a uniformly drawn number of tokens, `full` keeps all of them.
    `coupled` keeps tokens while they equal the current policy's own draws: noise repeats from
    epoch to epoch (`rl.speculation.reuse`), so that most do.

    Source: SPEC-RL, sections 3.1 and 4.3; `coupled` is ours (docs/architecture.md).
    """

    name: Name
    lenience: float = 1.0

    @property
    def enabled(self) -> bool:
        return self.name != "off"

    @property
    def couples_noise(self) -> bool:
        return self.name == "coupled"

    @property
    def back(self) -> int:
        """The number of epochs between the cached response's and the last one."""
        return int(self.name == "delayed")


def parse_mode(text: str) -> ReuseMode:
    """Return the mode of that name.

    Raises ValueError for an unknown name or a lenience below 0.
    """
    first, colon, value = text.partition(":")
    name = NAMES.get(first)
    if name in ("lenient", "delayed") and colon:
        try:
            lenience = math.exp(float(value[2:])) if value.startswith("e^") else float(value)
        except ValueError:
            lenience = math.nan
        if not lenience >= 0:
            raise ValueError(
                f"lenience must be a number of 0 or more, e^X or inf, got {value!r} in {text!r}"
            )
        return ReuseMode(name, lenience)
    if name in ("off", "random", "full", "coupled") and not colon:
        return ReuseMode(name)
    raise ValueError(f"mode must be one of {MODES}, got {text!r}")


@dataclasses.dataclass(frozen=True, eq=False)
class Verified:
    """The packed pass at each token of a response; [num_tokens] each.

    `logprobs` of the cached tokens under the current policy are finite even where top-k or
    top-p cuts the token now; `possible` is true where neither does (at temperature 0: where it
    is the most likely one). `drawn` is the policy's own draw there, `drawn_logprobs` its
    log-probability.
    """

    logprobs: np.ndarray
    possible: np.ndarray
    drawn: np.ndarray
    drawn_logprobs: np.ndarray


@dataclasses.dataclass(frozen=True)
class PrefixRule:
    """The rule of one mode at one step; its draws are a function of (seed, step, request).

    `log_lenience` is that of the step; `greedy`: the policy takes the most likely token, so that
    p_new and p_old are 0 or 1.
    """

    mode: ReuseMode
    log_lenience: float
    seed: int
    step: int
    greedy: bool = False

    def kept(self, request_id: int, cached: CachedResponse, verified: Verified) -> int:
        """Return the length of the prefix that is kept, 0 … num_tokens."""
        num_tokens = len(cached.tokens)
        if not num_tokens or self.mode.name == "full":
            return num_tokens
        if self.mode.couples_noise:
            return _first_false(verified.drawn == cached.tokens)
        draws = np.random.default_rng([self.seed, ACCEPTANCE, self.step, request_id])
        if self.mode.name == "random":
            return int(draws.integers(num_tokens))
        assert cached.scores is not None, "lenience compares with log-probs that were kept"
        new, old = verified.logprobs, cached.scores.logprobs
        log_ratio = np.zeros(num_tokens) if self.greedy else new.astype(np.float64) - old
        if self.log_lenience == -math.inf:
            return 0
        if self.log_lenience < math.inf:
            log_ratio = np.where(verified.possible, log_ratio, -np.inf) + self.log_lenience
        else:
            log_ratio[:] = np.inf
        return _first_false(draws.random(num_tokens) < np.exp(np.minimum(log_ratio, 0.0)))


def _first_false(kept_L: np.ndarray) -> int:
    return len(kept_L) if kept_L.all() else int(np.argmin(kept_L))

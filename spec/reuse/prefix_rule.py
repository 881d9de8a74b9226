"""Rules for the length of the prefix that is kept of a response of the last epoch (SPEC-RL).

Rounds verify a cached response as a chain of nodes, until its first token that is not kept; the
draw in its place comes from the same node. The mode says from which log-probability on, under the
policy at hand, each token is kept. Modes by name: `off`, `lenient:λ`, `delayed:λ`, `random`,
`full`, `coupled`.
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

    def least_logprobs(
        self, request_id: int, cached: CachedResponse, num_tokens: int
    ) -> np.ndarray:
        """Return the log-probability from which on each of the first tokens is kept; float32 [n].

            log u + log p_old − log λ,   u uniform: kept with probability min(1, λ · p_new / p_old)

        Up to the first token that is not kept. At −∞ a token is kept whatever the policy says of
        it, else only if the policy can draw it; at +∞ it is not. With `coupled`, whose tokens are
        compared with draws, this is of no use.
        """
        assert not self.mode.couples_noise
        if self.mode.name == "full" or self.log_lenience == math.inf:
            return np.full(num_tokens, -np.inf, np.float32)
        draws = np.random.default_rng([self.seed, ACCEPTANCE, self.step, request_id])
        if self.mode.name == "random":
            kept = int(draws.integers(num_tokens)) if num_tokens else 0
            return np.where(np.arange(num_tokens) < kept, -np.inf, np.inf).astype(np.float32)
        if self.log_lenience == -math.inf:
            return np.full(num_tokens, np.inf, np.float32)
        assert cached.scores is not None, "lenience compares with log-probs that were kept"
        with np.errstate(divide="ignore"):  # u may be 0
            least = np.log(draws.random(num_tokens)) - self.log_lenience
        if self.greedy:  # p_new and p_old are 1 where the policy can draw the token
            least = np.where(least < 0, -np.inf, np.inf)
        else:
            least += cached.scores.logprobs[:num_tokens]
        return np.maximum(least, np.finfo(np.float32).min).astype(np.float32)

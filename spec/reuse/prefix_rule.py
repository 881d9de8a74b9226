"""Rules for the length of the prefix that is kept of a last-epoch response (SPEC-RL).

Rounds verify a cached response as a chain of nodes, up to the first token that is not kept; the
draw that replaces this token comes from the same node. The mode sets the minimum log-probability,
under the current policy, of each kept token. The schedule changes the lenience over a run: the
paper keeps the lenience constant, the other two schedules are ours.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

if TYPE_CHECKING:  # not needed to read a configuration
    from reprise.spec.reuse.rollout_cache import CachedResponse

SCHEDULES = "constant, linear:END:STEPS, clip_fraction:TARGET"
GAIN = 0.1  # the largest change of log λ per step
LARGEST_LOG = 2.0  # log λ of `clip_fraction`; the smallest is the negative


@dataclasses.dataclass(frozen=True)
class LenienceSchedule:
    """The schedule of the lenience λ.

    `linear` moves from the first lenience to `end` in `steps` steps. `clip_fraction` changes log λ
    by `GAIN` · (target − fraction) / max(target, fraction), with the policy clip fraction.
    """

    name: Literal["constant", "linear", "clip_fraction"]
    end: float = 1.0
    steps: int = 1
    target: float = 0.0

    def at(self, first: float, log_lenience: float, step: int) -> float:
        """Return log λ of a step (from 1); `log_lenience` is from `after`, or is log first."""
        if self.name != "linear":
            return log_lenience
        part = min(1.0, (step - 1) / self.steps)
        return log(first + (self.end - first) * part)

    def after(self, log_lenience: float, clip_fraction: float) -> float:
        """Return log λ after a step with updates that clipped this fraction of the tokens."""
        if self.name != "clip_fraction":
            return log_lenience
        error = (self.target - clip_fraction) / max(self.target, clip_fraction)
        return min(max(log_lenience + GAIN * error, -LARGEST_LOG), LARGEST_LOG)


def log(lenience: float) -> float:
    """Return log λ; −∞ at 0."""
    return math.log(lenience) if lenience else -math.inf


def parse_schedule(text: str) -> LenienceSchedule:
    """Parse a schedule; raise ValueError for an unknown name or a bad number."""
    name, *values = text.split(":")
    try:
        if text == "constant":
            return LenienceSchedule("constant")
        if name == "linear" and len(values) == 2:
            end = float(values[0])
            steps = int(values[1])
            if 0 <= end < math.inf and steps >= 1:
                return LenienceSchedule("linear", end=end, steps=steps)
        if name == "clip_fraction" and len(values) == 1 and 0 < float(values[0]) < 1:
            return LenienceSchedule("clip_fraction", target=float(values[0]))
    except ValueError:
        pass
    raise ValueError(
        f"schedule must be one of {SCHEDULES} (END a finite lenience, TARGET between 0 and 1), "
        f"got {text!r}"
    )


MODES = "off, lenient:LAMBDA, delayed:LAMBDA, random, full, coupled, repeated_noise"
ACCEPTANCE = 0x5BEC  # separates the acceptance draws from all other streams of a seed

Name = Literal["off", "lenient", "delayed", "random", "full", "coupled", "repeated_noise"]
NAMES: dict[str, Name] = {name: name for name in get_args(Name)}


@dataclasses.dataclass(frozen=True)
class ReuseMode:
    """The response that is verified, and the rule; `lenience` is the value at the first step.

    `lenient` and `delayed` keep a token with probability min(1, λ · p_new / p_old), up to the first
    token that is not kept; `delayed` takes the response of the epoch before the last. λ is a
    number, `e^X`, or `inf`: 0 keeps nothing, 1 is the rule of speculative sampling (except for the
    token after the prefix, which is drawn from the whole new policy), `inf` keeps everything.
    `random` keeps a uniformly drawn number of tokens, `full` keeps everything. `coupled` keeps
    tokens that equal the draws of the current policy, with noise that repeats from epoch to epoch
    (`rl.speculation.reuse`). `repeated_noise` draws with the noise of `coupled` and keeps nothing.

    Source: SPEC-RL, sections 3.1 and 4.3; `coupled` is ours (docs/architecture.md).
    """

    name: Name
    lenience: float = 1.0

    @property
    def enabled(self) -> bool:
        return self.name not in ("off", "repeated_noise")

    @property
    def repeats(self) -> bool:
        """Return whether responses or noise of the last epoch are reused."""
        return self.name != "off"

    @property
    def couples_noise(self) -> bool:
        return self.name in ("coupled", "repeated_noise")

    @property
    def back(self) -> int:
        """The number of epochs between the cached response and the last epoch."""
        return int(self.name == "delayed")


def parse_mode(text: str) -> ReuseMode:
    """Parse a mode; raise ValueError for an unknown name or a bad number."""
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
    if name is not None and name not in ("lenient", "delayed") and not colon:
        return ReuseMode(name)
    raise ValueError(f"mode must be one of {MODES}, got {text!r}")


@dataclasses.dataclass(frozen=True)
class PrefixRule:
    """The rule of one mode at one step; draws depend only on (seed, step, request)."""

    mode: ReuseMode
    log_lenience: float
    seed: int
    step: int
    greedy: bool = False

    def min_logprobs(self, request_id: int, cached: CachedResponse, num_tokens: int) -> np.ndarray:
        """Return the minimum log-probability to keep each of the first tokens; float32 [n].

            log u + log p_old − log λ,   u uniform: kept with probability min(1, λ · p_new / p_old)

        At −∞ a token is always kept, at +∞ never, otherwise only if the policy can draw it.
        """
        assert not self.mode.couples_noise
        if self.mode.name == "full" or self.log_lenience == math.inf:
            return np.full(num_tokens, -np.inf, np.float32)
        draws = np.random.default_rng([self.seed, ACCEPTANCE, self.step, request_id])
        if self.mode.name == "random":
            num_reused = int(draws.integers(num_tokens)) if num_tokens else 0
            return np.where(np.arange(num_tokens) < num_reused, -np.inf, np.inf).astype(np.float32)
        if self.log_lenience == -math.inf:
            return np.full(num_tokens, np.inf, np.float32)
        assert cached.scores is not None, "lenience compares with log-probs that were kept"
        with np.errstate(divide="ignore"):  # u may be 0
            min_n = np.log(draws.random(num_tokens)) - self.log_lenience
        if self.greedy:  # p_new and p_old are 1 if the policy can draw the token
            min_n = np.where(min_n < 0, -np.inf, np.inf)
        else:
            min_n += cached.scores.logprobs[:num_tokens]
        return np.maximum(min_n, np.finfo(np.float32).min).astype(np.float32)

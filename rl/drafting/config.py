"""Configuration of drafting workers (section `Drafting`)."""

from __future__ import annotations

import dataclasses
import typing
from typing import Literal

from reprise.spec.budget.config import MODEL

MAX_WINDOW = 32  # no drafting worker drafts further ahead
Ahead = Literal["free_running", "enumeration"]
Method = Literal["model", "learned", "own", "group", "history", "histospec"]


def methods_of(num_models: int) -> tuple[str, ...]:
    """Return the names of the draft models of a run: `model`, `model2`, `model3`, …"""
    return (MODEL, *(f"{MODEL}{k}" for k in range(2, num_models + 1)))


@dataclasses.dataclass(frozen=True)
class DraftingConfig:
    """Workers that only draft, and workers that help with the last requests.

    With `DraftModel.directories`, each rollout uses the draft model with the most tokens per
    second, by measured times and acceptance. Source: SpecActor, section 4.
    """

    workers: int | None = 0
    """How many of the `Sched.workers` draft for the others, with the source `model`, on each of
    their devices. None: by the plan (not with `Cluster.kind = "ray"`); 0: each worker drafts for
    itself."""
    ahead: Ahead = "enumeration"
    """While a window is verified, continue past it (`free_running`), or draft for all outcomes of
    the round, with three guesses of each next token (`enumeration`)."""
    window: int | None = None
    """Draft tokens per window; None: by the plan, up to `DraftModel.max_depth`."""
    reconfigure_tokens: int = 1000
    """At multiples of this number of tokens, a request with less acceptance than others gets a
    separate window; 0: never."""
    requests_per_helper: int = 0
    """How many of the last requests of other workers an idle worker reruns; the first response
    counts."""
    methods: tuple[Method, ...] = ("model", "own")
    """The drafting methods of helpers, one per rerun."""

    def __post_init__(self) -> None:
        if self.ahead not in (known := typing.get_args(Ahead)):
            raise ValueError(f"expected ahead of {', '.join(known)}, got {self.ahead!r}")
        if self.window is not None and not 1 <= self.window <= MAX_WINDOW:
            raise ValueError(f"window must be 1 … {MAX_WINDOW}, got {self.window}")
        for name in ("workers", "reconfigure_tokens", "requests_per_helper"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        known = typing.get_args(Method)
        named = set(self.methods)
        if not named or len(named) < len(self.methods) or not named <= set(known):
            raise ValueError(
                f"expected different methods of drafting of {', '.join(known)}, got {self.methods}"
            )

    @property
    def drafts_apart(self) -> bool:
        """True if some workers may draft for the others."""
        return self.workers != 0

    @property
    def helps(self) -> bool:
        """True if idle workers help with the requests of others."""
        return self.requests_per_helper > 0

    @property
    def methods_of_copies(self) -> tuple[Method, ...]:
        """The sources that draft for copies of requests; none unless idle workers help."""
        return self.methods if self.helps else ()

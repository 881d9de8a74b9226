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

    `workers` of the `Sched.workers` draft for the others, with the source `model`, on each of their
    devices. None leaves the number to the plan (not with `Cluster.kind` = `ray`); with 0, each
    worker drafts for itself. With `DraftModel.directories`, each rollout uses the draft model with
    the most tokens per second, by measured times and acceptance. `ahead` is `free_running`, which
    continues past a window during its verification, or `enumeration`, which drafts for all outcomes
    of the round, with three guesses of each next token. `window` is a number of draft tokens;
    None leaves it to the plan, up to `DraftModel.max_depth`. Every `reconfigure_tokens` tokens (0:
    never), a request with less acceptance than others gets a separate window. Idle workers rerun up
    to `requests_per_helper` of the last requests of other workers, each with one of the drafting
    `methods`, and the first response counts. Source: SpecActor, section 4.
    """

    workers: int | None = 0
    ahead: Ahead = "enumeration"
    window: int | None = None
    reconfigure_tokens: int = 1000
    requests_per_helper: int = 0
    methods: tuple[Method, ...] = ("model", "own")

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

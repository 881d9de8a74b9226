"""Drafting workers as users set them: section Drafting."""

from __future__ import annotations

import dataclasses
import typing
from typing import Literal

from spec.budget.config import MODEL

MOST_WINDOW = 32  # no drafting worker drafts further ahead
Ahead = Literal["free_running", "enumeration"]
DraftedBy = Literal["model", "learned", "own"]
Method = Literal["model", "learned", "own", "group", "history", "histospec"]


@dataclasses.dataclass(frozen=True)
class DraftingConfig:
    """Drafts of workers that do nothing else, and workers that help with the last requests.

    `workers` of `Sched.workers` draft for those that verify, on each of their devices; None: as
    many as the plan says, 0: each worker drafts by itself. With `Cluster.kind` = `ray` they are
    programs of their own, and how many has to be set. They draft by one of `Speculation.sources`,
    `drafter`; of it, the sources of `ladder` and all models of `DraftModel.directories` each
    rollout has the one that promises the most tokens a second, by measured seconds and by the
    acceptance seen in the run so far. With `model` they draft `ahead`: `free_running` goes on
    behind a window while it is verified, `enumeration` drafts for all that the round may bring,
    with `fan_out` guesses of each next token. With `learned` and `own` they draft trees behind the
    last tokens they were told, as deep as what is being verified and a window. A `window` has as
    many draft tokens; None: as the plan says, up to `max_depth` of `DraftModel` or `Drafter`. Every
    `reconfigure_tokens` tokens of a request that is accepted less than others its window is planned
    anew, by what its draft tokens cost the batch, and if the next one is begun early; 0: never.
    Workers that have nothing left to do answer up to `requests_per_helper` of the others' last
    requests a second time, each worker drafting by one of the `methods`, which are sources of
    `Speculation`: the answer that is there first counts.
    These workers are threads, or with `Cluster.kind` = `ray` programs.
    Source: SpecActor, section 4.
    """

    workers: int | None = 0
    drafter: DraftedBy = "model"
    ladder: tuple[DraftedBy, ...] = ()
    ahead: Ahead = "enumeration"
    window: int | None = None
    fan_out: int = 3
    reconfigure_tokens: int = 1000
    requests_per_helper: int = 0
    methods: tuple[Method, ...] = ("model", "own")

    def __post_init__(self) -> None:
        if self.ahead not in (known := typing.get_args(Ahead)):
            raise ValueError(f"expected ahead of {', '.join(known)}, got {self.ahead!r}")
        if self.drafter not in (known := typing.get_args(DraftedBy)):
            raise ValueError(f"expected a drafter of {', '.join(known)}, got {self.drafter!r}")
        asked = set(self.sources)
        if not asked <= set(known) or len(asked) < len(self.sources):
            raise ValueError(
                f"expected a ladder of {', '.join(known)} beside {self.drafter!r}, each once, got "
                f"{self.ladder}"
            )
        if self.window is not None and not 1 <= self.window <= MOST_WINDOW:
            raise ValueError(f"window must be 1 … {MOST_WINDOW}, got {self.window}")
        if self.fan_out < 1:
            raise ValueError(f"fan_out must be at least 1, got {self.fan_out}")
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
    def sources(self) -> tuple[DraftedBy, ...]:
        """The sources of `Speculation` that workers may draft by for others."""
        return self.drafter, *self.ladder

    def methods_of(self, num_models: int) -> tuple[str, ...]:
        """Return the names of what they may draft by: `model2`, `model3`, … are further models."""
        models = (MODEL, *(f"{MODEL}{k}" for k in range(2, num_models + 1)))
        return tuple(m for s in self.sources for m in (models if s == MODEL else (s,)))

    @property
    def drafts_apart(self) -> bool:
        """True if some workers may draft for the others."""
        return self.workers != 0

    def goes_on(self, method: str) -> bool:
        """Return whether drafts go on from draft tokens as if these were accepted."""
        return source_of(method) == MODEL and self.ahead == "free_running"

    @property
    def helps(self) -> bool:
        """True if workers without requests of their own help with those of others."""
        return self.requests_per_helper > 0


def source_of(method: str) -> DraftedBy:
    """Return the source of `Speculation` that a method of `DraftingConfig.methods_of` is of."""
    return next(source for source in typing.get_args(DraftedBy) if method.startswith(source))

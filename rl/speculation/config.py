"""User settings of speculation and reuse: sections Speculation, DraftModel and Reuse."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from typing import Literal

from reprise.rl.runtime.user_files import UserName, check_name, is_user_name
from reprise.spec.budget.config import BUDGETS, LEARNED, MODEL, parse_budget
from reprise.spec.config import ChainConfig, Proposal
from reprise.spec.reuse.prefix_rule import parse_mode, parse_schedule

SourceName = Literal["last", "history", "histospec", "group", "own", "learned", "model"]
SOURCES: tuple[SourceName, ...] = typing.get_args(SourceName)
USER = "user"  # the kind of a budget that a user's file defines
MAX_SAMPLES = 512  # of a group with repeated noise: ids are example · 1024 + sample


@dataclasses.dataclass(frozen=True)
class SpeculationConfig:
    """The sources of draft tokens, and the budget of a round. Neither changes a token.

    (For rounding on accelerators see docs/architecture.md, Exactness.)
    """

    budget: str = "goodput"
    """How many draft tokens a round verifies: `off`, `fixed:K`, `aimd`, `bandit` (see Tuner),
    `goodput` (the most expected tokens per second) or `PATH.py:NAME` (docs/add_a_drafter.md)."""
    sources: tuple[SourceName | UserName, ...] = ("last", "history", "group", "own")
    """The drafters of each round, whose drafts are joined: `last` (with Reuse: last epoch's
    response with the same sample index), `history` (responses to the prompt in the last epoch; or
    `histospec`, which uses RhymeRL's rule), `group` (live siblings), `own` (the text of the
    request), `learned` (a drafter that is trained online, see Drafter), `model` (a draft model, see
    DraftModel) and `PATH.py:NAME` (a drafter of yours)."""
    losing_steps: int = 3
    """Consecutive steps with drafts that lost more than 1% of the rollout time, after which a
    budget turns itself off for the rest of the run, or in the first epoch until there is history
    (0: never). With `fixed:K` or drafting workers, and with `lenient` reuse, the loss is only
    reported; losing `coupled` reuse is turned off likewise."""

    def __post_init__(self) -> None:
        if self.budget.partition(":")[0] != "fixed":
            check_name("budget", self.budget, BUDGETS)
        _ = self.budget_kind  # raises for a size that is no number
        for source in self.sources:
            check_name("sources", source, SOURCES)
        if len(set(self.sources)) != len(self.sources):
            raise ValueError(f"sources must be different ones, got {self.sources}")
        if not self.sources and self.budget != "off":
            raise ValueError('no sources to draft from: name some, or set budget = "off"')
        if {"history", "histospec"} <= set(self.sources):
            raise ValueError("sources must have history or histospec, not both")
        if self.losing_steps < 0:
            raise ValueError(f"losing_steps must be at least 0, got {self.losing_steps}")

    @property
    def enabled(self) -> bool:
        return self.budget != "off"

    @functools.cached_property
    def budget_kind(self) -> tuple[str, int]:
        """The name and size of the budget: ("fixed", 4) for `fixed:4`, `USER` for a user file."""
        return (USER, 0) if is_user_name(self.budget) else parse_budget(self.budget)

    @property
    def learns(self) -> bool:
        """True if a learned drafter drafts, which needs the hidden states of the policy."""
        return self.enabled and LEARNED in self.sources

    @property
    def asks_model(self) -> bool:
        """True if a draft model drafts."""
        return self.enabled and MODEL in self.sources

    @property
    def history_source(self) -> str | None:
        """The source that drafts from the history of prompts, or None."""
        names = [name for name in ("history", "histospec") if name in self.sources]
        return names[0] if self.enabled and names else None


@dataclasses.dataclass(frozen=True)
class DraftModelConfig:
    """A smaller model that drafts, if `Speculation.sources` has `model`. It is not trained."""

    directory: str | None = None
    """Its Hugging Face folder or GGUF file, with the tokenizer of the policy."""
    directories: tuple[str, ...] = ()
    """Alternative draft models for drafting workers (see Drafting)."""
    max_depth: int = 6
    """The maximum length of the chain that a round drafts for a request."""
    proposal: Proposal = "likeliest"
    """`likeliest`: the most likely tokens, until their probability falls below 5%; `shared_noise`:
    draws with the noise of the policy."""

    @property
    def each(self) -> tuple[DraftModelConfig, ...]:
        """The configuration of each model."""
        folders = (self.directory, *self.directories)
        return tuple(dataclasses.replace(self, directory=f, directories=()) for f in folders)

    def __post_init__(self) -> None:
        ChainConfig(max_draft_tokens=self.max_depth)
        if self.proposal not in ("likeliest", "shared_noise"):
            raise ValueError(f"proposal must be likeliest or shared_noise, got {self.proposal!r}")


@dataclasses.dataclass(frozen=True)
class ReuseConfig:
    """Reuse of last epoch's response to the same prompt with the same sample index.

    Every mode repeats old responses, so an unsolved prompt is tried in the same way again;
    `fresh_share` and `renew_groups` keep exploring. With 0 and False everything repeats, as in
    SPEC-RL.

    Every token of `coupled` is a draw of the current policy, and the joint distribution is exact
    (except for rounding) for any policy that was chosen independently of the noise. Training is not
    independent: updates learn from responses made with the noise, as with common random numbers
    elsewhere. With `coupled`, Sampling.draw is "gumbel_blocks" unless set. After an update at 1e-5
    `gumbel` kept 81% of the tokens of SmolLM2-135M; `cdf` kept 31%, which is slower than no reuse.
    """

    mode: str = "off"
    """`off`; `lenient:λ` (SPEC-RL: a token is kept with probability min(1, λ · p_new / p_old), up
    to the first token that is not kept; λ is a number, `e^0.5` or `inf`); its ablations `delayed:λ`
    (the epoch before the last), `random` and `full`; `coupled` (noise repeats from epoch to epoch,
    tokens are kept while the policy draws them again); `repeated_noise` (the baseline of `coupled`:
    its noise, no kept tokens)."""
    schedule: str = "constant"
    """How λ changes: `constant`, `linear:END:STEPS`, `clip_fraction:TARGET`."""
    fresh_share: float = 0.125
    """The share of the samples of each group, rounded up but never the whole group, that draws
    fresh noise in each epoch and reuses nothing."""
    renew_groups: bool = True
    """Draw fresh noise for all samples of a prompt after its responses had equal rewards and taught
    nothing (never for groups of one)."""
    max_age_steps: int | None = None
    """The maximum age in steps of the policy that drew a kept token; older responses are generated
    from scratch. None: no bound, which `Sched.mode = "pipeline"` rejects. Tokens of `coupled` have
    no age."""

    def __post_init__(self) -> None:
        mode = parse_mode(self.mode)
        schedule = parse_schedule(self.schedule)
        if not 0 <= self.fresh_share <= 1:
            raise ValueError(
                f"fresh_share is a share of each group: expected 0 to 1, got {self.fresh_share}"
            )
        if self.max_age_steps is not None and self.max_age_steps < 1:
            raise ValueError(f"expected max_age_steps of 1 or more, got {self.max_age_steps}")
        if schedule.name == "constant":
            return
        if mode.name not in ("lenient", "delayed"):
            raise ValueError(
                f"schedule {self.schedule!r} moves a lenience, mode {self.mode!r} has none: "
                'choose lenient:λ or delayed:λ, or schedule = "constant"'
            )
        if not 0 < mode.lenience < math.inf and schedule.name == "clip_fraction":
            raise ValueError(
                f"schedule {self.schedule!r} needs a first lenience between 0 and inf, got "
                f"{self.mode!r}"
            )
        if mode.lenience == math.inf:
            raise ValueError(f"schedule {self.schedule!r} cannot start from {self.mode!r}")

    @property
    def enabled(self) -> bool:
        return parse_mode(self.mode).enabled

    @property
    def couples_noise(self) -> bool:
        return parse_mode(self.mode).couples_noise

    @property
    def keeps_old_tokens(self) -> bool:
        """True if responses may have tokens that an older policy drew."""
        return self.enabled and not self.couples_noise

    @property
    def epochs(self) -> int:
        """The number of epochs that the rollout cache has to hold."""
        return 1 + parse_mode(self.mode).back


def check_coupling(
    config: ReuseConfig,
    num_examples: int,
    prompts_per_step: int,
    group_size: int,
    *,
    max_times: int = 2,
) -> None:
    """Raise ValueError if (example, sample) cannot key noise with `max_times` uses per step."""
    if not config.couples_noise:
        return
    max_examples = 2**31 // (2 * MAX_SAMPLES)
    mode = f'Reuse.mode="{config.mode}"'
    if group_size > MAX_SAMPLES or num_examples > max_examples:
        raise ValueError(
            f"{mode} has names for {max_examples} examples with {MAX_SAMPLES} samples each, got "
            f"{num_examples} with {group_size}"
        )
    if (max_times - 1) * group_size > MAX_SAMPLES:
        raise ValueError(
            f"{mode} has names for {MAX_SAMPLES} further samples of an example in a step; so few "
            f"examples that a step may have one {max_times} times need "
            f"{max_times - 1} × {group_size}: lower Rollout.group_size, or take more examples"
        )
    if prompts_per_step > num_examples:
        raise ValueError(
            f"{mode} needs every example at most twice in a step (an epoch ends in it), got "
            f"{prompts_per_step} prompts of {num_examples} examples: lower Rollout.prompts_per_step"
        )


def check_age(
    config: ReuseConfig, num_examples: int, max_prompts_per_step: int, *, is_pipeline: bool
) -> None:
    """Raise ValueError if every response of the last epoch would be too old to be reused."""
    # responses of a pipeline are one update old from the start
    youngest = config.epochs * (num_examples // max_prompts_per_step) + is_pipeline
    limit = config.max_age_steps
    if config.keeps_old_tokens and limit is not None and limit < youngest:
        raise ValueError(
            f"Reuse.max_age_steps={limit} leaves nothing to reuse: the responses of an epoch of "
            f"{num_examples} prompts are {youngest} steps old or older when Reuse.mode="
            f"{config.mode!r} takes them: raise it to several epochs, or set it to None"
        )

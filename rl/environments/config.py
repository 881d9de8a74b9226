"""Section `Environment`, and the checks that need no process."""

from __future__ import annotations

import dataclasses
from typing import Literal

from reprise.rl.rewards.config import MAX_DEADLINE_S
from reprise.rl.runtime.user_files import FORM, check_file, did_you_mean, is_user_name

MAX_TURNS = 2**7  # turns with names of noise, as in sched.episodes
MAX_TOKENS = 2**24  # of an episode
MAX_LIVE = 4096  # processes of one host
_CHOICES = {"history": ("exact", "append"), "on_failure": ("zero", "skip")}


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    """Section `Environment`: dialogues of several turns between the policy and an environment.

    `Sampling.max_new_tokens` is the limit of one turn of the policy. An environment that raises,
    hangs, dies or returns nonsense has failed, and costs its episode only.
    """

    factory: str | None = None
    """`PATH.py:Class`, or a function that returns an environment (docs/environments.md). None: each
    response is one turn, without an environment."""
    max_turns: int = 8
    """The number of turns of the policy in an episode."""
    max_environment_tokens: int = 1024
    """The tokens that an environment may insert after the prompt of an episode."""
    max_tokens: int | None = None
    """The tokens of an episode after its prompt. None: `max_turns` turns of full length, and
    `max_environment_tokens`."""
    deadline_s: float = 30.0
    """Seconds for each call of an environment: `reset`, the tools of a turn or `step`, and
    `get_reward`."""
    live: int | None = None
    """The number of episodes with an open environment, each in a separate process. None: the rows
    of the engine, so that a row keeps its episode while the environment works."""
    on_failure: Literal["zero", "skip"] = "skip"
    """A failed episode is left out of the advantages (`skip`), or its reward is 0 (`zero`), as in
    `Reward.on_failure`."""
    history: Literal["exact", "append"] = "exact"
    """`exact` refuses a chat template that prints earlier turns in another way once a message
    follows; `append` accepts it. The tokens of a turn are never changed."""
    memory_limit_mib: int | None = 4096
    """Address space of each process; libraries reserve more than they use. None: no limit."""

    def __post_init__(self) -> None:
        if self.factory is not None and not is_user_name(self.factory):
            raise ValueError(f"Environment.factory: expected {FORM}, got {self.factory!r}")
        for field, names in _CHOICES.items():
            if (name := getattr(self, field)) not in names:
                raise ValueError(
                    f"Environment.{field}: expected one of {', '.join(names)}, got {name!r}"
                    f"{did_you_mean(name, names)}"
                )
        bounds = {
            "max_turns": (1, MAX_TURNS),
            "max_environment_tokens": (0, MAX_TOKENS),
            "max_tokens": (1, MAX_TOKENS),
            "live": (1, MAX_LIVE),
            "memory_limit_mib": (64, 2**30),
        }
        for field, (low, high) in bounds.items():
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise ValueError(f"Environment.{field} must be {low} to {high:,}, got {value}")
        if not 0 < self.deadline_s <= MAX_DEADLINE_S:
            raise ValueError(
                f"Environment.deadline_s must be above 0 and at most {MAX_DEADLINE_S:,} s, got "
                f"{self.deadline_s}"
            )

    @property
    def enabled(self) -> bool:
        return self.factory is not None

    def episode_tokens(self, turn_tokens: int) -> int:
        """Return the maximum tokens of an episode after its prompt, with turns of `turn_tokens`.

        A run without environments has one turn.
        """
        if not self.enabled:
            return turn_tokens
        whole = self.max_turns * turn_tokens + self.max_environment_tokens
        return whole if self.max_tokens is None else min(whole, self.max_tokens)


def validate(config: EnvironmentConfig) -> None:
    """Check that the file of the factory exists, without running it."""
    if config.factory is not None:
        check_file("Environment.factory", config.factory)

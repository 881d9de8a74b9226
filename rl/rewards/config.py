"""Section `Reward`, and the checks of its functions that need no worker."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Literal

from reprise.rl.answers.answers import EXTRACTORS, Extractor
from reprise.rl.runtime.user_files import check_file, did_you_mean, is_user_name

MAX_WORKERS = 4096  # processes of one host
MAX_DEADLINE_S = 1_000_000
ENVIRONMENT = "environment"  # the reward that the environment of an episode gives
BUILT_IN = ("task", "exact_match", "math_verify", ENVIRONMENT)
_EXPECTED = f"one of {', '.join(BUILT_IN)} or PATH.py:function"


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Section `Reward`: the functions that score responses, and what their failures mean.

    If a scorer raises, hangs, dies or returns nonsense, its sample has failed.
    """

    functions: tuple[str, ...] = ("task",)
    """`task` (the verifier of the task), `exact_match`, `math_verify`, `environment` (the reward
    that `Environment.factory` gives), or `PATH.py:function` with the signature
    `f(prompts, completions, completion_ids, **columns) -> list[float | None]`.
    Functions may be async."""
    weights: tuple[float, ...] = ()
    """A weight per function; empty: 1 for every function."""
    per: Literal["response", "group"] = "response"
    """`response` scores each response as it finishes, in lists of one entry; `group` scores all
    responses to a prompt in one call, once the last has finished."""
    extract: Extractor = "hash"
    """How the built-in functions find the answer in a completion (rl.answers.answers)."""
    deadline_s: float = 10.0
    """Seconds to score one response, or one group, with all functions."""
    workers: int = 2
    """The number of processes that score."""
    on_failure: Literal["zero", "skip"] = "skip"
    """A failed sample is left out of the advantages (`skip`), or its reward is 0 (`zero`); 0 counts
    only in a group with other rewards that differ, so that no group is trained on because a reward
    failed."""
    max_failed_share: float = 0.1
    """A larger share of failed samples in a step, of more than one sample, stops the run; the last
    whole step is saved."""
    max_failing_steps: int = 20
    """Consecutive steps with more than 1% failed samples that stop the run."""
    memory_limit_mib: int | None = 4096
    """Address space of each process; libraries reserve more than they use. None: no limit."""

    def __post_init__(self) -> None:
        if not self.functions:
            raise ValueError(f"Reward.functions is empty; expected {_EXPECTED}")
        for function in self.functions:
            if function not in BUILT_IN and not is_user_name(function):
                hint = did_you_mean(function, BUILT_IN)
                raise ValueError(f"Reward.functions: expected {_EXPECTED}, got {function!r}{hint}")
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"Reward.weights: expected one per function ({len(self.functions)}), "
                f"got {len(self.weights)}"
            )
        if any(not abs(weight) < float("inf") for weight in self.weights):
            raise ValueError(f"Reward.weights must be finite, got {self.weights}")
        choices = ("extract", EXTRACTORS), ("on_failure", ("zero", "skip"))
        for field, names in (*choices, ("per", ("response", "group"))):
            if (name := getattr(self, field)) not in names:
                raise ValueError(
                    f"Reward.{field}: expected one of {', '.join(names)}, "
                    f"got {name!r}{did_you_mean(name, names)}"
                )
        if not 0 <= self.max_failed_share <= 1:
            raise ValueError(
                f"Reward.max_failed_share must be in 0 … 1, got {self.max_failed_share}"
            )
        if self.max_failing_steps < 1:
            raise ValueError(
                f"Reward.max_failing_steps must be at least 1, got {self.max_failing_steps}"
            )
        if not 0 < self.deadline_s <= MAX_DEADLINE_S:
            raise ValueError(
                f"Reward.deadline_s must be above 0 and at most {MAX_DEADLINE_S:,} s, got "
                f"{self.deadline_s}"
            )
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ValueError(f"Reward.workers must be 1 to {MAX_WORKERS:,}, got {self.workers}")
        if self.memory_limit_mib is not None and not 64 <= self.memory_limit_mib <= 2**30:
            raise ValueError(
                "Reward.memory_limit_mib must be 64 (Python itself needs that) to 2³⁰, or None, "
                f"got {self.memory_limit_mib}"
            )
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"Reward.functions names one function twice: {self.functions}")

    @property
    def names(self) -> tuple[str, ...]:
        """Function names in metrics: `f` for `PATH.py:f`, unless two functions are called f."""
        short = [function.rpartition(":")[2] for function in self.functions]
        pairs = zip(short, self.functions, strict=True)
        return tuple(name if short.count(name) == 1 else function for name, function in pairs)

    @property
    def full_weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * len(self.functions)


def validate(config: RewardConfig) -> None:
    """Check that the file or package of every function exists, without running user code."""
    for function in config.functions:
        if function == "math_verify" and importlib.util.find_spec("math_verify") is None:
            raise ImportError(
                "Reward.functions: math_verify needs a package: "
                "pip install 'math-verify==0.9.0' latex2sympy2_extended"
            )
        if function not in BUILT_IN:
            check_file("Reward.functions", function)

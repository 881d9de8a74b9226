"""The algorithms by name: the settings of their papers, and the changes of a configuration.

`ALGORITHMS` holds all differences; trainer and loop are the same for all algorithms.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from typing import Any, Literal

from reprise.rl.gin.values import choices
from reprise.rl.runtime.user_files import UserName, check_name

Name = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "gdpo", "rloo", "ppo"]
Estimator = Literal["group", "group_by_reward", "leave_one_out", "gae"]
Normalisation = Literal["std", "none", "batch"]
PolicyLoss = Literal["clipped", "sequence_clipped", "clipped_weight", "reinforce"]
Aggregation = Literal["token", "sequence", "sequence_sum", "constant"]
OldLogprobs = Literal["rollout", "emission", "recomputed"]
KLEstimator = Literal["k1", "k2", "k3"]

NORMALISATIONS: dict[str, tuple[Normalisation, ...]] = {
    "group": ("std", "none"),
    "group_by_reward": ("batch", "none"),
    "leave_one_out": ("none",),
    "gae": ("batch", "none"),
}
OWN_NORMALISATION: tuple[Normalisation, ...] = ("none",)  # a user function returns final values

MAX_RATE = 1000.0  # Adam changes each weight by about the rate
MAX_BETA = 1 - 2.0**-20  # 1 − β and 1 − β^t are computed in float32
MIN_EPS = 1e-20  # squares of smaller gradients are 0 in float32, so only eps is left as divisor


def require(section: Any, **rules: tuple[bool, str]) -> None:
    """Raise ValueError for a value outside of its Literal, or a (rule, text) that does not hold."""
    for field, hint in typing.get_type_hints(type(section)).items():
        value = getattr(section, field)
        names = choices(hint)
        if UserName in typing.get_args(hint) and isinstance(value, str):
            check_name(field, value, names)
        elif isinstance(value, str) and names and value not in names:
            raise ValueError(f"{field} must be one of {', '.join(map(str, names))}, got {value!r}")
    for field, (holds, text) in rules.items():
        if not holds:
            raise ValueError(f"{field} must be {text}, got {getattr(section, field)!s:.100}")


def rate_rule(rate: float) -> tuple[bool, str]:
    """Return the rule of a learning rate, or of weight decay, for `require`."""
    return 0 <= rate <= MAX_RATE, f"0 to {MAX_RATE:g}"


def adam_rules(section: Any) -> dict[str, tuple[bool, str]]:
    """Return rules for `require` that keep the AdamW settings of a section valid in float32."""

    def beta(value: float) -> tuple[bool, str]:
        return 0 <= value <= MAX_BETA, f"0 to {MAX_BETA:.6f}"

    return {
        "learning_rate": rate_rule(section.learning_rate),
        "weight_decay": rate_rule(section.weight_decay),
        "b1": beta(section.b1),
        "b2": beta(section.b2),
        "eps": (MIN_EPS <= section.eps <= MAX_RATE, f"{MIN_EPS:g} to {MAX_RATE:g}"),
    }


CORRECTIONS = "none, token_tis:C, sequence_tis:C, token_mask:LOW:HIGH or sequence_mask:LOW:HIGH"


@dataclasses.dataclass(frozen=True)
class Correction:
    """A correction: `tis` truncates ratios at `high`, `mask` drops ratios outside `low` … `high`.

    A ratio belongs to one token, or is the product over its sequence.
    """

    level: Literal["token", "sequence"]
    kind: Literal["tis", "mask"]
    low: float
    high: float


def parse_correction(text: str) -> Correction | None:
    """Parse `token_tis:2`, `sequence_mask:0.5:2` and so on; None for `none`. Raises ValueError."""
    if text == "none":
        return None
    name, *numbers = text.split(":")
    level, _, kind = name.partition("_")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if (
        level not in ("token", "sequence")
        or len(values) != {"tis": 1, "mask": 2}.get(kind)
        or not all(math.isfinite(v) for v in values)
    ):
        raise ValueError(
            f"correction must be {CORRECTIONS}, got {text!r}: for example correction = "
            '"token_tis:2" or "sequence_mask:0.5:2"'
        )
    low, high = (0.0, *values)[-2:]
    if not 0 <= low < high:
        wanted = "a positive C" if kind == "tis" else "0 <= LOW < HIGH"
        raise ValueError(f"correction {text!r} must have {wanted}, got {numbers}")
    return Correction(level, kind, low, high)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The settings of a named algorithm, from the paper `source`.

    `advantages` and `policy_loss` may be functions of the user, `PATH.py:name`.

    `max_extra_phases` None trains on groups without differences too; a number drops such groups and
    generates others (dynamic sampling) in at most that many extra passes. `overlong_fraction` is
    the share of max_new_tokens over which length is penalised.
    """

    source: str
    advantages: Estimator | UserName = "group"
    advantage_normalisation: Normalisation = "std"
    policy_loss: PolicyLoss | UserName = "clipped"
    aggregation: Aggregation = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    max_extra_phases: int | None = None
    overlong_fraction: float = 0.0
    old_logprobs: OldLogprobs = "rollout"

    @property
    def needs_critic(self) -> bool:
        """True if a value network gives every token its advantage, instead of the group."""
        return self.advantages == "gae"

    @property
    def compares_groups(self) -> bool:
        """True if advantages compare the responses to a prompt with one another, and no others."""
        return self.advantages in ("group", "group_by_reward", "leave_one_out")


ALGORITHMS: dict[str, Algorithm] = {
    # TRL's default; the paper averages token means over sequences
    "grpo": Algorithm("arXiv 2402.03300"),
    "dr_grpo": Algorithm(
        "arXiv 2503.20783", advantage_normalisation="none", aggregation="constant"
    ),
    # the overlong buffer is 4,096 of 20,480 tokens; the paper does not bound the phases
    "dapo": Algorithm(
        "arXiv 2503.14476", clip_high=0.28, max_extra_phases=4, overlong_fraction=0.2
    ),
    "gspo": Algorithm(
        "arXiv 2507.18071",
        policy_loss="sequence_clipped",
        aggregation="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        # on accelerators, engine and trainer differ by more than these narrow bounds
        old_logprobs="recomputed",
    ),
    "cispo": Algorithm(
        "arXiv 2506.13585",
        policy_loss="clipped_weight",
        clip_low=1.0,
        clip_high=3.0,  # the paper names no bound; the ratio is at most 4, as in Tinker's tutorial
    ),
    "gdpo": Algorithm(
        "arXiv 2601.05242", advantages="group_by_reward", advantage_normalisation="batch"
    ),
    "rloo": Algorithm(
        "arXiv 2402.14740",
        advantages="leave_one_out",
        advantage_normalisation="none",
        policy_loss="reinforce",
        aggregation="sequence_sum",
        clip_low=1.0,
        clip_high=math.inf,
    ),
    "ppo": Algorithm("arXiv 1707.06347", advantages="gae", advantage_normalisation="batch"),
}

_OF_THE_TABLE = (
    *("policy_loss", "advantages", "clip_low", "clip_high", "advantage_normalisation"),
    *("aggregation", "max_extra_phases", "old_logprobs"),
)


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """The objective. A field of None has the value of the algorithm's paper.

    The KL to the starting policy is a function of d = log π_ref − log π. As a loss, each token gets
    β · `kl_estimator` of d, outside of `correction`. On accelerators the trainer rounds differently
    from the engine, so on-policy ratios of `old_logprobs = "rollout"` are not 1.
    """

    name: Name = "grpo"
    """The algorithm: grpo, dr_grpo, dapo, gspo, cispo, gdpo, rloo or ppo."""
    policy_loss: PolicyLoss | UserName | None = None
    """clipped, sequence_clipped, clipped_weight, reinforce or `PATH.py:function`
    (docs/add_an_algorithm.md)."""
    advantages: Estimator | UserName | None = None
    """group, group_by_reward, leave_one_out, gae or `PATH.py:function`."""
    clip_low: float | None = None
    """The ratio is clipped below at 1 − `clip_low`."""
    clip_high: float | None = None
    """The ratio is clipped above at 1 + `clip_high`."""
    kl_coefficient: float = 0.0
    """β, the weight of the KL to the starting policy."""
    kl_estimator: KLEstimator | None = None
    """`k2`, d²/2, has the gradient of the KL; `k3` (None), exp(d) − 1 − d, has the mean of the KL
    and the gradient of KL(π_ref ‖ π); `k1`, −d, has no gradient on average."""
    kl_in_reward: bool = False
    """Subtract the KL from the reward instead of adding it to the loss: before rewards are
    compared, the reward of a response falls by β · k1, summed over its tokens (ppo: token by
    token), where π is the sampling policy. Needs an `advantage_normalisation` other than `std`;
    dynamic sampling (dapo) uses the rewards before this subtraction."""
    advantage_normalisation: Normalisation | None = None
    """Divide advantages by the std of the group (`std`) or of the batch (`batch`, with ppo and
    gdpo), or not (`none`)."""
    entropy_coefficient: float = 0.0
    """The weight of the entropy of the sampling distribution, which is subtracted from the loss of
    each token; 0 is off, and costs nothing."""
    aggregation: Aggregation | None = None
    """`token` averages over all tokens of an optimizer step, `sequence` averages the token means of
    sequences, `sequence_sum` averages the token sums of sequences, `constant` divides the total of
    these sums by sequences · Sampling.max_new_tokens."""
    old_logprobs: OldLogprobs | None = None
    """The denominators of the ratio: `rollout` log-probs are by the engine under the current
    policy, `emission` log-probs are under the policy that drew each token (an older policy for
    reused tokens), `recomputed` log-probs (default of gspo) are by the trainer before the first
    update."""
    correction: str = "none"
    """Weighs tokens by the ratio of the trainer probability to the emission probability: `none`,
    `token_tis:C`, `sequence_tis:C`, `token_mask:LOW:HIGH` or `sequence_mask:LOW:HIGH`
    (`rl.losses.policy_losses`)."""
    mask_truncated: bool = False
    """Leave responses that reached the length limit out of the loss; their rewards still count in
    the mean of the group."""
    max_extra_phases: int | None = None
    """The maximum number of further passes of dynamic sampling (dapo)."""
    overlong_buffer_tokens: int | None = None
    """A reward falls by up to 1 over this number of tokens before the length limit; 0 is off."""

    def __post_init__(self) -> None:
        kl = self.kl_coefficient
        require(
            self,
            clip_low=(0 <= (self.clip_low or 0) <= 1, "in [0, 1] (1 is no clipping)"),
            clip_high=((self.clip_high or 0) >= 0, "0 or more"),
            kl_coefficient=(kl >= 0 and math.isfinite(kl), "0 or positive"),
            entropy_coefficient=(0 <= self.entropy_coefficient < math.inf, "0 or positive"),
            max_extra_phases=((self.max_extra_phases or 0) >= 0, "0 or more"),
            overlong_buffer_tokens=((self.overlong_buffer_tokens or 0) >= 0, "0 or more"),
        )
        self._check_fit()

    def _check_fit(self) -> None:
        """Raise ValueError for settings that have no effect or contradict each other."""
        paper = ALGORITHMS[self.name]
        loss = self.policy_loss or paper.policy_loss
        estimator = self.advantages or paper.advantages
        for field in ("clip_low", "clip_high"):
            if loss == "reinforce" and getattr(self, field) is not None:
                raise ValueError(
                    f"{field} has no meaning for {self.policy_loss or self.name}, whose loss is "
                    f"not clipped, got {getattr(self, field)}: leave it out, or choose another loss"
                )
        if self.max_extra_phases is not None and paper.max_extra_phases is None:
            raise ValueError(
                f"max_extra_phases is of dynamic sampling, which {self.name} has not, got "
                f'{self.max_extra_phases}: leave it out, or set name = "dapo"'
            )
        known = NORMALISATIONS.get(estimator, OWN_NORMALISATION)
        if self.advantage_normalisation not in (None, *known):
            raise ValueError(
                f"advantage_normalisation of {self.advantages or self.name} must be "
                f"{' or '.join(known)}, got {self.advantage_normalisation!r}"
            )
        self._check_kl()
        if self.importance is not None and self.old_logprobs not in (None, "recomputed"):
            raise ValueError(
                f"correction = {self.correction!r} compares the trainer's own scores with the "
                f"emission, got old_logprobs = {self.old_logprobs!r}: leave old_logprobs out, or "
                'set it to "recomputed"'
            )

    def _check_kl(self) -> None:
        if self.kl_in_reward and self.kl_coefficient == 0:
            raise ValueError(
                "kl_in_reward = True needs a kl_coefficient above 0, got 0: set it, or leave "
                "kl_in_reward out"
            )
        if self.kl_in_reward and self.kl_estimator in ("k2", "k3"):
            raise ValueError(
                f"kl_in_reward = True subtracts k1, got kl_estimator = {self.kl_estimator!r}, "
                "which is for the loss: leave one of them out"
            )
        if self.kl_in_reward and self.resolved.advantage_normalisation == "std":
            raise ValueError(
                "kl_in_reward = True subtracts the KL from rewards that are divided by their "
                "standard deviation: where a group's rewards are equal that is the KL's own, and "
                'kl_coefficient drops out; set advantage_normalisation = "none", or leave '
                'kl_in_reward out (the KL is then in the loss; kl_estimator = "k2")'
            )
        if self.kl_in_reward and self.resolved.advantages == "group_by_reward":
            raise ValueError(
                "kl_in_reward = True subtracts the KL from the sum of rewards, and group_by_reward "
                "compares each reward apart: leave kl_in_reward out (the KL is then in the loss; "
                'kl_estimator = "k2"), or choose other advantages'
            )
        if self.kl_estimator == "k1" and not self.kl_in_reward:
            raise ValueError(
                'kl_estimator = "k1" in the loss has an expected gradient of 0 and regularises '
                'nothing: set kl_in_reward = True, or kl_estimator = "k2" (the gradient of the KL) '
                'or "k3"'
            )

    @functools.cached_property
    def importance(self) -> Correction | None:
        """The parsed `correction`; None for `none`."""
        return parse_correction(self.correction)

    @functools.cached_property
    def resolved(self) -> Algorithm:
        """The named algorithm, with the changes of this configuration."""
        own = {field: getattr(self, field) for field in _OF_THE_TABLE}
        changes = {field: value for field, value in own.items() if value is not None}
        if self.importance is not None:
            changes["old_logprobs"] = "recomputed"
        algorithm = dataclasses.replace(ALGORITHMS[self.name], **changes)
        known = NORMALISATIONS.get(algorithm.advantages, OWN_NORMALISATION)
        if algorithm.advantage_normalisation not in known:  # the paper has other advantages
            algorithm = dataclasses.replace(algorithm, advantage_normalisation=known[0])
        if algorithm.policy_loss == "reinforce":
            algorithm = dataclasses.replace(algorithm, clip_low=1.0, clip_high=math.inf)
        return algorithm

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def has_kl_loss(self) -> bool:
        """True if the KL is a term of the loss."""
        return self.needs_reference and not self.kl_in_reward

    def overlong_tokens(self, max_new_tokens: int) -> int:
        """Return the number of tokens before the limit over which a reward falls; 0 is off."""
        if self.overlong_buffer_tokens is not None:
            return self.overlong_buffer_tokens
        return int(self.resolved.overlong_fraction * max_new_tokens)


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """PPO's value network. The section Optimizer has the other settings of its optimizer."""

    learning_rate: float = 1e-5
    """The learning rate of the value network."""
    gamma: float = 1.0
    """The discount of later rewards."""
    gae_lambda: float = 1.0
    """Mixes one-step (0) and whole-response (1) estimates; below 1, an untrained critic (0
    everywhere) makes long responses look bad."""
    value_clip: float = 0.2
    """The change of a value since before the update is clipped at this size."""

    def __post_init__(self) -> None:
        require(
            self,
            learning_rate=rate_rule(self.learning_rate),
            gamma=(0 <= self.gamma <= 1, "in [0, 1]"),
            gae_lambda=(0 <= self.gae_lambda <= 1, "in [0, 1]"),
            value_clip=(self.value_clip > 0, "positive (1e999 is no clipping)"),
        )


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """On-policy distillation: a teacher scores each token that the policy draws.

    The advantage of a token is `task_weight` · A + `coefficient` · (log p_teacher − log p), where A
    is the advantage of `Algorithm`, and p the distribution that the token was drawn from. The
    teacher reads the same temperature, top-k and top-p, and is not trained.
    """

    teacher: str | None = None
    """The folder, or GGUF file, of a policy of any size with the same vocabulary; None is no
    distillation."""
    coefficient: float = 1.0
    """The weight of log p_teacher − log p, whose mean is the negative KL(p ‖ p_teacher)."""
    task_weight: float = 1.0
    """The weight of the advantage from rewards; 0 learns from the teacher alone."""

    def __post_init__(self) -> None:
        require(
            self,
            coefficient=(0 < self.coefficient < math.inf, "positive and finite"),
            task_weight=(0 <= self.task_weight < math.inf, "0 or positive"),
        )

    @property
    def enabled(self) -> bool:
        return self.teacher is not None

    @property
    def needs_rewards(self) -> bool:
        """True if only differences between rewards teach, or they teach too."""
        return self.task_weight > 0 or not self.enabled

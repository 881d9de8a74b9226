"""EAGLE-style drafters as users set them: shape, search, training and training data."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, Literal

from models.config import ModelConfig

Design = Literal["eagle", "eagle3"]


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """Shape of a drafter for one policy.

    `layer` is its decoder layer, a llama one whatever the policy is: serving engines read no
    other. `feature_layers` are the layers of the policy whose outputs `eagle3` joins; `eagle`
    reads the last hidden states, after the final norm, alone. `draft_vocab_size` below the
    policy's draft tokens only among the tokens of a map (`EagleWeights.draft_ids_U`). With
    `own_head` the head is trained, else it is the policy's.
    """

    design: Design
    layer: ModelConfig
    feature_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0  # 0: all of the policy's
    fc_bias: bool = False
    own_head: bool = False

    def __post_init__(self) -> None:
        if self.layer.num_layers != 1:
            raise ValueError(f"a drafter has one layer, got num_layers={self.layer.num_layers}")
        if (self.design == "eagle3") != bool(self.feature_layers):
            raise ValueError(
                "expected feature_layers for eagle3 and none for eagle, got "
                f"{self.feature_layers} for {self.design}"
            )
        if not 0 <= self.draft_vocab_size <= self.layer.vocab_size:
            raise ValueError(
                f"expected a draft_vocab_size up to the policy's {self.layer.vocab_size}, got "
                f"{self.draft_vocab_size}"
            )

    @property
    def num_draft_ids(self) -> int:
        return self.draft_vocab_size or self.layer.vocab_size

    @property
    def hidden_width(self) -> int:
        """Width of what is caught of the policy at a position: `feature_layers`, then the last."""
        return self.layer.d_model * (len(self.feature_layers) + 1)


Proposal = Literal["likeliest", "shared_noise"]


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """How an EAGLE drafter searches: `top_k` nodes a level, at most `max_depth` levels deep.

    `proposal` is `likeliest`, or `shared_noise`: the first child of a node is drawn with the noise
    of its position, as the policy will draw (docs/architecture.md, "Learned drafters").
    """

    max_depth: int = 6
    top_k: int = 4
    proposal: Proposal = "likeliest"

    def __post_init__(self) -> None:
        if self.max_depth < 1 or self.top_k < 1:
            raise ValueError(
                f"expected max_depth and top_k of at least 1, got {self.max_depth}, {self.top_k}"
            )
        if self.proposal not in (known := typing.get_args(Proposal)):
            raise ValueError(f"expected proposal of {', '.join(known)}, got {self.proposal!r}")


Objective = Literal["cross_entropy", "reverse_kl"]
Variant = Literal["eagle", "hass", "eagle3"]


@dataclasses.dataclass(frozen=True)
class LossTerms:
    """The numbers of a variant, with the source of each."""

    source: str
    feature_weight: float
    token_weight: float
    unroll_steps: int
    unroll_decay: float


VARIANTS: dict[str, LossTerms] = {
    "eagle": LossTerms("arXiv 2401.15077", 1.0, 0.1, 1, 1.0),
    # without its loss on the ten likeliest tokens alone
    "hass": LossTerms("arXiv 2408.15766", 1.0, 0.1, 3, 1.0),
    # the steps of the paper's test; the decay is of its authors' code
    "eagle3": LossTerms("arXiv 2503.01840", 0.0, 1.0, 7, 0.8),
}


@dataclasses.dataclass(frozen=True)
class DrafterTrainingConfig:
    """How a drafter learns: what from (None: as the variant's paper has it), and AdamW.

    `chunk_tokens` is the most entries whose logits are in memory at a time. The learning rate
    rises over `warmup_steps` and is constant then: training goes on for as long as the policy's.
    """

    variant: Variant = "eagle"
    objective: Objective = "cross_entropy"
    feature_weight: float | None = None
    token_weight: float | None = None
    unroll_steps: int | None = None
    unroll_decay: float | None = None
    chunk_tokens: int = 4096
    learning_rate: float = 3e-4
    warmup_steps: int = 20
    clip_norm: float = 0.5
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_choice("variant", self.variant, tuple(VARIANTS))
        _check_choice("objective", self.objective, ("cross_entropy", "reverse_kl"))
        r = self.resolved
        if self.variant == "eagle3" and r.feature_weight:
            raise ValueError(
                f"expected feature_weight 0 or None with eagle3, got {r.feature_weight}: its "
                "states are not the policy's last ones; for a feature loss take eagle or hass"
            )
        weights = r.feature_weight, r.token_weight
        if not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
            raise ValueError(
                "expected feature_weight and token_weight >= 0 and finite, not both 0, got "
                f"{r.feature_weight} and {r.token_weight}"
            )
        if r.unroll_steps < 1 or not 0 < r.unroll_decay < math.inf:
            raise ValueError(
                "expected unroll_steps >= 1 and a positive unroll_decay, got "
                f"{r.unroll_steps} and {r.unroll_decay}"
            )
        if self.chunk_tokens < 1 or self.warmup_steps < 0:
            raise ValueError(
                "expected chunk_tokens >= 1 and warmup_steps >= 0, got "
                f"{self.chunk_tokens} and {self.warmup_steps}"
            )
        if not (0 <= self.learning_rate < math.inf and 0 < self.clip_norm):
            raise ValueError(
                "expected a learning_rate of 0 or above and a positive clip_norm, got "
                f"{self.learning_rate} and {self.clip_norm}"
            )
        if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1 and self.weight_decay >= 0):
            raise ValueError(
                "expected b1 and b2 in [0, 1) and weight_decay >= 0, got "
                f"{self.b1}, {self.b2}, {self.weight_decay}"
            )

    @property
    def resolved(self) -> LossTerms:
        """The variant's numbers, with what this configuration changes of them."""
        names = ("feature_weight", "token_weight", "unroll_steps", "unroll_decay")
        given = {name: getattr(self, name) for name in names}
        changes: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
        return dataclasses.replace(VARIANTS[self.variant], **changes)

    @property
    def design(self) -> Design:
        """The drafter's architecture that the variant trains."""
        return "eagle3" if self.variant == "eagle3" else "eagle"


def _check_choice(field: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        raise ValueError(f"{field} must be one of {', '.join(names)}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class DataBufferConfig:
    """Most bytes held, share of drawn tokens from earlier steps, and how old these may be."""

    max_bytes: int = 2**30
    long_share: float = 0.5
    max_age_steps: int = 1

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_age_steps < 0:
            raise ValueError(
                "expected max_bytes >= 1 and max_age_steps >= 0, got "
                f"{self.max_bytes} and {self.max_age_steps}"
            )
        if not 0.0 <= self.long_share <= 1.0:
            raise ValueError(
                f"expected long_share, a share of tokens, between 0 and 1, got {self.long_share}"
            )

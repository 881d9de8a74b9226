"""User configuration of EAGLE-style drafters: shape, search, training and training data."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Literal

from reprise.models.config import ModelConfig
from reprise.spec.config import Proposal

Design = Literal["eagle", "eagle3"]
Variant = Literal["eagle", "hass", "eagle3"]


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """Shape of a drafter for one policy.

    `layer` is the decoder layer, in the llama layout, which is the only layout that serving engines
    read. `eagle3` joins the outputs of the policy layers `feature_layers`; `eagle` reads the last
    hidden states, after the final norm. A `draft_vocab_size` below the policy vocabulary size
    restricts drafts to the tokens of a map (`EagleWeights.draft_ids_U`). With `own_head`, the
    drafter trains a separate head; otherwise it uses the policy head.
    """

    design: Design
    layer: ModelConfig
    feature_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0  # 0: the whole policy vocabulary
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
        """Width of the hidden states per position: `feature_layers` first, then the last states."""
        return self.layer.d_model * (len(self.feature_layers) + 1)


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """Search size of an EAGLE drafter: `top_k` nodes per level, at most `max_depth` levels.

    The defaults follow tables 1 and 4 of TLT: depths of 10 and 12 perform best there. `proposal` is
    `likeliest` or `shared_noise`, which draws the first child of a node with the noise of its
    position, as the policy will draw (docs/architecture.md, "Learned drafters").
    """

    max_depth: int = 10
    top_k: int = 8
    proposal: Proposal = "likeliest"

    def __post_init__(self) -> None:
        if self.max_depth < 1 or self.top_k < 1:
            raise ValueError(
                f"expected max_depth and top_k of at least 1, got {self.max_depth}, {self.top_k}"
            )
        if self.proposal not in (known := typing.get_args(Proposal)):
            raise ValueError(f"expected proposal of {', '.join(known)}, got {self.proposal!r}")


@dataclasses.dataclass(frozen=True)
class LossTerms:
    """The loss constants of a variant, the design that it trains, and the source of both."""

    source: str
    design: Design
    feature_weight: float
    token_weight: float
    unroll_steps: int
    unroll_decay: float


VARIANTS: dict[str, LossTerms] = {
    "eagle": LossTerms("arXiv 2401.15077", "eagle", 1.0, 0.1, 1, 1.0),
    # without the additional HASS loss on the ten likeliest tokens
    "hass": LossTerms("arXiv 2408.15766", "eagle", 1.0, 0.1, 3, 1.0),
    # steps as in the training-time test of the paper, decay as in the code of its authors; no
    # feature loss, since the joined states are not the last hidden states of the policy
    "eagle3": LossTerms("arXiv 2503.01840", "eagle3", 0.0, 1.0, 7, 0.8),
}


@dataclasses.dataclass(frozen=True)
class DrafterTrainingConfig:
    """The trained variant and the AdamW learning rate.

    The learning rate stays constant after warm-up, since drafter training lasts as long as policy
    training. Products have the dtype of policy rollouts. Weights and optimizer state are float32.
    """

    variant: Variant = "eagle"
    """The design and its losses: `eagle`, `hass` or `eagle3`."""
    learning_rate: float = 3e-4
    """The learning rate after warm-up."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises."""

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}")
        if self.warmup_steps < 0:
            raise ValueError(f"expected warmup_steps >= 0, got {self.warmup_steps}")
        if not 0 <= self.learning_rate < math.inf:
            raise ValueError(f"expected a learning_rate of 0 or above, got {self.learning_rate}")

    @property
    def terms(self) -> LossTerms:
        return VARIANTS[self.variant]

    @property
    def design(self) -> Design:
        """The drafter architecture that the variant trains."""
        return self.terms.design


@dataclasses.dataclass(frozen=True)
class DataBufferConfig:
    """The hidden states, from this step and the last one, that a drafter learns from.

    They are collected for a share of the requests of a step that fits its half of `max_bytes`, if
    sequences are as long as in the previous step, or as long as possible in the first step.
    """

    max_bytes: int = 2**30
    """Host memory for hidden states."""

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ValueError(f"expected max_bytes >= 1, got {self.max_bytes}")

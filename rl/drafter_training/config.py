"""Settings of the learned drafter of a run: its shape, its search, and when it is trained."""

from __future__ import annotations

import dataclasses

from reprise.models.config import ModelConfig
from reprise.spec.config import Proposal
from reprise.spec.eagle.config import DrafterTrainingConfig, EagleConfig, TreeConfig


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A drafter that is trained online, if `Speculation.sources` has `learned`.

    Rollouts use the new weights every 16 steps and after each rollout; the weights are saved every
    64 steps.
    """

    directory: str | None = None
    """A folder to start from, as `rl.export --drafter` writes; None: random weights."""
    draft_vocab_size: int = 0
    """With random weights: draft the most frequent tokens of the prompts only; 0: all tokens."""
    max_depth: int = TreeConfig.max_depth
    """The depth of the draft tree, in levels."""
    top_k: int = TreeConfig.top_k
    """The number of nodes of each level."""
    proposal: Proposal = "likeliest"
    """`likeliest`, or `shared_noise`: the first child of a node is drawn with the noise of its
    position (`spec.eagle.drafter`)."""
    spot: bool = True
    """Train on idle workers during rollouts. A worker that gets requests finishes at most its
    current micro-batch."""
    min_idle_workers: int = 1
    """The number of idle workers at which training starts."""
    steps_after_rollout: int = 0
    """Training steps after each rollout."""
    micro_batches: int = 4
    """The number of micro-batches of a training step."""
    batch_rows: int = 2
    """The number of rows of a micro-batch."""
    row_tokens: int = 512
    """The tokens of a row."""

    def __post_init__(self) -> None:
        TreeConfig(self.max_depth, self.top_k, self.proposal)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = 0 if field.name in ("draft_vocab_size", "steps_after_rollout") else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < low:
                raise ValueError(f"{field.name} must be at least {low}, got {value}")

    @property
    def tree(self) -> TreeConfig:
        return TreeConfig(self.max_depth, self.top_k, self.proposal)


def shape_of(
    options: DrafterConfig, training: DrafterTrainingConfig, model: ModelConfig
) -> EagleConfig:
    """Return the shape of the drafter that training starts from, without reading weights.

    Raises FileNotFoundError or ValueError for a folder without a drafter of this policy.
    """
    from reprise.spec.eagle import files as eagle_files
    from reprise.spec.eagle import model as eagle

    if options.directory is None:
        return eagle.config_for(model, training.design, draft_vocab_size=options.draft_vocab_size)
    shape = eagle_files.check(options.directory, model)
    if shape.design != training.design:
        raise ValueError(
            f"{options.directory} holds a drafter of design {shape.design!r}, and "
            f"DrafterTraining.variant={training.variant!r} trains one of {training.design!r}: "
            "choose another variant"
        )
    return shape

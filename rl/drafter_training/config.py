"""Settings of the learned drafter of a run: its shape, its search, and when it is trained."""

from __future__ import annotations

import dataclasses

from reprise.models.config import ModelConfig
from reprise.spec.config import Proposal
from reprise.spec.eagle.config import DrafterTrainingConfig, EagleConfig, TreeConfig


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A drafter that is trained online, if `Speculation.sources` has `learned`.

    Training starts from the folder `directory` (as `rl.export --drafter` writes), or from random
    weights over the `draft_vocab_size` most frequent tokens of the prompts (0: over all tokens).
    The drafter searches `max_depth` levels of `top_k` nodes; `proposal` is `likeliest` or
    `shared_noise` (`spec.eagle.drafter`).

    With `spot`, idle workers train the drafter once `min_idle_workers` are idle; it also trains for
    `steps_after_rollout` steps after each rollout. A step is `micro_batches` of `batch_rows` rows
    of `row_tokens`; a worker that gets requests finishes at most its current micro-batch. Rollouts
    use the new weights every 16 steps and after each rollout; the weights are saved every 64 steps.
    """

    directory: str | None = None
    draft_vocab_size: int = 0
    max_depth: int = TreeConfig.max_depth
    top_k: int = TreeConfig.top_k
    proposal: Proposal = "likeliest"
    spot: bool = True
    min_idle_workers: int = 1
    steps_after_rollout: int = 0
    micro_batches: int = 4
    batch_rows: int = 2
    row_tokens: int = 512

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

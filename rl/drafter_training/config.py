"""The learned drafter of a run: what it is, how it drafts, and when it is trained."""

from __future__ import annotations

import dataclasses

from models.config import ModelConfig
from spec.eagle.config import DrafterTrainingConfig, EagleConfig, Proposal, TreeConfig


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A drafter that is trained online, where `Speculation.sources` has `learned`.

    It starts from the folder `directory` (`rl.export_drafter` writes such), or from random
    weights, over the `draft_vocab_size` most frequent tokens of the prompts (0: over all).
    It searches `max_depth` levels of `top_k` nodes; `proposal` is `likeliest` or `shared_noise`
    (`spec.eagle.drafter`).

    It is trained by workers that have nothing to do (`spot`) once `min_idle_workers` have not, and
    for `steps_after_rollout` steps after each rollout. A step is `micro_batches` of `batch_rows`
    rows of `row_tokens`; a worker to whom work comes finishes its micro-batch at most. Rollouts
    take the new weights up every `swap_every_steps`, and at the end of each rollout; every
    `checkpoint_every_steps` they are saved.
    """

    directory: str | None = None
    draft_vocab_size: int = 0
    max_depth: int = 6
    top_k: int = 4
    proposal: Proposal = "likeliest"
    spot: bool = True
    min_idle_workers: int = 1
    steps_after_rollout: int = 0
    micro_batches: int = 4
    batch_rows: int = 2
    row_tokens: int = 512
    swap_every_steps: int = 16
    checkpoint_every_steps: int = 64

    def __post_init__(self) -> None:
        TreeConfig(self.max_depth, self.top_k, self.proposal)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("draft_vocab_size", "steps_after_rollout") else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise ValueError(f"{field.name} must be at least {least}, got {value}")

    @property
    def tree(self) -> TreeConfig:
        return TreeConfig(self.max_depth, self.top_k, self.proposal)


def shape_of(
    options: DrafterConfig, training: DrafterTrainingConfig, model: ModelConfig
) -> EagleConfig:
    """The drafter that training starts from: its shape alone, no weights are read.

    Raises FileNotFoundError or ValueError for a folder that is none, or of another policy's.
    """
    from spec.eagle import files as eagle_files
    from spec.eagle import model as eagle

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

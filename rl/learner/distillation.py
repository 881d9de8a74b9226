"""The pass of a teacher over the tokens that the policy drew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from reprise.models.config import ModelConfig
from reprise.models.decoder.transformer import Params
from reprise.rl.batches import micro_batches
from reprise.rl.batches.micro_batches import MicroBatch, TrainSample
from reprise.rl.batches.taught import TeacherScores
from reprise.rl.learner import logprobs
from reprise.rl.learner.config import TrainSpec
from reprise.rl.records.packing import Shape


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """The frozen weights of a teacher, and the recipe of its passes, with the teacher's shape.

    The weights have the dtype of matrix products, and shardings by `optimizer.settle`.
    """

    params: Params
    recipe: TrainSpec


def teacher_recipe(recipe: TrainSpec, model: ModelConfig) -> TrainSpec:
    """Return the recipe of the passes of a teacher with this shape."""
    return dataclasses.replace(recipe, model=model)


def score(
    teacher: Teacher | None,
    samples: Sequence[TrainSample],
    shape: Shape,
    on_pass: Callable[[], None] = logprobs.unwatched,
) -> TeacherScores:
    """Return the scores of the responses of all samples. Raises ValueError without a teacher."""
    if teacher is None:
        raise ValueError(
            "Distill.teacher needs the weights of a teacher, got none: pass teacher=Teacher(…) to "
            "the learner, or leave Distill.teacher out"
        )
    packed = micro_batches.micro_batches(samples, shape)
    lengths = [sample.trajectory.num_tokens for sample in samples]
    entropies = list[jax.Array]()

    def run(batch: MicroBatch) -> jax.Array:
        logprobs_EM, entropy_EM = logprobs.token_logprobs(
            teacher.params, batch, recipe=teacher.recipe
        )
        entropies.append(entropy_EM)
        return logprobs_EM

    found = logprobs.fetched(run, packed, lengths, shape, on_pass)
    fetched = jax.device_get(entropies)
    return TeacherScores(found, micro_batches.unpacked(packed, fetched, lengths))

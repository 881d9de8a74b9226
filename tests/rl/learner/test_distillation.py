"""Scores of a teacher and updates by them, against sums by hand in float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import CHAT, make_params
from trajectories import some_trajectories

from reprise.models.config import MeshConfig
from reprise.models.decoder import transformer
from reprise.models.sharding import make_mesh, ways_in_use
from reprise.rl.batches.micro_batches import TrainSample, select
from reprise.rl.learner import distillation, trainer
from reprise.rl.learner.config import OptimizerConfig, TrainerConfig, TrainSpec
from reprise.rl.learner.distillation import Teacher, teacher_recipe
from reprise.rl.learner.optimizer import init_state, make_optimizer, settle
from reprise.rl.losses.algorithms import AlgorithmConfig, DistillConfig
from reprise.rl.records.packing import Shape
from reprise.spec.config import SamplingConfig

# another width and depth than the policy, and an embedding padded from 16 to 24 rows
LARGE = dataclasses.replace(
    CHAT, d_model=32, num_layers=2, vocab_size=24, unused_ids=((16, 24),), max_positions=64
)
RECIPE = TrainSpec(
    CHAT,
    trainer=TrainerConfig(micro_batch_tokens=128, logprob_chunk_tokens=64),
    optimizer=OptimizerConfig(learning_rate=0.02),
    distill=DistillConfig(teacher="large", task_weight=0.0),
    total_steps=100,
)
SHAPE = Shape(8, 16, 32)


def teacher(recipe=RECIPE, model=LARGE, seed=3):
    params = jax.tree.map(jnp.asarray, make_params(seed, model))
    return Teacher(settle(params), teacher_recipe(recipe, model))


def by_hand(params, model, t, temperature):
    """Log-probs of all tokens at the places of a response, float64 [n, 16], after temperature."""
    tokens = np.concatenate([t.prompt_ids, t.response_ids])
    logits = np.array(transformer.logits(model, params, tokens[None]), np.float64)[0, :, :16]
    logits = logits[len(t.prompt_ids) - 1 : -1] / temperature
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_teacher_is_scored_at_the_temperature_that_drew_the_tokens(temperature):
    one = teacher()
    drawn_at = SamplingConfig(temperature=temperature)
    samples = [TrainSample(t, 0.0, drawn_at) for t in some_trajectories()]
    scores = distillation.score(one, samples, SHAPE)
    for sample, found, entropy in zip(samples, scores.logprobs, scores.entropies, strict=True):
        t = sample.trajectory
        logprobs = by_hand(one.params, LARGE, t, temperature)
        wanted = logprobs[np.arange(t.num_tokens), t.response_ids]
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        np.testing.assert_allclose(entropy, -(np.exp(logprobs) * logprobs).sum(-1), atol=1e-5)


# --- updates ----------------------------------------------------------------------------


def learner_of(recipe=RECIPE, **more):
    shape = dataclasses.replace(SHAPE, copies=ways_in_use("copies"))
    return trainer.Learner(recipe, shape, SamplingConfig(), **more)


def fresh_state(recipe=RECIPE):
    params = transformer.init(CHAT, jax.random.key(0))
    return init_state(params, make_optimizer(recipe.optimizer, recipe.total_steps))


def on_policy(seed=0):
    """Trajectories with the log-probs of the policy of `fresh_state`."""
    some = some_trajectories(seed=seed)
    params = transformer.init(CHAT, jax.random.key(0))
    recipe = dataclasses.replace(RECIPE, distill=DistillConfig())
    found = trainer.logprobs.sample_logprobs(params, select(some, np.zeros(8)), SHAPE, recipe)
    return [
        dataclasses.replace(t, logprobs=x, emission_logprobs=x)
        for t, x in zip(some, found, strict=True)
    ]


def test_the_gradient_is_the_sum_of_advantages_of_tokens_times_scores():
    """The loss of GRPO at ratio 1 is −mean(A), by the float64 log-probs of both policies."""
    one = teacher()
    drawn = on_policy()
    _, metrics = trainer.update(fresh_state(), drawn, np.zeros(8), 0, learner_of(teacher=one))
    gaps = []
    for t in drawn:
        logprobs = by_hand(one.params, LARGE, t, 1.0)[np.arange(t.num_tokens), t.response_ids]
        gaps.append(logprobs - t.logprobs.astype(np.float64))
    mean = float(np.concatenate(gaps).mean())
    assert metrics["loss"] == pytest.approx(-mean, abs=1e-5)
    assert metrics["distill/reverse_kl"] == pytest.approx(-mean, abs=1e-5)
    assert metrics["grad_norm"] > 0 and metrics["batch/samples"] == 8


def test_a_policy_that_equals_its_teacher_does_not_move():
    same = Teacher(transformer.init(CHAT, jax.random.key(0)), RECIPE)
    _, metrics = trainer.update(
        fresh_state(), on_policy(), np.zeros(8), 0, learner_of(teacher=same)
    )
    assert metrics["distill/reverse_kl"] == metrics["loss"] == metrics["grad_norm"] == 0


def test_the_rewards_are_in_the_sum():
    """With the policy as teacher, what is left is the update of the rewards alone."""
    same = Teacher(transformer.init(CHAT, jax.random.key(0)), RECIPE)
    advantages = np.random.default_rng(0).normal(size=8).astype(np.float32)
    both = dataclasses.replace(RECIPE, distill=DistillConfig("same", task_weight=1.0))
    plain = dataclasses.replace(RECIPE, distill=DistillConfig())
    found, _ = trainer.update(
        fresh_state(), on_policy(), advantages, 0, learner_of(both, teacher=same)
    )
    wanted, _ = trainer.update(fresh_state(), on_policy(), advantages, 0, learner_of(plain))
    for ours, theirs in zip(*map(jax.tree.leaves, (found.params, wanted.params)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_missing_teacher_is_named():
    with pytest.raises(ValueError, match="Distill.teacher needs the weights of a teacher"):
        trainer.update(fresh_state(), some_trajectories(), np.zeros(8), 0, learner_of())


def test_a_mesh_gives_the_same_scores():
    samples = select(some_trajectories(), np.zeros(8))
    alone = distillation.score(teacher(), samples, SHAPE)
    with jax.set_mesh(make_mesh(MeshConfig(data=2), jax.devices()[:2])):
        shape = dataclasses.replace(SHAPE, copies=ways_in_use("copies"))
        split = distillation.score(teacher(), samples, shape)
    for ours, theirs in zip(split.logprobs, alone.logprobs, strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_an_entropy_term_flattens_the_policy():
    """Rewards teach nothing here; without the term no sample has a gradient."""
    recipe = dataclasses.replace(
        RECIPE, distill=DistillConfig(), algorithm=AlgorithmConfig(entropy_coefficient=0.5)
    )
    state = fresh_state(recipe)
    entropies = []
    for step in range(12):
        state, metrics = trainer.update(state, on_policy(), np.zeros(8), step, learner_of(recipe))
        entropies.append(metrics["batch/entropy"])
        assert metrics["grad_norm"] > 0
    assert entropies[-1] > entropies[0] + 1e-3
    plain = dataclasses.replace(recipe, algorithm=AlgorithmConfig())
    _, metrics = trainer.update(fresh_state(plain), on_policy(), np.zeros(8), 0, learner_of(plain))
    assert metrics["update/without_gradient"] == 1

"""PPO's critic: whose values where, what it learns, refusals and devices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trajectories
from jax.sharding import PartitionSpec
from shapes import CHAT

from reprise.models.config import MeshConfig
from reprise.models.decoder import transformer
from reprise.models.sharding import make_mesh, param_shardings, ways_in_use
from reprise.rl.batches import micro_batches
from reprise.rl.learner import critic, trainer
from reprise.rl.learner.config import OptimizerConfig, TrainerConfig, TrainSpec
from reprise.rl.learner.critic import Critic, value_loss
from reprise.rl.learner.optimizer import init_state, make_optimizer
from reprise.rl.losses.algorithms import AlgorithmConfig, CriticConfig
from reprise.rl.losses.losses import CriticInputs, LossInputs
from reprise.rl.records.packing import Shape
from reprise.spec.config import SamplingConfig

RECIPE = TrainSpec(
    CHAT,
    algorithm=AlgorithmConfig(name="ppo"),
    trainer=TrainerConfig(micro_batch_tokens=128, logprob_chunk_tokens=64, minibatches=2),
    optimizer=OptimizerConfig(learning_rate=0.02),
    total_steps=100,
    critic=CriticConfig(learning_rate=0.05, gamma=1.0, gae_lambda=1.0, value_clip=10.0),
)
SAMPLING = SamplingConfig()
SHAPE = Shape(8, 16, 32)


def policy():
    return transformer.init(CHAT, jax.random.key(0))


def fresh_state(recipe=RECIPE, params=None):
    params = policy() if params is None else params
    judge = critic.init(params, recipe)
    state = init_state(params, make_optimizer(recipe.optimizer, recipe.total_steps))
    return dataclasses.replace(state, critic=judge)


def some_trajectories(count=8, seed=0):
    """1 is earned by an even first token."""
    some = trajectories.some_trajectories(count, seed, min_response=2)
    return [dataclasses.replace(t, reward=float(t.response_ids[0] % 2 == 0)) for t in some]


def run(state, trajectories, *, step=0, recipe=RECIPE, shape=SHAPE):
    shape = dataclasses.replace(shape, copies=ways_in_use("copies"))
    zeros = np.zeros(len(trajectories), np.float32)
    learner = trainer.Learner(recipe, shape, SAMPLING)
    return trainer.update(state, trajectories, zeros, step, learner)


def leaves(tree):
    return [np.array(x) for x in jax.tree.leaves(tree)]


def random_critic():
    head_D = jax.random.normal(jax.random.key(1), (CHAT.d_model,))
    return Critic(dataclasses.replace(policy(), head_VD=None), head_D)


def select(trajectories):
    return micro_batches.select(trajectories, np.zeros(len(trajectories), np.float32))


def test_a_new_critic_says_zero_and_shares_no_buffer_with_the_policy():
    params = policy()
    state = critic.init(params, RECIPE)
    samples = select(some_trajectories())
    for values in critic.sample_values(state.params, samples, SHAPE, RECIPE):
        assert not values.any()
    jax.tree.map(lambda x: x.delete(), params)  # as a donation would
    assert np.isfinite(leaves(state.params.trunk)[0]).all()


def test_an_untied_policy_lends_its_trunk_without_its_head():
    model = dataclasses.replace(CHAT, tied_embeddings=False)
    state = critic.init(
        transformer.init(model, jax.random.key(0)), dataclasses.replace(RECIPE, model=model)
    )
    assert state.params.trunk.head_VD is None
    specs = jax.tree.leaves(critic.critic_specs(model))
    assert [s.shape for s in specs] == [x.shape for x in jax.tree.leaves(state.params)]


def test_values_are_taken_where_each_token_is_predicted():
    hidden = jax.jit(transformer.hidden, static_argnums=0)
    judge, samples = random_critic(), select(some_trajectories())
    packed = critic.sample_values(judge, samples, SHAPE, RECIPE)
    for sample, values in zip(samples, packed, strict=True):
        t = sample.trajectory
        tokens = np.concatenate([t.prompt_ids, t.response_ids])
        tokens_BT = np.pad(tokens, (0, 32 - len(tokens)))[None]  # one shape: nothing looks ahead
        hidden_BTD = hidden(CHAT, judge.trunk, tokens_BT)
        start = len(t.prompt_ids) - 1  # the last prompt token predicts the first of the response
        wanted = (hidden_BTD[0] @ judge.head_D)[start : start + t.num_tokens]
        np.testing.assert_allclose(values, wanted, atol=2e-5)
        assert np.std(values) > 1e-3


def test_advantages_returns_and_values_by_hand():
    """With gamma = lambda = 1 every return is the reward; advantages are whitened over all."""
    judge, samples = random_critic(), select(some_trajectories())
    values = critic.sample_values(judge, samples, SHAPE, RECIPE)
    evaluated, metrics = critic.evaluate(judge, samples, SHAPE, RECIPE)
    rewards = [s.trajectory.reward for s in samples]
    assert {0.0, 1.0} == set(rewards)
    raw = np.concatenate([r - v for r, v in zip(rewards, values, strict=True)])
    got = np.concatenate([s.token_advantages for s in evaluated])
    np.testing.assert_allclose(got, (raw - raw.mean()) / raw.std(ddof=1), atol=1e-4)
    for sample, reward, v in zip(evaluated, rewards, values, strict=True):
        np.testing.assert_allclose(sample.critic_targets.returns, reward, atol=1e-5)
        np.testing.assert_array_equal(sample.critic_targets.values, v)
    returns = np.concatenate([np.full(len(v), r) for r, v in zip(rewards, values, strict=True)])
    wanted = 1 - raw.var() / returns.var()
    assert metrics["critic/explained_variance"] == pytest.approx(wanted, rel=1e-4)


def test_a_kl_in_the_reward_is_subtracted_token_by_token():
    recipe = dataclasses.replace(
        RECIPE, algorithm=AlgorithmConfig("ppo", kl_coefficient=0.5, kl_in_reward=True)
    )
    samples = select(some_trajectories())
    samples = [
        dataclasses.replace(s, reference_logprobs=s.trajectory.logprobs - np.arange(n) / 8)
        for s, n in ((s, s.trajectory.num_tokens) for s in samples)
    ]
    evaluated, metrics = critic.evaluate(random_critic(), samples, SHAPE, recipe)
    for sample in evaluated:  # with gamma = lambda = 1 a return is the sum of what follows
        t = sample.trajectory
        kl = np.arange(t.num_tokens) / 8
        wanted = t.reward - 0.5 * np.cumsum(kl[::-1])[::-1]
        np.testing.assert_allclose(sample.critic_targets.returns, wanted, atol=1e-5)
    all_kl = np.concatenate([np.arange(s.trajectory.num_tokens) / 8 for s in samples])
    assert metrics["kl"] == pytest.approx(all_kl.mean(), rel=1e-5)


def test_without_samples_or_differences_no_variance_is_claimed():
    assert critic.evaluate(random_critic(), [], SHAPE, RECIPE) == ([], {})
    same = [dataclasses.replace(t, reward=1.0) for t in some_trajectories()]
    _, metrics = critic.evaluate(random_critic(), select(same), SHAPE, RECIPE)
    assert metrics.keys() == {"critic/return_mean"}


def test_value_loss_and_statistics_by_hand():
    mask = jnp.array([[1, 1], [1, 0]], bool)
    told = CriticInputs(jnp.array([[2.0, 2.0], [0.0, 9.0]]), jnp.array([[1.0, 1.0], [0.0, 9.0]]))
    inputs = LossInputs(mask, jnp.zeros(2), *(jnp.zeros((2, 2)),) * 5, critic=told)
    values = jnp.array([[1.2, 1.8], [1.0, jnp.nan]])  # clip 0.5: kept, cut, and moved away
    total, (statistics, finite_B, _) = jax.jit(value_loss, static_argnums=3)(
        values, inputs, np.float32(3), 0.5
    )
    assert float(total) == pytest.approx((0.32 + 0.125 + 0.5) / 3, rel=1e-5)
    assert finite_B.tolist() == [True, True]
    sums = {name: float(x) for name, x in statistics.sums.items()}
    assert sums["critic/clip_fraction"] == 1 and sums["tokens"] == 3
    assert sums["critic/value_mean"] == pytest.approx(4.0, rel=1e-6)


def test_the_critic_comes_to_foresee_what_a_response_earns():
    """Each network steps at its own rate."""
    recipe = dataclasses.replace(  # the policy stands still, so that its responses stay likely
        RECIPE, optimizer=OptimizerConfig(learning_rate=0.0), critic=RECIPE.critic
    )
    state, explained = fresh_state(recipe), []
    for step in range(26):  # with these random weights 22 are just enough
        state, metrics = run(state, some_trajectories(32, seed=step % 2), step=step, recipe=recipe)
        explained.append(metrics["critic/explained_variance"])
        assert metrics["critic/lr"] == pytest.approx(0.05) and metrics["lr"] == 0
        assert int(state.step) == 2 * (step + 1) and metrics["batch/optimizer_steps"] == 2
    assert explained[0] == 0  # zeros explain nothing
    assert np.mean(explained[-2:]) > 0.3
    jax.tree.map(np.testing.assert_array_equal, leaves(policy()), leaves(state.params))


def test_values_that_are_not_finite_stop_both_networks():
    state = fresh_state()
    bad = dataclasses.replace(state.critic.params, head_D=state.critic.params.head_D + jnp.inf)
    state = dataclasses.replace(state, critic=dataclasses.replace(state.critic, params=bad))
    before = leaves(state)
    with pytest.raises(trainer.NonFiniteUpdate, match="step 3.*not finite") as caught:
        run(state, some_trajectories(), step=3)
    assert caught.value.state is state
    jax.tree.map(np.testing.assert_array_equal, before, leaves(state))


def test_a_critic_gradient_that_overflows_is_named_as_the_critics():
    trajectories = some_trajectories()
    trajectories[2] = dataclasses.replace(trajectories[2], reward=1e30)
    state = fresh_state()
    before = leaves(state)
    with pytest.raises(trainer.NonFiniteUpdate, match="the critic's .*Critic.learning_rate"):
        run(state, trajectories)
    jax.tree.map(np.testing.assert_array_equal, before, leaves(state))


def test_a_state_without_a_critic_is_an_error():
    state = dataclasses.replace(fresh_state(), critic=None)
    with pytest.raises(ValueError, match="ppo needs a critic"):
        run(state, some_trajectories())


def test_eight_devices_give_what_one_gives():
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    batch = some_trajectories()
    one, wanted = run(fresh_state(), batch)
    one, wanted = run(one, batch, step=1)
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2), jax.devices()[:8])
    with jax.set_mesh(mesh):
        shardings = param_shardings(mesh, transformer.param_specs(CHAT))
        state = fresh_state(params=jax.device_put(policy(), shardings))
        layout = jax.tree.map(lambda x: x.sharding, state)
        state, _ = run(state, batch)
        assert jax.tree.map(lambda x: x.sharding, state) == layout
        state, got = run(state, batch, step=1)
    assert layout.critic.params.trunk.layers[0].query_QD.spec == PartitionSpec("tensor", "fsdp")
    for name in ("loss", "critic/value_loss", "critic/explained_variance"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-4)
    for a, b in zip(leaves(one), leaves(state), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-4)

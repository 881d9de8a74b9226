"""Shapes of the training state, on which steps are lowered as on the state itself."""

import dataclasses

import jax
import pytest
from shapes import ODD

from reprise.models.config import MeshConfig
from reprise.models.decoder import transformer
from reprise.models.sharding import fitting_sharding, make_mesh
from reprise.rl.batches import micro_batches
from reprise.rl.learner import critic, gradient_accumulation, logprobs, trainer
from reprise.rl.learner.config import OptimizerConfig, TrainerConfig, TrainSpec
from reprise.rl.learner.optimizer import init_state, make_optimizer, state_shapes
from reprise.rl.losses.algorithms import AlgorithmConfig
from reprise.spec.config import SamplingConfig

RECIPE = TrainSpec(
    ODD,
    AlgorithmConfig("ppo", kl_coefficient=0.1),
    trainer=TrainerConfig(inner_updates=2, micro_batch_tokens=64),
    optimizer=OptimizerConfig(weight_decay=0.1),
)


def both_states():
    """The state with its critic, and its shapes, under the mesh in use."""
    optimizer, specs = make_optimizer(RECIPE.optimizer, 1), transformer.param_specs(ODD)
    params, mesh = transformer.init(ODD, jax.random.key(0)), jax.sharding.get_mesh()
    if not mesh.empty:
        places = jax.tree.map(lambda s: fitting_sharding(mesh, s.shape, s.axes), specs)
        params = jax.tree.map(jax.device_put, params, places)
    state = init_state(params, optimizer)
    state = dataclasses.replace(state, critic=critic.init(state.params, RECIPE))
    shapes = dataclasses.replace(state_shapes(specs, optimizer), critic=critic.shapes(RECIPE))
    return state, shapes


@pytest.mark.parametrize("sizes", [pytest.param(None, marks=pytest.mark.soak), (2, 2, 1)])
def test_steps_of_shapes_are_those_of_the_state(sizes):
    if sizes is None:
        return judge(num_each=4)
    with jax.set_mesh(make_mesh(MeshConfig(*sizes), jax.devices()[:4])):
        return judge(num_each=5)  # and the sum over copies


def judge(num_each):
    state, shapes = both_states()
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    shape = trainer.batch_shape(RECIPE, 48)
    batch, static = micro_batches.empty(shape), {"network": trainer.POLICY, "recipe": RECIPE}
    pairs = (
        (state, shapes),
        (gradient_accumulation.start(**static), gradient_accumulation.empty_shapes(**static)),
        (logprobs.place(batch), logprobs.placed_shapes(batch)),
    )
    for array, bare in pairs:
        for x, y in zip(jax.tree.leaves(array), jax.tree.leaves(bare), strict=True):
            assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)
            # spelt as jit spells it, else calls do not find what was compiled
            assert y.sharding is None or x.sharding == y.sharding
    learner = trainer.Learner(RECIPE, shape, SamplingConfig())
    found, wanted = (trainer.lowered(s, learner) for s in (shapes, state))
    assert [x.as_text() for x in found] == [x.as_text() for x in wanted]
    assert len(found) == 2 * num_each + 2  # of each network, and to score under it

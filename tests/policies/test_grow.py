"""Grown policies: logits of the small one, gradients that differ between copies."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from policies.make import grow
from reprise.models.config import ModelConfig, num_params
from reprise.models.decoder import transformer
from reprise.rl.gin.loader import load
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_policy
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.model import EagleWeights
from reprise.spec.eagle_training.training import unrolled_outputs
from reprise.spec.eagle_training.training_data import DrafterBatch

QWEN3 = ModelConfig("qwen3", 50, 32, 2, 4, 2, 8, 48, qk_norm=True, tied_embeddings=True)
QWEN2 = dataclasses.replace(QWEN3, architecture="qwen2", qk_norm=False, qkv_bias=True)
TOKENS = jax.random.randint(jax.random.key(2), (2, 12), 0, 50)
LOGITS = jax.jit(transformer.logits, static_argnums=0)
STEPS = 2  # of the unroll: outputs are read as features


@pytest.mark.parametrize("model", [QWEN3, dataclasses.replace(QWEN2, tied_embeddings=False)])
def test_a_grown_policy_has_the_same_logits_and_other_gradients(model):
    params = transformer.init(model, jax.random.key(0))
    larger = grow.grown(model, params, 3, 4, jax.random.key(1))
    shape = grow.grown_config(model, 3, 4)
    assert num_params(shape) == sum(x.size for x in jax.tree.leaves(larger))
    expected = LOGITS(model, params, TOKENS)
    np.testing.assert_allclose(LOGITS(shape, larger, TOKENS), expected, atol=2e-5)
    loss = lambda p: transformer.logits(shape, p, TOKENS)[..., 3].sum()  # noqa: E731
    grads = jax.jit(jax.grad(loss))(larger).layers[0].gate_FD.reshape(3, 48, 96)
    assert not np.allclose(grads[0], grads[1], rtol=1e-2)
    with pytest.raises(ValueError, match="at least 2 layers, got 1"):
        grow.grown(model, params, 3, 1, jax.random.key(1))


def test_a_policy_with_wider_heads_has_the_same_logits():
    params = transformer.init(QWEN3, jax.random.key(0))
    wider, larger = grow.with_wider_heads(QWEN3, params, 2)
    assert wider.head_dim == 16 and num_params(wider) == sum(
        x.size for x in jax.tree.leaves(larger)
    )
    expected = LOGITS(QWEN3, params, TOKENS)
    np.testing.assert_allclose(LOGITS(wider, larger, TOKENS), expected, atol=1e-4)
    with pytest.raises(ValueError, match="no biases"):
        grow.with_wider_heads(QWEN2, transformer.init(QWEN2, jax.random.key(0)), 2)
    planted = dataclasses.replace(larger.layers[0], key_norm_h=2 * larger.layers[0].key_norm_h)
    other = dataclasses.replace(larger, layers=(planted, *larger.layers[1:]))
    assert not np.allclose(LOGITS(wider, other, TOKENS), expected, atol=1e-4)


@pytest.mark.parametrize("model", [QWEN3, dataclasses.replace(QWEN2, tied_embeddings=False)])
def test_further_ids_change_no_logit_of_the_others(model):
    params = transformer.init(model, jax.random.key(0))
    larger, padded = grow.with_more_ids(model, params, 64)
    assert num_params(larger) == sum(x.size for x in jax.tree.leaves(padded))
    logits = LOGITS(larger, padded, TOKENS)
    np.testing.assert_array_equal(logits[..., :50], LOGITS(model, params, TOKENS))
    assert not logits[..., 50:].any()
    with pytest.raises(ValueError, match="at least 50 ids, got 49"):
        grow.with_more_ids(model, params, 49)


def test_a_folder_grows_with_ids_that_are_never_drawn(tmp_path):
    tiny = Path(__file__).parents[2] / "policies" / "countdown"
    shape = grow.grow(tiny, tmp_path / "grown", width=1, num_layers=5, vocab_size=128)
    config = load(TrainConfig, [], [f"Policy.directory='{tmp_path / 'grown'}'"])
    _, model, _ = open_policy(config.policy.directory, config.task)
    assert (model.num_layers, model.vocab_size) == (shape.num_layers, 128) == (5, 128)
    assert model.unused_ids[-1] == (99, 128)


def draft_logits(
    model: ModelConfig, params: transformer.Params, drafter: EagleWeights
) -> jax.Array:
    """Logits of a drafter after each token, at each step of an unroll, [J, B, T, V]."""

    @jax.jit
    def of(params: transformer.Params, weights: eagle.EagleParams) -> jax.Array:
        rows_BT = jax.numpy.zeros_like(TOKENS)
        position_BT = rows_BT + jax.numpy.arange(TOKENS.shape[1])
        hidden_BTD = transformer.hidden(model, params, TOKENS)
        batch = DrafterBatch(TOKENS, hidden_BTD, position_BT, rows_BT + 1, rows_BT == 0)
        shared = eagle.frozen(params, None)
        out_JBTD = unrolled_outputs(drafter.config, weights, shared.embedding_VD, batch, STEPS)
        return eagle.logits(drafter.config, weights, shared.head_UD, out_JBTD)

    return of(params, drafter.params)


def narrow_drafter(model: ModelConfig, design: str = "eagle") -> EagleWeights:
    shape = eagle.config_for(model, design)
    shape = dataclasses.replace(shape, layer=dataclasses.replace(shape.layer, d_ff=24))
    return EagleWeights(shape, eagle.init(shape, jax.random.key(3)))


@pytest.mark.parametrize("model", [QWEN3, dataclasses.replace(QWEN2, tied_embeddings=False)])
def test_a_grown_drafter_has_the_same_logits_as_wide_as_the_policy_and_no_wider_inside(model):
    params, drafter = transformer.init(model, jax.random.key(0)), narrow_drafter(model)
    policy = grow.grown(model, params, 3, 4, jax.random.key(1))
    shape, larger = grow.grown_config(model, 3, 4), grow.grown_drafter(drafter, 3)
    layer = larger.config.layer
    assert (layer.d_model, layer.num_heads, layer.d_ff) == (96, 4, 24)
    expected = draft_logits(model, params, drafter)
    np.testing.assert_allclose(draft_logits(shape, policy, larger), expected, atol=2e-4)
    assert float(np.abs(expected[0] - expected[1]).max()) > 0.01
    planted = dataclasses.replace(larger.params, fc_DE=larger.params.fc_DE.at[:, 96:].mul(1.1))
    other = dataclasses.replace(larger, params=planted)
    assert not np.allclose(draft_logits(shape, policy, other), expected, atol=1e-3)


def test_a_drafter_of_another_design_cannot_grow():
    with pytest.raises(ValueError, match="design eagle without a head .* got eagle3"):
        grow.grown_drafter(narrow_drafter(QWEN3, "eagle3"), 2)

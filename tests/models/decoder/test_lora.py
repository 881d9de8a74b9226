"""Low-rank adapters: the passes of merged weights, gradients of A and B, what a head's does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import CHAT, ODD, TINY

from reprise.models.config import (
    LORA_TARGETS,
    Adapted,
    LoraShape,
    LowRank,
    lora_specs,
    param_specs,
    trained_specs,
    with_adapters,
)
from reprise.models.decoder import lora, transformer
from reprise.models.decoder.layers import dense

ALL = tuple(LORA_TARGETS)
TOKENS_BT = np.random.default_rng(0).integers(0, 15, (2, 9)).astype(np.int32)


def adapted(config, rank=2, alpha=6.0, targets=ALL):
    return dataclasses.replace(config, lora=LoraShape(rank, alpha, targets))


def noise(specs, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda spec: rng.normal(0, 0.3, spec.shape).astype(np.float32), specs)


def policy(config, seed=0):
    """Return frozen weights, an adapter whose B is not 0, and both together."""
    base = noise(param_specs(dataclasses.replace(config, lora=None)), seed)
    adapter = noise(lora_specs(config), seed + 1)
    return base, adapter, with_adapters(base, adapter, config.lora)


@pytest.mark.parametrize("config", [TINY, ODD, CHAT], ids=lambda c: c.architecture)
@pytest.mark.parametrize("targets", [ALL, ("attention",), ("mlp",), ("head",)])
def test_logits_are_those_of_merged_weights(config, targets):
    config = adapted(config, targets=targets)
    base, _, params = policy(config)
    merged_config, merged = lora.merge(config, params)
    found = transformer.logits(config, params, TOKENS_BT)
    wanted = transformer.logits(merged_config, merged, TOKENS_BT)
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    plain = transformer.logits(dataclasses.replace(config, lora=None), base, TOKENS_BT)
    assert np.abs(np.asarray(found - plain)).max() > 0.1  # the adapter matters


@pytest.mark.parametrize("config", [TINY, ODD, CHAT], ids=lambda c: c.architecture)
def test_each_row_has_the_adapter_of_its_place(config):
    """Logits of a batch whose rows have different adapters, one of them none, are each's alone."""
    config = adapted(config)
    base, first, _ = policy(config)
    second = noise(lora_specs(config), 7)
    wide = lora.with_places(config, 4)
    places = lora.no_adapters(wide, jnp.float32)
    for place, adapter in ((1, first), (3, second)):
        places = lora.put_adapter(places, adapter, jnp.int32(place))
    params, tokens_BT = with_adapters(base, places, wide.lora), np.tile(TOKENS_BT[:1], (4, 1))
    chosen = [3, 2, 1, 3]
    found = transformer.logits(wide, lora.for_rows(wide, params, jnp.array(chosen)), tokens_BT)
    alone = {
        1: with_adapters(base, first, config.lora),
        3: with_adapters(base, second, config.lora),
    }
    plain = dataclasses.replace(config, lora=None)
    for row, place in enumerate(chosen):
        own = (config, alone[place]) if place in alone else (plain, base)
        wanted = transformer.logits(*own, TOKENS_BT[:1])[0]
        np.testing.assert_allclose(found[row], wanted, atol=2e-4)
    assert lora.for_rows(config, params, jnp.array(chosen)) is params


@pytest.mark.parametrize(
    ("part", "dtype"),
    [("down_RI", "float32"), ("up_OR", "float32"), ("one number of up_OR", "bfloat16")],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_an_adapter_next_door_changes_no_bit_whatever_it_holds(bad, part, dtype):
    """NaN times 0 is NaN: rows of a good adapter have the bits they have beside a harmless one."""
    config = adapted(TINY)
    base, good, _ = policy(config)
    base = jax.tree.map(lambda x: x.astype(dtype), base)
    wide = lora.with_places(config, 2)

    def broken(low):
        name, only_one = part.split()[-1], part.startswith("one")
        array = np.array(getattr(low, name))
        array[(-1, -1) if only_one else ...] = bad
        return dataclasses.replace(low, **{name: array})

    def logits(other):
        places = lora.no_adapters(wide, dtype)
        for place, adapter in ((1, other), (0, good)):
            places = lora.put_adapter(places, adapter, jnp.int32(place))
        params = with_adapters(base, places, wide.lora)
        tokens_BT = np.tile(TOKENS_BT[:1], (3, 1))
        rows = lora.for_rows(wide, params, jnp.array([0, 1, 0]))
        return np.asarray(transformer.logits(wide, rows, tokens_BT))

    harmless = noise(lora_specs(config), 7)
    is_low = {"is_leaf": lambda x: isinstance(x, LowRank)}
    wanted, found = logits(harmless), logits(jax.tree.map(broken, harmless, **is_low))
    np.testing.assert_array_equal(found[[0, 2]], wanted[[0, 2]])
    if bad != 3e38:  # its own row shows it
        assert not np.isfinite(found[1]).any()


def test_one_weight_by_hand():
    weight_OI, up_OR, down_RI = np.eye(2, 3), np.array([[1.0], [2.0]]), np.array([[1.0, 0.0, -1.0]])
    low = LowRank(jnp.float32(down_RI), jnp.float32(up_OR))
    one = Adapted(jnp.float32(weight_OI), low, scale=3.0)
    np.testing.assert_array_equal(dense(one), [[4, 0, -3], [6, 1, -6]])


def test_a_new_adapter_changes_nothing_and_has_peft_s_width():
    config = adapted(TINY, rank=32)
    base, _, _ = policy(config)
    adapter = lora.init(config, jax.random.key(0))
    params = with_adapters(base, adapter, config.lora)
    plain = transformer.logits(TINY, base, TOKENS_BT)
    np.testing.assert_allclose(transformer.logits(config, params, TOKENS_BT), plain, atol=1e-6)
    down_RI = np.concatenate([np.ravel(layer.down_DF.down_RI) for layer in adapter.layers])
    assert abs(down_RI.std() * (3 * TINY.d_ff) ** 0.5 - 1) < 0.15  # 512 numbers: four sigma


@pytest.mark.parametrize("config", [TINY, ODD], ids=lambda c: c.architecture)
def test_gradients_follow_from_those_of_the_merged_weights(config):
    config = adapted(config)
    base, adapter, params = policy(config)

    def loss(logits_BTV):
        return jnp.sum(jnp.sin(logits_BTV))

    def of_adapter(adapter):
        together = with_adapters(base, adapter, config.lora)
        return loss(transformer.logits(config, together, TOKENS_BT))

    merged_config, merged = lora.merge(config, params)
    by_weight = jax.grad(lambda p: loss(transformer.logits(merged_config, p, TOKENS_BT)))(merged)
    found = jax.grad(of_adapter)(adapter)
    for name in (*LORA_TARGETS["attention"], *LORA_TARGETS["mlp"]):
        for layer, own, whole in zip(found.layers, adapter.layers, by_weight.layers, strict=True):
            expect(getattr(layer, name), getattr(own, name), getattr(whole, name))
    expect(found.head_VD, adapter.head_VD, by_weight.head_VD)


def expect(found, low, dweight_OI, scale=3.0):
    """dA = scale · Bᵀ · dW, dB = scale · dW · Aᵀ."""
    wanted = scale * low.up_OR.T @ dweight_OI, scale * dweight_OI @ low.down_RI.T
    for got, want in zip((found.down_RI, found.up_OR), wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-3 * np.abs(want).max())


def test_the_trained_weights_are_the_adapter():
    config = adapted(ODD, targets=("attention", "head"))
    _, adapter, params = policy(config)
    jax.tree.map(np.testing.assert_array_equal, lora.trained_part(params), adapter)
    assert jax.tree.structure(trained_specs(config)) == jax.tree.structure(adapter)
    assert jax.tree.structure(param_specs(config)) == jax.tree.structure(params)
    base = noise(param_specs(ODD), 0)
    assert lora.trained_part(base) is base
    assert trained_specs(ODD) == param_specs(ODD)


@pytest.mark.parametrize(
    "values", [(0, 1.0, ALL), (2, 0.0, ALL), (2, 1.0, ()), (2, 1.0, ("experts",))]
)
def test_shapes_that_do_not_fit_are_refused(values):
    with pytest.raises(ValueError, match="expected a LoRA rank of at least 1"):
        LoraShape(*values)

"""What is computed again changes no gradient, and what is kept is what the name says."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from reprise.models.config import MeshConfig, ModelConfig
from reprise.models.decoder import training, transformer
from reprise.models.kernels.cpu import products_cpu
from reprise.models.layout import layers_per_input
from reprise.models.sharding import make_mesh

L, B, T = 5, 2, 24
MODEL = ModelConfig("qwen2", 32, 16, L, 4, 2, 8, 48, qkv_bias=True, tied_embeddings=True)
NAMES = ["none", "dots", "layer", "layer:1", "layer:2", "layer:5", "layer:9"]


@pytest.fixture(scope="module")
def given():
    params = transformer.init(MODEL, jax.random.key(0))
    return params, jax.random.randint(jax.random.key(1), (B, T), 0, 32)


@jax.jit(static_argnames="name")
@jax.value_and_grad
def found(params, tokens, *, name):
    return jnp.mean(transformer.hidden(MODEL, params, tokens, remat=name) ** 3)


@pytest.mark.parametrize("name", ["dots", "layer:2", "layer:9"])
def test_values_and_gradients_are_the_same(given, name):
    for one, other in zip(
        jax.tree.leaves(found(*given, name=name)),
        jax.tree.leaves(found(*given, name="none")),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "kept"), [("layer", 5), ("layer:2", 3), ("layer:5", 1)])
def test_only_inputs_are_kept(capsys, given, name, kept):
    params, tokens = given
    print_saved_residuals(lambda p: transformer.hidden(MODEL, p, tokens, remat=name), params)
    wide = [line for line in capsys.readouterr().out.splitlines() if f"[{B},{T},16]" in line]
    assert len(wide) == kept + 2, wide  # the last norm keeps two


def test_products_with_weights_are_kept_and_no_scores(capsys, given, monkeypatch):
    monkeypatch.setattr(transformer, "is_faster", lambda *_: False)  # a CPU's kernel has none
    params, tokens = given
    kept = {}
    for name in ("none", "dots"):
        print_saved_residuals(
            lambda p, name=name: transformer.hidden(MODEL, p, tokens, remat=name), params
        )
        kept[name] = capsys.readouterr().out
    scores = f"[{B},2,{2 * T},{T}]"
    assert scores in kept["none"] and scores not in kept["dots"]
    assert kept["dots"].count(f"[{B},{T},48]") >= L


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a kernel of CPUs")
def test_products_of_a_cpus_kernel_are_kept(given):
    calls = {}
    for name in ("none", "dots", "layer"):
        program = found.lower(*given, name=name).compile().as_text()
        calls[name] = program.count(f'custom_call_target="{products_cpu.NAME}"')
    assert 0 < calls["none"] == calls["dots"] < calls["layer"]


def test_what_is_kept_is_split_over_tensor(given):
    """And gathered again for the layer: gradients are the same."""
    params, tokens = given
    wanted = jax.tree.leaves(found(params, tokens, name="none"))
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=2), jax.devices()[:2])
    with jax.set_mesh(mesh):
        step = jax.jit(lambda p, t: found.__wrapped__(p, t, name="layer"))
        hidden = partial(transformer.hidden, MODEL, tokens_BT=tokens, remat="layer")
        jaxpr = jax.make_jaxpr(hidden)(params)
        got = jax.tree.leaves(step(params, tokens))
    pins = [e.params["sharding"].spec for e in jaxpr.eqns if "constraint" in e.primitive.name]
    assert sum("tensor" in spec for spec in pins) == L
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_names():
    assert [layers_per_input(name) for name in NAMES] == [0, 0, 1, 1, 2, 5, 9]
    for name in ("layers", "layer:", "layer:0", "layer:x", "pairs", ""):
        with pytest.raises(ValueError, match=r"expected 'none', 'dots', 'layer' or 'layer:N'"):
            layers_per_input(name)
    assert all(f"| {name} |" in training.__doc__ for name in ("none", "dots", "layer", "layer:N"))


def test_gradients_are_added_to_totals_as_they_come(given):
    params, tokens = given
    totals = jax.tree.map(lambda x: jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape), params)
    marks = jax.tree.map(lambda _: jnp.float32(0), params)

    @jax.jit
    def added(params, totals, tokens):
        def loss(params, marks):
            params = training.adding(params, totals, marks)
            return jnp.mean(transformer.hidden(MODEL, params, tokens, remat="layer:2") ** 3)

        return jax.grad(loss, argnums=(0, 1))(params, marks)

    total, not_finite = added(params, totals, tokens)
    wanted = jax.tree.map(jnp.add, totals, found(params, tokens, name="none")[1])
    for one, other in zip(jax.tree.leaves(total), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert sum(map(float, jax.tree.leaves(not_finite))) == 0
    # what is not finite of a gradient is counted, what a total had is not
    infinite = jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), totals)
    assert sum(map(float, jax.tree.leaves(added(params, infinite, tokens)[1]))) == 0
    layers = list(params.layers)
    layers[1] = dataclasses.replace(layers[1], down_DF=layers[1].down_DF.at[0, 0].set(jnp.nan))
    broken = dataclasses.replace(params, layers=tuple(layers))
    _, not_finite = added(broken, totals, tokens)
    assert float(not_finite.layers[1].down_DF) > 0 and float(not_finite.embedding_VD) > 0

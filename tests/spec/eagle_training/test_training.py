"""Training of drafters: loss, gradients, steps and settings."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafters_by_hand import as_float64, drafter, hidden_states, packed, written_out_loss
from jax.sharding import NamedSharding, PartitionSpec

from reprise.models.config import MeshConfig
from reprise.models.decoder import layers
from reprise.models.layout import RULES
from reprise.models.sharding import make_mesh, param_shardings
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import VARIANTS, DrafterTrainingConfig, Variant
from reprise.spec.eagle_training import training as training_module
from reprise.spec.eagle_training.training import apply, gradients, state_of
from reprise.spec.eagle_training.training_data import pack

ONE = np.float32(1)
# eagle3 with three steps of its seven, each of which costs a compilation; hass with a token loss
# of the feature loss's weight
VARIANTS["short_eagle3"] = dataclasses.replace(VARIANTS["eagle3"], unroll_steps=3)
VARIANTS["heavy_hass"] = dataclasses.replace(VARIANTS["hass"], token_weight=1.0)


def step(state, frozen, batch, temperature, *, config, training):
    """One update by one batch."""
    options = {"config": config, "training": training}
    grads, metrics = gradients(state.params, frozen, batch, temperature, **options)
    state, skipped = apply(state, grads, training=training)
    return state, metrics | {"skipped": skipped}


def leaves(tree):
    return [np.array(x) for x in jax.tree.leaves(tree)]


def bits(tree):
    return [x.tobytes() for x in leaves(tree)]


def some_sequences(config, prompt_tokens=1):
    return [hidden_states(config, n, prompt_tokens) for n in (9, 6, 11, 8)]


def some_batch(config, prompt_tokens=1):
    first, second, third, fourth = some_sequences(config, prompt_tokens)
    return packed([[first, second], [third], [fourth], []], 16)


# against drafting, in float64

# Drafters of these settings share their programs.
SETTINGS = {
    "heavy_hass": {"fc_bias": True},
    "short_eagle3": {"draft_vocab_size": 6, "own_head": True, "fc_bias": True},
}
both = pytest.mark.parametrize("variant", SETTINGS)


@pytest.fixture(autouse=True)
def few_logits(monkeypatch):
    """Batches take several chunks."""
    monkeypatch.setattr(training_module, "CHUNK_TOKENS", 9)


def made(variant):
    training = DrafterTrainingConfig(variant)
    return training, *drafter(training.design, **SETTINGS[variant])


@both
def test_loss_and_gradient_are_those_of_drafting(variant):
    """The slope along a random direction against the reference's difference quotient."""
    training, config, params, frozen = made(variant)
    batch, temperature = some_batch(config, prompt_tokens=3), np.float32(1.3)
    slope, metrics = gradients(params, frozen, batch, temperature, config=config, training=training)
    assert all(np.abs(x).max() > 1e-5 for x in leaves(slope))

    exact, exact_frozen = as_float64(params), as_float64(frozen)
    rng = np.random.default_rng(0)
    towards = jax.tree.map(lambda x: rng.normal(size=x.shape) / np.sqrt(x.size), exact)

    def reference(step):
        moved = jax.tree.map(lambda x, d: x + step * d, exact, towards)
        sequences = some_sequences(config, prompt_tokens=3)
        return written_out_loss(config, training, moved, exact_frozen, sequences, 1.3)

    assert float(metrics["loss"]) == pytest.approx(reference(0.0), rel=1e-5)
    along = sum(
        np.sum(np.asarray(g, np.float64) * d)
        for g, d in zip(jax.tree.leaves(slope), jax.tree.leaves(towards), strict=True)
    )
    wanted = (reference(1e-4) - reference(-1e-4)) / 2e-4
    assert abs(wanted) > 1e-2
    assert along == pytest.approx(wanted, rel=1e-3, abs=1e-4)


@both
def test_products_are_in_the_dtype_of_rollouts_and_gradients_in_float32(variant):
    training, config, params, frozen = made(variant)
    frozen = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x, frozen
    )
    batch = some_batch(config, prompt_tokens=3)
    args, static = (params, frozen, batch, ONE), {"config": config, "training": training}
    text = gradients.lower(*args, **static).as_text()
    # a row of ones times a matrix is no product of the policy: it sums a norm's gradient
    of_matrices = r"dot_general.*: \(tensor<(?!1x\d+xf32>)[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\)"
    pairs = re.findall(of_matrices, text)
    rounded = sum(pair == ("bf16", "bf16") for pair in pairs)
    # all but scalars and each entry's own score
    assert len(pairs) > 100 and 0.7 * len(pairs) < rounded < len(pairs)
    grads, _ = jax.eval_shape(partial(gradients, **static), *args)
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"float32"}


@pytest.mark.parametrize("prompt_tokens", [1, 4])
def test_entries_that_do_not_count_change_nothing(prompt_tokens):
    """States behind the last that counts, padding, tokens behind the end of a sequence."""
    config, params, frozen = drafter("eagle")
    batch = some_batch(config, prompt_tokens)
    junk = dataclasses.replace(
        batch,
        tokens_BT=np.where(batch.sequence_BT == 0, 7, batch.tokens_BT),
        hidden_BTW=np.where((batch.sequence_BT == 0)[..., None], 9.0, batch.hidden_BTW),
    )
    settings = {"config": config, "training": DrafterTrainingConfig("hass")}
    slope, metrics = gradients(params, frozen, batch, ONE, **settings)
    other, found = gradients(params, frozen, junk, ONE, **settings)
    # of a sequence of n tokens: those that draft tokens 2 … n − 1, and of the response
    assert metrics["num_entries"] == sum(n - max(prompt_tokens, 2) for n in (9, 6, 11, 8))
    for a, b in zip(leaves((slope, metrics)), leaves((other, found)), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-6)


def test_windows_learn_nothing_from_their_neighbours():
    """By gradient, a sequence's entries depend on no state of another one in the row.

    A long response is cut in two windows; the second, which begins in mid-response, shares a
    row with a short response, and comes first in a row of its own kind too.
    """
    config, params, frozen = drafter("eagle")
    long, short_one = hidden_states(config, 30, 4), hidden_states(config, 10, 4)
    batches = pack([long, short_one], 1, 26)
    one = next(b for b in batches if len(set(b.sequence_BT[0].tolist()) - {0}) == 2)
    turned = jax.tree.map(lambda x: np.roll(x, -10, axis=1), one)  # the window at column 0
    assert turned.positions_BT[0, 0] > 0 and turned.counts_BT[0, 0]

    @jax.jit
    def slope(hidden_BTW, batch):
        batch = dataclasses.replace(batch, hidden_BTW=hidden_BTW)
        loss = partial(training_module.loss, config, DrafterTrainingConfig("hass"), params, frozen)
        return loss(batch, ONE)[0]

    for batch in (one, turned):
        sequence_T = batch.sequence_BT[0]
        for mine in (1, 2):
            counts_BT = batch.counts_BT & (batch.sequence_BT == mine)
            only = dataclasses.replace(batch, counts_BT=counts_BT)
            slope_TW = np.asarray(jax.grad(slope)(jnp.asarray(batch.hidden_BTW), only))[0]
            assert np.abs(slope_TW[sequence_T == mine]).max() > 1e-3
            assert not slope_TW[sequence_T != mine].any()


def test_a_batch_without_entries_gives_zeros():
    config, params, frozen = drafter("eagle")
    batch = some_batch(config)
    batch = dataclasses.replace(batch, counts_BT=np.zeros_like(batch.counts_BT))
    settings = {"config": config, "training": DrafterTrainingConfig("hass")}
    slope, metrics = gradients(params, frozen, batch, ONE, **settings)
    assert not any(x.any() for x in leaves((slope, metrics)))


def test_members_gradients_average_to_those_of_all(monkeypatch):
    """Weighted by `num_entries`, where prompts are longer than the unroll."""
    # a CPU's product of few rows sums in orders that depend on their number
    monkeypatch.setattr(layers, "FEW_ROWS", 0)
    config, params, frozen = drafter("eagle3")
    training = DrafterTrainingConfig("short_eagle3")
    run = partial(gradients, params, frozen, config=config, training=training)
    batch = some_batch(config, prompt_tokens=4)
    whole, metrics = run(batch, ONE)
    parts = [run(jax.tree.map(lambda x, i=i: x[i : i + 2], batch), ONE) for i in (0, 2)]
    shares = [float(m["num_entries"] / metrics["num_entries"]) for _, m in parts]
    assert sum(shares) == pytest.approx(1) and shares[0] != 0.5
    mean = jax.tree.map(lambda a, b: shares[0] * a + shares[1] * b, parts[0][0], parts[1][0])
    for a, b in zip(leaves(mean), leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)
    loss = sum(share * m["loss"] for share, (_, m) in zip(shares, parts, strict=True))
    assert float(loss) == pytest.approx(float(metrics["loss"]), rel=1e-5)


# steps


@both
def test_training_lowers_the_loss(variant):
    training, config, params, frozen = made(variant)
    faster = dataclasses.replace(training, learning_rate=0.02, warmup_steps=5)
    options = {"config": config, "training": training}  # whose programs other tests have compiled
    state, batch, losses = state_of(faster, params), some_batch(config), []
    for _ in range(60):
        grads, metrics = gradients(state.params, frozen, batch, ONE, **options)
        state, skipped = apply(state, grads, training=faster)
        assert skipped == 0
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.75 * losses[0]
    assert int(state.step) == 60


def test_the_update_by_hand():
    """Adam's first step is the rate times the sign; the rate rises over four steps."""
    training = DrafterTrainingConfig(learning_rate=0.1, warmup_steps=4)
    _, params, _ = drafter("eagle3")
    grads = jax.tree.map(lambda x: jnp.where(x > 0, 3.0, -5.0), params)
    before = leaves(params)
    state, skipped = apply(state_of(training, params), grads, training=training)
    assert int(state.step) == 1 and int(skipped) == 0
    for old, new in zip(before, leaves(state.params), strict=True):
        wanted = old - 0.1 / 4 * np.where(old > 0, 1, -1)
        np.testing.assert_allclose(new, wanted, rtol=1e-4, atol=1e-6)


def test_gradients_are_clipped_by_their_norm():
    """Adam's first moment after a step is (1 − b1) times the clipped gradient."""
    training = DrafterTrainingConfig()
    _, params, _ = drafter("eagle")
    grads = jax.tree.map(jnp.ones_like, params)
    norm = math.sqrt(sum(x.size for x in leaves(grads)))
    state, _ = apply(state_of(training, params), grads, training=training)
    moments = [x for x in leaves(state.optimizer) if x.ndim == 2 and x.max() > 1e-3]
    assert moments
    for x in moments:
        np.testing.assert_allclose(x, 0.1 * 0.5 / norm, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_step_that_is_not_finite_is_skipped(bad):
    training = DrafterTrainingConfig("hass")
    config, params, frozen = drafter("eagle")
    settings, batch = {"config": config, "training": training}, some_batch(config)
    state = state_of(training, params)
    state, _ = step(state, frozen, batch, ONE, **settings)
    before = bits(state)
    states = batch.hidden_BTW.copy()
    states[0, 3, -2] = bad
    damaged = dataclasses.replace(batch, hidden_BTW=states)
    state, metrics = step(state, frozen, damaged, ONE, **settings)
    assert metrics["skipped"] == 1 and not np.isfinite(metrics["loss"])
    assert bits(state) == before
    state, metrics = step(state, frozen, batch, ONE, **settings)
    assert metrics["skipped"] == 0 and bits(state) != before and int(state.step) == 2


def test_equal_shapes_compile_once():
    gradients.clear_cache()
    apply.clear_cache()
    config, params, frozen = drafter("eagle")
    state, counts = state_of(DrafterTrainingConfig("hass"), params), []
    for i in range(4):
        training = DrafterTrainingConfig("hass")  # an equal one
        rows = [[hidden_states(config, 5 + i), hidden_states(config, 4)], [], []]
        batch = packed([*rows, [hidden_states(config, 9 - i)]], 16)
        options = {"config": config, "training": training}
        state, _ = step(state, frozen, batch, np.float32(0.5 * i), **options)
        counts.append([f._cache_size() for f in (gradients, apply)])
    assert counts == [[1, 1]] * 4


def test_parts_that_do_not_fit_are_refused():
    config, params, frozen = drafter("eagle", draft_vocab_size=6)
    _, _, whole = drafter("eagle")
    batch = some_batch(config)

    def run(variant, frozen):
        training_module.loss(config, DrafterTrainingConfig(variant), params, frozen, batch, ONE)

    with pytest.raises(ValueError, match="design eagle3"):
        run("eagle3", frozen)
    with pytest.raises(AssertionError, match="not the policy's head"):
        run("eagle", whole)
    with pytest.raises(AssertionError, match="needs a map"):
        run("eagle", dataclasses.replace(frozen, draft_ids_U=None))


# devices


@pytest.mark.parametrize(
    ("variant", "mesh_config"),
    [("heavy_hass", MeshConfig(data=2)), ("short_eagle3", MeshConfig(data=1, fsdp=2, tensor=2))],
)
def test_several_devices_give_what_one_gives(variant, mesh_config):
    count = mesh_config.data * mesh_config.fsdp * mesh_config.tensor
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices")
    training, config, params, frozen = made(variant)
    batch, settings = some_batch(config), {"config": config, "training": training}
    wanted, metrics = gradients(params, frozen, batch, ONE, **settings)
    mesh = make_mesh(mesh_config, jax.devices()[:count])
    with jax.set_mesh(mesh):
        whole = NamedSharding(mesh, PartitionSpec())
        by_specs = param_shardings(mesh, eagle.param_specs(config))
        params = jax.device_put(params, whole if variant == "heavy_hass" else by_specs)
        frozen = jax.device_put(frozen, whole)
        batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(RULES["batch"])))
        got, found = gradients(params, frozen, batch, ONE, **settings)
        state = state_of(training, jax.tree.map(jnp.copy, params))
        state, skipped = apply(state, got, training=training)
    assert int(skipped) == 0
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, before.ndim)
        assert len(after.sharding.device_set) == count
    for name, x in metrics.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-5, err_msg=name)
    for a, b in zip(leaves(got), leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_variants_have_their_papers_numbers():
    numbers = {
        v: dataclasses.astuple(DrafterTrainingConfig(v).terms)[1:] for v in typing.get_args(Variant)
    }
    assert numbers == {
        "eagle": ("eagle", 1.0, 0.1, 1, 1.0),
        "hass": ("eagle", 1.0, 0.1, 3, 1.0),
        "eagle3": ("eagle3", 0.0, 1.0, 7, 0.8),
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "medusa"}, "variant must be one of"),
        ({"warmup_steps": -1}, "warmup_steps >= 0"),
        ({"learning_rate": -1e-3}, "learning_rate of 0 or above"),
        ({"learning_rate": math.nan}, "learning_rate of 0 or above"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DrafterTrainingConfig(**settings)

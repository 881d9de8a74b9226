"""Draws in parts of the nodes are those of all nodes at once, on one device and on a mesh."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from reprise.models.config import MeshConfig, ModelConfig
from reprise.models.decoder import transformer
from reprise.models.sharding import make_mesh
from reprise.spec.verification import verify
from reprise.spec.verification.nodes import Nodes
from reprise.spec.verification.sampling import Processing

M, V = 24, 40
MODEL = ModelConfig("qwen3", V, 8, 1, 2, 2, 4, 8, qk_norm=True, max_positions=64)


def undrawn():
    """Nodes of which some have given tokens, each with settings of its own."""
    rng = np.random.default_rng(0)
    given_M = np.where(np.arange(M) % 3 < 2, rng.integers(0, V, M), -1).astype(np.int32)
    nodes = Nodes(
        *np.zeros((3, M), np.int32),
        given_M,
        np.where(np.arange(M) % 2, -np.inf, -4).astype(np.float32),
    )
    cuts = np.arange(M, dtype=np.int32) % 5, np.linspace(0.4, 1.0, M, dtype=np.float32)
    temperatures = np.where(np.arange(M) % 7 == 6, 0, np.linspace(0.5, 1.5, M)).astype(np.float32)
    numbers = np.zeros((6, M), np.int32)
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(1)))(np.arange(M))
    slots = verify.Slots(*numbers, keys, Processing(temperatures, *cuts))
    hidden_MD = 3 * rng.standard_normal((M, MODEL.d_model)).astype(np.float32)
    return verify._Undrawn(hidden_MD, nodes, slots, np.arange(M, dtype=np.int32) % 4)


def drawn(monkeypatch, at_once, config=None):
    monkeypatch.setattr(verify, "LOGITS_AT_ONCE", at_once)
    params = transformer.init(MODEL, jax.random.key(0))
    params = dataclasses.replace(params, head_VD=4 * params.head_VD)
    draw = jax.jit(lambda undrawn: verify._draw(MODEL, params, undrawn, verify.Draws("cdf")))
    if config is None:
        return jax.device_get(draw(undrawn()))
    mesh = make_mesh(config, jax.devices()[: config.data * config.tensor])
    with jax.set_mesh(mesh):
        return jax.device_get(draw(undrawn()))


@pytest.fixture(scope="module")
def at_once_drawn():
    with pytest.MonkeyPatch.context() as patch:
        return drawn(patch, M * V)


@pytest.mark.parametrize(
    ("config", "at_once"),
    [
        (None, 1),
        (None, M * V // 2),
        (MeshConfig(data=2, tensor=2), M * V // 8),
        (MeshConfig(data=4), M * V // 2),
    ],
)
def test_parts_draw_what_all_nodes_at_once_draw(monkeypatch, at_once_drawn, config, at_once):
    tokens, logprobs, kept = at_once_drawn
    found = drawn(monkeypatch, at_once, config)
    np.testing.assert_array_equal(found[0], tokens)
    np.testing.assert_allclose(found[1], logprobs, atol=1e-5)
    np.testing.assert_array_equal(found[2], kept)
    assert len(set(tokens.tolist())) > 5 and 0 < kept.sum() < M


def test_logits_are_as_few_as_are_asked_for(monkeypatch):
    monkeypatch.setattr(verify, "LOGITS_AT_ONCE", 6 * V)
    assert verify._parts(M, V) == 4
    monkeypatch.setattr(verify, "LOGITS_AT_ONCE", 5 * V)
    assert verify._parts(M, V) == 6  # five do not divide the nodes
    monkeypatch.setattr(verify, "LOGITS_AT_ONCE", M * V)
    assert verify._parts(M, V) == 1
    monkeypatch.setattr(verify, "LOGITS_AT_ONCE", M * V // 4)
    assert verify._parts(M, V) == 4
    monkeypatch.setattr(verify, "platform_in_use", lambda: "gpu")
    assert verify._parts(M, V) == 1

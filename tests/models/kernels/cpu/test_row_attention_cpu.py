"""Attention over packed rows on a CPU, forward and backward, against one softmax under a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from reprise.models.attention.attention import Packing, packed_mask
from reprise.models.config import MeshConfig
from reprise.models.decoder.row_attention import attend_rows
from reprise.models.kernels.cpu import row_attention_cpu
from reprise.models.sharding import make_mesh


def under_mask(q_BTHh, k_BTKh, v_BTKh, prompt_BT, branch_BT):
    B, T, H, h = q_BTHh.shape
    mask = packed_mask(Packing(jnp.zeros((B, T), jnp.int32), prompt_BT, branch_BT))
    k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k_BTKh, v_BTKh))
    scores = jnp.einsum("bthd,bshd->bhts", q_BTHh, k, precision="highest") * h**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")


def by_kernel(q_BTHh, k_BTKh, v_BTKh, prompt_BT, branch_BT):
    packing = Packing(jnp.zeros_like(prompt_BT), prompt_BT, branch_BT)
    return attend_rows(q_BTHh, k_BTKh, v_BTKh, packing)


def segments(*rows):
    """Rows of (prompt, branch, tokens), filled up with padding."""
    T = max(sum(n for *_, n in row) for row in rows)
    found = np.zeros((2, len(rows), T), np.int32)
    for b, row in enumerate(rows):
        at = 0
        for prompt, branch, n in row:
            found[0, b, at : at + n], found[1, b, at : at + n] = prompt, branch
            at += n
    return found


# More than a block of positions, shared and own; responses without a prompt's tokens; one token;
# the same response number in the next prompt; padding in the middle.
ROWS = segments(
    [(1, 0, 300), (1, 1, 290), (1, 2, 9), (2, 0, 1), (2, 2, 8), (2, 3, 17)],
    [(4, 1, 5), (4, 2, 3), (0, 0, 7), (5, 0, 30), (6, 0, 12), (6, 4, 1)],
)


def inputs(K, G, h):
    rng, (B, T) = np.random.default_rng(0), ROWS.shape[1:]
    shapes = (B, T, K * G, h), (B, T, K, h), (B, T, K, h)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    dout = rng.normal(size=q.shape) * (ROWS[0] > 0)[..., None, None]  # of padding nothing is used
    return (q, k, v), jnp.asarray(dout, jnp.float32)


def gradients(attend, qkv, dout):
    def loss(*qkv):
        out = attend(*qkv, *map(jnp.asarray, ROWS))
        return jnp.sum(out * dout), out

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)
    is_real = (ROWS[0] > 0)[..., None, None]
    return [np.where(is_real, x, 0) for x in (out, *grads)]


@pytest.mark.parametrize("K, G, h", [(1, 1, 8), (2, 3, 24), (2, 2, 64)])
def test_outputs_and_gradients(K, G, h):
    given = inputs(K, G, h)
    for got, want in zip(gradients(by_kernel, *given), gradients(under_mask, *given), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-5, rtol=1e-4)
        assert np.abs(want).max() > 0.1


def test_a_response_is_the_same_whatever_follows():
    """Bit by bit: its sums run over its own positions in their order."""
    (q, k, v), dout = inputs(2, 2, 32)
    whole = gradients(by_kernel, (q, k, v), dout)[0]
    first = jax.jit(by_kernel)(*(x[:1, :590] for x in (q, k, v)), *jnp.asarray(ROWS[:, :1, :590]))
    np.testing.assert_array_equal(first, whole[:1, :590])


def test_each_device_has_its_rows_and_heads():
    given = inputs(2, 2, 8)
    want = gradients(by_kernel, *given)
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        split = jax.device_put(given[0], NamedSharding(mesh, PartitionSpec("data")))
        got = gradients(by_kernel, split, given[1])
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_takes():
    assert row_attention_cpu.takes((1, 9, 4, 8), (1, 9, 2, 8), jnp.float32) is None
    assert "float32" in row_attention_cpu.takes((1, 9, 4, 8), (1, 9, 2, 8), jnp.float16)
    assert "head size" in row_attention_cpu.takes((1, 9, 4, 6), (1, 9, 2, 6), jnp.float32)

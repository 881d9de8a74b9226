"""Loops whose zeros wait for their inputs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal, jaxprs_in_params

from models import products, row_attention
from models.attention import Packing
from models.loops import scan_after

ZERO = jax.ShapeDtypeStruct((2,), jnp.float32)


def body(inputs, total, x):
    (a,) = inputs
    return total + a * x, (total, {"x": x.astype(jnp.int8)})


def test_totals_start_at_zero_and_results_are_stacked():
    xs = jnp.asarray([[1.0, 2], [3, 4], [5, 6]])
    total, (before, others) = scan_after(body, ZERO, xs, jnp.float32(2))
    np.testing.assert_array_equal(total, [18, 24])
    np.testing.assert_array_equal(before, [[0, 0], [2, 4], [8, 12]])
    assert others["x"].dtype == jnp.int8 and others["x"].shape == (3, 2)


def untied(function, *inputs):
    """The shapes of arrays that loops start from and that depend on none of the inputs."""
    found = []

    def walk(jaxpr, given):
        depends = dict(zip(jaxpr.invars, given, strict=True))
        for eqn in jaxpr.eqns:
            known = [not isinstance(v, Literal) and depends.get(v, False) for v in eqn.invars]
            depends |= dict.fromkeys(eqn.outvars, any(known))
            if eqn.primitive.name == "scan":
                first, count = eqn.params["num_consts"], eqn.params["num_carry"]
                starts = list(zip(eqn.invars, known, strict=True))[first : first + count]
                found.extend(v.aval.shape for v, tied in starts if v.aval.ndim and not tied)
                continue  # arrays in a loop's body live for one round
            for inner in jaxprs_in_params(eqn.params):
                walk(inner, known[len(known) - len(inner.invars) :])

    jaxpr = jax.make_jaxpr(function)(*inputs).jaxpr
    walk(jaxpr, [True] * len(jaxpr.invars))
    return found


def test_no_zeros_before_the_inputs():
    xs, a = jnp.ones((3, 2)), jnp.float32(2)
    assert untied(lambda xs, a: scan_after(body, ZERO, xs, a), xs, a) == []
    plain = lambda xs, a: jax.lax.scan(partial(body, (a,)), jnp.zeros(2), xs)  # noqa: E731
    assert untied(plain, xs, a) == [(2,)]


@pytest.mark.parametrize("name", ["attention", "feed_forward"])
def test_loops_over_rows_wait_in_both_passes(name, monkeypatch):
    monkeypatch.setattr(row_attention, "LONG_ROW_BLOCK_TOKENS", 4)
    x = jnp.ones((1, 8, 4))
    if name == "attention":
        packing = Packing(*[jnp.zeros((1, 8), jnp.int32)] * len(Packing.__dataclass_fields__))

        def apply(x):
            return row_attention.attend_rows(*[x.reshape(1, 8, 2, 2)] * 3, packing)
    else:
        weights = [jnp.ones((8, 4)), jnp.ones((8, 4)), jnp.ones((4, 8))]

        def apply(x):
            return products._feed_forward_in_parts(x, *weights, 2)

    assert untied(jax.grad(lambda x: apply(x).sum()), x) == []

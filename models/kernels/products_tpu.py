"""Products with weights on a TPU, whose sums have one order in any number of rows.

    y = Σ over blocks of inputs, in order, of x · wᵀ

The block of inputs follows from their number alone. A sum over a block is the matrix unit's, which
has the same order for every row. Weights are read once for `ROWS` rows.

R rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.kernels.softmax_tpu import LANES, LAST, product as block_product

ROWS, OUTPUTS, INPUTS = 1024, 1024, 512  # of a block, at most
VMEM_BYTES = 32 << 20


def takes(inputs: int, dtype: Any) -> bool:
    return inputs % LANES == 0 and jnp.dtype(dtype) == jnp.bfloat16


def product(
    x_RI: jax.Array, weight_OI: jax.Array, dtype: Any, *, interpret: Any = False
) -> jax.Array:
    """Return x · wᵀ of bfloat16, [R, O] of `dtype`, summed in float32."""
    (R, I), O = x_RI.shape, len(weight_OI)
    inputs = next(n for n in (INPUTS, INPUTS // 2, LANES) if I % n == 0)
    rows, outputs = min(ROWS, R), min(OUTPUTS, O)
    grid = pl.cdiv(O, outputs), pl.cdiv(R, rows), I // inputs
    item_bytes = jnp.dtype(dtype).itemsize
    return pl.pallas_call(
        partial(_kernel, num_blocks=grid[2]),
        out_shape=jax.ShapeDtypeStruct(
            (R, O), dtype, manual_axis_type=jax.typeof(x_RI).manual_axis_type
        ),
        grid=grid,
        in_specs=[
            pl.BlockSpec((rows, inputs), lambda o, r, i: (r, i)),
            pl.BlockSpec((outputs, inputs), lambda o, r, i: (o, i)),
        ],
        out_specs=pl.BlockSpec((rows, outputs), lambda o, r, i: (r, o)),
        scratch_shapes=[pltpu.VMEM((rows, outputs), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * R * I * O,
            transcendentals=0,
            bytes_accessed=2 * I * (R * grid[0] + O * grid[1]) + R * O * item_bytes,
        ),
        interpret=interpret,
        name="product",
    )(x_RI, weight_OI)


def _kernel(x: Any, weight: Any, out: Any, sum_ref: Any, *, num_blocks: int) -> None:
    i = pl.program_id(2)

    @pl.when(i == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] += block_product(x[...], weight[...], LAST)

    @pl.when(i == num_blocks - 1)
    def _() -> None:
        out[...] = sum_ref[...].astype(out.dtype)

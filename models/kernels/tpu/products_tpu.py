"""Products with weights on a TPU, with sums in one order for any number of rows.

    y = Σ over blocks of inputs, in order, of x · wᵀ

Blocks of inputs depend only on the number of inputs. The matrix unit sums a block, in the same
order for every row. Weights are read once for `ROWS` rows.

R rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from reprise.models.kernels.tpu import softmax_tpu
from reprise.models.kernels.tpu.softmax_tpu import LANES, LAST

ROWS = 1024
OUTPUTS = 1024
INPUTS = 512  # of a block, at most
MIN_BLOCKS = 4
VMEM_BYTES = 32 << 20


def takes(num_inputs: int, dtype: Any) -> str | None:
    """Return None if the kernel takes these sizes, else the reason in one sentence."""
    if num_inputs % LANES:
        return f"expected a number of inputs that {LANES} divides, got {num_inputs}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"expected bfloat16, got {jnp.dtype(dtype).name}"
    return None


def product(
    x_RI: jax.Array, weight_OI: jax.Array, dtype: Any, *, interpret: Any = False
) -> jax.Array:
    """Return x · wᵀ of bfloat16 arrays, [R, O] of `dtype`, summed in float32."""
    num_rows, num_inputs = x_RI.shape
    num_outputs = len(weight_OI)
    inputs = next(n for n in (INPUTS, INPUTS // 2, LANES) if num_inputs % n == 0)
    # several blocks of outputs, for both cores and for prefetching
    outputs = min(num_outputs, OUTPUTS, pl.cdiv(num_outputs, MIN_BLOCKS * LANES) * LANES)
    rows = min(ROWS, num_rows)
    grid = pl.cdiv(num_outputs, outputs), pl.cdiv(num_rows, rows), num_inputs // inputs
    shape = (num_rows, num_outputs)
    item_bytes = jnp.dtype(dtype).itemsize
    return pl.pallas_call(
        partial(_kernel, num_blocks=grid[2]),
        out_shape=jax.ShapeDtypeStruct(
            shape, dtype, manual_axis_type=jax.typeof(x_RI).manual_axis_type
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
            flops=2 * num_rows * num_inputs * num_outputs,
            transcendentals=0,
            bytes_accessed=2 * num_inputs * (num_rows * grid[0] + num_outputs * grid[1])
            + num_rows * num_outputs * item_bytes,
        ),
        interpret=interpret,
        name="product",
    )(x_RI, weight_OI)


def _kernel(x: Any, weight: Any, out: Any, sum_ref: Any, *, num_blocks: int) -> None:
    i = pl.program_id(2)

    @pl.when(i == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] += softmax_tpu.product(x[...], weight[...], LAST)

    @pl.when(i == num_blocks - 1)
    def _() -> None:
        out[...] = sum_ref[...].astype(out.dtype)

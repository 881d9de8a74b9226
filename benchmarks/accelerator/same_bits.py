"""Which sums of a device depend on the shape of a pass, and what one tile for products costs.

products     One row among 1 to 4,096 others: outputs that differ from the row's among 64, seconds,
             and calls of cuBLAS and split sums in the program, with one tile for all products, as
             `Numerics.same_bits` sets it, and with tiles of the backend's choice.
elementwise  The same for a norm, rotary positions and a row's log-sum.
passes       `benchmarks.same_bits.rows_of` a random policy: plain decoding, trees, chunks and
             training rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import same_bits
from benchmarks.accelerator.budget import Figures, Log
from benchmarks.accelerator.sizes import Size, random_weights, summary, timed
from benchmarks.passes import random_texts
from benchmarks.turns import in_turns
from reprise.models.decoder import transformer
from reprise.models.decoder.layers import linear, rope_turns, rotate
from reprise.spec.verification.sampling import masses

REFERENCE_ROWS = 64
MAX_LAYERS = 4  # of the policy of `passes`, which has ten programs to compile
ROWS = 1, 8, 32, 64, 128, 256, 512, 4096
CHOSEN = {  # options of XLA for GPUs, as they are without `sum_in_order_on_accelerators`
    "xla_gpu_experimental_force_split_k": 0,
    "xla_gpu_override_gemm_autotuner": "",
    "xla_gpu_cublas_fallback": True,
}


def rows(size: Size, log: Log) -> Iterator[Figures]:
    most = 4096 if size.name == "real" else 128
    row_counts = [n for n in ROWS if n <= most]
    for part, found in (
        ("products", products(size, row_counts)),
        ("elementwise", elementwise(size, row_counts)),
        ("passes", passes(size)),
    ):
        log.phase(part)
        yield from found


def products(size: Size, row_counts: list[int]) -> Iterator[Figures]:
    rng, dtype = np.random.default_rng(0), jnp.dtype(size.dtype)
    model = size.model
    for inputs, outputs in ((model.d_model, model.d_ff), (model.d_ff, model.d_model)):
        x = jnp.asarray(rng.standard_normal((max(row_counts), inputs)), dtype)
        weight_OI = jnp.asarray(rng.standard_normal((outputs, inputs)), dtype)
        for tiles, options in (("one", {}), ("chosen", CHOSEN)):
            run = partial(_compiled, partial(linear, dtype=jnp.float32), options)
            shape = {"of": "product", "inputs": inputs, "outputs": outputs, "tiles": tiles}
            try:
                yield from _by_rows(run, row_counts, size.repeats, shape, x, weight_OI)
            except jax.errors.JaxRuntimeError as error:
                yield shape | {"not_run": str(error).splitlines()[0]}


def elementwise(size: Size, row_counts: list[int]) -> Iterator[Figures]:
    rng, model = np.random.default_rng(1), size.model
    x = jnp.asarray(rng.standard_normal((max(row_counts), model.d_model)), size.dtype)
    logits = jnp.asarray(rng.standard_normal((max(row_counts), 4096)), jnp.float32)
    heads = x[:, : model.head_dim].reshape(-1, 1, 1, model.head_dim)
    at = jnp.arange(len(x))[:, None]

    def norm(x: jax.Array) -> jax.Array:
        return transformer.rms_norm(x, jnp.ones(x.shape[-1], x.dtype), 1e-6)

    def turned(x: jax.Array, at: jax.Array) -> jax.Array:
        return rotate(x, *rope_turns(model, at))[:, 0, 0]

    for name, function, given in (
        ("norm", norm, (x,)),
        ("rotary positions", turned, (heads, at)),
        ("log-sum", lambda x: masses(x).log_total[:, None], (logits,)),
    ):
        run = partial(_compiled, function, {})
        yield from _by_rows(run, row_counts, size.repeats, {"of": name}, *given)


def _compiled(function: Callable, options: dict[str, Any], *given: jax.Array) -> Any:
    return jax.jit(function).lower(*given).compile(compiler_options=options)


def _by_rows(
    compiled: Callable,
    row_counts: list[int],
    repeats: int,
    row: Figures,
    x: jax.Array,
    *rest: jax.Array,
) -> Iterator[Figures]:
    """Yield a row for each number of rows; arrays with as many rows as x are cut like it."""
    programs = dict[int, tuple[Any, tuple[jax.Array, ...]]]()
    for n in row_counts:
        given = tuple(y[:n] if len(y) == len(x) else y for y in (x, *rest))
        programs[n] = compiled(*given), given
    results = {
        n: np.asarray(program(*given), np.float32) for n, (program, given) in programs.items()
    }
    calls = {
        str(n): partial(timed, partial(program, *given)) for n, (program, given) in programs.items()
    }
    seconds = in_turns(calls, repeats)
    want = results[REFERENCE_ROWS]
    for n, (program, _) in programs.items():
        text, shared = program.as_text(), min(n, REFERENCE_ROWS)
        yield row | {
            "rows": n,
            "differ": int((results[n][:shared] != want[:shared]).sum()),
            "numbers": want[:shared].size,
            **summary(seconds[str(n)]),
            "cublas_calls": len(re.findall(r"__cublas", text)),
            "split_k": [int(k) for k in re.findall(r'"split_k":"?(\d+)', text)],
        }


def passes(size: Size) -> Iterator[Figures]:
    rng, num_layers = np.random.default_rng(2), min(MAX_LAYERS, size.model.num_layers)
    model = dataclasses.replace(size.model, num_layers=num_layers)
    params = random_weights(model, size.dtype)
    texts = random_texts(model.vocab_size, 2, 3, rng, (10, 40), (20, 70))
    for row in itertools.islice(same_bits.rows_of(model, params, texts), size.passes):
        yield {"of": "pass", **row}

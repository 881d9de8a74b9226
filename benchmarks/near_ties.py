"""Where two phases first differ: how near the draw was to the bound between their tokens.

Sums in another order round otherwise; a draw that falls between two roundings of a bound
gives another token, and all that follows differs. Anything farther off is a fault.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads import Workload
from models import transformer
from models.config import ModelConfig
from spec import sampling

EXPLAINED = 1e-5  # of the probability mass


@dataclasses.dataclass(frozen=True)
class Difference:
    """`tokens` of a response are others than in plain decoding, the first at position `at`.

    `gap` is None where no token differs but one response is longer: nothing explains that.
    """

    request_id: int
    at: int
    tokens: int
    gap: float | None

    @property
    def explained(self) -> bool:
        return self.gap is not None and self.gap < EXPLAINED


def compare(
    workload: Workload, key: jax.Array, request_id: int, plain: np.ndarray, other: np.ndarray
) -> Difference | None:
    """How a response differs from that of plain decoding; None where it does not."""
    n = min(len(plain), len(other))
    differs = np.nonzero(plain[:n] != other[:n])[0]
    tokens = len(differs) + abs(len(plain) - len(other))
    if not tokens:
        return None
    if not len(differs):
        return Difference(request_id, n, tokens, None)
    at = int(differs[0])
    return Difference(request_id, at, tokens, gap(workload, key, request_id, plain, other, at))


def gap(
    workload: Workload, key: jax.Array, request_id: int, one: np.ndarray, other: np.ndarray, at: int
) -> float:
    """How far the uniform of position `at` is from the bounds between the two tokens drawn there.

    max |u − Σ_{v≤w} p(v)| over the w from the lesser up to the other, p computed anew from the
    whole prefix: of blocks where the tokens are in different ones, with the uniform that chooses
    a block, else of tokens inside theirs, with the other. Needs `draw` cdf and nothing cut.
    """
    assert workload.sampling.scheme == "cdf" and workload.sampling.temperature == 1.0
    prompt = next(r.prompt_ids for r in workload.requests if r.request_id == request_id)
    prefix = [*prompt, *one[:at].tolist()]
    tokens_1T = np.zeros((1, workload.model.max_positions), np.int32)
    tokens_1T[0, : len(prefix)] = prefix
    logits_V = np.asarray(_logits(workload.model, workload.params, tokens_1T))[0, len(prefix) - 1]
    mass_V = np.exp(logits_V.astype(np.float64) - logits_V.max())
    keys = sampling.request_keys(key, jnp.asarray([request_id]))
    uniform_2 = sampling.uniforms(sampling.position_keys(keys, jnp.asarray([[at]])))[0, 0]
    W = sampling.block_tokens(len(mass_V))
    mass_CW = np.pad(mass_V, (0, -len(mass_V) % W)).reshape(-1, W)
    (low_block, low), (high_block, high) = (
        divmod(v, W) for v in sorted((int(one[at]), int(other[at])))
    )
    masses = mass_CW[low_block]
    if low_block != high_block:
        masses, low, high = mass_CW.sum(axis=1), low_block, high_block
    bounds = np.cumsum(masses) / masses.sum()
    return float(np.abs(bounds[low:high] - float(uniform_2[int(low_block == high_block)])).max())


@functools.partial(jax.jit, static_argnums=0)
def _logits(config: ModelConfig, params: transformer.Params, tokens_BT: np.ndarray) -> jax.Array:
    return transformer.logits(config, params, tokens_BT)

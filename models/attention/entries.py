"""Cache entries: waiting to be written, and their places in pages; the kinds of cache arrays.

A round computes entries of nodes and of chunks. Accepted entries of nodes wait in `Pending` until
the next round, which writes before it reads, so that writes stay in place.

Shape suffixes: M nodes, P pending entries, or pages, X entries, B slots, N pages of a slot, T
positions of a page, K key/value heads, h head size, W feature width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from reprise.models.config import ModelConfig
from reprise.models.layout import CACHE_AXES, ENTRY_AXES, FEATURE_AXES
from reprise.models.sharding import constrain, platform_in_use

KEY_AXIS = 3  # of positions in the keys of a CPU
VALUE_AXIS = 2  # of positions in values and features, and in the keys of an accelerator


class Kind(NamedTuple):
    """The position axis of a cache array, and its logical axes (models.layout)."""

    axis: int
    axes: tuple[str | None, ...]


KEYS = Kind(KEY_AXIS, CACHE_AXES)
VALUES = Kind(VALUE_AXIS, CACHE_AXES)
FEATURES = Kind(VALUE_AXIS, FEATURE_AXES)


def pin(array: jax.Array, kind: Kind = VALUES) -> jax.Array:
    """Pin keys or values of a layer, or features, to the sharding of models.layout."""
    return constrain(array, *kind.axes)


@struct.dataclass
class Entries:
    """Keys and values of M nodes in every layer, `[M, K, h]`, and features `[M, W]` or none."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    features: tuple[jax.Array, ...] = ()

    def take(self, part: slice, dtype: Any) -> Entries:
        """Return a part of the entries, in the dtype and sharding of a cache."""

        def some(x: jax.Array) -> jax.Array:
            return constrain(x[part].astype(dtype), *ENTRY_AXES[: x.ndim])

        return jax.tree.map(some, self)


@struct.dataclass
class Pending:
    """Entries that one round computes and the next round writes in place before it reads.

    Keys and values of every layer are `[P, K, h]`, features `[P, W]` or none. Entry i belongs to
    `position_P[i]` of row `row_P[i]`; only entries `order_P[:count]` are written.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    features: tuple[jax.Array, ...]
    row_P: jax.Array
    position_P: jax.Array
    order_P: jax.Array
    count: jax.Array

    def replaced(
        self, entries: Entries, row_M: jax.Array, position_M: jax.Array, accepted_M: jax.Array
    ) -> Pending:
        """Return the M ≤ P entries of a new round; only `accepted_M` will be written."""

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            new = constrain(new.astype(old.dtype), *ENTRY_AXES[: old.ndim])
            return jax.lax.dynamic_update_slice(old, new, (0,) * old.ndim)

        return Pending(
            keys=jax.tree.map(put, self.keys, entries.keys),
            values=jax.tree.map(put, self.values, entries.values),
            features=jax.tree.map(put, self.features, entries.features),
            row_P=put(self.row_P, row_M),
            position_P=put(self.position_P, position_M),
            order_P=put(self.order_P, jnp.argsort(~accepted_M)),
            count=jnp.sum(accepted_M, dtype=jnp.int32),
        )


def no_pending(
    config: ModelConfig,
    num_entries: int,
    dtype: jnp.dtype,
    feature_layers: tuple[int, ...] | None = None,
    zeros: Callable[..., Any] = jnp.zeros,
) -> Pending:
    """Return P entries with a count of 0; `zeros(shape, dtype)` makes each array."""
    P = num_entries
    shape = P, config.num_kv_heads, config.head_dim
    features: tuple[jax.Array, ...] = ()
    if feature_layers is not None:
        features = (zeros((P, config.d_model * (len(feature_layers) + 1)), dtype),)
    return Pending(
        keys=tuple(zeros(shape, dtype) for _ in range(config.num_layers)),
        values=tuple(zeros(shape, dtype) for _ in range(config.num_layers)),
        features=features,
        row_P=zeros((P,), jnp.int32),
        position_P=zeros((P,), jnp.int32),
        order_P=zeros((P,), jnp.int32),
        count=zeros((), jnp.int32),
    )


def place_of(
    table_BN: jax.Array, row_X: jax.Array, position_X: jax.Array, values_PKTh: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the page and offset of positions of slots; page P if a position has no page."""
    B, N = table_BN.shape
    P, _, T, _ = values_PKTh.shape
    nth_X = position_X // T
    inside_X = (row_X >= 0) & (row_X < B) & (position_X >= 0) & (nth_X < N)
    page_X = table_BN[jnp.clip(row_X, 0, B - 1), jnp.clip(nth_X, 0, N - 1)]
    return jnp.where(inside_X & (page_X >= 0), page_X, P), position_X % T


def write_entries(
    pages_PKTh: jax.Array, new_XKh: jax.Array, page_X: jax.Array, offset_X: jax.Array, kind: Kind
) -> jax.Array:
    """Write entries to (page, offset); drop entries without a page."""
    own_X = jnp.where(page_X < 0, len(pages_PKTh), page_X)
    if kind.axis == KEY_AXIS:
        at = pages_PKTh.at[own_X, :, :, offset_X]
    elif platform_in_use() == "cpu":
        at = pages_PKTh.at[own_X, :, offset_X]
    else:  # index the heads as well: TPUs would copy all pages to write windows across heads
        head_K = jnp.arange(pages_PKTh.shape[1])
        at = pages_PKTh.at[own_X[:, None], head_K, offset_X[:, None]]
    return at.set(new_XKh.astype(pages_PKTh.dtype), mode="drop")

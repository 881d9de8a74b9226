"""The policy as pure functions: parameters, their shapes, and forward passes.

`hidden` reads whole sequences (training, scoring). `hidden_of_nodes` reads packed nodes and chunks
against a cache (verify). `hidden_with_cache` reads N tokens of every row and writes them to the
cache (decode, draft models). All three run the same `block`. Matrix products run in the dtype of
the parameters; norms, softmax and logits run in float32. Layers are unrolled, so that each keeps a
separate cache buffer. Callers jit their steps; only layers are jitted here, so that all layers of a
step share one trace.

Shape suffixes: B rows or slots, T tokens, N tokens of a row, M packed nodes, S positions,
V vocabulary, D model width, H heads, K key/value heads, h head size, Q = H·h, P = K·h,
W feature width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.attention.attention import (
    CachedLayer,
    Chunks,
    Packing,
    Trees,
    attend_causally,
    attend_chunks,
    attend_nodes,
    causal_mask,
    finite_values,
    packed_mask,
)
from reprise.models.attention.entries import Entries
from reprise.models.attention.kv_cache import KVCache
from reprise.models.config import (
    Adapted,
    Layer,
    LowRank,
    ModelConfig,
    Params,
    ParamSpec,
    param_specs,
)
from reprise.models.decoder.layers import (
    PRODUCT_AXES,
    dense,
    feed_forward,
    linear,
    mean_square,
    rope_turns,
    rotate,
    scaled,
)
from reprise.models.decoder.row_attention import attend_rows, is_faster
from reprise.models.decoder.training import through_layers
from reprise.models.sharding import constrain, platform_in_use

if TYPE_CHECKING:
    from reprise.models.decoder.gpu_heads import Turn

for _weights in (Layer, Params, LowRank, Adapted):
    jax.tree_util.register_dataclass(_weights)


def init(config: ModelConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> Params:
    """Return random weights: normal with the scale of a spec, ones for norms, zeros for biases."""
    return init_from(param_specs(config), key, dtype)


def init_from(specs: Any, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> Any:
    """Return random weights, as `init` does, for any tree of `ParamSpec`."""
    leaves, tree = jax.tree.flatten(specs)

    def one(spec: ParamSpec, leaf_key: jax.Array) -> jax.Array:
        if spec.scale is None:
            return jnp.ones(spec.shape, dtype)
        return (spec.scale * jax.random.normal(leaf_key, spec.shape)).astype(dtype)

    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([one(spec, k) for spec, k in zip(leaves, keys, strict=True)])


def rms_norm(x_D: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """Return x / √(mean(x²) + eps) · weight over the last axis, computed in float32; [..., D]."""
    x = x_D.astype(jnp.float32)
    x = x * jax.lax.rsqrt(mean_square(x_D) + eps)
    return scaled(x, weight_D.astype(jnp.float32)).astype(x_D.dtype)


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Turned = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


def block(
    config: ModelConfig,
    layer: Layer,
    x_BTD: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    look: Attend,
    input_BTE: jax.Array | None = None,
    turn: Turned | None = None,
) -> jax.Array:
    """Apply one decoder layer to x with the attention `look`; [B, T, D].

    Queries, keys and values are projected from `input_BTE`, by default the normed x. `turn` is a
    kernel that norms and rotates them.
    """
    B, T, _ = x_BTD.shape
    y = input_BTE
    if y is None:
        y = rms_norm(x_BTD, layer.attention_norm_D, config.norm_eps)
    q, k, v = (linear(y, w) for w in (layer.query_QD, layer.key_PD, layer.value_PD))
    if config.qkv_bias:  # added in float32, so that bias gradients are summed in float32
        biases = layer.query_bias_Q, layer.key_bias_P, layer.value_bias_P
        pairs = zip((q, k, v), biases, strict=True)
        sums = (x.astype(jnp.float32) + b.astype(jnp.float32) for x, b in pairs)
        q, k, v = (total.astype(y.dtype) for total in sums)
    q_BTHh = q.reshape(B, T, config.num_heads, config.head_dim)
    k_BTKh = k.reshape(B, T, config.num_kv_heads, config.head_dim)
    v_BTKh = v.reshape(B, T, config.num_kv_heads, config.head_dim)
    if turn is not None:
        q_BTHh, k_BTKh, v_BTKh = turn(q_BTHh, k_BTKh, v_BTKh)
    else:
        if config.qk_norm:
            q_BTHh = rms_norm(q_BTHh, layer.query_norm_h, config.norm_eps)
            k_BTKh = rms_norm(k_BTKh, layer.key_norm_h, config.norm_eps)
        q_BTHh = rotate(q_BTHh, *rope)
        k_BTKh = rotate(k_BTKh, *rope)
    out_BTHh = look(q_BTHh, k_BTKh, v_BTKh)
    out_BTD = linear(out_BTHh.reshape(B, T, -1), layer.output_DQ)
    x_BTD = constrain(x_BTD + out_BTD, "batch", None, None)
    y = rms_norm(x_BTD, layer.mlp_norm_D, config.norm_eps)
    y = feed_forward(y, layer.gate_FD, layer.up_FD, layer.down_DF)
    return constrain(x_BTD + y, "batch", None, None)


def embed(embedding_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return the embeddings of tokens, [B, T, D]; negative ids (padding) are read as token 0."""
    x_BTD = jnp.take(embedding_VD, jnp.maximum(tokens_BT, 0), axis=0, mode="clip")
    return constrain(x_BTD, "batch", None, None)


def hidden(
    config: ModelConfig,
    params: Params,
    tokens_BT: jax.Array,
    packing: Packing | None = None,
    *,
    remat: str = "none",
    dtype: Any = None,
) -> jax.Array:
    """Return hidden states after the last norm; [B, T, D] of `dtype`, by default of the weights.

    Rows are single right-padded sequences, or packed by `packing`. `remat`: see
    models.decoder.training. Weights are rounded to `dtype` layer by layer, embedding rows after the
    lookup.
    """
    return _hidden_and_entries(config, params, tokens_BT, packing, remat, dtype)[0]


def features(
    config: ModelConfig,
    params: Params,
    tokens_BT: jax.Array,
    packing: Packing,
    feature_layers: tuple[int, ...],
) -> jax.Array:
    """Return the outputs of `feature_layers`, then `hidden`, joined; [B, T, W]."""
    hidden_BTD, entries = _hidden_and_entries(config, params, tokens_BT, packing)
    outputs = [entries[i][2] for i in feature_layers]
    return jnp.concatenate([*outputs, hidden_BTD], axis=-1)


def _hidden_and_entries(
    config: ModelConfig,
    params: Params,
    tokens_BT: jax.Array,
    packing: Packing | None,
    remat: str = "none",
    dtype: Any = None,
) -> tuple[jax.Array, list[tuple[jax.Array, ...]]]:
    """Return the final hidden states, and (k_BTKh, v_BTKh, output_BTD) of every layer."""
    T = tokens_BT.shape[1]
    is_packed = packing is not None
    dtype = dtype or params.final_norm_D.dtype
    if packing is None:  # rows are single sequences
        positions_1T = jnp.arange(T)[None]
        packing = Packing(positions_1T, jnp.ones_like(tokens_BT), jnp.zeros_like(tokens_BT))
    rope = rope_turns(config, packing.positions_BT)
    seen = packing
    if not is_faster(config, T, dtype):
        seen = packed_mask(packing) if is_packed else causal_mask(T)

    def step(layer: Layer, x_BTD: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        layer = jax.tree.map(lambda weight: weight.astype(dtype), layer)
        x_BTD, entry = _whole_layer(config, layer, x_BTD, rope, seen)
        return x_BTD, (*entry, x_BTD)

    x_BTD = embed(params.embedding_VD, tokens_BT).astype(dtype)
    x_BTD, entries = through_layers(step, params.layers, x_BTD, remat)
    return rms_norm(x_BTD, params.final_norm_D.astype(dtype), config.norm_eps), entries


def hidden_with_cache(
    config: ModelConfig,
    params: Params,
    cache: KVCache,
    tokens_BN: jax.Array,
    positions_BN: jax.Array,
    start_B: jax.Array,
    chunks: Chunks | None = None,
) -> tuple[jax.Array, KVCache, Entries]:
    """Return the hidden states of N nodes per slot, [B, N, D], and the cache with their entries.

    Entries go to `start … start+N−1` of each row; node n then attends to all positions up to and
    including itself. A row is not written if `start + N > S`; its hidden states are meaningless.
    With one node per slot, `chunks` may be computed too; the last result has their entries, which
    are not written.
    """
    B = len(start_B)
    tokens_XN = tokens_BN
    positions_XN = positions_BN
    if chunks is not None:
        tokens_XN = jnp.concatenate([tokens_BN, chunks.tokens_TC.reshape(-1, 1)])
        positions_XN = jnp.concatenate([positions_BN, chunks.positions_TC.reshape(-1, 1)])
    rope = rope_turns(config, positions_XN)
    layers = list[Any]()
    entries = list[Any]()
    outputs: list[jax.Array] = []
    x_XND = embed(params.embedding_VD, tokens_XN)
    for i, layer in enumerate(params.layers):
        x_XND, held, entry = _cached_layer(
            config, layer, x_XND, rope, cache.layer(i), start_B, chunks
        )
        layers.append(held)
        entries.append(entry)
        outputs += [x_XND] if i in cache.feature_layers else []
    x_XND = rms_norm(x_XND, params.final_norm_D, config.norm_eps)
    features_XNW = jnp.concatenate([*outputs, x_XND], axis=-1)
    of_chunks = Entries(
        tuple(k_XKh for k_XKh, _ in entries),
        tuple(v_XKh for _, v_XKh in entries),
        (features_XNW[B:, 0],) if cache.features else (),
    )
    features = cache.with_features(features_XNW[:B], start_B)
    return x_XND[:B], cache.with_layers(layers, features), of_chunks


def hidden_of_nodes(
    config: ModelConfig,
    params: Params,
    cache: KVCache,
    tokens_M: jax.Array,
    positions_M: jax.Array,
    length_B: jax.Array,
    trees: Trees | None,
    chunks: Chunks | None = None,
) -> tuple[jax.Array, Entries]:
    """Return the hidden states of packed nodes, [X, D], and their entries, which are not written.

    A node attends to the first `length` positions of its row and to its ancestors. The T·C tokens
    of `chunks` follow the M ≥ 0 nodes: X = M + T·C.
    """
    tokens_X = tokens_M
    positions_X = positions_M
    if chunks is not None:
        tokens_X = jnp.concatenate([tokens_M, chunks.tokens_TC.reshape(-1)])
        positions_X = jnp.concatenate([positions_M, chunks.positions_TC.reshape(-1)])
    rope = rope_turns(config, positions_X[:, None])
    keys = []
    values = []
    outputs = []
    x_X1D = embed(params.embedding_VD, tokens_X[:, None])
    for i, layer in enumerate(params.layers):
        x_X1D, k_XKh, v_XKh = _nodes_layer(
            config, layer, x_X1D, rope, cache.layer(i), length_B, trees, chunks
        )
        keys.append(k_XKh)
        values.append(v_XKh)
        outputs += [x_X1D] if i in cache.feature_layers else []
    x_X1D = rms_norm(x_X1D, params.final_norm_D, config.norm_eps)
    features = (jnp.concatenate([*outputs, x_X1D], axis=-1)[:, 0],) if cache.features else ()
    return x_X1D[:, 0], Entries(tuple(keys), tuple(values), features)


# Layers have equal shapes, so these jitted functions are traced and lowered once for all layers.


@partial(jax.jit, static_argnames="config")
def _whole_layer(
    config: ModelConfig,
    layer: Layer,
    x_BTD: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    seen: jax.Array | Packing,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Apply a layer to whole rows; return [B, T, D] and its (k_BTKh, v_BTKh)."""
    entries = []

    def look(q_BTHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array) -> jax.Array:
        entries.append((k_BTKh, v_BTKh))
        if isinstance(seen, Packing):
            return attend_rows(q_BTHh, k_BTKh, v_BTKh, seen)
        k_BKhT = k_BTKh.transpose(0, 2, 3, 1)
        v_BKTh = v_BTKh.transpose(0, 2, 1, 3)
        return attend_causally(q_BTHh, k_BKhT, v_BKTh, seen)

    return block(config, layer, x_BTD, rope, look), entries[0]


@partial(jax.jit, static_argnames="config")
def _cached_layer(
    config: ModelConfig,
    layer: Layer,
    x_XND: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    cached: Any,
    start_B: jax.Array,
    chunks: Chunks | None = None,
) -> tuple[jax.Array, Any, tuple[jax.Array, jax.Array]]:
    """Apply a layer to N nodes of every slot, then to the tokens of chunks (N is 1 with chunks).

    Returns [X, N, D] of nodes and chunk tokens, the new cache layer, and the keys and values of the
    chunks, which are not written.
    """
    seen = []
    B = len(start_B)
    turn = _turn_of(config, layer, rope, cached)
    append = None
    if turn is not None and chunks is None:
        append = turn.appending(cached, start_B)

    def look(q_XNHh: jax.Array, k_XNKh: jax.Array, v_XNKh: jax.Array) -> jax.Array:
        k_XNKh, v_XNKh = finite_values(k_XNKh, v_XNKh)
        q_BNHh = q_XNHh[:B]
        k_BNKh = k_XNKh[:B]
        v_BNKh = v_XNKh[:B]
        if append is not None:
            held = append.layer
            out_BNHh = held.attend_window(q_BNHh, k_BNKh, v_BNKh, start_B)
        else:
            held, out_BNHh = cached.append_and_attend(q_BNHh, k_BNKh, v_BNKh, start_B)
        seen.append((held, (k_XNKh[B:, 0], v_XNKh[B:, 0])))
        if chunks is None:
            return out_BNHh
        q_XHh, k_XKh, v_XKh = (x[B:, 0] for x in (q_XNHh, k_XNKh, v_XNKh))
        out_X1Hh = _look_of_chunks(q_XHh, k_XKh, v_XKh, held, chunks)
        return jnp.concatenate([out_BNHh, out_X1Hh])

    x_XND = block(config, layer, x_XND, rope, look, turn=append or turn)
    return x_XND, *seen[0]


def _turn_of(
    config: ModelConfig, layer: Layer, rope: tuple[jax.Array, jax.Array], pages: Any
) -> Turn | None:
    """Return the kernel of norms and rotary positions, if the platform in use has one."""
    if platform_in_use() != "cuda":
        return None
    from reprise.models.decoder.gpu_heads import turn_of

    return turn_of(config, layer, rope, pages)


def _look_of_chunks(
    q_XHh: jax.Array, k_XKh: jax.Array, v_XKh: jax.Array, cached: CachedLayer, chunks: Chunks
) -> jax.Array:
    """Return the attention of chunk tokens, in order; [X, 1, H, h]."""
    q_TCHh, k_TCKh, v_TCKh = (
        x.reshape(*chunks.tokens_TC.shape, *x.shape[1:]) for x in (q_XHh, k_XKh, v_XKh)
    )
    out_TCHh = attend_chunks(q_TCHh, k_TCKh, v_TCKh, cached, chunks)
    return out_TCHh.reshape(-1, 1, *q_XHh.shape[1:])


@partial(jax.jit, static_argnames="config")
def _nodes_layer(
    config: ModelConfig,
    layer: Layer,
    x_X1D: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    cached: CachedLayer,
    length_B: jax.Array,
    trees: Trees | None,
    chunks: Chunks | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Apply a layer to packed nodes and chunks; return [X, 1, D] and the new keys and values."""
    entries = []
    M = len(x_X1D) - (0 if chunks is None else chunks.tokens_TC.size)

    def look(q_X1Hh: jax.Array, k_X1Kh: jax.Array, v_X1Kh: jax.Array) -> jax.Array:
        q_XHh = q_X1Hh[:, 0]
        k_XKh, v_XKh = finite_values(k_X1Kh[:, 0], v_X1Kh[:, 0])
        entries.append((k_XKh, v_XKh))
        out = []
        if M:
            out.append(
                attend_nodes(q_XHh[:M], k_XKh[:M], v_XKh[:M], cached, length_B, trees)[:, None]
            )
        if chunks is not None:
            out.append(_look_of_chunks(q_XHh[M:], k_XKh[M:], v_XKh[M:], cached, chunks))
        return jnp.concatenate(out)

    turn = _turn_of(config, layer, rope, cached)
    x_X1D = block(config, layer, x_X1D, rope, look, turn=turn)
    return x_X1D, *entries[0]


def head(
    config: ModelConfig,
    params: Params,
    hidden_D: jax.Array,
    axes: tuple[str, str] = PRODUCT_AXES,
) -> jax.Array:
    """Return the logits of hidden states, float32, −∞ for unused ids; [..., D] to [..., V].

    Every path takes its logits from here, so no path draws or scores an id without a token. `axes`
    are the logical axes of the first dimension and of the vocabulary.
    """
    return without_unused(config, linear(hidden_D, head_weight(params), jnp.float32, axes))


def without_unused(config: ModelConfig, logits_V: jax.Array) -> jax.Array:
    """Return logits [..., V] with −∞ for the unused ids of the config."""
    if not config.unused_ids:
        return logits_V
    is_unused_V = np.zeros(logits_V.shape[-1], bool)
    for start, stop in config.unused_ids:
        is_unused_V[start:stop] = True
    return jnp.where(is_unused_V, -jnp.inf, logits_V)


def head_weight(params: Params) -> jax.Array | Adapted:
    """Return the weight of the output head, [V, D], which may be adapted."""
    head_VD = params.head_VD
    if isinstance(head_VD, Adapted) and head_VD.weight_OI is None:
        return dataclasses.replace(head_VD, weight_OI=params.embedding_VD)
    return params.embedding_VD if head_VD is None else head_VD


def plain_head_weight(params: Params) -> jax.Array:
    """Return the weight of the output head with its adapter added, [V, D]."""
    head_VD = head_weight(params)
    return dense(head_VD) if isinstance(head_VD, Adapted) else head_VD


def logits(config: ModelConfig, params: Params, tokens_BT: jax.Array) -> jax.Array:
    """Return next-token logits at every position of right-padded sequences; float32 [B, T, V]."""
    return head(config, params, hidden(config, params, tokens_BT))

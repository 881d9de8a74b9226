"""EAGLE-style drafters, which run one decoder layer over the hidden states of the policy.

Entry t joins the policy hidden states at t, f_t, with the token *after* it, x_{t+1}:

    g_t = f_t (eagle)  or  fc(f_t) (eagle3: states of three layers)
    o_t = layer(e(x_{t+1}), g_t | entries before)      p̂(x_{t+2} | x_{≤t+1}) = softmax(head(o_t))

The embedding e and the head come from the policy and are frozen. Further draft tokens use o_t as
g_{t+1}.
EAGLE and HASS share this architecture and differ in training (spec/eagle_training/training.py).
Shapes as in docs/architecture.md; W = width of the hidden states, U = draft vocabulary.
Sources: EAGLE arXiv 2401.15077, HASS 2408.15766, EAGLE-3 2503.01840; TLT section 4.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.decoder.layers import linear, rope_turns
from reprise.models.decoder.transformer import Attend, Layer, ParamSpec, rms_norm
from reprise.spec.eagle.config import Design, EagleConfig


@struct.dataclass
class EagleParams:
    """Trainable weights; optional weights are None in designs without them.

    `layer.attention_norm_D` is None: `eagle` has no attention norm, `eagle3` has one per input.
    """

    fc_DE: Any
    layer: Layer
    fc_bias_D: Any = None
    embedding_norm_D: Any = None
    feature_norm_D: Any = None
    final_norm_D: Any = None
    head_UD: Any = None


@struct.dataclass
class SharedParams:
    """The policy embedding, the policy head over the draft tokens, and the map of draft tokens."""

    embedding_VD: Any
    head_UD: Any
    draft_ids_U: Any = None


@struct.dataclass
class DeviceWeights:
    """Drafter weights on the devices of a worker."""

    params: EagleParams
    frozen: SharedParams


@dataclasses.dataclass(frozen=True, eq=False)
class EagleWeights:
    """A stored drafter; `draft_ids_U` maps draft tokens to policy tokens (None: identity)."""

    config: EagleConfig
    params: EagleParams
    draft_ids_U: np.ndarray | None = None


def config_for(
    policy: ModelConfig,
    design: Design = "eagle",
    *,
    draft_vocab_size: int = 0,
) -> EagleConfig:
    """Return the shape of a drafter with the proportions of the policy.

    `eagle3` joins the outputs of layers 1, n/2 − 1 and n − 4 of n, as its authors do. Policies with
    fewer than eight layers use the first, the middle and the second-to-last layer.
    """
    n = policy.num_layers
    layers: tuple[int, ...] = ()
    if design == "eagle3":
        layers = (1, n // 2 - 1, n - 4) if n >= 8 else (0, (n - 1) // 2, max(n - 2, 0))
        layers = tuple(sorted(set(layers)))
    size = 0 if draft_vocab_size >= policy.vocab_size else draft_vocab_size
    layer = dataclasses.replace(
        policy,
        architecture="llama",
        num_layers=1,
        qkv_bias=False,
        qk_norm=False,
        tied_embeddings=False,
        unused_ids=() if size else policy.unused_ids,
        lora=None,
    )
    return EagleConfig(design, layer, layers, size)


def param_specs(config: EagleConfig) -> EagleParams:
    """Return the tree of `ParamSpec` that initialisation, shardings and file names derive from."""
    D = config.layer.d_model
    wide = config.design == "eagle3"
    [layer] = transformer.param_specs(config.layer).layers
    into = len(config.feature_layers) * D if wide else 2 * D
    norm = ParamSpec((D,), (None,), None) if wide else None
    if wide:  # attention reads the embedding and the feature side by side
        double = {
            name: dataclasses.replace(spec, shape=(spec.shape[0], 2 * D), scale=(2 * D) ** -0.5)
            for name in ("query_QD", "key_PD", "value_PD")
            for spec in [getattr(layer, name)]
        }
        layer = dataclasses.replace(layer, **double)
    head = ParamSpec((config.num_draft_ids, D), ("vocab", "embed"), D**-0.5)
    return EagleParams(
        fc_DE=ParamSpec((D, into), ("embed", None), into**-0.5),
        layer=dataclasses.replace(layer, attention_norm_D=None),
        fc_bias_D=ParamSpec((D,), (None,), 0.0) if config.fc_bias else None,
        embedding_norm_D=norm,
        feature_norm_D=norm,
        final_norm_D=norm,
        head_UD=head if config.own_head else None,
    )


def init(config: EagleConfig, key: jax.Array, dtype: Any = jnp.float32) -> EagleParams:
    """Return random weights, initialised like policy weights."""
    return transformer.init_from(param_specs(config), key, dtype)


def frozen(
    policy: transformer.Params,
    draft_ids_U: jax.Array | None,
    call: Callable[..., jax.Array] = lambda make, *args: make(*args),
) -> SharedParams:
    """Return the weights shared with a policy; `call` wraps calls that create new arrays."""
    head_UD = transformer.plain_head_weight(policy)
    if draft_ids_U is not None:
        head_UD = call(_rows, head_UD, draft_ids_U)
    return SharedParams(policy.embedding_VD, head_UD, draft_ids_U)


@jax.jit
def _rows(head_VD: jax.Array, ids_U: jax.Array) -> jax.Array:
    return jnp.take(head_VD, ids_U, axis=0)


def features(config: EagleConfig, params: EagleParams, hidden_BTW: jax.Array) -> jax.Array:
    """Return g_t: the last hidden states (eagle), or fc over `feature_layers` states (eagle3)."""
    D = config.layer.d_model
    if config.design == "eagle":
        return hidden_BTW[..., -D:]
    return _fc(params, hidden_BTW[..., :-D].astype(params.fc_DE.dtype))


def layer_outputs(
    config: EagleConfig,
    params: EagleParams,
    embedding_VD: jax.Array,
    next_tokens_BT: jax.Array,
    features_BTD: jax.Array,
    positions_BT: jax.Array,
    look: Attend,
) -> jax.Array:
    """Return o_t of entries (x_{t+1}, g_t) at rotary position t; `look` computes attention."""
    e_BTD = transformer.embed(embedding_VD, next_tokens_BT).astype(params.fc_DE.dtype)
    g_BTD = features_BTD.astype(e_BTD.dtype)
    eps = config.layer.norm_eps
    if config.design == "eagle":
        x_BTD = looks_from = _fc(params, jnp.concatenate([e_BTD, g_BTD], axis=-1))
    else:
        x_BTD = g_BTD
        normed = (
            rms_norm(e_BTD, params.embedding_norm_D, eps),
            rms_norm(g_BTD, params.feature_norm_D, eps),
        )
        looks_from = jnp.concatenate(normed, axis=-1)
    rope = rope_turns(config.layer, positions_BT)
    return transformer.block(config.layer, params.layer, x_BTD, rope, look, looks_from)


def logits(
    config: EagleConfig, params: EagleParams, head_UD: jax.Array, outputs_BTD: jax.Array
) -> jax.Array:
    """Return draft token logits, float32 [B, T, U]; a separate drafter head replaces `head_UD`."""
    if params.head_UD is not None:
        head_UD = params.head_UD
    if config.design == "eagle3":
        outputs_BTD = rms_norm(outputs_BTD, params.final_norm_D, config.layer.norm_eps)
    logits_BTU = linear(outputs_BTD, head_UD.astype(outputs_BTD.dtype), jnp.float32)
    return transformer.without_unused(config.layer, logits_BTU)


def _fc(params: EagleParams, x_BTE: jax.Array) -> jax.Array:
    y_BTD = linear(x_BTE, params.fc_DE)
    return y_BTD if params.fc_bias_D is None else y_BTD + params.fc_bias_D

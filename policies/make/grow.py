"""Make a larger policy that computes the same function: its rounds cost what its size costs.

    python -m policies.make.grow policies/tiny --width 4 --layers 8 --output downloads/tiny_25m
    python -m policies.make.grow policies/countdown --width 4 --layers 7 \
        --drafter policies/countdown_drafter --output downloads/countdown_drafter

The residual stream holds `width` copies of the policy's, and there are as many copies of its heads
and features; a matrix reads each copy with a share of its weights (Net2Net,
https://arxiv.org/abs/1511.05641). Shares differ by noise whose sum is zero, so that gradients
differ and training uses all weights. New layers add zero. A head `head_width` times as wide has
zeros between its pairs, and a pair's rotary frequency stays as it is.

A grown policy's last hidden states are copies of the small one's over `width`. So a learned drafter
of the small one, with `--drafter`, grows to one of equal drafts: its residual stream and what is
read from it are as wide as the grown policy's; its heads and feed-forward stay as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.config import Layer, ModelConfig, Params, num_params
from reprise.models.decoder import transformer
from reprise.models.formats import hf, hf_files
from reprise.models.text import tokenizer_files
from reprise.rl.drafter_training import export
from reprise.spec.eagle import files as eagle_files
from reprise.spec.eagle.model import EagleWeights

NOISE = 0.1  # of a matrix's root mean square


def grown_config(model: ModelConfig, width: int, num_layers: int) -> ModelConfig:
    """Return the shape of a grown policy; heads are as wide."""
    names = ("d_model", "d_ff", "num_heads", "num_kv_heads")
    more = {name: width * getattr(model, name) for name in names}
    return dataclasses.replace(model, num_layers=num_layers, **more)


def with_wider_heads(model: ModelConfig, params: Params, width: int) -> tuple[ModelConfig, Params]:
    """Return a policy with heads `width` times as wide, and equal logits up to rounding.

    Old pair i is new pair width · i. The norm of a head divides by a root mean square that zeros
    made √width times smaller, in queries and keys; scores are divided by √(width · h). Raises
    ValueError for a policy without such norms.
    """
    if not model.qk_norm or model.qkv_bias:
        raise ValueError("expected a policy with norms of queries and keys and no biases (Qwen3)")
    h, half = width * model.head_dim, width * np.arange(model.head_dim // 2)
    places = np.concatenate([half, h // 2 + half])

    def rows(matrix_PD: jax.Array) -> jax.Array:
        heads = matrix_PD.reshape(-1, model.head_dim, model.d_model)
        wider = jnp.zeros((len(heads), h, model.d_model), matrix_PD.dtype)
        return wider.at[:, places].set(heads).reshape(-1, model.d_model)

    def norm(weights_h: jax.Array) -> jax.Array:
        return jnp.zeros(h, weights_h.dtype).at[places].set(weights_h)

    layers = [
        dataclasses.replace(
            one,
            **{name: rows(getattr(one, name)) for name in ("query_QD", "key_PD", "value_PD")},
            output_DQ=rows(one.output_DQ.T).T,
            query_norm_h=norm(one.query_norm_h),
            key_norm_h=norm(one.key_norm_h) / width**0.5,
        )
        for one in params.layers
    ]
    return (
        dataclasses.replace(model, head_dim=h),
        dataclasses.replace(params, layers=tuple(layers)),
    )


def grown(
    model: ModelConfig, params: Params, width: int, num_layers: int, key: jax.Array
) -> Params:
    """Return the weights of a policy with equal logits, up to rounding.

    Raises ValueError for fewer layers than the policy has.
    """
    if num_layers < model.num_layers:
        raise ValueError(f"expected at least {model.num_layers} layers, got {num_layers}")
    larger = grown_config(model, width, num_layers)
    new = transformer.init(larger, key).layers[model.num_layers :]
    keys = iter(jax.random.split(key, 7 * model.num_layers))

    def wider(matrix: jax.Array) -> jax.Array:  # [out, in] -> [width · out, width · in]
        outputs, inputs = matrix.shape
        shape = (width, outputs, width, inputs)
        noise = jax.random.normal(next(keys), shape)
        noise = (noise - noise.mean(2, keepdims=True)) * NOISE * jnp.std(matrix)
        shares = (matrix[None, :, None] + noise) / width
        return shares.reshape(width * outputs, width * inputs)

    def copies(weights: jax.Array | None) -> jax.Array | None:
        return None if weights is None else jnp.tile(weights, width)

    def layer(old: Layer) -> Layer:
        names = ("attention_norm_D", "mlp_norm_D", "query_bias_Q", "key_bias_P", "value_bias_P")
        vectors = {name: copies(getattr(old, name)) for name in names}
        given = {name: w for name, w in vars(old).items() if w is not None and w.ndim == 2}
        return dataclasses.replace(old, **vectors, **{n: wider(w) for n, w in given.items()})

    idle = [
        dataclasses.replace(one, output_DQ=0 * one.output_DQ, down_DF=0 * one.down_DF)
        for one in new
    ]
    return Params(
        embedding_VD=jnp.tile(params.embedding_VD, (1, width)),
        layers=(*map(layer, params.layers), *idle),
        final_norm_D=jnp.tile(params.final_norm_D, width) / width,
        head_VD=None if params.head_VD is None else jnp.tile(params.head_VD, (1, width)),
    )


def with_more_ids(
    model: ModelConfig, params: Params, vocab_size: int
) -> tuple[ModelConfig, Params]:
    """Return a policy with further ids, which its tokenizer lacks and which are never drawn.

    Their rows are zeros. Raises ValueError for fewer ids than the policy has.
    """
    more = vocab_size - model.vocab_size
    if more < 0:
        raise ValueError(f"expected at least {model.vocab_size} ids, got {vocab_size}")

    def padded(rows_VD: jax.Array) -> jax.Array:
        return jnp.pad(rows_VD, ((0, more), (0, 0)))

    head_VD = None if params.head_VD is None else padded(params.head_VD)
    return (
        dataclasses.replace(model, vocab_size=vocab_size),
        dataclasses.replace(params, embedding_VD=padded(params.embedding_VD), head_VD=head_VD),
    )


def grown_drafter(drafter: EagleWeights, width: int) -> EagleWeights:
    """Return a drafter with equal logits, for the policy of `width` copies; of design `eagle`.

    Its features and outputs are copies over `width`, as the hidden states are; embeddings are
    copies. Raises ValueError for another design, and for a head or bias of its own.
    """
    config, params = drafter.config, drafter.params
    if config.design != "eagle" or config.own_head or config.fc_bias:
        raise ValueError(
            "expected a drafter of design eagle without a head and a bias of its own, got "
            f"{config.design}, own_head={config.own_head}, fc_bias={config.fc_bias}"
        )
    D, layer = config.layer.d_model, params.layer
    embedding_DD, feature_DD = params.fc_DE[:, :D], params.fc_DE[:, D:]
    fc_DE = [jnp.tile(x, (width, width)) / width for x in (embedding_DD / width, feature_DD)]
    reads = {name: getattr(layer, name) for name in ("query_QD", "key_PD", "value_PD")}
    normed = {name: getattr(layer, name) / width for name in ("gate_FD", "up_FD")}
    writes = {name: getattr(layer, name) / width for name in ("output_DQ", "down_DF")}
    larger = dataclasses.replace(
        layer,
        mlp_norm_D=jnp.tile(layer.mlp_norm_D, width),
        **{name: jnp.tile(w, (1, width)) for name, w in (reads | normed).items()},
        **{name: jnp.tile(w, (width, 1)) for name, w in writes.items()},
    )
    shape = dataclasses.replace(config.layer, d_model=width * D)
    return EagleWeights(
        dataclasses.replace(config, layer=shape),
        dataclasses.replace(params, fc_DE=jnp.concatenate(fc_DE, axis=1), layer=larger),
        drafter.draft_ids_U,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m policies.make.grow", description=__doc__)
    parser.add_argument("policy", type=Path)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--head_width", type=int, default=1)
    parser.add_argument("--ids", type=int, default=0, help="fill up the vocabulary to so many")
    parser.add_argument("--drafter", type=Path, help="a drafter of the policy, to grow instead")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.drafter is not None:
        _grow_drafter(arguments)
        return
    shape = grow(
        arguments.policy,
        arguments.output,
        width=arguments.width,
        num_layers=arguments.layers,
        head_width=arguments.head_width,
        vocab_size=arguments.ids,
    )
    print(f"{arguments.output}: {num_params(shape):,} parameters")


def grow(
    policy: Path,
    output: Path,
    *,
    width: int,
    num_layers: int,
    head_width: int = 1,
    vocab_size: int = 0,
) -> ModelConfig:
    """Write the grown policy of a folder with its tokenizer; return its shape.

    `vocab_size` 0 keeps the ids.
    """
    model, params = hf.load_pretrained(policy)
    if head_width > 1:
        model, params = with_wider_heads(model, params, head_width)
    larger = grown(model, params, width, num_layers, jax.random.key(0))
    shape = grown_config(model, width, num_layers)
    if vocab_size:
        shape, larger = with_more_ids(shape, larger, vocab_size)
    hf.save_pretrained(output, shape, larger)
    for name in tokenizer_files.present(policy):
        shutil.copyfile(policy / name, output / name)
    return shape


def _grow_drafter(arguments: argparse.Namespace) -> None:
    """Write the drafter of the grown policy."""
    model = hf.check(arguments.policy)
    drafter = grown_drafter(eagle_files.load(arguments.drafter, model), arguments.width)
    larger = grown_config(model, arguments.width, arguments.layers)
    variant = str(hf_files.read_config(arguments.drafter)[eagle_files.OURS]["variant"])
    text = export.write(arguments.output, drafter, larger, None, arguments.policy, variant)
    print(f"{arguments.output}: {text}")


if __name__ == "__main__":
    main()

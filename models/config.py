"""The configuration of a policy, a dense decoder, and the specification of each weight.

Llama 3.x, Qwen2/2.5 and Qwen3 differ in `qkv_bias`, `qk_norm` and `rope_scaling`. Needs no jax.
Matrices are [out, in]. Shape suffixes: V vocabulary, D model width, F feed-forward width, h head
size, Q = H·h all query heads, P = K·h all key/value heads.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from reprise.models import sums_in_order_on_accelerators

Architecture = Literal["llama", "qwen2", "qwen3"]


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


LoraTarget = Literal["attention", "mlp", "head"]
LORA_TARGETS: dict[LoraTarget, tuple[str, ...]] = {  # fields of `Layer`, or of `Params`
    "attention": ("query_QD", "key_PD", "value_PD", "output_DQ"),
    "mlp": ("gate_FD", "up_FD", "down_DF"),
    "head": ("head_VD",),
}


@dataclasses.dataclass(frozen=True)
class LoraShape:
    """Low-rank adapters: W of the targets becomes W + (alpha / rank) · B · A.

    A and B may hold `places` adapters of this rank side by side; each row of a batch uses one place
    (`models.decoder.lora.for_rows`).
    """

    rank: int
    alpha: float
    targets: tuple[LoraTarget, ...]
    places: int = 1

    def __post_init__(self) -> None:
        unknown = sorted(set(self.targets) - set(LORA_TARGETS))
        if self.rank < 1 or not 0 < self.alpha < math.inf or not self.targets or unknown:
            raise ValueError(
                "expected a LoRA rank of at least 1, a positive alpha and targets of "
                f"{list(LORA_TARGETS)}, got rank={self.rank}, alpha={self.alpha} and "
                f"targets={self.targets}"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, field: str) -> bool:
        """Return whether the weight of this field has an adapter."""
        return any(field in LORA_TARGETS[target] for target in self.targets)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer with grouped-query attention.

    `head_dim` need not be `d_model / num_heads`. The engine refuses sequences longer than
    `max_positions`. `eos_token_ids` end a response. `unused_ids` are ranges [start, stop) of ids
    without tokens: padding of the embedding, or gaps. Their logits are −∞. With `lora`, the target
    weights are `Adapted`.
    """

    architecture: Architecture
    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10_000.0
    rope_scaling: Llama3RopeScaling | None = None
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 4096
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    unused_ids: tuple[tuple[int, int], ...] = ()
    lora: LoraShape | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}: each key/value head serves as many query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs")
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"eos token {token_id} is outside the vocabulary of {self.vocab_size}"
                )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The number of devices along each mesh axis."""

    data: int = -1
    """Devices that share the batch; -1 takes the rest."""
    fsdp: int = 1
    """Devices that share the batch and the weights."""
    tensor: int = 1
    """Devices that share heads, features and vocabulary."""
    rollout_tensor: int | Literal["auto"] = "auto"
    """Devices that hold one copy of the weights in an engine, so that no round gathers weights.
    `auto`: the greatest common divisor of fsdp · tensor and the key/value heads."""

    def __post_init__(self) -> None:
        if self.rollout_tensor != "auto" and self.rollout_tensor < 1:
            raise ValueError(
                f"rollout_tensor must be a positive number or 'auto', got {self.rollout_tensor}"
            )
        if self.fsdp < 1 or self.tensor < 1 or (self.data < 1 and self.data != -1):
            raise ValueError(
                f"mesh sizes must be positive (data may be -1 for 'the rest'), got "
                f"data={self.data} fsdp={self.fsdp} tensor={self.tensor}"
            )


@dataclasses.dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer; None for weights that the architecture lacks."""

    attention_norm_D: Any
    query_QD: Any
    key_PD: Any
    value_PD: Any
    output_DQ: Any
    mlp_norm_D: Any
    gate_FD: Any
    up_FD: Any
    down_DF: Any
    query_bias_Q: Any = None
    key_bias_P: Any = None
    value_bias_P: Any = None
    query_norm_h: Any = None
    key_norm_h: Any = None


@dataclasses.dataclass(frozen=True)
class Params:
    """Weights of a policy; `head_VD` is None if tied to the embedding."""

    embedding_VD: Any
    layers: tuple[Layer, ...]
    final_norm_D: Any
    head_VD: Any = None


@dataclasses.dataclass(frozen=True)
class LowRank:
    """The adapter of one weight: A of [rank, in], and B of [out, rank]."""

    down_RI: Any
    up_OR: Any


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A frozen weight with its adapter: W + scale · B · A; W is None for a tied head.

    `keeps_XR` marks the ranks, of several adapters, that each row of the input uses; None: every
    rank.
    """

    weight_OI: Any
    low: LowRank
    keeps_XR: Any = dataclasses.field(default=None, kw_only=True)
    scale: float = dataclasses.field(metadata={"static": True})  # not a leaf of the tree


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Shape, logical axes and initial scale: a standard deviation, None for ones, 0 for zeros."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    scale: float | None


def param_specs(config: ModelConfig) -> Params:
    """Return the tree of `ParamSpec` that initialisation, shardings and file names derive from."""
    D = config.d_model
    F = config.d_ff
    V = config.vocab_size
    h = config.head_dim
    Q = config.num_heads * h
    P = config.num_kv_heads * h
    into = D**-0.5
    out = (2 * config.num_layers) ** -0.5

    def matrix(outputs: int, inputs: int, axes: tuple[str, str], scale: float) -> ParamSpec:
        return ParamSpec((outputs, inputs), axes, scale)

    def after_split(axis: str) -> tuple[str, str]:
        """Return the axes of a matrix that multiplies split activations.

        Either inputs are split, with a sum over devices, or outputs.
        """
        return (axis, "embed") if sums_in_order_on_accelerators() else ("embed", axis)

    def vector(size: int, axis: str | None, scale: float | None) -> ParamSpec:
        return ParamSpec((size,), (axis,), scale)

    layer = Layer(
        attention_norm_D=vector(D, None, None),
        query_QD=matrix(Q, D, ("heads", "embed"), into),
        key_PD=matrix(P, D, ("kv_heads", "embed"), into),
        value_PD=matrix(P, D, ("kv_heads", "embed"), into),
        output_DQ=matrix(D, Q, after_split("heads"), Q**-0.5 * out),
        mlp_norm_D=vector(D, None, None),
        gate_FD=matrix(F, D, ("mlp", "embed"), into),
        up_FD=matrix(F, D, ("mlp", "embed"), into),
        down_DF=matrix(D, F, after_split("mlp"), F**-0.5 * out),
        query_bias_Q=vector(Q, "heads", 0.0) if config.qkv_bias else None,
        key_bias_P=vector(P, "kv_heads", 0.0) if config.qkv_bias else None,
        value_bias_P=vector(P, "kv_heads", 0.0) if config.qkv_bias else None,
        query_norm_h=vector(h, None, None) if config.qk_norm else None,
        key_norm_h=vector(h, None, None) if config.qk_norm else None,
    )
    base = Params(
        embedding_VD=matrix(V, D, ("vocab", "embed"), 0.02),
        layers=(layer,) * config.num_layers,
        final_norm_D=vector(D, None, None),
        head_VD=None if config.tied_embeddings else matrix(V, D, ("vocab", "embed"), into),
    )
    return base if config.lora is None else with_adapters(base, lora_specs(config), config.lora)


def lora_specs(config: ModelConfig) -> Params:
    """Return the tree of an adapter: `LowRank` of `ParamSpec` for targets, None elsewhere.

    A starts with the variance of PEFT's uniform initialisation, 1 / (3 · in); B starts at 0.
    """
    lora = config.lora
    assert lora is not None
    base = param_specs(dataclasses.replace(config, lora=None))

    def one(field: str, spec: ParamSpec | None) -> LowRank | None:
        if spec is None or not lora.adapts(field):
            return None
        outputs, inputs = spec.shape
        out_axis, in_axis = spec.axes
        return LowRank(
            ParamSpec((lora.places * lora.rank, inputs), (None, in_axis), (3 * inputs) ** -0.5),
            ParamSpec((outputs, lora.places * lora.rank), (out_axis, None), 0.0),
        )

    def of(tree: Layer) -> Layer:
        return Layer(**{name: one(name, spec) for name, spec in vars(tree).items()})

    head = base.embedding_VD if base.head_VD is None else base.head_VD
    return Params(None, tuple(of(layer) for layer in base.layers), None, one("head_VD", head))


def trained_specs(config: ModelConfig) -> Params:
    """Return the specs of the trained weights: the adapter if the config has one, else all."""
    return param_specs(config) if config.lora is None else lora_specs(config)


def with_adapters(base: Params, adapter: Params, lora: LoraShape) -> Params:
    """Return the weights, or specs, of `base`, with each adapter next to its weight."""

    def one(weight: Any, low: LowRank | None) -> Any:
        return weight if low is None else Adapted(weight, low, lora.scale)

    def of(layer: Layer, low: Layer) -> Layer:
        return Layer(**{name: one(x, getattr(low, name)) for name, x in vars(layer).items()})

    layers = tuple(of(x, y) for x, y in zip(base.layers, adapter.layers, strict=True))
    return dataclasses.replace(base, layers=layers, head_VD=one(base.head_VD, adapter.head_VD))


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree of weights, specs or names, in the order of `jax.tree.leaves`."""
    if tree is None:
        return []
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, ParamSpec):
        fields = [f.name for f in dataclasses.fields(tree) if not f.metadata.get("static")]
        parts = [getattr(tree, name) for name in fields]
        return [leaf for part in parts for leaf in leaves(part)]
    return [tree]


def num_params(config: ModelConfig) -> int:
    """Return the number of weights of a policy."""
    return sum(math.prod(spec.shape) for spec in leaves(param_specs(config)))

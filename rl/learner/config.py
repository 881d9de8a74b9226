"""The sections of training, and the static argument of its compiled steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from reprise.models.config import ModelConfig
from reprise.models.layout import layers_per_input
from reprise.rl.gin.values import AUTO, found_size
from reprise.rl.losses.algorithms import (
    AlgorithmConfig,
    CriticConfig,
    DistillConfig,
    adam_rules,
    require,
)

MAX_COUNT = 2**24  # max tokens of a micro-batch, and max optimizer steps of a batch


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """Settings of the update: optimizer steps per batch, and their use of the device.

    Master weights are always float32. An update with a loss or gradient that is not finite is never
    applied.
    """

    inner_updates: int = 1
    """How often a batch is trained on."""
    minibatches: int = 1
    """Optimizer steps in each pass over a batch (whole groups, shuffled)."""
    micro_batch_tokens: int | Literal["auto"] = 8192
    """Positions of a micro-batch, padding included; "auto": the maximum that fits
    (`rl.preflight.sizes`)."""
    logprob_chunk_tokens: int = 1024
    """Positions whose logits exist together."""
    remat: str = "auto"
    """The activations that the backward pass recomputes: `none`; `layer`, everything but the input
    of each layer, for a third more work; `layer:N`, everything but the input of every N-th layer,
    for up to two thirds more work; `dots`, everything but the products with weights. `auto` is none
    on a CPU and layer elsewhere."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """`stop` the run, or `skip` and count the update."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of products; `auto` is float32 on a CPU and bfloat16 elsewhere. float32 has full
    precision on every backend."""

    def __post_init__(self) -> None:
        sizes = ("inner_updates", "minibatches", "micro_batch_tokens", "logprob_chunk_tokens")
        known = {name: value for name in sizes if (value := getattr(self, name)) != AUTO}
        wanted = f"1 to {MAX_COUNT:,}"
        require(self, **{n: (1 <= value <= MAX_COUNT, wanted) for n, value in known.items()})
        try:
            layers_per_input(self.remat_on(is_cpu=True))
        except ValueError as error:
            raise ValueError(f"remat: {error}; 'auto' is valid too") from None

    @property
    def positions_of_micro_batch(self) -> int:
        """The approximate positions of a micro-batch. Raises ValueError if still "auto"."""
        return found_size("Trainer.micro_batch_tokens", self.micro_batch_tokens)

    @property
    def dtype(self) -> Any:
        """The dtype of matrix products; `auto` depends on the backend of jax."""
        import jax

        return self.dtype_on(jax.default_backend() == "cpu")

    def dtype_on(self, is_cpu: bool) -> Any:
        """Return the dtype of matrix products on a CPU or another backend."""
        import jax.numpy as jnp

        auto = "float32" if is_cpu else "bfloat16"
        return jnp.dtype(auto if self.compute_dtype == "auto" else self.compute_dtype)

    def remat_on(self, is_cpu: bool) -> str:
        """Return the part to recompute on CPUs or elsewhere, by a name of `decoder.training`."""
        if self.remat == "auto":
            return "none" if is_cpu else "layer"
        return self.remat

    @property
    def remat_policy(self) -> str:
        """The part that the backward pass recomputes, on the backend of jax."""
        import jax

        return self.remat_on(jax.default_backend() == "cpu")


Schedule = Literal["constant", "linear", "cosine"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a learning rate schedule.

    The schedule covers all optimizer steps of the run. Optimizer steps without a gradient do not
    advance it, so a run that has some stops before its schedule is complete.
    """

    learning_rate: float = 1e-6
    """The peak learning rate."""
    schedule: Schedule = "constant"
    """The learning rate after warm-up."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_grad_norm: float | None = 1.0
    """The norm that gradients are clipped to; None turns clipping off."""
    b1: float = 0.9
    """Decay of the mean of gradients."""
    b2: float = 0.999
    """Decay of the mean of their squares."""
    eps: float = 1e-8
    """Added to the root of the mean of squares."""
    first_moment: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the mean of gradients: bfloat16 saves two bytes per weight. The mean of their
    squares stays float32, since `b2` moves it by only a thousandth."""

    def __post_init__(self) -> None:
        norm = self.max_grad_norm
        require(
            self,
            **adam_rules(self),
            warmup_steps=(0 <= self.warmup_steps < 2**31, "0 to 2³¹−1"),
            max_grad_norm=(
                norm is None or 0 < norm < math.inf,
                "positive and finite, or None for no clipping",
            ),
        )


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """The model and the sections of training; the static argument of the compiled training steps.

    `total_steps` is the maximum number of optimizer steps of the whole run, and the length of
    schedules. Skipped steps (nothing to learn from, or not finite) do not advance schedules, so a
    run that skips some stops before its schedule is complete. Without `may_cut`, responses were
    drawn without top-k and top-p.
    """

    model: ModelConfig
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig, kw_only=True)
    distill: DistillConfig = dataclasses.field(default_factory=DistillConfig, kw_only=True)
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    total_steps: int = 1
    may_cut: bool = dataclasses.field(default=True, kw_only=True)

    @property
    def moves_every_sample(self) -> bool:
        """True if samples with an advantage of 0 have a gradient too."""
        algorithm = self.algorithm
        has_term = algorithm.has_kl_loss or algorithm.entropy_coefficient > 0
        return has_term or self.has_token_advantages

    @property
    def has_token_advantages(self) -> bool:
        """True if advantages differ between the tokens of a response."""
        return self.algorithm.resolved.needs_critic or self.distill.enabled

    @property
    def recomputes_old(self) -> bool:
        """True if the log-probs of a batch are computed before its first update, for later ones."""
        steps = self.trainer.inner_updates * self.trainer.minibatches
        return self.algorithm.resolved.old_logprobs == "recomputed" and steps > 1

    def __post_init__(self) -> None:
        require(self, total_steps=(self.total_steps >= 1, "at least 1"))


@dataclasses.dataclass(frozen=True)
class NumericsConfig:
    """Bits of log-probabilities (docs/architecture.md, Exactness).

    If all passes sum in one order, decoding, drafts, reuse and training compute the same bits, in
    bfloat16 too: drafts change no token, and the ratios of the first update of a batch are 1.
    """

    same_bits: bool | Literal["auto"] = "auto"
    """Require the same bits of all passes. CPUs compute them unless a size does not fit; TPUs and
    Hopper GPUs do so if True, with products that have not been timed on a device yet. Where passes
    cannot, each program that opens a policy rejects True; "auto" prints the reason, and False does
    nothing."""


def why_other_bits(model: ModelConfig, tensor_ways: int) -> str | None:
    """Return why passes on CPUs compute different bits; None if all passes sum in one order.

    The heads of the trained weights are split `tensor_ways`.
    """
    from reprise.models.kernels.cpu.cpu_tiles import (  # divisors of head sizes and input widths
        LANES,
        LINE,
    )

    if reason := _split_heads(model, tensor_ways):
        return reason
    rank = {} if model.lora is None else {"Policy.lora_rank": model.lora.rank}
    if reason := _odd_width(_widths(model) | rank, LINE):
        return reason
    if model.head_dim % LANES:
        return f"expected a head size that {LANES} divides, got {model.head_dim}"
    return None


def why_other_bits_on_accelerators(
    platform: str, model: ModelConfig, tensor_ways: int, dtype: Any, page_tokens: int
) -> str | None:
    """Return why passes on the TPUs or GPUs in use compute different bits.

    Returns None if all passes sum in one order. The heads of the trained weights are split
    `tensor_ways`; the cache of an engine has pages of `page_tokens`.
    """
    import jax.numpy as jnp

    from reprise.models import sums_in_order_on_accelerators
    from reprise.models.kernels.find import find
    from reprise.models.kernels.gpu import hopper
    from reprise.models.kernels.tpu import products_tpu

    is_tpu = platform == "tpu"
    if not sums_in_order_on_accelerators():
        return "expected Numerics.same_bits=True before the start, else products have many orders"
    if not is_tpu and not hopper.is_hopper():
        return "expected GPUs of compute capability 9, got others"
    if reason := _split_heads(model, tensor_ways):
        return reason
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"expected Trainer.compute_dtype=bfloat16, got {jnp.dtype(dtype).name}"
    kernel = find("page_attention", platform, model.head_dim, page_tokens, dtype)
    if isinstance(kernel, str):
        return kernel
    if model.lora is not None:
        return f"expected all weights to be trained, got Policy.lora_rank={model.lora.rank}"
    return _odd_width(_widths(model), products_tpu.LANES if is_tpu else hopper.ROWS)


def _split_heads(model: ModelConfig, tensor_ways: int) -> str | None:
    if model.num_kv_heads % tensor_ways == 0:
        return None
    return (
        f"expected key/value heads that Mesh.tensor={tensor_ways} divides, got {model.num_kv_heads}"
    )


def _widths(model: ModelConfig) -> dict[str, int]:
    """Return the input widths of matrix products, by name."""
    query_width = model.num_heads * model.head_dim
    return {"d_model": model.d_model, "d_ff": model.d_ff, "num_heads · head_dim": query_width}


def _odd_width(widths: Mapping[str, int], divisor: int) -> str | None:
    for name, width in widths.items():
        if width % divisor:
            return f"expected a {name} that {divisor} divides, got {width}"
    return None

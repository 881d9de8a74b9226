"""The configuration of a policy: the shape of a dense decoder, without its weights.

Llama 3.x, Qwen2/2.5 and Qwen3 differ in `qkv_bias`, `qk_norm` and `rope_scaling`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Architecture = Literal["llama", "qwen2", "qwen3"]


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer with grouped-query attention.

    `head_dim` need not be `d_model / num_heads`. The engine refuses sequences longer than
    `max_positions`. `eos_token_ids` end a response.
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
    """The number of devices along each mesh axis; data=-1 takes those that the others leave.

    An engine on these devices has a mesh of its own over them: weights are split `rollout_tensor`
    ways, by heads, features and vocabulary, and each group of so many devices has a copy of them
    and a part of the requests. So no round gathers weights. `auto`: the greatest common divisor of
    fsdp · tensor and the policy's key/value heads.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    rollout_tensor: int | Literal["auto"] = "auto"

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

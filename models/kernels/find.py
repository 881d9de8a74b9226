"""The kernel of an operation on a platform, or the reason why there is none.

Operations are "page_attention" (of new tokens, over a cache), "row_attention" (of training rows),
"products" (with weights) and "heads" (norms, rotary positions and cache writes of new tokens). Each
platform has a room, with a module for each operation.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Literal

Operation = Literal["page_attention", "row_attention", "products", "heads"]
ROOMS = {"cpu": "cpu", "tpu": "tpu", "cuda": "gpu"}
NO_KERNEL = {
    ("products", "cuda"),  # XLA products, of one tile shape
    ("heads", "cpu"),
    ("heads", "tpu"),
}


def find(operation: Operation, platform: str, *sizes: Any) -> ModuleType | str:
    """Return the module of the kernel, or why it does not take these sizes, in one sentence.

    `sizes` are the arguments of the `takes` functions of this operation. Modules are imported on
    the first call: numba takes half a second, Pallas a second.
    """
    if platform not in ROOMS or (operation, platform) in NO_KERNEL:
        return f"expected CPUs, TPUs or GPUs with a kernel for {operation}, got {platform}"
    if platform == "cuda":
        from reprise.models.kernels.gpu.hopper import is_hopper

        if not is_hopper():
            return "expected a GPU of compute capability 9, got another one or none"
    kernel = module_of(operation, platform)
    reason: str | None = kernel.takes(*sizes)
    return kernel if reason is None else reason


def module_of(operation: Operation, platform: str) -> ModuleType:
    """Return the module of the kernel of an operation, for any sizes."""
    room = ROOMS[platform]
    return importlib.import_module(f"{__package__}.{room}.{operation}_{room}")


def takes(operation: Operation, platform: str, *sizes: Any) -> bool:
    """Return whether a kernel takes these sizes."""
    return not isinstance(find(operation, platform, *sizes), str)

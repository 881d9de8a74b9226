"""The kernel of an operation, or the reason why there is none."""

import jax.numpy as jnp
import pytest

from reprise.models.kernels.cpu import page_attention_cpu
from reprise.models.kernels.find import find, module_of, takes
from reprise.models.kernels.gpu import hopper, row_attention_gpu
from reprise.models.kernels.tpu import products_tpu


def test_a_kernel_that_takes_the_sizes_is_found():
    assert find("page_attention", "cpu", 64, 7, jnp.float32) is page_attention_cpu
    assert find("products", "tpu", 128, jnp.bfloat16) is products_tpu
    assert takes("products", "tpu", 128, jnp.bfloat16)


@pytest.mark.parametrize(
    ("operation", "platform", "sizes", "reason"),
    [
        ("page_attention", "cpu", (66, 7, jnp.float32), "expected a head size that 8 divides"),
        ("products", "tpu", (128, jnp.float32), "expected bfloat16, got float32"),
        ("products", "cuda", (128, jnp.bfloat16), "a kernel for products, got cuda"),
        ("row_attention", "rocm", (), "a kernel for row_attention, got rocm"),
    ],
)
def test_the_reason_says_what_is_expected(operation, platform, sizes, reason):
    assert reason in find(operation, platform, *sizes)
    assert not takes(operation, platform, *sizes)


def test_gpus_need_hopper(monkeypatch):
    sizes = (1, 256, 4, 64), (1, 256, 2, 64), jnp.bfloat16
    monkeypatch.setattr(hopper, "is_hopper", lambda: False)
    assert "compute capability 9" in find("row_attention", "cuda", *sizes)
    monkeypatch.setattr(hopper, "is_hopper", lambda: True)
    assert find("row_attention", "cuda", *sizes) is row_attention_gpu
    assert module_of("row_attention", "cuda") is row_attention_gpu

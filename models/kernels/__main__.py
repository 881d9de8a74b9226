"""Compile the CPU kernels into the numba cache, as the set-up does: `python -m models.kernels`."""

from reprise.models.kernels.cpu import page_attention_cpu, products_cpu, row_attention_cpu

for kernel in (page_attention_cpu, products_cpu, row_attention_cpu):
    kernel.register()

"""Kernels for CPUs, GPUs and TPUs, for functions of `models` that also have a portable path."""

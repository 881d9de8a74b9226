"""Kernels of accelerators; each stands behind a function of `models` with a portable path."""

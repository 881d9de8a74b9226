"""Accelerator kernels for functions of `models` that also have a portable path."""

import math

LOG2_E = math.log2(math.e)  # softmax in powers of 2, which the hardware has
NEGATIVE = -1e30  # the top over no key: finite, so that a difference of two is a number

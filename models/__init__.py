"""Policies in JAX. Compiled programs keep every rounding to bfloat16.

XLA may drop a rounding between two operations, and does so in one program but not in another
(docs/architecture.md, Exactness). It reads its flags once, when jax opens its first backend:
import this package before that. A value already set in XLA_FLAGS stays.
"""

import os

_EXCESS_PRECISION = "--xla_allow_excess_precision"

if _EXCESS_PRECISION not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EXCESS_PRECISION}=false".strip()

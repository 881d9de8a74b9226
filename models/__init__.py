"""Policies in JAX. Their programs round to bfloat16 wherever they say so.

XLA may drop a rounding between two operations, and does so in one program but not in another
(docs/architecture.md, Exactness). It reads its flags once, as jax opens its first backend: import
this package before that. A value that is set in XLA_FLAGS already stays.
"""

import os

_EXCESS_PRECISION = "--xla_allow_excess_precision"

if _EXCESS_PRECISION not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EXCESS_PRECISION}=false".strip()

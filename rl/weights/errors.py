"""Errors of weights that are sent, by what to do about them."""


class DamagedWeights(ValueError):
    """Weights were received that are not those offered, or do not fit the policy."""


class CarrierError(RuntimeError):
    """An offered payload is gone: another offer is needed."""

"""Errors of weights that are sent, by what to do about them."""


class DamagedWeights(ValueError):
    """Weights were received that are not those offered, or do not fit the policy."""


class CarrierError(RuntimeError):
    """Nothing is wrong with what came, but not all came: ask for another offer.

    The other end is gone or too slow, or trainer processes publish one after the other.
    """

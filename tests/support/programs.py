"""What a program holds, read from its jaxpr."""

import math

import jax.extend


def largest_array(jaxpr):
    """Return the most elements of any array that it makes, in inner programs but kernels too."""
    found = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name != "pallas_call":  # whose arrays are of a block's size
            sizes = (math.prod(getattr(v.aval, "shape", ())) for v in equation.outvars)
            inner = map(largest_array, jax.extend.core.jaxprs_in_params(equation.params))
            found = max([found, *sizes, *inner])
    return found


def count_primitives(jaxpr, name, of_size=0):
    """Return how often a primitive takes an array with a dimension of this size; 0: any array."""
    count = 0
    for equation in jaxpr.eqns:
        takes = any(of_size in (*getattr(v.aval, "shape", ()), 0) for v in equation.invars)
        count += equation.primitive.name == name and takes
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            count += count_primitives(inner, name, of_size)
    return count

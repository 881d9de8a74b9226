"""Defines its function, but cannot be imported."""

import a_module_that_does_not_exist  # noqa: F401


def score(completions, **columns):
    return [0.0]

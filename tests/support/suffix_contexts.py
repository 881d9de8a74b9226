"""What a suffix forest knows of a context, for tests."""

import numpy as np

from reprise.spec.retrieval import suffix_kernels as kernels
from reprise.spec.retrieval.suffix_forest import Followers


def follower_of(forest, tree, context):
    """A follower that has read a context."""
    followers = Followers.of([tree])
    forest.follow(followers, np.array([[*context, 0]], np.int32), [0], [len(context)])
    return followers


def occurrences(forest, tree, context):
    """Return how often a context occurs in the tree's sequences, and the sum of their weights."""
    assert len(context) <= forest.max_context
    followers = follower_of(forest, tree, context)
    if followers.matched_F[0] < len(context):
        return 0, 0.0
    state = followers.state_FX[0, kernels.AT]
    arena = forest._arena
    return arena.states[state, kernels.COUNT], arena.weights[state, kernels.WEIGHT]


def count(forest, tree, context):
    return occurrences(forest, tree, context)[0]


def weight(forest, tree, context):
    return occurrences(forest, tree, context)[1]

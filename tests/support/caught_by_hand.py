"""Sequences that tell which one they are, and a buffer with some of them."""

import numpy as np

from reprise.spec.eagle.config import DataBufferConfig
from reprise.spec.eagle_training.training_data import DataBuffer, HiddenStates

WIDTH = 4


def sequence(length, name=0, dtype=np.float32, width=WIDTH):
    """Tokens and states that tell which sequence they are of."""
    tokens = np.arange(length, dtype=np.int32) + 1000 * name
    states = np.repeat(tokens[:-1, None] / 64, width, axis=1).astype(dtype)
    return HiddenStates(tokens, length // 2, states, name)


def bytes_of(length):
    return sequence(length).num_bytes


def buffer(max_bytes=2**30):
    return DataBuffer(DataBufferConfig(max_bytes))


def held(buffer):
    """(step, length) of all, in the order in which they would go."""
    state = buffer.state()
    return list(zip(state["steps"], [len(t) for t in state["tokens"]], strict=True))


def equal(a, b):
    return (
        (a.prompt_tokens, a.policy_version) == (b.prompt_tokens, b.policy_version)
        and a.hidden_TW.dtype == b.hidden_TW.dtype
        and a.tokens_T.tobytes() == b.tokens_T.tobytes()
        and a.hidden_TW.tobytes() == b.hidden_TW.tobytes()
        and a.hidden_TW.shape == b.hidden_TW.shape
    )


def drawn(buffer, num_tokens, step, seed):
    return buffer.sample(num_tokens, step, np.random.default_rng(seed))


def lengths(sequences):
    return [len(c.tokens_T) for c in sequences]


def mixed():
    """Step 1 has lengths 10 … 100, step 2 so far 4, 5, 6, 20."""
    kept = buffer()
    for length in range(10, 110, 10):
        kept.add(sequence(length, name=length), 1)
    for length in (4, 20, 5, 6):
        kept.add(sequence(length, name=length), 2)
    return kept

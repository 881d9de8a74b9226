"""Hidden states of packed passes against those of each sequence alone; parts that fit the host."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.models.decoder import transformer
from reprise.rl.drafter_training import offline
from reprise.rl.drafter_training.offline import chunks, hidden_of, num_bytes, runs
from reprise.rl.records.packing import Response
from reprise.spec.eagle import model as eagle
from tests.support import tiny_run

MODEL = dataclasses.replace(tiny_run.MODEL, num_layers=3)
HIDDEN = jax.jit(transformer.hidden, static_argnums=0)


def some_responses(lengths, seed=0):
    """(group, prompt tokens, response tokens) each; a group's have its prompt."""
    rng = np.random.default_rng(seed)
    prompts = {}
    found = []
    for i, (group, prompt_tokens, tokens) in enumerate(lengths):
        drawn = rng.integers(2, MODEL.vocab_size, prompt_tokens).astype(np.int32)
        prompt = prompts.setdefault((group, prompt_tokens), drawn)
        tokens = rng.integers(2, MODEL.vocab_size, tokens).astype(np.int32)
        found.append(Response(f"{i}", group, prompt, tokens))
    return found


def alone(params, tokens_T, layers):
    """States of one sequence in a row of its own: of policies that end after these layers."""
    found, n = [], len(tokens_T)
    tokens_T = np.pad(tokens_T, (0, 16 - n))
    for layer in layers:
        config = dataclasses.replace(MODEL, num_layers=layer + 1)
        cut = dataclasses.replace(params, layers=params.layers[: layer + 1])
        found.append(HIDDEN(config, cut, tokens_T[None])[0, :n])
    return np.concatenate(found, axis=-1)


@pytest.fixture
def small_passes(monkeypatch):
    """Rows of 8 and 16 positions, two or one a pass, laid out for a pass or two at a time."""
    monkeypatch.setattr(offline, "LEAST_ROW_TOKENS", 8)
    monkeypatch.setattr(offline, "PASS_TOKENS", 16)
    monkeypatch.setattr(offline, "PLANNED_PASSES", 1)


@pytest.mark.parametrize("design", ["eagle", "eagle3"])
def test_packed_states_are_those_of_each_sequence_alone(design, small_passes):
    drafter = eagle.config_for(MODEL, design)
    params = transformer.init(MODEL, jax.random.key(1))
    params = dataclasses.replace(params, embedding_VD=30 * params.embedding_VD)
    responses = some_responses(
        [(0, 3, 2), (1, 1, 4), (0, 3, 3), (0, 3, 4), (2, 6, 7), (3, 4, 1), (1, 1, 2), (2, 6, 9)]
    )
    found = list(hidden_of(responses, params, MODEL, drafter, np.float32))
    wanted = {(*r.prompt_ids.tolist(), *r.tokens.tolist()): len(r.prompt_ids) for r in responses}
    assert sorted(tuple(c.tokens_T.tolist()) for c in found) == sorted(wanted)
    layers = [*drafter.feature_layers, MODEL.num_layers - 1]
    for caught in found:
        assert caught.prompt_tokens == wanted[tuple(caught.tokens_T.tolist())]
        assert caught.tokens_T.dtype == np.int32 and caught.hidden_TW.dtype == np.float32
        states_TW = caught.hidden_TW.copy()
        # what comes of the layers before the last has not been through the last norm
        D = MODEL.d_model
        for i in range(len(layers) - 1):
            part = slice(i * D, (i + 1) * D)
            states_TW[:, part] = transformer.rms_norm(
                states_TW[:, part], params.final_norm_D, MODEL.norm_eps
            )
        np.testing.assert_allclose(
            states_TW, alone(params, caught.tokens_T[:-1], layers), atol=2e-5, rtol=1e-5
        )


def test_sizes_are_those_of_the_sequences():
    drafter = eagle.config_for(MODEL, "eagle3")
    responses = some_responses([(0, 3, 2), (1, 1, 4)])
    params = transformer.init(MODEL, jax.random.key(1))
    for dtype, value_bytes in ((np.float32, 4), ("bfloat16", 2)):
        found = hidden_of(responses, params, MODEL, drafter, dtype)
        wanted = [num_bytes(r, drafter, value_bytes) for r in responses]
        assert sorted(c.num_bytes for c in found) == sorted(wanted)


@given(
    sizes=st.lists(st.integers(1, 10), min_size=1, max_size=30),
    room=st.integers(10, 40),
    seed=st.integers(0, 3),
)
def test_chunks_hold_each_sequence_once_within_the_bound(sizes, room, seed):
    responses = some_responses([(i, 1, 1) for i in range(len(sizes))])
    parts = list(chunks(responses, sizes, room, seed, 0))
    assert all(parts)
    numbers = [[int(r.name) for r in part] for part in parts]
    assert sorted(i for part in numbers for i in part) == list(range(len(sizes)))
    filled = [sum(sizes[i] for i in part) for part in numbers]
    assert max(filled) <= room
    for bytes_before, after in zip(filled, numbers[1:], strict=False):
        assert bytes_before + sizes[after[0]] > room  # no chunk is left half empty
    again = chunks(responses, sizes, room, seed, 0)
    assert [[int(r.name) for r in part] for part in again] == numbers


def test_each_epoch_has_an_order_of_its_own():
    responses = some_responses([(i, 1, 1) for i in range(30)])
    orders = [
        [r.name for part in chunks(responses, [1] * 30, 7, 0, epoch) for r in part]
        for epoch in range(2)
    ]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_a_sequence_beyond_the_bound_is_refused():
    responses = some_responses([(0, 1, 1), (1, 1, 1)])
    with pytest.raises(ValueError, match="max_bytes of at least 9, .* got 8"):
        list(chunks(responses, [3, 9], 8, 0, 0))


def test_runs_by_hand():
    assert list(runs([3, 1, 2, 5, 1], int, 4)) == [[3, 1], [2, 5], [1]]
    assert list(runs([], int, 4)) == []

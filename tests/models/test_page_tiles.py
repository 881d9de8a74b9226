"""Each way to a token finds the same bits on a Hopper GPU: its kernels, interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_interpreters import finding_races

from models import page_tiles
from models.attention import After
from models.kernels import row_attention_gpu

T, K, G, h = 64, 2, 3, 64
TREE = [-1, 0, 1, 2, 0, 4, 2, 5, 1]  # nodes 4, 6 and 8 begin side paths


@partial(jax.jit, static_argnames="is_held")
def attend(new, pages, row_X, length_X, parent_X, table_BN, is_held=False):
    sizes = (0, 1) if is_held else (len(row_X), len(row_X))
    after = After(row_X, length_X, parent_X, len(table_BN), *sizes)
    return page_tiles.attend(*new, *pages, after, table_BN, interpret=finding_races())


def numbers(rng, num_tokens):
    sizes = (num_tokens, K * G, h), (num_tokens, K, h), (num_tokens, K, h)
    return [rng.normal(size=size).astype(jnp.bfloat16) for size in sizes]


def empty_pages(num_pages):
    return [np.full((num_pages, K, T, h), np.nan, jnp.bfloat16) for _ in range(2)]


def written(pages, table_N, new, first=0):
    for held, x_XKh in zip(pages, new, strict=True):
        for i, x_Kh in enumerate(x_XKh, start=first):
            held[table_N[i // T], :, i % T] = x_Kh


def path_to(node):
    return [] if node < 0 else [*path_to(TREE[node]), node]


@pytest.mark.parametrize("length", [0, 62, 100, 1021])
def test_nodes_of_a_tree_are_tokens_that_are_decoded(length):
    rng = np.random.default_rng(length)
    _, *old = numbers(rng, length)
    new, table = numbers(rng, len(TREE)), rng.permutation(18).astype(np.int32)[None]
    pages = empty_pages(18)
    written(pages, table[0], old)
    lengths = np.full(len(TREE), length, np.int32)
    row, parent = np.zeros_like(lengths), np.asarray(TREE, np.int32)
    found = attend(new, pages, row, lengths, parent, table)
    for node in range(len(TREE)):
        *before, last = path_to(node)
        pages = empty_pages(18)
        written(pages, table[0], old)
        written(pages, table[0], [x[[*before, last]] for x in new[1:]], first=length)
        one = np.zeros(1, np.int32)
        at = one, one + length + len(before), one - 1
        alone = attend([x[[last]] for x in new], pages, *at, table, is_held=True)
        np.testing.assert_array_equal(found[node], alone[0])

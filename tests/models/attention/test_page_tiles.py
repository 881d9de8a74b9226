"""Each way to a token finds the same bits on accelerators: their attention, interpreted.

The last bits of float32 sums are compared, which rounding to bfloat16 would hide.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from reprise.models.attention import page_tiles
from reprise.models.attention.attention import After
from reprise.models.decoder.layers import sum_in_order
from reprise.models.kernels.gpu import hopper, page_blocks, row_attention_gpu
from reprise.models.kernels.tpu import row_attention_tpu, softmax_tpu

K, G, h = 2, 3, 128
TREE = [-1, 0, 1, 2, 0, 4, 2, 5, 1]  # nodes 4, 6 and 8 begin paths
LENGTHS = [0, 62, 100, 255]
RESPONSES = [*range(150, 200)], [*range(200, 300)]
BLOCKS = {"cuda": 64, "tpu": 128}
INTERPRET = {"cuda": InterpretGPUParams(), "tpu": True}
ROWS = {"cuda": row_attention_gpu, "tpu": row_attention_tpu}


def product(x, y, dimensions):
    """A TPU's product: the order of a sum depends on the inputs alone, as its hardware's does."""
    ((x_axis,), (y_axis,)), _ = dimensions
    x_Xi, y_Yi = (jnp.moveaxis(z.astype(jnp.float32), i, 1) for z, i in ((x, x_axis), (y, y_axis)))
    return sum_in_order(x_Xi[:, None] * y_Yi)


@pytest.fixture(scope="module", params=BLOCKS)
def platform(request):
    """The last byte of each float32 in the place of its rounding; parts of two blocks on GPUs."""

    def last_byte(attention):
        def bits(softmax):
            bits = jax.lax.bitcast_convert_type(attention(softmax), jnp.int32)
            return (bits & 255).astype(jnp.float32)

        return bits

    with pytest.MonkeyPatch.context() as patch:
        for softmax in (hopper.Softmax, softmax_tpu.Softmax, softmax_tpu.KeysFirst):
            patch.setattr(softmax, "attention", last_byte(softmax.attention))
        for module in (page_blocks, row_attention_gpu):
            patch.setattr(module, "PART_TOKENS", 2 * hopper.ROWS)
        patch.setattr(softmax_tpu, "product", product)
        jax.clear_caches()
        yield request.param
    jax.clear_caches()


@partial(jax.jit, static_argnames=("platform", "num_paths", "width"))
def attend(platform, new, pages, row_X, length_X, parent_X, table_BN, num_paths, width=None):
    after = After(row_X, length_X, parent_X, num_paths, width or len(row_X), len(row_X))
    given = *new, *pages, after, table_BN
    return page_tiles.attend(platform, *given, interpret=INTERPRET[platform])


@partial(jax.jit, static_argnames="platform")
def attend_rows(platform, qkv, places):
    return ROWS[platform].forward(*qkv, *places, interpret=INTERPRET[platform])[0]


class Text:
    """Queries, keys and values of tokens, whose pages are anywhere."""

    def __init__(self, platform, num_tokens, page_tokens=128, seed=0):
        self.platform = platform
        rng = np.random.default_rng(seed)
        sizes = (num_tokens, K * G, h), (num_tokens, K, h), (num_tokens, K, h)
        self.new = [rng.normal(size=size).astype(jnp.bfloat16) for size in sizes]
        self.table = rng.permutation(9).astype(np.int32)[: 512 // page_tokens]
        self.page_tokens = page_tokens

    def some(self, tokens):
        return [x[tokens] for x in self.new]

    def pages(self, tokens):
        """Pages that hold these tokens; the rest of them is NaN."""
        size = 9, K, self.page_tokens, h
        pages = [np.full(size, np.nan, jnp.bfloat16) for _ in range(2)]
        for held, x_XKh in zip(pages, self.some(tokens)[1:], strict=True):
            for i, x_Kh in enumerate(x_XKh):
                page, at = divmod(i, self.page_tokens)
                held[self.table[page], :, at] = x_Kh
        return pages

    def decoded(self, tokens):
        """The last of these tokens, once the pages hold all of them."""
        at = np.zeros(1, np.int32), np.full(1, len(tokens) - 1, np.int32), np.full(1, -1, np.int32)
        one = self.some(tokens[-1:]), self.pages(tokens), *at, self.table[None]
        return attend(self.platform, *one, num_paths=0)[0]


def path_to(node):
    return [] if node < 0 else [*path_to(TREE[node]), node]


@pytest.mark.parametrize("page_tokens", [64, 128])
@pytest.mark.parametrize("length", LENGTHS)
def test_nodes_of_trees(platform, length, page_tokens):
    """Of two slots: one has the tree, the other its first five nodes; with padding.

    The trees have six paths; a program may allow more.
    """
    if page_tokens < BLOCKS[platform]:
        pytest.skip("a page holds a block")
    text = Text(platform, length + len(TREE), page_tokens, length)
    old, nodes = list(range(length)), [*range(9), *range(5), 0]
    row = np.asarray([0] * 9 + [1] * 5 + [2], np.int32)
    parent = np.asarray([*TREE, *(9 + p if p >= 0 else p for p in TREE[:5]), -1], np.int32)
    given = text.some(length + np.asarray(nodes)), text.pages(old), row, np.full(15, length), parent
    num_paths = 6 if length == 62 else 15
    found = attend(platform, *given, np.stack([text.table] * 2), num_paths=num_paths)
    for x, node in enumerate(nodes[:-1]):
        want = text.decoded(old + [length + n for n in path_to(node)])
        np.testing.assert_array_equal(found[x], want)
    assert not found[-1].any()


def test_one_token_of_each_row(platform):
    """As in a plain round, in which one row is idle."""
    text = Text(platform, 256)
    last = np.asarray([255, 0, 70, 199], np.int32)
    row = np.asarray([0, 1, -1, 3], np.int32)
    given = text.some(last), text.pages(list(range(256))), row, last, np.full(4, -1, np.int32)
    found = attend(platform, *given, np.stack([text.table] * 4), num_paths=0, width=1)
    for x in (0, 1, 3):
        np.testing.assert_array_equal(found[x], text.decoded(list(range(last[x] + 1))))
    assert not found[2].any()


@pytest.mark.parametrize("length", LENGTHS[1::2])
def test_chunks(platform, length):
    """Two chunks of a row, the second of which begins inside the first, and padding."""
    text = Text(platform, length + 80, seed=length)
    at = length + np.asarray([*range(40), *range(30, 70), *[0] * 5])
    row, parent = np.zeros(85, np.int32), np.arange(-1, 84).astype(np.int32)
    row[80:], parent[40], parent[80:] = -1, 29, -1
    old = text.pages(list(range(length)))
    given = text.some(at), old, row, np.full(85, length), parent
    found = attend(platform, *given, text.table[None], num_paths=3)
    for x in (0, 29, 39, 40, 49, 79):
        np.testing.assert_array_equal(found[x], text.decoded(list(range(at[x] + 1))))


@pytest.fixture(scope="module")
def wanted(platform):
    """Tokens of a prompt of 150 and of two responses, decoded."""
    text = Text(platform, 300)
    return {
        (number, i): np.asarray(text.decoded([*range(150), *own[: i + 1]]))
        for number, own in enumerate(RESPONSES, start=1)
        for i in (0, 41, 42, len(own) - 1)
    }


def rows_that_differ(platform, wanted, early=0):
    """Return how many numbers differ if prompt and responses are a row.

    22 tokens of the prompt come before each response; segments begin `early` positions before a
    block does.
    """
    tokens = list(range(128 - early))
    prompt, branch, first = [1] * len(tokens), [0] * len(tokens), {}
    for number, own in enumerate(RESPONSES, start=1):
        segment = [*range(128 - early, 150), *own]
        first[number] = len(tokens) + len(segment) - len(own)
        segment += [0] * (-len(segment) % BLOCKS[platform])
        tokens += segment
        prompt += [1] * len(segment)
        branch += [number] * len(segment)
    places = [np.asarray(x, np.int32)[None] for x in (prompt, branch)]
    qkv = [x[None] for x in Text(platform, 300).some(tokens)]
    out_1THh = np.asarray(attend_rows(platform, qkv, places))
    pairs = [(out_1THh[0, first[number] + i], want) for (number, i), want in wanted.items()]
    return sum(int((found != want).sum()) for found, want in pairs)


def test_rows(platform, wanted):
    assert not rows_that_differ(platform, wanted)


def test_segments_that_begin_inside_blocks_are_found(platform, wanted):
    assert rows_that_differ(platform, wanted, early=5) > 100


def other_parts(patch):
    patch.setattr(row_attention_gpu, "PART_TOKENS", 3 * hopper.ROWS)


def keys_in_two_products(patch):
    def add_product(registers, sum_Rj, x_Ri, y_ij):
        ways = (slice(0, 9), slice(9, None))
        one, other = (registers.product(x_Ri[:, way], y_ij[way]) for way in ways)
        return sum_Rj + (one + other)

    patch.setattr(hopper.WarpGroup, "add_product", add_product)


def weights_of_all_blocks(patch):
    """A block's weights have the top of all blocks that are computed with it."""

    def with_blocks(softmax, scores_XC, values_Xh):
        sum_hC, before_1C, total_SC = softmax
        top_1C = jnp.maximum(before_1C, jnp.round(jnp.max(scores_XC, axis=0, keepdims=True)))
        kept_1C = hopper.power_of_two(before_1C - top_1C)
        weights_XC = jnp.exp2(scores_XC - top_1C)
        new_hC = softmax_tpu.product(
            values_Xh, weights_XC.astype(values_Xh.dtype), softmax_tpu.FIRST
        )
        whole_SC = weights_XC.reshape(-1, 128, weights_XC.shape[1]).sum(axis=0)
        return softmax_tpu.KeysFirst(
            sum_hC * kept_1C + new_hC, top_1C, total_SC * kept_1C + whole_SC
        )

    patch.setattr(softmax_tpu.KeysFirst, "with_blocks", with_blocks)


def weights_in_another_order(patch):
    patch.setattr(softmax_tpu.KeysFirst, "total", lambda x: x.total_SC.sum(axis=0, keepdims=True))


PLANTS = {
    "cuda": (other_parts, keys_in_two_products),
    "tpu": (weights_in_another_order, weights_of_all_blocks),
}


def test_another_order_of_sums_is_found(platform, wanted):
    for plant in PLANTS[platform]:
        with pytest.MonkeyPatch.context() as patch:
            jax.clear_caches()
            plant(patch)
            assert rows_that_differ(platform, wanted) > 100
    jax.clear_caches()

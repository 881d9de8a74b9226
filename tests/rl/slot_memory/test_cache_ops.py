"""Copies of pages in a cache, and pages from and to the host."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reprise.models.attention import kv_cache
from reprise.models.attention.entries import Entries
from reprise.models.config import ModelConfig
from reprise.rl.records.trajectory import HostKv
from reprise.rl.slot_memory import cache_ops
from reprise.rl.slot_memory.cache_ops import PAGES_AT_ONCE

MODEL = ModelConfig("qwen3", 32, 16, 2, 4, 2, 4, 16, qk_norm=True, max_positions=512)
PAGE = 8
KINDS = pytest.mark.parametrize("for_cpu", [True, False], ids=["keys of CPUs", "of accelerators"])


def filled(num_pages, for_cpu):
    """A cache of random numbers on the host, without a table."""
    cache = kv_cache.init(
        MODEL, 1, 1, num_pages, PAGE, jnp.float32, for_cpu=for_cpu, feature_layers=(0,)
    )
    rng = np.random.default_rng(0)
    cache = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), cache)
    return dataclasses.replace(cache, table_BN=None)


def on_device(cache):
    return jax.tree.map(jnp.asarray, cache)


def positions(cache, page):
    """Keys, values and features of a page, with positions first."""
    found = []
    kv_cache.map_arrays(lambda x, kind: found.append(np.moveaxis(x[page], kind.axis - 1, 0)), cache)
    assert len(found) == 2 * MODEL.num_layers + 1
    return found


def assert_same(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@KINDS
def test_pages_are_copied_and_no_other_changes(for_cpu):
    before = filled(6, for_cpu)
    source_X, target_X = np.int32([0, 3, 0, 2]), np.int32([1, 4, -1, -1])  # −1: padding
    after = cache_ops.copy_pages(on_device(before), source_X, target_X)
    for page, origin in enumerate([0, 0, 2, 3, 3, 5]):
        assert_same(positions(after, page), positions(before, origin))


@KINDS
def test_a_page_that_was_read_may_be_written_by_a_later_copy(for_cpu):
    """As if a row that was to give its prompt gave its pages for the copy of another one."""
    before = filled(3, for_cpu)
    after = cache_ops.copy_pages(on_device(before), np.int32([0, 2]), np.int32([1, 0]))
    for page, origin in enumerate([2, 0, 2]):
        assert_same(positions(after, page), positions(before, origin))


def read(cache, pages, num_tokens):
    """Entries of a slot with these pages, on the host."""
    parts = []
    for first in range(0, len(pages), PAGES_AT_ONCE):
        page_X = np.full(PAGES_AT_ONCE, -1, np.int32)
        some = pages[first : first + PAGES_AT_ONCE]
        page_X[: len(some)] = some
        parts.append(jax.device_get(cache_ops.read_pages(cache, page_X)))
    return cache_ops.host_of_pages(parts, num_tokens)


def arrays(kv):
    return [*kv.entries.keys, *kv.entries.values, *kv.entries.features]


@KINDS
@pytest.mark.parametrize("num_tokens", [1, PAGE, 3 * PAGE + 5, (PAGES_AT_ONCE + 1) * PAGE + 1])
def test_entries_of_the_host_are_by_position_whatever_the_pages(for_cpu, num_tokens):
    count = -(-num_tokens // PAGE)
    source, pages = filled(count + 3, for_cpu), np.random.default_rng(1).permutation(count + 3)
    kv = read(on_device(source), pages[:count], num_tokens)
    assert kv.num_tokens == num_tokens
    whole = zip(*(positions(source, page) for page in pages[:count]), strict=True)
    wanted = [np.concatenate(parts)[:num_tokens] for parts in whole]
    assert_same(
        [x.reshape(num_tokens, -1) for x in arrays(kv)], [x.reshape(num_tokens, -1) for x in wanted]
    )
    # to other pages, of another cache
    before = filled(count + 3, not for_cpu)
    cache, other = on_device(before), pages[::-1][:count]
    for first in range(0, count, PAGES_AT_ONCE):
        some = other[first : first + PAGES_AT_ONCE]
        target_X = np.full(PAGES_AT_ONCE, -1, np.int32)
        target_X[: len(some)] = some
        cache = cache_ops.insert_pages(cache, cache_ops.pages_of_host(kv, first, cache), target_X)
    assert_same(arrays(read(cache, other, num_tokens)), arrays(kv))
    for page in set(range(count + 3)) - set(other.tolist()):
        assert_same(positions(cache, page), positions(before, page))


def test_entries_of_a_policy_without_features_have_none():
    cache = kv_cache.init(MODEL, 1, 1, 2, PAGE, jnp.float32, for_cpu=True)
    kv = read(dataclasses.replace(cache, table_BN=None), [1], 3)
    assert kv.entries.features == () and kv.entries.keys[0].shape == (3, 2, 4)
    assert isinstance(kv, HostKv) and isinstance(kv.entries, Entries)

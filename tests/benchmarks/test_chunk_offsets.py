"""The requests of `benchmarks.chunk_offsets`."""

import pytest

from benchmarks import chunk_offsets


@pytest.mark.parametrize("offset", [1, 39, 40, 41, 103, 104, 128, 129, 130])
def test_one_prompts_first_chunk_ends_where_a_bucket_does(offset):
    requests = chunk_offsets.requests_of(offset)
    first = [r for r in requests if r.group_id == chunk_offsets.PROMPTS * offset]
    assert len(first) == chunk_offsets.SAMPLES
    assert {len(r.prompt_ids) - 1 + offset for r in first} <= set(chunk_offsets.BUCKETS)
    assert max(r.max_new_tokens for r in first) > offset  # they go on behind it
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    assert longest <= chunk_offsets.LONGEST_TOKENS
    assert len({r.request_id for r in requests}) == len(requests)

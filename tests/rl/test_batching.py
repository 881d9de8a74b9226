"""Shapes, alignment and padding of micro-batches."""

from __future__ import annotations

import numpy as np
import pytest

from rl import batching
from rl.batching import Sample
from rl.trajectory import FinishReason, Trajectory


def trajectory(i, prompt, response, *, reward=1.0, finish=FinishReason.STOP, group=0):
    n = len(response)
    return Trajectory(
        request_id=i,
        group_id=group,
        sample_index=i,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        logprobs=-np.arange(1, n + 1, dtype=np.float32),
        policy_versions=np.zeros(n, np.int32),
        origins=np.zeros(n, np.uint8),
        finish_reason=finish,
        reward=reward,
    )


def sample_of_length(i, tokens):
    return Sample(trajectory(i, [1], [2] * (tokens - 1)), 0.0)


def test_bucket_lengths_are_powers_of_two_and_the_halves_between():
    assert batching.bucket_lengths(64, 300) == (64, 96, 128, 192, 256, 384)
    assert batching.bucket_lengths(64, 64) == (64,)
    assert batching.bucket_lengths(33, 65) == (64, 96)
    assert batching.bucket_lengths(2, 7) == (2, 3, 4, 6, 8)


def test_shapes_hold_about_as_many_tokens_each():
    assert batching.bucket_shapes(512, 200) == ((8, 64), (5, 96), (4, 128), (2, 192), (2, 256))


def test_rows_are_a_multiple_of_the_meshs_ways_and_no_more_than_asked():
    shapes = batching.bucket_shapes(1024, 200, max_rows=6, row_multiple=4)
    assert shapes == ((8, 64), (8, 96), (8, 128), (4, 192), (4, 256))
    assert batching.bucket_shapes(64, 128, row_multiple=8)[-1] == (8, 128)  # never below it


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="micro_batch_tokens"):
        batching.bucket_shapes(0, 10)
    with pytest.raises(ValueError, match="max_rows"):
        batching.bucket_shapes(10, 10, max_rows=0)


def test_each_position_predicts_the_next_token_and_the_end_token_is_trained():
    end = 9
    sample = Sample(trajectory(0, [5, 6, 7], [3, 4, end]), 2.0)
    batch = batching.pack([sample], (2, 8))
    assert batch.tokens_BT.tolist() == [[5, 6, 7, 3, 4, end, 0, 0], [0] * 8]
    # logits at 2, 3, 4 predict 3, 4 and the end token
    assert batch.inputs.mask_BT.astype(int).tolist() == [[0, 0, 1, 1, 1, 0, 0, 0], [0] * 8]
    assert batch.inputs.emission_logprobs_BT[0].tolist() == [0, 0, -1, -2, -3, 0, 0, 0]
    assert batch.inputs.old_logprobs_BT[0].tolist() == [0, 0, -1, -2, -3, 0, 0, 0]
    assert batch.inputs.advantages_B.tolist() == [2.0, 0.0]
    trained = batch.tokens_BT[0, 1:][batch.inputs.mask_BT[0, :-1]]
    assert trained.tolist() == [3, 4, end]


def test_a_sample_that_fills_its_row_keeps_its_end_token():
    batch = batching.pack([Sample(trajectory(0, [1, 2], [3, 9]), 1.0)], (1, 4))
    assert batch.inputs.mask_BT.tolist() == [[False, True, True, False]]


def test_old_and_reference_logprobs_where_given():
    sample = Sample(
        trajectory(0, [1], [2, 3]),
        1.0,
        old_logprobs=np.array([-7, -8], np.float32),
        reference_logprobs=np.array([-5, -6], np.float32),
    )
    inputs = batching.pack([sample], (1, 4)).inputs
    assert inputs.old_logprobs_BT.tolist() == [[-7, -8, 0, 0]]
    assert inputs.reference_logprobs_BT.tolist() == [[-5, -6, 0, 0]]
    assert inputs.emission_logprobs_BT.tolist() == [[-1, -2, 0, 0]]
    assert batching.unpack(sample, inputs.old_logprobs_BT[0]).tolist() == [-7, -8]


def test_packing_takes_every_sample_once_into_the_bucket_that_fits():
    lengths = [3, 14, 8, 5, 16, 9, 2]
    samples = [sample_of_length(i, n) for i, n in enumerate(lengths)]
    packed = batching.micro_batches(samples, ((4, 4), (2, 8), (1, 16)))
    assert [p.shape for p in packed] == [(1, 16), (1, 16), (1, 16), (2, 8), (4, 4)]
    assert [p.sample_indices.tolist() for p in packed] == [[4], [1], [5], [2, 3], [0, 6]]
    positions = 16 * 3 + 8 * 2 + 4 * 4
    assert batching.padding_fraction(packed, samples) == pytest.approx(1 - 57 / positions)


def test_short_samples_fill_the_rows_of_a_long_bucket():
    samples = [sample_of_length(i, n) for i, n in enumerate([16, 2, 2])]
    packed = batching.micro_batches(samples, ((8, 4), (4, 16)))
    assert [p.shape for p in packed] == [(4, 16)]


def test_a_sample_longer_than_every_bucket_is_named():
    with pytest.raises(ValueError, match=r"request 3 .* 9 tokens, the longest bucket holds 8"):
        batching.micro_batches([sample_of_length(3, 9)], ((1, 4), (1, 8)))


def test_nothing_to_pack_is_no_micro_batch():
    assert batching.micro_batches([], ((1, 4),)) == []


def test_unscored_samples_are_left_out_and_truncated_ones_where_asked():
    cut = FinishReason.LENGTH
    given = [
        trajectory(0, [1], [2]),
        trajectory(1, [1], [2], reward=None),
        trajectory(2, [1], [2], finish=cut),
    ]
    advantages = np.array([1.0, 0.0, -1.0], np.float32)
    kept = batching.select(given, advantages)
    assert [s.trajectory.request_id for s in kept] == [0, 2]
    assert [s.advantage for s in kept] == [1.0, -1.0]
    kept = batching.select(given, advantages, mask_truncated=True)
    assert [s.trajectory.request_id for s in kept] == [0]


def test_empty_prompts_and_responses_are_refused():
    with pytest.raises(ValueError, match="at least one of each"):
        batching.select([trajectory(0, [], [2])], np.zeros(1))
    with pytest.raises(ValueError, match="at least one of each"):
        batching.select([trajectory(0, [2], [])], np.zeros(1))
    with pytest.raises(ValueError, match="an advantage per trajectory"):
        batching.select([], np.zeros(1))


def test_minibatches_are_whole_groups_in_a_seeded_order():
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    parts = batching.minibatch_indices(groups, 2, (0, 5, 0))
    assert sorted(np.concatenate(parts).tolist()) == list(range(8))
    for part in parts:
        assert len(part) == 4
        assert all((i ^ 1) in part for i in part)  # siblings stay together
    again = batching.minibatch_indices(groups, 2, (0, 5, 0))
    assert [p.tolist() for p in parts] == [p.tolist() for p in again]
    others = [batching.minibatch_indices(groups, 2, (0, step, 0)) for step in range(20)]
    assert len({tuple(o[0].tolist()) for o in others}) > 1


def test_fewer_groups_than_minibatches():
    assert len(batching.minibatch_indices([4, 4], 3, (0,))) == 1
    assert batching.minibatch_indices([], 1, (0,)) == []
    assert batching.minibatch_indices([4, 5, 4], 1, (0,))[0].tolist() == [0, 1, 2]

"""Packing of micro-batches: what each response token sees, and where it is trained."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import trajectories
from hypothesis import given
from hypothesis import strategies as st

from reprise.models.attention.attention import packed_mask
from reprise.rl.batches import micro_batches
from reprise.rl.batches.micro_batches import TrainSample
from reprise.rl.records.packing import Shape
from reprise.rl.records.trajectory import FinishReason
from reprise.spec.config import SamplingConfig


def trajectory(i, prompt, response, **fields):
    logprobs = -np.arange(1, len(response) + 1)
    given = {"group": 0, "sample": i, "logprobs": logprobs} | fields
    return trajectories.trajectory(i, prompt, response, **given)


def sample(i, prompt, response, **fields):
    return TrainSample(trajectory(i, prompt, response, **fields), float(i + 1))


def sizes(packed):
    return [p.sample_indices.tolist() for p in packed]


def test_a_row_by_hand():
    end = 9
    samples = [sample(0, [5, 6, 7], [3, end]), sample(1, [8], [end]), sample(2, [5, 6, 7], [4])]
    [packed] = micro_batches.micro_batches(samples, Shape(2, 8, 4))
    batch, packing = packed.batch, packed.batch.packing
    assert packed.sample_indices.tolist() == [0, 2, 1]  # the larger group first
    # 7, the last prompt token, opens both responses to 5 6 7; 8 is the other prompt's last
    assert batch.tokens_BT.tolist() == [[5, 6, 7, 3, 7, 8, 0, 0], [0] * 8]
    assert batch.targets_BT.tolist() == [[0, 0, 3, end, 4, end, 0, 0], [0] * 8]
    assert packing.positions_BT.tolist() == [[0, 1, 2, 3, 2, 0, 0, 0], [0] * 8]
    assert packing.prompt_BT.tolist() == [[1, 1, 1, 1, 1, 2, 0, 0], [0] * 8]
    assert packing.branch_BT.tolist() == [[0, 0, 1, 1, 2, 1, 0, 0], [0] * 8]
    assert batch.index_EM[:, :2].tolist() == [[2, 3], [4, 0], [5, 0], [0, 0]]
    assert batch.inputs.mask_BT.sum(1).tolist() == [2, 1, 1, 0]
    assert batch.inputs.advantages_B.tolist() == [1.0, 3.0, 2.0, 0.0]
    assert batch.inputs.rollout_logprobs_BT[0, :3].tolist() == [-1, -2, 0]
    np.testing.assert_array_equal(batch.inputs.old_logprobs_BT, batch.inputs.rollout_logprobs_BT)
    assert micro_batches.padding_fraction([packed]) == pytest.approx(10 / 16)


def test_old_and_reference_logprobs_where_given():
    given = TrainSample(
        trajectory(0, [1], [2, 3]),
        1.0,
        old_logprobs=np.array([-7, -8], np.float32),
        reference_logprobs=np.array([-5, -6], np.float32),
    )
    [packed] = micro_batches.micro_batches([given], Shape(1, 4, 1))
    inputs = packed.batch.inputs
    assert inputs.old_logprobs_BT.tolist() == [[-7, -8, 0, 0]]
    assert inputs.reference_logprobs_BT.tolist() == [[-5, -6, 0, 0]]
    assert inputs.rollout_logprobs_BT.tolist() == [[-1, -2, 0, 0]]


def test_inserted_tokens_are_read_and_have_no_place_in_a_loss():
    t = trajectories.episode(0, [5, 6], [[1, 2], [7, 8, 9], [3]], group=0, sample=0)
    logprobs = np.array([-1, -2, -3], np.float32)
    t = dataclasses.replace(t, logprobs=logprobs, emission_logprobs=logprobs - 1)
    sampling = SamplingConfig(temperature=0.5)
    [packed] = micro_batches.micro_batches([TrainSample(t, 2.0, sampling)], Shape(1, 8, 2))
    batch = packed.batch
    assert batch.tokens_BT.tolist() == [[5, 6, 1, 2, 7, 8, 9, 0]]
    assert batch.targets_BT.tolist() == [[0, 1, 2, 7, 8, 9, 3, 0]]
    assert batch.index_EM[0, :3].tolist() == [1, 2, 6]
    assert batch.inputs.mask_BT.sum(1).tolist() == [3, 0]
    assert batch.inputs.rollout_logprobs_BT[0, :4].tolist() == [-1, -2, -3, 0]
    assert batch.inputs.old_logprobs_BT[0, :4].tolist() == [-1, -2, -3, 0]
    assert batch.inputs.emission_logprobs_BT[0, :4].tolist() == [-2, -3, -4, 0]
    temperature_BT = np.asarray(batch.processing_BT.temperature)
    assert temperature_BT[0].tolist() == [1, 0.5, 0.5, 1, 1, 1, 0.5, 1]
    values = np.arange(16, dtype=np.float32).reshape(2, 8)
    [found] = micro_batches.unpacked([packed], [values], [t.num_tokens])
    assert found.tolist() == [0, 1, 2]


def test_an_episode_without_a_turn_is_left_out():
    empty = trajectories.episode(0, [5], [], group=0, sample=0)
    one = trajectories.episode(1, [5], [[1], [2], [3]], group=0, sample=1)
    samples = micro_batches.select([empty, one], np.ones(2))
    assert [s.trajectory.request_id for s in samples] == [1]


def shapes_of(batch):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(batch)]


SHAPES = [Shape(1, 12, 16), Shape(2, 12, 3), Shape(3, 24, 8), Shape(2, 24, 1)]
MASKS = jax.jit(packed_mask)


@st.composite
def groups(draw):
    """Samples of some groups in any order; a prompt may come in two groups, groups mix prompts."""
    prompts = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), max_size=4))
    samples = [
        (group, prompt, draw(st.lists(st.integers(1, 9), min_size=1, max_size=7)))
        for group, prompt in enumerate(prompts)
        for _ in range(draw(st.integers(1, 6)))
    ]
    samples = draw(st.permutations(samples))
    return [sample(i, p, r, group=g // 2) for i, (g, p, r) in enumerate(samples)]


@given(groups(), st.sampled_from(SHAPES))
def test_every_sample_is_in_one_place_and_no_micro_batch_overflows(samples, shape):
    packed = micro_batches.micro_batches(samples, shape)
    assert sorted(i for indices in sizes(packed) for i in indices) == list(range(len(samples)))
    used = []
    for p in packed:
        assert 1 <= len(p.sample_indices) <= shape.samples
        assert shapes_of(p.batch) == shapes_of(micro_batches.empty(shape))
        used.append(int(np.sum(p.batch.packing.prompt_BT > 0)))
        assert p.used_positions == used[-1]
    positions = max(len(packed), 1) * shape.rows * shape.length
    wasted = 1 - sum(used) / positions if packed else 0
    assert micro_batches.padding_fraction(packed) == pytest.approx(wasted)


@given(groups(), st.sampled_from(SHAPES))
def test_a_response_token_is_predicted_once_from_its_prompt_and_what_came_before(samples, shape):
    for p in micro_batches.micro_batches(samples, shape):
        batch, inputs = p.batch, p.batch.inputs
        mask_BTS = np.asarray(MASKS(batch.packing)) & (batch.packing.prompt_BT > 0)[:, None]
        predicted = []
        for e, i in enumerate(p.sample_indices):
            t = samples[i].trajectory
            n, ids = t.num_tokens, np.concatenate([t.prompt_ids, t.response_ids])
            assert inputs.mask_BT[e].tolist() == [True] * n + [False] * (shape.length - n)
            assert inputs.advantages_B[e] == samples[i].advantage
            np.testing.assert_array_equal(inputs.rollout_logprobs_BT[e, :n], t.logprobs)
            for j, index in enumerate(batch.index_EM[e, :n]):
                b, position = divmod(index, shape.length)
                seen = np.flatnonzero(mask_BTS[b, position])
                end = len(t.prompt_ids) + j
                assert batch.tokens_BT[b, seen].tolist() == ids[:end].tolist()
                assert batch.packing.positions_BT[b, seen].tolist() == list(range(end))
                assert seen[-1] == position
                assert batch.targets_BT[b, position] == ids[end]
                predicted.append(int(index))
        assert len(set(predicted)) == len(predicted)
        num_samples = len(p.sample_indices)
        assert not inputs.mask_BT[num_samples:].any() and not batch.index_EM[num_samples:].any()
        # what predicts nothing is a prompt's shared positions, or padding
        rest = np.delete(batch.packing.branch_BT.ravel(), predicted)
        assert not rest.any()


@given(groups())
def test_a_group_that_fits_a_row_computes_its_prompt_once(samples):
    packed = micro_batches.micro_batches(samples, Shape(1, 400, 32))
    prompts = {(s.trajectory.group_id, *s.trajectory.prompt_ids.tolist()) for s in samples}
    needed = sum(len(prompt) - 2 for prompt in prompts)
    needed += sum(s.trajectory.num_tokens for s in samples)
    assert sum(p.used_positions for p in packed) == needed


def test_siblings_share_a_row_and_short_groups_fill_it():
    # groups of 6, 5 and 2 positions into rows of 8: 6 + 2, 5
    samples = [
        *(sample(i, [1, 2, 3], [4, 5], group=0) for i in range(2)),
        *(sample(i, [6], [7] * (i - 1), group=1) for i in (3, 4)),
        sample(9, [8, 9], [7], group=2),
    ]
    [packed] = micro_batches.micro_batches(samples, Shape(2, 8, 8))
    prompt_BT = packed.batch.packing.prompt_BT
    assert prompt_BT.tolist() == [[1] * 6 + [2] * 2, [1] * 5 + [0] * 3]
    assert packed.sample_indices.tolist() == [0, 1, 4, 3, 2]


def test_each_copy_of_the_weights_has_the_samples_of_its_rows():
    samples = [sample(i, [9], [10 + i, 20 + i], group=i) for i in range(9)]
    first, second = micro_batches.micro_batches(samples, Shape(4, 4, 8, copies=2))
    assert [len(first.places), len(second.places)] == [8, 1]
    for packed in (first, second):
        batch = packed.batch
        targets_CX = batch.targets_BT.reshape(2, -1)  # of a copy, counted from its first position
        for i, e in zip(packed.sample_indices, packed.places, strict=True):
            assert batch.inputs.mask_BT[e].sum() == 2
            tokens = targets_CX[e // 4][batch.index_EM[e, :2]]
            assert tokens.tolist() == samples[i].trajectory.response_ids.tolist()
    drawn = dataclasses.replace(samples[4], sampling=SamplingConfig(temperature=0.5))
    *_, last = micro_batches.micro_batches([*samples[:3], drawn], Shape(2, 4, 4, copies=2))
    cold_BT = last.batch.processing_BT.temperature == 0.5
    assert cold_BT.sum() == 2 and last.batch.targets_BT[cold_BT].tolist() == [14, 24]


def test_equal_bytes_are_not_equal_prompts():
    wide = dataclasses.replace(trajectory(1, [1], [2]), prompt_ids=np.array([1], np.int64))
    samples = [sample(0, [1, 0], [2]), TrainSample(wide, 0.0)]
    [packed] = micro_batches.micro_batches(samples, Shape(1, 4, 2))
    assert packed.batch.tokens_BT.tolist() == [[1, 0, 1, 0]]
    assert packed.batch.packing.prompt_BT.tolist() == [[1, 1, 2, 0]]


def test_a_sample_that_does_not_fit_a_row_is_named():
    fitting, long = sample(2, [1, 2, 3], [4] * 6), sample(3, [1, 2, 3], [4] * 7)
    assert len(micro_batches.micro_batches([fitting], Shape(1, 8, 1))) == 1
    with pytest.raises(ValueError, match=r"request 3 \(.* has 10 tokens, a row holds 9: .*max_tok"):
        micro_batches.micro_batches([fitting, long], Shape(1, 8, 1))


def test_nothing_to_pack_is_no_micro_batch():
    assert micro_batches.micro_batches([], Shape(1, 4, 1)) == []
    assert micro_batches.padding_fraction([]) == 0


def test_unscored_samples_are_left_out_and_truncated_ones_where_asked():
    cut = FinishReason.LENGTH
    given = [
        trajectory(0, [1], [2]),
        trajectory(1, [1], [2], reward=None),
        trajectory(2, [1], [2], finish=cut),
    ]
    advantages = np.array([1.0, 0.0, -1.0], np.float32)
    kept = micro_batches.select(given, advantages)
    assert [s.trajectory.request_id for s in kept] == [0, 2]
    assert [s.advantage for s in kept] == [1.0, -1.0]
    cool, cold = SamplingConfig(temperature=0.7, top_k=4), SamplingConfig(temperature=0.3)
    mixed = [dataclasses.replace(given[0], sampling=cold), *given[1:]]
    samples = micro_batches.select(mixed, advantages, cool)
    assert [s.sampling for s in samples[:2]] == [cold, cool]
    kept = micro_batches.select(given, advantages, mask_truncated=True)
    assert [s.trajectory.request_id for s in kept] == [0]


def test_empty_prompts_and_responses_are_refused():
    with pytest.raises(ValueError, match="at least one of each"):
        micro_batches.select([trajectory(0, [], [2])], np.zeros(1))
    with pytest.raises(ValueError, match="at least one of each"):
        micro_batches.select([trajectory(0, [2], [])], np.zeros(1))
    with pytest.raises(ValueError, match="an advantage per trajectory"):
        micro_batches.select([], np.zeros(1))


def test_minibatches_are_whole_groups_in_a_seeded_order():
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    parts = micro_batches.minibatch_indices(groups, 2, (0, 5, 0))
    assert sorted(np.concatenate(parts).tolist()) == list(range(8))
    for part in parts:
        assert len(part) == 4
        assert all((i ^ 1) in part for i in part)  # siblings stay together
    again = micro_batches.minibatch_indices(groups, 2, (0, 5, 0))
    assert [p.tolist() for p in parts] == [p.tolist() for p in again]
    others = [micro_batches.minibatch_indices(groups, 2, (0, step, 0)) for step in range(20)]
    assert len({tuple(o[0].tolist()) for o in others}) > 1


def test_fewer_groups_than_minibatches():
    assert len(micro_batches.minibatch_indices([4, 4], 3, (0,))) == 1
    assert micro_batches.minibatch_indices([], 1, (0,)) == []
    assert micro_batches.minibatch_indices([4, 5, 4], 1, (0,))[0].tolist() == [0, 1, 2]

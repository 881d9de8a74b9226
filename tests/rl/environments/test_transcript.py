"""The trajectory of an episode: all tokens in order, with their turns."""

import numpy as np
import pytest
from trajectories import trajectory

from reprise.rl.environments.transcript import Transcript
from reprise.rl.records.episode import INSERTED
from reprise.rl.records.trajectory import FinishReason, Request

REQUEST = Request(8, (1, 2), group_id=2, sample_index=0)


def episode():
    one = Transcript([1, 2])
    one.add_turn(trajectory(8, [1, 2], [3, 4], logprobs=-0.5), "ab")
    one.insert([5, 6, 7], [{"role": "user", "content": "more"}])
    one.add_turn(trajectory(8 + 2**24, [1, 2, 3, 4, 5, 6, 7], [8], logprobs=-1.5), "c")
    return one


def whole(one, end="done"):
    return one.trajectory(REQUEST, FinishReason.STOP, one.episode(end, {"": 0.5}))


def test_tokens_are_appended_verbatim():
    one = episode()
    assert one.tokens == (1, 2, 3, 4, 5, 6, 7, 8)
    t = whole(one)
    assert t.prompt_ids.tolist() == [1, 2]
    assert t.response_ids.tolist() == [3, 4, 8]
    assert t.logprobs.tolist() == [-0.5, -0.5, -1.5]
    assert (t.request_id, t.group_id, t.sample_index) == (8, 2, 0)
    dtypes = {"response_ids": np.int32, "logprobs": np.float32, "emission_logprobs": np.float32}
    dtypes |= {"policy_versions": np.int32, "origins": np.uint8}
    for name, dtype in dtypes.items():
        assert getattr(t, name).dtype == dtype and len(getattr(t, name)) == 3


def test_the_dialogue_has_all_tokens_with_their_turns():
    found = whole(episode()).episode
    assert found.tokens.tolist() == [3, 4, 5, 6, 7, 8] and found.tokens.dtype == np.int32
    assert found.turns.tolist() == [0, 0, INSERTED, INSERTED, INSERTED, 1]
    assert found.turns.dtype == np.int16
    assert found.drawn.tolist() == [0, 1, 5]
    assert (found.num_turns, found.num_inserted, found.longest_turn_tokens) == (2, 3, 2)
    assert found.row["end"] == "done" and len(found.row["messages"]) == 3
    assert found.rewards == {"": 0.5}


def test_an_episode_without_a_turn_has_no_tokens():
    t = whole(Transcript([1, 2]), "failed")
    assert t.num_tokens == t.episode.longest_turn_tokens == t.episode.num_turns == 0
    assert t.episode.turns.dtype == np.int16 and t.response_ids.dtype == np.int32


def test_another_prompt_is_refused():
    one = episode()
    with pytest.raises(ValueError, match="expected the 8 tokens of its episode"):
        one.add_turn(trajectory(9, [1, 2, 3], [4]), "x")
    assert len(one.turn_rewards) == 2


def test_messages_show_the_dialogue():
    one = episode()
    assert [m["role"] for m in one.messages] == ["assistant", "user", "assistant"]
    assert one.last_turn() == "c"
    assert Transcript([1]).last_turn() == ""

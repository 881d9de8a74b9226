"""Episodes: turns and limits by hand; for any answers in any order, the same outcomes."""

from __future__ import annotations

import collections
import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.sched.episodes import (
    MAX_TURNS,
    TRUNCATED,
    TURN_NAMES,
    Draw,
    Drawn,
    End,
    Ended,
    EpisodeLimits,
    Episodes,
    EpisodeSpec,
    Failed,
    GetReward,
    Observed,
    Reset,
    Stage,
    Step,
    request_of,
    turn_of,
)
from reprise.spec.verification.sampling import NOISE_NAMES


def limits(**changes):
    values = {
        "max_turns": 3,
        "max_environment_tokens": 20,
        "max_prompt_tokens": 10,
        "max_tokens": 60,
        "max_live": 4,
    }
    return EpisodeLimits(**values | changes)


def started(prompt_tokens=5, **changes):
    """One episode with number 7, at its first turn, and the action that draws the turn."""
    episodes = Episodes(limits(**changes))
    assert episodes.submit([EpisodeSpec(7, 8)]) == [Reset(7, 0)]
    [draw] = episodes.handle(Observed(7, 0, prompt_tokens))
    return episodes, draw


def test_turns_and_calls_alternate_until_the_environment_is_done():
    episodes, draw = started()
    assert draw == Draw(7, 0, 7, 8)
    assert episodes.handle(Drawn(7, 0, 4)) == [Step(7, 1, 0)]
    assert episodes.handle(Observed(7, 1, 6)) == [Draw(7, 1, 7 + TURN_NAMES, 8)]
    assert episodes.handle(Drawn(7, 1, 3)) == [Step(7, 2, 1)]
    assert not episodes.is_finished
    assert episodes.handle(Observed(7, 2, done=True)) == [Ended(7, End.DONE)]
    assert episodes.is_finished
    state = episodes.states[7]
    assert (state.tokens, state.inserted_tokens) == (18, 6)
    assert (state.turns, state.calls, state.end) == (2, 3, End.DONE)


def test_the_last_turn_reaches_the_environment_which_then_scores():
    episodes, _ = started(max_turns=1)
    assert episodes.handle(Drawn(7, 0, 4)) == [Step(7, 1, 0)]
    assert episodes.handle(Observed(7, 1, 6)) == [GetReward(7, 2)]
    assert episodes.states[7].inserted_tokens == 0
    assert episodes.handle(Observed(7, 2, done=True)) == [Ended(7, End.TURNS)]


def test_a_turn_that_is_cut_off_is_the_last():
    episodes, _ = started()
    assert episodes.handle(Drawn(7, 0, 8, is_cut=True)) == [Step(7, 1, 0)]
    assert episodes.handle(Observed(7, 1, 1)) == [GetReward(7, 2)]
    assert episodes.handle(Observed(7, 2, done=True)) == [Ended(7, End.LENGTH)]


def test_an_environment_may_be_done_after_a_turn_that_is_cut_off():
    episodes, _ = started()
    episodes.handle(Drawn(7, 0, 8, is_cut=True))
    assert episodes.handle(Observed(7, 1, done=True)) == [Ended(7, End.DONE)]


@pytest.mark.parametrize(("tokens", "end"), [(20, None), (21, End.ENVIRONMENT_TOKENS)])
def test_an_answer_beyond_the_tokens_of_the_environment_is_not_inserted(tokens, end):
    episodes, _ = started()
    episodes.handle(Drawn(7, 0, 4))
    [action] = episodes.handle(Observed(7, 1, tokens))
    assert isinstance(action, Draw if end is None else GetReward)
    assert episodes.states[7].inserted_tokens == (tokens if end is None else 0)
    assert episodes.states[7].stop == end


def test_a_turn_has_at_most_the_tokens_that_are_left():
    episodes, _ = started(max_tokens=13)
    episodes.handle(Drawn(7, 0, 4))
    assert episodes.handle(Observed(7, 1, 6)) == [Draw(7, 1, 7 + TURN_NAMES, 3)]


def test_without_room_for_a_token_there_is_no_turn():
    episodes, _ = started(max_tokens=10)
    episodes.handle(Drawn(7, 0, 4))
    assert episodes.handle(Observed(7, 1, 6)) == [GetReward(7, 2)]
    assert episodes.handle(Observed(7, 2, done=True)) == [Ended(7, End.LENGTH)]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Observed(7, 0, 11), "long_prompt"),
        (Observed(7, 0, 0), "empty_prompt"),
        (Observed(7, 0, 5, done=True), "done_at_reset"),
        (Failed(7, 0, "raised"), "raised"),
    ],
)
def test_an_episode_without_a_usable_prompt_has_failed(answer, kind):
    episodes = Episodes(limits())
    episodes.submit([EpisodeSpec(7, 8)])
    assert episodes.handle(answer) == [Ended(7, End.FAILED, kind)]
    assert episodes.states[7].failure == kind


@pytest.mark.parametrize("stage", ["step", "score"])
def test_a_failure_costs_the_episode_its_score(stage):
    episodes, _ = started(max_turns=1)
    episodes.handle(Drawn(7, 0, 4))
    call = 1
    if stage == "score":
        episodes.handle(Observed(7, 1, 2))
        call = 2
    assert episodes.handle(Failed(7, call, "deadline")) == [Ended(7, End.FAILED, "deadline")]


def test_late_and_repeated_events_change_nothing():
    episodes, _ = started()
    assert episodes.handle(Observed(7, 0, 5)) == []
    episodes.handle(Drawn(7, 0, 4))
    for late in (Drawn(7, 0, 4), Drawn(7, 1, 4), Failed(7, 0, "died"), Observed(7, 0, 5)):
        assert episodes.handle(late) == []
    assert episodes.states[7].stage is Stage.ENVIRONMENT
    episodes.handle(Failed(7, 1, "deadline"))
    assert episodes.handle(Observed(7, 1, 3)) == []
    assert episodes.num_ended == 1


def test_episodes_open_in_order_while_there_is_room():
    episodes = Episodes(limits(max_live=2))
    specs = [EpisodeSpec(i, 8) for i in (3, 1, 2)]
    assert episodes.submit(specs) == [Reset(3, 0), Reset(1, 0)]
    assert episodes.handle(Failed(1, 0, "died")) == [Ended(1, End.FAILED, "died"), Reset(2, 0)]
    assert episodes.num_live == 2


def test_the_noise_of_every_turn_has_a_name():
    assert TURN_NAMES * MAX_TURNS == NOISE_NAMES
    for episode_id in (0, 7, TURN_NAMES - 1, NOISE_NAMES + 1):
        for turn in (0, 1, MAX_TURNS - 1):
            request_id = request_of(episode_id, turn)
            assert request_id == episode_id + turn * TURN_NAMES
            assert turn_of(request_id) == (episode_id, turn)
    with pytest.raises(ValueError, match="noise names"):
        Episodes(limits()).submit([EpisodeSpec(TURN_NAMES, 8)])
    assert Episodes(limits()).submit([EpisodeSpec(NOISE_NAMES + 1, 8)])  # of another renewal
    with pytest.raises(ValueError, match="twice"):
        Episodes(limits()).submit([EpisodeSpec(1, 8), EpisodeSpec(1, 8)])
    with pytest.raises(ValueError, match="at least one token"):
        Episodes(limits()).submit([EpisodeSpec(1, 0)])


@pytest.mark.parametrize(
    "changes",
    [
        {"max_turns": 0},
        {"max_turns": MAX_TURNS + 1},
        {"max_live": 0},
        {"max_tokens": 0},
        {"max_prompt_tokens": 0},
        {"max_environment_tokens": -1},
    ],
)
def test_limits_are_checked(changes):
    with pytest.raises(ValueError, match="expected"):
        limits(**changes)


# --- any answers, in any order -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Script:
    """The answers of an environment by call, and the lengths of the turns of the policy."""

    answers: tuple[tuple[int, bool, str | None], ...]  # tokens, done, failure
    turns: tuple[int, ...]

    def answer(self, episode_id, call, is_score):
        tokens, done, failure = self.answers[call % len(self.answers)]
        if failure is not None:
            return Failed(episode_id, call, failure)
        if call == 0:
            return Observed(episode_id, 0, max(tokens, 1))
        return Observed(episode_id, call, tokens, done or is_score)

    def draw(self, action):
        wanted = self.turns[action.turn % len(self.turns)]
        tokens = min(wanted, action.max_new_tokens)
        return Drawn(action.episode_id, action.turn, tokens, is_cut=wanted > tokens)


ANSWERS = st.tuples(
    st.integers(0, 12),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([None, None, None, None, None, None, "raised", "deadline"]),
)
SCRIPTS = st.builds(
    Script,
    st.lists(ANSWERS, min_size=1, max_size=6).map(tuple),
    st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple),
)
LIMITS = st.builds(
    EpisodeLimits,
    max_turns=st.integers(1, 6),
    max_environment_tokens=st.integers(0, 40),
    max_prompt_tokens=st.integers(1, 12),
    max_tokens=st.integers(1, 80),
    max_live=st.integers(1, 5),
)


def play(chosen, scripts, rng):
    """Play all episodes, with pending events in a random order; return the actions of each."""
    episodes = Episodes(chosen)
    actions = collections.defaultdict(list)
    pending = []

    def take(found):
        for action in found:
            actions[action.episode_id].append(action)
            script = scripts[action.episode_id]
            if isinstance(action, Draw):
                pending.append(script.draw(action))
            elif not isinstance(action, Ended):
                is_score = isinstance(action, GetReward)
                pending.append(script.answer(action.episode_id, action.call, is_score))
        assert episodes.num_live <= chosen.max_live

    take(episodes.submit([EpisodeSpec(i, 9) for i in scripts]))
    seen = []
    while pending:
        event = pending.pop(rng.randrange(len(pending)))
        take(episodes.handle(event))
        seen.append(event)
        if rng.random() < 0.3:  # a repeated report
            assert episodes.handle(rng.choice(seen)) == []
    assert episodes.is_finished and episodes.num_live == 0
    return episodes, actions


@given(LIMITS, st.lists(SCRIPTS, min_size=1, max_size=6), st.integers(0, 10**6))
def test_the_order_of_events_changes_no_outcome(chosen, scripts, seed):
    numbered = dict(enumerate(scripts))
    episodes, actions = play(chosen, numbered, random.Random(seed))
    for i, script in numbered.items():
        one, by_itself = play(chosen, {i: script}, random.Random(0))
        assert actions[i] == by_itself[i]
        for field in ("tokens", "inserted_tokens", "turns", "calls", "end", "failure"):
            assert getattr(episodes.states[i], field) == getattr(one.states[i], field)


@given(LIMITS, st.lists(SCRIPTS, min_size=1, max_size=6), st.integers(0, 10**6))
def test_every_episode_stays_within_its_limits(chosen, scripts, seed):
    numbered = dict(enumerate(scripts))
    episodes, actions = play(chosen, numbered, random.Random(seed))
    request_ids = [a.request_id for some in actions.values() for a in some if isinstance(a, Draw)]
    assert len(request_ids) == len(set(request_ids))
    for i, state in episodes.states.items():
        draws = [a for a in actions[i] if isinstance(a, Draw)]
        assert len(draws) == state.turns <= chosen.max_turns
        assert state.prompt_tokens <= chosen.max_prompt_tokens
        assert state.response_tokens <= chosen.max_tokens
        assert state.inserted_tokens <= chosen.max_environment_tokens
        assert isinstance(actions[i][0], Reset) and isinstance(actions[i][-1], Ended)
        assert (state.failure is not None) == (state.end is End.FAILED)
        scored = any(isinstance(a, GetReward) for a in actions[i])
        assert scored or state.end not in TRUNCATED

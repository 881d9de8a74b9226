"""The episodes of a step: which turn is drawn next, which environment works, and why each stops.

    reset → draw turn 0 → step → draw turn 1 → step → … → ended
                                    └→ score, if a limit stops the episode

An episode is one dialogue between the policy and an environment. A turn of the policy is a request,
with all tokens so far as its prompt. `Episodes` receives events and returns actions, as a scheduler
does. It counts tokens and holds none.

The outcome of an episode is a function of its events only: order and speed of the events of other
episodes change when it starts, and nothing else. The request ids of all turns, which name their
noise, are fixed when the episode is submitted.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

# A noise name of 31 bits is the sample of a step, and the turn times this number.
TURN_NAMES = 2**24
MAX_TURNS = 2**7


def request_of(episode_id: int, turn: int) -> int:
    """Return the id of the request of a turn, which names its noise."""
    return episode_id + turn * TURN_NAMES


def turn_of(request_id: int) -> tuple[int, int]:
    """Return the episode and the turn of a request."""
    turn = request_id % (TURN_NAMES * MAX_TURNS) // TURN_NAMES
    return request_id - turn * TURN_NAMES, turn


class End(enum.Enum):
    """Why an episode has stopped. Limits leave it truncated, with a score of its environment."""

    DONE = "done"  # the environment has finished
    LENGTH = "length"  # a turn was cut off, or no token fits any more
    TURNS = "max_turns"
    ENVIRONMENT_TOKENS = "environment_tokens"
    FAILED = "failed"  # it has no score


TRUNCATED = frozenset((End.LENGTH, End.TURNS, End.ENVIRONMENT_TOKENS))


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The limits of all episodes; at most `max_live` have an open environment.

    `max_environment_tokens` bounds the tokens that an environment inserts after the prompt, and
    `max_tokens` all tokens of an episode after its prompt.
    """

    max_turns: int
    max_environment_tokens: int
    max_prompt_tokens: int
    max_tokens: int
    max_live: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_turns <= MAX_TURNS:
            raise ValueError(f"expected 1 to {MAX_TURNS} turns, got {self.max_turns}")
        for name in ("max_prompt_tokens", "max_tokens", "max_live"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.max_environment_tokens < 0:
            raise ValueError(
                f"expected max_environment_tokens of at least 0, got {self.max_environment_tokens}"
            )


class EpisodeSpec(NamedTuple):
    """A submitted episode, named by the request id of its first turn.

    A turn has at most `max_turn_tokens`.
    """

    episode_id: int
    max_turn_tokens: int


# --- events -----------------------------------------------------------------------------


class Observed(NamedTuple):
    """An environment has answered a call; `done` is always set in the answer to `GetReward`.

    `tokens` counts the tokens to insert, or to `Reset` the tokens of the prompt.
    """

    episode_id: int
    call: int
    tokens: int = 0
    done: bool = False


class Drawn(NamedTuple):
    """The policy has drawn a turn; `is_cut` if the turn has reached its limit of tokens."""

    episode_id: int
    turn: int
    tokens: int
    is_cut: bool = False


class Failed(NamedTuple):
    """An environment has failed in a call."""

    episode_id: int
    call: int
    kind: str


Event = Observed | Drawn | Failed

# --- actions ----------------------------------------------------------------------------


class Reset(NamedTuple):
    """Open the environment of an episode, and get the prompt."""

    episode_id: int
    call: int


class Draw(NamedTuple):
    """Request a turn of the policy."""

    episode_id: int
    turn: int
    request_id: int
    max_new_tokens: int


class Step(NamedTuple):
    """Call the environment with a turn of the policy."""

    episode_id: int
    call: int
    turn: int


class GetReward(NamedTuple):
    """Call the environment for the reward of an episode that a limit has stopped."""

    episode_id: int
    call: int


class Ended(NamedTuple):
    """An episode has stopped; its environment can be closed. `failure` is the kind of a failure."""

    episode_id: int
    end: End
    failure: str | None = None


Action = Reset | Draw | Step | GetReward | Ended

# --- state ------------------------------------------------------------------------------


class Stage(enum.Enum):
    """The part that has to act next in an episode."""

    OPENING = "opening"  # a free environment
    ENVIRONMENT = "environment"
    POLICY = "policy"
    ENDED = "ended"


@dataclasses.dataclass(slots=True, eq=False)
class EpisodeState:
    """An episode in progress, or ended.

    `tokens` counts all tokens, `inserted_tokens` the tokens of the environment after the prompt,
    `turns` the drawn turns, and `calls` the calls of the environment so far. An episode with a
    `stop` only waits for its score.
    """

    spec: EpisodeSpec
    stage: Stage = Stage.OPENING
    tokens: int = 0
    prompt_tokens: int = 0
    inserted_tokens: int = 0
    turns: int = 0
    calls: int = 0
    is_cut: bool = False  # the last turn
    stop: End | None = None
    end: End | None = None
    failure: str | None = None

    @property
    def response_tokens(self) -> int:
        """The number of tokens after the prompt."""
        return self.tokens - self.prompt_tokens


class Episodes:
    """The episodes of one step; `states` has all of them by id, in order of submission."""

    def __init__(self, limits: EpisodeLimits) -> None:
        self._limits = limits
        self.states: dict[int, EpisodeState] = {}
        self._opening = collections.deque[EpisodeState]()
        self.num_live = 0  # episodes with an open environment
        self.num_ended = 0

    @property
    def is_finished(self) -> bool:
        """Return whether all episodes have stopped."""
        return self.num_ended == len(self.states)

    def submit(self, specs: Sequence[EpisodeSpec]) -> list[Action]:
        """Add episodes, which start in this order. Raises ValueError for ids that cannot be."""
        for spec in specs:
            if spec.episode_id in self.states:
                raise ValueError(f"episode {spec.episode_id} comes twice: its id names its noise")
            name = spec.episode_id % (TURN_NAMES * MAX_TURNS)
            if spec.episode_id < 0 or name >= TURN_NAMES:
                raise ValueError(
                    f"episode {spec.episode_id}: expected one of the first {TURN_NAMES:,} noise "
                    "names, since the other names are of later turns"
                )
            if spec.max_turn_tokens < 1:
                raise ValueError(
                    f"episode {spec.episode_id}: expected turns of at least one token, got "
                    f"{spec.max_turn_tokens}"
                )
            state = EpisodeState(spec)
            self.states[spec.episode_id] = state
            self._opening.append(state)
        return self._open()

    def handle(self, event: Event) -> list[Action]:
        """Return the actions that follow an event; late and repeated events have none.

        Raises KeyError for an unknown episode.
        """
        state = self.states[event.episode_id]
        if isinstance(event, Drawn):
            if state.stage is not Stage.POLICY or event.turn != state.turns:
                return []
            return self._drawn(state, event)
        if state.stage is not Stage.ENVIRONMENT or event.call != state.calls - 1:
            return []
        if isinstance(event, Failed):
            return self._end(state, End.FAILED, event.kind)
        if state.stop is not None:
            return self._end(state, state.stop)
        if event.call == 0:
            return self._start(state, event)
        return self._observed(state, event)

    def _open(self) -> list[Action]:
        """Open environments while there is room."""
        actions = list[Action]()
        while self._opening and self.num_live < self._limits.max_live:
            state = self._opening.popleft()
            self.num_live += 1
            actions.append(Reset(state.spec.episode_id, self._call(state)))
        return actions

    def _call(self, state: EpisodeState) -> int:
        """Count a call of the environment; return its number."""
        state.stage = Stage.ENVIRONMENT
        state.calls += 1
        return state.calls - 1

    def _start(self, state: EpisodeState, event: Observed) -> list[Action]:
        """Draw the first turn, after the prompt of the environment."""
        limits = self._limits
        if event.done:
            return self._end(state, End.FAILED, "done_at_reset")
        if event.tokens < 1:
            return self._end(state, End.FAILED, "empty_prompt")
        if event.tokens > limits.max_prompt_tokens:
            return self._end(state, End.FAILED, "long_prompt")
        state.prompt_tokens = event.tokens
        state.tokens = event.tokens
        return [self._draw(state)]

    def _draw(self, state: EpisodeState) -> Action:
        spec = state.spec
        state.stage = Stage.POLICY
        room = self._limits.max_tokens - state.response_tokens
        assert room > 0 and state.turns < self._limits.max_turns
        request_id = request_of(spec.episode_id, state.turns)
        return Draw(spec.episode_id, state.turns, request_id, min(spec.max_turn_tokens, room))

    def _drawn(self, state: EpisodeState, event: Drawn) -> list[Action]:
        """Call the environment, which sees every turn."""
        state.turns += 1
        state.tokens += event.tokens
        state.is_cut = event.is_cut
        assert state.response_tokens <= self._limits.max_tokens, "a turn is longer than its limit"
        return [Step(state.spec.episode_id, self._call(state), event.turn)]

    def _observed(self, state: EpisodeState, event: Observed) -> list[Action]:
        """End the episode, or insert the tokens of the environment and draw the next turn."""
        if event.done:
            return self._end(state, End.DONE)
        state.stop = self._stop(state, event.tokens)
        if state.stop is not None:
            return [GetReward(state.spec.episode_id, self._call(state))]
        state.tokens += event.tokens
        state.inserted_tokens += event.tokens
        return [self._draw(state)]

    def _stop(self, state: EpisodeState, tokens: int) -> End | None:
        """Return the limit that forbids another turn after `tokens` of the environment, if any."""
        limits = self._limits
        if state.is_cut:
            return End.LENGTH
        if state.turns == limits.max_turns:
            return End.TURNS
        if state.inserted_tokens + tokens > limits.max_environment_tokens:
            return End.ENVIRONMENT_TOKENS
        if state.response_tokens + tokens >= limits.max_tokens:
            return End.LENGTH
        return None

    def _end(self, state: EpisodeState, end: End, failure: str | None = None) -> list[Action]:
        state.stage = Stage.ENDED
        state.end = end
        state.failure = failure
        self.num_live -= 1
        self.num_ended += 1
        return [Ended(state.spec.episode_id, end, failure), *self._open()]

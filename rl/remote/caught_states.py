"""Hidden states that a worker's program has caught: checked with their response."""

from __future__ import annotations

import numpy as np

from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from rl.remote.drafter_messages import Caught
from rl.trajectory import Trajectory
from spec.eagle.batch import HiddenStates
from spec.eagle.data_buffer import RequestSample


class CaughtStates:
    """Hands the hidden states of a run to the rollout's sink, each with its response only.

    States and response come in any order, one of each. `caught` and `answered` return what is
    wrong with what has come, or None.
    """

    def __init__(self, engine: Engine, spec: RolloutSpec, sample: RequestSample) -> None:
        assert spec.sink is not None and engine.feature_layers is not None, "states are kept"
        self._sink, self._sample, self._dtype = spec.sink, sample, engine.dtype
        self._width = engine.model.d_model * (len(engine.feature_layers) + 1)
        self._version = spec.policy_version
        self._states: dict[int, Caught] = {}
        self._tokens: dict[int, np.ndarray] = {}  # of prompts and responses without states yet
        self._prompts: dict[int, int] = {}

    @property
    def waiting(self) -> bool:
        """Return whether there are states without their response."""
        return bool(self._states)

    def caught(self, event: Caught) -> str | None:
        i, states = event.request_id, event.hidden_TW
        if i not in self._sample or i in self._states:
            return f"the hidden states of request {i} were not asked for, or came before"
        if (states.shape[1], states.dtype) != (self._width, self._dtype):
            return (
                f"expected hidden states of {self._width} values of {self._dtype} for request {i}, "
                f"got {states.shape[1]} of {states.dtype}"
            )
        if event.policy_version != self._version:
            return f"the hidden states of request {i} are of policy {event.policy_version}"
        self._states[i] = event
        return self._hand_over(i)

    def answered(self, trajectory: Trajectory) -> str | None:
        i = trajectory.request_id
        if i not in self._sample:
            return None
        self._tokens[i] = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
        self._prompts[i] = len(trajectory.prompt_ids)
        return self._hand_over(i)

    def _hand_over(self, request_id: int) -> str | None:
        if request_id not in self._states or request_id not in self._tokens:
            return None
        event = self._states.pop(request_id)
        tokens_T, prompt = self._tokens.pop(request_id), self._prompts.pop(request_id)
        caught_T = event.tokens_T  # those of a row that was full lack their end
        if event.prompt_tokens != prompt or not np.array_equal(caught_T, tokens_T[: len(caught_T)]):
            return f"the hidden states of request {request_id} are of other tokens"
        rest = event.hidden_TW, event.policy_version
        self._sink.add(HiddenStates(event.tokens_T, event.prompt_tokens, *rest))
        return None

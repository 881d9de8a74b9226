"""The tokens of one episode as it proceeds, and its trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from reprise.rl.records.episode import INSERTED, Episode
from reprise.rl.records.trajectory import FinishReason, Prompt, Request, Trajectory


class Transcript:
    """An episode: its prompt, the turns of the policy, and inserted tokens, appended verbatim.

    `messages` show the episode to people: role and content of each message after the prompt.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids: Prompt = tuple(prompt_ids)
        self.tokens: Prompt = self.prompt_ids  # all tokens so far
        self.messages: list[Mapping[str, str]] = []
        self.turn_rewards: list[float | None] = []
        self._turns: list[int] = []  # of the tokens after the prompt
        self._drawn: list[Trajectory] = []  # each turn of the policy

    def add_turn(self, t: Trajectory, text: str) -> None:
        """Append a turn of the policy. Raises ValueError if its prompt is not this episode."""
        if tuple(t.prompt_ids.tolist()) != self.tokens:
            raise ValueError(
                f"request {t.request_id}: expected the {len(self.tokens)} tokens of its episode as "
                f"its prompt, got {len(t.prompt_ids)} other tokens"
            )
        self._append(t.response_ids.tolist(), len(self._drawn))
        self._drawn.append(t)
        self.turn_rewards.append(None)
        self.messages.append({"role": "assistant", "content": text})

    def insert(self, ids: Sequence[int], messages: Sequence[Mapping[str, str]]) -> None:
        """Append tokens of the environment, and the messages that they show."""
        self._append(ids, INSERTED)
        self.messages += messages

    @property
    def last_turn_ids(self) -> list[int]:
        """Return the tokens of the last turn of the policy."""
        ids: list[int] = self._drawn[-1].response_ids.tolist()
        return ids

    def last_turn(self) -> str:
        """Return the text of the last turn of the policy, empty before the first."""
        texts = [m["content"] for m in self.messages if m["role"] == "assistant"]
        return texts[-1] if texts else ""

    def episode(self, end: str, rewards: Mapping[str, float | None]) -> Episode:
        """Return the dialogue, with the reason of its end, and its rewards by name."""
        return Episode(
            tokens=np.array(self.tokens[len(self.prompt_ids) :], np.int32),
            turns=np.array(self._turns, np.int16),
            end=end,
            messages=self.messages,
            turn_rewards=self.turn_rewards,
            rewards=rewards,
        )

    def trajectory(
        self, request: Request, finish_reason: FinishReason, episode: Episode
    ) -> Trajectory:
        """Return all turns of the policy as one trajectory, with the numbers of its first request.

        An episode that has failed before its first turn has a response without tokens.
        """

        def joined(name: str, dtype: type) -> np.ndarray:
            arrays = [getattr(t, name) for t in self._drawn]
            return np.concatenate([*arrays, np.empty(0, dtype)]).astype(dtype)

        return Trajectory(
            request_id=request.request_id,
            group_id=request.group_id,
            sample_index=request.sample_index,
            prompt_ids=np.asarray(self.prompt_ids, np.int32),
            response_ids=joined("response_ids", np.int32),
            logprobs=joined("logprobs", np.float32),
            policy_versions=joined("policy_versions", np.int32),
            origins=joined("origins", np.uint8),
            finish_reason=finish_reason,
            sampling=request.sampling,
            emission_logprobs=joined("emission_logprobs", np.float32),
            episode=episode,
        )

    def _append(self, ids: Sequence[int], turn: int) -> None:
        self.tokens = (*self.tokens, *ids)
        self._turns += [turn] * len(ids)

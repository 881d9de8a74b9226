"""An episode of several turns: the ids that the policy and its environment wrote, as one datum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.batches.data import Datum
from reprise.rl.python.sampler import Prompt, Sample


class Episode:
    """A dialogue that starts with `prompt`: turns of the policy, and tokens of the environment.

        episode = Episode(policy.tokenizer, "57 + 68 =\\n")
        [[sample]] = policy.sample([episode.tokens])
        episode.add(sample)
        episode.add_text("\\nTry again.\\n")

    Ids are appended as they are: a decoded and encoded response may have other tokens. The tokens
    of the environment have weight 0 in the datum.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self._tokenizer = tokenizer
        ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        self.tokens = list(map(int, ids))
        self.samples: list[Sample] = []
        self._logprobs = [0.0] * len(self.tokens)
        self._turns = [-1] * len(self.tokens)  # the turn of each token; −1: of the environment

    def add(self, sample: Sample) -> None:
        """Append a turn of the policy. Raises ValueError if its prompt is not this episode."""
        if list(sample.prompt_ids) != self.tokens:
            raise ValueError(
                f"expected a sample whose prompt is the {len(self.tokens)} tokens so far, "
                f"got another prompt of {len(sample.prompt_ids)}; fix: sample([episode.tokens])"
            )
        self.tokens += sample.token_ids
        self._logprobs += sample.logprobs.tolist()
        self._turns += [len(self.samples)] * len(sample.token_ids)
        self.samples.append(sample)

    def add_text(self, text: str) -> None:
        """Append a text of the environment, without special tokens around it."""
        self.add_tokens(self._tokenizer.encode(text))

    def add_tokens(self, ids: Sequence[int]) -> None:
        """Append tokens of the environment."""
        self.tokens += map(int, ids)
        self._logprobs += [0.0] * len(ids)
        self._turns += [-1] * len(ids)

    def datum(self, advantage: float | Sequence[float]) -> Datum:
        """Return the episode with one advantage, or with one for each turn. Raises ValueError."""
        num_turns = len(self.samples)
        if not num_turns:
            raise ValueError("expected an episode with a turn of the policy, got none")
        by_turn = np.asarray(advantage, np.float32)
        if by_turn.ndim == 0:
            by_turn = np.full(num_turns, by_turn)
        if by_turn.shape != (num_turns,):
            raise ValueError(
                f"expected an advantage or one for each of {num_turns} turns, got {advantage!r:.60}"
            )
        end = max(place for place, turn in enumerate(self._turns) if turn >= 0) + 1
        turns_T = np.asarray(self._turns[1:end])
        is_policy_T = turns_T >= 0
        samplings = {sample.sampling for sample in self.samples}
        return Datum(
            tokens=self.tokens[: end - 1],
            targets=self.tokens[1:end],
            weights=is_policy_T.astype(np.float32),
            logprobs=np.asarray(self._logprobs[1:end], np.float32),
            advantages=np.where(is_policy_T, by_turn[turns_T], 0).astype(np.float32),
            sampling=samplings.pop() if len(samplings) == 1 else None,
        )

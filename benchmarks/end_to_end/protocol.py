"""How `benchmarks.end_to_end` drives a system: one process each, JSON lines over its pipes.

The process prints its variants and versions, receives `{"do": "prepare", …}` with the fields of
`Given`, and then blocks at the start of each training step, where it answers the command before
and takes the next ones: `{"do": "step"}` is one whole GRPO step, `{"do": "save", "folder": F}`
writes the policy's weights, `{"do": "memory"}` returns the peak of resident memory. The input's end
ends the process. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.end_to_end import reward

WEIGHTS = "model.safetensors"  # all that `save` needs to write; the rest is the policy's own


@dataclasses.dataclass(frozen=True)
class Given:
    """A system's work: the same for all, but for `variant` and `scratch`, a folder of its own."""

    policy: str
    config: str  # of ours: a .gin file, for the engine's sizes
    task: str  # JSON lines with prompt and answer, in the order of training
    reward: str  # a name in `reward`
    prompts_per_step: int
    group_size: int
    max_new_tokens: int
    learning_rate: float
    updates_per_step: int
    seed: int
    variant: str
    scratch: str
    environment: str = (
        ""  # a name in `tasks.WORK`: episodes of several turns; `max_new_tokens` each
    )

    @property
    def score(self) -> Callable[..., list[float]]:
        return getattr(reward, self.reward)

    @property
    def responses(self) -> int:
        return self.prompts_per_step * self.group_size

    def rows(self) -> list[dict[str, str]]:
        """Return the questions, in the order of training."""
        return [json.loads(line) for line in Path(self.task).read_text("utf-8").splitlines()]


class Parent:
    """The process that gives the commands."""

    def __init__(self, variants: Sequence[str], packages: Sequence[str]) -> None:
        """Introduce this process; what libraries print goes to stderr from now on."""
        from benchmarks.environment import versions

        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._answer({"variants": variants, "versions": versions(packages)})
        command = json.loads(sys.stdin.readline())
        self.given = Given(**{name: x for name, x in command.items() if name != "do"})

    def next_step(self, figures: Mapping[str, Any], save: Callable[[Path], object]) -> bool:
        """Answer the command before with `figures`; return at the next step, or False at the end.

        `save` writes the weights into a folder.
        """
        self._answer(figures)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "step":
                return True
            if command["do"] == "save":
                save(Path(command["folder"]))
                self._answer({})
            else:
                peak_KiB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                self._answer({"peak_mib": round(peak_KiB / 1024)})
        return False

    def _answer(self, figures: Mapping[str, Any]) -> None:
        print(json.dumps(figures), file=self._answers)


class Step:
    """Seconds of a step's parts. The update is the step but for responses and rewards."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._spent_s = {"rollout": 0.0, "reward": 0.0}
        self.rewards: list[float] = []
        self.tokens = 0

    def timed(self, part: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call, and add the seconds to `part`."""
        began_s = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            self._spent_s[part] += time.perf_counter() - began_s

    def figures(self) -> dict[str, Any]:
        """Return the answer to the command that began this step."""
        taken_s, rollout_s = time.perf_counter() - self._began_s, self._spent_s["rollout"]
        return {
            "reward": sum(self.rewards) / max(len(self.rewards), 1),
            "tokens": self.tokens,
            "rollout_s": rollout_s,
            "update_s": taken_s - rollout_s - self._spent_s["reward"],
        }


def prompt_text(tokenizer: Any, prompt: str) -> str:
    """Return a prompt in the tokenizer's chat template, or as it is without one."""
    if not tokenizer.chat_template:
        return prompt
    turn = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
